"""MemoryChannel: the delta channel within one process, the plain one, which can also misbehave on purpose."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from monolith.errors import UnavailableError
from monolith.sync.channel import ShareLog, TakeSnapshot
from monolith.sync.delta_log import LOG_BYTES, DeltaLog
from monolith.sync.messages import Delta, LogPlace, Message, PublishState


@dataclass(frozen=True, slots=True)
class ChannelFaults:
    """How often a message meets with what, each from 0 to 1."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    """It comes after the message that follows it."""
    delay: float = 0.0
    """It comes in a later read of the share."""


class MemoryChannel:
    """Logs of the shares of one model, for writers and readers of this process. Thread-safe.

    Args:
        limit_bytes: Of the log of each share.
        faults: What happens to messages on the way to readers.
        seed: Of the chance that decides it.
    """

    def __init__(
        self, limit_bytes: int = LOG_BYTES, *, faults: ChannelFaults | None = None, seed: int = 0
    ) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._logs: dict[int, DeltaLog] = {}  # guarded by the lock
        self._late: defaultdict[int, list[Message]] = defaultdict(list)
        self._random = random.Random(seed)
        self.faults = faults
        """May be set at any time; None: messages arrive as they were sent."""
        self.broken = False
        """Whether nobody can reach it."""

    def writer(self) -> MemoryWriter:
        """Return the end of a publisher, of whichever share it opens."""
        return MemoryWriter(self)

    def reader(self) -> MemoryReader:
        """Return the end of a subscriber."""
        return MemoryReader(self)

    def check_reached(self) -> None:
        """Raise UnavailableError where the channel is broken."""
        if self.broken:
            raise UnavailableError("the delta channel cannot be reached")

    def open_log(self, share: ShareLog) -> DeltaLog:
        """Return the log of a share; those of another number of shares are no longer published."""
        with self._lock:
            for number, log in list(self._logs.items()):
                known = log.log
                if known is None or known.share[1] != share.share[1]:
                    log.close()
                    del self._logs[number]
            return self._logs.setdefault(share.share[0], DeltaLog(self._limit))

    def logs(self) -> list[DeltaLog]:
        with self._lock:
            return list(self._logs.values())

    def log_of(self, share: int) -> DeltaLog:
        with self._lock:
            if share not in self._logs:
                raise UnavailableError(f"nobody publishes share {share} now; ask again later")
            return self._logs[share]

    def on_the_way(self, share: int, messages: Iterator[Message]) -> Iterator[Message]:
        """Yield messages as they arrive: with what is late, and without what gets lost."""
        late, self._late[share] = self._late[share], []
        yield from late
        held: list[Message] = []
        for message in messages:
            faults = self.faults or ChannelFaults()
            self.check_reached()
            if self._happens(faults.drop):
                continue
            if self._happens(faults.delay):
                self._late[share].append(message)
                continue
            if self._happens(faults.reorder):
                held.append(message)
                continue
            yield message
            if self._happens(faults.repeat):
                yield message
            yield from held
            held.clear()
        yield from held

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance


class MemoryWriter:
    """A `DeltaWriter` to logs in memory."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self._log: DeltaLog | None = None

    def open(self, log: ShareLog, snapshot: TakeSnapshot) -> None:
        self._channel.check_reached()
        self._log = self._channel.open_log(log)
        self._log.open(log, snapshot)

    def append(self, delta: Delta) -> None:
        self._opened().append(delta)

    def say(self, state: PublishState) -> None:
        self._opened().say(state)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _opened(self) -> DeltaLog:
        self._channel.check_reached()
        if self._log is None:
            raise UnavailableError("the log of the share was not opened")
        return self._log


class MemoryReader:
    """A `DeltaReader` of logs in memory."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def shares(self) -> Sequence[ShareLog]:
        self._channel.check_reached()
        found = [log.log for log in self._channel.logs()]
        return sorted((log for log in found if log is not None), key=lambda log: log.share)

    def read(self, share: int, after: LogPlace | None, *, wait: float) -> Iterator[Message]:
        self._channel.check_reached()
        log = self._channel.log_of(share)
        return self._channel.on_the_way(share, _messages(log, after, wait))

    def read_buckets(self, share: int, buckets: Tensor) -> Iterator[Message]:
        self._channel.check_reached()
        return self._channel.on_the_way(share, self._channel.log_of(share).snapshot(buckets))

    def close(self) -> None: ...


def _messages(log: DeltaLog, place: LogPlace | None, wait: float) -> Iterator[Message]:
    said: PublishState | None = None
    while True:
        state = log.state
        if state != said:
            said = state
            yield state
        deltas = log.after(place)
        if deltas is None:
            for message in log.snapshot():
                place = getattr(message, "place", place)
                yield message
            continue
        for delta in deltas:
            place = delta.place
            yield delta
        assert place is not None
        if not deltas and not log.wait(place, state.number, wait):
            return
