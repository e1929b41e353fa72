"""Scored examples: predictions with their labels, as every metric takes them.

One place decides what a metric may be given, so that no two of them disagree on it. A
prediction that is NaN or infinite is an error: it has no rank and no loss, and leaving
it out would make a model that diverged look like a good one.

Examples are looked at once for all metrics of a head, as arrays of numpy in host memory: numpy sorts several
times as fast as torch, and does not divide small work among threads that are busy. Predictions of a GPU are
copied there first, which takes less time than to launch one metric on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import MetricError

Floats = NDArray[np.float64]


class _Extremes(NamedTuple):
    """What a check needs to know of all examples, on the host; NaN if one is NaN."""

    odd_labels: float = 0.0
    """How many labels are neither 0 nor 1."""
    least_prediction: float = 0.0
    most_prediction: float = 0.0
    least_label: float = 0.0
    most_label: float = 0.0
    least_weight: float = 1.0
    most_weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Examples that a metric can take: all that count are finite. `scored[a:b]` are some of them.

    An example of weight 0 is there with a prediction and a label of 0: it adds nothing to a sum.

    Shapes: all arrays are (n,).
    """

    predictions: Floats
    labels: Floats
    weights: Floats
    groups: NDArray[np.int64] | None
    weighed: bool
    """Whether weights were given: otherwise all are 1."""
    _extremes: _Extremes
    """Of the examples that were read, of which these may be some."""

    def __len__(self) -> int:
        return len(self.predictions)

    def __getitem__(self, part: slice) -> Scored:
        """Return some of the examples, without a copy."""
        if part == slice(0, len(self)):
            return self
        groups = None if self.groups is None else self.groups[part]
        predictions, labels, weights = self.predictions[part], self.labels[part], self.weights[part]
        return Scored(predictions, labels, weights, groups, self.weighed, self._extremes)

    @classmethod
    def read(
        cls,
        metric: str,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Scored:
        """Check the tensors a metric was given. Waits for the device of one that is not in host memory.

        Args:
            predictions: Of shape (n,) or (n, 1), as are the other tensors.
            weights: Not negative; None for 1 each. An example of weight 0 is left out before anything else
                is looked at, so that a missing label can be masked.
            groups: Whole numbers, such as ids of users.

        Raises:
            MetricError: A shape does not fit, or a number is not finite.
        """
        predicted = _doubles(_flat(metric, "predictions", predictions, None))
        count = len(predicted)
        labelled = _doubles(_flat(metric, "labels", labels, count))
        grouped = None
        if groups is not None:
            if groups.is_floating_point():
                raise MetricError(f"{metric}: groups must be whole numbers, got {groups.dtype}")
            grouped = _flat(metric, "groups", groups, count).cpu().long().numpy()
        if weights is None:
            weight = np.ones_like(predicted)
        else:
            weight = _doubles(_flat(metric, "weights", weights, count))
            counts = weight != 0
            predicted, labelled = np.where(counts, predicted, 0.0), np.where(counts, labelled, 0.0)
        seen = _extremes(predicted, labelled, None if weights is None else weight)
        scored = cls(predicted, labelled, weight, grouped, weights is not None, seen)
        scored._check(metric)
        return scored

    def _check(self, metric: str) -> None:
        # Comparisons with NaN are false. The counts that a message needs are not worth computing before.
        seen, most = self._extremes, np.finfo(np.float64).max
        if not (seen.least_weight >= 0 and seen.most_weight <= most):
            raise MetricError(f"{metric}: weights must be finite and not negative")
        for name, column, low, high in (
            ("predictions", self.predictions, seen.least_prediction, seen.most_prediction),
            ("labels", self.labels, seen.least_label, seen.most_label),
        ):
            if not (low >= -most and high <= most):
                bad, of = int((~np.isfinite(column)).sum()), int((self.weights > 0).sum())
                raise MetricError(
                    f"{metric}: {bad} of {of} {name} are NaN or infinite. "
                    + ("Did training diverge?" if name == "predictions" else "Give those examples weight 0.")
                )

    @property
    def least_label(self) -> float:
        """The least label of the examples that were read."""
        return self._extremes.least_label

    def require_classes(self, metric: str) -> None:
        """Refuse labels other than 0 and 1, of any of the examples that were read."""
        if self._extremes.odd_labels:
            odd = self.labels[(self.labels != 0) & (self.labels != 1)]
            one = f": one is {float(odd[0]):g}" if len(odd) else ""
            raise MetricError(
                f"{metric}: labels must be 0 or 1, and {self._extremes.odd_labels:,.0f} are not{one}. Make "
                f"them 0 and 1 in the data or by a map of the pipeline; or leave {metric} out of the task's "
                "metrics()."
            )

    def require_probabilities(self, metric: str) -> None:
        """Refuse predictions or labels that are not from 0 to 1, of any of the examples that were read."""
        seen = self._extremes
        for name, low, high in (
            ("predictions", seen.least_prediction, seen.most_prediction),
            ("labels", seen.least_label, seen.most_label),
        ):
            if low < 0 or high > 1:
                hint = "; are these logits?" if name == "predictions" else ""
                raise MetricError(f"{metric}: {name} must be from 0 to 1, got {low:g} to {high:g}{hint}")


class ScoredMetric(ABC):
    """A `Metric` that can also take examples that were checked already, together with other metrics."""

    name: str

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Take in examples; see `Metric.update`."""
        self.add(Scored.read(self.name, predictions, labels, weights, groups))

    @abstractmethod
    def add(self, scored: Scored) -> None:
        """Take in examples that were read.

        Raises:
            MetricError: They make no sense for this metric. Nothing was taken in.
        """


def _extremes(predictions: Floats, labels: Floats, weights: Floats | None) -> _Extremes:
    if not len(predictions):
        return _Extremes()
    columns = [predictions, labels] if weights is None else [predictions, labels, weights]
    odd = ((labels != 0) & (labels != 1)).sum()
    return _Extremes(*map(float, [odd, *(number for one in columns for number in (one.min(), one.max()))]))


def _doubles(tensor: Tensor) -> Floats:
    # A GPU copies its floats and the host widens them: half the bytes cross.
    return tensor.cpu().double().numpy()


def _flat(metric: str, name: str, tensor: Tensor, length: int | None) -> Tensor:
    flat = tensor.detach()
    if flat.ndim == 2 and flat.shape[1] == 1:
        flat = flat.squeeze(1)
    if flat.ndim != 1 or (length is not None and len(flat) != length):
        wanted = "(n,) or (n, 1)" if length is None else f"({length},)"
        raise MetricError(f"{metric}: {name} must have shape {wanted}, got {tuple(tensor.shape)}")
    return flat
