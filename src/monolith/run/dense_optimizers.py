"""What trains the dense weights of a task that is a config file: `optimizer` of `[task]`.

    [task]
    dense_rate = 0.003
    optimizer = { type = "DenseAdamW", weight_decay = 0.01 }

Each is a plain value with the settings of the optimizer that it makes; the rate is the task's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from monolith.errors import ConfigError
from monolith.nn import optimizers as own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Makes an optimizer of torch, whose arguments are the fields."""

    made: ClassVar[Any]

    def make(self, weights: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return the optimizer of some weights.

        Raises:
            ConfigError: A setting is out of range.
        """
        settings = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        try:
            optimizer: torch.optim.Optimizer = self.made(weights, lr=rate, **settings)
        except ValueError as cause:
            raise ConfigError(f"task.optimizer: {type(self).__name__}: {cause}") from cause
        return optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdam(_Made):
    """Adam."""

    made: ClassVar[Any] = own.EagerAdam
    betas: tuple[float, float] = (0.9, 0.999)
    """How much of the running means of gradients, and of their squares, is kept at each step."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdamW(_Made):
    """Adam with weights that decay apart from the gradient."""

    made: ClassVar[Any] = torch.optim.AdamW
    betas: tuple[float, float] = (0.9, 0.999)
    """How much of the running means of gradients, and of their squares, is kept at each step."""
    eps: float = 1e-8
    weight_decay: float = 0.01
    """The share of each weight, times the rate, that goes at each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSgd(_Made):
    """Gradient descent, with momentum if it is set."""

    made: ClassVar[Any] = torch.optim.SGD
    momentum: float = 0.0
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdagrad(_Made):
    """Adagrad."""

    made: ClassVar[Any] = torch.optim.Adagrad
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    """The factor by which each weight is added to its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRMSprop(_Made):
    """RMSProp with momentum, as the original system has it; see `monolith.nn.RMSprop`."""

    made: ClassVar[Any] = own.RMSprop
    beta1: float = 0.99
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    use_v2: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdamom(_Made):
    """AdaMom, as the original system has it; see `monolith.nn.Adamom`."""

    made: ClassVar[Any] = own.Adamom
    ada_decay: float = 0.9999
    mom_decay: float = 0.99
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    use_v2: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseShampoo(_Made):
    """Shampoo, as the original system has it; see `monolith.nn.Shampoo`."""

    made: ClassVar[Any] = own.Shampoo
    beta_1: float = 0.9
    beta_2: float = 1.0
    warmup: int = 5000
    tau_1: int = 200
    tau_2: int = 20
    eigen_head: int = 100
    eigen_tail: int = 100
    damping_epsilon: float = 1e-3


DenseRule = DenseAdam | DenseAdamW | DenseSgd | DenseAdagrad | DenseRMSprop | DenseAdamom | DenseShampoo
"""What may train dense weights, by the `type` that a file says."""
