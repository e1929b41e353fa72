"""`monolith bench tiers` compares a tiered table with all rows in memory, and with what the disk can read.

Both tables have the same rows and train on batches of the same distributions by turns; if memory has no
room for all rows, the one in memory has as many as fit. The disk's limit is random reads of 4 KiB past the
kernel's cache, by the threads that the table's files are read with.

Each is measured by itself, with a thread that looks rows up one batch ahead, and with this thread while a
model computes, which is what a run does.

How long single steps take is told, too, with files being written and compacted meanwhile, and while rows
expire: what stops a table for a moment shows in the longest.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith import native
from monolith.config import parse_bytes
from monolith.errors import ConfigError
from monolith.table import Expiry, MultiTable, NativeTable, Table, TieredTable
from monolith_bench.contenders import (
    EVENT_TIME,
    contender,
    fill,
    make_gradients,
    new_table,
    table_contenders,
)
from monolith_bench.ids import DISTRIBUTIONS, IdBatches, id_of
from monolith_bench.options import BenchTiersOptions
from monolith_bench.report import Report, cores
from monolith_bench.report import memory as memory_field
from monolith_bench.rivals import LEARNING_RATE
from monolith_bench.table import FLOAT_BYTES, need_memory, resident_bytes
from monolith_bench.timing import Contender, Timing, race

WORKS = ("lookup", "lookup and update", "lookup ahead and update", "training")
COLUMNS = 26
"""IDs of an example of the model."""
HIDDEN = (256, 128)
"""Widths of its layers."""
LEAST_MEMORY = 4 << 20
"""The smallest memory of a tiered table."""
TIMES_MEMORY = 4
"""All batches together draw so many times the rows for which there is memory, or what is asked for again
would have stayed there since the last time."""
COUNTED_STEPS = 20
"""Steps of which the bytes are counted, after all timing."""
INSERTED = 4_000_000
"""IDs that are in memory at a time while a table is filled."""
BLOCK = 4096
MOST_RAW_BYTES = 8 << 30
"""The largest file for raw reads: far more than any cache of the disk."""
PIECE = 8 << 20
"""Bytes that the file for raw reads is written by at a time."""
EXPIRE_AFTER = timedelta(days=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersPlan:
    """The options, settled."""

    rows: int
    memory_rows: int
    """Rows of the table in memory."""
    memory: int | None
    """Bytes; None for an eighth of what all rows take in memory."""
    dim: int
    batch: int
    batches: int
    """Batches prepared per distribution, at least."""
    ids: tuple[str, ...]
    timing: Timing
    warm_up: float
    """Seconds for which a tiered table trains before it is timed, at least, so that frequent rows are hot; it
    trains on all batches once."""
    seed: int
    tables: int = 1
    """With 2 or more, so many are measured side by side."""

    @classmethod
    def settle(cls, options: BenchTiersOptions) -> TiersPlan:
        for name in ("rows", "dim", "batch", "tables"):
            if getattr(options, name) < 1:
                raise ConfigError(f"bench tiers: --{name} must be at least 1, got {getattr(options, name)}")
        memory = None if options.memory is None else parse_bytes(options.memory)
        if memory is not None and memory < LEAST_MEMORY:
            raise ConfigError(f"bench tiers: --memory must be at least 4MiB, got {options.memory}")
        if memory is not None and memory < options.tables * LEAST_MEMORY:
            raise ConfigError(
                f"bench tiers: --memory must be at least 4MiB for each of {options.tables} tables, got "
                f"{options.memory}"
            )
        quick = options.quick
        rows = min(options.rows, 100_000) if quick else options.rows
        if options.memory_rows is not None and not 1 <= options.memory_rows <= rows:
            raise ConfigError(
                f"bench tiers: --memory-rows must be from 1 to the number of rows, {rows}, got "
                f"{options.memory_rows}"
            )
        return cls(
            rows=rows,
            memory_rows=rows_that_fit(rows, options.dim, memory or 0)
            if options.memory_rows is None
            else options.memory_rows,
            memory=memory,
            dim=options.dim,
            batch=min(options.batch, 2048) if quick else options.batch,
            batches=32 if quick else 256,
            ids=tuple(dict.fromkeys(options.ids)) or tuple(DISTRIBUTIONS),
            timing=Timing(repeats=1, window=0.01) if quick else Timing(repeats=3, window=1.5),
            warm_up=0.1 if quick else 8.0,
            seed=options.seed,
            tables=options.tables,
        )

    @property
    def row_bytes(self) -> int:
        """Of an embedding with the state of Adagrad."""
        return 2 * self.dim * FLOAT_BYTES


def run(options: BenchTiersOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    plan = TiersPlan.settle(options)
    need_memory(plan.memory_rows * plan.row_bytes * 2.0 + (plan.memory or 0))
    report = Report("tiers")
    if options.folder is not None and not Path(options.folder).is_dir():
        raise ConfigError(f"bench tiers: --folder {options.folder} is not a folder; make it first")
    folder = Path(tempfile.mkdtemp(prefix="monolith-tiers-", dir=options.folder))
    try:
        measure(plan, report, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: TiersPlan, report: Report, folder: Path) -> None:
    gradients = make_gradients(plan.batch, plan.dim, plan.seed)
    with ExitStack() as opened:
        report.say(f"{plan.memory_rows:,} rows in memory")
        memory = new_table(plan.dim, cores())
        opened.callback(memory.close)
        in_memory = insert(memory, plan.memory_rows, gradients)
        whole = memory.stats().bytes_total * plan.rows // plan.memory_rows
        allowed = plan.memory or max(whole // 8, plan.tables * LEAST_MEMORY)
        report.say(f"{plan.rows:,} rows in {allowed:,} bytes of memory and files")
        before = resident_bytes()
        tiered = tiered_table(memory, allowed, folder)
        opened.callback(tiered.close)
        in_tiers = insert(tiered, plan.rows, gradients)
        tiered.flush()
        reader_threads = native.BlockReader().threads
        report.about = {
            "rows": plan.rows,
            "rows_in_memory": plan.memory_rows,
            "dim": plan.dim,
            "memory_limit": allowed,
            "batch": plan.batch,
            "table_threads": cores(),
            "reader_threads": reader_threads,
        }
        report.add("insert in memory", "rows_per_s", in_memory, "rows/s")
        report.compare("insert", "rows_per_s", in_tiers, "rows/s", {"insert in memory": in_memory})
        raw = opened.enter_context(raw_reads(plan, report, folder))
        rocks = opened.enter_context(rocksdb(plan, report, folder, allowed))
        for name in plan.ids:
            measure_ids(plan, report, name, memory, tiered, raw, rocks)
        add_memory(plan, report, memory, tiered, allowed, resident_bytes() - before)
        measure_expiry(plan, report, tiered)
        if plan.tables > 1:
            tiered.close()
            measure_tables(plan, report, memory, allowed, folder)
    report.show(
        f"{plan.rows:,} rows of {plan.dim} floats with Adagrad, distinct ids of batches of {plan.batch:,}"
    )


def rows_that_fit(rows: int, dim: int, others: int) -> int:
    """Return how many rows a table in memory is given, half of the free memory next to `others` at most."""
    free = memory_field("MemAvailable")
    room = rows if free is None else (free - others) // 2 // (2 * dim * FLOAT_BYTES * 2)
    return max(min(rows, room), 1)


def insert(table: Table, rows: int, gradients: Tensor) -> float:
    """Train all ids once, and return rows/s."""
    seconds = 0.0
    for first in range(0, rows, INSERTED):
        ids = id_of(np.arange(first, min(first + INSERTED, rows)))
        seconds += sum(fill(table, ids, gradients))
    return rows / seconds


def tiered_table(
    memory: NativeTable, allowed: int, folder: Path, reader: native.BlockReader | None = None
) -> TieredTable:
    """Return an empty table like the one in memory, with so many bytes of memory."""
    config = replace(
        memory.config,
        storage="tiered",
        memory_bytes=allowed,
        storage_dir=str(folder),
        expiry=Expiry(default=EXPIRE_AFTER),
    )
    return TieredTable(config, workers=native.Workers(cores()), reader=reader)


def measure_ids(
    plan: TiersPlan,
    report: Report,
    name: str,
    memory: NativeTable,
    tiered: TieredTable,
    raw: RawReads | None,
    rocks: RocksRows | None,
) -> None:
    """Race both tables, raw reads and RocksDB with ids of one distribution."""
    drawn = TIMES_MEMORY * (tiered.config.memory_bytes or 0) // plan.row_bytes
    plan = replace(plan, batches=max(plan.batches, drawn // plan.batch))
    requests = distinct_batches(name, plan, plan.rows)
    wanted = len(requests.ids[0])
    gradients = make_gradients(wanted, plan.dim, plan.seed)
    racing: dict[str, Contender] = {}
    # In turn over all batches: none may come to rows that another has just made hot.
    turns = itertools.cycle(range(len(requests)))
    in_tiers = {
        work: replace(one, batches=turns)
        for work, one in training_contenders(tiered, requests, gradients).items()
    }
    fewer = requests if plan.memory_rows == plan.rows else distinct_batches(name, plan, plan.memory_rows)
    in_memory = training_contenders(memory, fewer, make_gradients(len(fewer.ids[0]), plan.dim, plan.seed))
    for work in WORKS:
        racing |= {work: in_tiers[work], f"{work} in memory": in_memory[work]}
    if raw is not None:
        racing["raw reads"] = Contender(wanted, lambda _: raw.read(wanted), itertools.count())
    if rocks is not None:
        racing |= rocks.contenders(requests, gradients)
    report.say(f"{name} ids, {wanted:,} distinct ones in a batch: warming up")
    step = in_tiers["lookup and update"]
    began = time.perf_counter()
    for number in itertools.count():
        if number >= len(requests) and time.perf_counter() - began >= plan.warm_up:
            break
        step.run(next(step.batches))
    report.say(f"{name} ids: lookup, lookup and update")
    rates = race(racing, **plan.timing)
    works = {*WORKS}
    for case, rate in rates.items():
        if case not in works:
            report.add(f"{case}, {name}", "rows_per_s", rate, "rows/s")
    for work in WORKS:
        others = (f"{work} in memory", "raw reads", f"{work} in RocksDB")
        baselines = {other: rates[other] for other in others if other in rates}
        report.compare(f"{work}, {name}", "rows_per_s", rates[work], "rows/s", baselines)
    add_steps(plan, report, name, tiered, step)
    before = tiered.stats()
    for _ in range(COUNTED_STEPS):
        step.run(next(step.batches))
    after = tiered.stats()
    read_rows = (after.cold_ids_read - before.cold_ids_read) / (after.tiered_ids - before.tiered_ids)
    report.add(f"lookups and updates that read no file, {name}", "hit_rate", 1 - read_rows, "share")
    for what in ("read", "written"):
        field = f"cold_bytes_{what}"
        moved = (getattr(after, field) - getattr(before, field)) / COUNTED_STEPS
        report.add(f"bytes {what} in a step, {name}", f"bytes_{what}_per_step", moved, "bytes")


# Single steps


def add_steps(plan: TiersPlan, report: Report, name: str, tiered: TieredTable, step: Contender) -> None:
    """Time single steps, with files that are written and compacted meanwhile."""
    report.say(f"{name} ids: how long steps take")
    before = tiered.stats()
    ends = time.perf_counter() + plan.timing["repeats"] * plan.timing["window"]
    seconds = timed_steps(step, lambda: time.perf_counter() >= ends)
    after = tiered.stats()
    note = f"{after.compactions - before.compactions} files compacted meanwhile"
    add_step_times(report, f"step, {name}", seconds, note)


def measure_expiry(plan: TiersPlan, report: Report, tiered: TieredTable) -> None:
    """Time single steps while the older half of the rows that were never trained again expires."""
    report.say("how long steps take while rows expire")
    name = plan.ids[0]
    requests = distinct_batches(name, plan, plan.rows)
    gradients = make_gradients(len(requests.ids[0]), plan.dim, plan.seed)
    clock = itertools.count(EVENT_TIME + plan.rows)

    def step(batch: int) -> None:
        tiered.lookup(requests.ids[batch])
        tiered.apply_gradients(requests.ids[batch], gradients, event_time=next(clock), dedup=True)

    now = EVENT_TIME + plan.rows // plan.batch // 2 + int(EXPIRE_AFTER.total_seconds())
    with ThreadPoolExecutor(1) as thread:
        began = time.perf_counter()
        expiring = thread.submit(tiered.evict, now)
        seconds = timed_steps(contender(requests, step), expiring.done)
        took = time.perf_counter() - began
        note = f"{expiring.result():,} rows expired in {took:.3g} s"
    add_step_times(report, f"step while rows expire, {name}", seconds, note)


def timed_steps(step: Contender, done: Callable[[], bool]) -> list[float]:
    """Return the seconds of each step, of one at least, until `done` says so after one."""
    seconds: list[float] = []
    while not seconds or not done():
        began = time.perf_counter()
        step.run(next(step.batches))
        seconds.append(time.perf_counter() - began)
    return seconds


def add_step_times(report: Report, case: str, seconds: list[float], note: str) -> None:
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    for metric, value in (("p50_step", p50), ("p99_step", p99), ("longest_step", max(seconds))):
        report.add(case, metric, 1000 * float(value), "ms", note=f"{note}; {len(seconds)} steps")


# Several tables


def measure_tables(plan: TiersPlan, report: Report, memory: NativeTable, allowed: int, folder: Path) -> None:
    """Race tables that work side by side with the same tables one after the other."""
    count, one = plan.tables, replace(plan, batch=max(plan.batch // plan.tables, 1))
    rows = max(plan.rows // count, 1)
    report.say(f"{count} tables with {rows:,} rows each")
    reader = native.BlockReader()
    names = [f"{number:04}" for number in range(count)]  # in this order in fused calls, too
    tables = {name: tiered_table(memory, allowed // count, folder, reader) for name in names}
    fused = MultiTable(tables)
    try:
        gradients = make_gradients(plan.batch, plan.dim, plan.seed)
        for table in tables.values():
            insert(table, rows, gradients)
            table.flush()
        for name in plan.ids:
            drawn = [
                distinct_batches(name, replace(one, seed=plan.seed + number), rows) for number in range(count)
            ]
            race_tables(plan, report, name, fused, drawn)
    finally:
        fused.close()


def race_tables(
    plan: TiersPlan, report: Report, name: str, fused: MultiTable, drawn: Sequence[IdBatches]
) -> None:
    tables, wanted = list(fused.tables.values()), sum(len(requests.ids[0]) for requests in drawn)
    clock = itertools.count(EVENT_TIME)
    batches = [torch.cat(cells) for cells in zip(*(requests.ids for requests in drawn), strict=True)]
    sizes = torch.tensor([len(requests.ids[0]) for requests in drawn])
    gradients = make_gradients(wanted, plan.dim, plan.seed)

    def side_by_side(batch: int) -> None:
        fused.fused_lookup(batches[batch], sizes, num_batches=1)
        fused.fused_apply_gradients(
            batches[batch], sizes, gradients.view(-1), num_batches=1, event_time=next(clock), dedup=True
        )

    def in_turn(batch: int) -> None:
        cells = torch.split(batches[batch], sizes.tolist())
        for table, ids in zip(tables, cells, strict=True):
            table.lookup(ids)
        moment = next(clock)
        for table, ids, grads in zip(tables, cells, torch.split(gradients, sizes.tolist()), strict=True):
            table.apply_gradients(ids, grads, event_time=moment, dedup=True)

    turns = itertools.cycle(range(len(batches)))
    case, other = f"lookup and update of {len(tables)} tables", "one table after the other"
    rates = race(
        {case: Contender(wanted, side_by_side, turns), other: Contender(wanted, in_turn, turns)},
        **plan.timing,
    )
    report.add(f"{other}, {name}", "rows_per_s", rates[other], "rows/s")
    report.compare(f"{case}, {name}", "rows_per_s", rates[case], "rows/s", {other: rates[other]})


def training_contenders(table: Table, requests: IdBatches, gradients: Tensor) -> dict[str, Contender]:
    """Return the contenders of a table, and those whose rows are looked up while a step before trains."""
    updated, trained = LooksAhead(table, requests), LooksAhead(table, requests)
    clock = itertools.count(EVENT_TIME)
    model = small_model(gradients.shape[1])

    def update(batch: int) -> None:
        updated.rows(batch)
        table.apply_gradients(requests.ids[batch], gradients, event_time=next(clock), dedup=True)

    def train(batch: int) -> None:
        rows = trained.rows(batch).requires_grad_()
        model(rows[: len(rows) // COLUMNS * COLUMNS].view(-1, COLUMNS * rows.shape[1])).sum().backward()
        found = rows.grad
        assert found is not None
        table.apply_gradients(requests.ids[batch], found, event_time=next(clock), dedup=True)

    return table_contenders(table, requests, gradients) | {
        "lookup ahead and update": contender(requests, update),
        "training": contender(requests, train),
    }


def small_model(dim: int) -> nn.Module:
    """Return the layers of a model with as many ids for an example as Criteo's."""
    widths = (COLUMNS * dim, *HIDDEN)
    layers = [(nn.Linear(width, following), nn.ReLU()) for width, following in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(HIDDEN[-1], 1))


