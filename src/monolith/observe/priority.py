"""How much of the processor work beside the training may have."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

_LOW = 10


def yield_to_others() -> None:
    """Let this thread, and those it starts, have the processor only where others leave it idle.

    For work beside the training, such as writing a checkpoint. Does nothing where the system gives
    priorities to processes only.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)


def has_yielded() -> bool:
    """Whether this thread, or the one that started it, has yielded to others."""
    if sys.platform != "linux":
        return False
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) >= _LOW


class Resting:
    """A `Progress` that rests: a thread that has yielded to others gets no more than a share of a processor.

    A lower priority is not enough where threads of the training wait busily for each other: whatever one of
    them loses, all of them lose. A thread for which training waits has not yielded, and does not rest.

    Args:
        share: Of one processor, above 0 and up to 1, which never rests.
        clock: Seconds of work of this thread.
        rests: Whether this thread is one that rests.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
        rests: Callable[[], bool] = has_yielded,
    ) -> None:
        self._rest = 1 / share - 1
        self._clock = clock
        self._sleep = sleep
        self._rests = rests
        self._threads = threading.local()

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        """Rest in proportion to the work since the last call of this thread."""
        if self._rest == 0 or not self._rests():
            return
        now = self._clock()
        worked = now - getattr(self._threads, "since", now)
        if worked > 0:
            self._sleep(worked * self._rest)
        self._threads.since = self._clock()
