"""`monolith experiment intervals`: the second experiment of the paper, on data that is at hand.

A model learns the past at rest, and then keeps learning as events happen. What is served is a copy of it,
synced every second, minute, half an hour or five hours of event time, or never again after the past: batch
only. Each event is predicted by all copies before the model learns from it, and what counts is their AUC over
the online part.

The copies follow by the delta channel that servers follow by, with rows and dense weights synced at the same
time. Event time is the clock, so that nothing waits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from monolith.config import format_duration, parse_duration
from monolith.errors import ConfigError
from monolith.nn import auc
from monolith.observe import progress
from monolith_bench.figures import new_figure, save_figure
from monolith_bench.learner import Learner, mean_and_error
from monolith_bench.movielens import find_wheel
from monolith_bench.options import ExperimentFreshnessOptions
from monolith_bench.report import stderr_console
from monolith_bench.served_copies import FollowingCopies
from monolith_bench.timed_events import OnlinePlan, drift_plan, movielens_plan

COMMAND = "experiment freshness"
BATCH_ONLY = "batch only"
TITLES = {"drift": "the drifting stream", "movielens": "MovieLens-100k"}

MakePlan = Callable[[int], OnlinePlan]
"""Given a seed, returns what is learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshnessPlan:
    """The options, settled."""

    data: Mapping[str, MakePlan]
    """By title."""
    intervals: tuple[timedelta, ...]
    seeds: int

    @classmethod
    def settle(cls, options: ExperimentFreshnessOptions) -> FreshnessPlan:
        for name in ("seeds", "batch_hours", "online_hours"):
            if not getattr(options, name) >= 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"{COMMAND}: --{flag} must be at least 1, got {getattr(options, name)}")
        if not 0 < options.online_share < 1:
            raise ConfigError(
                f"{COMMAND}: --online-share must be above 0 and below 1, got {options.online_share:g}"
            )
        intervals = tuple(parse_duration(text) for text in options.intervals)
        if wrong := [one for one in intervals if one < timedelta(seconds=1) or one.microseconds]:
            raise ConfigError(
                f"{COMMAND}: --intervals are whole seconds, at least one, such as 30m; "
                f"got {format_duration(wrong[0])}"
            )
        if options.quick:
            return cls(data={TITLES["drift"]: _small}, intervals=intervals, seeds=min(options.seeds, 2))
        return cls(
            data={TITLES[name]: _maker(name, options) for name in dict.fromkeys(options.data)},
            intervals=tuple(dict.fromkeys(intervals)),
            seeds=options.seeds,
        )


def _small(seed: int) -> OnlinePlan:
    return drift_plan(seed, timedelta(hours=1), timedelta(minutes=5), small=True)


def _maker(name: str, options: ExperimentFreshnessOptions) -> MakePlan:
    if name == "movielens":
        wheel, share = find_wheel(options.wheel), options.online_share
        return lambda _: movielens_plan(wheel, share)
    batch, online = timedelta(hours=options.batch_hours), timedelta(hours=options.online_hours)
    return lambda seed: drift_plan(seed, batch, online)


@dataclass(frozen=True, slots=True)
class ServedAuc:
    """How well copies with one interval predicted, over the seeds."""

    interval: str
    aucs: tuple[float, ...]
    """Over the online part, one for each seed."""
    gains: tuple[float, ...]
    """AUC gained over the copy of the same seed that was never synced again."""
    syncs: int
    """Of the first seed, in the online part."""


