"""CudaTable: a table in the memory of a GPU.

Index and rows lie on the device (`places.cuh` says how), and every call is a few kernels on the caller's
stream. The host keeps an upper bound of how full the index is, so that it neither waits for the device nor
lets it overflow: only when the bound comes near is the true number asked for, and the table grown if need be.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda.device import Device, device_of
from monolith.errors import AcceleratorError, ConfigError, TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter
from monolith.table.compressors import OneBit
from monolith.table.config import TableConfig
from monolith.table.cuda import newcomers
from monolith.table.cuda.fill import Fill
from monolith.table.cuda.inputs import Inputs
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import (
    BESIDE,
    COUNTERS,
    ELSEWHERE,
    INSERTED,
    KEYS,
    NEWEST,
    NON_FINITE,
    NONE,
    TURNED_AWAY,
    USED,
    Claimed,
    DeviceMemory,
    Times,
)
from monolith.table.hashing import unmix
from monolith.table.refusals import Refusals
from monolith.table.table import Rows, Scan, TableStats
from monolith.table.touched_keys import TouchedKeySet

_LEAST_PLACES = 256
_FULL = 0.75  # of its places are in use when a table grows
_AFTER_GROWTH = 0.375
_BRIM = 0.9  # of the places of a table that may not grow
_CLEANED = 0.95  # in use, marks included: then marks are cleared away
_SPARE = 2  # batches that find room without a question
_PART = 8  # of a full table comes and goes at once, as a share
_LAST_HASH = (1 << 64) - 1
_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)

Work = Callable[[Claimed], None]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Ids to be given rows, and what is done to those."""

    ids: Tensor
    times: Times
    work: Work
    dedup: bool = False
    touches: bool = False


