"""Classification: a loss to train on and a prediction to return, from the same logits.

A loss is a mean over the examples: dense weights are trained by it as it is, rows by its gradient times the
size of the batch (see `EmbeddingOptimizer`). Sums exist for comparison with systems that train on them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import check_choice, check_shape
from monolith.nn.layers.selection import correct_logits

Reduction = Literal["mean", "sum"]


def reduced(loss: str, total: Tensor, count: int, reduction: Reduction) -> Tensor:
    """Return the sum of `count` losses as it is, or their mean; the mean of none is 0."""
    check_choice(loss, "reduction", reduction, ("mean", "sum"))
    return total / max(count, 1) if reduction == "mean" else total


class LossAndPred(NamedTuple):
    """What a head returns."""

    loss: Tensor | None
    """None when there was no label, as when predicting."""
    pred: Tensor


def sigmoid_loss_and_pred(  # noqa: PLR0913  keywords that users write; see decision 0065
    logits: Tensor,
    label: Tensor | None,
    *,
    sample_rate: Tensor | float | None = None,
    sample_bias: bool = False,
    instance_weight: Tensor | None = None,
    mask: Tensor | None = None,
    logit_clip_threshold: float | None = None,
    predict_before_correction: bool = True,
    reduction: Reduction = "mean",
) -> LossAndPred:
    """Binary cross entropy on corrected logits, and the probability of a click.

    All tensors have one number per row: shape (batch,) or (batch, 1).

    Args:
        logits: float.
        label: float, 0 to 1; None when only predicting.
        sample_rate, sample_bias: How the rows were sampled; see `correct_logits`.
        instance_weight: float, times which each row's loss counts.
        mask: bool: rows that count at all. A row that does not may hold anything.
        logit_clip_threshold: Keeps the corrected logits, in the loss, to probabilities from
            this to one minus this; above 0 and below 0.5.
        predict_before_correction: Predict from the logits as they are, for rows as they come
            when serving; otherwise from the corrected ones.
        reduction: "mean" divides by all rows of the batch, masked ones too, so that a row of weight 1
            counts the same in every batch. "sum" is what the original does.

    Returns:
        The loss, a scalar, and the predictions, float of shape (batch,).

    Examples:
        >>> import torch
        >>> from monolith import sigmoid_loss_and_pred
        >>> loss, predictions = sigmoid_loss_and_pred(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]))
        >>> loss, predictions
        (tensor(0.4100), tensor([0.5000, 0.8808]))
    """
    head = "sigmoid_loss_and_pred"
    logits = _per_row(head, "logits", logits, logits.numel())
    rows = len(logits)
    if isinstance(sample_rate, Tensor):
        sample_rate = _per_row(head, "sample_rate", sample_rate, rows)
    corrected = correct_logits(logits, sample_rate, sample_bias)
    pred = torch.sigmoid(logits if predict_before_correction else corrected)
    if logit_clip_threshold is not None:
        if not 0 < logit_clip_threshold < 0.5:
            raise LayerArgumentError(
                f"{head}: logit_clip_threshold must be above 0 and below 0.5, got {logit_clip_threshold}"
            )
        bound = math.log((1 - logit_clip_threshold) / logit_clip_threshold)
        corrected = corrected.clamp(-bound, bound)
    if label is None:
        return LossAndPred(None, pred)
    label = _per_row(head, "label", label, rows).to(logits.dtype)
    weight = None if instance_weight is None else _per_row(head, "instance_weight", instance_weight, rows)
    if mask is not None:
        keep = _bool_per_row(head, mask, rows)
        corrected, label = corrected[keep], label[keep]
        weight = None if weight is None else weight[keep]
    loss = functional.binary_cross_entropy_with_logits(corrected, label, weight, reduction="sum")
    return LossAndPred(reduced(head, loss, rows, reduction), pred)


def softmax_loss_and_pred(logits: Tensor, label: Tensor | None) -> LossAndPred:
    """Cross entropy between classes, and the likeliest class.

    Args:
        logits: float of shape (batch, classes).
        label: float of shape (batch, classes), a distribution per row, or int64 of shape
            (batch,), a class per row; None when only predicting.

    Returns:
        The loss of each row, float of shape (batch,), and its class, int64 of shape (batch,).
    """
    check_shape("softmax_loss_and_pred", "logits", logits, None, None)
    pred = logits.argmax(1)
    if label is None:
        return LossAndPred(None, pred)
    if label.is_floating_point():
        check_shape("softmax_loss_and_pred", "label", label, *logits.shape)
        return LossAndPred(-(label * logits.log_softmax(1)).sum(1), pred)
    check_shape("softmax_loss_and_pred", "label", label, logits.shape[0])
    return LossAndPred(functional.cross_entropy(logits, label, reduction="none"), pred)


def _per_row(head: str, name: str, tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape not in {(rows,), (rows, 1)}:
        raise LayerArgumentError(
            f"{head}: {name} must have shape ({rows},) or ({rows}, 1), got {tuple(tensor.shape)}"
        )
    return tensor.reshape(rows)


def _bool_per_row(head: str, mask: Tensor, rows: int) -> Tensor:
    if mask.dtype is not torch.bool:
        raise LayerArgumentError(f"{head}: mask must be bool, true for rows that count, got {mask.dtype}")
    return _per_row(head, "mask", mask, rows)
