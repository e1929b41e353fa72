"""Work on the records of a stream that may pause, done ahead on several threads.

    source ──one thread reads──► threads: work ──in order──► consumer
              and notes the position after each item

What arrives as it happens must not wait for what arrives later. So the source is read by a thread of its own,
and the consumer gets the oldest item as soon as the work on it is done, whether or not the source has more.

An item that waits for its consumer gets older, and so do the events that could have come with the next one.
So reading pauses while all items that were read are done and none was taken: then the consumer is slower than
the threads, and to read further would only make events wait here instead of in the source. Memory is bounded
by an item for each thread, the one that the consumer has, and the one being read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from monolith import concurrency
from monolith.concurrency import Condition, Event, Future, Thread, ThreadPoolExecutor
from monolith.data.records import Records
from monolith.data.source import Position, Stream, closed_after
from monolith.errors import DataError

Made = TypeVar("Made")

_PATIENCE_S = 30.0
"""How long to wait for a source whose read was stopped."""


_LOOK_S = 0.2
"""How often a consumer that waits looks whether it is told to stop."""


class InWork(NamedTuple, Generic[Made]):
    """Records that a thread works on, and the position after them."""

    records: Records
    work: Future[Made]
    position: Position


class LiveAhead(Generic[Made]):
    """Reads a stream in a thread, and works on its records in others.

    Args:
        owner: The reading ends when this is forgotten; the source and the work may not refer to it.
        source: Is read by the thread from here on, until `join` has returned.
        work: Is called on any thread.
    """

    def __init__(
        self, owner: object, source: Stream[Records], work: Callable[[Records], Made], threads: int
    ) -> None:
        self._source = source
        self._work = work
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "monolith-batch")
        self._stop = Event()
        self._changed = Condition()  # guards all below
        self._started: deque[InWork[Made]] = deque()  # and not taken yet
        self._unfinished = 0
        """How many items there still is work on, also of those that were taken."""
        self._ended = self._closed = False
        self._error: BaseException | None = None
        """Of the source; raised after the items before it."""
        # A simulated machine ends its threads itself.
        self._forgotten = None if concurrency.machine() else weakref.finalize(owner, self.close)
        source.read_until(self._stop)
        # A daemon, or a source that never returns would keep the process from ending.
        self._thread = Thread(target=self._read, name="monolith-read-live", daemon=True)
        self._thread.start()

    def take(self, until: Event) -> InWork[Made] | None:
        """Return the oldest item, which may still be worked on; None at the end of the stream, or, in place
        of waiting, once an event is set.

        Raises:
            DataError: It was closed.
            BaseException: What the source raised, once.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: self._started or self._ended or self._closed, _LOOK_S):
                if until.is_set():
                    return None
            if self._closed:
                raise DataError("pipeline: restored or closed while it was being read")
            if self._started:
                self._changed.notify_all()
                return self._started.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    def close(self) -> None:
        """Read no more, and drop the items that were not taken. From any thread; waits for nothing."""
        with self._changed:
            self._closed = True
            self._started.clear()
            self._changed.notify_all()
        if self._forgotten is not None:
            self._forgotten.detach()
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until the source is not read any more; return False if that takes longer."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            with closed_after(self._source) as items:
                while self._has_room():
                    records = next(items, None)
                    if records is None:
                        break
                    self._start(records, self._source.position())
        except BaseException as error:
            with self._changed:
                self._error = error
        finally:
            self._source.read_until(Event())  # for who reads it later
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until there is room for an item that is worth reading; return False if it was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not self._started
                    or (self._unfinished > 0 and len(self._started) < self._threads)
                )
            )
            return not self._closed

    def _start(self, records: Records, position: Position) -> None:
        with self._changed:
            if self._closed:
                return
            self._unfinished += 1
            self._started.append(InWork(records, self._pool.submit(self._do, records), position))
            self._changed.notify_all()

    def _do(self, records: Records) -> Made:
        try:
            return self._work(records)
        finally:
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()
