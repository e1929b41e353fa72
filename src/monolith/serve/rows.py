"""The rows of an answer: where they come from, and how new they are.

A predictor looks up all rows of a batch in one call on a `RowSource` and does not know where they are: mapped
from files of this machine (`MappedRows`), or spread over serving servers (`shards.RemoteRows`).

Every answer carries a claim about the rows it was made of:

    step          every row includes all updates up to this training step
    newest_step   no row includes an update of a later step
    staleness     seconds since the oldest part of the rows was published, or exported
    freshness     "unknown", with `freshness_reason` and none of the above, if nothing can be promised

Rows change in place while requests read them. So a lookup reads the claim twice, before and after the rows: a
promise from before still holds, unless rows may have been rolled back since, and no row is newer than the
claim from after. The thread that changes rows announces it (`ClaimCell.applying`) and confirms it
(`applied`):

    known ──applying a delta──► known, `newest_step` rises ──applied──► known, `step` rises
      │                                                                   ▲
      └──applying rows of a snapshot──► unknown ──applied, or a delta──────┘

A snapshot may come from a history in which the run was rolled back to an earlier checkpoint: some rows become
older than the claim while others are still newer. Nothing can be promised in between.

An event passes five stages until an answer includes it: it is *read*, *trained* on, *published*, sent over
the *wire* and *applied*. Publishers stamp their messages with the ends of the first three by their clock. If
the clocks of the two machines differ, the difference is corrected if the channel can measure it, and named in
the answer: a time between two clocks that differ is never reported as if it were right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from monolith import concurrency
from monolith.feature import FeatureIds, Gatherer
from monolith.feature.gathering import PackedFeatures
from monolith.store import TableIds
from monolith.sync.messages import LearnedUpTo
from monolith.table import FrozenTable, FrozenTables, OverlaidTables
from monolith.table.overlaid_tables import hash_spans

Said = dict[str, bool | int | float | str]
"""The claim of an answer, as parameters of the Open Inference Protocol."""


@dataclass(frozen=True, slots=True)
class RowsClaim:
    """How new some rows are. Times are Unix seconds.

    Example: step 500, newest_step 503, as_of 1000.0, read at 1000.4, is sent as
    {"step": 500, "newest_step": 503, "staleness": 0.4}.
    """

    step: int
    newest_step: int | None
    """None if it is not known, as after a snapshot of rows that were being trained."""
    as_of: float
    """When the oldest part of the rows was published, or exported."""
    watermark: int = 0
    """Event time that nearly all events trained on had reached; 0 if events have none."""
    times: Mapping[str, float] = field(default_factory=dict)
    """When the newest event of the oldest part happened, was read, trained, published, received, applied."""
    history: int = 0
    """Rises whenever rows may have been rolled back."""
    clock_differs_by: float = 0.0
    """Seconds by which the clock of the publisher of the oldest part is ahead of ours; 0 if they agree."""
    unknown: str = ""
    """Why nothing can be promised; empty if something can."""

    def said(self, now: float) -> Said:
        """Return the parameters of an answer at a time."""
        if self.unknown:
            return {"freshness": "unknown", "freshness_reason": self.unknown}
        said: Said = {"step": self.step}
        if self.newest_step is not None:
            said["newest_step"] = self.newest_step
        if self.watermark:
            said["watermark"] = self.watermark
        said["staleness"] = round(max(0.0, now - self.as_of), 3)
        if self.clock_differs_by:
            said["clock_differs_by"] = round(self.clock_differs_by, 1)
        said.update({name: round(at, 6) for name, at in self.times.items() if at > 0})
        return said


UNKNOWN = RowsClaim(0, None, 0.0, unknown="the source of the rows did not say how new they are")


def spanning(before: RowsClaim, after: RowsClaim) -> RowsClaim:
    """Return the claim of rows that were read between two readings of their claim."""
    if before is after:
        return before
    unknown = before.unknown or after.unknown
    if not unknown and before.history != after.history:
        unknown = "rows of another history were applied while the rows were read"
    newest = None if before.newest_step is None or after.newest_step is None else after.newest_step
    return replace(before, newest_step=newest, unknown=unknown)


def together(claims: Sequence[RowsClaim]) -> RowsClaim:
    """Return the claim that holds for the rows of several claims together."""
    if len(claims) == 1:
        return claims[0]
    if not claims:
        return UNKNOWN
    oldest = min(claims, key=lambda one: one.as_of)
    newest = [one.newest_step for one in claims if one.newest_step is not None]
    return replace(
        oldest,
        step=min(one.step for one in claims),
        newest_step=max(newest) if len(newest) == len(claims) else None,
        watermark=min(one.watermark for one in claims),
        unknown=next((one.unknown for one in claims if one.unknown), ""),
    )


class ClaimCell:
    """The claim of rows that follow a trainer: an export with an overlay of deltas. Thread-safe.

    The thread that changes the rows changes the cell; any thread reads `now` without a lock.

    Args:
        base: The claim of the export.
        unknown: Why nothing can be promised yet; empty if the rows are as exported.
    """

    def __init__(self, base: RowsClaim, unknown: str = "") -> None:
        self._lock = concurrency.Lock()  # guards all below but `now`, which is replaced in one assignment
        self._base = base
        self._shares: dict[int, RowsClaim] = {}
        self._total = 0
        """Number of shards that the trainer publishes; 0 before the first message."""
        self._unsettled: dict[int, str] = {-1: unknown} if unknown else {}
        """Shard -> why nothing can be promised of its rows; -1 stands for all rows."""
        self._newest: int | None = base.newest_step
        self._history = 0
        self.now = base
        """The claim at this moment; replaced as a whole."""
        self._changed()

    def rebase(self, base: RowsClaim) -> None:
        """Note that a newer export is now below the same overlay."""
        with self._lock:
            self._base = base
            if self._newest is not None and base.newest_step is not None:
                self._newest = max(self._newest, base.newest_step)
            self._changed()

    def applying(self, share: tuple[int, int], newest_step: int | None) -> None:
        """Announce that rows of a shard are about to change.

        Args:
            newest_step: The newest step of the delta's rows; None announces rows of a snapshot.
        """
        with self._lock:
            if newest_step is None:
                self._history += 1
                self._unsettled[share[0]] = f"rows of a snapshot of shard {share[0]} are being applied"
            elif self._newest is not None:
                self._newest = max(self._newest, newest_step)
            self._changed()

    def applied(self, share: tuple[int, int], claim: RowsClaim) -> None:
        """Confirm a change: the rows of a shard now have this claim."""
        number, total = share
        with self._lock:
            if total != self._total:  # the run has another number of shards: each comes as a snapshot
                self._total, self._shares = total, {}
                self._unsettled = {one: why for one, why in self._unsettled.items() if one < total}
            self._shares[number] = claim
            self._unsettled.pop(number, None)
            if len(self._shares) == total:
                self._unsettled.pop(-1, None)
            self._newest = together(self._parts()).newest_step  # it may fall: rows of a snapshot may be older
            self._changed()

    def _parts(self) -> list[RowsClaim]:
        """Return the claims of all shards; the export's claim stands for shards without a message yet."""
        parts = [*self._shares.values()]
        return parts if parts and len(parts) == self._total else [*parts, self._base]

    def _changed(self) -> None:
        whole = together(self._parts())
        self.now = replace(
            whole,
            newest_step=self._newest,
            history=self._history,
            unknown=next(iter(self._unsettled.values()), "") or whole.unknown,
        )


