"""Work that is done behind its caller's back, one piece at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

_END_WITHIN = 5.0
"""Seconds that the work under way has to end when nobody wants it any more."""

Work = Callable[[], None]


class Behind:
    """A thread that does what it is given, in order. Used by one other thread.

        given ──► waiting ──► under way ──► done
                                 └──error──► all later calls raise it, and nothing more is done

    Args:
        what: Names the work in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[Work] = deque()
        self._under_way = False
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def give(self, work: Work) -> None:
        """Have some work done after all that was given before.

        Raises:
            Exception: What earlier work raised.
        """
        with self._changed:
            self._raise()
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._what, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, at_most: int = 0) -> None:
        """Return when no more than so many pieces of work are not done.

        Raises:
            Exception: What one of them raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._left() <= at_most)
            self._raise()

    def close(self) -> None:
        """End the thread. Work that was not begun is dropped, and said: `wait` comes before a clean end."""
        with self._changed:
            self._closed = True
            lost, thread = len(self._waiting), self._thread
            self._waiting.clear()
            self._changed.notify_all()
        if lost:
            _log.warning("%s: %d were dropped, because the run failed", self._what, lost)
        if thread is not None:
            thread.join(_END_WITHIN)

    # The lock is held, except in `_run`.

    def _left(self) -> int:
        return len(self._waiting) + self._under_way

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._under_way = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                work = self._waiting.popleft()
                self._under_way = True
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._under_way = False
                    self._changed.notify_all()
                return
