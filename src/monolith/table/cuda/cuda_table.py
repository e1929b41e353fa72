"""CudaTable: a table in the memory of a GPU.

Index and rows lie on the device (`places.cuh` says how), and every call is a few kernels on the caller's
stream. The host keeps an upper bound of how full the index is, so that it neither waits for the device nor
lets it overflow: only when the bound comes near is the true number asked for, and the table grown if need be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda.device import Device, device_of
from monolith.errors import AcceleratorError, TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter
from monolith.table.config import TableConfig
from monolith.table.cuda import newcomers
from monolith.table.cuda.cut import CudaTableCut, CutChunk, CutMoment
from monolith.table.cuda.fill import Fill
from monolith.table.cuda.inputs import Inputs
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import (
    BEFORE,
    BESIDE,
    COUNTERS,
    ELSEWHERE,
    INSERTED,
    NEWEST,
    NON_FINITE,
    NONE,
    RECENCY_BYTES,
    TAKEN,
    TURNED_AWAY,
    USED,
    Ages,
    Claimed,
    DeviceMemory,
    Times,
)
from monolith.table.cuda.paces import Paces
from monolith.table.cuda.recency import Recency
from monolith.table.cuda.room import Room
from monolith.table.cuda.scans import LAST_HASH, first_rows, joined
from monolith.table.cuda.watch import Gone, RowWatch
from monolith.table.digests import bucket_numbers, check_share
from monolith.table.refusals import Refusals
from monolith.table.table import Rows, Scan, TableStats
from monolith.table.touched_keys import TouchedKeySet

_CLEANED = 0.95  # in use, marks included: then marks are cleared away
_SPARE = 2  # batches that find room without a question
_PART = 8  # of a full table comes and goes at once, as a share
_AT_ONCE = 1 << 22  # rows that expire together
_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)

Work = Callable[[Claimed], None]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Ids to be given rows, and what is done to those."""

    ids: Tensor
    times: Times
    work: Work
    dedup: bool = False
    unusable: Callable[[], Tensor] | None = None
    """Finds positions that nothing is trained by, where the work itself would leave them out: only who must
    know before asks."""


