"""Selection: how much each feature, or each part of its embedding, deserves to count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_positive, check_shape
from monolith.nn.layers.dense import MLP
from monolith.nn.layers.kernels import WeightInit, glorot_uniform


class SeNet(nn.Module):
    """Squeeze and excite: a row's features, each seen as its mean, decide how much each counts.

    Args:
        num_features: The n features of a row.
        cmp_dim: Width of the hidden layer (relu) between the n means and the n weights (sigmoid).
    """

    def __init__(self, num_features: int, cmp_dim: int, *, kernel_init: WeightInit = glorot_uniform) -> None:
        super().__init__()
        check_positive("SeNet", num_features=num_features, cmp_dim=cmp_dim)
        self.num_features = num_features
        self.excite = MLP(
            num_features, (cmp_dim, num_features), activations=("relu", "sigmoid"), kernel_init=kernel_init
        )

    @overload
    def forward(self, features: Tensor) -> Tensor: ...

    @overload
    def forward(self, features: Sequence[Tensor]) -> list[Tensor]: ...

    def forward(self, features: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Weight features, stacked as (batch, n, dim) or as a list of n tensors (batch, dim of its own).

        Returns:
            The same features, weighted, in the form they came in.
        """
        if isinstance(features, Tensor):
            check_shape("SeNet", "features", features, None, self.num_features, None)
            weights: Tensor = self.excite(features.mean(-1))
            return features * weights.unsqueeze(-1)
        if len(features) != self.num_features:
            raise LayerArgumentError(
                f"SeNet: features must be {self.num_features} tensors, got {len(features)}"
            )
        for feature in features:
            check_shape("SeNet", "each feature", feature, None, None)
        weights = self.excite(torch.stack([feature.mean(-1) for feature in features], 1))
        return [feature * weights[:, i : i + 1] for i, feature in enumerate(features)]


class IRazor(nn.Module):
    """Learns how wide each feature's embedding needs to be.

    Each feature has one logit per width of `nas_space`. Their softmax, sharp at a low
    temperature, says how likely the feature keeps only its first so many floats, and
    every float is scaled by the probability that it is kept. After the search, the
    likeliest width is the one to use.

    Args:
        nas_space: The widths to choose from, rising; 0 drops the feature, the last is the full width.
        feature_weights: What one float of each feature costs, in `auxiliary_loss`: one
            number for all features, or one each. None makes width free.
    """

    keeps: Tensor
    widths: Tensor
    prices: Tensor | None

    def __init__(
        self,
        num_features: int,
        nas_space: Sequence[int],
        *,
        temperature: float = 0.05,
        feature_weights: float | Sequence[float] | None = None,
        logit_init: WeightInit = nn.init.zeros_,
    ) -> None:
        super().__init__()
        check_positive("IRazor", num_features=num_features)
        space = tuple(nas_space)
        if len(space) < 2 or space[0] < 0 or any(a >= b for a, b in pairwise(space)):
            raise LayerArgumentError(
                f"IRazor: nas_space must be two or more rising widths from 0 on, got {list(space)}"
            )
        if temperature <= 0:
            raise LayerArgumentError(f"IRazor: temperature must be above 0, got {temperature}")
        self.nas_space = space
        self.temperature = temperature
        self.logits = nn.Parameter(torch.empty(num_features, len(space)))
        logit_init(self.logits)
        widths = torch.tensor(space, dtype=torch.float32)
        self.register_buffer("widths", widths, persistent=False)
        self.register_buffer(
            "keeps", (torch.arange(space[-1]) < widths.unsqueeze(1)).to(torch.float32), persistent=False
        )
        prices = None
        if feature_weights is not None:
            prices = torch.as_tensor(feature_weights, dtype=torch.float32)
            if prices.shape not in {(), (num_features,)}:
                raise LayerArgumentError(
                    f"IRazor: feature_weights must be one number or {num_features}, got {prices.numel()}"
                )
        self.register_buffer("prices", prices, persistent=False)

    def choice_weights(self) -> Tensor:
        """Return how likely each width is for each feature: float of shape (n, widths), rows sum to 1."""
        return (self.logits / self.temperature).softmax(-1)

    def auxiliary_loss(self) -> Tensor:
        """Return the expected width of each feature times its weight, summed: add it to the loss."""
        if self.prices is None:
            return self.logits.new_zeros(())
        return (self.prices * (self.choice_weights() @ self.widths)).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Scale (batch, n, full width) by the probability of each float to be kept."""
        check_shape("IRazor", "x", x, None, self.logits.shape[0], self.nas_space[-1])
        return x * (self.choice_weights() @ self.keeps)
