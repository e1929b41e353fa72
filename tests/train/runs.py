"""A run that trains nothing, for hooks to hang on, and clocks that move when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from monolith.feature import Batch, FeatureIds
from monolith.observe.summaries import SummaryWriter
from monolith.train.hook import Hook, StepResult, TrainingRun, drive


class FakeRun:
    """A run whose step is a number."""

    def __init__(self, model_dir: object = "", step: int = 0) -> None:
        self.step = step
        self.model_dir = str(model_dir)
        self.stop_reason: str | None = None
        self.interrupted = False

    def request_stop(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason = reason


class WithSummaries:
    """The event file of a fake run, in summaries/ of its model_dir."""

    step: int
    model_dir: str

    @cached_property
    def summaries(self) -> SummaryWriter | None:
        if not self.model_dir:
            return None
        writer = SummaryWriter(f"{self.model_dir}/summaries")
        writer.start(self.step)
        return writer

    def close(self) -> None:
        if self.summaries is not None:
            self.summaries.close()


class FakeClock:
    """Time that stands still until somebody sleeps or sets it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def batch(*ids: int, event_time: int = 0) -> Batch:
    """One feature `item` with one id in each example."""
    return Batch(FeatureIds.one_each(["item"], torch.tensor(ids or [1])[:, None], event_time=event_time))


def result(step: int, loss: float = 1.0, event_time: int = 0) -> StepResult:
    return StepResult(step, batch(event_time=event_time), torch.tensor(loss))


def train(
    hooks: Sequence[Hook],
    steps: int,
    *,
    run: FakeRun | None = None,
    on_step: Callable[[FakeRun], None] | None = None,
    losses: Callable[[int], float] = lambda step: 1.0,  # noqa: ARG005
    event_times: Callable[[int], int] = lambda step: 0,  # noqa: ARG005
) -> FakeRun:
    """Drive a run until it was asked to stop, or for so many steps of data.

    Args:
        on_step: Called inside each step, after its number went up.
    """
    run = run or FakeRun()
    left = iter(range(steps))

    def step() -> StepResult | None:
        if next(left, None) is None:
            return None
        run.step += 1
        if on_step is not None:
            on_step(run)
        return result(run.step, losses(run.step), event_times(run.step))

    drive(run, hooks, step=step)
    return run


class At(Hook):
    """Calls a function after the step of a number, or before it."""

    def __init__(self, step: int, call: Callable[[], object], *, before: bool = False) -> None:
        self.step = step
        self.call = call
        self.before = before

    def before_step(self, run: TrainingRun) -> None:
        if self.before and run.step + 1 == self.step:
            self.call()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if not self.before and run.step == self.step:
            self.call()
