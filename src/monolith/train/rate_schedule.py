"""Schedules of learning rates as settings: how rates move with the step, for dense weights and for rows.

A schedule is a factor of the rates that the task has chosen, so that one schedule fits all of them:

    constant   1
    warmup     grows to 1 over `warmup_steps`, and stays; the other schedules may start with it, too
    cosine     falls from 1 to `end` over `steps`, slowly at first and at last
    step       is multiplied by `factor` after every `steps`

Nothing here needs torch: a command reads settings before it decides whether to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How learning rates change with the global step, as a factor of the task's own rates.

    Examples:
        >>> from monolith import ScheduleConfig
        >>> schedule = ScheduleConfig(kind="cosine", warmup_steps=9, steps=100, end=0.1)
        >>> [round(schedule.at(step), 2) for step in (0, 9, 59, 1000)]
        [0.1, 1.0, 0.55, 0.1]
    """

    kind: Literal["constant", "warmup", "cosine", "step"] = "constant"
    """How the rates move after the warm-up: constant and warmup keep them, cosine lets them fall to `end`
    over `steps`, step multiplies them by `factor` after every `steps`."""
    warmup_steps: int = 0
    """The first steps, in which rates grow from near 0 to the task's own; any kind may have them."""
    steps: int | None = None
    """Steps after the warm-up: cosine ends there, and step drops the rates after each so many."""
    end: float = 0.0
    """The factor that cosine ends with and keeps, from 0 to 1."""
    factor: float = 0.5
    """What step multiplies the rates by at each drop, above 0."""
    rows: bool = False
    """Whether the rates of rows follow the schedule, too; by default only those of dense weights do."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule: warmup_steps must be 0 or more, got {self.warmup_steps}")
        if self.kind == "warmup" and not self.warmup_steps:
            raise ConfigError("schedule: kind 'warmup' needs warmup_steps")
        if self.kind in ("cosine", "step"):
            if self.steps is None or self.steps < 1:
                raise ConfigError(f"schedule: kind {self.kind!r} needs steps of at least 1, got {self.steps}")
        elif self.steps is not None:
            raise ConfigError(f"schedule: steps is for cosine and step, and the kind is {self.kind!r}")
        if not 0 <= self.end <= 1:
            raise ConfigError(f"schedule: end must be from 0 to 1, got {self.end}")
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"schedule: factor must be above 0 and finite, got {self.factor}")

    def at(self, step: int) -> float:
        """Return the factor of the rates in the step after so many."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        after = step - self.warmup_steps
        if self.kind == "cosine" and self.steps:
            done = min(after / self.steps, 1.0)
            return self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "step" and self.steps:
            return float(self.factor ** (after // self.steps))
        return 1.0


@dataclass(frozen=True, slots=True)
class ScheduledRate:
    """A learning rate of the task, moved by a schedule. Itself a `LearningRate`."""

    rate: Callable[[int], float]
    schedule: ScheduleConfig

    def __call__(self, step: int, /) -> float:
        return self.rate(step) * self.schedule.at(step)

    def __str__(self) -> str:
        return f"{self.rate} times {self.schedule}"
