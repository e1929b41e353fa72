"""Schedules: one function of the step for the rates of tables and of dense weights.

A table's segment asks a `LearningRate` for its rate at a step. `RateSchedule` does
the same for the groups of any torch optimizer, so that dense and sparse weights
warm up and decay together. (Monolith's own optimizers also take such a function as
`lr`, and then need no scheduler.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monolith.errors import LayerArgumentError
from monolith.table import LearningRate


class RateSchedule(LRScheduler):
    """Sets each group's `lr` to `rate(step)`; call `step()` after the optimizer's.

    The rate is the whole rate, not a factor of the one the optimizer was made with.

    Args:
        optimizer: Any torch optimizer whose `lr` is a number.
        rates: One function of the step for all groups, or one per group. Those of
            `monolith.table` will do: `PolynomialDecay`, `ConstantRate`, `warmup(...)`.
        last_epoch: The last step taken, when a run is resumed; -1 starts at step 0.
    """

    def __init__(
        self, optimizer: Optimizer, rates: LearningRate | Sequence[LearningRate], last_epoch: int = -1
    ) -> None:
        groups = len(optimizer.param_groups)
        self._rates = list(rates) if isinstance(rates, Sequence) else [rates] * groups
        if len(self._rates) != groups:
            raise LayerArgumentError(
                f"rate schedule: got {len(self._rates)} rates for {groups} groups of parameters; "
                "give one for all, or one per group"
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return each group's rate at the present step."""
        return [rate(self.last_epoch) for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, without the functions: code is not state."""
        return {name: value for name, value in super().state_dict().items() if name != "_rates"}
