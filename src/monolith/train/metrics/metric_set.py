"""Metrics of a stream: how good predictions are, batch after batch, in bounded memory.

A stream has no test set. Each batch is predicted first and trained on afterwards, so every
example is an unseen one once; `StepResult.predictions` are those. `Windowed` cuts the
stream into windows and gives a row for each, which shows a model getting better, or stale.

The state of a metric is plain numbers, texts, lists and tensors, so that it commits
with a checkpoint and a resumed run counts no example twice.
"""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import ConfigError, MetricError, RestoreError
from monolith.train.metrics.auc import GroupedAuc, StreamingAuc
from monolith.train.metrics.ranking import RankingMetric
from monolith.train.metrics.scored import Floats, Scored, ScoredMetric

__all__ = [
    "LOSSES",
    "METRICS",
    "Calibration",
    "GroupedAuc",
    "MeanLoss",
    "Metric",
    "MetricSet",
    "NormalizedEntropy",
    "RootMeanSquare",
    "StreamingAuc",
    "WindowRow",
    "Windowed",
    "make_metric",
]


class Metric(Protocol):
    """One number about all examples since the last reset. One thread uses it at a time.

    Shapes: predictions and labels of n examples, of shape (n,).

    Examples:
        >>> import torch
        >>> from monolith import METRICS
        >>> metric = METRICS["auc"]()  # a Metric
        >>> metric.update(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1.0, 0.0, 0.0]))
        >>> round(metric.value(), 3)
        1.0
    """

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Take in examples; an example of weight 0 is not there.

        Args:
            predictions: Of shape (n,) or (n, 1), on any device; several batches at once, in a run. The other
                tensors may be on the CPU.
            weights: Not negative; None for 1 each.
            groups: Whole numbers, such as users, for metrics that ask for them.

        Raises:
            MetricError: Predictions hold NaN, or something else does not fit. Nothing was taken in.
        """

    def value(self) -> float:
        """NaN while there is nothing to say."""

    def reset(self) -> None:
        """Forget all examples."""

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, detached from this metric."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a metric of the same kind.

        Raises:
            RestoreError: It is not one. The metric is as it was.
        """


# Metrics that are a few sums


class _Sums(ScoredMetric):
    """A metric whose memory is some running sums, by name."""

    fields: tuple[str, ...]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sums: Floats = np.zeros(len(self.fields))

    def add(self, scored: Scored) -> None:
        self._sums = self._sums + (np.stack(self._terms(scored)) * scored.weights).sum(1)

    def state(self) -> dict[str, Any]:
        return dict(zip(self.fields, self._sums.tolist(), strict=True))

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.keys() != set(self.fields):
            raise RestoreError(
                f"cannot restore metric {self.name!r}: its state has {sorted(state)} "
                f"instead of {sorted(self.fields)}"
            )
        self._sums = np.array([float(state[field]) for field in self.fields])

    @abstractmethod
    def _terms(self, scored: Scored) -> list[Floats]:
        """Return what each example adds to each sum, in the order of `fields`."""


class NormalizedEntropy(_Sums):
    """Log loss over the entropy of the mean label: 1 is as good as always saying the mean; less is better.

    Unlike the log loss it compares across days whose click rates differ. NaN while labels are all alike.
    """

    name = "ne"
    fields = ("weight", "loss", "label")

    def _terms(self, scored: Scored) -> list[Floats]:
        scored.require_probabilities(self.name)
        return [np.ones_like(scored.labels), _log_loss(scored), scored.labels]

    def value(self) -> float:
        weight, loss, label = self._sums.tolist()
        rate = label / weight if weight else math.nan
        if math.isnan(rate) or not 0 < rate < 1:
            return math.nan
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return float(loss / weight / entropy)


class Calibration(_Sums):
    """The sum of predictions over the sum of labels: 1.1 promises a tenth too much.

    NaN while nothing happened at all.
    """

    name = "calibration"
    fields = ("prediction", "label")

    def _terms(self, scored: Scored) -> list[Floats]:
        return [scored.predictions, scored.labels]

    def value(self) -> float:
        prediction, label = self._sums.tolist()
        return float(prediction / label) if label else math.nan


