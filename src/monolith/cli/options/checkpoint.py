"""The options of `monolith checkpoint ...`, apart from what runs it: reading them must not load torch.

Wherever a checkpoint is asked for, a run's folder means its latest one, and a run's config file its folder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListOptions:
    """List the checkpoints of a run: how old and how large, why each is kept, and whether it is intact."""

    run_dir: str
    """The folder of a run, or its config file."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInspectOptions:
    """Look into a checkpoint: its tables, weights, filters and position; or at the row of one id."""

    checkpoint: str
    """A run's folder or config file, or a checkpoint such as runs/1/model.ckpt-100."""
    table: str | None = None
    """The table to show; by default all."""
    id: int | None = None
    """Show what the table holds for this id, and which checkpoint wrote it."""
    verify: bool = False
    """Read and check every byte, also of the checkpoints that this one continues."""
    variables: int = 20
    """Dense variables to show; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDiffOptions:
    """Compare two checkpoints: rows added, removed and changed, weights changed, data read between."""

    before: str
    """A run's folder or config file, or a checkpoint."""
    after: str
    """The checkpoint to compare it with, or a run's folder."""
    tables: tuple[str, ...] = ()
    """Tables to compare; by default all."""
    top: int = 5
    """Rows to show of each table: those that changed most."""
    variables: int = 20
    """Dense variables to show; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReshardOptions:
    """Write a checkpoint to another folder, as a full one in another number of files."""

    checkpoint: str
    """A run's folder or config file, or a checkpoint. An increment is put together with those before it."""
    to: str = ""
    """The folder to write to; the checkpoint becomes its latest."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointExportOptions:
    """Write a checkpoint for other programs: tables as EntryDump TFRecords, weights as safetensors."""

    checkpoint: str
    """A run's folder or config file, or a checkpoint."""
    to: str = ""
    """The folder to write to."""
    tables: tuple[str, ...] = ()
    """Tables to export; by default all."""
    dense: bool = True
    """Whether dense weights are exported, too; --no-dense leaves them out."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCompactOptions:
    """Turn the last increment of a chain into a full checkpoint, so that earlier ones can be deleted."""

    checkpoint: str
    """A run's folder or config file, or a checkpoint. No process may train there meanwhile."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""