STAGES = ("read", "train", "publish", "wire", "apply")
CLOCKS_AGREE_WITHIN = 1.0
"""Clock differences of two machines up to so many seconds are not reported."""


@dataclass(frozen=True, slots=True)
class ServedUpTo:
    """How far a served model has followed its trainer, and when that arrived. Times are Unix seconds."""

    learned: LearnedUpTo
    received_at: float
    applied_at: float
    clock_offset: float | None = None
    """Seconds that the publisher's clock is ahead of ours, as the channel measured it; None if it cannot."""

    @property
    def clock_differs_by(self) -> float:
        """Seconds by which the publisher's clock is ahead of ours; 0 if they agree, as far as is known.

        Without a measurement only a message from the future tells: it is ahead by that much at least.
        """
        found = self.clock_offset
        if found is None:
            found = max(0.0, self.learned.published_at - self.received_at)
        return found if abs(found) > CLOCKS_AGREE_WITHIN else 0.0

    @property
    def as_of(self) -> float:
        """When the rows were published, by our clock, or received if the publishing time is unknown."""
        differs = self.clock_differs_by
        if not self.learned.published_at:
            return self.applied_at
        if differs and self.clock_offset is None:
            return self.received_at
        return self.learned.published_at - differs

    def age(self, now: float) -> float:
        """Return the seconds since the rows were published, or received if that time is unknown."""
        return max(0.0, now - self.as_of)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage whose two ends are known."""
        learned, differs = self.learned, self.clock_differs_by
        ends = (
            learned.event_at,
            learned.read_at,
            learned.trained_at,
            learned.published_at,
            self.received_at + differs,  # by the publisher's clock, as those before
            self.applied_at + differs,
        )
        return {
            name: max(0.0, ends[number + 1] - ends[number])
            for number, name in enumerate(STAGES)
            if ends[number] > 0 and ends[number + 1] > 0
        }

    def claim(self, newest_step: int | None) -> RowsClaim:
        """Return the claim of the shard's rows from now on."""
        learned = self.learned
        return RowsClaim(
            learned.step,
            newest_step,
            self.as_of,
            learned.watermark,
            {
                "event_at": learned.event_at,
                "read_at": learned.read_at,
                "trained_at": learned.trained_at,
                "published_at": learned.published_at,
                "received_at": self.received_at,
                "applied_at": self.applied_at,
            },
            clock_differs_by=self.clock_differs_by,
            unknown="" if learned.step else "the trainer did not send the step of its rows",
        )


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """The rows of a batch, as one lookup found them."""

    rows: Tensor
    """float32 of shape (sum of ids x width,): one row per ID in order, table after table. An ID without a row
    reads as zeros. Empty if they were gathered without being returned."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer; their rows were read as zeros."""
    claim: RowsClaim | None = UNKNOWN
    """How new the rows are; None if no row was read."""


