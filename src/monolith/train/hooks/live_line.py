"""The live line: the progress of a run, for an operator who watches it.

The hook gathers the numbers, and only when they are to be shown: reading a loss makes the CPU wait
for the device. What becomes of them is up to a function: drawn on a terminal, a line in the log, or
gauges of Prometheus.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from monolith import concurrency
from monolith.observe import Gauge, Metrics
from monolith.observe.progress import (
    counted,
    describe_amount,
    describe_bytes,
    describe_part,
    describe_rate,
    describe_seconds,
)
from monolith.table import TableStats
from monolith.train.evaluate_config import LOSS, headlines
from monolith.train.hook import Every, Hook, StepResult, TrainingRun

_log = logging.getLogger(__name__)

SPAN_SECONDS = 10.0
"""Speed is that of the last so many seconds, or since the last showing where that is longer ago."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStatus:
    """How a run stands at one moment."""

    step: int
    last_step: int | None
    """The step at which the run ends; None if only the data, the time or a person ends it."""
    seconds_left: float | None
    examples: int
    """Examples trained on since this run began."""
    examples_per_s: float
    loss: float
    """The mean loss over the steps since it was last shown."""
    metrics: Mapping[str, float]
    """By "head/metric", over the latest examples; those that have nothing to say are left out."""
    lag_seconds: float | None
    """How far the newest example trained on is behind the clock; None if the data has no event times, or
    was there already, as files are."""
    event_time: int = 0
    """The newest event trained on, in Unix seconds; 0 where the data has no event times."""
    tables: Mapping[str, TableStats] = field(default_factory=dict)
    """What each table holds, by name."""
    rows: int
    bytes: int
    filtered: int
    """Occurrences of ids that were not admitted because they are too rare."""
    refused: int
    """Ids that were refused because a table is full."""
    evicted: int
    """Rows that expired."""
    skipped: int = 0
    """Batches that were skipped because their loss or a gradient is NaN or infinite."""
    non_finite: int = 0
    """Updates of single rows that a table skipped because they are NaN or infinite."""
    staleness: int | None = None
    """Steps, of all workers, that the dense weights of the last gradient lacked when it was applied; None
    without parameter servers."""
    evaluated: Mapping[str, float] = field(default_factory=dict)
    """By "head/metric", what the last evaluation found; none before there was one."""
    data_read: float | None = None
    """Which part of the data is done, from 0 to 1, over all epochs; None if that is unknown."""
    epochs: int = 1
    """How often the data is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveValues:
    """Where a live line reads the values that its steps do not carry."""

    stats: Callable[[], Mapping[str, TableStats]]
    """Sizes and counters of the tables, by name."""
    metrics: Callable[[], Mapping[str, float] | concurrency.Future[dict[str, float]]] = dict
    """Metrics over the latest examples, as "head/metric"; what takes long is computed by another thread."""
    skipped: Callable[[], int] = lambda: 0
    """How many batches were not trained on."""
    staleness: Callable[[], int | None] = lambda: None
    """How many steps the dense weights lack; None without parameter servers."""
    evaluated: Callable[[], Mapping[str, float]] = dict
    """Metrics of the last evaluation, as "head/metric"."""


class RunningLoss:
    """The mean loss of steps, kept where their losses are: only `take` waits for the device."""

    _AT_ONCE = 64  # losses that are added up together: to add each would be a launch in every step

    def __init__(self) -> None:
        self.steps = 0
        self._losses: list[Tensor] = []
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        self.steps += 1
        self._losses.append(loss.detach())
        if len(self._losses) == self._AT_ONCE:
            self._add_up()

    def take(self) -> float:
        """Return the mean, and start over; NaN if there was no step."""
        self._add_up()
        found = math.nan if self._sum is None else float(self._sum) / self.steps
        self._sum, self.steps = None, 0
        return found

    def _add_up(self) -> None:
        if self._losses:
            found = torch.stack(self._losses).sum(dtype=torch.float64)
            self._sum = found if self._sum is None else self._sum + found
            self._losses = []


class LiveLineHook(Hook):
    """Shows how a run stands, every so often, and once more at its end if it was shown at all.

    Args:
        show: Called on the training thread, which waits for it.
        values: The values to show.
        outlook: The end of the run, as far as it is known.
        every: The shortest time between two showings; or a number of steps.
        epochs: How often the data is read.
        live: Whether the data has events as they happen; of others there is no lag.
        clock: Unix seconds, for the lag.
        timer: Seconds that never run backwards, for everything else.
    """

    def __init__(
        self,
        show: Callable[[TrainStatus], None],
        values: LiveValues,
        outlook: Outlook | None = None,
        *,
        every: timedelta | int,
        epochs: int = 1,
        live: bool = True,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._show = show
        self._every_steps = Every(every, "progress: every") if isinstance(every, int) else None
        self._every = every.total_seconds() if isinstance(every, timedelta) else 0.0
        self._values = values
        self._outlook = outlook or Outlook(timer=timer)
        self._epochs = epochs
        self._live = live
        self._clock = clock
        self._timer = timer
        self._examples = 0
        self._event_time = 0
        self._loss = RunningLoss()
        self._waiting: tuple[TrainStatus, concurrency.Future[dict[str, float]]] | None = None
        """What is to be shown as soon as its metrics are known."""
        self._shown = timer()
        self._spoke = self._looked = False
        self._seen: deque[tuple[float, int]] = deque()
        """When, and after how many examples, it was shown of late."""

    def after_create(self, run: TrainingRun) -> None:
        self._outlook.begin(run.step)
        if self._every_steps is not None:
            self._every_steps.begin(run.step)
        self._shown = self._timer()
        self._seen = deque([(self._shown, self._examples)])

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._examples += result.examples
        self._event_time = max(self._event_time, result.batch.ids.event_time)
        self._loss.add(result.loss)
        if self._waiting is not None and self._waiting[1].done():
            self._show_waiting()
        if not self._looked:
            self._outlook.look(result.step)
            self._looked = True
        now = self._timer()
        crossed = self._every_steps is None or self._every_steps.crossed(result.step)
        if crossed and now - self._shown >= self._every:
            self._tell(result.step, now)

    def end(self, run: TrainingRun) -> None:
        self._show_waiting()
        if self._spoke and self._loss.steps:
            self._tell(run.step, self._timer())
            self._show_waiting()

    def _tell(self, step: int, now: float) -> None:
        self._show_waiting()
        tables, ahead = self._values.stats(), self._outlook.look(step)
        stats = tables.values()
        metrics = self._values.metrics()
        status = TrainStatus(
            step=step,
            last_step=ahead.last_step,
            seconds_left=ahead.seconds_left,
            examples=self._examples,
            examples_per_s=self._speed(now),
            loss=self._loss.take(),
            metrics=_said(metrics) if isinstance(metrics, Mapping) else {},
            lag_seconds=max(self._clock() - self._event_time, 0.0)
            if self._live and self._event_time > 0
            else None,
            event_time=self._event_time,
            tables=tables,
            rows=sum(table.rows for table in stats),
            bytes=sum(table.bytes_total for table in stats),
            filtered=sum(table.filtered for table in stats),
            refused=sum(table.refused for table in stats),
            evicted=sum(table.evicted for table in stats),
            skipped=self._values.skipped(),
            non_finite=sum(table.non_finite for table in stats),
            staleness=self._values.staleness(),
            evaluated=_said(self._values.evaluated()),
            data_read=ahead.data_read,
            epochs=self._epochs,
        )
        self._spoke = True
        if isinstance(metrics, Mapping):
            self._show(status)
        else:
            self._waiting = status, metrics
            if metrics.done():
                self._show_waiting()
        self._shown = self._timer()  # what it took to show is not counted against the next

    def _show_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            status, metrics = waiting
            self._show(replace(status, metrics=_said(metrics.result())))

    def _speed(self, now: float) -> float:
        while len(self._seen) > 1 and now - self._seen[1][0] >= SPAN_SECONDS:
            self._seen.popleft()
        self._seen.append((now, self._examples))
        then, examples = self._seen[0]
        return (self._examples - examples) / (now - then) if now > then else 0.0


def _said(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have something to say."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


# What becomes of it


def describe_status(standing: TrainStatus) -> dict[str, str]:
    """Return what a person wants to know besides the step, by name; what says nothing is left out."""
    facts = {
        "speed": describe_rate(standing.examples_per_s, "examples"),
        "loss": f"{standing.loss:.4f}",
        **{name.replace("/", " "): f"{standing.metrics[name]:.4f}" for name in headlines(standing.metrics)},
        **{f"eval {name.replace('/', ' ')}": f"{value:.4f}" for name, value in _shown(standing.evaluated)},
        "rows": f"{standing.rows:,}",
        "memory": describe_bytes(standing.bytes),
    }
    if any(table.device_bytes for table in standing.tables.values()):
        facts["on the device"] = f"{sum(table.device_rows for table in standing.tables.values()):,} rows"
    tiered = [table for table in standing.tables.values() if table.is_tiered]
    if tiered:
        cold, ids = sum(table.cold_rows for table in tiered), sum(table.tiered_ids for table in tiered)
        facts["in files"] = f"{cold:,} rows, {describe_bytes(sum(table.cold_bytes for table in tiered))}"
        if ids:
            facts["found in memory"] = describe_part(1 - sum(table.cold_ids_read for table in tiered) / ids)
    if standing.lag_seconds is not None:
        days = standing.lag_seconds / 86_400
        facts["behind"] = f"{days:,.0f} days" if days >= 2 else describe_seconds(standing.lag_seconds)
    if standing.staleness:
        facts["dense staleness"] = counted(standing.staleness, "step")
    counts = {
        "skipped batches": standing.skipped,
        "rows with bad gradients": standing.non_finite,
        "not admitted": standing.filtered,
        "refused": standing.refused,
        "evicted": standing.evicted,
    }
    facts |= {name: f"{count:,}" for name, count in counts.items() if count}
    if standing.data_read is not None:
        facts["data"] = describe_part(standing.data_read)
        if standing.epochs > 1:
            epoch = min(int(standing.data_read * standing.epochs) + 1, standing.epochs)
            facts["data"] += f" (epoch {epoch} of {standing.epochs})"
    if standing.seconds_left is not None:
        facts["left"] = describe_seconds(standing.seconds_left)
    return facts


def _shown(evaluated: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the metrics of an evaluation that fit into a line; the loss if there are none."""
    return [(name, evaluated[name]) for name in headlines(evaluated) or [LOSS] if name in evaluated]


