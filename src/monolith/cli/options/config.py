"""The options of `monolith config ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigInitOptions:
    """Write a config file to begin with, every field in it explained."""

    kind: Literal["local", "ps", "sync", "serve"]
    """One process; parameter servers; ranks that step together; a server of requests."""
    to: Path | None = None
    """The file to write, which must not exist; by default standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigExplainOptions:
    """Say what a field of the config does, by its new name or an old one; or list a group, or all."""

    field: str
    """A field such as cluster.num_ps or num_ps, a group such as cluster, or all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigCheckOptions:
    """Name everything for which training would refuse a config file. The task itself is not looked at."""

    file: Path
    """TOML or JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigShowOptions:
    """Print a config file with every default and decision spelled out, secrets masked."""

    file: Path
    """TOML or JSON."""
    environment: bool = False
    """Lay what the environment says over it, as a run would."""
