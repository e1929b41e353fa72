"""SpillingTable: a table on a device whose rows overflow to host memory, and from there to files.

    table = SpillingTable.within(config, device_bytes=40 << 30)

A row is near, on the device, or far, in host memory, never both. A batch that is written brings its far rows
near first, with their state and times, and where that leaves no room those that were not written for longest
go far, many at a time; rows of the batch itself stay. What a batch has beyond all room on the device is
worked on where it is: a row learns the same near and far, to the bit.

    written             near ---- not written for longest, and room is needed ----> far
    by a batch --> new                                                               |
                        near <--------------- in a batch that is written ------------+

Looking up moves nothing: far rows are answered from host memory.

With `storage="tiered"` the far half is a `TieredTable`: rows that are not near are in `memory_bytes` of host
memory, or else in files. A row that goes far comes to host memory, and moves on to a file as the tiered table
decides; one that comes near comes from either. Its index must have room for every row that may go far: an id
gets a new row, in either half, only if the index could hold the rows of both. Others are refused.

A training step that is replayed as a graph works on near rows alone: `HotRows` brings those of each batch
near before its step. Rows that it spills are on their way for a while: dropped near, copied to host memory,
and restored far by the next call of any kind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.cuda.device import Device
from monolith.cuda.transfers import Landing, Parts, Transfers, bytes_of, cut
from monolith.errors import ConfigError, TableClosedError
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter
from monolith.table.compressors import OneBit
from monolith.table.config import TableConfig
from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.far_tables import FarGroup
from monolith.table.cuda.resident_rows import parts_of_batch
from monolith.table.cuda.snapshots import JoinedSnapshot
from monolith.table.hashing import unmix
from monolith.table.native_table import NativeTable
from monolith.table.table import Rows, Scan, Table, TableStats, joined_scan
from monolith.table.tiered_table import TieredTable
from monolith.table.touched_keys import TouchedKeySet
from monolith.table.update_rules import decays_lazily, newest_step

_PART = 8  # one in so many of the device's rows spills at once: spilling few at a time would wait too often
_MOST_AT_ONCE = 1 << 18  # rows, so that no caller waits long
_RESERVE = 16  # with a ceiling, one in so many places stays free, so that rows can be exchanged
_CHUNK = 1 << 16  # rows that are copied at once
_INDEX_BYTES = 32  # of the index, per far row, at most


@dataclass(slots=True)
class _Moves:
    """Counts in the stats of the halves that come from moved rows; the table's stats subtract them."""

    inserted: int = 0
    removed: int = 0
    refused: int = 0
    evicted: int = 0


class _Copied:
    """Rows of several tables that are copied from a device at once. Thread-safe.

    Args:
        tables: How many of them use it: the last one releases the memory.
    """

    def __init__(self, landing: Landing, tables: int) -> None:
        self.landing = landing
        self._lock = threading.Lock()
        self._tables = tables  # guarded by the lock

    def release(self) -> None:
        with self._lock:
            self._tables -= 1
            if not self._tables:
                self.landing.release()


@dataclass(frozen=True, slots=True)
class _Departed:
    """The rows of one table among those that were copied."""

    copied: _Copied
    bytes: slice
    parts: Parts

    def columns(self) -> tuple[Tensor, ...]:
        """Wait for the copy, and return hashes, times, gone, values and states: valid until `release`."""
        return cut(self.copied.landing.wait()[self.bytes], self.parts)

    def release(self) -> None:
        self.copied.release()


