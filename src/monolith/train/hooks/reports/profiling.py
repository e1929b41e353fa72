"""Profiles of a few steps now and then, for people who ask where the time goes.

A window of steps is recorded by torch's profiler and left as a Chrome trace in `profile/` of the
model directory; open it with chrome://tracing or Perfetto.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from monolith import filesystem
from monolith.errors import ConfigError
from monolith.train.hook import Hook, Run, StepResult

_log = logging.getLogger(__name__)

FOLDER = "profile"
FIRST_STEP = 500
WINDOW_STEPS = 10


class Profiler(Protocol):
    """What is used of `torch.profiler.profile`."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None: ...


def torch_profiler() -> Profiler:
    """Return a profiler of the thread that starts it: the CPU, and the GPU where there is one."""
    return torch.profiler.profile(activities=_activities())


def all_threads_profiler() -> Profiler:
    """Return a profiler of all threads of this process."""
    from torch._C._profiler import _ExperimentalConfig  # torch has no other way to see threads of others

    config = _ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=_activities(), experimental_config=config)


def _activities() -> list[torch.profiler.ProfilerActivity]:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


class ProfilerHook(Hook):
    """Records windows of steps. A window that the end of the run cuts short is kept.

    Args:
        init_step_range: The first window, [begin, end), counted from the step the run starts at. By default
            10 steps after the first 500.
        save_steps: From the beginning of one window to that of the next; by default there is one window.
        save_secs: The same in seconds.
        make: Makes a profiler for each window.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        init_step_range: tuple[int, int] = (FIRST_STEP, FIRST_STEP + WINDOW_STEPS),
        *,
        save_steps: int | None = None,
        save_secs: float | None = None,
        make: Callable[[], Profiler] = torch_profiler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        begin, end = init_step_range
        if begin < 0 or end <= begin:
            raise ConfigError(f"profiler: the first window must end after it begins, got [{begin}, {end})")
        if save_steps is not None and save_secs is not None:
            raise ConfigError("profiler: give save_steps or save_secs, not both")
        if save_steps is not None and save_steps <= end - begin:
            raise ConfigError(
                f"profiler: save_steps must be more than a window of {end - begin} steps, got {save_steps}"
            )
        if save_secs is not None and save_secs <= 0:
            raise ConfigError(f"profiler: save_secs must be above 0, got {save_secs}")
        self._offset = begin
        self._length = end - begin
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._make = make
        self._clock = clock
        self._next_step: int | None = None
        self._next_time: float | None = None
        self._profiler: Profiler | None = None
        self._began = 0
        self._seen = 0
        """Steps of the current window that were taken."""

    def after_create(self, run: Run) -> None:
        self._next_step = run.step + self._offset

    def before_step(self, run: Run) -> None:
        if self._profiler is not None or not run.model_dir or not self._is_due(run.step):
            return
        self._began, self._seen = run.step, 0
        self._next_step = self._next_time = None
        if self._save_steps is not None:
            self._next_step = run.step + self._save_steps
        elif self._save_secs is not None:
            self._next_time = self._clock() + self._save_secs
        self._profiler = self._make()
        self._profiler.start()

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if self._profiler is not None:
            self._seen += 1
            if run.step >= self._began + self._length:
                self._dump(run)

    def end(self, run: Run) -> None:
        if self._profiler is not None and self._seen:
            self._dump(run)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _is_due(self, step: int) -> bool:
        if self._next_step is not None:
            return step >= self._next_step
        return self._next_time is not None and self._clock() >= self._next_time

    def _dump(self, run: Run) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        folder = filesystem.join(run.model_dir, FOLDER)
        filesystem.make_dirs(folder)
        path = filesystem.join(folder, f"steps_{self._began}_{run.step}.json")
        # torch writes to local files only, and the model directory may be anywhere.
        with tempfile.TemporaryDirectory() as local:
            trace = Path(local) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            filesystem.copy_file(str(trace), path)
        _log.info("profiled steps %d to %d: %s", self._began, run.step, path)
