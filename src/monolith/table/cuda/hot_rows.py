"""HotRows: the rows of the next batches on a device, ahead of the steps that train them.

The tables of a model may have more rows than a device has memory for (`SpillingTable`). Most ids of a batch
are hot: their rows are on the device already. Before a step is replayed as a graph, the few others are
brought there, by the thread that reads ahead, for all tables together:

    host, several threads     find the distinct ids of the batch that have far rows; read those in files
                              move those out of the far tables, into pinned memory
    copy to the device        while the device trains on the batch before
    device, between steps     claim places, put the rows there         bring_tables
                              stamp the rows that the batch will use   touch_tables

Nothing of that waits for the device: an id without a far row is near, or new, and a step gives new ids a
place by itself. If room gets scarce, the rows that were not used for longest leave:

    stage t       choose them, copy them to pinned memory, drop them; all on the device, nothing is waited for
    stage t + 1   wait for the copy, put the rows into the far tables

A place whose row has left may stay marked and count as in use (index.cu). With rows that come and go marks
would take most of the room, so they are freed as part of a spill.

A row is near, far, or on its way to be far, and never in two places, so no copy of a row can be out of date.
Any other call on a table (a lookup, a snapshot, an eviction) first puts the rows far that are on their way.
Near and far rows are trained by the same arithmetic, so results do not depend on where a row was.

Which rows stay. A stamp is the number of the last batch that used a row. Rows of batches that are staged and
not trained yet have their number, or a later one, and stay. If other calls moved rows far meanwhile
(`SpillingTable.fell`), a staged batch is staged again before its step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.cuda.kernels import THREADS, blocks_for
from monolith.cuda.transfers import Landing, Transfers
from monolith.table.cuda.far_tables import FarFound, far_tables
from monolith.table.cuda.fused import FusedTables
from monolith.table.cuda.layout_groups import MAX_CELLS, Ints, PlannedLaunch, Spans
from monolith.table.cuda.spilling_table import SpillingTable
from monolith.table.table import Table
from monolith.table.tiered_table import TieredTable

_log = logging.getLogger(__name__)

_WARP = 32
_PART = 8  # one in so many of a table's rows on the device leaves at once
_MOST_AT_ONCE = 1 << 18  # rows of a table that leave at once, so that the next stage does not wait long
_AHEAD = 2  # batches like the last one that must find room before rows leave ahead of time
_SPILL_PAUSE = 2  # stages after which a spill shows in the counters of the device

_ABOUT = np.dtype([("values", "<u8"), ("states", "<u8"), ("stamps", "<u8"), ("words", "<i4", (2,))])


class StagedBatch:
    """A batch whose rows are on the device. Rows stay there until it was trained, or until this is dropped.

    Attributes:
        number: Stamps from this one on are those of rows that must stay.
        coming: By table: how many ids may be new, at most.
        fits: Whether the device has room for all rows of the batch. If not, its rows may be far.
        fell: By table: `SpillingTable.fell` when it was staged.
    """

    def __init__(self, ids: Tensor, there: Tensor, sizes: Ints) -> None:
        self.ids, self.there, self.sizes = ids, there, sizes
        self.number = 0
        self.coming: list[int] = sizes.tolist()
        self.fits = False
        self.fell: list[int] = []
        self._lock = threading.Lock()
        self._missing: Landing | None = None  # guarded by the lock

    def expect(self, coming: list[int], missing: Landing) -> None:
        """Take note of how many ids may be new: `coming` by table, or `missing` once that has arrived."""
        with self._lock:
            self.coming, self._missing = coming, missing

    def learn(self) -> None:
        """Take note of how many ids were not on the device, if that has arrived."""
        with self._lock:
            missing = self._missing
            if missing is None or not missing.arrived:
                return
            found = missing.wait().tolist()
            self.coming = [min(pair) for pair in zip(self.coming, found, strict=True)]
            self._missing = None
            missing.release()


class HotCounts:
    """How often the ids of staged batches needed a row of host memory. Read by any thread.

    Attributes:
        seen: Ids of staged batches, repeats counted.
        fetched: Those of them whose row was in host memory.
    """

    def __init__(self) -> None:
        self.seen = self.fetched = 0

    @property
    def share(self) -> float:
        """The fraction of ids whose row was on the device, or that had none yet."""
        return 1 - self.fetched / max(1, self.seen)


class HotRows:
    """Brings the rows of batches to a device, before steps that work on near rows alone. Thread-safe.

        hot = HotRows(tables, workers)
        staged = hot.stage(ids, there, sizes)    # ahead, on another thread than that of the steps
        if hot.ready(staged):                    # before the step
            ...                                  # a step over `hot.near`
            hot.trained(staged)                  # after it was launched

    Shapes: n ids of all tables together, table after table.

    Args:
        tables: All tables of a store, in the order of calls.
        workers: Threads that share the work in host memory.

    Attributes:
        near: The near halves of the tables, for steps over staged batches.
        counts: How often ids came in staged batches, and how often that of a far row.
    """

    def __init__(self, tables: Sequence[SpillingTable], workers: native.Workers | None) -> None:
        self._tables = list(tables)
        self.device = tables[0].cuda
        self.near = FusedTables([table.near for table in tables], self.device, staged=True)
        self._far = far_tables([table.far for table in tables], workers)
        self._widths = np.array([(table.dim, table.state_dim) for table in tables], np.int32)
        self._transfers = Transfers(self.device)
        with self.device.active():
            self._stream = self.device.new_stream()
        # Held while a batch is staged, and while a step is captured: a launch of another thread must not
        # become a part of the graph.
        self.lock = threading.RLock()
        # All below is guarded by the lock.
        self._staged: weakref.WeakSet[StagedBatch] = weakref.WeakSet()
        self._number = 0
        self._since_spill = [_SPILL_PAUSE] * len(tables)
        self._spilled_now = False  # rows left while room was made for the batch that is being staged
        self._said_small = False
        self.counts = HotCounts()

    @property
    def rows(self) -> int:
        """How many rows the device has room for, all tables together."""
        return sum(table.near.most_rows or 0 for table in self._tables)

    @property
    def elsewhere(self) -> str:
        """Where the other rows are, for messages."""
        tiered = any(isinstance(table.far, TieredTable) for table in self._tables)
        return "host memory and files" if tiered else "host memory"

    def stage(self, ids: Tensor, there: Tensor, sizes: Ints) -> StagedBatch:
        """Bring the rows of a batch to the device, in order with the current stream; waits for no step.

        Args:
            ids: int64 of shape (n,), in host memory.
            there: The same on the device.
            sizes: Ids by table.
        """
        staged = StagedBatch(ids, there, sizes)
        self._stage(staged)
        return staged

    def ready(self, staged: StagedBatch) -> bool:
        """Return whether all rows of a batch are on the device; those that left since are brought back."""
        staged.learn()
        # A batch that did not fit may do so now: fewer batches are staged. One that did may have lost rows,
        # or room for new ones, to calls that know nothing of staged batches.
        if not staged.fits or self._has_lost(staged):
            self._stage(staged)
        return staged.fits

    def _has_lost(self, staged: StagedBatch) -> bool:
        if staged.fell != [table.fell for table in self._tables]:
            return True
        return any(
            table.near.free_places(wait=False) < coming and table.near.free_places(wait=True) < coming
            for table, coming in zip(self._tables, staged.coming, strict=True)
        )

    def trained(self, staged: StagedBatch) -> None:
        """Take note that the step of a batch was launched."""
        with self.lock:
            self._staged.discard(staged)

    def _stage(self, staged: StagedBatch) -> None:
        device = self.device
        with self.lock, device.active():
            self._stream.wait_for(device.current_stream())  # which has the ids
            with device.on(self._stream), SpillingTable.moving(self._tables, self._far):
                self._stream.keep(staged.there)
                self._staged.discard(staged)
                self._move(staged)

    def _move(self, staged: StagedBatch) -> None:
        """Bring rows near and start to spill others, with all locks held."""
        tables, sizes = self._tables, staged.sizes
        # A snapshot copies rows before they change, and tracked changes are flags of places: rows of such
        # tables move by calls that know of that.
        free = [table.near.moves_freely for table in tables]
        found = self._find(staged, free)
        coming = np.where(free, found.distinct, sizes).tolist()
        promised = self._promised()
        # Steps over near rows refuse no id. Where not all may get a row, because the index of the files is
        # full, the batch is trained by calls that do.
        new = np.where(free, np.array(found.distinct) - np.array(found.rows), sizes).tolist()
        staged.fits = all(
            self._tables[number].takes_new(new[number] + promised[number])
            and self._has_room(number, coming[number], promised[number])
            for number in range(len(self._tables))
        )
        if not staged.fits:
            return
        if self._spilled_now:
            self._spilled_now = False
            found = self._find(staged, free)  # some of them may be among the rows that left
        self._number = 1 + max(self._number, *(table.near.recency().batch for table in tables))
        for table in tables:
            recency = table.near.recency()
            recency.batch, recency.staged_from = self._number, self._oldest
        starts = np.cumsum(sizes) - sizes
        fetched, rows = sum(found.sightings), list(found.rows)
        for number in np.flatnonzero(~np.array(free)).tolist():
            own = slice(starts[number], starts[number] + sizes[number])
            rows[number] = tables[number].bring(staged.ids[own])
            fetched += rows[number]
        missing = self._bring_free(staged, found)
        if not staged.number:  # not counted yet
            self.counts.seen += len(staged.ids)
            self.counts.fetched += fetched
            for table, size in zip(tables, sizes.tolist(), strict=True):
                table.count_ids(size)
        staged.number = self._number
        # Of the ids that were not far, the device knows which are new, and tells a little later: the host's
        # bound counts all, and would keep as many places free.
        staged.expect([count - brought for count, brought in zip(coming, rows, strict=True)], missing)
        self._staged.add(staged)
        self._spill_ahead(coming)
        staged.fell = [table.fell for table in tables]

    def _find(self, staged: StagedBatch, free: Sequence[bool]) -> FarFound:
        """Find the far rows of a batch, of tables whose rows move freely."""
        ids, sizes = staged.ids.numpy(), staged.sizes
        if not all(free):
            ends = np.cumsum(sizes)
            ids = np.concatenate(
                [part for part, ok in zip(np.split(ids, ends[:-1]), free, strict=True) if ok] or [ids[:0]]
            )
        found: FarFound = self._far.find(ids, np.where(free, sizes, 0))
        return found

    def _bring_free(self, staged: StagedBatch, found: FarFound) -> Landing:
        """Move the rows that were found far to the device, and stamp all rows of the batch.

        Returns:
            By table, how many ids of the batch have no row on the device then.
        """
        tables = self._tables
        rows = np.array(found.rows, np.int64)
        total, floats = int(rows.sum()), rows[:, None] * self._widths  # (tables, 2): of values, of states
        words = floats.sum(0).tolist()
        up = self._transfers.stage(
            (len(tables) * _ABOUT.itemsize, torch.uint8),
            (total, torch.int64),
            (total, torch.int64),
            (words[0], torch.float32),
            (words[1], torch.float32),
        )
        about = up.parts[0].numpy().view(_ABOUT)
        begins = np.cumsum(floats, axis=0) - floats
        about["values"], about["states"], about["words"] = begins[:, 0], begins[:, 1], self._widths
        about["stamps"] = [table.near.recency().stamps.data_ptr() for table in tables]
        if total:
            with ExitStack() as silent:
                for table, count in zip(tables, found.rows, strict=True):
                    silent.enter_context(table.far_untouched() if count else nullcontext())
                self._far.take(found, *(part.numpy() for part in up.parts[1:]))
            for table, count in zip(tables, found.rows, strict=True):
                table.came_near(count)
        knows, *columns = up.send().take()
        missing = torch.zeros(len(tables), dtype=torch.int64, device=self.device.torch_device)
        with self.near._entered(writing=True) as work:
            stream = work.stream.handle
            index, arrays, batch = self.near._index, work.known.arrays, self._number
            for one in _launches(rows):
                index.launch(
                    "bring_tables", one.blocks, arrays, one.cells, knows, *columns, batch, stream=stream
                )
            for table, count in zip(tables, found.rows, strict=True):
                table.near._rows.usage.wrote(count)
            for one in _launches(staged.sizes):
                given = arrays, one.cells, knows, staged.there, batch, missing
                index.launch("touch_tables", one.blocks, *given, stream=stream)
            self.near._learn()
            self.near._ask(work)
        return self._transfers.land(missing)

    # Room

    def _has_room(self, number: int, coming: int, promised: int) -> bool:
        """Make sure that a table has room for the rows of a batch; waits only if there may be none."""
        table, near = self._tables[number], self._tables[number].near
        wanted = coming + promised
        if near.free_places(wait=False) >= wanted or near.free_places(wait=True) >= wanted:
            return True
        most = near.most_rows or 0
        if coming > most:
            if not self._said_small:
                self._said_small = True
                _log.warning(
                    "table %r: a batch has %d distinct ids, and the device has room for %d rows. "
                    "Such batches are trained by single launches and wait for the device: give rows more of "
                    "its memory (train.device_memory_bytes), or train on smaller batches",
                    table.config.name,
                    coming,
                    most,
                )
            return False
        SpillingTable.start_spills([(table, self._at_once(number, wanted))], self._transfers)
        table.finish_spill()
        self._spilled_now = True
        if near.free_places(wait=True) >= wanted:
            return True
        near.tidy()
        return near.free_places(wait=True) >= wanted

    def _spill_ahead(self, coming: Sequence[int]) -> None:
        """Start to spill rows of tables that may have no room for the next batches."""
        spilling = []
        for number, (table, count, promised) in enumerate(
            zip(self._tables, coming, self._promised(), strict=True)
        ):
            self._since_spill[number] += 1
            short = _AHEAD * count + promised - table.near.free_places(wait=False)
            # The bound of places in use is high until the counters come back that know of the last spill.
            if short > 0 and self._since_spill[number] > _SPILL_PAUSE:
                self._since_spill[number] = 0
                spilling.append((table, self._at_once(number, short)))
        SpillingTable.start_spills(spilling, self._transfers)

    def _at_once(self, number: int, wanted: int) -> int:
        most = self._tables[number].near.most_rows or 0
        return max(wanted, min(most // _PART, _MOST_AT_ONCE))

    def _promised(self) -> list[int]:
        """Return by table how many places batches may still take that are staged and not trained."""
        several = []
        for other in self._staged:
            other.learn()
            several.append(other.coming)
        return [sum(of) for of in zip(*several, strict=True)] if several else [0] * len(self._tables)

    def _oldest(self) -> int | None:
        return min((other.number for other in self._staged), default=None)


def _launches(sizes: Ints) -> Iterator[PlannedLaunch]:
    """Yield launches with a thread for each id, by warps; one cell per table."""
    spans = Spans.of(sizes, np.ones_like(sizes))
    for part in spans.parts(MAX_CELLS):
        own = spans.some(part)
        cells = own.cells(-(-own.sizes // _WARP), own.ids)
        yield PlannedLaunch(own.tables, cells, blocks_for(cells.units, per_block=THREADS // _WARP))


def can_stage(tables: Sequence[Table]) -> TypeGuard[Sequence[SpillingTable]]:
    """Return whether `HotRows` can move the rows of tables: all spill, and none has a reason against it."""
    return bool(tables) and all(
        isinstance(table, SpillingTable) and table.why_not_staged is None for table in tables
    )


@contextmanager
def unmoved(several: Sequence[HotRows]) -> Iterator[None]:
    """Let no thread stage a batch while the block runs."""
    with ExitStack() as held:
        for one in several:
            held.enter_context(one.lock)
        yield
