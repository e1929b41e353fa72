"""Scored examples: predictions with their labels, as every metric takes them.

One place decides what a metric may be given, so that no two of them disagree on it. A
prediction that is NaN or infinite is an error: it has no rank and no loss, and leaving
it out would make a model that diverged look like a good one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monolith.errors import MetricError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Examples of weight above 0; all arrays have shape (n,)."""

    predictions: Floats
    labels: Floats
    weights: Floats
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.predictions)

    @classmethod
    def read(
        cls,
        metric: str,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Scored:
        """Check the tensors a metric was given, and copy them to the CPU.

        Args:
            predictions: Of shape (n,) or (n, 1), as are the other tensors.
            weights: Not negative; None for 1 each. An example of weight 0 is left out before anything else
                is looked at, so that a missing label can be masked.
            groups: Whole numbers, such as ids of users.

        Raises:
            MetricError: A shape does not fit, or a number is not finite.
        """
        predicted = _column(metric, "predictions", predictions, None)
        labelled = _column(metric, "labels", labels, len(predicted))
        grouped = None
        if groups is not None:
            if groups.is_floating_point():
                raise MetricError(f"{metric}: groups must be whole numbers, got {groups.dtype}")
            grouped = _flat(metric, "groups", groups, len(predicted)).numpy().astype(np.int64)
        if weights is None:
            weighed = np.ones(len(predicted))
        else:
            weighed = _column(metric, "weights", weights, len(predicted))
            if not np.isfinite(weighed).all() or (weighed < 0).any():
                raise MetricError(f"{metric}: weights must be finite and not negative")
            keep = weighed > 0
            predicted, labelled, weighed = predicted[keep], labelled[keep], weighed[keep]
            grouped = None if grouped is None else grouped[keep]
        for name, column in (("predictions", predicted), ("labels", labelled)):
            bad = int((~np.isfinite(column)).sum())
            if bad:
                raise MetricError(
                    f"{metric}: {bad} of {len(column)} {name} are NaN or infinite. "
                    + ("Did training diverge?" if name == "predictions" else "Give those examples weight 0.")
                )
        return cls(predicted, labelled, weighed, grouped)

    def require_classes(self, metric: str) -> None:
        """Refuse labels other than 0 and 1."""
        odd = self.labels[~np.isin(self.labels, (0.0, 1.0))]
        if len(odd):
            raise MetricError(
                f"{metric}: labels must be 0 or 1, and {len(odd):,} of {len(self.labels):,} in this batch "
                f"are not: one is {odd[0]:g}. Make them 0 and 1 in the data or by a map of the pipeline; or "
                f"leave {metric} out of the task's metrics()."
            )

    def require_probabilities(self, metric: str) -> None:
        """Refuse predictions or labels that are not from 0 to 1."""
        for name, column in (("predictions", self.predictions), ("labels", self.labels)):
            if len(column) and not (column.min() >= 0 and column.max() <= 1):
                hint = "; are these logits?" if name == "predictions" else ""
                raise MetricError(
                    f"{metric}: {name} must be from 0 to 1, got {column.min():g} to {column.max():g}{hint}"
                )


def _column(metric: str, name: str, tensor: Tensor, length: int | None) -> Floats:
    return _flat(metric, name, tensor, length).double().numpy()


def _flat(metric: str, name: str, tensor: Tensor, length: int | None) -> Tensor:
    flat = tensor.detach().cpu()
    if flat.ndim == 2 and flat.shape[1] == 1:
        flat = flat.squeeze(1)
    if flat.ndim != 1 or (length is not None and len(flat) != length):
        wanted = "(n,) or (n, 1)" if length is None else f"({length},)"
        raise MetricError(f"{metric}: {name} must have shape {wanted}, got {tuple(tensor.shape)}")
    return flat
