"""The part that a training process has in publishing: it says what was learned, and brings dense weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monolith.sync.messages import LearnedUpTo
from monolith.sync.publish_config import PublishConfig
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.model import Model
from monolith.train.publishing.bodies import PublishOrder, ShareStanding
from monolith.train.publishing.hold_file import HoldFile
from monolith.train.publishing.holders import Holders, Steward
from monolith.train.publishing.metric_guard import MetricGuard


class PublishHook(Hook):
    """Publishes while the run lasts, and all there is at its end.

    Weights are copied between two steps, so no copy has some of one step and some of another.

    Args:
        guard: Of the model as a whole; shown every batch that this process trains on.
        leads: Whether this process sees that all holders stand together.
        hold_file: Where it is kept whether publishing is held, as the process that leads.
        refresh: Makes the weights of this process the newest there are.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        holders: Holders,
        model: Model,
        config: PublishConfig,
        guard: MetricGuard,
        *,
        leads: bool,
        hold_file: HoldFile | None = None,
        refresh: Callable[[], None] = lambda: None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holders = holders
        self._model = model
        self._every = config.dense_interval.total_seconds()
        self._guard = guard
        self._refresh = refresh
        self._timer = timer
        self._brought = 0.0
        self._step = -1
        """The step of the weights that were brought last."""
        self._steward: Steward | None = None
        if leads:
            self._steward = Steward(
                holders, config.guard, lambda: guard.bad, every=self._every, hold_file=hold_file
            )

    def after_create(self, run: TrainingRun) -> None:
        if run.step:  # rows were restored: servers may ask for them before the first step is done
            self.holders.note(LearnedUpTo(step=run.step))
        self._bring(run.step)
        self.holders.start()
        if self._steward is not None:
            self._steward.start()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        self._guard.update(result.predictions, result.batch.labels, step=run.step)
        if self._timer() - self._brought >= self._every or run.step < self._step:  # which went back
            self._bring(run.step)

    def idle(self, run: TrainingRun) -> None:
        """Bring the weights of the last step, where there is no data to take another."""
        if run.step != self._step:
            self._bring(run.step)

    def end(self, run: TrainingRun) -> None:
        if self._steward is not None:
            self._steward.close()
        self._refresh()
        self._bring(run.step)
        self.holders.flush()

    def close(self) -> None:
        if self._steward is not None:
            self._steward.close()
        self.holders.close()

    def obey(self, order: PublishOrder) -> Sequence[ShareStanding]:
        """Have all holders do something, as the process that leads; see `Holders.obey`."""
        if order.action == "resume":
            self._guard.accept()
        return self.holders.obey(order) if self._steward is None else self._steward.obey(order)

    @property
    def standing(self) -> Sequence[ShareStanding]:
        """Where each share was a moment ago, as the process that leads; empty before any was published."""
        return () if self._steward is None else self._steward.standing

    def places(self) -> Mapping[str, Any]:
        """Return how far each share is published, for a checkpoint."""
        found = self.holders.places()
        return {
            str(share): {"epoch": place.epoch, "sequence": place.sequence} for share, place in found.items()
        }

    def _bring(self, step: int) -> None:
        if not self.holders.brings_weights:
            return
        self._brought, self._step = self._timer(), step
        self.holders.bring(copied(self._model.published()))


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that nobody else has."""
    with torch.no_grad():
        return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