class LooksAhead:
    """Looks up each batch on a thread of its own while the one before trains, as a run does."""

    def __init__(self, table: Table, requests: IdBatches) -> None:
        self._table = table
        self._requests = requests
        self._thread = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[Tensor]] | None = None

    def rows(self, batch: int) -> Tensor:
        """Return the rows of a batch, and begin to look up the next."""
        if self._next is None or self._next[0] != batch:  # the first of a window
            self._next = batch, self._look_up(batch)
        found = self._next[1]
        following = (batch + 1) % len(self._requests)
        rows = found.result()
        self._next = following, self._look_up(following)
        return rows

    def _look_up(self, batch: int) -> Future[Tensor]:
        return self._thread.submit(self._table.lookup, self._requests.ids[batch])


def distinct_batches(name: str, plan: TiersPlan, rows: int) -> IdBatches:
    """Return batches of distinct ids, all as long as the shortest: a store asks a table for each id once."""
    random = np.random.default_rng(plan.seed)
    drawn = DISTRIBUTIONS[name](rows, plan.batches * plan.batch, random)
    distinct = [random.permutation(np.unique(one)) for one in drawn.reshape(plan.batches, plan.batch)]
    shortest = min(map(len, distinct))
    return IdBatches.of(np.concatenate([one[:shortest] for one in distinct]), shortest)


