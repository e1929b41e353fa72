"""Kernels: weight matrices, with their scale kept apart from their direction if wanted.

A kernel of shape (in, out) is used as `x @ kernel`. With its columns normalised, a step
of the optimizer cannot change how large an output is by accident, only through the norm,
a parameter of its own that starts at what the columns measured. Deep towers on
embeddings whose scale drifts train more steadily so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from monolith.nn.layers.arguments import check_positive

WeightInit = Callable[[Tensor], object]
"""Fills a tensor in place; the functions of `torch.nn.init` that end in `_` are such."""

NORM_EPSILON = 1e-6
"""The least squared norm a column is divided by, so that a column of zeros stays zero."""


def glorot_uniform(tensor: Tensor) -> Tensor:
    """Fill with U(-b, b), `b^2 = 6 / (in + out)`; (in, out) are the last two axes, earlier ones a stack."""
    bound = math.sqrt(6 / (tensor.shape[-2] + tensor.shape[-1]))
    return nn.init.uniform_(tensor, -bound, bound)


def normalize_columns(weight: Tensor, epsilon: float = NORM_EPSILON) -> Tensor:
    """Return `weight` of shape (..., in, out) with columns of length 1."""
    return weight * weight.square().sum(-2, keepdim=True).clamp(min=epsilon).rsqrt()


class Kernel(nn.Module):
    """A weight of shape (in, out), or (count, in, out); calling it returns the weight to multiply with.

    Args:
        norm: Normalise the columns.
        norm_trainable: And multiply each by a parameter of its own.
        count: How many to keep in one stack; None for a single one without that axis.
    """

    norm: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: bool = False,
        norm_trainable: bool = True,
        init: WeightInit = glorot_uniform,
        count: int | None = None,
    ) -> None:
        super().__init__()
        check_positive("Kernel", in_features=in_features, out_features=out_features)
        stack = () if count is None else (count,)
        self.weight = nn.Parameter(torch.empty(*stack, in_features, out_features))
        init(self.weight)
        self.normalized = norm
        if norm and norm_trainable:
            self.norm = nn.Parameter(self.weight.detach().norm(dim=-2))
        else:
            self.register_parameter("norm", None)

    def forward(self) -> Tensor:
        if not self.normalized:
            return self.weight
        weight = normalize_columns(self.weight)
        return weight if self.norm is None else weight * self.norm.unsqueeze(-2)

    def extra_repr(self) -> str:
        kind = (
            "" if not self.normalized else ", normalized" + ("" if self.norm is None else ", trainable norm")
        )
        return f"{tuple(self.weight.shape)}{kind}"
