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
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
