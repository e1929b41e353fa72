"""Control from outside: an operator who wants a checkpoint, or the end, of a running job.

Wishes come from other threads: a file that is looked for, a server that is called. They leave
a flag, and the training thread acts on it after its step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf import text_format  # type: ignore[import-untyped]

from monolith import concurrency, filesystem
from monolith.errors import FileMissingError
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.hooks.barrier import STOP, Barrier, try_place, wait_until_blocked
from monolith.wire.controller_pb2 import ControllerHooksProto

_log = logging.getLogger(__name__)

ACTION_FILE = "monolith_action"
RESPONSE_FILE = "monolith_action_response"


class ControllerHook(Hook):
    """Stops or saves after the next step, when asked to from any thread.

    Args:
        trigger_save: Called on the training thread; `SaveHook.trigger_save`, for one.
        barrier: Brings all workers to a halt before a stop, so that none is in the middle of a step.
        wait_seconds: How long to wait for them at most.
    """

    def __init__(
        self,
        trigger_save: Callable[[], object],
        barrier: Barrier | None = None,
        *,
        wait_seconds: float = 30.0,
        poll: float = 2.0,
        clock: Callable[[], float] = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        self._trigger_save = trigger_save
        self._barrier = barrier
        self._wait_seconds = wait_seconds
        self._poll = poll
        self._clock = clock
        self._sleep = sleep
        self._stop = concurrency.Event()
        self._save = concurrency.Event()

    def request_stop(self) -> None:
        """End the run after its current step, all workers together."""
        self._stop.set()

    def request_save(self) -> None:
        """Save after the current step; asking twice before that saves once."""
        self._save.set()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if self._stop.is_set():
            self._stop.clear()
            self._halt_workers()
            run.request_stop("the controller was told to stop")
        elif self._save.is_set():
            self._save.clear()
            self._trigger_save()

    def _halt_workers(self) -> None:
        if self._barrier is None:
            return
        own = try_place(self._barrier, STOP)
        try:
            wait_until_blocked(
                self._barrier, self._wait_seconds, self._poll, clock=self._clock, sleep=self._sleep
            )
        finally:
            if own:
                self._barrier.remove()


class ActionFileHook(Hook):
    """Does what the file `monolith_action` in the model directory says, and writes an answer next to it.

    The file holds a ControllerHooksProto as text: `action: TRIGGER_SAVE` or `action: STOP`. It is
    removed whatever it held, and `monolith_action_response` says "OK" or what was wrong.

    Args:
        interval: Seconds between looks, which a thread takes.
    """

    def __init__(self, controller: ControllerHook, *, interval: float = 60.0) -> None:
        self._controller = controller
        self._interval = interval
        self._closed = concurrency.Event()
        self._thread: concurrency.Thread | None = None

    def after_create(self, run: TrainingRun) -> None:
        if run.model_dir and self._thread is None:
            self._closed.clear()
            self._thread = concurrency.Thread(
                target=self._watch, args=(run.model_dir,), name="action-file", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self, model_dir: str) -> bool:
        """Look once; return whether there was a file."""
        path = filesystem.join(model_dir, ACTION_FILE)
        try:
            request = filesystem.read_bytes(path)
        except FileMissingError:
            return False
        try:
            answer = self._act(request)
        finally:
            filesystem.remove(path)
        _log.info("%s: %s", path, answer)
        with filesystem.atomic_write(filesystem.join(model_dir, RESPONSE_FILE)) as file:
            file.write(answer.encode())
        return True

    def _act(self, request: bytes) -> str:
        try:
            action = text_format.Parse(request, ControllerHooksProto()).action
        except (text_format.ParseError, UnicodeDecodeError) as error:
            return f"cannot parse the action: {error}"
        if action == ControllerHooksProto.STOP:
            self._controller.request_stop()
        elif action == ControllerHooksProto.TRIGGER_SAVE:
            self._controller.request_save()
        else:
            return f"unknown action {action}: write `action: TRIGGER_SAVE` or `action: STOP`"
        return "OK"

    def _watch(self, model_dir: str) -> None:
        while not self._closed.wait(self._interval):
            try:
                self.poll(model_dir)
            except Exception:
                # A disk that does not answer now may answer at the next look.
                _log.exception("looking for %s in %s failed", ACTION_FILE, model_dir)
