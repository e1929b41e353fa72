"""When to save: every so many seconds or steps, and at another interval outside the daily hours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from monolith import concurrency, filesystem
from monolith.errors import ConfigError, FileMissingError
from monolith.observe import Resting
from monolith.train.hook import Every, Hook, StepResult, TrainingRun
from monolith.train.hooks.hours import DailyHours


class SaveTimer:
    """Says when the next save is due. Not thread-safe; `enabled` may be set from any thread.

    Outside the daily window, if there is one, only `secs_outside_hours` counts.

    Args:
        clock: Unix seconds, for the hours of the daily window alone: it may be set, ahead or back.
        timer: Seconds that only grow, for every interval.
    """

    def __init__(
        self,
        *,
        every_secs: float | None = None,
        every_steps: int | None = None,
        hours: DailyHours | None = None,
        secs_outside_hours: float | None = None,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            found = "neither" if every_secs is None else "both"
            raise ConfigError(f"save timer: give exactly one of every_secs and every_steps, got {found}")
        for name, value in (
            ("every_secs", every_secs),
            ("every_steps", every_steps),
            ("secs_outside_hours", secs_outside_hours),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"save timer: {name} must be above 0, got {value}")
        self.enabled = True
        """While false nothing is due, whatever the time."""
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._hours = hours
        self._secs_outside_hours = secs_outside_hours
        self._clock, self._timer = clock, timer
        self._last: tuple[float, int] | None = None
        self._retry_at: float | None = None
        self._retry_only = False

    @property
    def last_step(self) -> int | None:
        """The step last stamped; None before the first, and after `reset`."""
        return None if self._last is None else self._last[1]

    def should_trigger(self, step: int) -> bool:
        """Whether a save is due at this step. Due at once when there was none, and at no step twice unless
        the first one failed."""
        if not self.enabled:
            return False
        if self._last is None:
            return True
        then, last_step = self._last
        if step == last_step and self._retry_at is None:
            return False
        now = self._timer()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        if self._retry_only or step == last_step:
            return False
        pace = self._secs_outside_hours
        if self._hours is not None and pace is not None and not self._hours.contains(self._clock()):
            return now >= then + pace
        if self._every_secs is not None:
            return now >= then + self._every_secs
        assert self._every_steps is not None  # the constructor saw to one of them
        return step >= last_step + self._every_steps

    @property
    def backs_off(self) -> bool:
        """Whether a save failed, and no other is to be tried yet."""
        return self._retry_only and self._retry_at is not None and self._timer() < self._retry_at

    @property
    def retry_due(self) -> bool:
        """Whether it is time to try a save again that failed."""
        return self._retry_only and not self.backs_off

    def stamp(self, step: int) -> tuple[float, int] | None:
        """Count from here on. Return the seconds and steps since the last stamp; None for the first."""
        now, last = self._timer(), self._last
        self._last = now, step
        self._retry_at, self._retry_only = None, False
        return None if last is None else (now - last[0], step - last[1])

    def rearm(self, backoff: float, *, not_sooner: bool = False) -> None:
        """Be due again in `backoff` seconds: the save that was stamped came to nothing.

        Args:
            not_sooner: Whether the usual interval does not count until then.
        """
        self._retry_at, self._retry_only = self._timer() + backoff, not_sooner

    def reset(self) -> None:
        """Forget the past, so that a save is due at once."""
        self._last = None
        self._retry_at, self._retry_only = None, False


# Listeners: what else happens around a save.
#
# Tables, filters, exports and barriers each have something to do when a checkpoint is cut or is safe on
# disk. They listen; the save hook decides when, and what an error of theirs means.
#
# A run saves rows, weights and positions as parts of one checkpoint and needs no listener for them. Give
# those of your own to a `Trainer`, or to a `SaveHook` that you make.


class SaveListener:
    """A listener that does nothing; override the events it should receive."""

    trouble = ""
    """What failed in its last attempt, for a person; empty if nothing did. The next save tries it again, or
    `retry` at the end of a run."""

    def begin(self) -> None:
        """Once, before any state exists."""

    def before_save(self, step: int) -> None:
        """The state of this step is about to be cut; on the training thread."""

    def after_save(self, step: int) -> bool | None:  # noqa: ARG002
        """The checkpoint of this step is on disk; True asks the run to stop.

        Runs on the thread that wrote it, which is not the training thread where saving is asynchronous.
        """
        return None

    def retry(self) -> None:
        """Try again what `trouble` names: the run ends, and there is no next save that would."""

    def end(self) -> None:
        """Once, when the run ends well, after the final save."""


class BeforeSaveListener(SaveListener):
    """Tells a listener only of the time before a save."""

    def __init__(self, listener: SaveListener) -> None:
        self._listener = listener

    def begin(self) -> None:
        self._listener.begin()

    def before_save(self, step: int) -> None:
        self._listener.before_save(step)

    def end(self) -> None:
        self._listener.end()


class AfterSaveListener(SaveListener):
    """Tells a listener only of the time after a save."""

    def __init__(self, listener: SaveListener) -> None:
        self._listener = listener

    def begin(self) -> None:
        self._listener.begin()

    def after_save(self, step: int) -> bool | None:
        return self._listener.after_save(step)

    def end(self) -> None:
        self._listener.end()


# What the save hooks of one model directory know of each other.


class SaveMemory:
    """What is on disk or on its way there, and how long training waited for it. Thread-safe.

    Args:
        writer: What the threads that write rest by, if they do: not while training waits.
    """

    def __init__(
        self, timer: Callable[[], float] = concurrency.monotonic, *, writer: Resting | None = None
    ) -> None:
        self._timer = timer
        self._writer = writer
        self._lock = concurrency.Lock()  # guards all below
        self._waited = 0.0
        self._since: float | None = None
        self._full_step: int | None = None
        self._being_written: int | None = None
        self._dense_only = False

    def note_full(self, step: int | None) -> None:
        """A full checkpoint of this step is on disk; None: of no step that still counts."""
        with self._lock:
            self._full_step = step

    def note_writing(self, step: int | None) -> None:
        """A full checkpoint of this step is being written, perhaps during training; None: no more."""
        with self._lock:
            self._being_written = step

    def note_dense_only(self) -> None:
        """There is a hook that saves dense weights only."""
        with self._lock:
            self._dense_only = True

    def has_full(self, step: int) -> bool:
        """Whether there is a full checkpoint of this step, or will be unless writing it fails."""
        with self._lock:
            return step in (self._full_step, self._being_written)

    @property
    def has_dense_only(self) -> bool:
        with self._lock:
            return self._dense_only

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as one in which training waits for a save. Blocks may be nested."""
        with self._lock:
            is_outer = self._since is None
            if is_outer:
                self._since = self._timer()
        try:
            yield
        finally:
            if is_outer:
                with self._lock:
                    assert self._since is not None
                    self._waited, self._since = self._waited + self._timer() - self._since, None

    @contextmanager
    def waiting_for_writer(self) -> Iterator[None]:
        """The same for a block that waits until a save is written: the threads that write do not rest."""
        with self.waiting(), nullcontext() if self._writer is None else self._writer.awaited():
            yield

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for saves so far."""
        with self._lock:
            return self._waited


# Stop exactly at a moment of the data: the model of midnight, whenever it is trained.
#
# An operator writes the moment, in Unix seconds, into the file `limit_req_time` of the model
# directory. Once a batch reaches it, the run saves and ends.


_log = logging.getLogger(__name__)

LIMIT_FILE = "limit_req_time"


def newest_example(result: StepResult) -> int:
    """Return the request time of a step: Unix seconds of the newest example in its batch."""
    return result.batch.ids.event_time


class RequestTimeHook(Hook):
    """Ends the run at the data timestamp in `limit_req_time`. Comes before the save hook.

    Args:
        timer: Of the save hook; made due, so that the state of this very step is saved.
        step_interval: Looks for the file, and at the data, when a multiple of this is reached or passed.
    """

    def __init__(
        self,
        timer: SaveTimer,
        *,
        step_interval: int = 1000,
        request_time: Callable[[StepResult], int] = newest_example,
    ) -> None:
        self._timer = timer
        self._every = Every(step_interval, "request time: step_interval")
        self._request_time = request_time

    def after_create(self, run: TrainingRun) -> None:
        self._every.begin(run.step)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if not self._every.crossed(run.step) or not run.model_dir:
            return
        limit = read_limit(run.model_dir)
        if limit <= 0:
            return
        now = self._request_time(result)
        if now >= limit:
            self._timer.enabled = True
            self._timer.reset()
            run.request_stop(f"the data reached {now}, the limit in {LIMIT_FILE} is {limit}")


def read_limit(model_dir: str) -> int:
    """Return the timestamp in `limit_req_time`; -1 where there is no file, or none that can be read."""
    path = filesystem.join(model_dir, LIMIT_FILE)
    try:
        text = filesystem.read_bytes(path)
    except FileMissingError:
        return -1
    try:
        return int(text)
    except ValueError:
        _log.error("%s must contain Unix seconds, got %r; no limit applies until it does", path, text[:40])
        return -1


# Files an operator puts into the model directory to steer saving.
#
# dump_<step>   save at this step
# stop_<step>   save at this step and end
# ONLINE        the model serves: keep its dense weights fresh


NIGHTLY = DailyHours(18, 0, 21, 0)
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
        window: DailyHours | None = NIGHTLY,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        self._timer = timer
        self._every = Every(step_interval, "operator files: step_interval")
        self._window = window
        self._clock = clock

    def after_create(self, run: TrainingRun) -> None:
        self._every.begin(run.step)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
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

    def after_create(self, run: TrainingRun) -> None:
        self._every.begin(run.step)
        self._look(run)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if self._every.crossed(run.step):
            self._look(run)

    def _look(self, run: TrainingRun) -> None:
        if run.model_dir:
            self._timer.enabled = filesystem.exists(filesystem.join(run.model_dir, "ONLINE"))


def _found(run: TrainingRun, word: str, steps: range) -> int | None:
    """Return the first of these steps for which there is a file."""
    paths = {step: filesystem.join(run.model_dir, f"{word}_{step}") for step in steps}
    return next((step for step, path in paths.items() if filesystem.exists(path)), None)
