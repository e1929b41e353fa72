"""The options of `monolith top` and `status`, apart from what runs them: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Sort = Literal["worst", "name", "examples", "steps", "lag", "staleness", "rows", "bytes", "restarts", "age"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusOptions:
    """Print once how a training job stands: its processes, failed saves, publishing, missing standbys.

    The exit status is 0 if all is well, and 1 if some process is in trouble.
    """

    run: str
    """The model_dir of a run, or http(s)://host:port of the metrics of one of its processes
    (`monolith train --metrics-port`)."""
    json: bool = False
    """Print how the job stands now as one JSON object, and end."""
    token_file: Path | None = None
    """A file with the token of the run, where a URL asks for one."""
    tls_cert: Path | None = None
    """The certificate to show to a URL that wants one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the process, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions(StatusOptions):
    """Watch a training job: its processes, how fast they are, and which of them are in trouble."""

    every: float = 2.0
    """Seconds between two looks."""
    sort: Sort = "worst"
    """What comes first: processes in trouble, or those with the most of something."""
    rows: int | None = None
    """How many processes to show; by default as many as the terminal has lines for, and 0 shows all."""
    once: bool = False
    """Print how the job stands now as plain text, and end, as `monolith status` does."""
