"""The flags by which every command that listens is told who may connect.

They are names for the `security` group of a run's config, and win over what a file and the environment say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monolith.cluster.security import Guard, Role, SecurityConfig
    from monolith.run import RunConfig
    from monolith.wire.ports import Limits

_FIELDS = {
    "tls_cert": "cert",
    "tls_key": "key",
    "tls_ca": "ca",
    "tls_server_name": "server_name",
    "token_file": "token_file",
    "follow_token_file": "follow_token_file",
    "predict_token_file": "predict_token_file",
}
"""Option -> the field of `security` that it sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityOptions:
    """Who may connect, and what to show to others; part of a command's own options, without a prefix."""

    tls_cert: Path | None = None
    """The certificate of this process, PEM. It needs --tls-key and --tls-ca; both ends then show one."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that must have signed the certificates of the others, PEM."""
    tls_server_name: str | None = None
    """The name in the servers' certificates, where it is not the host they are reached by."""
    token_file: Path | None = None
    """A file with the token for everything, which the processes of a run share."""
    follow_token_file: Path | None = None
    """A file with the token for following a run, and for the rows of serving servers. By default derived from
    that of --token-file, or found in the model_dir that the served export was made from."""
    predict_token_file: Path | None = None
    """A file with the token for asking for predictions. By default derived from that of --token-file."""
    config: Path | None = None
    """A config file of the run, whose group security has the same settings; flags win over it."""
    insecure: bool = False
    """Listen without certificates or a token on an address that others can reach."""


def guard_of(
    options: SecurityOptions, bind: str, environ: Mapping[str, str], *, role: Role = "control"
) -> Guard:
    """Return what a listener on `bind` demands of callers in a role, and its process presents.

    Raises:
        ConfigError: Others can reach that address and nothing is demanded of them; or a file cannot be used.
    """
    from monolith.cluster.security import guard_listener

    security = _run_config(options, environ).security
    return guard_listener(bind, security, role=role, insecure=options.insecure)


def security_of(options: SecurityOptions, environ: Mapping[str, str]) -> SecurityConfig:
    """Return what flags, the run's config and the environment say of certificates and tokens."""
    return _run_config(options, environ).security


def limits_of(options: SecurityOptions, environ: Mapping[str, str]) -> Limits:
    """Return what one caller of a listener may ask for, by the run's config and the environment."""
    return _run_config(options, environ).limits


def _run_config(options: SecurityOptions, environ: Mapping[str, str]) -> RunConfig:
    from monolith.run import load_run_config

    chosen = {
        f"security.{field}": getattr(options, name)
        for name, field in _FIELDS.items()
        if getattr(options, name) is not None
    }
    return load_run_config(file=options.config, environ=environ, code=chosen)
