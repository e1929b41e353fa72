"""Reduction: how the losses of a batch become one number.

A loss is a mean over the examples, everywhere: dense weights are trained by it as it is, and
rows by its gradient times the size of the batch; see `EmbeddingOptimizer`. Sums are there for
comparison with systems that train on them.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from monolith.nn.layers.arguments import check_choice

Reduction = Literal["mean", "sum"]


def reduced(loss: str, total: Tensor, count: int, reduction: Reduction) -> Tensor:
    """Return the sum of `count` losses as it is, or their mean; the mean of none is 0."""
    check_choice(loss, "reduction", reduction, ("mean", "sum"))
    return total / max(count, 1) if reduction == "mean" else total
