"""`monolith bench served-rows`: how long a request waits for rows of an export that memory has no room for.

Requests ask for the rows of some ids, one after the other from one thread. The same file is read with all
rows in memory and with memory for a part (`monolith serve --memory`), and as many blocks of it are read at
random past the kernel's cache, which is what the disk takes for all of them at once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.config import parse_bytes
from monolith.errors import ConfigError
from monolith.table import FrozenSegment, FrozenTable, FrozenTables, write_frozen_table
from monolith_bench.ids import DISTRIBUTIONS, id_of
from monolith_bench.options import BenchServedRowsOptions
from monolith_bench.report import Report
from monolith_bench.table import FLOAT_BYTES, need_memory
from monolith_bench.tiers import BLOCK, RawReads

WRITTEN = 1 << 18
"""Rows that are written at a time."""
ROUNDS = 3


def run(options: BenchServedRowsOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    for name in ("rows", "dim", "ids"):
        if getattr(options, name) < 1:
            raise ConfigError(f"bench served-rows: --{name} must be at least 1, got {getattr(options, name)}")
    if options.folder is not None and not Path(options.folder).is_dir():
        raise ConfigError(f"bench served-rows: --folder {options.folder} is not a folder; make it first")
    rows = min(options.rows, 200_000) if options.quick else options.rows
    need_memory(rows * (options.dim * FLOAT_BYTES + 32.0))
    report = Report("served-rows")
    with tempfile.TemporaryDirectory(prefix="monolith-served-", dir=options.folder) as folder:
        measure(options, rows, report, Path(folder) / "item.rows")
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(options: BenchServedRowsOptions, rows: int, report: Report, path: Path) -> None:
    report.say(f"a file of {rows:,} rows")
    write(path, rows, options.dim, options.seed)
    whole = FrozenTables({"item": FrozenTable(str(path))})
    index = FrozenTable(str(path)).core.index_bytes
    memory = index + (whole.bytes - index) // 8 if options.memory is None else parse_bytes(options.memory)
    part = FrozenTables({"item": FrozenTable(str(path))}, memory_bytes=memory)
    if part.reads is None:
        raise ConfigError(f"bench served-rows: all rows fit into {memory:,} bytes; give less --memory")
    report.about = {
        "rows": rows,
        "dim": options.dim,
        "file_bytes": whole.bytes,
        "index_bytes": index,
        "memory_limit": memory,
        "ids": options.ids,
        "reader_threads": native.BlockReader().threads,
    }
    requests = 50 if options.quick else 1000
    with raw_blocks(path, options.seed) as raw:
        for name in DISTRIBUTIONS:
            measure_ids(options, name, rows, requests, report, whole, part, raw)
    report.show(f"{rows:,} rows of {options.dim} floats, requests of {options.ids} ids: milliseconds")


def write(path: Path, rows: int, dim: int, seed: int) -> None:
    random = np.random.default_rng(seed)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for at in range(0, rows, WRITTEN):
            ids = id_of(np.arange(at, min(rows, at + WRITTEN))).numpy()
            yield ids, random.standard_normal((len(ids), dim), np.float32)

    write_frozen_table(str(path), [FrozenSegment(dim)], chunks(), rows=rows, name="item")


@contextmanager
def raw_blocks(path: Path, seed: int) -> Iterator[RawReads | None]:
    """Open what reads the file at random; None if that cannot be past the kernel's cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        yield None
        return
    try:
        yield RawReads(descriptor, path.stat().st_size // BLOCK, seed)
    finally:
        os.close(descriptor)


def measure_ids(
    options: BenchServedRowsOptions,
    name: str,
    rows: int,
    requests: int,
    report: Report,
    whole: FrozenTables,
    part: FrozenTables,
    raw: RawReads | None,
) -> None:
    """Ask with ids of one distribution: some requests of each contender in turn, three times."""
    random = np.random.default_rng(options.seed)
    draw = DISTRIBUTIONS[name]
    sizes = torch.tensor([options.ids])

    def batches(count: int) -> list[Tensor]:
        return list(id_of(draw(rows, count * options.ids, random)).reshape(count, options.ids))

    whole.prefault()
    report.say(f"{name} ids: warming up")
    for some in batches(20 * requests):
        part.lookup(some, sizes)
    ways: dict[str, Callable[[Tensor], object]] = {
        "in memory": lambda ids: whole.lookup(ids, sizes),
        "memory for a part": lambda ids: part.lookup(ids, sizes),
    }
    if raw is not None:
        ways["raw reads"] = lambda ids: raw.read(len(ids))
    before = part.reads
    best: dict[str, tuple[float, float]] = {}
    report.say(f"{name} ids: requests")
    for _ in range(ROUNDS):
        for way, ask in ways.items():
            taken = []
            for some in batches(requests):
                began = time.perf_counter()
                ask(some)
                taken.append(1e3 * (time.perf_counter() - began))
            half, most = (float(np.quantile(taken, share)) for share in (0.5, 0.99))
            last = best.get(way, (half, most))
            best[way] = (min(half, last[0]), min(most, last[1]))
    for number, metric in enumerate(("p50", "p99")):
        others = {way: found[number] for way, found in best.items() if way != "memory for a part"}
        for way, value in others.items():
            report.add(f"{way}, {name}", metric, value, "ms")
        report.compare(f"memory for a part, {name}", metric, best["memory for a part"][number], "ms", others)
    after = part.reads
    assert before is not None
    assert after is not None
    found = after.found - before.found
    report.add(f"found in memory, {name}", "hit_rate", (after.in_memory - before.in_memory) / found, "share")