def log_status(standing: TrainStatus) -> None:
    """Write a line to the log; a log of JSON has the numbers as they are, too."""
    facts = ", ".join(f"{name} {value}" for name, value in describe_status(standing).items())
    done = describe_amount(standing.step, standing.last_step, "").rstrip()
    numbers = {
        name: getattr(standing, name)
        for name in ("step", "examples", "examples_per_s", "loss", "rows", "bytes", "filtered", "refused")
    }
    numbers |= {"evicted": standing.evicted, "lag_seconds": standing.lag_seconds}
    numbers |= {"skipped": standing.skipped, "non_finite": standing.non_finite}
    numbers |= {"staleness": standing.staleness}
    numbers |= {"data_read": standing.data_read, "seconds_left": standing.seconds_left}
    if math.isnan(standing.loss):
        numbers["loss"] = None  # JSON has no NaN
    _log.info(
        "step %s: %s",
        done,
        facts,
        extra={**numbers, "metrics": dict(standing.metrics), "evaluated": dict(standing.evaluated)},
    )


TABLE_GAUGES = {
    "rows": ("rows", "Rows in the table"),
    "bytes_total": ("bytes", "Memory of the table"),
    "inserted": ("births", "Ids that were given a row"),
    "filtered": ("filtered", "Occurrences of ids that are too rare to be admitted"),
    "refused": ("refused", "Ids refused because the table is full"),
    "evicted": ("expired", "Rows that expired"),
}
"""Of each table: the number -> what Prometheus calls it, after "table_"."""


