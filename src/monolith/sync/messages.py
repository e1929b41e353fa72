"""Messages of a delta channel: what changed in one share of a model's rows, and what a share holds.

A share is what one holder of rows has: a process that trains alone has the only one, each parameter server
and each rank has its own. Its changes are numbered; the numbers mean something within one epoch, which names
one history of the share. A run that is rewound or restored, or a process that does not know what was
published before it, begins another epoch.

A delta may be applied twice: its rows replace those of the same ids, by values that may be newer than its
number says and are never older. So a snapshot need not be of one moment: it is whole once the deltas that
were published while it was made have been applied after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.table import Rows
from monolith.table import digests as table_digests

BUCKETS = table_digests.BUCKETS
"""Of ids, for digests: the bucket of an id is the top 12 bits of its hash."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """How far the log of a share has been written, or read."""

    epoch: str
    """Names one history; sequences of two epochs cannot be compared."""
    sequence: int
    """Of the newest delta; 0 before the first."""


@dataclass(frozen=True, slots=True)
class LearnedUpTo:
    """What a message has learned from, and when. Times are Unix seconds; 0 where nobody knows."""

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
    """The rows of the message have no update of a later step; 0 where nobody knows. Rows are read while they
    are trained, so it may be some steps after `step`, up to which all updates are in."""


@dataclass(frozen=True, slots=True)
class Digests:
    """What some buckets of a table hold, in few bytes, after the delta that carries it has been applied.

    A bucket whose rows changed while they were read is left out.
    """

    buckets: Tensor
    """int64 of shape (n,), ascending."""
    sums: Tensor
    """int64 of shape (n,): the sum, modulo 2**64, of a hash of each row's id and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What changed in a share since its delta before."""

    run: str
    share: IdShare
    place: LogPlace
    learned: LearnedUpTo
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Table to rows as they are now; without state (of width 0) unless the channel is for standbys."""
    removed: Mapping[str, Tensor] = field(default_factory=dict)
    """Table to ids, int64, that have no row any more: evicted, expired, removed."""
    dense: Mapping[str, Tensor] | None = None
    """All dense weights by name, where this delta brings them; one share of a model does."""
    digests: Mapping[str, Digests] = field(default_factory=dict)
    """Table to what some of its buckets hold."""
    complete: bool = True
    """Whether all that changed up to `learned.step` is in this delta and those before it. False of all but
    the last of several deltas that were made at once, since there was too much for one."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotBegin:
    """The rows of a share follow, in place of all that the reader has of it."""

    run: str
    share: IdShare
    place: LogPlace
    """Deltas after it complete the snapshot."""
    learned: LearnedUpTo
    buckets: Tensor | None = None
    """int64, ascending: the buckets that follow, the others stay as they are. None: all of them."""
    dense: Mapping[str, Tensor] | None = None
    snapshot: str = ""
    """Names this snapshot, so that what is late of another is not taken for a part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotRows:
    """Some rows of the snapshot that was begun."""

    table: str
    rows: Rows
    snapshot: str = ""
    """As the begin of the snapshot says."""
    number: int = 0
    """Of this message among those with rows, from 0."""


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """All rows have been sent."""

    place: LogPlace
    """As the begin of the snapshot says."""
    whole_at: LogPlace
    """The newest delta that was being made when the last row was read: with it applied, nothing of the
    snapshot is in between, and digests after it can be compared."""
    snapshot: str = ""
    """As the begin of the snapshot says."""
    chunks: int | None = None
    """How many messages with rows there were; None where nobody counted, and none can be lost on the way."""


@dataclass(frozen=True, slots=True)
class PublishState:
    """Whether new deltas are let out, and what servers are to serve."""

    held: bool = False
    reason: str = ""
    """Why it is held, in words for a person."""
    since: float = 0.0
    """Unix seconds."""
    version: str | None = None
    """The exported version that servers go back to; None: what the deltas say."""
    number: int = 0
    """Rises with every change: the newest state of a publisher counts."""
    publisher: str = ""
    """Names who says so. Another one knows nothing of the numbers before it: its word counts, whatever they
    were."""


Message = Delta | SnapshotBegin | SnapshotRows | SnapshotEnd | PublishState