@dataclass(frozen=True, slots=True)
class FreshnessGain:
    """What was found on one set of events."""

    title: str
    events: int
    """Of the online part, as the next is."""
    hours: float
    served: tuple[ServedAuc, ...]
    best: float | None
    """The AUC that no model is expected to beat, mean of the seeds; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    plan: OnlinePlan
    aucs: tuple[float, ...]
    """One for each interval, then batch only."""
    syncs: tuple[int, ...]


def train_and_serve(
    plan: OnlinePlan, intervals: Sequence[timedelta], seed: int, advance: Callable[[int], None]
) -> _Outcome:
    """Learn the past, then the online part along with its copies; return how well each of them predicted."""
    learner = Learner(plan.recipe, plan.events, seed)
    learner.train(torch.arange(plan.online))
    with FollowingCopies(plan, learner, [*intervals, None], seed) as following:
        following.learn(advance)
        likes = plan.events.likes[plan.online :]
        copies = following.copies
        return _Outcome(
            plan,
            tuple(auc(copy.logits, likes) for copy in copies),
            tuple(copy.syncs for copy in copies),
        )


def measure(plan: FreshnessPlan) -> list[FreshnessGain]:
    """Train all models, one after the other, and say how far that has come."""
    names = [*map(format_duration, plan.intervals), BATCH_ONLY]
    found = []
    for title, make in plan.data.items():
        outcomes = []
        for seed in range(plan.seeds):
            events = make(seed)
            label = f"{title}, seed {seed + 1} of {plan.seeds}"
            with progress(label, len(events.events) - events.online, "events") as bar:
                outcomes.append(train_and_serve(events, plan.intervals, seed, bar.advance))
        found.append(_gathered(title, names, outcomes))
    return found


def _gathered(title: str, names: Sequence[str], outcomes: Sequence[_Outcome]) -> FreshnessGain:
    served = []
    for place, name in enumerate(names):
        aucs = tuple(one.aucs[place] for one in outcomes)
        gains = tuple(one.aucs[place] - one.aucs[-1] for one in outcomes)
        served.append(ServedAuc(name, aucs, gains, outcomes[0].syncs[place]))
    first = outcomes[0].plan
    best = [one.plan.best for one in outcomes if one.plan.best is not None]
    return FreshnessGain(
        title,
        len(first.events) - first.online,
        first.online_hours,
        tuple(served),
        sum(best) / len(best) if best else None,
    )


def run(options: ExperimentFreshnessOptions) -> int:
    """Measure, draw a table on standard error, and a picture and JSON on request."""
    plan = FreshnessPlan.settle(options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    try:
        found = measure(plan)
    finally:
        torch.set_num_threads(threads)
    console = stderr_console()
    for one in found:
        console.print(table(one, plan.seeds))
    if options.plot is not None:
        draw(found, plan.seeds, Path(options.plot))
        console.print(f"drawn to {options.plot}", highlight=False)
    if options.json:
        sys.stdout.write(json.dumps(as_json(found, plan.seeds), indent=2) + "\n")
    return 0


def table(found: FreshnessGain, seeds: int) -> Table:
    """Return the AUCs, an interval in each line."""
    title = (
        f"AUC of the served predictions on {found.title}, {found.events:,} events in {found.hours:,.0f} h "
        f"online, mean of {seeds} seeds and its standard error"
    )
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("synced every", "syncs", "AUC", "over batch only"):
        drawn.add_column(heading, justify="right")
    for one in found.served:
        gain = "" if one.interval == BATCH_ONLY else "{:+.4f} ± {:.4f}".format(*mean_and_error(one.gains))
        drawn.add_row(
            one.interval, f"{one.syncs:,}", "{:.4f} ± {:.4f}".format(*mean_and_error(one.aucs)), gain
        )
    if found.best is not None:
        drawn.add_row("best possible", "", f"{found.best:.4f}", "")
    return drawn


def as_json(found: Sequence[FreshnessGain], seeds: int) -> dict[str, object]:
    return {
        "experiment": "freshness",
        "seeds": seeds,
        "results": [
            {
                "data": one.title,
                "online_events": one.events,
                "online_hours": one.hours,
                "best_auc": one.best,
                "served": [_served_json(served) for served in one.served],
            }
            for one in found
        ],
    }


def _served_json(served: ServedAuc) -> dict[str, object]:
    mean, error = mean_and_error(served.aucs)
    gain, gain_error = mean_and_error(served.gains)
    return {
        "synced_every": served.interval,
        "syncs": served.syncs,
        "aucs": list(served.aucs),
        "auc": mean,
        "error": error,
        "gain": gain,
        "gain_error": gain_error,
    }


def draw(found: Sequence[FreshnessGain], seeds: int, path: Path) -> None:
    """Draw the AUC by interval with error bars, with one panel for each kind of events.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write that ending.
    """
    figure = new_figure(COMMAND, 5 * len(found), 3.8)
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        synced, batch_only = one.served[:-1], one.served[-1]
        means, errors = zip(*(mean_and_error(served.aucs) for served in synced), strict=True)
        level, spread = mean_and_error(batch_only.aucs)
        axes.axhspan(level - spread, level + spread, color="C1", alpha=0.25, lw=0)
        axes.axhline(level, color="C1", label=BATCH_ONLY)
        names = [served.interval for served in synced]
        axes.errorbar(names, means, errors, label="online", marker="o", capsize=3)
        axes.set_xlabel("synced every, in event time")
        axes.set_ylabel("AUC of the served predictions")
        axes.set_title(f"{one.title}: mean of {seeds} seeds")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save_figure(figure, COMMAND, path)
