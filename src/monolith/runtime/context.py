"""What a run is given and what it returns: its output, its result, and the context its functions share.

Nothing here prints, installs a signal handler or needs torch. See `monolith.runtime.run`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TextIO

from monolith import concurrency
from monolith.runtime.config import RunConfig

if TYPE_CHECKING:
    from monolith.train import Task
    from monolith.train.hooks import TrainStatus

_log = logging.getLogger(__name__)

Stop = Callable[[str], None]
"""Stops a run; its argument is the reason that the report then names, such as SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a run reports, and where requests to stop it come from. By default it logs."""

    say: Callable[[str], None] = _log.info
    """Takes a line of information for a person."""
    warn: Callable[[str], None] = _log.warning
    """Takes a line about something that is wrong, or may be."""
    report: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Takes the chief's report, as JSON can hold it, when training ended."""
    progress: Callable[[Task, RunConfig], ProgressView] | None = None
    """Makes what shows the status of training now and then; None shows nothing."""
    stop_requests: Callable[[Stop], AbstractContextManager[object]] = lambda _: nullcontext()
    """Entered while the run can be stopped, with the function that stops it: installs signal handlers, for
    instance. Requests may come from any thread, and from a signal handler if the run is launched."""
    lines: TextIO | None = None
    """Takes the lines of launched processes, each after the name of its process; None: standard error."""


@dataclass(frozen=True, slots=True)
class ProgressView:
    """Shows the status of training, every so often, between `__enter__` and `__exit__` of `opened`."""

    show: Callable[[TrainStatus], None]
    every: timedelta | int
    """A time, or a number of steps."""
    opened: AbstractContextManager[object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run, or this process of it, ended."""

    outcome: Literal["finished", "stopped", "departed", "not_saved", "failed"]
    """stopped: before its time, the next start resumes it. departed: this worker left its data to the other
    workers. not_saved: training ended, and its last checkpoint or export could not be written. failed: a
    launched process failed for good."""
    stop_reason: str = ""
    """Why it ended; the name of a signal if one stopped it."""
    report: Mapping[str, Any] | None = None
    """The chief's report; None in other processes, and if there is none."""
    status: int | None = None
    """The exit status that a launcher decided on; None if the outcome decides."""

    @property
    def exit_status(self) -> int:
        """Return the exit status of a process with this result, see `monolith.cli.main`."""
        if self.status is not None:
            return self.status
        if self.outcome in ("finished", "departed"):
            return 0
        if self.outcome == "not_saved":
            return 2  # servers wait for an export that is not there, however well the training went
        stopped_by = signal.Signals.__members__.get(self.stop_reason)
        return os.EX_TEMPFAIL if stopped_by is None else 128 + stopped_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How the processes of a run are started."""

    kind: Literal["local", "ray"] | None = None
    """None: this process is one of them, and none is launched. local: children of this process. ray: on a Ray
    cluster."""
    ray_address: str | None = None
    """The Ray cluster: auto, host:port or ray://host:port; None starts one on this machine for the run."""
    command: tuple[str, ...] = ()
    """The words of the command line that trains this run, after `monolith`. By default the config is written
    into the model_dir, and the processes are told to read it."""
    flags: tuple[str, ...] = ()
    """The flags among these words that set fields of the config; a launcher refuses those that it decides."""


MakeTask = Callable[[RunConfig], "Task"]


class RunContext:
    """A run, as the functions that execute it see it. Thread-safe.

    Args:
        task: The task, or what makes it of the config; None if the config names or describes it.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task | MakeTask | None,
        *,
        launch: Launch,
        output: Output,
        environ: Mapping[str, str],
        control: bool = False,
        profile: bool = False,
    ) -> None:
        self.config, self.task, self.launch = config, task, launch
        self.output, self.environ = output, environ
        self.control, self.profile = control, profile
        self._lock = concurrency.Lock()  # guards the two fields below
        self._stop: Stop | None = None
        """Stops what runs now; None before it can be stopped."""
        self._reason: str | None = None
        """The reason of the first request to stop."""

    def stop(self, reason: str) -> None:
        """Stop the run. A request that comes too early is kept until the run can be stopped."""
        with self._lock:
            self._reason = self._reason or reason
            stop = self._stop
        if stop is not None:
            stop(reason)

    def stopped_by(self, stop: Stop) -> AbstractContextManager[object]:
        """Return the block in which requests to stop, of callers and of signals, go to `stop`."""
        with self._lock:
            self._stop, reason = stop, self._reason
        if reason is not None:
            stop(reason)
        # Signals go to `stop` directly and not through the lock: a handler may interrupt its holder.
        return self.output.stop_requests(stop)

    @property
    def lines(self) -> TextIO:
        """The stream that takes the lines of launched processes."""
        return sys.stderr if self.output.lines is None else self.output.lines
