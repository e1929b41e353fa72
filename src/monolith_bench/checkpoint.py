"""`monolith bench checkpoint` compares checkpoints with plain files, and times training during a save.

A checkpoint is written and read in turns with a plain file of the same bytes: both flushed to
the disk, both read once from the disk (cold) and once from the system's cache (warm). Then
training continues while another thread saves, which gives the longest step and the remaining
throughput.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from monolith import native
from monolith.checkpoint import Checkpointer, PendingCheckpoint, Saver, TablesPart, read_manifest
from monolith.errors import ConfigError
from monolith.observe import Resting, yield_to_others
from monolith.store import LocalStore
from monolith.table import Adagrad, NativeTable, Rows, Segment, TableConfig
from monolith.train.model import SHARE
from monolith_bench.ids import DISTRIBUTIONS
from monolith_bench.options import BenchCheckpointOptions
from monolith_bench.report import Report, cores
from monolith_bench.table import counted, need_memory
from monolith_bench.trainers import OurTrainer

FEATURES = 26
HIDDEN = (128, 64)
"""Of the DeepFM that is trained."""
PIECE = 8 << 20
"""Bytes that a plain file is written and read by at a time."""


class Steps(NamedTuple):
    """Something that trains."""

    step: Callable[[int], object]
    """Takes one step; given its number."""
    examples: int
    """In a step."""
    tables: Mapping[str, Any]
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """The options, settled."""

    rows: int
    dim: int
    batch: int
    threads: tuple[int, ...]
    touched: tuple[float, ...]
    repeats: int
    seconds: float
    """How long training is watched without a save."""
    folder: str | None

    @classmethod
    def settle(cls, options: BenchCheckpointOptions) -> CheckpointPlan:
        for name in ("rows", "dim", "batch", "repeats"):
            if getattr(options, name) < 1:
                raise ConfigError(f"bench checkpoint: --{name} must be at least 1")
        if not all(0 < share <= 1 for share in options.touched):
            raise ConfigError("bench checkpoint: --touched takes shares above 0 and up to 1")
        return cls(
            rows=min(options.rows, 200_000) if options.quick else options.rows,
            dim=options.dim,
            batch=min(options.batch, 1024) if options.quick else options.batch,
            threads=tuple(sorted({min(threads, cores()) for threads in options.threads})),
            touched=options.touched,
            repeats=1 if options.quick else options.repeats,
            seconds=0.2 if options.quick else 3.0,
            folder=options.folder,
        )


def run(options: BenchCheckpointOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    plan = CheckpointPlan.settle(options)
    report = Report("checkpoint")
    need_memory(plan.rows * (2 * plan.dim + 10) * 4 * 1.6)
    with tempfile.TemporaryDirectory(prefix="monolith-bench-", dir=plan.folder) as folder:
        report.say(f"filling a table of {plan.rows:,} rows")
        tables = {threads: filled(plan, threads) for threads in plan.threads[-1:]}
        table = tables[plan.threads[-1]]
        measure_files(plan, report, table, Path(folder))
        measure_increments(plan, report, table, Path(folder))
        report.show(f"{plan.rows:,} rows of {plan.dim} floats and as many of state")
        table.close()
        for threads in plan.threads:
            measure_training(plan, report, threads, Path(folder))
        report.show(f"Training, alone and while {plan.rows:,} rows are saved")
    report.finish()
    if options.json:
        report.print_json()
    return 0


def filled(plan: CheckpointPlan, threads: int) -> NativeTable:
    """Return a table of `plan.rows` rows, ids 0 to rows - 1."""
    segment = Segment(dim=plan.dim, optimizer=Adagrad(), learning_rate=0.05)
    config = TableConfig(name="item", segments=(segment,), initial_rows=plan.rows)
    table = NativeTable(config, workers=native.Workers(threads))
    many = 1 << 18
    random = torch.Generator().manual_seed(0)
    for first in range(0, plan.rows, many):
        n = min(many, plan.rows - first)
        table.restore(
            Rows(
                torch.arange(first, first + n),
                torch.full((n,), 1_700_000_000),
                torch.randn(n, plan.dim, generator=random),
                torch.rand(n, plan.dim, generator=random),
            )
        )
    return table


def measure_files(plan: CheckpointPlan, report: Report, table: NativeTable, folder: Path) -> None:
    """Save and restore, each time right after a plain file of as many bytes; the best of each counts."""
    best: dict[str, float] = {}
    size = 0

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    for turn in range(plan.repeats):
        report.say(f"saving and restoring, round {turn + 1} of {plan.repeats}")
        run_dir = folder / "files"
        checkpointer = Checkpointer(Saver(str(run_dir), max_to_keep=1), [TablesPart({"item": table})])
        with timed() as save:
            prefix = checkpointer.save(turn + 1)
        note("save", save.seconds)
        size = bytes_below(run_dir)
        with timed() as write:
            write_plain(folder / "plain", size)
        note("write", write.seconds)
        for state in ("cold", "warm"):
            if state == "cold":
                forget(run_dir)
                forget(folder / "plain")
            other = NativeTable(table.config, workers=native.Workers(plan.threads[-1]))
            reader = Checkpointer(Saver(str(run_dir)), [TablesPart({"item": other})])
            with timed() as restore:
                reader.restore(prefix)
            note(f"restore, {state}", restore.seconds)
            assert len(other) == plan.rows
            other.close()
            with timed() as read:
                read_plain(folder / "plain")
            note(f"read, {state}", read.seconds)
        shutil.rmtree(run_dir)
        (folder / "plain").unlink()
    pairs = {"save": "write", "restore, cold": "read, cold", "restore, warm": "read, warm"}
    for ours, plain in pairs.items():
        beside = f"plain {plain}"
        report.add(beside, "bytes_per_s", size / best[plain] / 1e9, "GB/s")
        report.compare(
            ours, "bytes_per_s", size / best[ours] / 1e9, "GB/s", {beside: size / best[plain] / 1e9}
        )
        report.add(ours, "rows_per_s", plan.rows / best[ours], "rows/s")
    report.add("checkpoint", "bytes", size / 1e9, "GB")


def measure_increments(plan: CheckpointPlan, report: Report, table: NativeTable, folder: Path) -> None:
    """Save what changed, after a share of the rows was trained."""
    run_dir = folder / "increments"
    part = TablesPart({"item": table}, incremental=True)
    checkpointer = Checkpointer(Saver(str(run_dir), max_to_keep=100), [part], full_every=1000)
    full = saved_bytes(checkpointer.save(1))
    random = np.random.default_rng(0)
    for step, share in enumerate(plan.touched, start=2):
        report.say(f"an increment of {share:.1%} of the rows")
        ids = random.choice(plan.rows, max(1, round(plan.rows * share)), replace=False)
        for chunk in np.array_split(ids, max(1, len(ids) // plan.batch)):
            table.apply_gradients(torch.from_numpy(chunk), torch.ones(len(chunk), plan.dim))
        with timed() as save:
            prefix = checkpointer.save(step)
        report.compare(
            f"increment, {share:.1%} of the rows touched",
            "bytes",
            saved_bytes(prefix) / 1e9,
            "GB",
            {"full checkpoint": full / 1e9},
        )
        report.add(f"increment, {share:.1%} of the rows touched", "seconds", save.seconds, "s")
    shutil.rmtree(run_dir)


def measure_training(plan: CheckpointPlan, report: Report, threads: int, folder: Path) -> None:
    """Train a DeepFM, and then only rows, both alone and while another thread saves."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases: dict[str, Callable[[], Steps]] = {
            "DeepFM, Zipf ids": lambda: deepfm_steps(plan, threads, "zipf"),
            "DeepFM, uniform ids": lambda: deepfm_steps(plan, threads, "uniform"),
            "rows only, uniform ids": lambda: table_steps(plan, threads),
        }
        for name, make in cases.items():
            steps = make()
            try:
                measure_beside(plan, report, f"{name}, {counted(threads, 'thread')}", steps, folder)
            finally:
                steps.close()
    finally:
        torch.set_num_threads(torch_threads)


