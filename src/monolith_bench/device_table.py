"""`monolith bench table --device cuda` compares a table in GPU memory with torch on the same GPU.

Finding and gathering rows is compared with gathering them from an array without ids (`index_select`), and
with copying: no row is read and written faster than memory is copied. A step is compared with torch's sparse
Adagrad. Everything is timed on the device, by events, after a round to warm up. Batches are uniform, the
worst case for caches, and used in turn.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import get_args

import torch
from torch import Tensor

from monolith.cuda import Device, device_of
from monolith.errors import AcceleratorError, ConfigError
from monolith.table import Adagrad, Adam, CudaTable, Optimizer, RandomUniform, Segment, Sgd, TableConfig
from monolith.table.config import EmbeddingDtype
from monolith_bench.options import BenchTableOptions, refuse_nothing
from monolith_bench.report import Report
from monolith_bench.table import add_storage

LOADS = (0.3, 0.5, 0.75)
"""How full the index is when rows are looked up."""
STEP_LOAD = 0.5
WIDE_DIM = 128
WIDE_SHARE = 5
"""The table of wide rows has one row for every `WIDE_SHARE` rows of the plan."""
BATCHES = 16
GROWING_CALLS = 5
"""The least number of calls with new ids: all but the one that grows the table show the usual time."""
FLOAT_BYTES = 4
KEY_BYTES = 12  # and event time
EVENT_TIME = 1_700_000_000
LEARNING_RATE = 0.01
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: no two numbers become the same id


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTablePlan:
    """The options, settled."""

    rows: int
    dim: int
    batch: int
    repeats: int
    """Rounds; the median counts."""
    calls: int
    """In a round."""
    seed: int

    @classmethod
    def settle(cls, options: BenchTableOptions) -> DeviceTablePlan:
        refuse_nothing(options, ("rows", "dim", "batch", "repeats"))
        if options.scaling or options.busy:
            raise ConfigError("bench table: --scaling and --busy are about this machine's cores, not a GPU")
        rows, batch = options.rows or 50_000_000, options.batch or 1_050_000
        quick = options.quick
        return cls(
            rows=min(rows, 4096) if quick else rows,
            dim=options.dim or 64,
            batch=min(batch, 512) if quick else batch,
            repeats=2 if quick else options.repeats,
            calls=2 if quick else 10,
            seed=options.seed,
        )


def run(options: BenchTableOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    plan = DeviceTablePlan.settle(options)
    try:
        device = device_of(None)
    except AcceleratorError as cause:
        raise AcceleratorError(
            f"bench table --device cuda: {cause}; without --device it measures the table in host memory"
        ) from cause
    report = measure(plan, device)
    if options.json:
        report.print_json()
    return 0


def measure(plan: DeviceTablePlan, device: Device) -> Report:
    """Measure everything on a device."""
    report = Report("table")
    report.about["device"] = device.name
    with torch.no_grad(), device.active():
        bench = _Bench(plan, device, report)
        for part in (
            bench.measure_torch,
            bench.measure_loads,
            bench.measure_storage,
            bench.measure_wide,
            bench.measure_growth,
        ):
            part()
            _give_back(device)
    report.finish()
    return report


class _Bench:
    """One run. What a case takes of the device's memory is given back before the next begins."""

    def __init__(self, plan: DeviceTablePlan, device: Device, report: Report) -> None:
        self._plan = plan
        self._device = device
        self._report = report
        self._where = device.torch_device
        self._random = torch.Generator(self._where).manual_seed(plan.seed)
        self._clock = itertools.count(EVENT_TIME)
        self._baselines: dict[str, float] = {}
        self._torch_step = 0.0

    def measure_torch(self) -> None:
        """Copying, gathering from an array, and torch's sparse Adagrad."""
        plan, report = self._plan, self._report
        need_memory(self._device, plan.rows * plan.dim * FLOAT_BYTES * 2.5)
        report.say(f"copying and torch, {plan.rows:,} rows of {plan.dim} floats on {self._device.name}")
        bag = torch.nn.Embedding(plan.rows, plan.dim, sparse=True, device=self._where)
        static = bag.weight.detach()
        half = plan.rows // 2
        copied = self._milliseconds(lambda: static[:half].copy_(static[half : 2 * half]))
        positions = itertools.cycle([self._positions(plan.rows) for _ in range(BATCHES)])
        out = torch.empty((plan.batch, plan.dim), device=self._where)
        gathered = self._milliseconds(lambda: torch.index_select(static, 0, next(positions), out=out))
        self._baselines = {"torch index_select": rate(plan.batch, gathered), "copy": rate(half, copied)}
        for name, rows_per_s in self._baselines.items():
            report.add(name, "rows_per_s", rows_per_s, "rows/s")
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=LEARNING_RATE)
        gradients = self._gradients(plan.dim)

        def step() -> None:
            with torch.enable_grad():
                bag(next(positions)).backward(gradients)
            optimizer.step()
            optimizer.zero_grad()

        self._torch_step = self._milliseconds(step)
        report.add("torch sparse adagrad step", "rows_per_s", rate(plan.batch, self._torch_step), "rows/s")
        report.add("torch sparse adagrad step", "time", self._torch_step, "ms")

    def measure_loads(self) -> None:
        """Look rows up in an index that is more and more full, and train them."""
        plan, report = self._plan, self._report
        rates = []
        for load in LOADS:
            report.say(f"lookup and step, load {load}")
            rates.append(self._measure_load(load))
            _give_back(self._device)
        slowdown = max(rates) / min(rates)
        report.add(f"lookup, load {LOADS[0]} to {LOADS[-1]}", "slowest_over_fastest", slowdown, "times")
        report.show(f"{plan.rows:,} rows of {plan.dim} floats, batches of {plan.batch:,} uniform ids")

    def _measure_load(self, load: float) -> float:
        """Return the rate of lookups."""
        plan, report = self._plan, self._report
        table = self._table(Adagrad(), plan.dim, plan.rows, load)
        batches = self._batches(plan.rows)
        gradients = self._gradients(plan.dim)
        out = torch.empty_like(gradients)

        def step() -> None:
            batch = next(batches)
            table.lookup(batch, out=out)
            table.apply_gradients(batch, gradients, event_time=next(self._clock), dedup=True)

        found = rate(plan.batch, self._milliseconds(lambda: table.lookup(next(batches), out=out)))
        stepped = self._milliseconds(step)
        table.close()
        report.compare(f"lookup, load {load}", "rows_per_s", found, "rows/s", self._baselines)
        case = f"lookup and adagrad step, load {load}"
        beside = {"torch sparse adagrad step": rate(plan.batch, self._torch_step)}
        report.compare(case, "rows_per_s", rate(plan.batch, stepped), "rows/s", beside)
        report.add(case, "time", stepped, "ms")
        return found

    def measure_storage(self) -> None:
        """Look up and train rows with narrow embeddings, rounded by chance, next to those with float32."""
        plan, report = self._plan, self._report
        dtypes: tuple[EmbeddingDtype, ...] = get_args(EmbeddingDtype)
        for name, optimizer in (("adagrad", Adagrad()), ("sgd", Sgd())):
            report.say(f"{', '.join(dtypes)} embeddings, {name}")
            measured = {dtype: self._measure_storage(optimizer, dtype) for dtype in dtypes}
            for work, unit in (("lookup", "rows/s"), ("update", "rows/s"), ("bytes of a place", "bytes")):
                found = {dtype: one[work] for dtype, one in measured.items()}
                add_storage(report, work, f"{plan.dim} floats, {name}", unit, found)
        report.show(f"narrow embeddings, {plan.rows:,} rows, batches of {plan.batch:,} uniform ids")

    def _measure_storage(self, optimizer: Optimizer, dtype: EmbeddingDtype) -> dict[str, float]:
        """Return rates, and the bytes of values and state at a place, free or not."""
        plan = self._plan
        table = self._table(optimizer, plan.dim, plan.rows, STEP_LOAD, dtype=dtype)
        batches, gradients = self._batches(plan.rows), self._gradients(plan.dim)
        out, steps = torch.empty_like(gradients), itertools.count()

        def update() -> None:
            table.apply_gradients(
                next(batches), gradients, step=next(steps), event_time=next(self._clock), dedup=True
            )

        found = {
            "lookup": rate(plan.batch, self._milliseconds(lambda: table.lookup(next(batches), out=out))),
            "update": rate(plan.batch, self._milliseconds(update)),
            "bytes of a place": table.config.embedding_bytes + FLOAT_BYTES * table.state_dim,
        }
        table.close()
        _give_back(self._device)
        return found

    def measure_wide(self) -> None:
        """Look up wide rows and take a step of Adam: forward and backward."""
        plan, report = self._plan, self._report
        rows = max(plan.rows // WIDE_SHARE, 1)
        report.say(f"adam, {rows:,} rows of {WIDE_DIM} floats")
        table = self._table(Adam(), WIDE_DIM, rows, STEP_LOAD)
        batches = self._batches(rows)
        gradients = self._gradients(WIDE_DIM)
        out = torch.empty_like(gradients)

        def backward(batch: Tensor) -> None:
            table.apply_gradients(batch, gradients, event_time=next(self._clock), dedup=True)

        def both() -> None:
            batch = next(batches)
            table.lookup(batch, out=out)
            backward(batch)

        for case, work in {
            "forward": lambda: table.lookup(next(batches), out=out),
            "backward": lambda: backward(next(batches)),
            "forward and backward": both,
        }.items():
            report.add(f"adam, {WIDE_DIM} floats, {case}", "time", self._milliseconds(work), "ms")
        table.close()
        report.show(f"{rows:,} rows of {WIDE_DIM} floats with Adam, batches of {plan.batch:,} uniform ids")

    def measure_growth(self) -> None:
        """Train new ids until the table has outgrown its memory: the longest call moves its rows."""
        plan, report = self._plan, self._report
        report.say(f"growing, {plan.rows:,} rows")
        table = self._table(Adagrad(), plan.dim, plan.rows, LOADS[-1], also=2.0)
        gradients = self._gradients(plan.dim)
        before = table.stats()
        times = []
        for batch in torch.split(self._ids(plan.rows, first=plan.rows), plan.batch):

            def grow(batch: Tensor = batch) -> None:
                table.apply_gradients(batch, gradients[: len(batch)], event_time=next(self._clock))

            times.append(self._once(grow))
            if len(times) >= GROWING_CALLS and table.stats().bytes_total > before.bytes_total:
                break
        after = table.stats()
        table.close()
        grown = f"{after.bytes_total / before.bytes_total:.2f} times the memory"
        report.add("growing, longest call", "longest_pause", max(times), "ms", note=grown)
        report.add("growing, median call", "time", median(times), "ms")
        report.show(f"Growth from {plan.rows:,} rows, calls of {plan.batch:,} new ids")

    # Inside

    def _table(
        self,
        optimizer: Optimizer,
        dim: int,
        rows: int,
        load: float,
        *,
        also: float = 0.0,
        dtype: EmbeddingDtype = "float32",
    ) -> CudaTable:
        """Return a table with the first ids, its index this full; there is memory for `also` as much more."""
        segment = Segment(
            dim=dim, optimizer=optimizer, initializer=RandomUniform(), learning_rate=LEARNING_RATE
        )
        per_row = KEY_BYTES + FLOAT_BYTES * (dim + segment.state_dim)
        need_memory(self._device, (1 + also) * rows / load * per_row + rows * 8)
        # A table makes room for what it expects at the highest load.
        config = TableConfig(
            name="bench",
            segments=(segment,),
            initial_rows=int(rows * LOADS[-1] / load),
            embedding_dtype=dtype,
        )
        table = CudaTable(config, device=self._device)
        zeros = torch.zeros((self._plan.batch, dim), device=self._where)
        for part in torch.split(self._ids(rows), len(zeros)):
            table.assign_add(part, zeros[: len(part)], event_time=EVENT_TIME)
        return table

    def _ids(self, rows: int, *, first: int = 0) -> Tensor:
        return torch.arange(first, first + rows, device=self._where) * _SPREAD

    def _positions(self, rows: int) -> Tensor:
        return torch.randint(rows, (self._plan.batch,), generator=self._random, device=self._where)

    def _gradients(self, dim: int) -> Tensor:
        shape = (self._plan.batch, dim)
        return torch.randn(shape, generator=self._random, device=self._where) * 0.01

    def _batches(self, rows: int) -> Iterator[Tensor]:
        ids = self._ids(rows)
        return itertools.cycle([ids[self._positions(rows)] for _ in range(BATCHES)])

    def _milliseconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, after a round to warm up."""
        times = [self._once(call, self._plan.calls) for _ in range(self._plan.repeats + 1)]
        return median(times[1:])

    def _once(self, call: Callable[[], object], times: int = 1) -> float:
        stream = self._device.current_stream()
        began = stream.record(timed=True)
        for _ in range(times):
            call()
        ended = stream.record(timed=True)
        return ended.milliseconds_since(began) / times


def _give_back(device: Device) -> None:
    gc.collect()  # optimizers of torch know themselves
    device.give_back()


def rate(rows: int, milliseconds: float) -> float:
    """Return rows per second."""
    return rows / milliseconds * 1e3


def need_memory(device: Device, count: float) -> None:
    """Refuse what would not fit."""
    if count > device.free_bytes:
        raise ConfigError(
            f"bench table: needs about {count / 2**30:.1f} GiB of {device.name}, of which "
            f"{device.free_bytes / 2**30:.1f} GiB are free. Ask for fewer --rows."
        )
