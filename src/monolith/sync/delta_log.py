"""DeltaLog: the newest deltas of one share, as many as fit into a bound of bytes.

A publisher appends, readers wait for what comes after their place. Nobody who reads slowly is waited for:
what does not fit any more goes, the oldest first, and whoever needed it takes a snapshot.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from monolith.errors import UnavailableError
from monolith.sync.channel import ShareLog, TakeSnapshot
from monolith.sync.messages import Delta, LogPlace, Message, PublishState

LOG_BYTES = 256 << 20
"""What a log keeps by default."""

_MESSAGE_BYTES = 256


def delta_bytes(delta: Delta) -> int:
    """Return about how much memory a delta takes."""
    tensors: list[Tensor] = [*delta.removed.values(), *(delta.dense or {}).values()]
    for rows in delta.rows.values():
        tensors += [rows.ids, rows.event_times, rows.values, rows.state]
    for digests in delta.digests.values():
        tensors += [digests.buckets, digests.sums]
    return _MESSAGE_BYTES + sum(tensor.nbytes for tensor in tensors)


class DeltaLog:
    """What is kept of a share. Thread-safe.

    Args:
        limit_bytes: The oldest deltas go where all of them take more.
    """

    def __init__(self, limit_bytes: int = LOG_BYTES) -> None:
        self._limit = limit_bytes
        self._changed = threading.Condition()
        # All below is guarded by the condition.
        self._log: ShareLog | None = None
        self._snapshot: TakeSnapshot | None = None
        self._deltas: deque[tuple[Delta, int]] = deque()
        self._bytes = 0
        self._state = PublishState()
        self._closed = False

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        """Begin an epoch, and drop what was kept of another."""
        with self._changed:
            self._log, self._snapshot = log, snapshot
            self._deltas.clear()
            self._bytes = 0
            self._closed = False
            self._changed.notify_all()

    def append(self, delta: Delta) -> None:
        """Put a delta at the end. One that is there already is passed over.

        Raises:
            UnavailableError: The log was not opened, or for another epoch, or deltas before it are missing.
        """
        with self._changed:
            log = self._opened()
            newest, place = log.newest, delta.place
            if place.epoch != newest.epoch or place.sequence > newest.sequence + 1:
                raise UnavailableError(
                    f"cannot append delta {place.sequence} of epoch {place.epoch} to the log of share "
                    f"{log.share[0]}: its newest is {newest.sequence} of {newest.epoch}. Begin a new epoch."
                )
            if place.sequence <= newest.sequence:
                return
            size = delta_bytes(delta)
            self._deltas.append((delta, size))
            self._bytes += size
            while self._bytes > self._limit:
                self._bytes -= self._deltas.popleft()[1]
            oldest = self._deltas[0][0].place.sequence if self._deltas else place.sequence + 1
            self._log = replace(log, newest=place, oldest=oldest)
            self._changed.notify_all()

    def say(self, state: PublishState) -> None:
        """Keep a publish state, unless a newer one is known."""
        with self._changed:
            if state.publisher != self._state.publisher or state.number >= self._state.number:
                self._state = state
                self._changed.notify_all()

    def close(self) -> None:
        """Let readers go. What was kept is dropped."""
        with self._changed:
            self._closed = True
            self._deltas.clear()
            self._bytes = 0
            self._changed.notify_all()

    @property
    def log(self) -> ShareLog | None:
        """What is known of it; None where it was not opened, or was closed."""
        with self._changed:
            return None if self._closed else self._log

    @property
    def state(self) -> PublishState:
        """The newest publish state."""
        with self._changed:
            return self._state

    @property
    def kept_bytes(self) -> int:
        with self._changed:
            return self._bytes

    def after(self, place: LogPlace | None) -> list[Delta] | None:
        """Return the deltas after a place, oldest first; None where only a snapshot will do.

        Raises:
            UnavailableError: The log was not opened, or was closed.
        """
        with self._changed:
            log = self._opened()
            if place is None or place.epoch != log.newest.epoch or place.sequence > log.newest.sequence:
                return None
            if place.sequence < log.oldest - 1:
                return None
            return [delta for delta, _ in self._deltas if delta.place.sequence > place.sequence]

    def snapshot(self, buckets: Tensor | None = None) -> Iterator[Message]:
        """Read the rows of the share, where they are. Nothing is locked meanwhile."""
        with self._changed:
            self._opened()
            take = self._snapshot
        assert take is not None
        return take(buckets)

    def wait(self, place: LogPlace, state: int, timeout: float) -> bool:
        """Wait until there is more than a reader knows, at most so many seconds; return whether there is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._log is None
                    or self._log.newest != place
                    or self._state.number != state
                ),
                timeout,
            )

    def _opened(self) -> ShareLog:
        if self._log is None or self._closed:
            raise UnavailableError("nobody publishes this share now; ask again later")
        return self._log
