"""The person at the terminal: lines for them, and their signals that stop a run."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from monolith.observe.logs import only_warnings, process_label

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While its block lasts, hands the first SIGINT or SIGTERM to `stop`, by name; the next ends the block.

    A handler runs in the middle of whatever the main thread does, which may hold any lock. So it only
    leaves a note, and a thread of its own makes the call.

    Args:
        stop: Called on that thread.
        say: Given a line for the person who sent the signal.
        doing: What is finished before it stops.
        again: What a person may do after an abort.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        say: Callable[[str], None],
        *,
        doing: str = "this step",
        again: str = "run the same command again to continue from the last checkpoint",
    ) -> None:
        self._doing = doing
        self._again = again
        self._stop = stop
        self._say = say
        self._notes: queue.SimpleQueue[signal.Signals | None] = (
            queue.SimpleQueue()
        )  # a handler may put into it
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None
        """The first that came."""
        self._aborted = False

    def status(self, stop_reason: str) -> int:
        """Return the exit status of a run that ended for this reason: 128 + the signal, if it was one."""
        if self.received is not None and stop_reason == self.received.name:
            return 128 + self.received
        return 0

    def __enter__(self) -> Self:
        self._thread.start()
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._notes.put(None)
        self._thread.join()
        if self._aborted:
            self._say(f"aborted; {self._again}")

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is not None:
            self._aborted = True
            raise SystemExit(128 + number)
        self.received = signal.Signals(number)
        self._notes.put(self.received)

    def _watch(self) -> None:
        while (received := self._notes.get()) is not None:
            again = "press Ctrl-C again" if received is signal.SIGINT else "send it again"
            self._say(f"{received.name}: stopping after {self._doing}; {again} to abort")
            self._stop(received.name)


class EverySignal:
    """While its block lasts, calls `stop` with the name of every SIGINT and SIGTERM, and prints nothing.

    As above, the handler only leaves a note, and a thread makes the calls.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._notes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {
                number: signal.signal(number, lambda number, _: self._notes.put(signal.Signals(number).name))
                for number in STOP_SIGNALS
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._notes.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (name := self._notes.get()) is not None:
            self._stop(name)


def say(line: str) -> None:
    """Write a line of information to standard error, unless only warnings are shown."""
    if not only_warnings():
        warn(line)


def warn(line: str) -> None:
    """Write a line about something that is wrong, or may be, to standard error. A closed pipe is no error."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{process_label()}{line}\n")
        sys.stderr.flush()
