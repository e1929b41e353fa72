"""The options of `monolith checkpoint ...`, apart from what runs it: reading them must not load torch.

Wherever a checkpoint is asked for, a run's folder means its latest one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointListOptions:
    """List the checkpoints of a run: how old and how large, why each is kept, and whether it is sound."""

    run_dir: str
    """The folder of a run."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInspectOptions:
    """Look into a checkpoint: its tables, weights, filters and position; or at the row of one id."""

    checkpoint: str
    """A run's folder, or a checkpoint such as runs/1/model.ckpt-100."""
    table: str | None = None
    """Only this table."""
    id: int | None = None
    """Show what the table holds for this id, and which checkpoint wrote it."""
    verify: bool = False
    """Read and check every byte, of the checkpoints it continues too."""
    variables: int = 20
    """Dense variables to show; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDiffOptions:
    """Compare two checkpoints: rows that came, went and changed, weights that moved, data read since."""

    before: str
    """A run's folder, or a checkpoint."""
    after: str
    """Another one."""
    tables: tuple[str, ...] = ()
    """Tables to compare; by default all."""
    top: int = 5
    """Rows to show of each table, those that moved furthest."""
    variables: int = 20
    """Dense variables to show; 0 shows all."""
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReshardOptions:
    """Write a checkpoint to another folder, as a full one in another number of files."""

    checkpoint: str
    """A run's folder, or a checkpoint. An increment is put together with those it continues."""
    to: str = ""
    """The folder to write to; the checkpoint is its latest then."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointExportOptions:
    """Write a checkpoint for other programs: tables as EntryDump TFRecords, weights as safetensors."""

    checkpoint: str
    """A run's folder, or a checkpoint."""
    to: str = ""
    """The folder to write to."""
    tables: tuple[str, ...] = ()
    """Tables to export; by default all."""
    dense: bool = True
    """The dense weights too; --no-dense leaves them out."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCompactOptions:
    """Turn the last increment of a chain into a full checkpoint, so that those it continues may go."""

    checkpoint: str
    """A run's folder, or a checkpoint. Nobody may train there meanwhile."""
    num_shards: int | None = None
    """Files per table; by default one per million rows, up to 4."""
    json: bool = False
    """Print one JSON object."""
