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
    on a type, such as model.dim, model.two_tower (all of a type), features.user.kind or task.batch_size."""
    task: str | None = None
    """Your own task, package.module:Name or path/to/file.py:Name, whose settings task.* are; by default those
    of a task by config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigTokenOptions:
    """Print the token of a role, to hand to a process that may do no more than that."""

    role: Literal["follow", "predict"]
    """follow: read the rows that a run publishes; predict: ask a model server for predictions."""
    model_dir: Path | None = None
    """The model_dir of a run that was not given a token: it has one there, in the file run_token."""
    token_file: Path | None = None
    """The file with the token for everything, for a run that was given one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigCheckOptions:
    """List everything for which `monolith train` would refuse a config file, or the data it names.

    Makes the task and its model, opens the data and reads a sample of it: files and columns that are missing,
    values of the wrong kind, labels that do not fit their loss.
    """

    file: Path
    """A config file, TOML or JSON."""
    no_data: bool = False
    """Check the file alone: the task is not imported and no data is opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigShowOptions:
    """Print the whole run that a config file describes: every default spelled out, secrets masked."""

    file: Path
    """A config file, TOML or JSON."""
    environment: bool = False
    """Apply the variables of the environment, as a run would."""
