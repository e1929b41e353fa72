"""CudaTable: a table in the memory of a GPU.

Index and rows are on the device (`places.cuh` says how), and every call is a few kernels on the caller's
stream. The host keeps an upper bound of how full the index is, so that it neither waits for the device nor
lets it overflow: only when the bound comes near is the true number asked for, and the table grown if need be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from monolith.cuda.device import Device, device_of
from monolith.cuda.transfers import Parts
from monolith.errors import AcceleratorError, TableArgumentError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter, MovableFilter
from monolith.table.config import TableConfig
from monolith.table.cuda.inputs import Inputs
from monolith.table.cuda.layout import StepScalars, row_layout
from monolith.table.cuda.memory import (
    BEFORE,
    ELSEWHERE,
    EXTRA_PLACES,
    FILTERED,
    INSERTED,
    NEWEST,
    NON_FINITE,
    NONE,
    TAKEN,
    USED,
    Claimed,
    DeviceMemory,
    Recency,
    Times,
)
from monolith.table.cuda.resident_rows import ResidentRows, WriteBatch, runs_by_kind
from monolith.table.cuda.snapshots import (
    LAST_HASH,
    CudaTableSnapshot,
    Removed,
    SnapshotChunk,
    SnapshotMoment,
    WholeCopy,
    first_rows,
    merged_scan,
)
from monolith.table.cuda.tracking import ids_of
from monolith.table.digests import bucket_numbers, check_share
from monolith.table.table import Rows, Scan, TableStats
from monolith.table.touched_keys import TouchedKeySet

_UNTIDY = 8  # one in so many places is marked: then they are worth being freed
_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


class CudaTable:
    """A `Table` on a CUDA device. Thread-safe: calls follow one another, on whatever streams they come.

    Shapes: n ids of a call, dim floats of an embedding; ids are int64 of shape (n,), embeddings float32 of
    shape (n, dim).

    Tensors on the CPU are answered on the CPU, tensors on the table's device on the device. With those,
    `lookup` and `apply_gradients` do not wait for the device, unless the table has a `touched` set, no room
    for as many new ids as the batch has, or an admission filter that others ask, too. Event times on the
    device are not looked at before they are written: an impossible one counts as 0 and a later call raises
    TableArgumentError.

    Results are those of `NativeTable` to the bit, except where a one_bit segment asks for a tanh. Of equal
    ids gradients are summed in the order of the batch.

    Publishers may follow it (`touch`, `digests`), and it can be snapshotted. A snapshot is a copy on the
    device until it is closed; where less than twice the table's memory is free, it uses up to 2 GB of the
    device for copies of rows that changed, and host memory for more. While changes are tracked, a place costs
    one byte more. `capacity_bytes` bounds index and rows without that, at every moment: while a table grows,
    old and new together are not more. Memory that `evict` makes idle is returned to torch.

    Args:
        admission: Asked about ids without a row before they are given one; None admits all. It counts on the
            device from now on, if there is room; see `DeviceFilter`.
        touched: A set that gets the ids whose rows changed or were removed; see `touch`.
        device: A CUDA device of torch, or a `Device`; the current CUDA device by default.
        remembers_use: Whether to keep when each row was last written, for `idle`.

    Raises:
        AcceleratorError: There is no such device, or the kernels cannot be made for it.
        ConfigError: `capacity_bytes` is less than the smallest table needs.

    Examples:
        >>> import torch
        >>> from monolith import CudaTable, Segment, TableConfig
        >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
        >>> if torch.cuda.is_available():
        ...     table = CudaTable(config)
        ...     ids = torch.tensor([7, 8], device="cuda")
        ...     table.apply_gradients(ids, torch.ones(2, 2, device="cuda"), step=1)
        ...     assert table.lookup(ids).device.type == "cuda"  # rows never leave the device
    """

    cold: None = None

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
        movable = isinstance(admission, MovableFilter)  # whose `core` is for tables in host memory
        self._admission = None if admission is None or (not movable and admission.core is None) else admission
        self._layout = row_layout(config)
        self._fixed_rates = arguments.fixed_rates(config.segments)
        # Reentrant: a replayed step holds the locks of all tables, and a device without graphs replays it by
        # making its calls again.
        self._lock = threading.RLock()
        self._thawed = threading.Condition(self._lock)
        # All below is guarded by the lock.
        self._frozen = 0
        self._scalars = StepScalars(config, lazy=self._layout.lazy)
        with owner.active():
            self._stream = owner.current_stream()
            self._rows = ResidentRows(
                config,
                self._layout,
                owner,
                admission=self._admission,
                remembers_use=remembers_use,
                tell=self._tell_touched,
            )
            self._inputs = Inputs(config, self._rows.usage.counters, owner)
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
    def cuda(self) -> Device:
        """The GPU that the rows are on, as kernels know it."""
        return self._owner

    def __len__(self) -> int:
        with self._open():
            return self._rows.usage.read().rows

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        with self._open() as memory:
            keys = self._inputs.ids(ids)
            answer, values = self._inputs.out(out, ids, (len(keys), self.dim))
            memory.lookup(keys, self._scalars.scalars(), values)
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
        return self._rows.growth.most_rows

    def idle(self, count: int, excluded: Tensor) -> Tensor:
        """Return the ids, on the CPU, of rows that were not written for longest; waits for the device.

        Needs `remembers_use`.

        Args:
            count: So many at most.
            excluded: Ids that are not returned; they need not have rows.
        """
        with self._open() as memory:
            return ids_of(memory.idle(count, self._inputs.ids(excluded)))

    # For `HotRows`, which moves rows between this table and host memory

    # Launching nothing, these take the lock alone.

    @property
    def moves_freely(self) -> bool:
        """Whether rows may come and go untold: no snapshot is open, and changes are not tracked."""
        with self._lock:
            return self._memory.flags is None

    def recency(self) -> Recency:
        """Return when rows were used. Needs `remembers_use`."""
        with self._lock:
            found = self._memory.recency
            assert found is not None
            return found

    def free_places(self, *, wait: bool) -> int:
        """Return for how many new ids there surely is a place; `wait` for the device to know it exactly."""
        if not wait:
            with self._lock:
                return self._rows.limit - self._rows.usage.bound()
        with self._open():
            self._rows.usage.read()
            return self._rows.limit - self._rows.usage.bound()

    @property
    def rows_at_most(self) -> int:
        """An upper bound of how many rows there are, without waiting for the device."""
        with self._lock:
            return self._rows.usage.bound()

    def spill_parts(self, count: int) -> Parts:
        """Return the columns that `spill_idle` fills."""
        with self._lock:
            return self._memory.spill_parts(count)

    def spill_idle(self, count: int, into: Tensor) -> None:
        """Move the rows out that were not used for longest, `count` at most; waits for nothing.

        Args:
            into: uint8 on the device: memory for the columns of `spill_parts`.
        """
        with self._open(writing=True) as memory:
            memory.spill_idle(count, into)

    @property
    def untidy(self) -> bool:
        """Whether many places are marked for rows that have gone, as far as the host knows: they count as in
        use, and so leave less room for rows."""
        with self._lock:
            return self._rows.usage.marks > self._memory.places // _UNTIDY

    def tidy(self) -> None:
        """Free the places of rows that have gone and are marked; waits for nothing."""
        with self._open(writing=True) as memory:
            memory.tidy()
            self._rows.usage.marks = 0  # few, until the counters are read again

    def expire_oldest(self, count: int, latest: int) -> int:
        """Drop rows with the oldest event times, none newer than `latest`; return how many.

        Args:
            count: So many or some more, where there are.
        """
        with self._open(writing=True):
            return self._rows.expire_oldest(count, latest)

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
            batch = WriteBatch(
                keys, times, lambda claimed: self._memory.add(claimed, added, self._scalars.scalars())
            )
            self._rows.write(batch, self._rows.turned_away(batch, None, None))

    def apply_gradients(
        self, ids: Tensor, gradients: Tensor, **options: Unpack[arguments.UpdateOptions]
    ) -> None:
        step, event_time, learning_rates, dedup, latest_values, counts = arguments.update_options(options)
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
            by_segment = rates.tolist()
            self._scalars.begin(step, by_segment)

            def train(claimed: Claimed) -> None:
                self._memory.train(
                    claimed,
                    by,
                    latest,
                    scalars=self._scalars.scalars(by_segment),
                    step=step,
                    summed=dedup,
                    checked=not self._scalars.stay_finite(by_segment),
                )

            # Kernels find unusable gradients while they train. Only if the ids that get a row must be known
            # before (for the filter, for touched sets and snapshots) are the gradients read twice.
            if self._admission is None and self._rows.watch.idle:
                self._rows.write(
                    WriteBatch(keys, times, train, dedup, lambda: self._memory.unusable(by)), None
                )
            else:
                batch = WriteBatch(keys, times, train, dedup)
                self._rows.write(batch, self._rows.turned_away(batch, memory.unusable(by), sightings))

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id without a row if there is no memory for one."""
        with self._open(writing=True):
            arguments.check_trainable(self._config, "reinitialize")
            keys = self._inputs.ids(ids)
            times = Times(None, arguments.event_second(now, "now"))
            status = torch.full((len(keys),), -1, dtype=torch.int8, device=self._device)
            batch = WriteBatch(keys, times, lambda claimed: self._memory.reset(claimed, status))
            self._rows.write(batch, None)
            return status.to(ids.device)

    def remove(self, ids: Tensor) -> int:
        with self._open(writing=True):
            return self._rows.remove(self._inputs.ids(ids))

    def count_expired(self, now: int) -> int:
        with self._open() as memory:
            return memory.listed(0, ages=self._rows.ages(now))[2]

    def evict(self, now: int | None = None) -> int:
        with self._open(writing=True):
            return self._rows.evict(now)

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes, on the CPU: a shard is a range of hashes."""
        with self._open() as memory:
            begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
            last, held = min(end - 1, LAST_HASH), self._rows.usage.read().rows
            rows, following = first_rows(memory, held, limit, first=begin, last=last)
        return merged_scan([rows.moved_to("cpu")], limit, following)

    def restore(self, rows: Rows) -> None:
        with self._open(writing=True):
            keys, times, values, state = self._inputs.rows(rows)
            self._scalars.note(None if state is None else rows.state.cpu().numpy())
            self._put(keys, times, values, state, whole=True)

    def clear(self, *, expect_rows: int = 0) -> None:
        with self._open(writing=True):
            self._rows.clear(expect_rows)
            self._scalars.forget()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Pause writers while the block runs; readers continue. Nests."""
        with self._open():
            self._frozen += 1
        try:
            yield
        finally:
            with self._lock:
                self._frozen -= 1
                self._thawed.notify_all()

    def snapshot(self) -> CudaTableSnapshot:
        """Open a snapshot: a copy of the table, or, without room for it, of rows before they change."""
        with self._open() as memory:
            seen = self._rows.usage.read()
            copies, gone = self._rows.watch.open_snapshot(memory, seen.rows)
            moment = SnapshotMoment(seen.rows, list(self._scalars.scales), seen.counters[NEWEST], gone)
            read = copies.read if isinstance(copies, WholeCopy) else self.read_snapshot
            return CudaTableSnapshot(
                self._config, self._owner, moment, copies, read=read, end=self.end_snapshot
            )

    def read_snapshot(self, first: int, last: int, limit: int, changed_only: bool) -> SnapshotChunk:
        """Return a chunk of the open snapshot, without waiting for the device. Called by the snapshot."""
        with self._open() as memory:
            copies = self._rows.watch.copies
            if copies is None:
                raise TableArgumentError("scan: the snapshot was closed")
            # Copies join the sorted pieces, so that they can be read by range. Rows in the table that are not
            # TAKEN are as they were when the snapshot was opened.
            copies.seal(memory)
            flags, held = BEFORE if changed_only else 0, self._rows.usage.read().rows
            rows, following = first_rows(
                memory, held, limit, first=first, last=last, flags=flags, no_flags=TAKEN
            )
            until = last if following is None else following - 1
            return SnapshotChunk(rows, copies.between(first, until, changed_only=changed_only), following)

    def end_snapshot(self, unsaved: Removed | None) -> None:
        """Close the open snapshot. Called by the snapshot."""
        with suppress(TableClosedError), self._open() as memory:
            self._rows.watch.close_snapshot(memory, unsaved)

    def track_changes(self, on: bool = True) -> None:
        with self._open() as memory:
            self._rows.watch.track(memory, on=on)

    def touch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._rows.watch.touch(touched)

    def untouch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._rows.watch.untouch(touched)

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        into, count = bucket_numbers(buckets), len(buckets)
        check_share(share)
        with self._open() as memory:
            return memory.digests(into.to(self._device), *share, count).cpu()

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        with self._open():
            return list(self._scalars.scales)

    def set_scales(self, scales: Sequence[float]) -> None:
        with self._open():
            self._scalars.set_scales(scales)

    def stats(self) -> TableStats:
        with self._open() as memory:
            seen = self._rows.usage.read()
            return TableStats(
                rows=seen.rows,
                bytes_total=memory.bytes_index + memory.bytes_rows + self._rows.bytes_ahead,
                bytes_rows=memory.bytes_rows,
                bytes_index=memory.bytes_index,
                load=seen.counters[USED] / (memory.places + EXTRA_PLACES),
                inserted=seen.counters[INSERTED],
                filtered=self._rows.filtered + seen.counters[FILTERED],
                refused=self._rows.refused,
                evicted=self._rows.evicted,
                removed=self._rows.removed,
                max_event_time=seen.counters[NEWEST],
                non_finite=seen.counters[NON_FINITE],
            )

    def close(self) -> None:
        with suppress(TableClosedError), self._open():
            self._rows.close()

    # Inside. Every method below is called with the lock held.

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[DeviceMemory]:
        """Enter a call: take the lock, and put the call's kernels behind those of all calls before it.

        The lock orders calls on the host; kernels are ordered by streams. Calls may come on different
        streams, so the new stream waits, on the device, for the stream of the last call. The host never waits
        here.
        """
        with self._lock, self._owner.active():
            if writing:
                self._thawed.wait_for(lambda: not self._frozen)
            stream = self._owner.current_stream()
            self._memory.stream = stream.handle
            if stream != self._stream:
                stream.wait_for(self._stream)
                self._stream = stream
            # The generator holds no reference of its own: when the table grows, the old memory is freed at
            # once.
            yield self._memory

    @property
    def _memory(self) -> DeviceMemory:
        """The memory there is now: it is another one after growth."""
        return self._rows.memory

    def _put(self, ids: Tensor, times: Times, values: Tensor, state: Tensor | None, *, whole: bool) -> None:
        def put(claimed: Claimed) -> None:
            self._memory.put(claimed, values, state, whole=whole, scalars=self._scalars.scalars())

        batch = WriteBatch(ids, times, put)
        if not self._config.skip_zero:
            self._rows.write(batch, None if whole else self._rows.turned_away(batch, None, None))
            return
        # A table that skips zeros removes a row that is set to zero. In a batch with equal ids the order
        # matters: runs of positions to write and to remove alternate.
        zero = (values * values).sum(1) < _SMALLEST_NORMAL
        for run, is_zero in runs_by_kind(ids.cpu(), zero.cpu()):
            mine = run.to(self._device)
            if is_zero:
                self._rows.remove(ids[mine])
            else:
                outside = (~mine).to(torch.uint8) * ELSEWHERE
                self._rows.write(batch, outside if whole else self._rows.turned_away(batch, outside, None))

    def _tell_touched(self) -> None:
        with suppress(TableClosedError), self._open():
            self._rows.watch.tell_touched()