DEVICE_GAUGES = {
    "device_rows": ("device_rows", "Rows on the device"),
    "device_bytes": ("device_bytes", "Bytes of the device's memory"),
}
"""The same of each table with rows on a device and elsewhere; other tables have no such series."""

TIER_GAUGES = {
    "cold_rows": ("cold_rows", "Rows in files"),
    "cold_bytes": ("cold_bytes", "Bytes of the files of cold rows"),
    "tiered_ids": ("tiered_ids", "IDs looked up or written"),
    "cold_ids_read": ("cold_ids_read", "IDs looked up or written whose row was read from a file"),
    "cold_reads": ("cold_reads", "Reads of files of cold rows"),
    "cold_bytes_read": ("cold_bytes_read", "Bytes read from files of cold rows"),
    "cold_bytes_written": ("cold_bytes_written", "Bytes written to files of cold rows"),
    "compactions": ("compactions", "Files of cold rows that were compacted"),
}
"""The same of each tiered table; other tables have no such series."""


def gauge_status(metrics: Metrics) -> Callable[[TrainStatus], None]:
    """Return what keeps Prometheus gauges as the run stands."""
    numbers = {
        "step": metrics.gauge("train_step", "Steps the model has taken in all its runs"),
        "examples": metrics.gauge("train_examples", "Examples trained on since this run began"),
        "examples_per_s": metrics.gauge("train_examples_per_s", "Examples trained on per second"),
        "loss": metrics.gauge("train_loss", "Mean loss of the latest steps"),
        "rows": metrics.gauge("train_rows", "Rows in all tables"),
        "bytes": metrics.gauge("train_table_bytes", "Memory of all tables"),
        "filtered": metrics.gauge("train_filtered", "Occurrences of ids that are too rare to be admitted"),
        "refused": metrics.gauge("train_refused", "Ids refused because a table is full"),
        "evicted": metrics.gauge("train_evicted", "Rows that expired"),
        "skipped": metrics.gauge(
            "train_skipped_batches", "Batches skipped because their loss or a gradient is NaN or infinite"
        ),
        "non_finite": metrics.gauge(
            "train_non_finite_updates", "Updates of single rows skipped because they are NaN or infinite"
        ),
    }
    lag = metrics.gauge("train_event_time_lag_seconds", "Seconds from the newest event trained on to now")
    staleness = metrics.gauge(
        "train_dense_staleness_steps", "Steps of all workers that the weights of the last gradient lacked"
    )
    data = metrics.gauge("train_data_read", "Part of the data that was trained on, from 0 to 1")
    quality = metrics.gauge("train_metric", "The metric over the latest examples", ["metric"])

    evaluated = metrics.gauge("train_evaluated_metric", "The metric of the last evaluation", ["metric"])
    event_time = metrics.gauge("train_event_time_seconds", "The newest event trained on, in Unix seconds")
    of_tables = {
        attribute: metrics.gauge(f"table_{name}", about, ["table"])
        for attribute, (name, about) in TABLE_GAUGES.items()
    }

    of_tiers: dict[str, Gauge] = {}

    def show(standing: TrainStatus) -> None:
        for name, gauge in numbers.items():
            gauge.set(getattr(standing, name))
        if standing.lag_seconds is not None:
            lag.set(standing.lag_seconds)
        if standing.staleness is not None:
            staleness.set(standing.staleness)
        if standing.data_read is not None:
            data.set(standing.data_read)
        if standing.event_time > 0:
            event_time.set(standing.event_time)
        for table, stats in standing.tables.items():
            for attribute, gauge in of_tables.items():
                gauge.set(getattr(stats, attribute), table=table)
            tiers = DEVICE_GAUGES if stats.device_bytes else {}
            tiers = tiers | TIER_GAUGES if stats.is_tiered else tiers
            for attribute, (name, about) in tiers.items():
                # Made with the first such table: a run without has no such metrics.
                if attribute not in of_tiers:
                    of_tiers[attribute] = metrics.gauge(f"table_{name}", about, ["table"])
                of_tiers[attribute].set(getattr(stats, attribute), table=table)
        for name, value in standing.metrics.items():
            quality.set(value, metric=name)
        for name, value in standing.evaluated.items():
            evaluated.set(value, metric=name)

    return show


