"""The options of `monolith config ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigInitOptions:
    """Write a config file to begin with, every field in it explained."""

    kind: Literal["local", "ps"]
    """The kind of run: local is one process, ps has parameter servers and workers."""
    to: Path | None = None
    """The TOML file to write, which must not exist; by default standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigExplainOptions:
    """Explain a field of the config, by its new name or an old one; or list a group, or all fields."""

    field: str
    """A field such as train.save.steps or num_ps, a group such as train.save, or all; or a key that depends
    on a type, such as model.dim, model.two_tower (all of a type) or features.user.kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigCheckOptions:
    """List everything for which `monolith train` would refuse a config file. The task is not imported."""

    file: Path
    """A config file, TOML or JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigShowOptions:
    """Print the whole run that a config file describes: every default spelled out, secrets masked."""

    file: Path
    """A config file, TOML or JSON."""
    environment: bool = False
    """Apply the variables of the environment, as a run would."""
