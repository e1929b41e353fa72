"""The hook seam: what else happens while a model trains.

A hook is told of the life of a run, event by event:

    begin          once, before any state exists
    after_create   once per start, after parameters were made or restored
    before_step    before each step
    after_step     after each step
    end            once, when the run ends well: at its limit, at the end of the data, or by a request
    close          once, however the run ended: threads and files go here

Hooks are called in the order they were given, the chief's own before all others, at every
event. A request to stop lets the current step finish, and the hooks of that step are told,
before `end`. When an error ends the run, `end` is not called and `close` is.

An error in the `end` of one hook does not keep the remaining hooks from theirs, so that the model is saved:
it is raised when all of them have ended. Only hooks without which a save would be wrong are `essential`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from monolith.errors import ConfigError, MonolithError

if TYPE_CHECKING:  # hooks have configs, which must be readable without torch
    from torch import Tensor, nn

    from monolith.feature import Batch
    from monolith.observe.summaries import SummaryWriter

_log = logging.getLogger(__name__)

DATA_ENDED = "the data ended"
"""Why a run stops that has read everything."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step did."""

    step: int
    """The global step after it."""
    batch: Batch
    """Has no examples and no features if the data of this rank has ended before that of another; then there
    are no predictions either, and the loss is the mean of the other ranks."""
    loss: Tensor
    """A scalar, detached, on the model's device."""
    predictions: Mapping[str, Tensor] = field(default_factory=dict)
    """By head, as they were before this step trained: probabilities, or values of a regression."""
    to_measure: bool = True
    """Whether the metrics of the run still have to take this step in; False if they do so by themselves, once
    its outcome is known."""

    @property
    def examples(self) -> int:
        return len(self.batch)


class TrainingRun(Protocol):
    """What a hook sees of the run it belongs to."""

    @property
    def step(self) -> int:
        """The global step: how many steps the model has taken in all its runs."""

    @property
    def model_dir(self) -> str:
        """Where the run writes; "" for one that leaves nothing behind."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained, as the task made it. To be looked at between steps."""

    @property
    def summaries(self) -> SummaryWriter | None:
        """The event file of this start of the run, which all hooks share and the run closes; None if it has
        no folder. It is made at the first call: from `after_create` on, when the step is known.

        TensorBoard reads one file of a folder at a time, and what a second file of the same start says
        replaces the first, so no hook opens one of its own there.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to end; None while no stop was requested."""

    @property
    def interrupted(self) -> bool:
        """Whether it is to end because it was stopped from outside, with more to do."""

    def request_stop(self, reason: str) -> None:
        """End the run after the current step. The first reason is kept. From any thread."""


class Every:
    """Says which multiples of a number of steps were crossed since the last time it was asked.

    Args:
        steps: At least 1.
        what: Who asks, for an error.
    """

    def __init__(self, steps: int, what: str = "every") -> None:
        if steps < 1:
            raise ConfigError(f"{what} must be at least 1, got {steps}")
        self._steps = steps
        self._last: int | None = None

    def begin(self, step: int) -> None:
        """Count from here: what comes after this step is new."""
        self._last = step

    def multiples(self, step: int) -> range:
        """Return the multiples after the last step asked about, up to this one.

        Before the first, and after a rollback to an earlier checkpoint, only this step itself counts.
        """
        last = step - 1 if self._last is None or self._last >= step else self._last
        self._last = step
        return range((last // self._steps + 1) * self._steps, step + 1, self._steps)

    def crossed(self, step: int) -> bool:
        """Whether there is one: at most once for each call, however many there are."""
        return len(self.multiples(step)) > 0


class Hook:
    """A hook that does nothing; override the events it should receive.

    Examples:
        >>> from monolith import ClickLog, ClickLogConfig, DeepFM, Hook, Mode, Task, TrainConfig, Trainer
        >>> class Clicks(Task):
        ...     def dataset(self, mode: Mode):
        ...         return ClickLog(ClickLogConfig(users=100, items=50, history=4, dim=2)).batches(5, 64)
        ...     def model(self):
        ...         return DeepFM(["user", "item", "context"], dim=4)
        >>> class StopAfter(Hook):
        ...     def after_step(self, run, result):
        ...         if result.step == 3:
        ...             run.request_stop("three steps are enough")
        >>> Trainer(Clicks(), TrainConfig(), hooks=[StopAfter()]).train().stop_reason
        'three steps are enough'
    """

    essential: ClassVar[bool] = False
    """Whether an error in its `end` ends the run at once, unsaved."""

    def begin(self, run: TrainingRun) -> None: ...
    def after_create(self, run: TrainingRun) -> None: ...
    def before_step(self, run: TrainingRun) -> None: ...
    def after_step(self, run: TrainingRun, result: StepResult) -> None: ...
    def end(self, run: TrainingRun) -> None: ...
    def close(self) -> None: ...


def drive(
    run: TrainingRun,
    hooks: Sequence[Hook],
    *,
    step: Callable[[], StepResult | None],
    create: Callable[[], None] = lambda: None,
    chief_hooks: Sequence[Hook] = (),
) -> None:
    """Take steps until a hook asks to stop or the data ends, and tell hooks of everything.

    Args:
        step: Takes one step; returns None, having done nothing, at the end of the data.
        create: Makes or restores the parameters, between `begin` and `after_create`.
        chief_hooks: Called before `hooks` at every event.
    """
    everyone = [*chief_hooks, *hooks]
    try:
        for hook in everyone:
            hook.begin(run)
        create()
        for hook in everyone:
            hook.after_create(run)
        while run.stop_reason is None:
            for hook in everyone:
                hook.before_step(run)
            result = step()
            if result is None:
                run.request_stop(DATA_ENDED)
                break
            for hook in everyone:
                hook.after_step(run, result)
        failed: Exception | None = None
        for hook in everyone:
            try:
                hook.end(run)
            except Exception as error:
                if hook.essential:
                    raise
                unexpected = None if isinstance(error, MonolithError) else error
                name = type(hook).__name__
                _log.error("%s failed at the end of the run: %s", name, error, exc_info=unexpected)
                failed = failed or error
        if failed is not None:
            raise failed
    except BaseException:
        _close(everyone, failed=True)
        raise
    _close(everyone, failed=False)


def _close(hooks: Sequence[Hook], *, failed: bool) -> None:
    """Close every hook; the first error is raised, unless a greater one is on its way already."""
    first: Exception | None = None
    for hook in hooks:
        try:
            hook.close()
        except Exception as error:
            unexpected = None if isinstance(error, MonolithError) else error
            _log.error("closing %s failed: %s", type(hook).__name__, error, exc_info=unexpected)
            first = first or error
    if first is not None and not failed:
        raise first