def deepfm_steps(plan: CheckpointPlan, threads: int, distribution: str) -> Steps:
    """Return a step of a DeepFM whose tables have all the rows together."""
    rows = max(1, plan.rows // FEATURES)
    trainer = OurTrainer(FEATURES, rows, plan.dim, HIDDEN, threads)
    store = trainer.model.embeddings.store
    assert isinstance(store, LocalStore)
    random = np.random.default_rng(1)
    examples = max(1, plan.batch // FEATURES * 4)
    positions = DISTRIBUTIONS[distribution](rows, 64 * examples * FEATURES, random).astype(np.int64)
    batches = list(torch.from_numpy(positions).view(64, examples, FEATURES))
    labels = torch.from_numpy(random.integers(0, 2, examples)).float()
    return Steps(
        lambda number: trainer.step(batches[number % len(batches)], labels),
        examples,
        {name: store.table(name) for name in store.tables},
        store.close,
    )


def table_steps(plan: CheckpointPlan, threads: int) -> Steps:
    """Return a step that looks rows up and updates them: as much of a table as training can ask."""
    table = filled(plan, threads)
    random = np.random.default_rng(1)
    batches = [torch.from_numpy(random.integers(0, plan.rows, plan.batch)) for _ in range(64)]
    gradients = torch.ones(plan.batch, plan.dim)
    out = torch.empty_like(gradients)

    def step(number: int) -> None:
        ids = batches[number % len(batches)]
        table.lookup(ids, out=out)
        table.apply_gradients(ids, gradients, dedup=True, step=number, event_time=1_700_000_000)

    return Steps(step, plan.batch, {"item": table}, table.close)


def measure_beside(plan: CheckpointPlan, report: Report, case: str, trained: Steps, folder: Path) -> None:
    """Train alone and during a save, in turns; the best of each counts."""
    alone, beside, seconds = 0.0, 0.0, 0.0
    cuts, longest, calm = [], [], []
    for turn in range(plan.repeats):
        report.say(f"{case}, round {turn + 1} of {plan.repeats}")
        until = time.perf_counter() + plan.seconds
        quiet = train(trained.step, lambda: time.perf_counter() < until)  # noqa: B023
        alone = max(alone, rate(quiet, trained.examples))
        calm.append(max(quiet))
        run_dir = folder / "background"
        rest = Resting(SHARE) if torch.get_num_threads() >= cores() else None  # as a session does
        part = TablesPart(trained.tables, write_workers=1, write_progress=rest)
        checkpointer = Checkpointer(Saver(str(run_dir), max_to_keep=1), [part])
        with timed() as cut:
            moment = checkpointer.snapshot(turn + 1)
        cuts.append(cut.seconds)

        def write(moment: PendingCheckpoint = moment) -> None:
            yield_to_others()
            moment.write()

        writer = threading.Thread(target=write)
        began = time.perf_counter()
        writer.start()
        steps = train(trained.step, writer.is_alive)
        writer.join()
        seconds = time.perf_counter() - began
        with timed() as close:
            moment.close(saved=True)
        beside = max(beside, rate(steps, trained.examples))
        longest.append(max(*steps, cut.seconds, close.seconds))
        shutil.rmtree(run_dir)
    report.add(f"alone, {case}", "examples_per_s", alone, "examples/s")
    report.compare(f"saving, {case}", "examples_per_s", beside, "examples/s", {f"alone, {case}": alone})
    report.add(f"alone, {case}", "longest_pause", min(calm) * 1e3, "ms")
    report.compare(
        f"saving, {case}", "longest_pause", min(longest) * 1e3, "ms", {f"alone, {case}": min(calm) * 1e3}
    )
    report.add(f"cutting, {case}", "longest_pause", min(cuts) * 1e3, "ms")
    report.add(f"saving, {case}", "seconds", seconds, "s")


def train(step: Callable[[int], object], go_on: Callable[[], bool]) -> list[float]:
    """Take steps; return the seconds of each."""
    steps: list[float] = []
    while True:
        began = time.perf_counter()
        step(len(steps))
        steps.append(time.perf_counter() - began)
        if not go_on():
            return steps


def rate(steps: list[float], batch: int) -> float:
    return len(steps) * batch / sum(steps)


def saved_bytes(prefix: str) -> int:
    tables = read_manifest(prefix).manifest.parts["tables"]["tables"]
    return sum(int(table["bytes"]) for table in tables.values())


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_plain(path: Path, size: int) -> None:
    piece = os.urandom(PIECE)
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, PIECE):
            file.write(piece[: min(PIECE, size - at)])
        os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Ask the system to drop files from its cache, so that they are read from the disk."""
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def read_plain(path: Path) -> None:
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class Stopwatch:
    seconds = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    began = time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - began