class CudaTable:
    """A `Table` on a CUDA device. Thread-safe: calls follow one another, on whatever streams they come.

    Tensors on the CPU are answered on the CPU, tensors on the table's device on the device. With those,
    `lookup` and `apply_gradients` do not wait for the device, unless the table has an admission filter, a
    `touched` set or no room for as many new ids as the batch has. Event times on the device are not looked
    at before they are written: an impossible one counts as 0 and a later call raises TableArgumentError.

    Results are those of `NativeTable` to the bit, except where a one_bit segment asks for a tanh. Of equal
    ids gradients are summed in the order of the batch.

    Not here yet: cuts, so that a dump holds training up (`frozen`); rows that decay by steps they are not in
    (`lazy_decay`); giving memory back after `evict`; and a budget that holds while a table grows: for a
    moment there are old and new rows.

    Args:
        admission: Asked about ids without a row before they are given one; None admits all.
        touched: Told the ids that gradients or `reinitialize` changed.
        device: One of torch's, or one that stands for it; the current CUDA device by default.

    Raises:
        AcceleratorError: There is no such device, or the kernels cannot be made for it.
        ConfigError: `capacity_bytes` is less than the smallest table needs, or an optimizer decays lazily.
    """

    def __init__(
        self,
        config: TableConfig,
        *,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
        device: torch.device | Device | None = None,
    ) -> None:
        try:
            owner = device_of(device)
        except AcceleratorError as cause:
            raise AcceleratorError(f"table {config.name!r}: {cause}; or use a NativeTable") from cause
        if any(getattr(segment.optimizer.rule, "lazy_decay", False) for segment in config.segments):
            raise ConfigError(
                f"table {config.name!r}: rows on a GPU do not decay by steps they are not in yet; use a "
                "NativeTable, or lazy_decay=False"
            )
        self._config = config
        self._owner = owner
        self._device = owner.torch_device
        self._admission = None if admission is None or admission.core is None else admission
        self._touched = touched
        self._layout = row_layout(config)
        self._most_places = _most_places(config, self._layout.bytes_per_place)
        self._fixed_rates = arguments.fixed_rates(config.segments)
        self._alike = _trained_alike(config)
        self._refusals = Refusals(config)
        by_slot = config.expiry.seconds_by_slot() if config.expiry.per_slot else None
        self._lock = threading.Lock()
        self._thawed = threading.Condition(self._lock)
        # All below is guarded by the lock.
        self._frozen = 0
        self._scales = [float(np.float32(s.compressor.initial_scale)) for s in config.segments]
        self._filtered = self._refused = self._evicted = self._removed = 0
        with owner.active():
            self._stream = owner.current_stream()
            self._live_by_slot = None if by_slot is None else torch.from_numpy(by_slot).to(self._device)
            counters = torch.zeros(COUNTERS, dtype=torch.int64, device=self._device)
            self._fill = Fill(config.name, counters, owner)
            self._inputs = Inputs(config, counters, owner)
            self._memory: DeviceMemory | None = self._new_memory(config.initial_rows)

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
            memory.lookup(keys, self._scales, values)
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
            batch = _Batch(keys, times, lambda claimed: self._held.add(claimed, added))
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
            self._begin_step(step)
            paces = rates.tolist()

            def train(claimed: Claimed) -> None:
                self._held.train(
                    claimed,
                    by,
                    latest,
                    rates=paces,
                    scales=self._scales,
                    step=step,
                    summed=dedup,
                    checked=not self._stays_finite(paces),
                )

            batch = _Batch(keys, times, train, dedup, touches=True)
            self._write(batch, self._turned_away(batch, memory.unusable(by), sightings))

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id that had no row and found no room for one."""
        with self._open(writing=True):
            arguments.check_trainable(self._config, "reinitialize")
            keys = self._inputs.ids(ids)
            times = Times(None, arguments.event_second(now, "now"))
            status = torch.full((len(keys),), -1, dtype=torch.int8, device=self._device)
            batch = _Batch(keys, times, lambda claimed: self._held.reset(claimed, status), touches=True)
            self._write(batch, None)
            return status.to(ids.device)

    def remove(self, ids: Tensor) -> int:
        with self._open(writing=True):
            return self._remove(self._inputs.ids(ids))

    def count_expired(self, now: int) -> int:
        with self._open():
            return self._expire(now, dropping=False)

    def evict(self, now: int | None = None) -> int:
        with self._open(writing=True):
            evicted = self._expire(self._fill.read().counters[NEWEST] if now is None else now, dropping=True)
            self._evicted += evicted
            return evicted

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes, on the CPU: a shard is a range of hashes."""
        with self._open() as memory:
            begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
            hashes, places, following = self._chunk(begin, min(end - 1, _LAST_HASH), limit)
            times, values, state = memory.read(places.to(torch.int32))
            ids = torch.from_numpy(unmix(hashes.cpu().numpy().view(np.uint64)))
            return Scan(Rows(ids, times.cpu(), values.cpu(), state.cpu()), following)

    def restore(self, rows: Rows) -> None:
        with self._open(writing=True):
            keys, times, values, state = self._inputs.rows(rows)
            self._put(keys, times, values, state, whole=True)

    def clear(self, *, expect_rows: int = 0) -> None:
        with self._open(writing=True):
            self._memory = None  # given back before the new one is taken
            self._memory = self._new_memory(expect_rows)
            self._fill.clear()

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

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        with self._open():
            return list(self._scales)

    def set_scales(self, scales: Sequence[float]) -> None:
        with self._open():
            if len(scales) != len(self._scales):
                raise TableArgumentError(
                    f"table {self._config.name!r}: needs {len(self._scales)} scales, got {len(scales)}"
                )
            self._scales = [float(np.float32(scale)) for scale in scales]

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
        with self._lock:
            if self._memory is not None:
                self._memory.keep_for(self._stream)
            self._memory = None

    # Inside. Every method below is called with the lock held.

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[DeviceMemory]:
        with self._lock, self._owner.active():
            if writing:
                self._thawed.wait_for(lambda: not self._frozen)
            memory = self._held
            stream = self._owner.current_stream()
            if stream != self._stream:
                stream.wait_for(self._stream)
                self._stream = stream
                memory.stream = stream.handle
            yield memory

    @property
    def _held(self) -> DeviceMemory:
        """The memory there is now: it is another one after growth."""
        if self._memory is None:
            raise TableClosedError(f"table {self._config.name!r} was closed")
        return self._memory

    def _put(self, ids: Tensor, times: Times, values: Tensor, state: Tensor | None, *, whole: bool) -> None:
        def put(claimed: Claimed) -> None:
            self._held.put(claimed, values, state, whole=whole)

        batch = _Batch(ids, times, put)
        if not self._config.skip_zero:
            self._write(batch, None if whole else self._turned_away(batch, None, None))
            return
        zero = (values * values).sum(1) < _SMALLEST_NORMAL
        for run, is_zero in _runs(ids.cpu(), zero.cpu()):
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
        if self._config.when_full == "refuse":
            self._write_full(batch, skip)
            return
        keys = batch.ids.cpu().numpy()
        for part in newcomers.parts(keys, max(1, self._limit // _PART)):
            outside = torch.from_numpy(np.where(part, 0, ELSEWHERE).astype(np.uint8)).to(self._device)
            self._write_full(batch, outside if skip is None else skip | outside)

    def _write_now(self, batch: _Batch, skip: Tensor | None, born: Tensor | None) -> None:
        """Write, given room for all. Rows at the places `born` are new, though claimed before."""
        claimed = self._held.claim(batch.ids, batch.times, skip)
        if born is not None:
            claimed.made.copy_(torch.isin(claimed.places, born))
        batch.work(claimed)
        self._fill.grew(len(batch.ids), self._limit)
        if batch.touches and self._touched is not None:
            changed = torch.unique(batch.ids[claimed.places != NONE]).cpu()
            if len(changed):
                self._touched.insert(changed)

    def _write_full(self, batch: _Batch, skip: Tensor | None) -> None:
        """Write where there may not be room for all: those who come first are let in."""
        coming, room = self._newcomers(batch, skip)
        while len(coming) > room and self._config.when_full == "expire_oldest":
            gone = self._expire_oldest(len(coming) - room, self._latest(batch, skip))
            if not gone:
                break
            coming, room = self._newcomers(batch, skip)  # some of the batch may have gone
        taken, left = np.split(coming, [min(room, len(coming))])
        if self._fill.read().counters[USED] + len(taken) > _CLEANED * self._held.places:
            self._move(self._held.places)
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
        if used + coming <= self._limit:
            return True
        if self._held.places == self._most_places:
            return False
        wanted = min(_places_for(seen.rows + coming, _AFTER_GROWTH), self._most_places or _LAST_HASH)
        self._move(max(wanted, self._held.places))
        return seen.rows + coming <= self._limit

    def _reserve(self, ids: int) -> None:
        """Grow if so many ids may not find room, such that some batches more will before it comes to that."""
        if self._fill.bound() + ids <= self._limit:
            return
        seen = self._fill.read()
        if seen.counters[USED] + _SPARE * ids > self._limit:
            wanted = _places_for(seen.rows + ids, _AFTER_GROWTH)
            self._move(max(wanted, _places_for(seen.rows + 2 * _SPARE * ids, _FULL), self._held.places))

    @property
    def _writes_alone(self) -> bool:
        """Whether what is written needs more than places, so that it cannot be written with other tables'."""
        return self._admission is not None or self._touched is not None or self._most_places is not None

    @property
    def _limit(self) -> int:
        """Places that may be in use."""
        places = self._held.places
        return int(places * (_BRIM if places == self._most_places else _FULL))

    def _move(self, places: int) -> None:
        before = self._held
        self._memory = before.moved(places)
        before.keep_for(self._stream)
        self._fill.read()

    def _new_memory(self, rows: int) -> DeviceMemory:
        places = max(_LEAST_PLACES, _places_for(rows, _FULL))
        if self._most_places is not None:
            places = min(places, self._most_places)
        stream = self._stream.handle
        return DeviceMemory(self._layout, self._fill.counters, places, device=self._owner, stream=stream)

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

    def _latest(self, batch: _Batch, skip: Tensor | None) -> int:
        each = batch.times.each
        if each is None:
            return batch.times.all
        seconds = each.to(torch.int64) & 0xFFFF_FFFF
        if skip is not None:
            seconds = seconds[skip == 0]
        return int(seconds.max()) if len(seconds) else 0

    def _expire_oldest(self, wanted: int, latest: int) -> int:
        """Drop the oldest rows that are not newer than `latest`: an event of the past pushes out none."""
        memory, rows = self._held, self._fill.read().rows
        _, places, _ = memory.listed(rows, latest=latest)
        oldest = torch.sort(memory.times_at(places), stable=True).indices[: max(wanted, rows // 32)]
        gone = memory.drop(places[oldest])
        self._evicted += gone
        return gone

    def _expire(self, now: int, *, dropping: bool) -> int:
        to_live = int(self._config.expiry.default.total_seconds())
        return self._held.expire(now, to_live, self._live_by_slot, dropping=dropping)

    def _remove(self, ids: Tensor) -> int:
        removed = self._held.remove(ids)
        self._removed += removed
        return removed

    def _chunk(self, first: int, last: int, limit: int) -> tuple[Tensor, Tensor, int | None]:
        """Return hashes and places of the first rows of a range of hashes, and the hash to go on from."""
        rows = self._fill.read().rows
        # Hashes are spread evenly: so much of the range should hold what is asked for, and a little more.
        wanted = limit + 4 * int(limit**0.5) + 16
        room = min(rows, 2 * wanted)
        width = last - first if rows <= wanted else wanted * (_LAST_HASH // rows)
        while True:
            until = min(last, first + width)
            hashes, places, found = self._held.listed(room, first=first, last=until)
            if found > room:
                width //= 2
            elif found > limit:
                following = int(hashes[limit - 1].item()) & _LAST_HASH
                return hashes[:limit], places[:limit], following + 1
            elif until == last:
                return hashes, places, None
            elif found:
                return hashes, places, until + 1
            else:
                first, width = until + 1, 2 * width + 1

    # Training

    def _begin_step(self, step: int) -> None:
        for number, segment in enumerate(self._config.segments):
            compressor = segment.compressor
            if isinstance(compressor, OneBit) and step % compressor.step_size == 0:
                first, most = np.float32(compressor.init_scale), np.float32(compressor.max_scale)
                self._scales[number] = float(
                    min(np.float32(float(first) * math.sqrt(1.0 + 0.005 * step)), most)
                )

    def _stays_finite(self, rates: Sequence[float]) -> bool:
        """Whether steps by usable gradients leave every row finite, so that nobody has to look."""
        decay = getattr(self._config.segments[0].optimizer.rule, "weight_decay", 0.0)
        return self._alike and all(rate == rates[0] for rate in rates) and not abs(rates[0] * decay) > 1


def _trained_alike(config: TableConfig) -> bool:
    first = config.segments[0].optimizer
    alike = all(s.optimizer == first and not isinstance(s.compressor, OneBit) for s in config.segments)
    by_value = first.state_dim(2) in (0, 2) and first.rule.kind != "batch_softmax"
    plain = first.delay_compensation is None and not first.stochastic_rounding
    return alike and plain and (len(config.segments) == 1 or by_value)


def _most_places(config: TableConfig, bytes_per_place: int) -> int | None:
    if config.capacity_bytes is None:
        return None
    places = (config.capacity_bytes // bytes_per_place - BESIDE) // KEYS * KEYS
    if places < KEYS:
        raise ConfigError(
            f"table {config.name!r}: capacity_bytes is {config.capacity_bytes:,}, and on a GPU a table of "
            f"such rows needs {(KEYS + BESIDE) * bytes_per_place:,} at least"
        )
    return places


def _places_for(rows: int, load: float) -> int:
    return (int(rows / load) // KEYS + 1) * KEYS


def _runs(ids: Tensor, zero: Tensor) -> Iterator[tuple[Tensor, bool]]:
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
