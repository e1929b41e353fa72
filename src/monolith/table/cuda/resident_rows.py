"""Resident rows: which ids have rows in the memory of a device, and how room is made for new ones.

A table passes a batch and the work to do on its rows. Here the ids get places, as far as the admission filter
and the memory budget allow, and the change tracker is told. Locks, streams and arguments belong to the table.

    write(batch) --- there is room, or the table grows ------------------> claim places, do the work
         |
         +-- the budget is used up: refuse, or expire the oldest rows ---> claim places for those admitted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda.device import Device
from monolith.errors import AcceleratorError, TableClosedError
from monolith.table.admission import AdmissionFilter, Refusals
from monolith.table.config import TableConfig
from monolith.table.cuda.filters import device_filter
from monolith.table.cuda.growth import Counted, Growth, UsageCounters
from monolith.table.cuda.layout import DeviceRowLayout
from monolith.table.cuda.memory import (
    COUNTERS,
    ELSEWHERE,
    EXTRA_PLACES,
    NEWEST,
    NONE,
    RECENCY_BYTES,
    TURNED_AWAY,
    USED,
    Ages,
    Claimed,
    DeviceMemory,
    Recency,
    Times,
)
from monolith.table.cuda.tracking import ChangeTracker

_CLEANED = 0.95  # share of places in use, marks included, above which marks are turned into free places
_SPARE = 2  # batches that must fit after growth before the device is asked for its counters again
_PART = 8  # a batch replaces at most one in so many rows of a full table at once
_AT_ONCE = 1 << 22  # rows that expire together: bounds the memory of their list

Work = Callable[[Claimed], None]


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Ids that get rows, and the work to do on those rows."""

    ids: Tensor
    times: Times
    work: Work
    dedup: bool = False
    unusable: Callable[[], Tensor] | None = None
    """Finds positions whose gradients are not usable. The kernels skip them anyway, so this is called only if
    the ids that get a row must be known first."""


