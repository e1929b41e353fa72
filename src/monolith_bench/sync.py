"""`monolith bench sync` compares ranks that train in step with one process that trains on all their batches.

Ranks are processes on this machine, connected by gloo over its loopback, so nothing is said of a network.
Each has one thread of torch, and so has the one process.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from monolith.errors import ConfigError
from monolith_bench.fleet_processes import FleetTask
from monolith_bench.options import BenchSyncOptions
from monolith_bench.rank_processes import Stepping, StepsDone, stepping
from monolith_bench.report import Report, cores
from monolith_bench.table import counted
from monolith_bench.torchrec_ranks import torchrec_stepping

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
    importlib.import_module("torch._dynamo")  # or every process would, when it makes its optimizer
    with ExitStack() as stack:
        rivals = {
            size: stack.enter_context(torchrec_stepping(plan.task, size, plan.batch)) for size in plan.sizes
        }
        measure(plan, report, stack.enter_context(stepping(plan.task, plan.sizes, plan.batch)), rivals)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(
    plan: SyncPlan, report: Report, processes: dict[int, Stepping], rivals: dict[int, Stepping | str]
) -> None:
    """Hold ranks against the one process, and against TorchRec, in turns; the best round of each counts.

    Args:
        rivals: Ranks of TorchRec by their number, or why there are none.
    """
    report.say("examples a second, of the same batches")
    names = {size: f"{counted(size, 'rank')} in step" if size else ALONE for size in processes}
    racing = {names[size]: one for size, one in processes.items()}
    racing |= {rival_name(size): one for size, one in rivals.items() if not isinstance(one, str)}
    best = _raced(plan, racing)
    rates = {name: plan.batch / one.seconds for name, one in best.items()}
    report.add(ALONE, "examples_per_s", rates[ALONE], "examples/s")
    for size in plan.sizes:
        rival = rival_name(size)
        beside = {name: rates[name] for name in (ALONE, rival) if name in rates}
        report.compare(names[size], "examples_per_s", rates[names[size]], "examples/s", beside)
        why = rivals.get(size)
        note = f"torchrec: {why}" if isinstance(why, str) else None
        report.add(rival, "examples_per_s", rates.get(rival), "examples/s", note=note)
    task = plan.task
    report.show(
        f"DeepFM, {task.features} features of {task.rows:,} ids and {task.dim} floats, {plan.batch:,} "
        f"examples a step, {counted(cores(), 'core')}"
    )
    for name, each in best.items():
        together = "" if name == ALONE else ", all together"
        report.add(name + together, "processor_ms_per_step", each.processor * 1e3, "ms")
    report.show("Processor time of a step")


def rival_name(size: int) -> str:
    return f"{counted(size, 'rank')} of torchrec's DistributedModelParallel"


def _raced(plan: SyncPlan, racing: dict[str, Stepping]) -> dict[str, StepsDone]:
    """Return what one step takes, by name."""
    steps = {
        name: max(int(plan.window / max(one.take(4).seconds / 4, 1e-6)), 2) for name, one in racing.items()
    }
    best: dict[str, StepsDone] = {}
    for turn in range(plan.repeats + 1):
        for name, one in racing.items():
            found = one.take(steps[name])
            each = StepsDone(found.seconds / steps[name], found.processor / steps[name])
            if turn and (name not in best or each.seconds < best[name].seconds):
                best[name] = each
    return best
