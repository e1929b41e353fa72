"""The save hook: checkpoints by the clock or by the step, on demand, and at the end.

A `Snapshots` takes a snapshot of the state, quickly, which stays as it is while training continues, and
which is then written, as slowly as it must be. If saves are asynchronous, the training thread waits for the
snapshot only, and one background thread writes it.

What a failed save means follows from its error:

    TransientFilesystemError      training continues, the save is retried with growing pauses; the run
                                  ends after `max_failures` in a row (a full disk, no free descriptor)
    the run outlives it           the checkpoint is dropped, the next one is made as usual (a lost server)
    anything else                 is tried once more, then ends the run

Two kinds of listeners are told of a save. Listeners belong to it: an error of theirs is an error of
the save. Guards do not: they pause workers while a snapshot is taken, and are undone, in reverse,
whatever happens.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from monolith import concurrency, filesystem
from monolith.concurrency import Future
from monolith.errors import (
    ConfigError,
    MonolithError,
    RetryableError,
    TrainingError,
    TransientFilesystemError,
)
from monolith.filesystem import FileReserve, is_out_of_files
from monolith.observe import Metrics, yield_to_others
from monolith.observe.progress import describe_bytes
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.hooks.hours import DailyHours
from monolith.train.hooks.save_timing import SaveListener, SaveMemory, SaveTimer

if TYPE_CHECKING:
    from monolith.checkpoint.checkpointer import PendingCheckpoint

_log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 2
LAST_ATTEMPTS = 5
"""Of the last checkpoint of a run, where others are lost while it is written."""
FILES_ATTEMPTS = 50
FILES_PAUSE = 0.1
"""Seconds between attempts while the process has no file left."""
NEVER_STEPS = 100_000_000
"""How many steps there are between saves if no interval is set."""
LONGEST_RETRY_SECS = 300.0
"""Pauses between saves that fail double up to this: space that returns is used within five minutes, and the
ten failures of the default take about 35 minutes, in which an operator can be called."""
FIRST_LAST_RETRY_SECS = 0.5
"""Pauses before the last save of a run is retried double from here."""
_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)


class Snapshots(Protocol):
    """Takes snapshots of the state of a model: a `Checkpointer`, or all checkpoints of a run."""

    def snapshot(self, step: int) -> PendingCheckpoint:
        """Take a snapshot of the state of this step. Quick, and called on the training thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """How often to save, and what an error means. With neither interval only the end is saved.

    Examples:
        >>> from monolith import SaveConfig, TrainConfig
        >>> TrainConfig(model_dir="run", save=SaveConfig(secs=600, asynchronous=True)).save.secs
        600
    """

    secs: float | None = None
    """Seconds between saves; not together with `steps`."""
    steps: int | None = None
    """Steps between saves."""
    hours: DailyHours | None = None
    """The daily hours outside of which `secs_outside_hours` is the interval."""
    secs_outside_hours: float | None = None
    """Seconds between saves outside of the daily window."""
    ignore_errors: bool = False
    """Whether training continues after a failed save; a request for a save has a setting of its own."""
    asynchronous: bool = False
    """Whether a checkpoint is written while training continues."""
    max_failures: int = 10
    """The run ends after so many saves in a row that failed for a reason that may pass: a full disk, a
    used-up quota, no free file descriptor. Until then it trains on and retries; 0 ends it with the first."""
    retry_secs: float = 30.0
    """Seconds until the next attempt after a save that failed, or that had to wait for the one before. The
    pause doubles with each failure in a row, up to five minutes."""
    last_secs: float = 5.0
    """Seconds for which the last save of a run is retried while it fails for a reason that may pass, and its
    export while it fails. Short, so that a run on a full disk ends within ten seconds of a SIGTERM."""
    close_secs: float = 600.0
    """Seconds that a run which ends by an error waits for the save being written."""

    def __post_init__(self) -> None:
        if self.secs is not None and self.steps is not None:
            raise ConfigError("Can not provide both save_checkpoints_secs and save_checkpoints_steps.")
        for name in ("secs", "steps", "secs_outside_hours", "retry_secs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"save: {name} must be above 0, got {value}")
        for name in ("max_failures", "last_secs", "close_secs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"save: {name} must not be negative, got {getattr(self, name)}")

    def timer(
        self,
        clock: Callable[[], float] = concurrency.time,
        timer: Callable[[], float] = concurrency.monotonic,
    ) -> SaveTimer:
        return SaveTimer(
            every_secs=self.secs,
            every_steps=NEVER_STEPS if self.secs is None and self.steps is None else self.steps,
            hours=self.hours,
            secs_outside_hours=self.secs_outside_hours,
            clock=clock,
            timer=timer,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A request for a save, whose caller waits for it."""

    ignore_errors: bool
    done: Future[str | None] = field(default_factory=Future)

    def answer(self, outcome: str | Exception | None) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception) and not self.ignore_errors:
            self.done.set_exception(outcome)
        else:
            self.done.set_result(None if isinstance(outcome, Exception) else outcome)


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """One save, on its way."""

    step: int
    started: float
    """On the monotonic clock."""
    requests: Sequence[_Request]
    timed: bool
    """The timer wanted it, so that an error is the run's own. Otherwise it is the requests'."""


@dataclass(slots=True, eq=False)
class _Writing:
    """A save that is written while training continues."""

    save: _Save
    thread: concurrency.Thread
    error: Exception | None = None
    """Set before the thread ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePlan:
    """What one save hook saves, and how it works with the other processes of its run."""

    dense_only: bool = False
    """Save dense weights only: not if a full checkpoint of the step exists, and not at the end."""
    no_first_save: bool = True
    """Do not save a model that was just created or restored."""
    always_final: bool = False
    """Save at the end even if no step was taken; a step that is on disk is not written again."""
    resumed: Callable[[], bool] = lambda: False
    """Whether the other processes trained on before this one rejoined them: then the step at which it starts
    may be in no checkpoint, and the end saves it."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Quiesces the other processes, from before the step is read until the snapshot is taken."""
    outlives: Callable[[Exception], bool] = lambda _: False
    """Whether training continues although a save failed with an error: the checkpoint is dropped, with a
    warning, and the next one is made as usual. The last one of a run is retried."""
    on_saved: Callable[[int, str | None], None] | None = None
    """Called with the step and prefix of a checkpoint on disk, to note it in a state file. An error of this
    is logged: the checkpoint is good."""


class SaveHook(Hook):
    """Saves checkpoints.

    Comes after the hook that restores, and before hooks that stop at what is saved.

    Args:
        guards: Told of a save before all listeners, and undone in reverse. Their errors are logged only.
        memory: Shared with the other save hooks of the same model directory.
        metrics: Counts `save_checkpoint`, `save_checkpoint_failed` (each attempt) and
            `save_checkpoint_postponed`, and times `save_checkpoint_time`, by mode: full or dense_only. Shows
            `save_checkpoint_age_seconds` and `save_checkpoint_failures_in_a_row`.
        clocks: The wall clock is for stamps and the hours of a daily window, the timer for every interval: a
            wall clock that is set must not stop saving.
    """

    essential = True

    def __init__(
        self,
        checkpointer: Snapshots,
        config: SaveConfig | None = None,
        *,
        plan: SavePlan | None = None,
        listeners: Sequence[SaveListener] = (),
        guards: Sequence[SaveListener] = (),
        memory: SaveMemory | None = None,
        metrics: Metrics | None = None,
        clocks: concurrency.Clocks | None = None,
    ) -> None:
        self.config = config or SaveConfig()
        self._plan = plan or SavePlan()
        clocks = clocks or concurrency.Clocks()
        self.timer = self.config.timer(clocks.wall, clocks.timer)
        """Others may reset or disable it, on the training thread; requests and the end do not ask it."""
        self._checkpointer = checkpointer
        self._files = FileReserve()
        self._listeners = tuple(listeners)
        self._guards = tuple(guards)
        self._memory = memory or SaveMemory()
        self._clock, self._seconds, self._sleep = clocks.wall, clocks.timer, clocks.sleep
        self._mode = "dense_only" if self._plan.dense_only else "full"
        metrics = metrics if metrics is not None else Metrics()
        self._count_saved = metrics.counter("save_checkpoint", "Checkpoints saved", ["mode"])
        self._count_failed = metrics.counter("save_checkpoint_failed", "Saves that failed", ["mode"])
        self._count_postponed = metrics.counter(
            "save_checkpoint_postponed", "Saves that had to wait for the previous one", ["mode"]
        )
        self._time_saved = metrics.histogram(
            "save_checkpoint_time", "Seconds from the start of a save to its end", ["mode"], buckets=_BUCKETS
        )
        self._failures_in_a_row = metrics.gauge(
            "save_checkpoint_failures_in_a_row", "Saves that failed since the last one that did not", ["mode"]
        )
        self._turn = concurrency.RLock()  # guards what is below: several threads may step
        self._run: TrainingRun | None = None
        self._trainer: int | None = None
        self._first_step: int | None = None
        self._inside = False
        self._is_last = False
        self._writing: _Writing | None = None
        self._late_error: Exception | None = None
        self._dropped: Exception | None = None
        self._told_postponed = False
        self._lock = concurrency.Lock()  # guards what is below, which the writing thread uses too
        self._saved: tuple[int, str | None] | None = None
        self._saved_at: float | None = None
        self._saved_when = (
            self._seconds()
        )  # the same moment on the monotonic clock; the start before the first
        self._failures = 0
        self._trouble = ""
        self._requests: list[_Request] = []
        self._closed = False
        metrics.gauge(
            "save_checkpoint_age_seconds",
            "Seconds since this run last saved a checkpoint, or since it started",
            ["mode"],
        ).read_from(lambda: self._seconds() - self._saved_when, mode=self._mode)

    @property
    def saved_at(self) -> float | None:
        """When this run's last save was on disk, in Unix seconds; None before the first. From any thread."""
        with self._lock:
            return self._saved_at

    @property
    def trouble(self) -> str:
        """Why the newest state is not saved, for a person; empty while saves succeed. From any thread."""
        with self._lock:
            found = [self._trouble]
        found += [listener.trouble for listener in self._listeners]
        return "; ".join(filter(None, found))

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written while training continues."""
        with self._turn:
            return self._is_writing()

    def has_saved(self, step: int) -> bool:
        """Whether the last save of this run is on disk and of this step. From any thread."""
        with self._lock:
            return self._saved is not None and self._saved[0] == step

    # The life of a run

    def begin(self, run: TrainingRun) -> None:  # noqa: ARG002
        if self._plan.dense_only:
            self._memory.note_dense_only()
        for listener in (*self._guards, *self._listeners):
            listener.begin()

    def after_create(self, run: TrainingRun) -> None:
        with self._turn:
            self._run = run
            self._trainer = threading.get_ident()
            if self._plan.no_first_save:
                self._first_step = None if self._plan.resumed() else run.step
                self.timer.stamp(run.step)
            else:
                self._save(run, timed=True)
                self._raise_late()

    def before_step(self, run: TrainingRun) -> None:
        """Serve what other threads asked for. A thread that holds training back may call this, too."""
        with self._turn:
            if self._requests and not self._is_writing():
                self._save(run, timed=False)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.look(run)

    def look(self, run: TrainingRun, *, wanted: bool = False) -> None:
        """Save if it is time to, or `wanted`; for a training thread that has no steps to take, too."""
        with self._turn:
            self._look_back(run.step)
            writing = self._is_writing()
            self._raise_late()
            if self.timer.backs_off or not (wanted or self.timer.should_trigger(run.step)):
                return
            if writing:
                self._postpone(run.step)
                return
            self._save(run, timed=True)
            self._raise_late()

    def end(self, run: TrainingRun) -> None:
        """Wait for the save being written, write the last one, and tell the listeners."""
        with ExitStack() as later, self._turn:
            for listener in reversed((*self._guards, *self._listeners)):
                later.callback(listener.end)
            self._wait_for_writing()
            give_up = self._seconds() + self.config.last_secs
            if not self._plan.dense_only and self._needs_final(run.step):
                # What could not be saved before is saved now, or this is the error that counts.
                self._save_last(run, give_up)
            elif self._requests:
                self._save(run, timed=False, wait_for_it=True)
            self._raise_late()
            self._retry_listeners(give_up)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left, self._requests = self._requests, []
        for request in left:
            request.answer(TrainingError("the run ended before it could save as requested"))
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with self._memory.waiting_for_writer():
                writing.thread.join(self.config.close_secs)
            if writing.thread.is_alive():
                _log.error(
                    "gave up on the checkpoint of step %d: it is still being written after %.0f s",
                    writing.save.step,
                    self.config.close_secs,
                )
        self._files.close()

    # On demand

    def trigger_save(self, ignore_save_errors: bool = False) -> Future[str | None]:
        """Save now, whatever the timer says and whether it is enabled or not. From any thread.

        On the training thread the checkpoint is on disk when this returns, and its error is raised
        here. From another thread it is cut before the next step; the future says when it is on disk and
        where, or has the error. A step that is on disk already is not written again.

        Args:
            ignore_save_errors: An error is logged, and the answer is None.
        """
        request = _Request(ignore_save_errors)
        with self._lock:
            if self._closed:
                raise TrainingError("cannot save: the run has ended")
            self._requests.append(request)
        if threading.get_ident() == self._trainer and self._run is not None and not self._inside:
            with self._turn:
                self._wait_for_writing()
                self._save(self._run, timed=False, wait_for_it=True)
            request.done.result()
        return request.done

    def wait(self) -> None:
        """Wait for the save being written, if there is one; call this before a run is taken back.

        On the training thread. An error of that save is raised after the next step, as ever.
        """
        with self._turn:
            self._wait_for_writing()

    # One save

    def _save(self, run: TrainingRun, *, timed: bool, wait_for_it: bool = False) -> None:
        """Save the state as it is; leave the error, if it is the run's, in `_late_error`."""
        try:
            with self._memory.waiting(), ExitStack() as held:
                held.enter_context(self._plan.together())
                self._save_here(run, held, timed=timed, wait_for_it=wait_for_it)
        except Exception as error:
            if not self._plan.outlives(error):
                raise
            self._drop(run.step, error)

    def _save_last(self, run: TrainingRun, give_up: float) -> None:
        """Write the last checkpoint of a run; one that others spoiled, or a full disk, is tried again."""
        pause, attempts = FIRST_LAST_RETRY_SECS, LAST_ATTEMPTS
        while True:
            self._late_error = self._dropped = None
            self._is_last = True
            try:
                self._save(run, timed=True, wait_for_it=True)
            finally:
                self._is_last = False
            error = self._late_error or self._dropped
            if error is None:
                return
            if error is self._dropped:
                attempts -= 1
                if attempts == 0:
                    self._late_error = error
                    return
            elif isinstance(error, TransientFilesystemError) and self.config.max_failures > 0:
                left = give_up - self._seconds()
                if left <= 0:
                    how_long = f"for {self.config.last_secs:g} s at its end (save.last_secs)"
                    final = None if self.config.ignore_errors else self._final(run, error, how_long)
                    self._late_error = final
                    return
                self._sleep(min(pause, left))
                pause *= 2
            else:
                return

    def _retry_listeners(self, give_up: float) -> None:
        """Retry what failed after the last save, such as an export, in the time that the save has left. What
        fails until the end stays in `trouble`, for the report of the run."""
        pause = FIRST_LAST_RETRY_SECS
        while failing := [listener for listener in self._listeners if listener.trouble]:
            left = give_up - self._seconds()
            if left <= 0:
                return
            self._sleep(min(pause, left))
            pause *= 2
            for listener in failing:
                listener.retry()

    def _drop(self, step: int, error: Exception) -> None:
        self._dropped = error
        _log.warning("dropped the checkpoint of step %d, and training continues: %s", step, error)
        self.timer.stamp(step)
        self.timer.rearm(self.config.retry_secs)

    def _save_here(self, run: TrainingRun, held: ExitStack, *, timed: bool, wait_for_it: bool) -> None:
        """Save, and release what is `held` once the state is cut."""
        with self._lock:
            requests, self._requests = self._requests, []
            on_disk = self._saved
        step = run.step
        self.timer.stamp(step)  # first: a save that fails is not to be tried at the very next step
        if not timed and on_disk is not None and on_disk[0] == step:
            _answer(requests, on_disk[1])
            return
        if self._plan.dense_only and self._memory.has_full(step):
            _answer(requests, None)
            return
        save = _Save(step, self._seconds(), requests, timed)
        behind = self.config.asynchronous and not wait_for_it
        if not self._plan.dense_only:
            self._memory.note_writing(step)
        self._inside = True
        try:
            with self._guarded(step):
                for listener in self._listeners:
                    self._attempt(f"preparing {type(listener).__name__}", partial(listener.before_save, step))
                moment = self._attempt("cutting the state", partial(self._checkpointer.snapshot, step))
                held.close()
                if not behind:
                    self._finish(run, save, moment)
            if behind:
                self._start_writing(run, save, moment)
        except Exception as error:
            _answer(requests, error)
            self._note_failure(save, error)
        except BaseException as error:
            _answer(requests, _interrupted(error))
            raise
        finally:
            self._inside = False

    def _finish(self, run: TrainingRun, save: _Save, moment: PendingCheckpoint) -> None:
        """Do what remains once the state is cut; on either thread."""
        written = False
        try:
            prefix = self._attempt("writing", moment.write)
            written = True
        finally:
            moment.close(saved=written)
        for listener in self._listeners:
            if self._attempt(f"telling {type(listener).__name__}", partial(listener.after_save, save.step)):
                run.request_stop(f"{type(listener).__name__} asked to stop after saving step {save.step}")
        with self._lock:
            self._saved = save.step, prefix
            self._saved_at, self._saved_when = self._clock(), self._seconds()
            failures, self._failures, self._trouble = self._failures, 0, ""
        self._failures_in_a_row.set(0, mode=self._mode)
        if failures:
            _log.warning("saving works again, after %d failures: step %d is on disk", failures, save.step)
        if not self._plan.dense_only:
            self._memory.note_full(save.step)
            self._memory.note_writing(None)
        seconds = self._seconds() - save.started
        self._count_saved.inc(mode=self._mode)
        self._time_saved.observe(seconds, mode=self._mode)
        kind = self._mode if self._plan.dense_only else moment.kind
        _log.info("saved step %d (%s) in %.1f s: %s", save.step, kind, seconds, prefix)
        if self._plan.on_saved is not None:
            try:
                self._plan.on_saved(save.step, prefix)
            except Exception:
                _log.exception("the checkpoint of step %d is saved, but recording it failed", save.step)
        _answer(save.requests, prefix)

    def _attempt(self, doing: str, act: Callable[[], T]) -> T:
        for _ in range(ATTEMPTS - 1):
            try:
                return act()
            except RetryableError:  # a process is gone, and this run with it
                self._count_failed.inc(mode=self._mode)
                raise
            except TransientFilesystemError as error:
                self._count_failed.inc(mode=self._mode)
                # A full disk needs time, not haste. Files are another matter: the reserve has some.
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            except Exception as error:
                self._count_failed.inc(mode=self._mode)
                unexpected = not isinstance(error, MonolithError)
                _log.warning(
                    "saving a checkpoint: %s failed, retrying: %s", doing, error, exc_info=unexpected
                )
        try:
            # Connections may have taken all files that this process may open; the reserve is for this. Those
            # that wait to be accepted may take it as well, until the port closes them: a moment later.
            with self._files.given_up():
                for _ in range(FILES_ATTEMPTS):
                    try:
                        return act()
                    except Exception as error:
                        if not is_out_of_files(error):
                            raise
                        self._sleep(FILES_PAUSE)
                return act()
        except Exception:
            self._count_failed.inc(mode=self._mode)
            raise

    @contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        for guard in self._guards:
            try:
                guard.before_save(step)
            except Exception:
                _log.exception("%s failed before the save at step %d", type(guard).__name__, step)
        try:
            yield
        finally:
            for guard in reversed(self._guards):
                try:
                    guard.after_save(step)
                except Exception:
                    _log.exception("%s failed after the save at step %d", type(guard).__name__, step)

    def _note_failure(self, save: _Save, error: Exception) -> None:
        if not self._plan.dense_only:
            self._memory.note_writing(None)
        if self._plan.outlives(error):
            self._drop(save.step, error)
            return
        with self._lock:
            self._failures += 1
            failures = self._failures
        self._failures_in_a_row.set(failures, mode=self._mode)
        if isinstance(error, TransientFilesystemError) and self.config.max_failures > 0:
            self._retry_later(save, error, failures)
            return
        unexpected = None if isinstance(error, MonolithError) else error
        _log.error("saving step %d (%s) failed: %s", save.step, self._mode, error, exc_info=unexpected)
        self.timer.rearm(self.config.retry_secs)
        if save.timed and not self.config.ignore_errors:
            self._late_error = error

    def _retry_later(self, save: _Save, error: TransientFilesystemError, failures: int) -> None:
        """Let training continue after a save that may succeed later; end the run if there were too many.

        Nothing is lost meanwhile: the changed rows still count as changed, and the source is not told of
        positions that no checkpoint holds.
        """
        config, run = self.config, self._run
        pause = min(
            config.retry_secs * 2 ** min(failures - 1, 30), max(LONGEST_RETRY_SECS, config.retry_secs)
        )
        folder = "" if run is None else run.model_dir
        free = filesystem.free_bytes(folder) if folder else None
        room = "" if free is None else f", {describe_bytes(free)} free"
        attempt = f"attempt {failures} of {config.max_failures}"
        with self._lock:
            self._trouble = f"saving fails, {attempt}{room}: {error} {self._newest()}"
        if self._is_last:
            _log.warning("saving the last step, %d, to %s failed%s: %s", save.step, folder, room, error)
            self._late_error = error
            return
        self.timer.rearm(pause, not_sooner=True)
        if failures >= config.max_failures and save.timed and not config.ignore_errors:
            assert run is not None
            self._late_error = self._final(run, error, f"{failures} times in a row (save.max_failures)")
            return
        _log.warning(
            "saving step %d to %s failed (%s%s): %s Training continues; retrying in %.0f s. %s",
            *(save.step, folder, attempt, room, error, pause, self._newest()),
        )

    def _final(self, run: TrainingRun, error: TransientFilesystemError, how_often: str) -> Exception:
        """Return the error that ends a run whose saves keep failing."""
        again = "it starts from the beginning" if self._newest_step == 0 else "it resumes from there"
        failure = TransientFilesystemError(
            f"the run ends at step {run.step} without a checkpoint of it: saving failed {how_often}: {error} "
            f"{self._newest()} Make room in {run.model_dir} and start the run again: {again}."
        )
        failure.__cause__ = error
        return failure

    def _newest(self) -> str:
        """Say which checkpoint is the newest, as far as this process knows; the lock may be held."""
        if (step := self._newest_step) is None:
            return "No checkpoint was saved since this process started."
        return f"The newest checkpoint is of step {step}." if step else "No checkpoint was saved yet."

    @property
    def _newest_step(self) -> int | None:
        """Step of the newest checkpoint, 0 if there is none; None if an earlier process saved it."""
        return self._first_step if self._saved is None else self._saved[0]

    # Writing while training continues

    def _start_writing(self, run: TrainingRun, save: _Save, moment: PendingCheckpoint) -> None:
        def write() -> None:
            yield_to_others()
            try:
                self._finish(run, save, moment)
            except BaseException as error:
                writing.error = error if isinstance(error, Exception) else _interrupted(error)
                _answer(save.requests, writing.error)

        # A daemon, so that a save that hangs can be given up.
        writing = _Writing(save, concurrency.Thread(target=write, name="save-checkpoint", daemon=True))
        try:
            writing.thread.start()
        except BaseException:
            moment.close(saved=False)
            raise
        self._writing = writing
        self._told_postponed = False

    def _is_writing(self) -> bool:
        if self._writing is not None and not self._writing.thread.is_alive():
            self._wait_for_writing()
        return self._writing is not None

    def _wait_for_writing(self) -> None:
        """Wait for the save being written, if there is one, and keep its error."""
        if self._writing is not None:
            with self._memory.waiting_for_writer():
                self._writing.thread.join()
            writing, self._writing = self._writing, None
            if writing.error is not None:
                self._note_failure(writing.save, writing.error)

    def _postpone(self, step: int) -> None:
        self._count_postponed.inc(mode=self._mode)
        self.timer.stamp(step)
        self.timer.rearm(self.config.retry_secs)
        if self._writing is not None and not self._told_postponed:
            self._told_postponed = True
            _log.warning(
                "the save due at step %d waits: the checkpoint of step %d is still being written. "
                "If this happens often, save less often.",
                step,
                self._writing.save.step,
            )

    # What is known

    def _raise_late(self) -> None:
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error

    def _look_back(self, step: int) -> None:
        """Forget the saves ahead of this step: the run was taken back to an earlier state."""
        with self._lock:
            if self._saved is None or step >= self._saved[0]:
                return
            self._saved = None
        self.timer.stamp(step)
        if not self._plan.dense_only:
            self._memory.note_full(None)

    def _needs_final(self, step: int) -> bool:
        with self._lock:
            if self._saved is not None and self._saved[0] == step:
                return False
        return step != self._first_step or self._plan.always_final or self._memory.has_dense_only


def _answer(requests: Sequence[_Request], outcome: str | Exception | None) -> None:
    for request in requests:
        request.answer(outcome)


def _interrupted(error: BaseException) -> Exception:
    failure = TrainingError("interrupted while saving")
    failure.__cause__ = error
    return failure
