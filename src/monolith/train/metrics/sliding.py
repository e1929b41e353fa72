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
BLOCK = 1024
"""Examples of a block, at the most."""
_PARTS = 64
"""Blocks of a window, at the least."""
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

    @classmethod
    def joined(cls, parts: Sequence[KeptExamples]) -> KeptExamples:
        """Lay batches that are alike end to end. The event time is the newest of theirs."""
        return cls(
            torch.cat([one.predictions for one in parts]),
            torch.cat([one.labels for one in parts]),
            together([one.weights for one in parts]),
            together([one.groups for one in parts]),
            max(one.event_time for one in parts),
        )

    @property
    def like(self) -> object:
        """Equal for batches whose tensors can be laid end to end."""
        shapes = (self.predictions.shape[1:], self.labels.shape[1:])
        return shapes, self.weights is None, self.groups is None


class SlidingMetrics:
    """The metrics of one head, over the latest examples. Begins empty at every start of a run.

    A window of n examples has at least the latest n, whole batches of them; one of a `timedelta` those of
    that much event time before the newest. It has never more than `MOST`, and the batch that passes it.

    A live stream is trained in batches of a few examples, and the tensors of each take a kilobyte: a window
    of them would grow for an hour, to a hundred megabytes. So batches are joined to blocks, which leave as a
    whole: of a 64th of the window at the most, and of `BLOCK` examples.

        [ block ][ block ][ block ] batch batch batch
          oldest                    └── loose ──────┘
    """

    def __init__(self, names: Sequence[str], window: int | timedelta) -> None:
        self._names = tuple(names)
        self._span = window.total_seconds() if isinstance(window, timedelta) else None
        self._most = MOST if isinstance(window, timedelta) else min(window, MOST)
        self._seen: deque[KeptExamples] = deque()
        self._count = self._newest = 0
        self._block = min(max(self._most // _PARTS, 1), BLOCK)
        self._loose = self._loose_examples = 0
        """The batches at the end that are no block yet, and their examples."""

    def __len__(self) -> int:
        """Return the number of examples in the window."""
        return self._count

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
        if self._loose and self._is_block(self._seen[-self._loose], self._seen[-1], seen):
            if self._loose > 1:
                self._seen.append(KeptExamples.joined([self._seen.pop() for _ in range(self._loose)][::-1]))
            self._loose = self._loose_examples = 0
        self._seen.append(seen)
        self._loose += 1
        self._loose_examples += len(seen)
        self._count += len(seen)
        self._newest = max(self._newest, seen.event_time)
        while len(self._seen) > 1 and self._leaves(self._seen[0]):
            self._count -= len(self._seen.popleft())
        self._loose = min(self._loose, len(self._seen))

    def _is_block(self, first: KeptExamples, last: KeptExamples, seen: KeptExamples) -> bool:
        """Return whether the loose batches, from `first` to `last`, are a block without the next one."""
        late = self._span is not None and seen.event_time - first.event_time >= self._span / _PARTS
        return late or self._loose_examples + len(seen) > self._block or last.like != seen.like

    @property
    def examples(self) -> KeptExamples | None:
        """The examples of the window, laid end to end; None if there is none."""
        return KeptExamples.joined(self._seen) if self._seen else None

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
