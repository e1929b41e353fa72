"""Alerts: a loss that is NaN, infinite or exploding is found early, and not trained on.

Looking at a loss makes the CPU wait for the device. So losses are summed where they are, which
costs nothing, and only the sum is looked at, every so many steps. NaN and infinity survive
a sum, and so does an explosion.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from monolith.errors import ConfigError, DivergedError
from monolith.observe import Metrics
from monolith.train.hook import Hook, StepResult, TrainingRun

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertConfig:
    """What counts as diverged, and what then happens."""

    action: Literal["warn", "stop", "rollback"] = "warn"
    """What happens when the loss diverged: a warning, the end of the run with a DivergedError, or a return to
    the last good checkpoint."""
    every_steps: int = 100
    """How many steps there are between two looks at the loss."""
    explosion: float | None = 10.0
    """How many times its running mean the loss may reach before it counts as diverged; None checks for NaN
    and infinity only."""
    warmup_checks: int = 10
    """How many looks pass before the running mean is trusted: the first losses are high."""
    decay: float = 0.9
    """The share of the running mean that one look keeps."""
    max_rollbacks: int = 3
    """How many rollbacks are allowed; the next divergence ends the run."""

    def __post_init__(self) -> None:
        if self.action not in ("warn", "stop", "rollback"):
            raise ConfigError(f"alert: action must be warn, stop or rollback, got {self.action!r}")
        if self.every_steps < 1:
            raise ConfigError(f"alert: every_steps must be at least 1, got {self.every_steps}")
        if self.explosion is not None and self.explosion <= 1:
            raise ConfigError(f"alert: explosion must be above 1, got {self.explosion}")
        if self.warmup_checks < 1:
            raise ConfigError(f"alert: warmup_checks must be at least 1, got {self.warmup_checks}")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"alert: decay must be at least 0 and below 1, got {self.decay}")
        if self.max_rollbacks < 0:
            raise ConfigError(f"alert: max_rollbacks must not be negative, got {self.max_rollbacks}")


class AlertHook(Hook):
    """Watches the loss. Comes before the save hook, so that what diverged is not saved.

    Args:
        rollback: Restores the last good checkpoint; needed for the action "rollback".
        also_when: Says at which other steps to look: the `should_trigger` of a save hook's timer, so that
            no save comes between a divergence and its discovery.
        skipped: How many batches were not trained on because their loss or gradient is not finite. They are
            no steps, and one since the last look is enough.
        metrics: Counts `training_diverged`.
    """

    essential = True

    def __init__(
        self,
        config: AlertConfig | None = None,
        *,
        rollback: Callable[[], object] | None = None,
        also_when: Callable[[int], bool] = lambda step: False,  # noqa: ARG005
        skipped: Callable[[], int] = lambda: 0,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config or AlertConfig()
        if self._config.action == "rollback" and rollback is None:
            raise ConfigError("alert: the action 'rollback' needs a function that restores a checkpoint")
        self._rollback = rollback
        self._also_when = also_when
        self._skipped = skipped
        self._known_skipped = 0
        metrics = metrics if metrics is not None else Metrics()
        self._count = metrics.counter("training_diverged", "Checks that found the loss diverged")
        self._sum: Tensor | None = None
        self._steps = 0
        self._mean: float | None = None
        self._checks = 0
        self._rollbacks = 0

    def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
        self._known_skipped = self._skipped()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        loss = result.loss.detach().abs().float()
        self._sum = loss if self._sum is None else self._sum + loss
        self._steps += 1
        if self._steps >= self._config.every_steps or self._also_when(run.step):
            self._look(run)

    def end(self, run: TrainingRun) -> None:
        self._look(run)

    def go_on_after(self, error: DivergedError, run: TrainingRun) -> None:
        """Roll back where that is the action: no step could be taken any more. Otherwise raise the error."""
        if self._config.action != "rollback":
            raise error
        self._sum, self._steps = None, 0
        self._act(run, str(error.__cause__ or error))

    def _look(self, run: TrainingRun) -> None:
        if self._sum is None:
            return
        mean = float(self._sum) / self._steps  # waits for the device
        trouble = self._trouble(mean)
        self._sum, self._steps = None, 0
        if trouble is None:
            decay = self._config.decay
            self._mean = mean if self._mean is None else decay * self._mean + (1 - decay) * mean
            self._checks += 1
            return
        self._act(run, trouble)

    def _act(self, run: TrainingRun, trouble: str) -> None:
        self._count.inc()
        message = f"training diverged by step {run.step}: {trouble}"
        if self._config.action == "warn":
            _log.warning("%s", message)
        elif self._config.action == "stop":
            raise DivergedError(
                f"{message}. Restore the last checkpoint, and lower the learning rate, clip gradients, or "
                "look at the data of these steps."
            )
        elif self._rollbacks >= self._config.max_rollbacks:
            raise DivergedError(
                f"{message}, again after {self._rollbacks} rollbacks: lower the learning "
                "rate, clip gradients, or look at the data of these steps."
            )
        else:
            self._rollbacks += 1
            _log.warning("%s; rollback %d of %d", message, self._rollbacks, self._config.max_rollbacks)
            assert self._rollback is not None  # the constructor saw to it
            self._rollback()
            self._known_skipped = self._skipped()

    def _trouble(self, mean: float) -> str | None:
        skipped, self._known_skipped = self._skipped() - self._known_skipped, self._skipped()
        if skipped > 0:
            return f"{skipped} batches were skipped because their loss or a gradient is NaN or infinite"
        if not math.isfinite(mean):
            return f"the loss of the last {self._steps} steps is {mean}"
        limit = self._config.explosion
        if limit is None or self._mean is None or self._checks < self._config.warmup_checks:
            return None
        if mean <= limit * self._mean:
            return None
        return f"the loss of the last {self._steps} steps is {mean:.6g}, against {self._mean:.6g} before"
