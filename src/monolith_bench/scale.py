"""`monolith bench scale`: how far parameter servers scale, by simulation from costs measured here.

First the costs of requests and rows are measured, then the simulation is held against a real worker with one
and with two servers, then it goes up to a thousand of each. `scale_simulation` says what it assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from monolith.errors import ConfigError
from monolith_bench.options import BenchScaleOptions
from monolith_bench.report import Report
from monolith_bench.scale_costs import (
    CostPlan,
    Costs,
    RealStep,
    as_results,
    connected,
    measure_costs,
    processor_seconds,
    real_steps,
)
from monolith_bench.scale_plot import Line, Panel, draw
from monolith_bench.scale_simulation import SimulatedJob, SimulatedSteps, Surroundings, simulate, upkeep
from monolith_bench.table import counted

LARGE = 10
"""How many times larger the large batches are than those of the plan."""
MANY_STEPS, LEAST_STEPS = 4_000, 5
TABLE = (10, 100, 1_000)
"""Numbers of servers whose upkeep is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePlan:
    """The options, settled."""

    servers: tuple[int, ...]
    workers_per_server: float
    rows: float
    layout: SimulatedJob
    around: Surroundings
    costs: CostPlan
    steps: int
    check_seconds: float

    @classmethod
    def settle(cls, options: BenchScaleOptions) -> ScalePlan:
        for name in (
            "servers",
            "ids",
            "dim",
            "rows",
            "workers_per_server",
            "latency_us",
            "gbits",
            "compute_ms",
        ):
            if np.min(getattr(options, name), initial=1) <= 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"bench scale: --{flag} must be more than 0, got {getattr(options, name)}")
        quick = options.quick
        costs = CostPlan(dim=options.dim, seed=options.seed)
        if quick:
            costs = replace(costs, rows=20_000, ids=(200, 4_000), seconds=0.05, calls=100)
        return cls(
            servers=tuple(sorted(set(options.servers))),
            workers_per_server=options.workers_per_server,
            rows=options.rows,
            layout=SimulatedJob(
                workers=1,
                servers=1,
                ids=options.ids,
                compute=options.compute_ms / 1e3,
                latency=options.latency_us / 1e6,
                bandwidth=options.gbits * 1e9 / 8,
                seed=options.seed,
            ),
            around=Surroundings(),
            costs=costs,
            steps=4 if quick else 12,
            check_seconds=0.1 if quick else 3.0,
        )


def run(options: BenchScaleOptions) -> int:
    """Measure, simulate, draw tables on standard error, and print JSON on request."""
    plan = ScalePlan.settle(options)
    report = Report("scale")
    report.say("starting servers, and filling them with rows")
    with connected(plan.costs) as bench:
        costs = measure_costs(bench, report.say)
        for case, (value, unit) in as_results(costs).items():
            report.add(case, "cost", value, unit)
        report.show("What a request and a row cost here, in processor time")
        walls = {
            servers: real_steps(bench, servers, check_ids(plan), plan.check_seconds) for servers in (1, 2)
        }
    check(plan, costs, walls, report)
    found = sweep(plan, costs, report)
    keep_up(plan, costs, found, report)
    if options.svg is not None:
        Path(options.svg).write_text(picture(plan, found), encoding="utf-8")
        report.say(f"drawn to {options.svg}")
    report.finish()
    if options.json:
        report.print_json()
    return 0


# Against what is measured


def check_ids(plan: ScalePlan) -> int:
    return min(plan.layout.ids, plan.costs.rows)


def check(plan: ScalePlan, costs: Costs, measured: dict[int, RealStep], report: Report) -> None:
    """Hold the simulation of one worker, who computes nothing, against the real one on this machine."""
    for servers, real in measured.items():
        ids = check_ids(plan)
        layout = replace(
            plan.layout,
            workers=1,
            servers=servers,
            ids=ids,
            compute=0.0,
            latency=costs.wake,
            bandwidth=1e12,
            overlapped=False,
            late=False,
        )
        found = simulate(costs, layout, steps=50).median
        name = f"step of rows alone, {counted(servers, 'server')}"
        report.add(f"{name}, measured", "ms", real.wall * 1e3, "ms")
        report.compare(f"{name}, simulated", "ms", found * 1e3, "ms", {f"{name}, measured": real.wall * 1e3})
        work = processor_seconds(costs, servers, ids)
        name = f"its processor time, {counted(servers, 'server')}"
        report.add(f"{name}, measured", "cpu_ms", real.processor * 1e3, "ms")
        beside = {f"{name}, measured": real.processor * 1e3}
        report.compare(f"{name}, simulated", "cpu_ms", work * 1e3, "ms", beside)
    report.show(f"The simulation compared with a real worker, {check_ids(plan):,} ids a step")


