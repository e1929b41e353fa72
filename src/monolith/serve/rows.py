"""Claims: how new the rows of an answer are, as the answer says it.

A claim is a promise about the rows that an answer was made of:

    step          every row includes all updates up to this training step
    newest_step   no row includes an update of a later step
    staleness     the seconds since the oldest part of the rows was published, or exported
    freshness     "unknown", with `freshness_reason` and none of the above, if nothing can be promised

Rows change in place while requests read them, so a claim is read twice, before the rows and after: what was
promised before still holds, unless rows may have gone back since, and no row is newer than what is known
after. So the thread that changes rows says so before (`ClaimCell.applying`) and after (`ClaimCell.applied`):

    known ──applying a delta──► known, `newest_step` rises ──applied──► known, `step` rises
      │                                                                   ▲
      └──applying rows of a snapshot──► unknown ──applied, or a delta──────┘

A snapshot may be of a history in which the run went back to an earlier checkpoint, so that some rows become
older than the claim and others are still newer. Nothing can be promised in between.

How new the served rows are: what a delta adds to the claim of every answer, and what `/metrics` counts.

From an event to an answer that knows of it there are five stages: the event is *read*, *trained* on,
*published*, goes over the *wire* and is *applied*. Publishers stamp their messages with the ends of the
first three, by their clock; the rest is ours. If the two machines disagree on the time, the difference is
taken into account if the channel can measure it, and named in the answer: a time between two clocks that
differ is never given as if it were right.

Who answers rows in serving.

A predictor asks for all rows of a batch at once and does not know where they are: mapped from files of this
machine, or spread over serving servers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from monolith.store import TableIds
from monolith.sync.messages import LearnedUpTo
from monolith.table import FrozenTable, FrozenTables, OverlaidTables

Said = dict[str, bool | int | float | str]
"""What an answer says: parameters of the Open Inference Protocol."""


@dataclass(frozen=True, slots=True)
class RowsClaim:
    """How new some rows are. Times are Unix seconds."""

    step: int
    newest_step: int | None
    """None: not known, as after a snapshot of rows that were being trained."""
    as_of: float
    """When the oldest part of the rows was published, or exported."""
    watermark: int = 0
    """Event time that nearly all events trained on had reached; 0 if events have none."""
    times: Mapping[str, float] = field(default_factory=dict)
    """When the newest event of the oldest part happened, was read, trained, published, received, applied."""
    history: int = 0
    """Rises whenever rows may have gone back."""
    clock_differs_by: float = 0.0
    """Seconds by which the clock of the publisher of the oldest part is ahead of ours; 0 if they agree."""
    unknown: str = ""
    """Why nothing can be promised; empty if it can."""

    def said(self, now: float) -> Said:
        """Return what an answer says."""
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


UNKNOWN = RowsClaim(0, None, 0.0, unknown="it was not said how new the rows are")


def spanning(before: RowsClaim, after: RowsClaim) -> RowsClaim:
    """Return the claim of rows that were read between two looks at the claim."""
    if before is after:
        return before
    unknown = before.unknown or after.unknown
    if not unknown and before.history != after.history:
        unknown = "rows of another history came while the rows were read"
    newest = None if before.newest_step is None or after.newest_step is None else after.newest_step
    return replace(before, newest_step=newest, unknown=unknown)


def together(claims: Sequence[RowsClaim]) -> RowsClaim:
    """Return the claim of rows that came from several places."""
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
    """The claim of rows that follow a trainer: of an export, and of what deltas brought over it. Thread-safe.

    One thread at a time changes it, which is the one that changes the rows; any thread reads `now`.

    Args:
        base: The claim of the export.
        unknown: Why nothing can be promised yet; empty if the rows are as exported.
    """

    def __init__(self, base: RowsClaim, unknown: str = "") -> None:
        self._lock = threading.Lock()  # guards what follows
        self._base = base
        self._shares: dict[int, RowsClaim] = {}
        self._total = 0
        """How many shares there are; 0 before the first came."""
        self._unsettled: dict[int, str] = {-1: unknown} if unknown else {}
        """Share -> why nothing can be promised of its rows; -1: of all."""
        self._newest: int | None = base.newest_step
        self._history = 0
        self.now = base
        """The claim at this moment; replaced as a whole."""
        self._changed()

    def rest_on(self, base: RowsClaim) -> None:
        """Take note that a newer export lies under the same rows."""
        with self._lock:
            self._base = base
            if self._newest is not None and base.newest_step is not None:
                self._newest = max(self._newest, base.newest_step)
            self._changed()

    def applying(self, share: tuple[int, int], newest_step: int | None) -> None:
        """Say that rows of a share are about to change: by a delta whose rows are at most of a step, or, with
        None, by rows of a snapshot."""
        with self._lock:
            if newest_step is None:
                self._history += 1
                self._unsettled[share[0]] = f"rows of a snapshot of shard {share[0]} are being applied"
            elif self._newest is not None:
                self._newest = max(self._newest, newest_step)
            self._changed()

    def applied(self, share: tuple[int, int], claim: RowsClaim) -> None:
        """Say what the rows of a share are now."""
        number, total = share
        with self._lock:
            if total != self._total:  # the run has another number of shards: each comes as a snapshot
                self._total, self._shares = total, {}
                self._unsettled = {one: why for one, why in self._unsettled.items() if one < total}
            self._shares[number] = claim
            self._unsettled.pop(number, None)
            if len(self._shares) == total:
                self._unsettled.pop(-1, None)
            self._newest = together(self._parts()).newest_step  # which is lower after rows went back
            self._changed()

    def _parts(self) -> list[RowsClaim]:
        """Return the claims of all shards; those of which nothing came yet are as exported."""
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
"""Seconds by which the clocks of two machines may differ before answers say so."""


@dataclass(frozen=True, slots=True)
class ServedUpTo:
    """What a served model has learned from, and when that came here. Times are Unix seconds."""

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
        """When it was published, by our clock, or when it came if that cannot be told."""
        differs = self.clock_differs_by
        if not self.learned.published_at:
            return self.applied_at
        if differs and self.clock_offset is None:
            return self.received_at
        return self.learned.published_at - differs

    def age(self, now: float) -> float:
        """Return the seconds since it was published, or since it came if that cannot be told."""
        return max(0.0, now - self.as_of)

    def stages(self) -> dict[str, float]:
        """Return the seconds that each stage took, of those whose ends are both known."""
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
        """Return what the rows of the share are from now on; see `monolith.serve.rows`."""
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
            unknown="" if learned.step else "the trainer did not say which step its rows are of",
        )


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """The rows of a batch."""

    rows: Tensor
    """float32 of one dimension: a row for each id in order, zeros where there is none."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer, and whose rows were read as zeros."""
    claim: RowsClaim | None = UNKNOWN
    """How new the rows are; None if no row was read."""


