"""`monolith bench table` compares the table with the machine's random-access limit and with its rivals.

The limit is rows at known positions, without ids: `native.RawRows` has the same
memory and threads, and none of the work of finding a row. The rivals are torch's
and FBGEMM's arrays. All get the same batches; event times move on with every
update, so that they are really written.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import ConfigError
from monolith.table import Adagrad, NativeTable, Sgd
from monolith.table.config import EmbeddingDtype
from monolith_bench.contenders import (
    fill,
    make_gradients,
    new_table,
    raw_contenders,
    rival_contenders,
    table_contenders,
)
from monolith_bench.ids import DISTRIBUTIONS, IdBatches, id_of
from monolith_bench.options import BenchTableOptions, refuse_nothing
from monolith_bench.report import Report, cores, memory
from monolith_bench.rivals import FbgemmEmbedding, Rival, TorchEmbedding, why_no_fbgemm
from monolith_bench.timing import Contender, Timing, race

FLOAT_BYTES = 4
BATCHES = 32
"""Batches prepared per distribution: many times the caches in rows, and gone through in turn."""
CALL = 1024
"""Ids in a call whose pauses are watched: what a small request has."""
BUILDS = 3
"""How often a table is filled from empty; the best counts."""
BUSY_TURNS = 5
SCALE = (1, 2, 5, 10, 20, 50)
WIDE_DIM = 32
"""The width at which memory overhead is promised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """The options, settled: what is measured, and for how long."""

    rows: int
    dims: tuple[int, ...]
    """The first is measured at `rows` rows, the other widths at about as many bytes."""
    threads: tuple[int, ...]
    batch: int
    timing: Timing
    scale_unit: int
    """Rows that the sizes of `SCALE` are multiples of."""
    seed: int

    @classmethod
    def settle(cls, options: BenchTableOptions) -> TablePlan:
        refuse_nothing(options, ("rows", "dim", "also_dims", "threads", "batch", "repeats"))
        rows, dim, batch = options.rows or 10_000_000, options.dim or 16, options.batch or 65536
        if rows > 1 << 32:
            raise ConfigError("bench table: --rows goes up to 2^32: raw rows have 32-bit positions")
        quick = options.quick
        return cls(
            rows=min(rows, 50_000) if quick else rows,
            dims=(dim, *(other for other in options.also_dims if other != dim)),
            threads=tuple(sorted({min(threads, cores()) for threads in options.threads})) or (1,),
            batch=min(batch, 4096) if quick else batch,
            timing=Timing(repeats=1, window=0.002) if quick else Timing(repeats=options.repeats, window=0.05),
            scale_unit=1000 if quick else 1_000_000,
            seed=options.seed,
        )

    @property
    def most_threads(self) -> int:
        return max(self.threads)

    def rows_at(self, dim: int) -> int:
        return max(self.rows * self.dims[0] // dim, 1)


def run(options: BenchTableOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    if options.device == "cuda":
        from monolith_bench import device_table

        return device_table.run(options)
    plan = TablePlan.settle(options)
    report = Report("table")
    torch_threads = torch.get_num_threads()
    try:
        measure_memory(plan, report)
        measure_pauses(plan, report)
        for dim in plan.dims:
            measure_speed(plan, report, dim)
        measure_narrow(plan, report)
        if options.scaling:
            measure_scaling(plan, report)
        if options.busy:
            measure_busy(plan, report)
    finally:
        torch.set_num_threads(torch_threads)
    report.finish()
    if options.json:
        report.print_json()
    return 0


# Memory


def measure_memory(plan: TablePlan, report: Report) -> None:
    """Fill a table of wide rows without optimizer state, where the index weighs most."""
    need_memory(plan.rows * WIDE_DIM * FLOAT_BYTES * 1.5)
    case, raw = f"{WIDE_DIM} floats", WIDE_DIM * FLOAT_BYTES
    report.say(f"memory of {plan.rows:,} rows of {case}")
    ids = id_of(np.arange(plan.rows))
    gradients = make_gradients(plan.batch, WIDE_DIM, plan.seed)
    table = new_table(WIDE_DIM, plan.most_threads, Sgd())
    before = resident_bytes()
    samples: list[tuple[float, int]] = []
    for _ in fill(table, ids, gradients):
        stats = table.stats()
        if stats.rows >= plan.rows // 100:  # the first rows of any table cost a multiple of themselves
            samples.append((stats.bytes_total / (stats.rows * raw) - 1, stats.rows))
    resident = resident_bytes() - before
    worst, worst_rows = max(samples)
    report.add(f"overhead, {case}", "overhead", samples[-1][0], "share")
    report.add(
        f"worst overhead on the way, {case}", "overhead", worst, "share", note=f"at {worst_rows:,} rows"
    )
    if resident > 0:
        report.add(f"resident overhead, {case}", "overhead", resident / (plan.rows * raw) - 1, "share")
    add_bytes_per_row(report, f"{case}, sgd", table)
    table.close()
    report.show(f"Memory, {plan.rows:,} rows")


def add_bytes_per_row(report: Report, case: str, table: NativeTable) -> None:
    raw = (table.dim + table.state_dim) * FLOAT_BYTES
    per_row = table.stats().bytes_total / len(table)
    report.add(f"raw row bytes, {case}", "bytes_per_row", raw, "bytes")
    report.compare(f"bytes per row, {case}", "bytes_per_row", per_row, "bytes", {"raw row bytes": raw})


# Pauses


def measure_pauses(plan: TablePlan, report: Report) -> None:
    """Grow tables by small calls; report the shortest of the longest pauses: the system caused the rest."""
    dim, rows = plan.dims[0], plan.rows
    need_memory(rows * 2 * dim * FLOAT_BYTES * 1.5)
    report.say(f"pauses while growing to {rows:,} rows")
    ids = id_of(np.arange(rows))
    gradients = make_gradients(CALL, dim, plan.seed)
    writes = [write_pauses(new_table(dim, plan.most_threads), ids, gradients) for _ in range(BUILDS)]
    reads = [read_pauses(new_table(dim, 1), ids, gradients) for _ in range(BUILDS)]
    machine = min(longest_gap(plan.most_threads, float(run.sum())) for run in writes) * 1e3
    report.add(
        "only watching the clock", "longest_pause", machine, "ms", note="what the machine itself stops for"
    )
    for case, pauses in (("write while growing", writes), ("read while growing", reads)):
        longest = min(float(run.max()) for run in pauses) * 1e3
        report.compare(case, "longest_pause", longest, "ms", {"only watching the clock": machine})
        report.add(case, "p99.9_pause", min(float(np.quantile(run, 0.999)) for run in pauses) * 1e3, "ms")
    report.show(f"Pauses of calls of {CALL} ids while growing to {rows:,} rows")


def longest_gap(processes: int, seconds: float) -> float:
    """Let some processes only watch the clock; return the longest time for which one was not let."""
    program = (
        "import sys, time\nlast = time.perf_counter()\nend = last + float(sys.argv[1])\nlongest = 0.0\n"
        "while last < end:\n now = time.perf_counter()\n longest = max(longest, now - last)\n last = now\n"
        "print(longest)"
    )
    command = [sys.executable, "-c", program, str(seconds)]
    watchers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(watcher.communicate()[0]) for watcher in watchers)


def write_pauses(table: NativeTable, ids: Tensor, gradients: Tensor) -> NDArray[np.float64]:
    """Return the seconds of each call that inserts."""
    pauses = np.array(list(fill(table, ids, gradients)))
    table.close()
    return pauses


def read_pauses(table: NativeTable, ids: Tensor, gradients: Tensor) -> NDArray[np.float64]:
    """Return the seconds of each call that reads while another thread inserts."""
    wanted, out = ids[: len(gradients)], torch.empty_like(gradients[: len(ids)])
    writer = threading.Thread(target=lambda: list(fill(table, ids, gradients)))
    pauses: list[float] = []
    writer.start()
    while writer.is_alive() or not pauses:
        began = time.perf_counter()
        table.lookup(wanted, out)
        pauses.append(time.perf_counter() - began)
    writer.join()
    table.close()
    return np.array(pauses)


# Speed


def measure_speed(plan: TablePlan, report: Report, dim: int) -> None:
    """Race the table against raw rows, torch and FBGEMM: at the first width in full, at others in short."""
    rows, first = plan.rows_at(dim), dim == plan.dims[0]
    need_memory(rows * 2 * dim * FLOAT_BYTES * 5.0)
    rivals: list[Rival] = [TorchEmbedding(rows, dim)]
    missing = why_no_fbgemm()
    if missing is None:
        rivals.append(FbgemmEmbedding(rows, dim, plan.batch))
    elif first:
        report.add("fbgemm", "rows_per_s", None, "rows/s", note=missing)
    batches = {name: make_batches(name, rows, plan) for name in (DISTRIBUTIONS if first else ["uniform"])}
    gradients = make_gradients(plan.batch, dim, plan.seed)
    width = "" if first else f", {dim} floats"
    for threads in plan.threads if first else [plan.most_threads]:
        torch.set_num_threads(threads)
        label = f"{counted(threads, 'thread')}{width}"
        report.say(f"insert, {label}")
        table, insert_rate = best_build(rows, gradients, threads)
        raw = native.RawRows(rows, dim, native.Workers(threads))
        measured: dict[str, dict[str, float]] = {}
        for name, requests in batches.items():
            case = f"{name}, {label}"
            report.say(f"lookup and update, {case}")
            measured[name] = race(
                table_contenders(table, requests, gradients)
                | raw_contenders(raw, requests, gradients)
                | rival_contenders(rivals, requests, gradients),
                **plan.timing,
            )
            add_rates(report, case, measured[name])
        limit = measured["uniform"]["raw read-modify-write"]
        baselines = {f"raw read-modify-write, uniform, {label}": limit}
        report.compare(f"insert, {label}", "rows_per_s", insert_rate, "rows/s", baselines)
        if threads == plan.most_threads:
            add_bytes_per_row(report, f"{dim} floats, adagrad", table)
        table.close()
        del raw  # before the next is made
    report.show(f"Speed, {rows:,} rows of {dim} floats, batches of {plan.batch:,} ids")


def add_rates(report: Report, case: str, rates: dict[str, float]) -> None:
    """Record the rate of each contender, and compare the table's with baselines that do the same work."""
    for name, rate in rates.items():
        beside = {other: rates[other] for other in EXTRA_PLACES.get(name, ()) if other in rates}
        if beside:
            report.compare(f"{name}, {case}", "rows_per_s", rate, "rows/s", beside)
        else:
            report.add(f"{name}, {case}", "rows_per_s", rate, "rows/s")


EXTRA_PLACES = {
    "lookup": ("raw gather", "raw gather of values only", "torch lookup", "fbgemm lookup"),
    "update": ("raw read-modify-write",),
    "update with dedup": ("raw read-modify-write",),
    "lookup and update": ("torch step", "fbgemm step"),
}
"""Case of the table -> the baselines that do the same work, the foremost first."""


def best_build(rows: int, gradients: Tensor, threads: int) -> tuple[NativeTable, float]:
    """Return a full table, and the best rate in rows/s at which one was filled from empty."""
    ids = id_of(np.arange(rows))
    best = 0.0
    for last in [False] * (BUILDS - 1) + [True]:
        table = new_table(gradients.shape[1], threads)
        best = max(best, rows / sum(fill(table, ids, gradients)))
        if not last:
            table.close()
    return table, best


def measure_narrow(plan: TablePlan, report: Report) -> None:
    """Race tables with embeddings of each `embedding_dtype`, by optimizers with and without state; rounding
    is stochastic."""
    dim, rows, threads = plan.dims[0], plan.rows, plan.most_threads
    need_memory(rows * 2 * dim * FLOAT_BYTES * 6.0)
    requests = make_batches("uniform", rows, plan)
    gradients = make_gradients(plan.batch, dim, plan.seed)
    dtypes: tuple[EmbeddingDtype, ...] = get_args(EmbeddingDtype)
    for name, optimizer in (("adagrad", Adagrad()), ("sgd", Sgd())):
        report.say(f"{', '.join(dtypes)} embeddings, {name}")
        racing: dict[str, Contender] = {}
        tables = [new_table(dim, threads, optimizer, dtype) for dtype in dtypes]
        for table in tables:
            for _ in fill(table, id_of(np.arange(rows)), gradients):
                pass
            for work, one in table_contenders(table, requests, gradients).items():
                if work in ("lookup", "update with dedup"):
                    racing[f"{work}, {table.config.embedding_dtype}"] = one
        rates = race(racing, **plan.timing)
        per_row = {table.config.embedding_dtype: table.stats().bytes_total / len(table) for table in tables}
        for table in tables:
            table.close()
        case = f"{dim} floats, {name}"
        for work in ("lookup", "update with dedup"):
            add_storage(report, work, case, "rows/s", {one: rates[f"{work}, {one}"] for one in dtypes})
        add_storage(report, "bytes per row", case, "bytes", per_row)
    label = counted(threads, "thread")
    report.show(f"narrow embeddings, {rows:,} rows, batches of {plan.batch:,} uniform ids, {label}")


def add_storage(
    report: Report, work: str, case: str, unit: str, found: Mapping[EmbeddingDtype, float]
) -> None:
    """Record what float32 embeddings make, and what each other `embedding_dtype` makes next to it."""
    metric = {"rows/s": "rows_per_s", "bytes": "bytes_per_row"}[unit]
    before = {f"{work}, float32, {case}": found["float32"]}
    report.add(f"{work}, float32, {case}", metric, found["float32"], unit)
    for dtype, value in found.items():
        if dtype != "float32":
            report.compare(f"{work}, {dtype}, {case}", metric, value, unit, before)


def make_batches(distribution: str, rows: int, plan: TablePlan) -> IdBatches:
    draw = DISTRIBUTIONS[distribution]
    return IdBatches.of(draw(rows, BATCHES * plan.batch, np.random.default_rng(plan.seed)), plan.batch)


# Scaling


def measure_scaling(plan: TablePlan, report: Report) -> None:
    """Grow one table, and stop at each size to ask what a row costs; then the same of raw rows.

    The machine's own limit falls too as rows outgrow its caches, so it is reported too.
    """
    dim, threads = plan.dims[0], plan.most_threads
    label = f"uniform, {counted(threads, 'thread')}"
    gradients = make_gradients(plan.batch, dim, plan.seed)
    sizes = [scale * plan.scale_unit for scale in SCALE]
    table = new_table(dim, threads)
    costs: dict[int, dict[str, float]] = {}
    for before, rows in zip([0, *sizes], sizes, strict=False):
        need_memory((rows - before) * 2 * dim * FLOAT_BYTES * 1.5)
        report.say(f"scaling, {rows:,} rows")
        for _ in fill(table, id_of(np.arange(before, rows)), gradients):
            pass
        requests = make_batches("uniform", rows, plan)
        contenders = table_contenders(table, requests, gradients)
        rates = race({name: contenders[name] for name in ("lookup", "update")}, **plan.timing)
        costs[rows] = rates
    table.close()
    for rows in sizes:
        report.say(f"scaling, {rows:,} raw rows")
        raw = native.RawRows(rows, dim, native.Workers(threads))
        costs[rows] |= race(
            raw_contenders(raw, make_batches("uniform", rows, plan), gradients), **plan.timing
        )
    for name in costs[sizes[0]]:
        first = f"{name}, {label}, {sizes[0]:,} rows"
        for rows in sizes:
            report.compare(
                f"{name}, {label}, {rows:,} rows",
                "ns_per_row",
                1e9 / costs[rows][name],
                "ns",
                {first: 1e9 / costs[sizes[0]][name]},
            )
    report.show("Cost of a row as the table grows")


# A busy machine


def measure_busy(plan: TablePlan, report: Report) -> None:
    """Stop and wake a busy neighbour by turns, so that a quiet and a busy machine share all other noise."""
    dim, threads = plan.dims[0], plan.most_threads
    case = f"uniform, {counted(threads, 'thread')}"
    need_memory(plan.rows * 2 * dim * FLOAT_BYTES * 2.5)
    gradients = make_gradients(plan.batch, dim, plan.seed)
    table = new_table(dim, threads)
    for _ in fill(table, id_of(np.arange(plan.rows)), gradients):
        pass
    raw = native.RawRows(plan.rows, dim, native.Workers(threads))
    requests = make_batches("uniform", plan.rows, plan)
    contenders = table_contenders(table, requests, gradients) | raw_contenders(raw, requests, gradients)
    window = 4 * plan.timing["window"]  # long enough for a core to be shared many times over
    best = {signal.SIGSTOP: dict.fromkeys(contenders, 0.0), signal.SIGCONT: dict.fromkeys(contenders, 0.0)}
    report.say(f"one core busy by turns, {case}")
    with busy_core() as neighbour:
        for _ in range(min(plan.timing["repeats"], BUSY_TURNS)):
            for state, rates in best.items():
                neighbour.send_signal(state)
                for name, rate in race(contenders, repeats=1, window=window).items():
                    rates[name] = max(rates[name], rate)
    quiet, busy = best.values()
    for name in contenders:
        report.add(f"{name}, {case}, quiet", "rows_per_s", quiet[name], "rows/s")
        baselines = {f"{name}, {case}, quiet": quiet[name]}
        baselines |= {other: busy[other] for other in EXTRA_PLACES.get(name, ()) if other in busy}
        report.compare(f"{name}, {case}, one core busy", "rows_per_s", busy[name], "rows/s", baselines)
    table.close()
    report.show("With one core kept busy by another process")


@contextmanager
def busy_core() -> Iterator[subprocess.Popen[bytes]]:
    """Keep one core busy from another process, which ends with the block, or with us."""
    program = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


# The machine


def need_memory(count: float) -> None:
    """Refuse what would not fit, before the system ends us for it."""
    available = memory("MemAvailable")
    if available is not None and count > available:
        raise ConfigError(
            f"bench table: needs about {count / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free. "
            "Ask for fewer --rows, or leave out --scaling."
        )


def resident_bytes() -> int:
    """Return the memory this process really has; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.is_file() else 0


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
