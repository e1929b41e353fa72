"""Normalisation: activations brought to zero mean and unit variance, over the batch or over a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_last_axis, check_positive
from monolith.nn.layers.kernels import WeightInit


class BatchNorm(nn.Module):
    """Normalises each feature over the batch in training, and by moving statistics afterwards.

    The moving statistics are ordinary buffers, updated on each call in training mode.
    A batch of one row has no variance and comes out as `beta`, rather than as an error
    on the last, short batch of an epoch.

    Args:
        features: Width of the last axis; all axes before it count as batch.
        momentum: How much of the moving statistics a batch leaves in place: 0.99 keeps
            99 % of the old. (torch counts the other way round.)
        scale: Multiply by a trainable `gamma`.
        center: Add a trainable `beta`.
        use_global_stats: Normalise by the moving statistics in training too, so that a
            row's output does not depend on its neighbours. They are still updated, after use.
    """

    moving_mean: Tensor
    moving_variance: Tensor
    gamma: nn.Parameter | None
    beta: nn.Parameter | None

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-6,
        scale: bool = True,
        center: bool = True,
        use_global_stats: bool = False,
    ) -> None:
        super().__init__()
        check_positive("BatchNorm", features=features)
        if not 0 <= momentum < 1:
            raise LayerArgumentError(f"BatchNorm: momentum must be at least 0 and below 1, got {momentum}")
        if epsilon <= 0:
            raise LayerArgumentError(f"BatchNorm: epsilon must be above 0, got {epsilon}")
        self.features = features
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_global_stats = use_global_stats
        self.register_parameter("gamma", nn.Parameter(torch.ones(features)) if scale else None)
        self.register_parameter("beta", nn.Parameter(torch.zeros(features)) if center else None)
        self.register_buffer("moving_mean", torch.zeros(features))
        self.register_buffer("moving_variance", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("BatchNorm", "x", x, self.features)
        if not self.training or x.numel() == 0:
            return self._normalize(x, self.moving_mean, self.moving_variance)
        axes = tuple(range(x.ndim - 1))
        variance, mean = torch.var_mean(x, dim=axes, correction=0)
        if self.use_global_stats:
            # Clones: the update below must not change what backward reads.
            out = self._normalize(x, self.moving_mean.clone(), self.moving_variance.clone())
        else:
            out = self._normalize(x, mean, variance)
        with torch.no_grad():
            self.moving_mean.lerp_(mean.to(self.moving_mean.dtype), 1 - self.momentum)
            self.moving_variance.lerp_(variance.to(self.moving_variance.dtype), 1 - self.momentum)
        return out

    def _normalize(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = (variance + self.epsilon).rsqrt()
        if self.gamma is not None:
            scale = scale * self.gamma
        centered = x - mean
        return centered * scale if self.beta is None else torch.addcmul(self.beta, centered, scale)

    def extra_repr(self) -> str:
        return f"{self.features}, momentum={self.momentum}, epsilon={self.epsilon}"


class LayerNorm(nn.Module):
    """Normalises the last axis of each row by its own mean and variance.

    Args:
        gamma_init: Fills the scale. No default: ones is usual, while zeros lets a
            residual branch start silent, and which is meant should be said.
    """

    def __init__(self, features: int, gamma_init: WeightInit, *, epsilon: float = 1e-6) -> None:
        super().__init__()
        check_positive("LayerNorm", features=features)
        if epsilon <= 0:
            raise LayerArgumentError(f"LayerNorm: epsilon must be above 0, got {epsilon}")
        self.epsilon = epsilon
        self.gamma = nn.Parameter(torch.empty(features))
        gamma_init(self.gamma)
        self.beta = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("LayerNorm", "x", x, len(self.gamma))
        return functional.layer_norm(x, self.gamma.shape, self.gamma, self.beta, self.epsilon)
