"""The options of `monolith profile`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Show where the time of a running job goes: its functions, and a trace for Perfetto or chrome://tracing.

    Works for every job of the same user on this machine, without a flag when it starts. Processes on other
    machines are reached if the run was started with --control, or by MLP.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[JOB]")] = ""
    """The job: its name, its model_dir, the folder that a server serves, or the process id of one of its
    processes; or http(s)://host:port of the metrics of a process elsewhere. Not needed if one job runs;
    with several, they are listed."""
    process: tuple[str, ...] = ()
    """The processes to profile, such as worker-0 ps-1 data_worker-0 serve-0; by default all."""
    seconds: float = 10.0
    """How long to record, at most 120 seconds."""
    steps: int = 0
    """End after so many steps instead, if that is earlier; only workers take steps."""
    to: Path | None = None
    """The folder for the traces; by default profile/ of the model_dir, or of the current folder."""
    json: bool = False
    """Print one JSON object on standard output: for each process its trace, or the error."""
    token_file: Path | None = None
    """A file with the token of the run; by default the one that a run of this user left in its model_dir."""
    tls_cert: Path | None = None
    """The certificate to show to processes that want one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificates of the processes, PEM."""