class MeanLoss(_Sums):
    """The mean of a loss of `LOSSES` over examples."""

    fields = ("weight", "loss")

    def __init__(self, loss: str = "log") -> None:
        if loss not in LOSSES:
            raise ConfigError(f"no loss is called {loss!r}; choose one of {', '.join(LOSSES)}")
        self.name = f"{loss}_loss"
        self._loss = LOSSES[loss]
        super().__init__()

    def _terms(self, scored: Scored) -> list[Floats]:
        if self._loss is _log_loss:
            scored.require_probabilities(self.name)
        return [np.ones_like(scored.labels), self._loss(scored)]

    def value(self) -> float:
        weight, loss = self._sums.tolist()
        return float(loss / weight) if weight else math.nan


class RootMeanSquare(MeanLoss):
    """The root of the mean squared error, in the unit of the label."""

    def __init__(self) -> None:
        super().__init__("squared")
        self.name = "rmse"

    def value(self) -> float:
        return math.sqrt(super().value())


def _log_loss(scored: Scored) -> Floats:
    """In nats. A sure prediction that was wrong costs 27.6 (1e-12 for a 0), and not infinity."""
    sure = scored.predictions.clip(1e-12, 1 - 1e-12)
    losses: Floats = -(scored.labels * np.log(sure) + (1 - scored.labels) * np.log1p(-sure))
    return losses


def _squared(scored: Scored) -> Floats:
    return (scored.predictions - scored.labels) ** 2


def _absolute(scored: Scored) -> Floats:
    return np.abs(scored.predictions - scored.labels)


LOSSES: dict[str, Callable[[Scored], Floats]] = {
    "log": _log_loss,
    "squared": _squared,
    "absolute": _absolute,
}

METRICS: dict[str, Callable[[], Metric]] = {
    "auc": StreamingAuc,
    "gauc": GroupedAuc,
    "ne": NormalizedEntropy,
    "calibration": Calibration,
    "mrr": partial(RankingMetric, "mrr"),
    "log_loss": partial(MeanLoss, "log"),
    "squared_loss": partial(MeanLoss, "squared"),
    "absolute_loss": partial(MeanLoss, "absolute"),
    "mae": partial(MeanLoss, "absolute"),
    "rmse": RootMeanSquare,
}
"""The metrics by name: each value makes a new `Metric`.

In addition to these, `recall@10`, `ndcg@10`, `hit_rate@10` and `mrr@10` are names of metrics, with any k.

Examples:
    >>> from monolith import METRICS
    >>> sorted(METRICS)
    ['absolute_loss', 'auc', 'calibration', 'gauc', 'log_loss', 'mae', 'mrr', 'ne', 'rmse', 'squared_loss']
"""


def make_metric(name: str) -> Metric:
    """Return a new metric of a name of `METRICS`, or of a ranking metric with its k, such as ndcg@10."""
    if (ranking := RankingMetric.named(name)) is not None:
        return ranking
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"no metric is called {name!r}; {hint}Choose one of {', '.join(METRICS)}, "
            "or of recall@10, ndcg@10, hit_rate@10 and mrr@10, with any k"
        )
    return METRICS[name]()


# Windows