class CudaTable:
    """A `Table` on a CUDA device. Thread-safe: calls follow one another, on whatever streams they come.

    Tensors on the CPU are answered on the CPU, tensors on the table's device on the device. With those,
    `lookup` and `apply_gradients` do not wait for the device, unless the table has an admission filter, a
    `touched` set or no room for as many new ids as the batch has. Event times on the device are not looked
    at before they are written: an impossible one counts as 0 and a later call raises TableArgumentError.

    Results are those of `NativeTable` to the bit, except where a one_bit segment asks for a tanh. Of equal
    ids gradients are summed in the order of the batch.

    It may be followed (`touch`, `digests`) and cut. While a cut is open, and while changes are tracked, a
    place costs one byte more; a cut has up to 2 GB on the device for rows that changed since, and host memory
    for more of those. `capacity_bytes` holds for index and rows without that, at every moment: while a table
    grows, old and new together are not more. Memory that `evict` makes idle goes back to torch.

    Args:
        admission: Asked about ids without a row before they are given one; None admits all.
        touched: Told the ids that got another row, or lost theirs; see `touch`.
        device: One of torch's, or one that stands for it; the current CUDA device by default.
        remembers_use: Whether to keep when each row was last written, for `idle`.

    Raises:
        AcceleratorError: There is no such device, or the kernels cannot be made for it.
        ConfigError: `capacity_bytes` is less than the smallest table needs.
    """

    def __init__(
        self,
        config: TableConfig,
        *,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
        device: torch.device | Device | None = None,
        remembers_use: bool = False,
    ) -> None:
        try:
            owner = device_of(device)
        except AcceleratorError as cause:
            raise AcceleratorError(f"table {config.name!r}: {cause}; or use a NativeTable") from cause
        self._config = config
        self._owner = owner
        self._device = owner.torch_device
        self._admission = None if admission is None or admission.core is None else admission
        self._layout = row_layout(config)
        self._remembers_use = remembers_use
        self._room = Room(config, self._layout.bytes_per_place + (RECENCY_BYTES if remembers_use else 0))
        self._fixed_rates = arguments.fixed_rates(config.segments)
        self._refusals = Refusals(config)
        by_slot = config.expiry.seconds_by_slot() if config.expiry.per_slot else None
        self._lock = threading.Lock()
        self._thawed = threading.Condition(self._lock)
        # All below is guarded by the lock.
        self._frozen = 0
        self._paces = Paces(config, lazy=self._layout.lazy)
        self._watch = RowWatch(owner, self._tell_touched)
        self._filtered = self._refused = self._evicted = self._removed = 0
        with owner.active():
            self._stream = owner.current_stream()
            self._live_by_slot = None if by_slot is None else torch.from_numpy(by_slot).to(self._device)
            counters = torch.zeros(COUNTERS, dtype=torch.int64, device=self._device)
            self._fill = Fill(config.name, counters, owner)
            self._inputs = Inputs(config, counters, owner)
            self._memory: DeviceMemory | None = self._new_memory(config.initial_rows)
        if touched is not None:
            self.touch(touched)

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def dim(self) -> int:
        return self._config.dim

    @property
    def state_dim(self) -> int:
        return self._config.state_dim

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def owner(self) -> Device:
        """The device, as those who launch kernels know it."""
        return self._owner

    def __len__(self) -> int:
        with self._open():
            return self._fill.read().rows

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        with self._open() as memory:
            keys = self._inputs.ids(ids)
            answer, values = self._inputs.out(out, ids, (len(keys), self.dim))
            memory.lookup(keys, self._paces.scalars(), values)
            return answer if answer is values else answer.copy_(values)

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        with self._open() as memory:
            keys = self._inputs.ids(ids)
            places = memory.find(keys)
            times, values, state = memory.read(places)
            columns = (keys.clone(), times, values, state)
            return (places != NONE).to(ids.device), Rows(*(column.to(ids.device) for column in columns))

    def contains(self, ids: Tensor) -> Tensor:
        with self._open() as memory:
            return (memory.find(self._inputs.ids(ids)) != NONE).to(ids.device)

    @property
    def most_rows(self) -> int | None:
        """How many rows its budget has room for, with as many places free as a quick search needs."""
        return self._room.most_rows

    def idle(self, count: int, besides: Tensor) -> Tensor:
        """Return the ids, on the CPU, of rows that were not written for longest; waits for the device.

        Needs `remembers_use`.

        Args:
            count: So many at most.
            besides: Ids that are not returned; they need not have rows.
        """
        with self._open() as memory:
            return memory.idle(count, self._inputs.ids(besides)).cpu()

    def expire_oldest(self, count: int, latest: int) -> int:
        """Drop rows with the oldest event times, none newer than `latest`; return how many.

        Args:
            count: So many or some more, where there are.
        """
        with self._open(writing=True):
            return self._expire_oldest(count, latest)

    # Writing

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._open(writing=True):
            keys = self._inputs.ids(ids)
            new = self._inputs.floats(values, (len(keys), self.dim), "values")
            times = self._inputs.times(event_time, len(keys))
            self._put(keys, times, new, None, whole=False)

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._open(writing=True):
            keys = self._inputs.ids(ids)
            added = self._inputs.floats(values, (len(keys), self.dim), "values")
            times = self._inputs.times(event_time, len(keys))
            batch = _Batch(keys, times, lambda claimed: self._held.add(claimed, added, self._paces.scalars()))
            self._write(batch, self._turned_away(batch, None, None))

    def apply_gradients(
        self,
        ids: Tensor,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        learning_rates: Tensor | None = None,
        dedup: bool = False,
        latest_values: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        with self._open(writing=True) as memory:
            arguments.check_trainable(self._config, "apply_gradients")
            arguments.check_step(step)
            keys = self._inputs.ids(ids)
            rates = self._fixed_rates
            if rates is None or learning_rates is not None:
                rates = arguments.rate_array(learning_rates, self._config, step)
            latest = self._inputs.latest(latest_values, len(keys))
            by = self._inputs.floats(gradients, (len(keys), self.dim), "gradients")
            sightings = self._inputs.counts(counts, len(keys))
            times = self._inputs.times(event_time, len(keys))
            paces = rates.tolist()
            self._paces.begin(step, paces)

            def train(claimed: Claimed) -> None:
                self._held.train(
                    claimed,
                    by,
                    latest,
                    scalars=self._paces.scalars(paces),
                    step=step,
                    summed=dedup,
                    checked=not self._paces.stay_finite(paces),
                )

            if self._admission is None and self._watch.idle:
                self._write(_Batch(keys, times, train, dedup, lambda: self._held.unusable(by)), None)
            else:
                batch = _Batch(keys, times, train, dedup)
                self._write(batch, self._turned_away(batch, memory.unusable(by), sightings))

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id that had no row and found no room for one."""
        with self._open(writing=True):
            arguments.check_trainable(self._config, "reinitialize")
            keys = self._inputs.ids(ids)
            times = Times(None, arguments.event_second(now, "now"))
            status = torch.full((len(keys),), -1, dtype=torch.int8, device=self._device)
            batch = _Batch(keys, times, lambda claimed: self._held.reset(claimed, status))
            self._write(batch, None)
            return status.to(ids.device)

    def remove(self, ids: Tensor) -> int:
        with self._open(writing=True):
            return self._remove(self._inputs.ids(ids))

    def count_expired(self, now: int) -> int:
        with self._open() as memory:
            return memory.listed(0, ages=self._ages(now))[2]

    def evict(self, now: int | None = None) -> int:
        with self._open(writing=True) as memory:
            seen = self._fill.read()
            ages = self._ages(seen.counters[NEWEST] if now is None else now)
            evicted, more = 0, True
            while more:
                _, places, found = memory.listed(min(_AT_ONCE, seen.rows), ages=ages, ordered=False)
                evicted += self._drop(places)
                more = found > len(places)
            self._evicted += evicted
            self._shrink()
            return evicted

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes, on the CPU: a shard is a range of hashes."""
        with self._open() as memory:
            begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
            last, held = min(end - 1, LAST_HASH), self._fill.read().rows
            rows, following = first_rows(memory, held, limit, first=begin, last=last)
        return joined([rows.moved_to("cpu")], limit, following)

    def restore(self, rows: Rows) -> None:
        with self._open(writing=True):
            keys, times, values, state = self._inputs.rows(rows)
            self._paces.note(None if state is None else rows.state.cpu().numpy())
            self._put(keys, times, values, state, whole=True)

    def clear(self, *, expect_rows: int = 0) -> None:
        with self._open(writing=True):
            self._watch.clearing(self._held, self._fill.read().rows)
            self._held.keep_for(self._stream)
            self._memory = None  # given back before the new one is taken
            self._memory = self._new_memory(expect_rows)
            self._watch.follow(self._memory)
            self._fill.clear()
            self._paces.forget()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold writers off while the block runs; readers go on. Nests."""
        with self._open():
            self._frozen += 1
        try:
            yield
        finally:
            with self._lock:
                self._frozen -= 1
                self._thawed.notify_all()

    def cut(self) -> CudaTableCut:
        """Hold this moment fast: rows are copied aside before they change."""
        with self._open() as memory:
            seen = self._fill.read()
            gone = self._watch.open_cut(memory, seen.rows)
            aside = self._watch.aside
            assert aside is not None
            moment = CutMoment(seen.rows, list(self._paces.scales), seen.counters[NEWEST], gone)
            return CudaTableCut(self, self._config, self._owner, moment, aside)

    def read_cut(self, first: int, last: int, limit: int, *, changed_only: bool) -> CutChunk:
        """Return a chunk of the open cut, not waited for. Called by the cut."""
        with self._open() as memory:
            aside = self._watch.aside
            if aside is None:
                raise TableArgumentError("scan: the cut was closed")
            aside.seal(memory)
            flags, held = BEFORE if changed_only else 0, self._fill.read().rows
            rows, following = first_rows(
                memory, held, limit, first=first, last=last, flags=flags, no_flags=TAKEN
            )
            until = last if following is None else following - 1
            return CutChunk(rows, aside.between(first, until, changed_only=changed_only), following)

    def end_cut(self, unsaved: Gone | None) -> None:
        """Take note that the open cut was closed. Called by the cut."""
        with suppress(TableClosedError), self._open() as memory:
            self._watch.close_cut(memory, unsaved)

    def track_changes(self, on: bool = True) -> None:
        with self._open() as memory:
            self._watch.track(memory, on=on)

    def touch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._watch.touch(touched)

    def untouch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._watch.untouch(touched)

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        into, count = bucket_numbers(buckets), len(buckets)
        check_share(share)
        with self._open() as memory:
            return memory.digests(into.to(self._device), *share, count).cpu()

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        with self._open():
            return list(self._paces.scales)

    def set_scales(self, scales: Sequence[float]) -> None:
        with self._open():
            self._paces.set_scales(scales)

    def stats(self) -> TableStats:
        with self._open() as memory:
            seen = self._fill.read()
            return TableStats(
                rows=seen.rows,
                bytes_total=memory.bytes_index + memory.bytes_rows,
                bytes_rows=memory.bytes_rows,
                bytes_index=memory.bytes_index,
                load=seen.counters[USED] / (memory.places + BESIDE),
                inserted=seen.counters[INSERTED],
                filtered=self._filtered,
                refused=self._refused,
                evicted=self._evicted,
                removed=self._removed,
                max_event_time=seen.counters[NEWEST],
                non_finite=seen.counters[NON_FINITE],
            )

    def close(self) -> None:
        with suppress(TableClosedError), self._open() as memory:
            self._watch.tell_touched()
            memory.keep_for(self._stream)
            self._memory = None

    # Inside. Every method below is called with the lock held.

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[DeviceMemory]:
        with self._lock, self._owner.active():
            if writing:
                self._thawed.wait_for(lambda: not self._frozen)
            stream = self._owner.current_stream()
            self._held.stream = stream.handle
            if stream != self._stream:
                stream.wait_for(self._stream)
                self._stream = stream
            yield self._held  # which nobody else keeps alive

    @property
    def _held(self) -> DeviceMemory:
        """The memory there is now: it is another one after growth."""
        if self._memory is None:
            raise TableClosedError(f"table {self._config.name!r} was closed")
        return self._memory

    def _put(self, ids: Tensor, times: Times, values: Tensor, state: Tensor | None, *, whole: bool) -> None:
        def put(claimed: Claimed) -> None:
            self._held.put(claimed, values, state, whole=whole, scalars=self._paces.scalars())

        batch = _Batch(ids, times, put)
        if not self._config.skip_zero:
            self._write(batch, None if whole else self._turned_away(batch, None, None))
            return
        zero = (values * values).sum(1) < _SMALLEST_NORMAL
        for run, is_zero in newcomers.runs(ids.cpu(), zero.cpu()):
            mine = run.to(self._device)
            if is_zero:
                self._remove(ids[mine])
            else:
                outside = (~mine).to(torch.uint8) * ELSEWHERE
                self._write(batch, outside if whole else self._turned_away(batch, outside, None))

    def _write(self, batch: _Batch, skip: Tensor | None) -> None:
        if not len(batch.ids):
            return
        if self._makes_room(batch, skip):
            self._write_now(batch, skip, None)
            return
        if batch.unusable is not None:
            skip = batch.unusable()
        if self._config.when_full == "refuse":
            self._write_full(batch, skip)
            return
        keys = batch.ids.cpu().numpy()
        for part in newcomers.parts(keys, max(1, self._limit // _PART)):
            outside = torch.from_numpy(np.where(part, 0, ELSEWHERE).astype(np.uint8)).to(self._device)
            self._write_full(batch, outside if skip is None else skip | outside)

    def _write_now(self, batch: _Batch, skip: Tensor | None, born: Tensor | None) -> None:
        """Write, given room for all. Rows at the places `born` are new, though claimed before."""
        looked_at = batch.unusable is None or skip is not None
        claimed = self._held.claim(batch.ids, batch.times, skip, clock=looked_at)
        if born is not None:
            claimed.made.copy_(torch.isin(claimed.places, born))
        self._watch.writing(self._held, claimed)
        batch.work(claimed)
        self._fill.grew(len(batch.ids), self._limit)
        self._watch.wrote(batch.ids, claimed.places)

    def _write_full(self, batch: _Batch, skip: Tensor | None) -> None:
        """Write where there may not be room for all: those who come first are let in."""
        coming, room = self._newcomers(batch, skip)
        while len(coming) > room and self._config.when_full == "expire_oldest":
            gone = self._expire_oldest(len(coming) - room, batch.times.latest(skip))
            if not gone:
                break
            coming, room = self._newcomers(batch, skip)  # some of the batch may have gone
        taken, left = np.split(coming, [min(room, len(coming))])
        if self._fill.read().counters[USED] + len(taken) > _CLEANED * self._held.places:
            self._held.tidy()
        born = self._held.claim_absent(torch.from_numpy(taken).to(self._device))
        if len(left):
            outside = torch.isin(batch.ids, torch.from_numpy(left).to(self._device))
            if skip is not None:
                outside &= skip == 0
            self._refused += len(left) if batch.dedup else int(outside.sum())
            turned = outside.to(torch.uint8) * TURNED_AWAY
            skip = turned if skip is None else skip | turned
            self._refusals.note(self._refused, lambda: self._fill.read().rows)
        self._write_now(batch, skip, born)

    def _makes_room(self, batch: _Batch, skip: Tensor | None) -> bool:
        """Grow if need be; False where the table may not hold all that come."""
        n = len(batch.ids)
        if self._fill.bound() + n <= self._limit:
            return True
        seen = self._fill.read()
        used = seen.counters[USED]
        if used + n <= self._limit:
            return True
        unknown = self._unknown(batch, skip)
        coming = len(torch.unique(batch.ids[unknown]))
        if used + coming > self._limit >= seen.rows + coming:
            self._held.tidy()
            seen = self._fill.read()
        if seen.counters[USED] + coming <= self._limit:
            return True
        if not self._room.grows(self._held.places):
            return False
        self._move(self._room.grown(self._held.places, seen.rows + coming), seen.rows, coming)
        return seen.rows + coming <= self._limit

    def _reserve(self, ids: int) -> None:
        """Grow if so many ids may not find room, such that some batches more will before it comes to that."""
        if self._fill.bound() + ids <= self._limit:
            return
        seen = self._fill.read()
        if seen.rows + _SPARE * ids <= self._limit < seen.counters[USED] + ids:
            self._held.tidy()
            seen = self._fill.read()
        if seen.counters[USED] + _SPARE * ids > self._limit:
            self._move(self._room.reserved(self._held.places, seen.rows, 2 * _SPARE * ids), seen.rows, ids)

    @property
    def _writes_alone(self) -> bool:
        """Whether what is written needs more than places, so that it cannot be written with other tables'."""
        return self._admission is not None or not self._watch.idle or self._room.bounded

    @property
    def _limit(self) -> int:
        """Places that may be in use."""
        return self._room.limit(self._held.places)

    def _shrink(self) -> None:
        """Give memory back that nearly nobody uses."""
        rows = self._fill.read().rows
        places = self._room.shrunk(self._held.places, rows)
        if places is not None:
            self._move(places, rows)

    def _move(self, places: int, rows: int, coming: int = 0) -> None:
        """Move all rows to a memory of about this size, which has room for those that come."""
        before, sizes = self._held, self._room.sizes(places, rows + coming)
        while True:
            try:
                self._memory = before.moved(sizes.pop(0))
                break
            except AcceleratorError:
                if not sizes:
                    raise
        before.keep_for(self._stream)
        self._fill.holds(rows)

    def _new_memory(self, rows: int) -> DeviceMemory:
        places, stream = self._room.first(rows), self._stream.handle
        memory = DeviceMemory(self._layout, self._fill.counters, places, device=self._owner, stream=stream)
        if self._remembers_use:
            memory.recency = Recency(places + BESIDE, self._device)
        return memory

    def _unknown(self, batch: _Batch, skip: Tensor | None) -> Tensor:
        unknown = self._held.find(batch.ids) == NONE
        return unknown if skip is None else unknown & (skip == 0)

    def _newcomers(self, batch: _Batch, skip: Tensor | None) -> tuple[NDArray[np.int64], int]:
        """Return ids without a row, in the order of first sight, and how many may have one."""
        ids = batch.ids[self._unknown(batch, skip)].cpu().numpy()
        return newcomers.in_order(ids), max(0, self._limit - self._fill.read().rows)

    def _turned_away(self, batch: _Batch, skip: Tensor | None, counts: Tensor | None) -> Tensor | None:
        """Ask the filter about ids without a row; return who is passed over in the end."""
        if self._admission is None:
            return skip
        unknown = self._unknown(batch, skip).cpu().numpy()
        if not unknown.any():
            return skip
        seen = np.ones(len(unknown), np.int64) if counts is None else counts.numpy()
        verdict = newcomers.ask_filter(
            self._admission, batch.ids.cpu().numpy()[unknown], seen[unknown], together=batch.dedup
        )
        self._filtered += verdict.filtered
        turned = np.zeros(len(unknown), np.uint8)
        turned[unknown] = verdict.waits * np.uint8(TURNED_AWAY)
        on_device = torch.from_numpy(turned).to(self._device)
        return on_device if skip is None else skip | on_device

    def _expire_oldest(self, wanted: int, latest: int) -> int:
        """Drop the oldest rows that are not newer than `latest`: an event of the past pushes out none."""
        memory, rows = self._held, self._fill.read().rows
        _, places, _ = memory.listed(rows, latest=latest)
        oldest = torch.sort(memory.times_at(places), stable=True).indices[: max(wanted, rows // 32)]
        gone = self._drop(places[oldest])
        self._evicted += gone
        return gone

    def _ages(self, now: int) -> Ages:
        return Ages(now, int(self._config.expiry.default.total_seconds()), self._live_by_slot)

    def _remove(self, ids: Tensor) -> int:
        places = self._held.find(ids)
        removed = self._drop(torch.unique(places[places != NONE]).to(torch.int64))
        self._removed += removed
        return removed

    def _drop(self, places: Tensor) -> int:
        """Drop the rows at int64 places, each once."""
        if not len(places):
            return 0
        self._watch.dropping(self._held, places)
        return self._held.drop(places)

    def _tell_touched(self) -> None:
        with suppress(TableClosedError), self._open():
            self._watch.tell_touched()
