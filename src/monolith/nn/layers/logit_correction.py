"""Logit correction: training on a sample while predicting for the whole.

If negatives enter training at some rate, the model learns odds that are too high by its
inverse. Adding `-log(rate)` to the logit for the loss alone lets the uncorrected logit
learn the true odds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.activations import Activation, make_activation


def correct_logits(
    logits: Tensor, sample_rate: Tensor | float | None = None, sample_bias: bool = False
) -> Tensor:
    """Return the logits that the loss should see.

    Args:
        logits: float of any shape.
        sample_rate: How likely each row was to be kept, above 0: one number, or a tensor that
            broadcasts to the logits. Adds `-log(rate)`.
        sample_bias: Replace the logit by `log sigmoid(logit)`, for rows that were drawn by
            the model's own prediction.
    """
    corrected = functional.logsigmoid(logits) if sample_bias else logits
    if sample_rate is None:
        return corrected
    if isinstance(sample_rate, Tensor):
        return corrected - torch.log(sample_rate)
    if not sample_rate > 0:
        raise LayerArgumentError(f"logit correction: sample_rate must be above 0, got {sample_rate}")
    return corrected - math.log(sample_rate)


class LogitCorrection(nn.Module):
    """`correct_logits` as a layer, with an activation after it if wanted."""

    def __init__(self, *, sample_bias: bool = False, activation: Activation = None) -> None:
        super().__init__()
        self.sample_bias = sample_bias
        self.activation = make_activation(activation, 1)

    def forward(self, logits: Tensor, sample_rate: Tensor | float | None = None) -> Tensor:
        corrected: Tensor = self.activation(correct_logits(logits, sample_rate, self.sample_bias))
        return corrected
