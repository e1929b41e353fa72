"""The options of `monolith profile`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Record what the processes of a running job do, into profile/ of its model_dir, for chrome://tracing.

    Each process writes a file of its own. The run must have been started with --control, or by MLP.
    """

    run: str
    """The model_dir of a run, or http(s)://host:port of the metrics of one of its processes
    (`monolith train --metrics-port`)."""
    process: tuple[str, ...] = ()
    """The processes to profile, such as worker-0 ps-1 data_worker-0 dispatcher-0; by default all."""
    seconds: float = 10.0
    """How long to record, at most 120 seconds."""
    steps: int = 0
    """End after so many steps instead, if that is earlier; only workers take steps."""
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