EventTime = int | Tensor | Sequence[tuple[int, int]] | None
"""Unix seconds of examples: one for all; int64 of shape (n,); or, of several batches, how many examples each
has and their time. Windows of time need it."""


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One window of a stream, and the value of a metric over it."""

    first_event_time: int
    """Unix seconds of the oldest example; 0 where the stream has no event times."""
    event_time: int
    """Unix seconds of the newest example."""
    examples: int
    """Those of weight 0 included."""
    value: float


class Windowed:
    """A metric over one window of a stream after another.

    A window of `n` examples ends with its n-th, wherever that is in a batch. A window of a
    `timedelta` begins at a multiple of it since 1970 and ends when an example of a later one
    comes; an example that is late counts in the window that is open, in `late`, and nowhere else.
    An interval of time without examples gives no row.
    """

    _first: int
    _newest: int
    _examples: int

    def __init__(self, metric: Metric, window: int | timedelta) -> None:
        seconds = window.total_seconds() if isinstance(window, timedelta) else float(window)
        if seconds < 1 or seconds != int(seconds):
            unit = "seconds" if isinstance(window, timedelta) else "examples"
            raise ConfigError(f"window must be a whole number of {unit} of at least 1, got {window}")
        self.metric = metric
        self.window = window
        self._size = int(seconds)
        self._by_time = isinstance(window, timedelta)
        self.reset()

    def reset(self) -> None:
        self.metric.reset()
        self.late = 0
        self._closed: list[WindowRow] = []
        self._last = math.nan
        self._number = -1
        self._open_empty()

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
        event_time: EventTime = None,
    ) -> None:
        """Take in examples; windows that end are read with `take_rows`. See `EventTime`."""
        given = (predictions, labels, weights, groups)
        self.add(Scored.read("windowed", *given), given, event_time)

    def add(self, scored: Scored, given: Sequence[Tensor | None], event_time: EventTime = None) -> None:
        """Take in examples that were read already.

        Args:
            given: What they were read of: a metric that is not ours wants it.
        """
        times, ends = self._runs(event_time, len(scored))
        for number, start, end in self._pieces(times, ends):
            if number > self._number:
                self.close_window()
                self._number = number
            _take(self.metric, scored, given, slice(start, end))
            first, last = np.searchsorted(ends, (start, end - 1), side="right")
            among = times[first : last + 1]
            oldest, newest = int(among.min()), int(among.max())
            self._first = min(self._first, oldest) if self._examples else oldest
            self._newest = max(self._newest, newest)
            self._examples += end - start
            if not self._by_time and self._examples == self._size:
                self.close_window()

    def ends_within(self, examples: int, oldest: int, newest: int) -> bool:
        """Return whether a window ends if so many examples come, of event times between these."""
        if not self._by_time:
            return self._examples + examples >= self._size
        is_open = self._number if self._examples else max(self._number, oldest // self._size)
        return newest // self._size > is_open

    def value(self) -> float:
        """The value over the last window that ended; NaN before the first."""
        return self._last

    def take_rows(self) -> list[WindowRow]:
        """Return the windows that ended since the last call, oldest first."""
        rows, self._closed = self._closed, []
        return rows

    def close_window(self) -> None:
        """End the open window early, as at the end of a stream; one without examples leaves no row."""
        if self._examples:
            self._last = self.metric.value()
            self._closed.append(WindowRow(self._first, self._newest, self._examples, self._last))
        self.metric.reset()
        self._open_empty()

    def state(self) -> dict[str, Any]:
        return {
            "metric": self.metric.state(),
            "window": self._describe(),
            "late": self.late,
            "last": None if math.isnan(self._last) else self._last,
            "number": self._number,
            "first": self._first,
            "newest": self._newest,
            "examples": self._examples,
            "rows": [
                {**asdict(row), "value": None if math.isnan(row.value) else row.value} for row in self._closed
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state.get("window") != self._describe():
            raise RestoreError(
                f"cannot restore a metric of windows of {self._describe()}: "
                f"the state has {state.get('window', 'none')}. Reset the metric, or keep the window."
            )
        rows = [
            WindowRow(**{**row, "value": math.nan if row["value"] is None else row["value"]})
            for row in state["rows"]
        ]
        self.metric.restore(state["metric"])
        self.late = int(state["late"])
        self._last = math.nan if state["last"] is None else float(state["last"])
        self._number = int(state["number"])
        self._first, self._newest = int(state["first"]), int(state["newest"])
        self._examples = int(state["examples"])
        self._closed = rows

    def _describe(self) -> str:
        return f"{self._size} {'seconds' if self._by_time else 'examples'}"

    def _open_empty(self) -> None:
        self._first = self._newest = self._examples = 0

    def _runs(self, event_time: EventTime, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the times of runs of examples of one time each, and where each run ends."""
        if event_time is None:
            if self._by_time:
                raise MetricError("windows of time need the event time of the examples; pass event_time")
            event_time = 0
        if isinstance(event_time, int):
            event_time = [(count, event_time)]
        if isinstance(event_time, Tensor):
            if event_time.shape != (count,) or event_time.is_floating_point():
                raise MetricError(
                    f"event_time must be whole seconds of shape ({count},), "
                    f"got {event_time.dtype} {tuple(event_time.shape)}"
                )
            return event_time.detach().cpu().long().numpy(), np.arange(1, count + 1)
        runs = np.array(event_time, np.int64).reshape(-1, 2)
        return runs[:, 1], runs[:, 0].cumsum()

    def _pieces(self, times: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Return the examples that belong to one window each: its number, where they start and end."""
        count = int(ends[-1]) if len(ends) else 0
        if not count:
            return []
        if not self._by_time:
            borders = list(range(self._size - self._examples, count, self._size))
            return [(-1, *run) for run in zip([0, *borders], [*borders, count], strict=True)]
        own = times // self._size
        numbers = np.maximum.accumulate(own.clip(min=self._number))
        self.late += int(np.diff(ends, prepend=0)[own < numbers].sum())
        last = np.append(np.flatnonzero(np.diff(numbers)), len(numbers) - 1)
        borders = ends[last].tolist()
        return list(zip(numbers[last].tolist(), [0, *borders[:-1]], borders, strict=True))


# Sets


class MetricSet:
    """Named metrics for each head of a model.

    Heads without metrics may be predicted; a head that has some must be.

    Examples:
        >>> import torch
        >>> from monolith import MetricSet
        >>> metrics = MetricSet.named({"click": ("auc", "calibration"), "like": ("mae",)})
        >>> predictions = {"click": torch.tensor([0.9, 0.1]), "like": torch.tensor([0.5, 0.5])}
        >>> labels = {"click": torch.tensor([1.0, 0.0]), "like": torch.tensor([1.0, 0.0])}
        >>> metrics.update(predictions, labels)
        >>> {name: round(value, 3) for name, value in metrics.values().items()}
        {'click/auc': 1.0, 'click/calibration': 1.0, 'like/mae': 0.5}
    """

    def __init__(self, heads: Mapping[str, Mapping[str, Metric]]) -> None:
        self.heads = {head: dict(metrics) for head, metrics in heads.items()}

    @classmethod
    def named(cls, heads: Mapping[str, Sequence[str]], *, window: int | timedelta | None = None) -> MetricSet:
        """Make metrics by their names in `METRICS`, over windows if one is given."""

        def make(name: str) -> Metric:
            metric = make_metric(name)
            return metric if window is None else Windowed(metric, window)

        return cls({head: {name: make(name) for name in names} for head, names in heads.items()})

    def update(
        self,
        predictions: Mapping[str, Tensor],
        labels: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        groups: Tensor | None = None,
        event_time: EventTime = None,
    ) -> None:
        """Take in examples: predictions, labels and, where there are any, weights by head."""
        for what, given in (("predictions", predictions), ("labels", labels)):
            missing = [head for head, metrics in self.heads.items() if metrics and head not in given]
            if missing:
                raise MetricError(
                    f"metrics of {', '.join(missing)} need its {what}; the batch has those of "
                    f"{', '.join(given) or 'nothing'}"
                )
        for head, metrics in self.heads.items():
            if not metrics:
                continue
            one = (predictions[head], labels[head], (weights or {}).get(head), groups)
            scored = Scored.read(head, *one)
            for metric in metrics.values():
                if isinstance(metric, Windowed):
                    metric.add(scored, one, event_time)
                else:
                    _take(metric, scored, one, slice(0, len(scored)))

    def ends_within(self, examples: int, oldest: int, newest: int) -> bool:
        """Return whether a window ends if so many examples come, of event times between these."""
        windows = (metric for metric in self._named().values() if isinstance(metric, Windowed))
        return any(one.ends_within(examples, oldest, newest) for one in windows)

    def values(self) -> dict[str, float]:
        """Return the value of each metric, as "head/metric"."""
        return {name: metric.value() for name, metric in self._named().items()}

    def take_rows(self) -> dict[str, list[WindowRow]]:
        """Return the windows that ended since the last call, of the metrics that have such."""
        found = {
            name: metric.take_rows() for name, metric in self._named().items() if isinstance(metric, Windowed)
        }
        return {name: rows for name, rows in found.items() if rows}

    def close_windows(self) -> None:
        """End all open windows early, as at the end of a stream."""
        for metric in self._named().values():
            if isinstance(metric, Windowed):
                metric.close_window()

    def reset(self) -> None:
        for metric in self._named().values():
            metric.reset()

    def state(self) -> dict[str, Any]:
        return {name: metric.state() for name, metric in self._named().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. A metric that is new begins empty; the state of one that is gone is let go."""
        for name, metric in self._named().items():
            if name in state:
                metric.restore(state[name])
            else:
                metric.reset()

    def _named(self) -> dict[str, Metric]:
        return {f"{head}/{name}": m for head, metrics in self.heads.items() for name, m in metrics.items()}


def _take(metric: Metric, scored: Scored, given: Sequence[Tensor | None], part: slice) -> None:
    """Have a metric take in some examples: as they were checked, or as they were given if it is not ours."""
    if isinstance(metric, ScoredMetric):
        metric.add(scored[part])
    else:
        predictions, labels, weights, groups = (None if one is None else one[part] for one in given)
        assert predictions is not None
        assert labels is not None
        metric.update(predictions, labels, weights, groups)
