"""Counts of a worker's steps, for whoever looks from another thread: `monolith top`.

Counting costs a few additions a step. Nothing here reads a loss or asks a server.
"""

from __future__ import annotations

from collections.abc import Callable

from monolith.train.hook import Hook, Run, StepResult


class StepCountsHook(Hook):
    """Counts what this process trains on. Its attributes may be read from any thread.

    Args:
        on_begin: Told the global step at which the run begins.
    """

    def __init__(self, on_begin: Callable[[int], object] = lambda _: None) -> None:
        self._on_begin = on_begin
        self.state = "starting"
        self.step: int | None = None
        """The global step, when this process last took one."""
        self.steps = 0
        """Steps that this process took."""
        self.examples = 0
        self.event_time = 0
        """The newest event trained on, in Unix seconds; 0 where the data does not say."""

    def after_create(self, run: Run) -> None:
        self._on_begin(run.step)
        self.step = run.step
        self.state = "training"

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        self.step = result.step
        self.steps += 1
        self.examples += result.examples
        self.event_time = max(self.event_time, result.batch.ids.event_time)

    def end(self, run: Run) -> None:  # noqa: ARG002
        self.state = "ending"
