"""Makes snapshots now and then, for channels whose readers cannot ask the publisher for one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from monolith.errors import MonolithError
from monolith.observe import Doublings
from monolith.sync.channel import TakeSnapshot
from monolith.sync.messages import Message

_log = logging.getLogger(__name__)

WriteSnapshot = Callable[[Iterator[Message]], None]
"""Writes all messages of a snapshot, or raises and leaves nothing that a reader would take."""


class SnapshotMaker:
    """A thread that writes a snapshot whenever one is wanted, and tries again where it fails. Thread-safe.

    Args:
        write: Is handed the messages; from the thread.
        asked: Whether a reader wants one; called every `look_every` seconds, from the thread.
    """

    def __init__(
        self, write: WriteSnapshot, *, asked: Callable[[], bool] = lambda: False, look_every: float = 1.0
    ) -> None:
        self._write = write
        self._asked = asked
        self._look_every = look_every
        self._changed = threading.Condition()  # guards all below
        self._take: TakeSnapshot | None = None
        self._wanted = self._closed = False
        self._epoch = 0
        self._thread: threading.Thread | None = None

    def begin(self, take: TakeSnapshot) -> None:
        """Make snapshots of a new epoch from now on, the first at once; one in progress is given up."""
        with self._changed:
            self._take = take
            self._epoch += 1
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def want(self) -> None:
        """Make one soon."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give up what is in progress; return when the thread has ended. Closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        failures, worth_saying = 0, Doublings()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, self._look_every)
                if self._closed:
                    return
                wanted, self._wanted = self._wanted, False
                take, epoch = self._take, self._epoch
            assert take is not None
            try:
                if wanted or self._asked():
                    self._write(self._while_current(take, epoch))
                    failures, worth_saying = 0, Doublings()
            except _GivenUpError:
                continue
            except Exception as error:  # whatever it is, publishing goes on, and the next one may do
                failures += 1
                level = logging.WARNING if isinstance(error, MonolithError) else logging.ERROR
                if worth_saying.due(failures):  # a disk may be full for long, and it is tried every second
                    text = "delta channel: a snapshot could not be written (%d times), retrying: %s"
                    _log.log(level, text, failures, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._look_every)
                    self._wanted = True

    def _while_current(self, take: TakeSnapshot, epoch: int) -> Iterator[Message]:
        for message in take():
            with self._changed:
                if self._closed or self._epoch != epoch:
                    raise _GivenUpError
            yield message


class _GivenUpError(Exception):
    """A new epoch began, or the channel was closed, while a snapshot was written."""
