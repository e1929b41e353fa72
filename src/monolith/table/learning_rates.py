"""Learning rates: how far a segment steps, as a function of the global step.

A rate is any callable from step to float. Those here compare and print by their
settings, so that equal schedules let tables be merged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from monolith.errors import ConfigError
from monolith.table.labels import label
from monolith.table.optimizers import Optimizer


class LearningRate(Protocol):
    def __call__(self, step: int, /) -> float:
        """Return the rate at `step`."""


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """The same rate at every step. 0 is a rate like any other: the segment stands still."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"constant learning rate: must be at least 0 and finite, got {self.rate!r}")

    def __call__(self, step: int, /) -> float:  # noqa: ARG002
        return self.rate

    def __str__(self) -> str:
        return label(type(self).__name__, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialDecay:
    """From one rate to another over `decay_steps`, then on at the second; up as well as down."""

    initial_learning_rate: float
    """The rate of the first step."""
    decay_steps: int
    """The step at which the second rate is reached."""
    end_learning_rate: float = 0.0001
    """The second rate."""
    power: float = 1.0
    """The exponent of the curve between both; 1 is a straight line."""
    cycle: bool = False
    """True starts over, each time for one more `decay_steps`, instead of staying at the end."""

    def __post_init__(self) -> None:
        if self.decay_steps < 1:
            raise ConfigError(f"polynomial decay: decay_steps must be at least 1, got {self.decay_steps!r}")
        for name in ("initial_learning_rate", "end_learning_rate", "power"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"polynomial decay: {name} must be at least 0 and finite, got {getattr(self, name)!r}"
                )

    def __call__(self, step: int, /) -> float:
        if self.cycle:
            decay_steps = self.decay_steps * max(1, -(-step // self.decay_steps))
        else:
            decay_steps = self.decay_steps
            step = min(step, decay_steps)
        span = self.initial_learning_rate - self.end_learning_rate
        return float(span * (1 - step / decay_steps) ** self.power + self.end_learning_rate)

    def __str__(self) -> str:
        return label(type(self).__name__, self)


def warmup(optimizer: Optimizer) -> LearningRate:
    """Return the optimizer's own rate, growing from 0 over its `warmup_steps` where it has some."""
    if optimizer.warmup_steps > 0:
        return PolynomialDecay(
            initial_learning_rate=0.0,
            decay_steps=optimizer.warmup_steps,
            end_learning_rate=optimizer.learning_rate,
        )
    return ConstantRate(optimizer.learning_rate)