def add_memory(
    plan: TiersPlan, report: Report, memory: NativeTable, tiered: TieredTable, allowed: int, resident: int
) -> None:
    whole, stats = memory.stats().bytes_total * plan.rows // plan.memory_rows, tiered.stats()
    note = None if plan.memory_rows == plan.rows else f"reckoned from {plan.memory_rows:,} rows"
    report.add("table in memory", "memory", whole, "bytes", note=note)
    report.compare("tiered table", "memory", stats.bytes_total, "bytes", {"table in memory": whole})
    report.add("memory limit of the tiered table", "memory", allowed, "bytes")
    report.add("memory that the process grew by", "memory", resident, "bytes", note="all contenders' buffers")
    report.add("files of the tiered table", "file_bytes", stats.cold_bytes, "bytes")
    hot = 1 - stats.cold_rows / stats.rows
    report.add("rows in memory", "hot_rows", hot, "share")


# The disk


class RawReads:
    """A file that is read at random places past the kernel's cache, by the threads that tables read with."""

    def __init__(self, descriptor: int, blocks: int, seed: int) -> None:
        self._descriptor = descriptor
        self._blocks = blocks
        self._random = np.random.default_rng(seed)
        self._reader = native.BlockReader()

    def read(self, count: int) -> None:
        self._reader.read(self._descriptor, self._random.integers(0, self._blocks, count) * BLOCK, BLOCK)


