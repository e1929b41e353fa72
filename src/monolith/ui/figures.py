"""What the page remembers: curves and counts of late, in bounded memory however long it is left open.

What a source says of itself at one moment, as the page draws it. All of it can be sent as JSON.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

MOST_POINTS = 480
"""Of a curve: about as many as a screen has room for."""
SPAN_SECONDS = 60.0
"""A histogram is of the last so many seconds."""


class ThinnedCurve:
    """Points in the order of their x, bounded in number.

    When the curve is full, neighbours are averaged, and from then on several new points make one: the whole
    history stays, ever coarser. A point before the last one replaces the history from there on, as after a
    rollback of the run. For one thread.

    Attributes:
        generation: Grows when points change that were there before; else points are only added.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[tuple[float, float]] = []
        self._each = 1
        self._waiting: list[float] = []
        self._newest: tuple[float, float] | None = None
        self.generation = 0

    def __len__(self) -> int:
        return len(self._points)

    @property
    def newest(self) -> tuple[float, float] | None:
        """The last point that was added, whether it is part of the curve yet or not."""
        return self._newest

    def since(self, count: int) -> list[tuple[float, float]]:
        """Return the points after the first `count`."""
        return self._points[count:]

    def add(self, x: float, y: float) -> None:
        """Add a point; one without a finite place is left out. One at the place of the last is the newest,
        and no part of the curve."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        if self._newest is not None and x == self._newest[0]:
            self._newest = (x, y)
            return
        if self._newest is not None and x < self._newest[0]:
            self._points = [point for point in self._points if point[0] < x]
            self._waiting = []
            self.generation += 1
        self._newest = (x, y)
        self._waiting.append(y)
        if len(self._waiting) < self._each:
            return
        self._points.append((x, sum(self._waiting) / len(self._waiting)))
        self._waiting = []
        if len(self._points) >= self._most:
            self._halve()

    def _halve(self) -> None:
        first, second = self._points[::2], self._points[1::2]
        self._points = [(b[0], (a[1] + b[1]) / 2) for a, b in zip(first, second, strict=False)]
        self._each *= 2
        self.generation += 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often something fell into each of a few buckets."""

    bounds: Sequence[float | None]
    """Upper bounds, rising; the last is None, for all that is more."""
    counts: Sequence[float]
    p50: float | None
    """None without any; at most the largest bound."""
    p99: float | None

    @property
    def total(self) -> float:
        return sum(self.counts)


