"""FusedTables: many tables on one device, read and trained by a few launches.

A model has dozens of tables, and a launch costs the host more than the device needs for one table's part of a
batch. So tables with rows of one layout are worked on together: a launch gets the positions of each table's
ids (`cells.cuh`), and one sort brings the rows of all tables into the order in which they are trained. The
number of launches does not depend on the number of tables, up to MAX_CELLS.

    apply_gradients     ask_filters      find ids that must wait for their row, if the step is captured
                        claim_tables     find or create the place of each id; sort keys are (table, place)
                        sort             all keys, stable: one order for all tables
                        settle_tables    turn sorted keys back into places
                        train_tables     one launch per layout (two if a batch may have long runs)

A table that needs more than that (a byte budget; a filter, unless the step is captured) is trained by itself.
Trackers of rows are called table by table with every id of a batch, even if its gradient was not usable.

A step over batches of one shape can be captured and replayed (`CapturedStep`): its launches are the same for
each of them, and what changes from step to step is read from device memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.cuda.device import Device, DeviceEvent, DeviceStream
from monolith.cuda.kernels import THREADS, Kernels, blocks_for
from monolith.errors import TableArgumentError
from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.filters import THREADS as ASKING_THREADS
from monolith.table.cuda.filters import filter_structs, memory_to_ask
from monolith.table.cuda.inputs import Inputs
from monolith.table.cuda.layout import fused_index_kernels
from monolith.table.cuda.layout_groups import (
    MAX_CELLS,
    Floats,
    Ints,
    LayoutGroup,
    PlannedLaunch,
    PlannedSteps,
    Spans,
    max_cells,
)
from monolith.table.cuda.memory import (
    COUNTERS,
    EXTRA_PLACES,
    STRETCH,
    USED,
    Claimed,
    DeviceMemory,
    Times,
)
from monolith.table.cuda.spilling_table import SpillingTable
from monolith.table.table import Table

_WARP = 32
_ASKED_AFTER = 0.25  # of the free places at the last reading of the counters: then they are read again
_INT32_MAX = (1 << 31) - 1


def common_device(tables: Sequence[Table]) -> Device | None:
    """Return the GPU that all tables are on; None if they are on several, or one is in host memory."""
    devices = [table.cuda for table in tables]
    return devices[0] if devices and all(one == devices[0] for one in devices) else None


@dataclass(frozen=True, slots=True, eq=False)
class FusedBatch:
    """Gradients for all tables, on their device: table after table.

    Shapes: n ids of all tables together, f = sum of size * dim over the tables.
    """

    ids: Tensor
    sizes: Ints
    """Ids by table, or by batch and table before `by_table`."""
    gradients: Tensor
    """float32 of shape (f,)."""
    rates: Floats
    """By segment, table after table."""
    step: int
    dedup: bool
    event_time: int | Tensor = 0
    """One for all, or int64 of shape (n,); kernels check those that were given on the device."""
    latest: Tensor | None = None
    """As the gradients."""
    counts: Tensor | None = None
    """int64 by id, on the CPU."""
    live: LiveStep | None = None
    """Set if the launches are captured: takes the place of `step` and of the values of `rates`."""

    def by_table(self, widths: Ints) -> FusedBatch:
        """Return the batch in the order of tables, given several batches one after another.

        Args:
            widths: Floats of an id, by table. `sizes` is by batch and, within a batch, by table.
        """
        tables = len(widths)
        by_batch = self.sizes.reshape(-1, tables)
        if len(by_batch) == 1:
            return self
        floats = (by_batch * widths).ravel()
        time, latest, counts = self.event_time, self.latest, self.counts
        return replace(
            self,
            ids=_by_table(self.ids, self.sizes, tables),
            sizes=by_batch.sum(0),
            gradients=_by_table(self.gradients, floats, tables),
            event_time=_by_table(time, self.sizes, tables) if isinstance(time, Tensor) else time,
            latest=None if latest is None else _by_table(latest, floats, tables),
            counts=None if counts is None else _by_table(counts, self.sizes, tables),
        )


def _by_table(column: Tensor, lengths: Ints, tables: int) -> Tensor:
    """Reorder a column that is ordered by batch, then by table, to be ordered by table, then by batch."""
    cells = column.split_with_sizes(lengths.tolist())
    return torch.cat([cell for number in range(tables) for cell in cells[number::tables]])


@dataclass(frozen=True, slots=True, eq=False)
class LiveStep:
    """What a replayed step reads from device memory, because it changes from step to step."""

    step: Tensor
    """int64 of shape (1,)."""
    refused: Tensor
    """int64: if its first number is not 0, nothing of the batch is written."""
    rates: dict[tuple[int, int], Tensor]
    """By the numbers of a planned launch: its struct CellScalars, as bytes."""
    occurring: Tensor
    """int64 by table: its ids; what follows them pads the batch."""


class _Live(ctypes.Structure):
    """struct Live in fused_train.cu."""

    _fields_ = [("scalars", ctypes.c_void_p), ("step", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What holds of the memories of all tables until one of them grows."""

    memories: list[weakref.ref[DeviceMemory] | None]
    arrays: Tensor
    """Of each table its `Arrays`."""
    places: Ints
    limits: list[int]
    stream: int
    """That the arrays were made on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A call in progress: the locks of all tables are held."""

    stream: DeviceStream
    known: _Known


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What trains a batch: also the next one, if it is of the same sizes and no table grew."""

    sizes: bytes
    alone: bytes
    dedup: bool
    known: _Known
    spans: Spans
    wide: bool
    """Whether the numbers of all places need 64 bits."""
    asks: list[PlannedLaunch]
    """Of filters, a block for each."""
    claims: list[PlannedLaunch]
    steps: list[PlannedSteps]


_Watched = list[tuple[CudaTable, slice]]


class FusedTables:
    """Tables of one device, read and trained together. Thread-safe, as they are.

    Nothing is waited for, except as `CudaTable` says, and one that has less room than a batch has ids grows
    rather than ask how many of those are new: a batch may have many more ids than distinct ones.

    Args:
        tables: In the order of calls. Those that are no `CudaTable` are called one by one.
        device: The one of all.
        most_narrow: Places that are numbered by 32 bits: with more of them the sort takes twice as long.
        staged: Whether `HotRows` stages each batch, and leaves room for its new ids: tables do not grow.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        device: Device,
        *,
        most_narrow: int = _INT32_MAX,
        staged: bool = False,
    ) -> None:
        self.device = device
        self._staged = staged
        self._most_narrow = most_narrow
        self.inputs = Inputs(tables[0].config, torch.zeros(COUNTERS, dtype=torch.int64), device)
        """Brings arguments to the device."""
        self._tables = list(tables)
        self._widths = np.array([table.dim for table in tables], np.int64)
        segments = np.array([len(table.config.segments) for table in tables], np.int64)
        self._rate_ends = np.cumsum(segments)
        # By table: the table if launches may cover it, None if it is called by itself. A row of very many
        # segments has more scalars than the parameters of a launch can hold: `max_cells` is 0.
        fused = [table if isinstance(table, CudaTable) and max_cells(table) else None for table in tables]
        self._fused = fused
        self._others = {number for number, table in enumerate(fused) if table is None}
        # Two cells of one launch must not train the same rows at the same time.
        self._twice = [sum(one is other for other in tables) > 1 for one in tables]
        # A thread that takes several locks takes them in this order (by address), so that two threads that
        # train the same tables in different orders cannot deadlock.
        self._locked = sorted({id(one): one for one in fused if one is not None}.values(), key=id)
        # Tables whose rows have the same header (`layout.h`) share kernels, and so launches.
        by_source: dict[str, list[int]] = {}
        for number, table in enumerate(fused):
            if table is not None:
                by_source.setdefault(table._layout.header, []).append(number)
        self._groups = [
            LayoutGroup(
                [table for number in numbers if (table := fused[number]) is not None],
                numbers,
                (self._rate_ends - segments)[numbers],
                device,
            )
            for numbers in by_source.values()
        ]
        self._index: Kernels = fused_index_kernels().on(device)
        self._filters = [None if table is None else table._rows.filter for table in fused]
        self._asking = [one for one in self._filters if one is not None]
        self._filter_structs = filter_structs(self._filters, device)
        # All below is guarded by the locks of the tables.
        self._known: _Known | None = None
        self._lookups: tuple[bytes, list[tuple[LayoutGroup, PlannedLaunch]]] = b"", []
        self._plan: _Plan | None = None
        self._stream: DeviceStream | None = None
        self._finite: tuple[bytes, list[bool]] = b"", []
        self._asked: tuple[DeviceEvent, list[int]] | None = None
        self._answer = device.pinned((len(fused), COUNTERS), torch.int64)
        self._ask_from = [0.0] * len(fused)

    # Reading

    def lookup(self, ids: Tensor, sizes: Ints, id_offsets: Ints, emb_offsets: Ints) -> Tensor:
        """Return the embeddings of ids on the device: flat, cell after cell.

        Args:
            sizes: By batch and, within a batch, by table.
            id_offsets, emb_offsets: Where the ids and the floats of each cell begin, then their number.
        """
        count = len(self._tables)
        out = torch.empty(int(emb_offsets[-1]), dtype=torch.float32, device=self.device.torch_device)
        together = len(ids) <= _INT32_MAX  # positions within a launch are 32 bits wide
        with self._entered() as work:
            for group, one in self._planned_lookups(sizes, id_offsets, emb_offsets) if together else ():
                given = work.known.arrays, one.cells, group.scalars(one.tables, None)
                group.kernels.launch("lookup_tables", one.blocks, *given, ids, out, stream=work.stream.handle)
        for cell in np.flatnonzero(sizes).tolist() if self._others or not together else ():
            if cell % count in self._others or not together:
                own, floats = slice(*id_offsets[cell : cell + 2]), slice(*emb_offsets[cell : cell + 2])
                out[floats] = self._tables[cell % count].lookup(ids[own]).flatten()
        return out

    def lookup_batch(self, ids: Tensor, sizes: Ints) -> Tensor:
        """Return the embeddings of one batch on the device, table after table."""
        offsets = native.fused_offsets(self._widths, sizes, 1, len(ids))
        return self.lookup(ids, sizes, *offsets[1:])

    def _planned_lookups(
        self, sizes: Ints, id_offsets: Ints, emb_offsets: Ints
    ) -> list[tuple[LayoutGroup, PlannedLaunch]]:
        # Batches of a training run mostly have the same sizes: their launches are planned once.
        data = sizes.tobytes()
        if self._lookups[0] != data:
            count = len(self._tables)
            spans = Spans(np.arange(len(sizes)) % count, id_offsets[:-1], sizes, emb_offsets[:-1])
            batches = np.arange(0, len(sizes), count)[:, None]
            found = [
                (group, launch)
                for group in self._groups
                for launch in group.lookups(spans.some((batches + group.numbers).ravel()), self.device)
            ]
            self._lookups = data, found
        return self._lookups[1]

    # Writing

    def apply_gradients(self, batch: FusedBatch) -> None:
        """Train all tables, each as its own `apply_gradients` does."""
        with self._entered(writing=True) as work:
            together = len(batch.ids) <= _INT32_MAX
            alone = [not together or self._is_alone(number) for number in range(len(self._tables))]
            self._learn()
            # Rows that decay lazily and one_bit segments depend on the step: note it before the scalars are
            # packed.
            for group in (one for one in self._groups if one.scalars_vary):
                for number, table, at in zip(group.numbers, group.tables, group.rates_at, strict=True):
                    if not alone[number]:
                        table._scalars.begin(batch.step, batch.rates[at].tolist())
            self._train(work, batch, np.array(alone, np.bool_))
        for number, by_itself in enumerate(alone):
            if by_itself:
                self._train_alone(number, batch)

    def _is_alone(self, number: int) -> bool:
        table = self._fused[number]
        return table is None or self._twice[number] or table._rows.writes_alone

    def _train_alone(self, number: int, batch: FusedBatch) -> None:
        table, spans = self._tables[number], Spans.of(batch.sizes, self._widths)
        at, size, dim = int(spans.ids[number]), int(batch.sizes[number]), table.dim
        ids, floats = slice(at, at + size), slice(first := int(spans.floats[number]), first + size * dim)
        last = int(self._rate_ends[number])
        rates = batch.rates[last - len(table.config.segments) : last]
        table.apply_gradients(
            batch.ids[ids],
            batch.gradients[floats].view(size, dim),
            step=batch.step,
            event_time=batch.event_time[ids] if isinstance(batch.event_time, Tensor) else batch.event_time,
            learning_rates=torch.from_numpy(rates.copy()),
            dedup=batch.dedup,
            latest_values=None if batch.latest is None else batch.latest[floats].view(size, dim),
            counts=None if batch.counts is None else batch.counts[ids],
        )

    def _train(self, work: _Work, batch: FusedBatch, alone: NDArray[np.bool_]) -> None:
        sizes = np.where(alone, 0, batch.sizes)
        if not sizes.any():
            return
        work = self._with_room(work, sizes.tolist())
        watched = self._watched(Spans.of(batch.sizes, self._widths), sizes)
        places = self._launch_train(work, batch, sizes, alone, watched)
        if watched:
            # Trackers keep ids and places until they are read, so they get their own copy of the ids, which
            # the caller may overwrite.
            self._tell(watched, batch.ids.clone(), places)
        self._count(work, sizes.tolist())

    def _launch_train(
        self, work: _Work, batch: FusedBatch, sizes: Ints, alone: NDArray[np.bool_], watched: _Watched
    ) -> Tensor:
        """Launch a step, given room for all ids; return the places of watched tables' ids, as they came."""
        plan = self._planned(work.known, batch, sizes, alone)
        places = torch.empty_like(batch.ids, dtype=torch.int32) if watched else batch.ids
        claimed = self._claim(work, batch, plan, places if watched else None)
        for table, own in watched:
            mine = replace(claimed, places=places[own], made=claimed.made[own])
            table._rows.watch.writing(table._memory, mine)
        finite = self._stay_finite(batch.rates)
        for number, steps in enumerate(plan.steps):
            checked = not all(finite[table] for table in steps.numbers)
            self._step(work, batch, steps, claimed, number, checked=checked)
        return places

    def _watched(self, spans: Spans, sizes: Ints) -> _Watched:
        """Return the tables whose changes are tracked, and which ids of a batch they have.

        Args:
            sizes: As in `spans`, but 0 for tables that are trained by themselves.
        """
        return [
            (table, slice(at, at + size))
            for table, at, size in zip(self._fused, spans.ids.tolist(), sizes.tolist(), strict=True)
            if size and table is not None and not table._rows.watch.idle
        ]

    @staticmethod
    def _tell(watched: _Watched, ids: Tensor, places: Tensor) -> None:
        for table, own in watched:
            table._rows.watch.wrote(ids[own], places[own])

    def _planned(self, known: _Known, batch: FusedBatch, sizes: Ints, alone: NDArray[np.bool_]) -> _Plan:
        """Return what trains a batch, of which these sizes are of tables that are not alone."""
        plan, data, by_itself = self._plan, batch.sizes.tobytes(), alone.tobytes()
        if (
            plan is not None
            and plan.known is known
            and (plan.sizes, plan.alone, plan.dedup) == (data, by_itself, batch.dedup)
        ):
            return plan
        spans = Spans.of(batch.sizes, self._widths)
        cells_of = Spans(np.where(alone, -1, spans.tables), spans.ids, spans.sizes, spans.floats)
        # Sort keys of a table: one per place, one for ids without a place; one for all ids of a table that is
        # trained by itself, so that its positions keep their order.
        keys = np.where(alone, 1, known.places + EXTRA_PLACES + 1)
        ends = np.cumsum(keys)
        filtered = np.array([one is not None for one in self._filters], np.bool_) & ~alone & (sizes > 0)
        asking = spans.some(np.flatnonzero(filtered))
        asks = []
        for part in asking.parts(MAX_CELLS):
            own = asking.some(part)
            each = np.ones_like(own.sizes)
            asks.append(PlannedLaunch(own.tables, own.cells(each, np.zeros_like(each)), len(part)))
        claims = []
        for part in cells_of.parts(MAX_CELLS):
            own = cells_of.some(part)
            cells = own.cells(-(-own.sizes // _WARP), (ends - keys)[part])
            blocks = blocks_for(cells.units, per_block=THREADS // _WARP)
            claims.append(PlannedLaunch(own.tables, cells, blocks))
        groups = [(group, group.numbers[sizes[group.numbers] > 0]) for group in self._groups]
        self._plan = _Plan(
            data,
            by_itself,
            batch.dedup,
            known,
            spans,
            bool(ends[-1] > self._most_narrow),
            asks,
            claims,
            [group.steps(spans.some(some), summed=batch.dedup) for group, some in groups if len(some)],
        )
        return self._plan

    def _with_room(self, work: _Work, sizes: Sequence[int]) -> _Work:
        """Have every table grow that may not have room for all ids of a batch."""
        grown = False
        for table, size, limit in zip(self._fused, sizes, work.known.limits, strict=True):
            if not size or table is None or table._rows.usage.bound() + size <= limit:
                continue
            if self._staged:
                # The bound is too high: there is room, since the batch was staged.
                used = table._rows.usage.read().counters[USED]
                assert used + size <= limit, "a staged batch has room"
                continue
            table._rows.reserve(size)
            grown = True
        return _Work(work.stream, self._look_at(work.stream)) if grown else work

    def _claim(self, work: _Work, batch: FusedBatch, plan: _Plan, found: Tensor | None) -> Claimed:
        """Give every id its place, and bring all tables into one order.

        Args:
            found: Filled with places in the order of the ids.
        """
        n, device = len(batch.ids), self.device.torch_device
        # Shapes: n ids of all tables. order: sort keys; made, places, times: by position in the batch.
        order = torch.empty(n, dtype=torch.int64 if plan.wide else torch.int32, device=device)
        made = torch.empty(n, dtype=torch.uint8, device=device)
        places = torch.empty(n, dtype=torch.int32, device=device)
        seconds, second, times = None, batch.event_time, None
        if isinstance(second, Tensor):
            seconds, second, times = second, 0, torch.empty(n, dtype=torch.int32, device=device)
        arrays, stream = work.known.arrays, work.stream.handle
        width = "_wide" if plan.wide else ""
        refused = None if batch.live is None else batch.live.refused
        skip = self._ask_filters(work, batch, plan)
        filled = batch.ids, seconds, second, order, made, times, found, refused, skip
        for one in plan.claims:
            self._index.launch(f"claim_tables{width}", one.blocks, arrays, one.cells, *filled, stream=stream)
        ordered, positions = torch.sort(order, stable=True)
        settled = ordered, places
        for one in plan.claims:
            self._index.launch(
                f"settle_tables{width}", one.blocks, arrays, one.cells, *settled, stream=stream
            )
        return Claimed(places, places, positions, made, Times(times, second))

    def _ask_filters(self, work: _Work, batch: FusedBatch, plan: _Plan) -> Tensor | None:
        """Return a uint8 for each id: TURNED_AWAY if it must wait for its row; None if no table asks."""
        live = batch.live
        if not plan.asks or live is None:
            return None
        n, device, kernels = len(batch.ids), self.device, self._asking[0].kernels
        skip = torch.zeros(n, dtype=torch.uint8, device=device.torch_device)
        memory = memory_to_ask(n, device)
        given = self._filter_structs, batch.ids, live.occurring, *memory, skip, live.refused
        arrays, stream = work.known.arrays, work.stream.handle
        for one in plan.asks:
            kernels.launch(
                "ask_filters", one.blocks, arrays, one.cells, *given, stream=stream, threads=ASKING_THREADS
            )
        return skip

    def _step(
        self,
        work: _Work,
        batch: FusedBatch,
        planned: PlannedSteps,
        claimed: Claimed,
        number: int,
        *,
        checked: bool,
    ) -> None:
        group, device = planned.group, self.device.torch_device
        writes, stream = claimed.writes(), work.stream.handle
        runs = sums = None
        if planned.sums:
            stretches = len(batch.ids) // STRETCH + 1
            runs = torch.empty((stretches, 2), dtype=torch.int64, device=device)
            sums = torch.empty((stretches, group.layout.dim), dtype=torch.float32, device=device)
        for one in planned.sums:
            given = one.cells, writes, batch.gradients, runs, sums
            group.kernels.launch(
                "sum_long_runs_of_tables", one.blocks, *given, stream=stream, threads=STRETCH
            )
        for launch, one in enumerate(planned.steps):
            live = _Live()
            if batch.live is not None:
                live = _Live(batch.live.rates[number, launch].data_ptr(), batch.live.step.data_ptr())
            group.kernels.launch(
                "train_tables_checked" if checked else "train_tables",
                one.blocks,
                work.known.arrays,
                one.cells,
                group.scalars(one.tables, batch.rates),
                writes,
                batch.gradients,
                batch.latest,
                batch.step,
                runs,
                sums,
                batch.dedup,
                planned.per_tile,
                live,
                stream=stream,
            )

    def _stay_finite(self, rates: Floats) -> list[bool]:
        """Return of each table whether steps of such rates leave every row finite."""
        data = rates.tobytes()
        if data != self._finite[0]:
            of_tables = np.split(rates, self._rate_ends[:-1])
            found = [
                table is not None and table._scalars.stay_finite(own.tolist())
                for table, own in zip(self._fused, of_tables, strict=True)
            ]
            self._finite = data, found
        return self._finite[1]

    # Steps that are captured

    def why_not_captured(self) -> str | None:
        """Return why a step over these tables needs the host, so that it cannot be captured; None if not."""
        for table, fused, twice in zip(self._tables, self._fused, self._twice, strict=True):
            name = f"table {table.config.name!r}"
            if fused is None:
                why = table.why_not_staged if isinstance(table, SpillingTable) else None
                other = "other tables cannot have theirs brought to the device ahead of steps"
                return f"{name} keeps some of its rows in host memory, and {why or other}"
            if twice:
                return f"{name} is trained twice by each batch"
            if fused._admission is not None and fused._rows.filter is None:
                return f"{name} counts in host memory how often an id was seen before it gets a row"
            if sum(one is fused._rows.filter for one in self._asking) > 1:
                return f"{name} shares its admission filter with another table"
            if fused._rows.growth.bounded and not self._staged:
                return f"{name} has a capacity_bytes, and the host decides which ids get its last rows"
        for group in self._groups:
            if group.scalars_vary:
                name = group.tables[0].config.name
                return f"table {name!r} decays rows lazily, or has a one_bit segment"
        return None

    # How full the tables are

    def _count(self, work: _Work, sizes: Sequence[int]) -> None:
        """Note the rows of the batch, and request the counters of all tables if one comes near its limit."""
        # One copy brings the counters of all tables to the host, as soon as one table may be close to its
        # limit. Until it arrives, upper bounds are used: nothing waits.
        near = False
        for table, size, ask_from in zip(self._fused, sizes, self._ask_from, strict=True):
            if size and table is not None:
                near |= table._rows.usage.wrote(size) > ask_from
        if near:
            self._ask(work)

    def _ask(self, work: _Work) -> None:
        """Have the counters of all tables copied to the host, unless that is under way."""
        if self._asked is not None:
            return
        many = len(self._fused) * COUNTERS
        counters = torch.empty(self._answer.shape, dtype=torch.int64, device=self.device.torch_device)
        given = work.known.arrays, len(self._fused), COUNTERS, counters
        self._index.launch("collect_counters", blocks_for(many), *given, stream=work.stream.handle)
        self._answer.copy_(counters, non_blocking=True)
        written = [0 if table is None else table._rows.usage.written for table in self._fused]
        self._asked = work.stream.record(), written

    def _learn(self) -> None:
        """Take note of the counters, once they have come."""
        if self._asked is None or not self._asked[0].query():
            return
        written, self._asked = self._asked[1], None
        # A table that complains of bad event times must not keep other tables from learning their counters.
        complaint: TableArgumentError | None = None
        for number, (table, counters) in enumerate(zip(self._fused, self._answer.tolist(), strict=True)):
            if table is None:
                continue
            try:
                table._rows.usage.learn(counters, written[number])
                self._ask_later(number, table._rows.usage.bound(), table._rows.limit)
            except TableArgumentError as error:
                complaint = error
        if complaint is not None:
            raise complaint

    def _ask_later(self, number: int, bound: int, limit: int) -> None:
        self._ask_from[number] = max(limit / 2, bound + _ASKED_AFTER * (limit - bound))

    # Inside

    @contextmanager
    def _entered(self, *, writing: bool = False) -> Iterator[_Work]:
        """Take the locks of all tables, and put the call's kernels behind those of all calls before it.

        Streams order the kernels: this stream waits, on the device, for the last stream of each table, once
        per distinct stream.

        Raises:
            TableClosedError: One of them was closed.
        """
        with self.device.active():
            self._take_locks(writing=writing)
            try:
                stream = self.device.current_stream()
                if stream == self._stream:
                    # The same object as in the tables: `is` below is much cheaper than comparing dozens of
                    # streams.
                    stream = self._stream
                handle, waited = stream.handle, set[int]()
                for table in self._locked:
                    memory = table._memory
                    if table._stream is not stream:
                        before = table._stream.handle
                        if before != handle and before not in waited:
                            stream.wait_for(table._stream)
                            waited.add(before)
                        table._stream = stream
                    memory.stream = handle
                self._stream = stream
                yield _Work(stream, self._look_at(stream))
            finally:
                for table in self._locked:
                    table._lock.release()

    def _take_locks(self, *, writing: bool) -> None:
        while True:
            taken = []
            try:
                for table in self._locked:
                    table._lock.acquire()
                    taken.append(table)
                frozen = next((table for table in self._locked if table._frozen), None) if writing else None
                if frozen is None:
                    taken.clear()
                    return
            finally:
                for table in taken:
                    table._lock.release()
            # A table is frozen: all locks are released before waiting, since the thread that froze it may
            # need the other tables. Then it starts over: another table may be frozen by now.
            with frozen._lock:
                frozen._thawed.wait_for(lambda table=frozen: not table._frozen)  # type: ignore[misc]

    def _look_at(self, stream: DeviceStream) -> _Known:
        """Return the addresses and sizes of all memories, read again if a table got another memory."""
        memories = [None if table is None else table._memory for table in self._fused]
        # Weak references: this must not keep the old memory of a table alive that has grown.
        known = self._known
        if known is not None and all(
            (ref is None or ref() is memory) for ref, memory in zip(known.memories, memories, strict=True)
        ):
            if known.stream != stream.handle:
                stream.keep(known.arrays)  # allocated on another stream; this one reads it now
            return known
        # The structs `Arrays` of all tables (places.cuh), as one int64 tensor of shape (tables, 6) on the
        # device.
        words = [[0] * 6 if memory is None else memory.words() for memory in memories]
        up = self.device.pinned((len(words), 6), torch.int64)
        up.copy_(torch.tensor(words, dtype=torch.int64))
        arrays = torch.empty_like(up, device=self.device.torch_device)
        arrays.copy_(up, non_blocking=True)
        self._known = known = _Known(
            [None if memory is None else weakref.ref(memory) for memory in memories],
            arrays,
            np.array([0 if memory is None else memory.places for memory in memories], np.int64),
            [0 if table is None else table._rows.limit for table in self._fused],
            stream.handle,
        )
        for number, table in enumerate(self._fused):
            if table is not None:
                self._ask_later(number, table._rows.usage.bound(), table._rows.limit)
        return known


@dataclass(slots=True)
class Replay:
    """A replay that is about to be launched."""

    fits: bool
    """Whether the captured launches are still right."""
    launched: bool = False
    """Set by the caller once they were launched."""


class CapturedStep:
    """The update of rows in steps over batches of one shape, which is captured once and then replayed.

        step = CapturedStep(tables, sizes, number, refused, occurring)
        step.ready(rates)                        # before a step that is launched, or captured
        step.train(ids, event_time, gradients)   # launches
        with step.replaying(rates) as replay:
            if replay.fits:                      # no table grew since the capture: its pointers are valid
                graph.replay()
                replay.launched = True

    The host part of a step (room for new ids, counters, trackers) is done by `ready`, `train` and `replaying`
    for each step. It never waits for the device, except as `FusedTables` says.

    Args:
        sizes: Ids by table; all batches have the same.
        number: Of the step; see `LiveStep.step`.
        refused, occurring: As in `LiveStep`.
    """

    def __init__(
        self, tables: FusedTables, sizes: Ints, number: Tensor, refused: Tensor, occurring: Tensor
    ) -> None:
        self._tables = tables
        self._sizes = sizes
        self._spans = spans = Spans.of(sizes, tables._widths)
        self._none_alone = np.zeros(len(sizes), np.bool_)
        some = [(group, group.numbers[sizes[group.numbers] > 0]) for group in tables._groups]
        self._planned = [group.steps(spans.some(own), summed=True) for group, own in some if len(own)]
        self._live = LiveStep(number, refused, {}, occurring)
        self._rates: Floats = np.zeros(0, np.float32)
        self._uploaded = b""
        self.coming = sizes.tolist()
        """By table: how many ids of the next batch may be new; fewer than all if the caller knows."""
        self._captured: tuple[_Known, bytes, list[object]] | None = None
        self._noted: tuple[Tensor, Tensor] | None = None
        """Ids and places of a captured step, for trackers: filled anew by each replay."""
        self.capturing = False
        """Whether `train` only launches, because a capture or a replay does the host's part of a step."""

    def ready(self, rates: Floats) -> None:
        """Make room for the ids of a batch, and send its rates, as in `FusedBatch`."""
        with self._tables._entered(writing=True) as work:
            self._make_ready(work, rates)

    def train(self, ids: Tensor, event_time: Tensor, gradients: Tensor, latest: Tensor | None = None) -> None:
        """Launch a step.

        Args:
            ids: int64, as they occur, table after table.
            event_time: int64 of shape (n,), or (1,) for all, on the device.
        """
        tables, sizes = self._tables, self._sizes
        seconds = event_time.expand(len(ids)).contiguous()
        batch = FusedBatch(
            ids,
            sizes,
            gradients,
            self._rates,
            step=0,
            dedup=True,
            event_time=seconds,
            latest=latest,
            live=self._live,
        )
        with tables._entered(writing=True) as entered:
            work = entered if self.capturing else tables._with_room(entered, self.coming)
            watched = tables._watched(self._spans, self._sizes)
            places = tables._launch_train(work, batch, sizes, self._none_alone, watched)
            if self.capturing:
                self._noted = (ids, places) if watched else None
            else:
                self._finish(work, watched, ids, places)

    def captured(self) -> None:
        """Take note that `train` was captured just now, after `ready`."""
        with self._tables._entered() as work:
            self._captured = work.known, self._finite_key(), self._trackers()

    @property
    def capturable(self) -> bool:
        """Whether no snapshot of a table is open: it copies rows before they change, and needs more memory
        from step to step."""
        return all(table._rows.watch.copies is None for table in self._tables._locked)

    @contextmanager
    def replaying(self, rates: Floats) -> Iterator[Replay]:
        """Enter a replay: all locks are held in the block, and the step is counted if it was launched."""
        tables = self._tables
        with tables._entered(writing=True) as entered:
            work = self._make_ready(entered, rates)
            captured = self._captured
            replay = Replay(
                captured is not None
                and captured == (work.known, self._finite_key(), self._trackers())
                and self.capturable
            )
            self.capturing = True
            try:
                yield replay
            finally:
                self.capturing = False
            if replay.launched:
                ids, places = self._noted or (work.known.arrays, work.known.arrays)
                self._finish(work, tables._watched(self._spans, self._sizes), ids, places)

    def _make_ready(self, work: _Work, rates: Floats) -> _Work:
        tables = self._tables
        tables._learn()
        for asked in tables._asking:
            asked.enter()
        work = tables._with_room(work, self.coming)
        data = rates.tobytes()
        if self._uploaded != data:
            self._uploaded, self._rates = data, rates
            for number, steps in enumerate(self._planned):
                for launch, one in enumerate(steps.steps):
                    packed = steps.group.scalars(one.tables, rates)
                    up = tables.device.pinned((len(packed),), torch.uint8)
                    up.numpy()[:] = np.frombuffer(memoryview(packed).cast("B"), np.uint8)
                    into = self._live.rates.get((number, launch))
                    if into is None:
                        into = torch.empty_like(up, device=tables.device.torch_device, pin_memory=False)
                        self._live.rates[number, launch] = into
                    into.copy_(up, non_blocking=True)
        return work

    def _finish(self, work: _Work, watched: _Watched, ids: Tensor, places: Tensor) -> None:
        if watched:
            self._tables._tell(watched, ids.clone(), places.clone())
        self._tables._count(work, self.coming)

    def _finite_key(self) -> bytes:
        """Return which tables take steps that may make a row that is not finite: kernels differ by that."""
        return bytes(self._tables._stay_finite(self._rates))

    def _trackers(self) -> list[object]:
        """Return what tracks changes: captured launches are right only while that stays the same."""
        watched = self._tables._watched(self._spans, self._sizes)
        flags = [table._memory.flags for table, _ in watched]
        return [
            (id(table), None if own is None else own.data_ptr())
            for (table, _), own in zip(watched, flags, strict=True)
        ]
