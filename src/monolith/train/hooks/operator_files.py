"""Files an operator puts into the model directory to steer saving.

dump_<step>   save at this step
stop_<step>   save at this step and end
ONLINE        the model serves: keep its dense weights fresh
"""

from __future__ import annotations

import time
from collections.abc import Callable

from monolith import filesystem
from monolith.errors import ConfigError
from monolith.train.hook import Hook, Run, StepResult
from monolith.train.hooks.tide import TideWindow
from monolith.train.hooks.timer import SaveTimer

NIGHTLY = TideWindow(18, 0, 21, 0)
"""When full checkpoints are taken by themselves, where `ForceDumpHook` is used."""


class ForceDumpHook(Hook):
    """Saves, or saves and ends, at a step that a file names. Comes before the save hook.

    Args:
        timer: Of the save hook. Enabled inside the window and disabled outside of it.
        step_interval: Looks at steps divisible by this.
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
        _check_interval(step_interval)
        self._timer = timer
        self._step_interval = step_interval
        self._window = window
        self._clock = clock

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if not run.model_dir or run.step % self._step_interval:
            return
        if self._window is not None:
            self._timer.enabled = self._window.contains(self._clock())
        stop = filesystem.exists(filesystem.join(run.model_dir, f"stop_{run.step}"))
        if stop or filesystem.exists(filesystem.join(run.model_dir, f"dump_{run.step}")):
            self._timer.enabled = True
            self._timer.reset()
        if stop:
            run.request_stop(f"there is a file stop_{run.step}")


class OnlineFileHook(Hook):
    """Enables a timer while the file `ONLINE` exists, and disables it otherwise. Before its save hook.

    Args:
        step_interval: Looks at steps divisible by this.
    """

    def __init__(self, timer: SaveTimer, *, step_interval: int = 100) -> None:
        _check_interval(step_interval)
        self._timer = timer
        self._step_interval = step_interval

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if run.model_dir and run.step % self._step_interval == 0:
            self._timer.enabled = filesystem.exists(filesystem.join(run.model_dir, "ONLINE"))


def _check_interval(step_interval: int) -> None:
    if step_interval < 1:
        raise ConfigError(f"operator files: step_interval must be at least 1, got {step_interval}")