class RecentHistograms:
    """Histograms that only grow, of the last seconds. For one thread.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, span: float = SPAN_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._span = span
        self._clock = clock
        self._seen: dict[str, deque[tuple[float, Mapping[float, float]]]] = {}

    def of(self, name: str, buckets: Mapping[float, float]) -> Distribution:
        """Note how a histogram stands, upper bound to how many are up to it; return what came of late.

        At first that is all there is, and so it is where it began again.
        """
        now = self._clock()
        seen = self._seen.setdefault(name, deque())
        if seen and (seen[-1][1].keys() != buckets.keys() or _fell(seen[-1][1], buckets)):
            seen.clear()
        while len(seen) > 1 and now - seen[1][0] >= self._span:
            seen.popleft()
        seen.append((now, dict(buckets)))
        then = seen[0][1] if now - seen[0][0] >= self._span else {}
        return _distribution({bound: count - then.get(bound, 0.0) for bound, count in buckets.items()})


def _fell(before: Mapping[float, float], now: Mapping[float, float]) -> bool:
    return any(now[bound] < count for bound, count in before.items())


def _distribution(upto: Mapping[float, float]) -> Distribution:
    bounds = sorted(upto)
    rising = [upto[bound] for bound in bounds]
    counts = [max(b - a, 0.0) for a, b in zip([0.0, *rising], rising, strict=False)]
    return Distribution(
        bounds=[bound if math.isfinite(bound) else None for bound in bounds],
        counts=counts,
        p50=quantile(bounds, counts, 0.5),
        p99=quantile(bounds, counts, 0.99),
    )


def quantile(bounds: Sequence[float], counts: Sequence[float], fraction: float) -> float | None:
    """Return the value that a fraction of the values does not exceed, assuming even spread within a bucket.

    None if there are no values. Values above the largest finite bound count as that bound.
    """
    rest, below = fraction * sum(counts), 0.0
    if not rest > 0:
        return None
    for bound, count in zip(bounds, counts, strict=True):
        if not math.isfinite(bound):
            break
        if count and rest <= count:
            return below + (bound - below) * rest / count
        rest -= count
        below = bound
    return below


Chart = str
"""auc, auc_by_step, evaluation, examples, requests, latency; or `evaluation:AXIS` and `online:AXIS` for
metrics on another scale than an AUC, see `axis_of`."""
RunState = Literal["up", "ended", "not begun", "failed", "silent"]
_ONE_SCALE = ("auc", "gauc", "recall", "ndcg", "hit_rate", "mrr", "log_loss", "ne", "calibration")
"""Kinds of metrics that mean the same for every label; an rmse of seconds is not one of prices."""
STAGES = ("read", "train", "publish", "wire", "apply", "total")
"""What an event passes on its way to a changed answer, in this order; a server knows all, a trainer three."""
STAGE_HISTOGRAMS = ("serve_event_to_served_seconds", "publish_stage_seconds")
"""What servers and trainers call the histograms of stages, with the label `stage`."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve."""

    chart: Chart
    label: str
    """Which curve of the source; empty where a source has one."""
    x: float
    """Unix seconds, of events or of the clock; of what goes by steps, the step."""
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFigures:
    """One table. None is a value that is not reported."""

    table: str
    rows: float | None = None
    bytes: float | None = None
    births: float | None = None
    """Ids that were given a row."""
    filtered: float | None = None
    """Sightings of ids that are too rare to be admitted."""
    refused: float | None = None
    """Ids that were refused because the table is full."""
    expired: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigures:
    """How long events took for one stage on their way to a changed answer, of late, in seconds."""

    stage: str
    seconds: Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One version of a served model."""

    name: str
    version: str
    state: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFigures:
    """How a server divides the requests for a name."""

    name: str
    targets: str
    """MODEL[/VERSION]:WEIGHT,... as the server has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishFigures:
    """Whether what a run learns is let out."""

    held: bool
    reason: str = ""
    since: float | None = None
    """Unix seconds."""
    version: str | None = None
    """The exported version that servers were taken back to."""
    versions: Sequence[str] = ()
    """Those that they could be taken back to, the newest first."""
    controllable: bool = False
    """Whether the page can hold, resume and roll back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFigures:
    """One checkpoint."""

    name: str
    step: int
    saved_at: float | None
    kind: str
    rows: int
    bytes: int
    marks: Sequence[str] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFigures:
    """One process of a run."""

    name: str
    state: str
    place: str
    trouble: bool
    """Whether the operator should look at it."""
    step: int | None = None
    examples_per_s: float | None = None
    lag_seconds: float | None = None
    rows: int | None = None
    bytes: int | None = None
    restarts: int = 0
    failovers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PageReading:
    """What a source said when it was asked."""

    kind: str
    """What it is: run, trainer, server."""
    state: RunState = "up"
    """Whether it runs. A source that cannot be asked at all is down, which the board says."""
    note: str = ""
    """What a person should know besides, such as that a run has ended."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """A few more words, by name."""
    points: Sequence[CurvePoint] = ()
    tables: Sequence[TableFigures] = ()
    stages: Sequence[StageFigures] = ()
    models: Sequence[ModelFigures] = ()
    splits: Sequence[SplitFigures] = ()
    publish: PublishFigures | None = None
    checkpoints: Sequence[CheckpointFigures] = ()
    processes: Sequence[ProcessFigures] = ()


def axis_of(metric: str) -> str:
    """Return the axis that a metric is drawn on: with the same kind of other labels, or alone."""
    kind = metric.rpartition("/")[2].partition("@")[0]
    return kind if kind in _ONE_SCALE else metric


def plain(value: Any) -> Any:
    """Return figures as JSON can hold them: numbers that are not finite are nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