class SpillingTable:
    """A `Table` on a device, in host memory and in files. Thread-safe: calls follow one another.

    Tensors on the device are answered there. As long as no row is far, lookups and batches wait for the
    device as those of a `CudaTable` do; from then on each waits once, to learn which ids are not near.

    A row is as recent as the last batch that wrote it. Rows that are restored go where there is room, near
    first, and move nothing. In a table with `capacity_bytes` that is nearly full no more rows go far than
    come near: new ids get the room that is left, and are then refused or expire the oldest rows, as the
    config says.

    Args:
        config: `capacity_bytes` is that of both halves together.
        near: The table in which rows are trained; its capacity is a number of rows.
        far: The table with the remaining rows. Both have this config except for its capacity, share one
            filter, and are closed by this table.
        touched: A set that gets the ids whose rows changed or were removed; see `touch`.
    """

    def __init__(
        self,
        config: TableConfig,
        near: CudaTable,
        far: Table,
        *,
        touched: TouchedKeySet | None = None,
    ) -> None:
        if near.most_rows is None:
            raise ConfigError(f"table {config.name!r}: rows spill where the device has a budget; it has none")
        self._config = config
        self._near, self._far = near, far
        self._most = near.most_rows
        # New rows leave some of the room, so that rows can change places when the other half is full.
        self._room = self._most - (self._most // _RESERVE if config.capacity_bytes is not None else 0)
        self._row_bytes = config.embedding_bytes + 4 * config.state_dim + _INDEX_BYTES
        self._decays_lazily = decays_lazily(config)
        self._counts_steps = self._decays_lazily or any(
            isinstance(segment.compressor, OneBit) for segment in config.segments
        )
        self._lock = threading.Lock()
        self._thawed = threading.Condition(self._lock)
        # All below is guarded by the lock.
        self._frozen = 0
        self._closed = False
        self._bound = len(near)  # no more rows than these are near
        self._ids = 0  # looked up or written
        self._steps = 0  # one more than the newest step, where rows decay lazily
        self._moves = _Moves()
        self._departed: _Departed | None = None  # rows that left the device and are not far yet
        self.fell = 0
        """How often rows left the device other than by `start_spills`: staged batches are staged again."""
        self._touched: list[TouchedKeySet] = []
        if touched is not None:
            self.touch(touched)

    @classmethod
    def within(
        cls,
        config: TableConfig,
        *,
        device_bytes: int,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
        device: torch.device | Device | None = None,
        workers: native.Workers | None = None,
        reader: native.BlockReader | None = None,
    ) -> SpillingTable:
        """Make a table that takes so much of a device's memory, all of it at once, and host memory beyond.

        Args:
            device: The current CUDA device by default.
            workers: Threads that share what is done in host memory.
            reader: Threads that read files, of a config with `storage="tiered"`. Tables may share them.

        Raises:
            AcceleratorError: There is no such device.
            ConfigError: The device's share is less than the smallest table needs, or not less than the
                config's `capacity_bytes`.
            FilesystemError: There can be no files in the config's `storage_dir`.
        """
        near, far = halves(
            config,
            device_bytes=device_bytes,
            admission=admission,
            device=device,
            workers=workers,
            reader=reader,
        )
        return cls(config, near, far, touched=touched)

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
    def cuda(self) -> Device:
        """The GPU of the near rows: calls with tensors on it are answered on it."""
        return self._near.cuda

    @property
    def near(self) -> CudaTable:
        """The rows on the device, to look at."""
        return self._near

    @property
    def far(self) -> Table:
        """The rows in host memory and in files, to look at."""
        return self._far

    @property
    def cold(self) -> TieredTable | None:
        return self._far.cold

    @property
    def why_not_staged(self) -> str | None:
        """Why `HotRows` cannot bring rows near ahead of steps; None if it can."""
        if self._config.capacity_bytes is not None:
            return "it has a capacity_bytes, and the host decides which ids get its last rows"
        if self._near._layout.row_bytes != 4 * self.dim:
            return "its embeddings are not stored as float32"
        return None

    def __len__(self) -> int:
        with self._open():
            return len(self._near) + len(self._far)

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        with self._open():
            answer = self._near.lookup(ids, out=out)
            self._ids += len(ids)
            if (places := self._not_near(ids)) is not None:
                found = self._far.lookup(ids[places].cpu())
                answer.index_copy_(0, places, found.to(answer.device))
            return answer

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        with self._open():
            found, rows = self._near.lookup_rows(ids)
            self._ids += len(ids)
            if (places := self._not_near(ids)) is not None:
                is_far, beyond = self._far.lookup_rows(ids[places].cpu())
                found.index_copy_(0, places, is_far.to(found.device))
                for column in ("event_times", "values", "state"):
                    into, given = getattr(rows, column), getattr(beyond, column)
                    into.index_copy_(0, places, given.to(into.device))
            return found, rows

    def contains(self, ids: Tensor) -> Tensor:
        with self._open():
            found = self._near.contains(ids)
            if (places := self._not_near(ids)) is not None:
                found.index_copy_(0, places, self._far.contains(ids[places].cpu()).to(found.device))
            return found

    # Writing

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._open(writing=True):
            n = self._check_ids(ids)
            self._check_floats(values, (n, self.dim), "values")
            self._check_times(event_time, n)
            for table, _, part in self._settled(ids, values=values, event_time=event_time):
                table.assign(**part)

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._open(writing=True):
            n = self._check_ids(ids)
            self._check_floats(values, (n, self.dim), "values")
            self._check_times(event_time, n)
            for table, _, part in self._settled(ids, values=values, event_time=event_time):
                table.assign_add(**part)

    def apply_gradients(
        self, ids: Tensor, gradients: Tensor, **options: Unpack[arguments.UpdateOptions]
    ) -> None:
        step, event_time, learning_rates, dedup, latest_values, counts = arguments.update_options(options)
        with self._open(writing=True):
            arguments.check_trainable(self._config, "apply_gradients")
            arguments.check_step(step)
            if learning_rates is not None:
                arguments.rate_array(learning_rates, self._config, step)
            n = self._check_ids(ids)
            if latest_values is None:
                arguments.latest_array(None, self._config, n)
            else:
                self._check_floats(latest_values, (n, self.dim), "latest_values")
            self._check_floats(gradients, (n, self.dim), "gradients")
            self._check_times(event_time, n)
            arguments.count_array(None if counts is None else counts.cpu(), n)
            for table, _, part in self._settled(
                ids, gradients=gradients, event_time=event_time, latest_values=latest_values, counts=counts
            ):
                table.apply_gradients(**part, step=step, learning_rates=learning_rates, dedup=dedup)
            self._tell_step(step, learning_rates)

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows; -1 for an id without a row if there is no memory for one."""
        with self._open(writing=True):
            arguments.check_trainable(self._config, "reinitialize")
            arguments.event_second(now, "now")
            status = torch.empty(self._check_ids(ids), dtype=torch.int8, device=ids.device)
            for table, places, part in self._settled(ids, event_time=now):
                del part["event_time"]
                found = table.reinitialize(**part, now=now).to(ids.device)
                if places is None:
                    return found
                status.index_copy_(0, places, found)
            return status

    def remove(self, ids: Tensor) -> int:
        with self._open(writing=True):
            self.fell += 1
            removed = self._near.remove(ids)
            self._ids += len(ids)
            return removed + (self._far.remove(ids.cpu()) if len(self._far) else 0)

    def count_expired(self, now: int) -> int:
        with self._open():
            return self._near.count_expired(now) + self._far.count_expired(now)

    def evict(self, now: int | None = None) -> int:
        with self._open(writing=True):
            self.fell += 1
            moment = self._newest() if now is None else now
            return self._near.evict(moment) + self._far.evict(moment)

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes, on the CPU: a shard is a range of hashes."""
        with self._open():
            how = {"limit": limit, "shard": shard, "num_shards": num_shards}
            return joined_scan([table.scan(cursor, **how) for table in (self._near, self._far)], limit)

    def restore(self, rows: Rows) -> None:
        """Insert or overwrite whole rows where they are; new ones near, as long as there is room.

        Raises:
            RestoreError: `memory_bytes` has no room for an index of all rows.
        """
        with self._open(writing=True):
            given = Rows(rows.ids.cpu(), rows.event_times.cpu(), rows.values.cpu(), rows.state.cpu())
            arguments.row_arrays(given, self._config)
            places = (~self._near.contains(given.ids)).nonzero().squeeze(1)
            beyond = _distinct(given.ids[places])
            is_far = self._far.contains(beyond)
            coming = beyond[~is_far]
            if self._indexed(len(coming)) < len(coming) and isinstance(self._far, TieredTable):
                self._far.check_room(len(coming))
            born = self._free(len(coming))
            self._bound += born
            far = torch.cat([beyond[is_far], coming[born:]])
            stays = torch.isin(given.ids, far)
            self._near.restore(given.keep(~stays))
            self._far.restore(given.keep(stays))
            self.fell += 1
            self._tell_steps_of(given)

    def clear(self, *, expect_rows: int = 0) -> None:
        with self._open(writing=True):
            self._near.clear(expect_rows=self._most)
            self._far.clear(expect_rows=max(0, expect_rows - self._most))
            self._bound = self._steps = 0
            self.fell += 1

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Pause writers while the block runs; readers continue. Nests."""
        with ExitStack() as also:
            with self._open():
                self._frozen += 1
                also.enter_context(self._near.frozen())  # captured steps write to it directly
            try:
                yield
            finally:
                also.close()
                with self._lock:
                    self._frozen -= 1
                    self._thawed.notify_all()

    def snapshot(self) -> JoinedSnapshot:
        """Open a snapshot; see `JoinedSnapshot` for rows that move afterwards."""
        with self._open():
            return JoinedSnapshot(self._config, (self._near, self._far))

    def track_changes(self, on: bool = True) -> None:
        with self._open():
            for table in (self._near, self._far):
                table.track_changes(on)

    def touch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._touched.append(touched)
            for table in (self._near, self._far):
                table.touch(touched)

    def untouch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._touched = [other for other in self._touched if other is not touched]
            for table in (self._near, self._far):
                table.untouch(touched)

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        with self._open():
            return self._near.digests(buckets, share=share) + self._far.digests(buckets, share=share)

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        with self._open():
            return self._near.scales

    def set_scales(self, scales: Sequence[float]) -> None:
        with self._open():
            for table in (self._near, self._far):
                table.set_scales(list(scales))

    def stats(self) -> TableStats:
        with self._open():
            near, far, moves = self._near.stats(), self._far.stats(), self._moves
            return TableStats(
                rows=near.rows + far.rows,
                bytes_total=near.bytes_total + far.bytes_total,
                bytes_rows=near.bytes_rows + far.bytes_rows,
                bytes_index=near.bytes_index + far.bytes_index,
                load=(near.load + far.load) / 2,
                inserted=near.inserted + far.inserted - moves.inserted,
                filtered=near.filtered + far.filtered,
                refused=near.refused + far.refused - moves.refused,
                evicted=near.evicted + far.evicted - moves.evicted,
                removed=near.removed + far.removed - moves.removed,
                max_event_time=max(near.max_event_time, far.max_event_time),
                non_finite=near.non_finite + far.non_finite,
                device_rows=near.rows,
                device_bytes=near.bytes_total,
                # Those of the far half count its moves, and not what was near.
                tiered_ids=self._ids if isinstance(self._far, TieredTable) else 0,
                cold_rows=far.cold_rows,
                cold_bytes=far.cold_bytes,
                cold_found=far.cold_found,
                cold_found_in_memory=far.cold_found_in_memory,
                cold_reads=far.cold_reads,
                cold_bytes_read=far.cold_bytes_read,
                cold_bytes_written=far.cold_bytes_written,
                compactions=far.compactions,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._departed = None
            for table in (self._near, self._far):
                table.close()

    # Rows that move ahead of steps: called by `HotRows`, within `moving`

    @staticmethod
    @contextmanager
    def moving(tables: Sequence[SpillingTable], far: FarGroup | None = None) -> Iterator[None]:
        """Hold the locks of tables, none of which is frozen, and have all departed rows be far.

        Args:
            far: The far halves as a group: rows of all tables are put there by one call.
        """
        while True:
            with ExitStack() as locks:
                for table in tables:  # always in this order
                    locks.enter_context(table._lock)
                frozen = next((table for table in tables if table._frozen), None)
                if frozen is None:
                    for table in tables:
                        table._check_open()
                    if far is None:
                        for table in tables:
                            table._land()
                    else:
                        _land_together(tables, far)
                    yield
                    return
            # All locks are released before waiting: the thread that froze this table may need them.
            with frozen._lock:
                frozen._thawed.wait_for(lambda table=frozen: not table._frozen)  # type: ignore[misc]

    @staticmethod
    def start_spills(several: Sequence[tuple[SpillingTable, int]], transfers: Transfers) -> None:
        """Start to move idle rows of tables far, so many of each at most, by one copy; waits for nothing."""
        free: list[tuple[SpillingTable, int, Parts]] = []
        for table, count in several:
            table._bound = table._most  # not known
            if table._near.moves_freely:
                free.append((table, count, table._near.spill_parts(count)))
            else:
                table._spill(count, torch.empty(0, dtype=torch.int64))
        if not free:
            return
        sizes = [bytes_of(parts) for _, _, parts in free]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=free[0][0].cuda.torch_device)
        for (table, count, _), into in zip(free, whole.split_with_sizes(sizes), strict=True):
            table._near.spill_idle(count, into)
            if table._near.untidy:
                table._near.tidy()
        copied, ends = _Copied(transfers.land(whole), len(free)), np.cumsum(sizes).tolist()
        for (table, _, parts), size, end in zip(free, sizes, ends, strict=True):
            table._departed = _Departed(copied, slice(end - size, end), parts)

    def finish_spill(self) -> None:
        """Wait for rows that were spilled, and put them far."""
        self._land()

    def bring(self, ids: Tensor) -> int:
        """Bring the far rows of a batch near, row by row as a write would; return how many."""
        self._bound = self._most
        found = _distinct(ids[self._far.contains(ids)])
        self._bring(found)
        return len(found)

    def came_near(self, count: int) -> None:
        """Take note that so many rows were taken from the far half and put into the near one."""
        self._bound = self._most
        self._moves.removed += count

    def takes_new(self, count: int) -> bool:
        """Whether so many new rows will find room far when they leave; waits only if there may be none."""
        return self._indexed(count) == count

    def count_ids(self, count: int) -> None:
        """Take note that a batch with so many ids of this table was staged."""
        self._ids += count

    @contextmanager
    def far_untouched(self) -> Iterator[None]:
        """Report no change for rows that come to the far half, or leave it, in the block."""
        for touched in self._touched:
            self._far.untouch(touched)
        try:
            yield
        finally:
            for touched in self._touched:
                self._far.touch(touched)

    def _land(self) -> None:
        """Put rows far that left the device; waits for their copy."""
        departed = self._departed
        if departed is None:
            return
        hashes, times, gone, values, states = departed.columns()
        there = gone.to(torch.bool)
        n, ids = len(hashes), torch.from_numpy(unmix(hashes.numpy().view(np.uint64)))
        rows = Rows(
            ids, times, values.view(torch.float32).view(n, self.dim), states.view(n, self.state_dim)
        ).keep(there)
        before = self._far.stats().inserted
        with self.far_untouched():
            self._far.restore(rows)
        self._departed = None  # not earlier: a file may fail
        departed.release()  # not earlier: `rows` may be views of it
        self._moves.inserted += self._far.stats().inserted - before

    # Inside. Every method below is called with the lock held.

    def _check_open(self) -> None:
        if self._closed:
            raise TableClosedError(f"table {self._config.name!r} was closed")

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[None]:
        with self._lock:
            if writing:
                self._thawed.wait_for(lambda: not self._frozen)
            self._check_open()
            self._land()
            yield

    # Tensors on the device are checked as far as that is possible without waiting for it.

    def _check_ids(self, ids: Tensor) -> int:
        if not self._is_near(ids):
            return len(arguments.id_array(ids))
        if ids.dtype is not torch.int64 or ids.ndim != 1:
            arguments.refuse("ids", "int64 of shape (n,)", ids)
        return len(ids)

    def _check_floats(self, values: Tensor, shape: tuple[int, int], name: str) -> None:
        if not self._is_near(values):
            arguments.float_array(values, shape, name)
        elif values.dtype is not torch.float32 or values.shape != shape:
            arguments.refuse(name, f"float32 of shape {shape}", values)

    def _check_times(self, event_time: int | Tensor, n: int) -> None:
        if not isinstance(event_time, Tensor) or not self._is_near(event_time):
            arguments.event_time_array(event_time, n)
        elif event_time.dtype is not torch.int64 or event_time.shape != (n,):
            arguments.refuse("event_time", f"one number or int64 of shape ({n},)", event_time)

    def _is_near(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Tensor) and self.cuda.holds(tensor)

    def _not_near(self, ids: Tensor) -> Tensor | None:
        """Return the positions of ids that are not near, where any is far at all; waits for the device."""
        if not len(self._far):
            return None
        places = (~self._near.contains(ids)).nonzero().squeeze(1)
        return places if len(places) else None

    def _settled(self, ids: Tensor, **columns: Any) -> Iterator[tuple[Table, Tensor | None, dict[str, Any]]]:
        """Bring a batch near as far as there is room; yield what each half works on, and its positions.

        A full table that expires its oldest rows takes a large batch in parts: later ids of it may
        push out earlier ones.
        """
        self._ids += len(ids)
        whole = {"ids": ids, **columns}
        if not self._may_expire(ids):
            yield from self._split(whole, None)
            return
        for part in parts_of_batch(ids.cpu().numpy(), max(1, self._room // _PART)):
            places = torch.from_numpy(part).nonzero().squeeze(1).to(ids.device)
            yield from self._split({name: _at(column, places) for name, column in whole.items()}, places)

    def _split(
        self, batch: dict[str, Any], at: Tensor | None
    ) -> Iterator[tuple[Table, Tensor | None, dict[str, Any]]]:
        """Do that for a part of a batch, whose positions are `at`."""
        ids: Tensor = batch["ids"]
        stays = self._settle(ids, batch["event_time"])
        if stays is not None or isinstance(self._far, TieredTable):
            self.fell += 1  # new ids may get their rows far, or what the index was to have for staged batches
        if stays is None:
            yield self._near, at, batch
            return
        if isinstance(batch["event_time"], Tensor):
            arguments.event_time_array(batch["event_time"].cpu(), len(ids))  # may be the first check
        for table, mask in ((self._near, ~stays), (self._far, stays)):
            places = mask.nonzero().squeeze(1)
            part = {name: _at(column, places) for name, column in batch.items()}
            if table is self._far:
                part = {name: one.cpu() if isinstance(one, Tensor) else one for name, one in part.items()}
            yield table, places if at is None else at[places], part

    def _settle(self, ids: Tensor, times: int | Tensor) -> Tensor | None:
        """Return a bool for each position whose row stays far or is created there; None if there is none.

        Makes room and moves rows, so that as much of the batch as possible is near:

            1. no row is far and the bound says that all fit: done, nothing is waited for 2. sort the ids that
            are not near into far rows and new ids 3. too little room: spill idle rows, if the far half has
            room for them 4. bring far rows near, then spill again if that went beyond the room for new rows
            5. new ids get what room is left; in a table that expires its oldest rows, each half expires its
            own 6. in a table that is full new ids stay far, and are refused there
        """
        fits = not len(self._far) and self._bound + len(ids) <= self._room
        if fits and self._indexed(len(ids)) == len(ids):
            self._bound += len(ids)  # no row is created for an id that has one: an upper bound
            return None
        coming = _distinct(ids[~self._near.contains(ids)].cpu())
        is_far = self._far.contains(coming)
        far, new = coming[is_far], coming[~is_far]
        if (missing := len(coming) - self._free(len(coming))) > 0:
            # More than is missing, so that the next batches find room without spilling.
            wanted = max(missing, min(self._most // _PART, _MOST_AT_ONCE))
            if self._takes(wanted):
                self._spill(wanted, ids)
        rise = min(len(far), max(0, self._most - self._bound))
        self._bring(far[:rise])
        if self._bound > self._room:
            self._spill(self._bound - self._room, ids)
        born = min(self._free(len(new)), self._indexed(len(new)))
        if born < len(new) and self._may_expire(ids):
            # Each half gets new ids in proportion to its rows, and expires its own oldest rows for them.
            share = len(new) * self._room // (self._room + len(self._far))
            if share > born:
                latest = int(times.max()) if isinstance(times, Tensor) else times
                self._bound -= self._near.expire_oldest(share - born, latest)
                born = max(born, self._free(share))
        self._bound += born
        if isinstance(self._far, TieredTable):
            self._far.elsewhere += born
        stays = torch.cat([far[rise:], new[born:]])
        return torch.isin(ids, stays.to(ids.device)) if len(stays) else None

    def _may_expire(self, ids: Tensor) -> bool:
        """Whether rows may have to go for those of a batch."""
        return self._config.when_full == "expire_oldest" and not self._takes(len(ids))

    def _free(self, wanted: int) -> int:
        """Return for how many new rows there is room near, `wanted` at most."""
        if self._bound + wanted > self._room:
            self._bound = len(self._near)  # the true number; waits for the device
        return min(wanted, max(0, self._room - self._bound))

    def _indexed(self, wanted: int) -> int:
        """Return how many new rows the index of a tiered far half has room for, `wanted` at most.

        Any near row may have to go far, and then needs its entry: rows of both halves count.
        """
        if not isinstance(self._far, TieredTable):
            return wanted
        room, near = self._far.core.most_rows - len(self._far), self._near.rows_at_most
        if near + wanted > room:
            near = len(self._near)  # waits for the device
        self._far.elsewhere = near
        return min(wanted, max(0, room - near))

    def _takes(self, rows: int) -> bool:
        """Whether the far half surely has room for so many."""
        # Twice the bytes: its index and its rows grow in steps.
        ceiling = self._far.config.capacity_bytes
        return ceiling is None or self._far.stats().bytes_total + 2 * rows * self._row_bytes <= ceiling

    def _spill(self, count: int, excluded: Tensor) -> None:
        """Move idle rows to the far half, except those of a batch; rows that find no room there stay.

        A row is restored far before it is removed near, and only if it arrived: no moment loses it.
        """
        with self._moves_untracked():
            for ids in _chunks(self._near.idle(count, excluded)):
                _, rows = self._near.lookup_rows(ids)
                before = self._far.stats()
                self._far.restore(rows)
                after = self._far.stats()
                arrived = self._far.contains(ids)
                gone = self._near.remove(ids[arrived])
                self.fell += 1
                # The halves count these moves as births, removals and refusals; the table's stats leave them
                # out.
                made = after.inserted - before.inserted
                self._moves.inserted += made
                self._moves.refused += after.refused - before.refused
                self._moves.evicted += made - gone  # let in, and pushed out by others of these
                self._moves.removed += gone
                self._bound -= gone
                if gone < len(ids) and self._config.when_full == "expire_oldest":
                    self._drop_oldest(ids[~arrived])

    def _drop_oldest(self, ids: Tensor) -> None:
        """Drop idle rows that are older than all far rows: the far half is full and kept newer ones."""
        for touched in self._touched:
            touched.insert(ids)
        gone = self._near.remove(ids)
        self._moves.removed += gone
        self._moves.evicted -= gone
        self._bound -= gone

    def _bring(self, ids: Tensor) -> None:
        """Move far rows to the near half. There must be room."""
        with self._moves_untracked():
            for some in _chunks(ids):
                self._near.restore(self._far.lookup_rows(some)[1])
                moved = self._far.remove(some)
                self._moves.inserted += moved
                self._moves.removed += moved
                self._bound += moved

    @contextmanager
    def _moves_untracked(self) -> Iterator[None]:
        """Report no change for rows that move: their values stay the same."""
        for table in (self._near, self._far):
            for touched in self._touched:
                table.untouch(touched)
        try:
            yield
        finally:
            for table in (self._near, self._far):
                for touched in self._touched:
                    table.touch(touched)

    def _tell_step(self, step: int, rates: Tensor | None) -> None:
        """Advance both halves to a step, even one without rows in it: decay and scales depend on it."""
        if self._counts_steps:
            none, nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, self.dim)
            for table in (self._near, self._far):
                table.apply_gradients(none, nothing, step=step, learning_rates=rates, latest_values=nothing)
            self._steps = max(self._steps, step + 1)

    def _tell_steps_of(self, rows: Rows) -> None:
        """Advance both halves to the newest step of rows that only one of them was given."""
        if not self._decays_lazily or not rows.state.shape[1] or not len(rows):
            return
        newest = newest_step(self._config, rows)
        if newest > self._steps:
            # A step of no rows advances the counters, but also the scales: put those back.
            scales = self._near.scales
            rates = [segment.decay_rate for segment in self._config.segments]
            self._tell_step(newest - 1, torch.tensor(rates, dtype=torch.float32))
            for table in (self._near, self._far):
                table.set_scales(scales)

    def _newest(self) -> int:
        return max(self._near.stats().max_event_time, self._far.stats().max_event_time)


def halves(
    config: TableConfig,
    *,
    device_bytes: int,
    admission: AdmissionFilter | None = None,
    device: torch.device | Device | None = None,
    workers: native.Workers | None = None,
    reader: native.BlockReader | None = None,
) -> tuple[CudaTable, NativeTable | TieredTable]:
    """Return the near and the far half of a table; see `SpillingTable.within`."""
    whole = config.capacity_bytes
    if whole is not None and whole <= device_bytes:
        raise ConfigError(
            f"table {config.name!r}: capacity_bytes is {whole:,} and {device_bytes:,} of that may be on "
            "the device: nothing would spill. Use a CudaTable"
        )
    near = CudaTable(
        replace(
            config,
            capacity_bytes=device_bytes,
            when_full="refuse",
            initial_rows=device_bytes // config.embedding_bytes,
            storage="memory",
            memory_bytes=None,
            storage_dir=None,
        ),
        admission=admission,
        device=device,
        remembers_use=True,
    )
    if config.storage == "tiered":
        return near, TieredTable(config, admission=admission, workers=workers, reader=reader)
    beyond = max(0, config.initial_rows - (near.most_rows or 0))
    far = NativeTable(
        replace(config, capacity_bytes=None if whole is None else whole - device_bytes, initial_rows=beyond),
        admission=admission,
        workers=workers,
    )
    return near, far


def _land_together(tables: Sequence[SpillingTable], far: FarGroup) -> None:
    """Put the rows of tables far that left the device, on several threads; waits for their copies."""
    if all(table._departed is None for table in tables):
        return
    ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    nothing = ints, ints, np.zeros(0, np.uint8), floats, floats
    columns = []
    with ExitStack() as silent:
        for table in tables:
            if table._departed is None:
                columns.append(nothing)
                continue
            silent.enter_context(table.far_untouched())
            hashes, times, gone, values, states = (one.numpy() for one in table._departed.columns())
            columns.append((hashes, times, gone, values.view(np.float32), states))
        counts = far.put(columns)
    for table, count in zip(tables, counts, strict=True):
        departed, table._departed = table._departed, None
        table._moves.inserted += count
        if departed is not None:
            departed.release()


def _at(column: Any, places: Tensor) -> Any:
    return column[places.to(column.device)] if isinstance(column, Tensor) else column


def _chunks(ids: Tensor) -> Iterator[Tensor]:
    for at in range(0, len(ids), _CHUNK):
        yield ids[at : at + _CHUNK]


def _distinct(ids: Tensor) -> Tensor:
    """Return each id once, in the order of first sight."""
    found, inverse = torch.unique(ids, return_inverse=True)
    first = torch.full((len(found),), len(ids)).scatter_reduce_(0, inverse, torch.arange(len(ids)), "amin")
    ordered: Tensor = found.index_select(0, first.argsort())
    return ordered
