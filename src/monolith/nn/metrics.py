"""Metrics: how good predictions are, apart from what a model was trained to make small."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import check_shape


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve: how often a positive outranks a negative, a tie counting half.

    Exact, from the ranks of all scores. Costs a sort of n numbers, on the device of `scores`.

    Args:
        scores: Of shape (n,): probabilities or logits, since only their order matters.
        labels: Of shape (n,): 0 or 1, or bool.

    Returns:
        From 0 to 1; 0.5 is chance. NaN where all labels are alike, since then there is nothing to rank.

    Raises:
        LayerArgumentError: A label is neither 0 nor 1, or a score is NaN, which has no rank.

    Examples:
        >>> import torch
        >>> from monolith import auc
        >>> auc(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([1, 0, 0]))  # the click outranks both
        1.0
        >>> auc(torch.tensor([0.5, 0.5]), torch.tensor([1, 0]))
        0.5
    """
    check_shape("auc", "scores", scores, None)
    check_shape("auc", "labels", labels, len(scores))
    scores = scores.detach()
    if scores.isnan().any():
        raise LayerArgumentError("auc: scores hold NaN, which has no rank; did training diverge?")
    positive = labels.detach().to(scores.device) == 1
    if not (positive | (labels.to(scores.device) == 0)).all():
        raise LayerArgumentError("auc: labels must be 0 or 1")
    positives = int(positive.sum())
    negatives = len(scores) - positives
    if not positives or not negatives:
        return math.nan
    # Equal scores share the middle of the ranks they take up together.
    _, which, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0)
    twice_the_middle = 2 * last - sizes + 1
    twice_the_sum = int(twice_the_middle[which[positive]].sum())
    return (twice_the_sum / 2 - positives * (positives + 1) / 2) / (positives * negatives)
