"""The options of `monolith publish`, apart from what runs it: reading them must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishStatusOptions:
    """Say what a run publishes: how far each share is, whether it is held, and why."""

    run: str
    """The model_dir of a run, or host:port of the control server of its chief."""
    json: bool = False
    """Print one JSON object on standard output."""
    token_file: Path | None = None
    """A file with the token of the run; by default the one that a run of this user left in its model_dir."""
    tls_cert: Path | None = None
    """The certificate to show to a run that wants one, PEM; it needs --tls-key and --tls-ca."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that has signed the certificate of the run, PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishHoldOptions(PublishStatusOptions):
    """Hold back what a run publishes: servers stay as they are, and training goes on."""

    reason: str = "held by hand"
    """Why, for those who look at the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResumeOptions(PublishStatusOptions):
    """Publish again: servers that follow get the current rows. Versions that were withheld stay so."""

    include_withheld: bool = False
    """Let servers also take the versions that were withheld: their rows turned out to be good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishRollbackOptions(PublishStatusOptions):
    """Take all servers back to an exported version, and hold publishing until it is resumed."""

    version: str
    """The version, the name of a folder that each server has, such as 1200."""
