"""The options of `monolith checkpoint ...`, apart from what runs it: reading them must not load torch.

Wherever a checkpoint is asked for, a run's folder means its latest one, and a run's config file its folder.
With `--config`, a checkpoint is one of that run, by name, step or `best`; none means the latest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from monolith.cli.options.train import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOfRun:
    """What all of them have: whose checkpoints."""

    config: Path | None = None
    """The config file of the run, whose checkpoints are meant: one is then named as model.ckpt-30, 30 or
    best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListOptions(CheckpointOfRun):
    """List the checkpoints of a run: how old and how large, why each is kept, and whether it is intact."""

    run_dir: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN-DIR]")] = None
    """The folder of a run, or its config file."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInspectOptions(CheckpointOfRun):
    """Look into a checkpoint: its tables, weights, filters and position; or at the row of one id."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """A run's folder or config file, or a checkpoint such as runs/1/model.ckpt-100."""
    table: str | None = None
    """The table to show; by default all."""
    id: str | None = None
    """Show the row of this value, as it is in the data, or of this 64-bit id, and where it was written."""
    feature: str | None = None
    """The feature whose value --id is, where several features have a row for it."""
    verify: bool = False
    """Read and check every byte, also of the checkpoints that this one continues."""
    details: bool = False
    """Show dense variables, the settings of features and the position in the data, not only a summary."""
    variables: int = 20
    """Dense variables to show with --details; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDiffOptions(CheckpointOfRun):
    """Compare two checkpoints: rows added, removed and changed, weights changed, data read between."""

    before: str
    """A run's folder or config file, or a checkpoint."""
    after: str
    """The checkpoint to compare it with, or a run's folder."""
    tables: tuple[str, ...] = ()
    """Tables to compare; by default all."""
    details: bool = False
    """Show the rows and variables that changed most and positions in the data, not only a summary."""
    top: int = 5
    """Rows to show of each table with --details: those that changed most."""
    variables: int = 20
    """Dense variables to show with --details; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReshardOptions(CheckpointOfRun):
    """Write a checkpoint to another folder, as a full one in another number of files."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """A run's folder or config file, or a checkpoint. An increment is put together with those before it."""
    to: str = ""
    """The folder to write to; the checkpoint becomes its latest."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointExportOptions(CheckpointOfRun):
    """Write a checkpoint for other programs: tables as EntryDump TFRecords, weights as safetensors; or
    all of it as the original system writes it, for that and for TensorFlow to read."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """A run's folder or config file, or a checkpoint."""
    to: str = ""
    """The folder to write to."""
    tables: tuple[str, ...] = ()
    """Tables to export; by default all."""
    dense: bool = True
    """Whether dense weights are exported, too; --no-dense leaves them out."""
    format: Literal["plain", "original", "original-multi"] = "plain"
    """plain writes table dumps and dense.safetensors. original writes a checkpoint of the original system:
    model.ckpt-<step>.index and .data for TensorFlow, with the optimizer's slots, and a dump per table in
    model.ckpt-<step>.assets; original-multi writes all tables to one compressed dump."""
    names: str | None = None
    """With --format original: a TOML or JSON file with the original's names; see checkpoint import."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCompactOptions(CheckpointOfRun):
    """Turn the last increment of a chain into a full checkpoint, so that earlier ones can be deleted."""

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """A run's folder or config file, or a checkpoint. No process may train there meanwhile."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointImportOptions(CheckpointOfRun):
    """Import a checkpoint of the original system: its table dumps and its TensorFlow variables become the
    first checkpoint of a run, which train, evaluate and export then restore.

    The task says which tables and weights there are. A name map says what the original calls them:
    {"tables": {"MonolithHashTable_item_*": "item"}, "variables": {"tower/kernel": {"name": "tower.weight",
    "transpose": true}, "old/**": false}}, as TOML or JSON. Needs memory for all rows.
    """

    source: str
    """A checkpoint of the original such as old/model.ckpt-100, or its folder, whose latest one is meant."""
    task: str | None = None
    """The task: package.module:Name or path/to/file.py:Name; by default job.task of the config."""
    model_dir: str | None = None
    """The folder of the new run; by default train.model_dir of the config. It must have no checkpoint."""
    set: Settings = ()
    """A setting of the task, as key=value; may be given several times."""
    names: str | None = None
    """The name map, a TOML or JSON file. Without it, names must be the same but for / and ."""
    step: int | None = None
    """The step to resume from; by default the original's global_step."""
    partial: bool = False
    """Start tables and weights that the original lacks as the model makes them, instead of failing."""
    dry_run: bool = False
    """Read and check everything, print the table, and write no checkpoint."""
    shown: int = 20
    """Loaded names to print; 0 prints all. Those that are left out are all printed."""
    json: bool = False
    """Print one JSON object."""
