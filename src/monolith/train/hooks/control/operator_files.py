"""Files an operator puts into the model directory to steer saving.

dump_<step>   save at this step
stop_<step>   save at this step and end
ONLINE        the model serves: keep its dense weights fresh
"""

from __future__ import annotations

import time
from collections.abc import Callable

from monolith import filesystem
from monolith.train.hook import Every, Hook, Run, StepResult
from monolith.train.hooks.control.tide import TideWindow
from monolith.train.hooks.saving.timer import SaveTimer

NIGHTLY = TideWindow(18, 0, 21, 0)
"""When full checkpoints are taken by themselves, where `ForceDumpHook` is used."""


class ForceDumpHook(Hook):
    """Saves, or saves and ends, at a step that a file names. Comes before the save hook.

    Args:
        timer: Of the save hook. Enabled inside the window and disabled outside of it.
        step_interval: Looks for files of steps divisible by this, when they are reached or passed.
        window: None leaves the timer enabled or disabled as it is.
        clock: Unix seconds.
    """

    def __init__(
        self,
        timer: SaveTimer,
        *,
        step_interval: int = 100,
        window: TideWindow | None = NIGHTLY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timer = timer
        self._every = Every(step_interval, "operator files: step_interval")
        self._window = window
        self._clock = clock

    def after_create(self, run: Run) -> None:
        self._every.begin(run.step)

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        reached = self._every.multiples(run.step)
        if not run.model_dir or not reached:
            return
        if self._window is not None:
            self._timer.enabled = self._window.contains(self._clock())
        stop = _found(run, "stop", reached)
        if stop is not None or _found(run, "dump", reached) is not None:
            self._timer.enabled = True
            self._timer.reset()
        if stop is not None:
            run.request_stop(f"there is a file stop_{stop}")


class OnlineFileHook(Hook):
    """Enables a timer while the file `ONLINE` exists, and disables it otherwise. Before its save hook.

    Args:
        step_interval: Looks when the run starts, and whenever a step divisible by this was reached or passed.
    """

    def __init__(self, timer: SaveTimer, *, step_interval: int = 100) -> None:
        self._timer = timer
        self._every = Every(step_interval, "operator files: step_interval")

    def after_create(self, run: Run) -> None:
        self._every.begin(run.step)
        self._look(run)

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if self._every.crossed(run.step):
            self._look(run)

    def _look(self, run: Run) -> None:
        if run.model_dir:
            self._timer.enabled = filesystem.exists(filesystem.join(run.model_dir, "ONLINE"))


def _found(run: Run, word: str, steps: range) -> int | None:
    """Return the first of these steps for which there is a file."""
    paths = {step: filesystem.join(run.model_dir, f"{word}_{step}") for step in steps}
    return next((step for step, path in paths.items() if filesystem.exists(path)), None)
