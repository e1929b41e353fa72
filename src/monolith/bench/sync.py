"""`monolith bench sync`: ranks that train in step, beside one process that trains on all of their batches.

Ranks are processes on this machine, connected by gloo over its loopback, so nothing is said of a network.
Each has one thread of torch, and so has the one process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from monolith.bench.fleet_processes import FleetTask
from monolith.bench.options import BenchSyncOptions
from monolith.bench.rank_processes import Stepping, StepsDone, stepping
from monolith.bench.report import Report, cores
from monolith.bench.table import counted
from monolith.errors import ConfigError

ALONE = "one process, one thread"
WINDOW = 1.0
"""Seconds that a round of each should take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """The options, settled."""

    task: FleetTask
    sizes: tuple[int, ...]
    batch: int
    repeats: int
    window: float

    @classmethod
    def settle(cls, options: BenchSyncOptions) -> SyncPlan:
        for name in ("ids", "features", "dim", "batch", "ranks", "repeats"):
            if np.min(getattr(options, name), initial=1) < 1:
                raise ConfigError(f"bench sync: --{name} must be at least 1, got {getattr(options, name)}")
        for size in options.ranks:
            if options.batch % size:
                raise ConfigError(f"bench sync: a batch of {options.batch} cannot be shared by {size} ranks")
        ids = min(options.ids, 20_000) if options.quick else options.ids
        return cls(
            task=FleetTask(
                features=options.features,
                rows=max(ids // options.features, 1),
                dim=options.dim,
                hidden=options.hidden,
            ),
            sizes=tuple(dict.fromkeys(options.ranks)),
            batch=options.batch,
            repeats=1 if options.quick else options.repeats,
            window=0.05 if options.quick else WINDOW,
        )


def run(options: BenchSyncOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = SyncPlan.settle(options)
    report = Report("sync")
    report.say("starting one process, and ranks")
    if find_spec("torchrec") is None:
        report.say("torchrec is not installed, so its DistributedModelParallel is not measured")
    importlib.import_module("torch._dynamo")  # or every process would, when it makes its optimizer
    with stepping(plan.task, plan.sizes, plan.batch) as processes:
        measure(plan, report, processes)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: SyncPlan, report: Report, processes: dict[int, Stepping]) -> None:
    """Hold ranks against the one process, in turns; the best round of each counts."""
    report.say("examples a second, of the same batches")
    steps = {
        size: max(int(plan.window / max(one.take(4).seconds / 4, 1e-6)), 2) for size, one in processes.items()
    }
    best: dict[int, StepsDone] = {}
    for turn in range(plan.repeats + 1):
        for size, one in processes.items():
            found = one.take(steps[size])
            each = StepsDone(found.seconds / steps[size], found.processor / steps[size])
            if turn and (size not in best or each.seconds < best[size].seconds):
                best[size] = each
    alone = plan.batch / best[0].seconds
    report.add(ALONE, "examples_per_s", alone, "examples/s")
    for size in plan.sizes:
        rate = plan.batch / best[size].seconds
        report.compare(
            f"{counted(size, 'rank')} in step", "examples_per_s", rate, "examples/s", {ALONE: alone}
        )
    task = plan.task
    report.show(
        f"DeepFM, {task.features} features of {task.rows:,} ids and {task.dim} floats, {plan.batch:,} "
        f"examples a step, {counted(cores(), 'core')}"
    )
    for size, each in best.items():
        name = f"{counted(size, 'rank')} in step, all together" if size else ALONE
        report.add(name, "processor_ms_per_step", each.processor * 1e3, "ms")
    report.show("Processor time of a step")
