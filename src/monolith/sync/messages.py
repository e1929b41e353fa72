"""Messages of a delta channel: what changed in one shard of a model's rows, and what a shard contains.

A shard is the rows of one process: a run of one process has one shard, each parameter server and each rank
has its own. The changes of a shard form a log. Each delta has a sequence number; numbers can be compared
within one epoch, which names one history of the shard. A new epoch starts whenever the log cannot continue:
a run is rolled back or restored, or a publisher restarts and does not know what its predecessor published.

    epoch 9f..  delta 1, delta 2, delta 3          -> restored from a checkpoint ->  epoch 4c..  delta 1, ...

Applying a delta twice is harmless. It replaces whole rows, with values that may be newer than its number says
and are never older. For the same reason a snapshot need not be of one moment: rows change while it is read,
and it is consistent once the deltas published meanwhile have been applied on top of it.

Shapes: a shard has t tables; a table with rows of width d sends n rows as ids (n,), event times (n,), values
(n, d) and optimizer state (n, s), with s = 0 unless the reader is a standby. Example:

    Delta("run", (0, 2), LogPosition("9f", 7), LearnedUpTo(step=100), rows={"item": rows_of_3_ids})
    -> a subscriber at ("9f", 6) replaces those 3 rows and is at ("9f", 7)
    -> a subscriber at ("9f", 4) misses 5 and 6: it reads again after 4, or takes a snapshot
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from monolith import concurrency, filesystem
from monolith.checkpoint.saved_tables import IdShard
from monolith.table import Rows
from monolith.table import digests as table_digests

BUCKETS = table_digests.BUCKETS
"""Number of buckets of ids that digests are computed for: an id's bucket is the top 12 bits of its hash."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far the log of a shard has been written or read."""

    epoch: str
    """Names one history; sequence numbers of two epochs cannot be compared."""
    sequence: int
    """Number of the newest delta; 0 before the first."""


@dataclass(frozen=True, slots=True)
class LearnedUpTo:
    """The training progress that a message contains. Times are Unix seconds; 0 means unknown."""

    step: int = 0
    watermark: int = 0
    """Event time that nearly all events trained on had reached."""
    event_at: float = 0.0
    """Event time of the newest event among them."""
    read_at: float = 0.0
    """When that event's batch was read."""
    trained_at: float = 0.0
    """When the step that trained on it was done."""
    published_at: float = 0.0
    """When the message was made."""
    newest_step: int = 0
    """The rows of the message have no update of a later step; 0 means unknown. Rows are read while they are
    trained, so it may be some steps after `step`, up to which all updates are in."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Checksums of some buckets of a table, valid after the delta that carries them has been applied.

    A bucket whose rows changed while they were read is left out.
    """

    buckets: Tensor
    """int64 of shape (n,), ascending."""
    sums: Tensor
    """int64 of shape (n,): the sum, modulo 2**64, of a hash of each row's id and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The changes of a shard since the delta before.

    Shapes: n changed rows of d floats per table (`Rows`), m removed ids, int64 (m,).
    """

    run: str
    shard: IdShard
    position: LogPosition
    learned: LearnedUpTo
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Table to current rows; without optimizer state (of width 0) unless the channel is for standbys."""
    removed: Mapping[str, Tensor] = field(default_factory=dict)
    """Table to ids, int64, that have no row any more: evicted, expired, removed."""
    dense: Mapping[str, Tensor] | None = None
    """All dense weights by name, or None if this delta has none; one shard of a model publishes them."""
    digests: Mapping[str, Digests] = field(default_factory=dict)
    """Table to the checksums of some of its buckets."""
    complete: bool = True
    """Whether all changes up to `learned.step` are in this delta and those before it. If one publication is
    too large for one delta, it is split into several, and only the last one is complete."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotBegin:
    """Announces the rows of a shard, which replace everything that the reader has of it."""

    run: str
    shard: IdShard
    position: LogPosition
    """Deltas after it complete the snapshot."""
    learned: LearnedUpTo
    buckets: Tensor | None = None
    """int64, ascending: the snapshot has these buckets only, the rest stays as it is. None: all buckets."""
    dense: Mapping[str, Tensor] | None = None
    snapshot: str = ""
    """Names this snapshot, so that late messages of another are not taken for a part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotRows:
    """Some rows of the snapshot that was announced."""

    table: str
    rows: Rows
    snapshot: str = ""
    """The name that `SnapshotBegin` gave."""
    number: int = 0
    """Number of this message among those with rows, from 0."""


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """Ends a snapshot: all rows have been sent."""

    position: LogPosition
    """The position that `SnapshotBegin` gave."""
    whole_at: LogPosition
    """The newest delta that was being made when the last row was read: once it is applied, no row of the
    snapshot is in between two deltas, and digests after it can be compared."""
    snapshot: str = ""
    """The name that `SnapshotBegin` gave."""
    chunks: int | None = None
    """Number of messages with rows; None if they were not counted because the channel loses none."""


@dataclass(frozen=True, slots=True)
class PublishState:
    """Whether publishing is paused, and which version servers serve meanwhile."""

    paused: bool = False
    reason: str = ""
    """Why it is paused, for an operator."""
    since: float = 0.0
    """Unix seconds."""
    version: str | None = None
    """The exported version that servers roll back to; None: they serve the published rows."""
    number: int = 0
    """Rises with every change: the newest state of a publisher counts."""
    publisher: str = ""
    """Names the publisher. A new publisher does not know the numbers of the one before, so its state counts
    whatever its number."""


Message = Delta | SnapshotBegin | SnapshotRows | SnapshotEnd | PublishState


# The identity of a run: what a subscriber compares before it takes rows of a publisher. It is the run's
# folder and a random id that the first publisher leaves there, `FOLDER#ID`. A restarted trainer finds the id
# and so is the same run; another run in a folder of the same name, on another machine or after the folder was
# emptied, is not. The URL of a remote folder is unique and needs no id.

ID_FILE = "run_id"
_ID = re.compile("[0-9a-f]{16}")
_IDENTITY = re.compile(r"(.*)#([0-9a-f]{16})", re.DOTALL)


def run_identity(folder: str, *, make: bool = False) -> str:
    """Return the identity of the run whose checkpoints are in a folder; the folder alone if it has no id.

    Args:
        make: Write an id if there is none. If several processes do so at once, one id wins and all use it.
    """
    if filesystem.is_remote(folder):
        return folder
    path = Path(folder) / ID_FILE
    try:
        if make and not path.exists():
            filesystem.make_dirs(path.parent)
            own = Path(filesystem.temporary(path))
            with filesystem.atomic_write(own) as made:
                made.write(concurrency.token_hex(8).encode())
            with suppress(FileExistsError):
                os.link(own, path)  # atomic, and never replaces an existing id
            own.unlink()
        with path.open() as file:
            text = file.read(64).strip()
    except FileNotFoundError:
        return folder
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("the run in %s is known by its folder alone: its id cannot be read (%s)", folder, error)
        return folder
    return f"{folder}#{text}" if _ID.fullmatch(text) else folder


def is_same_run(one: str, other: str) -> bool:
    """Whether two identities are of one run: by their ids, or by their folders if one has no id."""
    (folder, number), (other_folder, other_number) = split_identity(one), split_identity(other)
    if number and other_number:
        return number == other_number
    return folder == other_folder


def split_identity(identity: str) -> tuple[str, str]:
    """Return the folder and the id of a run; the id is empty if it has none."""
    found = _IDENTITY.fullmatch(identity)
    return (identity, "") if found is None else (found[1], found[2])