AttachOverlay = Callable[[FrozenTables, int | None], tuple[OverlaidTables, ClaimCell]]
"""Puts mapped tables below an overlay of deltas, given the threads of a lookup; returns both as one, and
their claim."""


class RowSource(Protocol):
    """Looks up rows. Thread-safe.

    Shapes: a lookup of the IDs of t tables, as int64 (n,) with sizes int64 (t,), returns float32 (sum of
    ids x width,), table after table.

    Example: tables item (width 2) and user (width 1), ids [7, 8, 5], sizes [2, 1]: the rows are 5 floats,
    two of item 7, two of item 8, one of user 5.
    """

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""

    @property
    def claim(self) -> RowsClaim | None:
        """How new the rows are at this moment; None if only an answer can tell."""

    def follow(self, attach: AttachOverlay) -> None:
        """Put rows of this process below an overlay from the next lookup on. No lookup may be running."""

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
        """Return the rows of some IDs; an ID without a row reads as zeros.

        Args:
            deadline: When the client stops waiting, by `concurrency.monotonic`.

        Raises:
            DeadlineExceededError: The deadline passed before the rows were found.
            UnavailableError: A shard does not answer, and zeros are not allowed for its rows.
        """

    def gather(
        self, gatherer: Gatherer, ids: FeatureIds | PackedFeatures, *, deadline: float | None = None
    ) -> tuple[Sequence[Tensor], FoundRows]:
        """Return the tensors that a model reads of the rows of a batch, and how they were found.

        Raises:
            FeatureError: The IDs are malformed. Otherwise as `lookup`.
        """

    def ids(self, table: str) -> Tensor | None:
        """Return the IDs that have a row in a table, int64 in no order; None if the rows are elsewhere."""

    def close(self) -> None:
        """Release files and connections. Closing again does nothing."""


def gather_looked_up(
    source: RowSource, gatherer: Gatherer, ids: FeatureIds | PackedFeatures, deadline: float | None
) -> tuple[Sequence[Tensor], FoundRows]:
    """Gather rows in three steps, for a source whose rows are not in this process; see `RowSource.gather`."""
    gathered = gatherer.read(ids.ids() if isinstance(ids, PackedFeatures) else ids)
    found = source.lookup(TableIds(gathered.ids, gathered.sizes), deadline=deadline)
    return gathered.gather(found.rows), found


class MappedRows:
    """Rows in files of this machine, mapped into memory. Processes that map one file share its memory.

    Shapes: as of `RowSource`.

    Args:
        threads: Threads that a large lookup is spread over.
        claim: How new the rows of the files are.
        memory_bytes: For rows and their indexes; see `FrozenTables`.
    """

    def __init__(
        self,
        tables: Mapping[str, FrozenTable],
        *,
        threads: int | None = None,
        claim: RowsClaim = UNKNOWN,
        memory_bytes: int | None = None,
    ) -> None:
        self._claims = ClaimCell(claim)
        self._threads = threads
        self._files = FrozenTables(tables, threads=threads, memory_bytes=memory_bytes)
        self._all: FrozenTables | OverlaidTables = self._files
        self._widths = dict(self._files.tables)
        self._no_rows = torch.empty(0)

    @property
    def claim(self) -> RowsClaim:
        return self._claims.now

    def follow(self, attach: AttachOverlay) -> None:
        self._all, self._claims = attach(self._files, self._threads)

    @property
    def tables(self) -> Mapping[str, int]:
        return self._widths

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:  # noqa: ARG002
        before = self._claims.now
        rows = self._all.lookup(ids.ids, ids.sizes)
        return FoundRows(rows, claim=spanning(before, self._claims.now))

    def gather(
        self, gatherer: Gatherer, ids: FeatureIds | PackedFeatures, *, deadline: float | None = None
    ) -> tuple[Sequence[Tensor], FoundRows]:
        if isinstance(ids, FeatureIds) and ids.weights is not None:
            return gather_looked_up(self, gatherer, ids, deadline)
        before = self._claims.now
        if isinstance(ids, PackedFeatures):
            tensors = gatherer.read_packed(self._all.group, ids)
        else:
            tensors = gatherer.read_rows(self._all.group, ids)
        return tensors, FoundRows(self._no_rows, claim=spanning(before, self._claims.now))

    @property
    def files(self) -> FrozenTables:
        """The tables of the export, without what changed since."""
        return self._files

    def ids(self, table: str) -> Tensor:
        return torch.cat([self._all.present_ids(table, one.start, one.stop - 1) for one in hash_spans()])

    def close(self) -> None:
        self._all.close()
        self._files.close()
