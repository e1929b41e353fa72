"""`monolith bench fleet` compares training on parameter servers with its halves alone and with one process.

Servers and workers are processes on this machine, so nothing is said of a network, and all compete for its
cores. A step that hides the wire behind computing takes as long as the longer of the two; what it takes
beyond that is what hiding costs, and where cores are short, waiting for one. Processor seconds tell which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from monolith.errors import ConfigError
from monolith_bench.fleet_processes import Ask, DenseKind, FleetRate, FleetTask, RunningFleet, Work, started
from monolith_bench.options import BenchFleetOptions
from monolith_bench.report import Report, cores
from monolith_bench.table import counted
from monolith_bench.timing import Timing

Key = TypeVar("Key")

HALVES: tuple[Work, ...] = ("compute", "wire")
LARGER = "the larger of compute and wire alone"
SAID: dict[DenseKind, str] = {"default": "", "behind": ", dense.prefetch and dense.postpush"}
"""Ways to fetch and push weights -> how a case says them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """The options, settled."""

    task: FleetTask
    sizes: tuple[int, ...]
    batch: int
    threads: int
    timing: Timing

    @classmethod
    def settle(cls, options: BenchFleetOptions) -> FleetPlan:
        for name in ("ids", "features", "dim", "batch", "sizes", "repeats"):
            if np.min(getattr(options, name), initial=1) < 1:
                raise ConfigError(f"bench fleet: --{name} must be at least 1, got {getattr(options, name)}")
        ids = min(options.ids, 20_000) if options.quick else options.ids
        return cls(
            task=FleetTask(
                features=options.features,
                rows=max(ids // options.features, 1),
                dim=options.dim,
                hidden=options.hidden,
            ),
            sizes=tuple(dict.fromkeys(options.sizes)),
            batch=min(options.batch, 64) if options.quick else options.batch,
            threads=cores(),
            timing=Timing(repeats=1, window=0.02)
            if options.quick
            else Timing(repeats=options.repeats, window=0.2),
        )


@dataclass(frozen=True, slots=True)
class FleetCase:
    """One case of the benchmark; all cases take turns."""

    fleet: RunningFleet
    ask: Ask


def run(options: BenchFleetOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request."""
    plan = FleetPlan.settle(options)
    report = Report("fleet")
    report.say("starting one process, and servers and workers")
    with started(plan.task, plan.sizes, plan.batch, plan.threads) as fleets:
        measure_step(plan, report, fleets[plan.sizes[0]])
        measure_fleets(plan, report, fleets)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure_step(plan: FleetPlan, report: Report, fleet: RunningFleet) -> None:
    """Hold steps against their halves, with one thread of torch, so that others have a core, too."""
    report.say("a step, and its halves alone")
    found = turns(
        {(what, kind): FleetCase(fleet, Ask(what, kind)) for what in ("step", *HALVES) for kind in SAID},
        **plan.timing,
    )
    where = f"{counted(plan.sizes[0], 'server')}, {counted(plan.sizes[0], 'worker')}"
    for kind, said in SAID.items():
        each = {what: step_ms(plan, found[what, kind], plan.sizes[0]) for what in ("step", *HALVES)}
        for what in HALVES:
            report.add(f"{what} alone, {where}{said}", "ms_per_step", each[what], "ms")
        beside = {f"{LARGER}, {where}{said}": max(each[what] for what in HALVES)}
        for name, larger in beside.items():
            report.add(name, "ms_per_step", larger, "ms")
        report.compare(f"step, {where}{said}", "ms_per_step", each["step"], "ms", beside)
    report.show(f"A step of {plan.batch:,} examples, rows looked up ahead and updated behind")
    add_processor(report, {f"{what}, {where}{SAID[kind]}": rate for (what, kind), rate in found.items()})


def step_ms(plan: FleetPlan, rate: FleetRate, workers: int) -> float:
    return workers * plan.batch / rate.examples_per_s * 1e3


def measure_fleets(plan: FleetPlan, report: Report, fleets: Mapping[int, RunningFleet]) -> None:
    """Hold servers and workers against one process with as many threads as there are cores."""
    report.say("examples a second")
    cases = {("one process", 0): FleetCase(fleets[0], Ask("step", threads=plan.threads))}
    for size in plan.sizes:
        threads = max(plan.threads // size, 1)
        for kind, said in SAID.items():
            name = f"{counted(size, 'server')} and {counted(size, 'worker')}{said}"
            cases[name, size] = FleetCase(fleets[size], Ask("step", kind, threads))
    found = turns(cases, **plan.timing)
    alone = found.pop(("one process", 0))
    report.add("one process", "examples_per_s", alone.examples_per_s, "examples/s")
    for (name, _), rate in found.items():
        beside = {"one process": alone.examples_per_s}
        report.compare(name, "examples_per_s", rate.examples_per_s, "examples/s", beside)
    task = plan.task
    report.show(
        f"DeepFM, {task.features} features of {task.rows:,} ids and {task.dim} floats, batches of "
        f"{plan.batch:,}, {counted(plan.threads, 'core')}"
    )
    add_processor(report, {"one process": alone} | {name: rate for (name, _), rate in found.items()})


def add_processor(report: Report, rates: Mapping[str, FleetRate]) -> None:
    """Report what a step took of the processors, in the fastest window."""
    for case, rate in rates.items():
        report.add(f"{case}, worker", "processor_ms_per_step", rate.worker * 1e3, "ms")
        report.add(f"{case}, servers", "processor_ms_per_step", rate.server * 1e3, "ms")
    report.show("Processor time of a step")


def turns(cases: Mapping[Key, FleetCase], *, repeats: int, window: float) -> dict[Key, FleetRate]:
    """Return the fastest window of each case, after a round to warm up."""
    best: dict[Key, FleetRate] = {}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            rate = case.fleet.work(case.ask._replace(seconds=window))
            if turn > 0 and (name not in best or rate.examples_per_s > best[name].examples_per_s):
                best[name] = rate
    return best