# Sizes


def sweep(plan: ScalePlan, costs: Costs, report: Report) -> dict[str, dict[int, SimulatedSteps]]:
    """Simulate steps for each number of servers; return what was found by case."""
    large = plan.layout.ids * LARGE
    layouts = {
        f"{plan.layout.ids:,} ids": plan.layout,
        f"{plan.layout.ids:,} ids, no answer late": replace(plan.layout, late=False),
        f"{large:,} ids": replace(
            plan.layout,
            ids=large,
            examples=plan.layout.examples * LARGE,
            compute=plan.layout.compute * LARGE,
        ),
    }
    found: dict[str, dict[int, SimulatedSteps]] = {name: {} for name in layouts}
    for servers in plan.servers:
        report.say(f"simulating {counted(servers, 'server')}")
        for name, layout in layouts.items():
            sized = replace(layout, servers=servers, workers=workers_of(plan, servers))
            steps = found[name][servers] = simulate(costs, sized, steps=steps_of(plan, sized.workers))
            case = f"{name}, {counted(servers, 'server')}"
            ideal = sized.workers * sized.examples / sized.compute if sized.compute else 0.0
            report.compare(
                case, "examples_per_s", steps.examples_per_s, "examples/s", {"computing alone": ideal}
            )
            report.add(case, "step_seconds", steps.median, "s")
            report.add(case, "step_p99_seconds", steps.p99, "s", note="p99")
            report.add(case, "server_busy", steps.busy, "share", note="busy")
    report.show(f"Steps, simulated, {plan.workers_per_server:g} workers for each server")
    return found


def steps_of(plan: ScalePlan, workers: int) -> int:
    """Return how many steps to simulate: fewer of many workers, of whom each tells as much."""
    return min(plan.steps, max(MANY_STEPS // workers, LEAST_STEPS))


def workers_of(plan: ScalePlan, servers: int) -> int:
    return max(1, round(servers * plan.workers_per_server))


def keep_up(
    plan: ScalePlan, costs: Costs, found: dict[str, dict[int, SimulatedSteps]], report: Report
) -> None:
    """Report what a job costs in addition to its steps, its rows growing with its servers."""
    most = plan.servers[-1]
    steps = next(iter(found.values()))
    for servers in (count for count in plan.servers if count in TABLE or count == most):
        layout = replace(plan.layout, servers=servers, workers=workers_of(plan, servers))
        rows = plan.rows * servers / most
        kept = upkeep(costs, layout, rows, steps[servers], plan.around)
        case = f"{counted(servers, 'server')}, {rows:.3g} rows"
        for metric, value, unit in (
            ("memory of a server", kept.server_bytes / 1e9, "GB"),
            ("save", kept.save, "s"),
            ("a call of the chief to all", kept.fan_out * 1e3, "ms"),
            ("halt", kept.halt, "s"),
            ("recovery, exact", kept.exact, "s"),
            ("recovery, keep going", kept.keep_going, "s"),
            ("updates lost by keeping going", kept.lost_updates, "share"),
            ("goodput, exact", kept.goodput_exact, "share"),
            ("goodput, keep going", kept.goodput_keep_going, "share"),
            ("the meeting, of one core", kept.meeting, "share"),
            ("connections", float(kept.connections), "connections"),
            ("descriptors of a worker", kept.worker_files, "files"),
            ("threads of a server", kept.server_threads, "threads"),
            ("memory of a server for connections", kept.server_connection_bytes / 1e9, "GB"),
        ):
            report.add(f"{case}, {metric}", metric, value, unit)
    report.show("In addition to the steps")


def picture(plan: ScalePlan, found: dict[str, dict[int, SimulatedSteps]]) -> str:
    """Return throughput and step time over the number of servers, as SVG."""
    rates = [
        Line(name, [(servers, one.examples_per_s) for servers, one in by.items()], "late" in name)
        for name, by in found.items()
    ]
    ideal = [
        (servers, workers_of(plan, servers) * plan.layout.examples / plan.layout.compute)
        for servers in plan.servers
    ]
    times = []
    for name, by in found.items():
        if "late" not in name:
            times.append(Line(f"{name}, median", [(s, one.median * 1e3) for s, one in by.items()]))
            times.append(Line(f"{name}, p99", [(s, one.p99 * 1e3) for s, one in by.items()], dashed=True))
    across = f"servers, with {plan.workers_per_server:g} workers for each"
    panels = [
        Panel("Throughput", across, "examples/s", [*rates, Line("computing alone", ideal, dashed=True)]),
        Panel("A step", across, "ms", times),
    ]
    return draw(panels, "monolith bench scale --svg FILE: simulated from costs measured on one machine")
