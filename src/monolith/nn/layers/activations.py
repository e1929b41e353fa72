"""Activations: the bends between linear layers, chosen by name.

Names and constants are those of Keras, since configs written for it should mean the
same here: a leaky relu leaks 0.3, a hard sigmoid rises by 0.2, and a prelu has one
slope per feature, starting at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_choice, check_last_axis, check_positive

Activation = str | Callable[[Tensor], Tensor] | None
"""A name of `ACTIVATIONS`, any function or module from tensor to tensor, or None for linear."""


class Elementwise(nn.Module):
    """Applies a function without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self._function = function
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)

    def extra_repr(self) -> str:
        return self._name


class PReLU(nn.Module):
    """Relu with a trainable slope below zero, one per feature of the last axis, starting at 0."""

    def __init__(self, features: int) -> None:
        super().__init__()
        check_positive("PReLU", features=features)
        self.slope = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("PReLU", "x", x, len(self.slope))
        return torch.where(x > 0, x, self.slope * x)


class MonitoredReLU(nn.Module):
    """Relu that remembers how often each unit was silent, to find units that died.

    Args:
        features: Width of the last axis.
        decay: How much of the moving average each training batch replaces.
    """

    silent_share: Tensor

    def __init__(self, features: int, decay: float = 0.1) -> None:
        super().__init__()
        check_positive("MonitoredReLU", features=features)
        if not 0 < decay <= 1:
            raise LayerArgumentError(f"MonitoredReLU: decay must be above 0 and at most 1, got {decay}")
        self.decay = decay
        self.register_buffer("silent_share", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        check_last_axis("MonitoredReLU", "x", x, len(self.silent_share))
        out = functional.relu(x)
        if self.training and x.numel():
            with torch.no_grad():
                silent = (out == 0).reshape(-1, x.shape[-1]).to(self.silent_share.dtype).mean(0)
                self.silent_share.lerp_(silent, self.decay)
        return out

    def dead_units(self, at_least: float = 0.999) -> Tensor:
        """Return the int64 positions of units whose average silence is at least this share."""
        return (self.silent_share >= at_least).nonzero().flatten()


def exponential(x: Tensor) -> Tensor:
    """`e^x`."""
    return x.exp()


def hard_sigmoid(x: Tensor) -> Tensor:
    """`0.2 x + 0.5`, cut to [0, 1]; torch's own rises by 1/6."""
    return (0.2 * x + 0.5).clamp(0, 1)


def sigmoid2(x: Tensor) -> Tensor:
    """`2 sigmoid(x)`: a gate that starts at 1 and may amplify."""
    return 2 * x.sigmoid()


ACTIVATIONS: Mapping[str, Callable[[int], nn.Module]] = {
    "elu": lambda _: nn.ELU(),
    "exponential": lambda _: Elementwise(exponential, "exponential"),
    "gelu": lambda _: nn.GELU(),
    "hardsigmoid": lambda _: Elementwise(hard_sigmoid, "hardsigmoid"),
    "leakyrelu": lambda _: nn.LeakyReLU(0.3),
    "linear": lambda _: nn.Identity(),
    "prelu": PReLU,
    "relu": lambda _: nn.ReLU(),
    "selu": lambda _: nn.SELU(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "sigmoid2": lambda _: Elementwise(sigmoid2, "sigmoid2"),
    "softmax": lambda _: nn.Softmax(dim=-1),
    "softplus": lambda _: nn.Softplus(),
    "softsign": lambda _: nn.Softsign(),
    "swish": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "thresholdedrelu": lambda _: nn.Threshold(1.0, 0.0),
}
"""Lower-case name to a function from the number of features to a module."""


def make_activation(activation: Activation, features: int) -> nn.Module:
    """Return the module for a name in any case, for a function, or for None (linear).

    A module is returned as it is, so one instance given twice shares its parameters.
    """
    if activation is None:
        return nn.Identity()
    if isinstance(activation, str):
        name = activation.lower()
        check_choice("activation", "name", name, ACTIVATIONS)
        return ACTIVATIONS[name](features)
    if isinstance(activation, nn.Module):
        return activation
    if callable(activation):
        return Elementwise(activation, getattr(activation, "__name__", type(activation).__name__))
    raise LayerArgumentError(f"an activation is a name, a function or None, got {activation!r}")


def activations_of_stack(
    layer: str, activations: Activation | Sequence[Activation], depth: int
) -> tuple[Activation, ...]:
    """Return one activation per layer of a stack.

    None means relu. One activation, given or meant, is for all layers but the last,
    which stays linear: the last layer of a stack is usually a logit or an embedding.
    A sequence is taken as it is.
    """
    if activations is None:
        activations = "relu"
    if isinstance(activations, str) or not isinstance(activations, Sequence):
        return (activations,) * (depth - 1) + (None,)
    if len(activations) != depth:
        raise LayerArgumentError(
            f"{layer}: activations must be one per layer, {depth}, got {len(activations)}; "
            "give a single one to use it on every layer but the last"
        )
    return tuple(activations)