class ResidentRows:
    """The rows of one table. Not thread-safe; every call is on the current stream.

    Args:
        tell: Inserts the waiting ids into the touched sets; see `ChangeTracker`.

    Attributes:
        filtered, refused, evicted, removed: As in `TableStats`; what a filter on the device has refused is
            among the counters.
    """

    def __init__(
        self,
        config: TableConfig,
        layout: DeviceRowLayout,
        device: Device,
        *,
        admission: AdmissionFilter | None,
        remembers_use: bool,
        tell: Callable[[], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._owner = device
        self._device = device.torch_device
        self._admission = admission
        self._remembers_use = remembers_use
        self._refusals = Refusals(config)
        by_slot = config.expiry.seconds_by_slot() if config.expiry.per_slot else None
        self._live_by_slot = None if by_slot is None else torch.from_numpy(by_slot).to(self._device)
        self.growth = Growth(config, layout.bytes_per_place + (RECENCY_BYTES if remembers_use else 0))
        self.watch = ChangeTracker(device, tell)
        self.usage = UsageCounters(
            config.name, torch.zeros(COUNTERS, dtype=torch.int64, device=self._device), device
        )
        # Rows of a table that spills ask it in host memory, too.
        self.filter = None if remembers_use else device_filter(admission, device)
        """The filter, if it counts on the device."""
        self.filtered = self.refused = self.evicted = self.removed = 0
        self._memory: DeviceMemory | None = self._new_memory(config.initial_rows)
        self._next: DeviceMemory | None = None  # which rows are about to move to

    @property
    def memory(self) -> DeviceMemory:
        """The memory there is now: it is another one after growth.

        Raises:
            TableClosedError: There is none any more.
        """
        if self._memory is None:
            raise TableClosedError(f"table {self._config.name!r} was closed")
        return self._memory

    @property
    def bytes_ahead(self) -> int:
        """Bytes of the memory that rows are about to move to."""
        return 0 if self._next is None else self._next.bytes_index + self._next.bytes_rows

    # Writing

    def write(self, batch: WriteBatch, skip: Tensor | None) -> None:
        """Give places to ids, and have the work done on their rows.

        Args:
            skip: uint8 for each position, 0 for those that are written.
        """
        if not len(batch.ids):
            return
        # The usual case: the upper bound of the places in use says that all ids fit, and nothing is waited
        # for.
        if self._makes_room(batch, skip):
            self._write_now(batch, skip, None)
            return
        # The budget is used up. Which ids get a row must be known before anything is written, so unusable
        # gradients are found first: no row is created, or expired, for them.
        if batch.unusable is not None:
            skip = batch.unusable()
        if self._config.when_full == "refuse":
            self._write_full(batch, skip)
            return
        # Rows expire to make room for the batch. In parts, so that one large batch cannot push out its own
        # rows before they are written; the other positions are ELSEWHERE meanwhile.
        keys = batch.ids.cpu().numpy()
        for part in parts_of_batch(keys, max(1, self.limit // _PART)):
            outside = torch.from_numpy(np.where(part, 0, ELSEWHERE).astype(np.uint8)).to(self._device)
            self._write_full(batch, outside if skip is None else skip | outside)

    def turned_away(self, batch: WriteBatch, skip: Tensor | None, counts: Tensor | None) -> Tensor | None:
        """Ask the filter about ids without a row; return the positions to skip."""
        if self._admission is None:
            return skip
        if self.filter is not None:
            memory, seen_here = self.memory, None if counts is None else counts.to(self._device)
            index, together = memory.index, batch.dedup
            return self.filter.ask(
                index, memory.counters, batch.ids, skip=skip, counts=seen_here, together=together
            )
        unknown = self._unknown(batch, skip).cpu().numpy()
        if not unknown.any():
            return skip
        seen = np.ones(len(unknown), np.int64) if counts is None else counts.numpy()
        verdict = ask_filter(
            self._admission, batch.ids.cpu().numpy()[unknown], seen[unknown], together=batch.dedup
        )
        self.filtered += verdict.filtered
        turned = np.zeros(len(unknown), np.uint8)
        turned[unknown] = verdict.waits * np.uint8(TURNED_AWAY)
        on_device = torch.from_numpy(turned).to(self._device)
        return on_device if skip is None else skip | on_device

    def _write_now(self, batch: WriteBatch, skip: Tensor | None, born: Tensor | None) -> None:
        """Write, given room for all. Rows at the places `born` are new, though claimed before."""
        # Kernels that train advance the clock themselves, by the gradients that they use; if unusable ones
        # are already skipped, claiming may do it.
        looked_at = batch.unusable is None or skip is not None
        claimed = self.memory.claim(batch.ids, batch.times, skip, clock=looked_at)
        if born is not None:
            claimed.made.copy_(torch.isin(claimed.places, born))
        # In this order, on one stream: a snapshot's copies are made before the rows change.
        self.watch.writing(self.memory, claimed)
        batch.work(claimed)
        self.usage.grew(len(batch.ids), self.limit)
        self.watch.wrote(batch.ids if self.watch.idle else batch.ids.clone(), claimed.places)

    def _write_full(self, batch: WriteBatch, skip: Tensor | None) -> None:
        """Write a batch that may not fit: the first new ids of the batch get rows."""
        coming, room = self._newcomers(batch, skip)
        while len(coming) > room and self._config.when_full == "expire_oldest":
            gone = self.expire_oldest(len(coming) - room, batch.times.latest(skip))
            if not gone:
                break
            coming, room = self._newcomers(batch, skip)  # some of the batch may have gone
        # The first of the new ids get rows, the remaining ones are refused. Their places are claimed apart
        # from the batch, since `claim_absent` may use marked places; `born` then tells the write which rows
        # are new.
        taken, left = np.split(coming, [min(room, len(coming))])
        if self.usage.read().counters[USED] + len(taken) > _CLEANED * self.memory.places:
            self.memory.tidy()
        born = self.memory.claim_absent(torch.from_numpy(taken).to(self._device))
        if len(left):
            outside = torch.isin(batch.ids, torch.from_numpy(left).to(self._device))
            if skip is not None:
                outside &= skip == 0
            self.refused += len(left) if batch.dedup else int(outside.sum())
            turned = outside.to(torch.uint8) * TURNED_AWAY
            skip = turned if skip is None else skip | turned
            self._refusals.note(self.refused, lambda: self.usage.read().rows)
        self._write_now(batch, skip, born)

    def _unknown(self, batch: WriteBatch, skip: Tensor | None) -> Tensor:
        unknown = self.memory.find(batch.ids) == NONE
        return unknown if skip is None else unknown & (skip == 0)

    def _newcomers(self, batch: WriteBatch, skip: Tensor | None) -> tuple[NDArray[np.int64], int]:
        """Return ids without a row, in the order of first sight, and how many may have one."""
        ids = batch.ids[self._unknown(batch, skip)].cpu().numpy()
        return in_order(ids), max(0, self.limit - self.usage.read().rows)

    # Room

    @property
    def limit(self) -> int:
        """Places that may be in use."""
        return self.growth.limit(self.memory.places)

    @property
    def writes_alone(self) -> bool:
        """Whether what is written needs more than places, so that it cannot be written with other tables'."""
        return self._admission is not None or self.growth.bounded or self._remembers_use

    def reserve(self, ids: int) -> None:
        """Grow if so many ids may not find room, such that some batches more will before it comes to that."""
        if self.usage.bound() + ids <= self.limit:
            return
        seen = self.usage.read()
        if seen.rows + _SPARE * ids <= self.limit < seen.counters[USED] + ids:
            self.memory.tidy()
            seen = self.usage.read()
        if seen.counters[USED] + _SPARE * ids > self.limit:
            wanted = self.growth.reserved(self.memory.places, seen.rows, 2 * _SPARE * ids)
            if not self._prepares(wanted, seen, ids):
                self._move(wanted, seen.rows, ids)

    def _makes_room(self, batch: WriteBatch, skip: Tensor | None) -> bool:
        """Grow if need be; False where the table may not hold all that come."""
        n = len(batch.ids)
        if self.usage.bound() + n <= self.limit:
            return True
        # The bound is too high to tell: ask the device, which waits. Most often the true number is much
        # lower.
        seen = self.usage.read()
        used = seen.counters[USED]
        if used + n <= self.limit:
            return True
        # Still too many: count the ids of the batch that have no row, each once.
        unknown = self._unknown(batch, skip)
        coming = len(torch.unique(batch.ids[unknown]))
        if used + coming > self.limit >= seen.rows + coming:
            self.memory.tidy()  # they fit if marks are cleared
            seen = self.usage.read()
        if seen.counters[USED] + coming <= self.limit:
            return True
        if not self.growth.grows(self.memory.places):
            return False
        wanted = self.growth.grown(self.memory.places, seen.rows + coming)
        if self._prepares(wanted, seen, coming):
            return True
        self._move(wanted, seen.rows, coming)
        return seen.rows + coming <= self.limit

    def _prepares(self, wanted: int, seen: Counted, coming: int) -> bool:
        """Allocate the memory that a large table moves to, and leave moving to the next call.

        Both take long, and no call should do both. Returns False if the memory is there already, or if moving
        cannot wait.
        """
        used = seen.counters[USED] + coming
        if self._next is not None or not self.growth.may_wait(self.memory.places, used):
            return False
        self._next = self._taken(self.growth.sizes(wanted, seen.rows + coming))
        return True

    def _shrink(self) -> None:
        """Move to a smaller memory if most of this one is not used."""
        rows = self.usage.read().rows
        places = self.growth.shrunk(self.memory.places, rows)
        if places is not None:
            self._next = None
            self._move(places, rows)

    def _move(self, places: int, rows: int, coming: int = 0) -> None:
        """Move all rows to a memory of about this size, which has room for those that come."""
        before, sizes = self.memory, self.growth.sizes(places, rows + coming)
        new, self._next = self._next, None
        if new is None or new.places < sizes[-1]:
            new = None  # freed before the next is allocated: there may be no memory for three
            new = self._taken(sizes)
        self._memory = before.moved(new)
        # torch must not reuse the old memory before `move_rows` has read it.
        before.keep_for(self._owner.current_stream())
        self.usage.holds(rows)

    def _taken(self, sizes: Sequence[int]) -> DeviceMemory:
        """Return an empty memory of the first of these sizes that the device has room for."""
        for size in sizes[:-1]:
            with suppress(AcceleratorError):
                return self.memory.empty(size)
        return self.memory.empty(sizes[-1])

    def _new_memory(self, rows: int) -> DeviceMemory:
        places, stream = self.growth.first(rows), self._owner.current_stream().handle
        memory = DeviceMemory(self._layout, self.usage.counters, places, device=self._owner, stream=stream)
        if self._remembers_use:
            memory.recency = Recency(places + EXTRA_PLACES, self._device)
        return memory

    # Forgetting

    def remove(self, ids: Tensor) -> int:
        """Drop the rows of ids; return how many there were."""
        places = self.memory.find(ids)
        removed = self.drop(torch.unique(places[places != NONE]).to(torch.int64))
        self.removed += removed
        return removed

    def drop(self, places: Tensor) -> int:
        """Drop the rows at int64 places, each once; return how many there were."""
        if not len(places):
            return 0
        self.watch.dropping(self.memory, places)
        return self.memory.drop(places)

    def ages(self, now: int) -> Ages:
        """Return what asks for rows that have expired by then."""
        return Ages(now, int(self._config.expiry.default.total_seconds()), self._live_by_slot)

    def expire_oldest(self, wanted: int, latest: int) -> int:
        """Drop the oldest rows that are not newer than `latest`: an event of the past pushes out none."""
        memory, rows = self.memory, self.usage.read().rows
        _, places, _ = memory.listed(rows, latest=latest)
        oldest = torch.sort(memory.times_at(places), stable=True).indices[: max(wanted, rows // 32)]
        gone = self.drop(places[oldest])
        self.evicted += gone
        return gone

    def evict(self, now: int | None) -> int:
        """Drop expired rows, as of the newest event time if none is given; free idle memory."""
        memory, seen = self.memory, self.usage.read()
        ages = self.ages(seen.counters[NEWEST] if now is None else now)
        evicted, more = 0, True
        while more:
            _, places, found = memory.listed(min(_AT_ONCE, seen.rows), ages=ages, ordered=False)
            evicted += self.drop(places)
            more = found > len(places)
        self.evicted += evicted
        self._shrink()
        return evicted

    def clear(self, expect_rows: int) -> None:
        """Drop everything.

        Raises:
            TableArgumentError: A snapshot is open.
        """
        self.watch.clearing(self.memory, self.usage.read().rows)
        self.memory.keep_for(self._owner.current_stream())
        self._memory = self._next = None  # freed before the new one is allocated
        self._memory = self._new_memory(expect_rows)
        self.watch.follow(self._memory)
        self.usage.clear()

    def close(self) -> None:
        """Free the memory."""
        self.watch.tell_touched()
        self.memory.keep_for(self._owner.current_stream())
        self._memory = self._next = None


# Which ids of a batch get a row: only for tables with an admission filter or a memory budget. They have to
# know that before they write, so it is computed on the host.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a filter."""

    waits: NDArray[np.bool_]
    """For each sighting, whether it was refused and has no effect."""
    filtered: int
    """How many sightings were refused, by their counts."""


def ask_filter(
    admission: AdmissionFilter, ids: NDArray[np.int64], counts: NDArray[np.int64], *, together: bool
) -> Verdict:
    """Ask about ids without a row. An id that was let in is not asked about again.

    Args:
        ids: In the order of the batch.
        counts: How many sightings each counts for.
        together: Whether equal ids are one sighting, which counts for the sum of their counts.
    """
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    if together:
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, inverse, counts)
        order = np.argsort(first)
        waits = np.empty(len(distinct), np.bool_)
        waits[order] = _refused(admission, distinct[order], sums[order])
        return Verdict(waits[inverse], int(sums[waits].sum()))
    waiting = np.ones(len(distinct), np.bool_)
    all_waits = np.zeros(len(ids), np.bool_)
    for turn in _turns(inverse):
        asked = turn[waiting[inverse[turn]]]
        if not len(asked):
            break
        waits = _refused(admission, ids[asked], counts[asked])
        all_waits[asked] = waits
        waiting[inverse[asked]] = waits
    return Verdict(all_waits, int(counts[all_waits].sum()))


def in_order(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return distinct ids in the order of first sight."""
    distinct, first = np.unique(ids, return_index=True)
    ordered: NDArray[np.int64] = distinct[np.argsort(first)]
    return ordered


def parts_of_batch(ids: NDArray[np.int64], size: int) -> Iterator[NDArray[np.bool_]]:
    """Yield masks of the parts of a batch: up to `size` distinct ids each, in the order of first sight."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    number = rank[inverse] // size
    for part in range(int(number.max()) + 1):
        yield number == part


def runs_by_kind(ids: Tensor, zero: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield masks of positions to write or to remove, such that equal ids keep their order."""
    if len(torch.unique(ids)) == len(ids):
        for kind in (True, False):
            if bool((zero == kind).any()):
                yield zero == kind, kind
        return
    changes = (zero[1:] != zero[:-1]).nonzero().squeeze(1) + 1
    edges = [0, *changes.tolist(), len(ids)]
    for begin, end in pairwise(edges):
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[begin:end] = True
        yield mask, bool(zero[begin])


def _turns(inverse: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the positions at which an id is seen for the first time, for the second time, and so on."""
    by_id = np.argsort(inverse, kind="stable")
    starts = np.flatnonzero(np.diff(inverse[by_id], prepend=-1))
    lengths = np.diff(np.append(starts, len(by_id)))
    turn = np.empty(len(by_id), np.int64)
    turn[by_id] = np.arange(len(by_id)) - np.repeat(starts, lengths)
    by_turn = np.argsort(turn, kind="stable")
    yield from np.split(by_turn, np.flatnonzero(np.diff(turn[by_turn])) + 1)


def _refused(
    admission: AdmissionFilter, ids: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    waits: NDArray[np.bool_] = admission.refuse(torch.from_numpy(ids), torch.from_numpy(counts)).numpy()
    return waits