@contextmanager
def raw_reads(plan: TiersPlan, report: Report, folder: Path) -> Iterator[RawReads | None]:
    """Write a file of as many bytes as the rows have, 8 GiB at most, and open it; None if reads cannot be
    direct.
    """
    report.say("a file for raw reads")
    path, random = folder / "raw", np.random.default_rng(plan.seed)
    blocks = min(-(-plan.rows * plan.row_bytes // BLOCK), MOST_RAW_BYTES // BLOCK)
    with path.open("wb") as file:
        for at in range(0, blocks * BLOCK, PIECE):
            file.write(random.bytes(min(PIECE, blocks * BLOCK - at)))
        file.flush()
        os.fsync(file.fileno())
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        if not hasattr(os, "O_DIRECT"):
            os.close(descriptor)
            raise OSError("this system has no O_DIRECT")
    except OSError as error:
        note = f"not measured: the file cannot be read past the kernel's cache ({error})"
        report.add("raw reads", "rows_per_s", None, "rows/s", note=note)
        yield None
        return
    try:
        yield RawReads(descriptor, blocks, plan.seed)
    finally:
        os.close(descriptor)


# RocksDB


class RocksRows:
    """The same rows in RocksDB, through `rocksdict`: direct reads, bloom filters, no compression, no log.

    Args:
        memory: Bytes, a quarter for rows not yet written, the rest for its cache of blocks.
    """

    def __init__(self, folder: Path, dim: int, memory: int) -> None:
        rocksdict: Any = import_module("rocksdict")  # without types
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(memory * 3 // 4))
        blocks.set_bloom_filter(10, False)
        options = rocksdict.Options(raw_mode=True)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_write_buffer_size(memory // 8)
        options.increase_parallelism(cores())
        self._rocksdict = rocksdict
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self._db: Any = rocksdict.Rdict(str(folder / "rocksdb"), options)
        self._dim = dim

    def read(self, ids: Tensor) -> NDArray[np.float32]:
        """Return embeddings with the state of Adagrad, one row for each id."""
        found = self._db.get(_keys(ids))
        return np.frombuffer(b"".join(found), np.float32).reshape(len(ids), 2 * self._dim)

    def write(self, ids: Tensor, rows: NDArray[np.float32]) -> None:
        batch, size = self._rocksdict.WriteBatch(raw_mode=True), rows.shape[1] * FLOAT_BYTES
        values = rows.tobytes()
        for number, key in enumerate(_keys(ids)):
            batch.put(key, values[number * size : (number + 1) * size])
        self._db.write(batch, self._unlogged)

    def step(self, ids: Tensor, gradients: NDArray[np.float32]) -> None:
        rows = self.read(ids).copy()
        rows[:, self._dim :] += gradients * gradients
        rows[:, : self._dim] -= LEARNING_RATE * gradients / np.sqrt(rows[:, self._dim :])
        self.write(ids, rows)

    def contenders(self, requests: IdBatches, gradients: Tensor) -> Mapping[str, Contender]:
        changes = gradients.numpy()
        wanted = len(changes)

        def batches() -> Iterator[int]:
            return itertools.cycle(range(len(requests)))

        return {
            "lookup in RocksDB": Contender(wanted, lambda at: self.read(requests.ids[at]), batches()),
            "lookup and update in RocksDB": Contender(
                wanted, lambda at: self.step(requests.ids[at], changes), batches()
            ),
        }

    def close(self) -> None:
        self._db.close()


def _keys(ids: Tensor) -> list[bytes]:
    text = ids.numpy().tobytes()
    return [text[at : at + 8] for at in range(0, len(text), 8)]


@contextmanager
def rocksdb(plan: TiersPlan, report: Report, folder: Path, memory: int) -> Iterator[RocksRows | None]:
    """Put all rows into RocksDB; None without `rocksdict`, which the report says."""
    if find_spec("rocksdict") is None:
        note = "not measured: rocksdict is not installed (`pip install rocksdict`)"
        report.add("lookup and update in RocksDB", "rows_per_s", None, "rows/s", note=note)
        yield None
        return
    report.say("the same rows in RocksDB")
    rocks = RocksRows(folder, plan.dim, memory)
    try:
        random = np.random.default_rng(plan.seed)
        for ids in torch.split(id_of(np.arange(plan.rows)), plan.batch):
            rocks.write(ids, random.random((len(ids), 2 * plan.dim), np.float32) + np.float32(0.1))
        yield rocks
    finally:
        rocks.close()
