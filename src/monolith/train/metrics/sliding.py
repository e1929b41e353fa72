"""Metrics of the examples seen last, for live displays.

Windows that follow each other are compared with each other; but the last one that ended may be long ago. Here
the window slides: the latest examples are kept, and a metric is computed of them on request.

    closed windows   [-------][-------][-----      what a report and a checkpoint have
    sliding                       [-------]        what the live line and TensorBoard show
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from monolith.train.metrics.metric_set import MetricSet

MOST = 1_000_000
"""Examples that are kept at most, also of a window of time."""
_HEAD = "head"


class KeptExamples(NamedTuple):
    """A head's examples of a batch, kept as they were predicted, in host memory."""

    predictions: Tensor
    labels: Tensor
    weights: Tensor | None
    groups: Tensor | None
    event_time: int

    @classmethod
    def of(
        cls,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
        event_time: int = 0,
    ) -> KeptExamples:
        """Keep a batch: no graph of autograd, and copies of what a reader may use for another batch."""
        return cls(
            _copy(predictions),
            _copy(labels),
            None if weights is None else _copy(weights),
            None if groups is None else _copy(groups),
            event_time,
        )

    def __len__(self) -> int:
        return len(self.predictions)

    @property
    def like(self) -> object:
        """Equal for batches whose tensors can be laid end to end."""
        shapes = (self.predictions.shape[1:], self.labels.shape[1:])
        return shapes, self.weights is None, self.groups is None


class SlidingMetrics:
    """The metrics of one head, over the latest examples. Begins empty at every start of a run.

    A window of n examples has at least the latest n, whole batches of them; one of a `timedelta` those of
    that much event time before the newest. It has never more than `MOST`, and the batch that passes it.
    """

    def __init__(self, names: Sequence[str], window: int | timedelta) -> None:
        self._names = tuple(names)
        self._span = window.total_seconds() if isinstance(window, timedelta) else None
        self._most = MOST if isinstance(window, timedelta) else min(window, MOST)
        self._seen: deque[KeptExamples] = deque()
        self._count = self._newest = 0

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
        event_time: int = 0,
    ) -> None:
        """Take in a batch, and drop the batches that have left the window."""
        self.add(KeptExamples.of(predictions, labels, weights, groups, event_time))

    def add(self, seen: KeptExamples) -> None:
        """Take in a batch that is kept already."""
        if not self._names or not len(seen):
            return
        self._seen.append(seen)
        self._count += len(seen)
        self._newest = max(self._newest, seen.event_time)
        while len(self._seen) > 1 and self._leaves(self._seen[0]):
            self._count -= len(self._seen.popleft())

    def copy(self) -> SlidingMetrics:
        """Return the window as it is now, for another thread."""
        found = copy(self)
        found._seen = self._seen.copy()
        return found

    def _leaves(self, oldest: KeptExamples) -> bool:
        if self._count - len(oldest) >= self._most:
            return True
        return self._span is not None and oldest.event_time <= self._newest - self._span

    def values(self) -> dict[str, float]:
        """Return the value of each metric; NaN where there is nothing to say."""
        # One set, which checks and converts the examples once for all.
        metrics = MetricSet.named({_HEAD: self._names})
        if self._seen:
            weights = together([one.weights for one in self._seen])
            metrics.update(
                {_HEAD: torch.cat([one.predictions for one in self._seen])},
                {_HEAD: torch.cat([one.labels for one in self._seen])},
                {}
                if (weights := together([one.weights for one in self._seen])) is None
                else {_HEAD: weights},
                together([one.groups for one in self._seen]),
            )
        return {name.removeprefix(f"{_HEAD}/"): value for name, value in metrics.values().items()}


def live_values(heads: Mapping[str, SlidingMetrics]) -> dict[str, float]:
    """Return the values of all heads, as "head/metric"."""
    return {f"{head}/{name}": value for head, one in heads.items() for name, value in one.values().items()}


def _copy(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)


def together(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Lay parts end to end; None if one of them is None."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) == len(parts) else None