class RowSource(Protocol):
    """Answers rows. Thread-safe."""

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
        """Return the rows of some ids; those of an id that is not there are zeros.

        Args:
            deadline: When the answer is of no use any more, by `time.monotonic`.

        Raises:
            DeadlineExceededError: It came before the rows did.
            UnavailableError: A shard does not answer, and may not be left out.
        """

    def close(self) -> None:
        """Let go of everything. Closing again does nothing."""


class MappedRows:
    """Rows in files of this machine, which all who map them share.

    Args:
        claim: How new the rows of the files are.
    """

    def __init__(
        self, tables: Mapping[str, FrozenTable], *, threads: int | None = None, claim: RowsClaim = UNKNOWN
    ) -> None:
        self._claims = ClaimCell(claim)
        self.threads = threads
        """That share large calls."""
        self._files = FrozenTables(tables, threads=threads)
        self._all: FrozenTables | OverlaidTables = self._files
        self._widths = dict(self._files.tables)

    @property
    def files(self) -> FrozenTables:
        """What is mapped."""
        return self._files

    @property
    def claim(self) -> RowsClaim:
        """How new the rows are at this moment."""
        return self._claims.now

    def lie_under(self, overlaid: OverlaidTables, claims: ClaimCell) -> None:
        """Answer from the files under an overlay, from the next lookup on; none may be under way.

        Args:
            claims: Says how new the rows under the overlay are.
        """
        self._all, self._claims = overlaid, claims

    @property
    def tables(self) -> Mapping[str, int]:
        return self._widths

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:  # noqa: ARG002
        before = self._claims.now
        rows = self._all.lookup(ids)
        return FoundRows(rows, claim=spanning(before, self._claims.now))

    def close(self) -> None:
        self._all.close()
        self._files.close()
