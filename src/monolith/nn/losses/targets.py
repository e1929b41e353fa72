"""Targets: what a model's output means for one label, how it is trained and what it predicts.

A model returns one number per example and label, its *output*. For a click that is a logit; for seconds of
watch time it is the number itself, or its logarithm. `Target` keeps the three things that must agree in one
place: the loss in training, the prediction that is served, and the metrics that judge it.

    Target().prediction(logit)                      # a probability, sigmoid(logit)
    Target(loss="log").loss_of(output, seconds)     # squared error of log(1 + seconds)
    Target(loss="log").prediction(output)           # seconds again
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import ConfigError, FeatureError

TargetLoss = Literal["binary", "mse", "huber", "log"]

_LARGEST_LOG = 80.0
"""An output of "log" above this would overflow float32 as a prediction; the loss still sees the output."""


@dataclass(frozen=True, slots=True)
class _Kind:
    loss: Callable[[Tensor, Tensor, float, str], Tensor]
    """(output, label, delta, reduction) -> the mean loss, or one per example ("none")."""
    prediction: Callable[[Tensor], Tensor]
    least: float
    most: float
    """The labels it can be trained on."""
    metrics: tuple[str, ...]


_REGRESSION = ("rmse", "mae", "calibration")
_KINDS: dict[TargetLoss, _Kind] = {
    "binary": _Kind(
        lambda output, label, _, reduction: functional.binary_cross_entropy_with_logits(
            output, label, reduction=reduction
        ),
        torch.sigmoid,
        0.0,
        1.0,
        ("auc", "log_loss", "calibration"),
    ),
    "mse": _Kind(
        lambda output, label, _, reduction: functional.mse_loss(output, label, reduction=reduction),
        lambda output: output,
        -math.inf,
        math.inf,
        _REGRESSION,
    ),
    "huber": _Kind(
        lambda output, label, delta, reduction: functional.huber_loss(
            output, label, reduction=reduction, delta=delta
        ),
        lambda output: output,
        -math.inf,
        math.inf,
        _REGRESSION,
    ),
    "log": _Kind(
        lambda output, label, _, reduction: functional.mse_loss(
            output, torch.log1p(label), reduction=reduction
        ),
        lambda output: torch.expm1(output.clamp(max=_LARGEST_LOG)),
        0.0,
        math.inf,
        _REGRESSION,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """How one label is trained and predicted."""

    loss: TargetLoss = "binary"
    """"binary": the output is a logit, the label 0 or 1 (or a probability). "mse", "huber": the output is the
    number. "log": the output is log(1 + number), for positive numbers with a long tail such as seconds or
    prices."""
    weight: float = 1.0
    """What the loss of this target is multiplied by before the losses of all targets are added."""
    delta: float = 1.0
    """For "huber": errors above it count linearly."""
    optional: bool = False
    """Whether examples may lack the label (NaN): they then do not count for this target."""

    def __post_init__(self) -> None:
        if self.loss not in _KINDS:
            raise ConfigError(f"target: loss must be one of {', '.join(_KINDS)}, got {self.loss!r}")
        if not (0 <= self.weight < math.inf):
            raise ConfigError(f"target: weight must be 0 or more and finite, got {self.weight}")
        if not (0 < self.delta < math.inf):
            raise ConfigError(f"target: delta must be more than 0 and finite, got {self.delta}")

    @property
    def is_probability(self) -> bool:
        """Whether the prediction is a probability; otherwise it is a value on the label's scale."""
        return self.loss == "binary"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that judge it by default."""
        return _KINDS[self.loss].metrics

    def loss_of(self, output: Tensor, label: Tensor) -> Tensor:
        """Return the mean loss over the examples, times `weight`.

        Args:
            output: float of shape (examples,).
            label: float of the same shape. With `optional`, an example without a label is NaN; it adds
                nothing, and the sum is still divided by all examples, so that an example counts the same in
                every batch. A batch without any label has a loss of NaN.
        """
        each = _KINDS[self.loss].loss
        if not self.optional:
            # The mean of torch itself: other sums differ in the last bit, of which Adam's first steps make
            # whole steps, and an older run would not resume as it was.
            return each(output, label, self.delta, "mean") * self.weight
        there = ~label.isnan()
        # The label is replaced before the loss, not after: NaN times 0 would put NaN into the gradient.
        losses = each(output, torch.where(there, label, 0.0), self.delta, "none")
        nothing = torch.where(there.any(), 0.0, math.nan)
        return torch.where(there, losses, 0.0).mean() * self.weight + nothing

    def prediction(self, output: Tensor) -> Tensor:
        """Return what is served: a probability, or a value on the label's scale."""
        return _KINDS[self.loss].prediction(output)

    def check(self, name: str, label: Tensor) -> None:
        """Refuse labels that this loss cannot be trained on.

        Args:
            name: The label, for the message.
            label: float, on the CPU; NaN is no label and is not looked at.

        Raises:
            FeatureError: Names the label and one of its values, and says which loss to choose.
        """
        kind = _KINDS[self.loss]
        low, high = (float(one) for one in torch.aminmax(label)) if len(label) else (0.0, 0.0)
        if math.isnan(low):  # aminmax of a tensor with a NaN is NaN
            there = label[~label.isnan()]
            low, high = (float(one) for one in torch.aminmax(there)) if len(there) else (0.0, 0.0)
        if low < kind.least or high > kind.most:
            value = low if low < kind.least else high
            raise FeatureError(f"label {name!r} is {value:g}: {self.hint(name)}")

    def hint(self, name: str) -> str:
        """Return which labels this loss takes, and what to set for others."""
        if self.loss == "binary":
            return (
                "a classification label is 0 or 1. For a number, such as seconds, set "
                f'labels.{name}.loss to "mse", "huber" or "log"; to make a class of a number, '
                f"set labels.{name}.at_least"
            )
        return 'loss "log" takes numbers of 0 or more. Choose "mse" or "huber" for others'