# How long a run will still take: by its steps, and by its data if it is known how much is read.


class Ahead(NamedTuple):
    """What lies ahead of a run."""

    last_step: int | None
    """The step at which it ends; None if only the data, the time or a person ends it."""
    data_read: float | None
    """Which part of the data is done, from 0 to 1, over all epochs; None if that is unknown."""
    seconds_left: float | None
    """To the last step or the end of the data, whichever comes first; None if neither is known."""


class Outlook:
    """Looks ahead of a run. One thread looks; another may begin.

    Args:
        steps: How many steps this run is to take.
        max_steps: At which step it ends; the nearer of the two counts.
        read: Says which part of the data is done.
        timer: Seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        read: Callable[[], float | None] = lambda: None,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._steps = steps
        self._max_steps = max_steps
        self._read = read
        self._timer = timer
        self._first_step = 0
        self._began = timer()
        self._first_read: tuple[float, float] | None = None
        """When the data was first asked how much of it is done, and what it said."""

    def begin(self, step: int) -> None:
        """Count from the step at which the run begins."""
        self._first_step, self._began, self._first_read = step, self._timer(), None

    def look(self, step: int) -> Ahead:
        """Return what lies ahead at a step. What it takes to start is in neither speed: the data counts from
        when it is first looked at."""
        now, part = self._timer(), self._read()
        if part is not None and self._first_read is None:
            self._first_read = (now, part)
        ends = [] if self._steps is None else [self._first_step + self._steps]
        ends += [] if self._max_steps is None else [self._max_steps]
        last = min(ends, default=None)
        left = min(self._by_steps(step, last, now), self._by_data(part, now))
        return Ahead(last, part, left if math.isfinite(left) else None)

    def _by_steps(self, step: int, last: int | None, now: float) -> float:
        taken = step - self._first_step
        return math.inf if last is None or taken < 1 else max(last - step, 0) * (now - self._began) / taken

    def _by_data(self, part: float | None, now: float) -> float:
        if part is None or self._first_read is None:
            return math.inf
        then, first = self._first_read
        return (1 - part) * (now - then) / (part - first) if part > first else math.inf


# Counts of a worker's steps, for readers on another thread: `monolith status watch`.
#
# Counting costs a few additions a step. Nothing here reads a loss or asks a server.


class StepCountsHook(Hook):
    """Counts what this process trains on. Its attributes may be read from any thread.

    Args:
        on_begin: Told the global step at which the run begins.
    """

    def __init__(self, on_begin: Callable[[int], object] = lambda _: None) -> None:
        self._on_begin = on_begin
        self.state = "starting"
        self.step: int | None = None
        """The global step, when this process last took one."""
        self.steps = 0
        """Steps that this process took."""
        self.examples = 0
        self.event_time = 0
        """The newest event trained on, in Unix seconds; 0 where the data does not say."""

    def after_create(self, run: TrainingRun) -> None:
        self._on_begin(run.step)
        self.step = run.step
        self.state = "training"

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.step = result.step
        self.steps += 1
        self.examples += result.examples
        self.event_time = max(self.event_time, result.batch.ids.event_time)

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        self.state = "ending"
