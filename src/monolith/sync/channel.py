"""The delta channel: a log of each shard's changes that subscribers read from their own position.

A publisher appends numbered deltas; a subscriber asks for everything after its position. If those deltas are
no longer in the log, or the position is of another epoch, the answer is a snapshot and the deltas after it.
The log is bounded in bytes, so a slow reader never blocks a publisher: it takes a snapshot instead.

    publisher ── open, append, set_state ──► DeltaWriter ═══ log ═══ DeltaReader ── logs, read ──► subscriber

    log, numbers 5 to 9 present:   ... (dropped) | 5 | 6 | 7 | 8 | 9
    read after 7  -> 8, 9          read after 4 -> 5 ... 9          read after 2 -> snapshot at 9, then 10 ...

This file has the two ends, `DeltaWriter` and `DeltaReader`; `DeltaLog`, the log in memory that the memory and
the Flight channel share; `MemoryChannel`, the channel within one process, which can also misbehave on
purpose; and `SnapshotMaker`, for channels whose readers cannot ask the publisher (folder, Kafka). Every
implementation passes `tests/contracts/test_delta_channel.py`.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from monolith import concurrency
from monolith.checkpoint.saved_tables import IdShard
from monolith.errors import MonolithError, UnavailableError
from monolith.observe import Doublings
from monolith.sync.messages import Delta, LogPosition, Message, PublishState, SnapshotBegin

LOG_BYTES = 256 << 20
"""Default bound on the bytes of deltas in one log."""

_MESSAGE_BYTES = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardLog:
    """Describes the log of one shard."""

    run: str
    shard: IdShard
    newest: LogPosition
    oldest: int
    """The first sequence number still in the log: a reader at `oldest - 1` or later needs no snapshot."""
    tables: Mapping[str, int]
    """Table to floats per row."""
    clock_offset: float | None = field(default=None, compare=False)
    """Seconds that the publisher's clock is ahead of the reader's; None if the channel cannot measure it."""


TakeSnapshot = Callable[[Tensor | None], Iterator[Message]]
"""Reads the rows of a shard, or of some of its buckets: begin, rows in chunks of bounded size, end. Called
from any thread."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What readers still lack although the channel has taken every delta."""

    reason: str
    progress: int = 0
    """A number that grows as long as the channel works on it without a failure."""
    by_readers: bool = False
    """Whether the channel has everything, and readers have not fetched it: no reason for a run to fail."""


class DeltaWriter(Protocol):
    """The publisher's end of one shard. For one thread; the snapshot callback is called from other
    threads."""

    @property
    def address(self) -> str | None:
        """The host:port where readers connect to this publisher; None if the channel is elsewhere."""

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        """Start an epoch. The deltas of earlier epochs are dropped."""

    def append(self, delta: Delta) -> None:
        """Append a delta to the log. Never waits for a reader.

        Raises:
            UnavailableError: It was not stored. Nothing is lost: append the same delta again, or start a new
                epoch.
        """

    def set_state(self, state: PublishState) -> None:
        """Tell the publish state to all readers, present and future."""

    def unfinished(self) -> Unfinished | None:
        """Return what readers lack if this process ends now, besides deltas that were not appended: such as a
        snapshot that is not written. None if they lack nothing."""

    def close(self) -> None:
        """Stop. Closing again does nothing."""


class DeltaReader(Protocol):
    """A subscriber's end of all shards. For one thread."""

    def logs(self) -> Sequence[ShardLog]:
        """Return the logs that are published now, one per shard; empty if there is no publisher yet.

        Raises:
            UnavailableError: The channel cannot be reached.
        """

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        """Yield the messages after a position, oldest first, until none arrives for `wait` seconds.

        If `after` is None, of another epoch, or no longer in the log, a snapshot comes first. Messages may be
        lost, repeated or reordered in transit: the subscriber checks their numbers. The newest publish state
        is yielded at the start and when it changes.

        Raises:
            UnavailableError: The shard cannot be reached, or the connection broke. Read again from the
                position reached.
            CorruptMessageError: The bytes are not a message.
        """

    def read_buckets(self, shard: int, buckets: Tensor) -> Iterator[Message]:
        """Yield a snapshot of some buckets, to repair a difference; of all buckets if the channel has no
        less."""

    def close(self) -> None:
        """Stop. Closing again does nothing."""


OpenReader = Callable[[], DeltaReader]


# The log in memory


def delta_bytes(delta: Delta) -> int:
    """Return about how many bytes of memory a delta takes."""
    tensors: list[Tensor] = [*delta.removed.values(), *(delta.dense or {}).values()]
    for rows in delta.rows.values():
        tensors += [rows.ids, rows.event_times, rows.values, rows.state]
    for digests in delta.digests.values():
        tensors += [digests.buckets, digests.sums]
    return _MESSAGE_BYTES + sum(tensor.nbytes for tensor in tensors)


class DeltaLog:
    """The newest deltas of one shard, as many as fit into a bound of bytes. Thread-safe.

    Invariant: the deltas in the log have consecutive numbers and end with `log.newest`. So `log.oldest` alone
    decides whether a reader can continue, and dropping from the front is always safe.

    Args:
        limit_bytes: The oldest deltas are dropped while all of them together take more.

    Examples:
        >>> from monolith.sync import Delta, DeltaLog, LearnedUpTo, LogPosition, ShardLog
        >>> log = DeltaLog()
        >>> log.open(ShardLog("run", (0, 1), LogPosition("e", 0), 1, {}), snapshot=lambda buckets: iter(()))
        >>> log.append(Delta("run", (0, 1), LogPosition("e", 1), LearnedUpTo(step=100)))
        >>> [delta.learned.step for delta in log.after(LogPosition("e", 0))]
        [100]
        >>> log.after(LogPosition("another epoch", 0))  # None: the reader needs a snapshot
    """

    def __init__(self, limit_bytes: int = LOG_BYTES) -> None:
        self._limit = limit_bytes
        self._changed = concurrency.Condition()
        # Everything below is guarded by the condition.
        self._log: ShardLog | None = None
        self._snapshot: TakeSnapshot | None = None
        self._deltas: deque[tuple[Delta, int]] = deque()
        self._bytes = 0
        self._state = PublishState()
        self._closed = False

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        """Start an epoch, and drop the deltas of earlier ones."""
        with self._changed:
            self._log, self._snapshot = log, snapshot
            self._deltas.clear()
            self._bytes = 0
            self._closed = False
            self._changed.notify_all()

    def append(self, delta: Delta) -> None:
        """Append a delta. One that the log already has is ignored.

        Raises:
            UnavailableError: The log was not opened, is of another epoch, or lacks deltas before this one.
        """
        with self._changed:
            log = self._opened()
            newest, position = log.newest, delta.position
            if position.epoch != newest.epoch or position.sequence > newest.sequence + 1:
                raise UnavailableError(
                    f"cannot append delta {position.sequence} of epoch {position.epoch} to the log of shard "
                    f"{log.shard[0]}: its newest is {newest.sequence} of {newest.epoch}. Start a new epoch."
                )
            if position.sequence <= newest.sequence:
                return
            size = delta_bytes(delta)
            self._deltas.append((delta, size))
            self._bytes += size
            while self._bytes > self._limit:  # may empty the log: one delta can be larger than the bound
                self._bytes -= self._deltas.popleft()[1]
            oldest = self._deltas[0][0].position.sequence if self._deltas else position.sequence + 1
            self._log = replace(log, newest=position, oldest=oldest)
            self._changed.notify_all()

    def set_state(self, state: PublishState) -> None:
        """Store a publish state, unless the publisher has already set a newer one."""
        with self._changed:
            if state.publisher != self._state.publisher or state.number >= self._state.number:
                self._state = state
                self._changed.notify_all()

    def close(self) -> None:
        """Drop all deltas and wake up waiting readers."""
        with self._changed:
            self._closed = True
            self._deltas.clear()
            self._bytes = 0
            self._changed.notify_all()

    @property
    def log(self) -> ShardLog | None:
        """The description of the log; None if it was not opened, or was closed."""
        with self._changed:
            return None if self._closed else self._log

    @property
    def state(self) -> PublishState:
        """The newest publish state."""
        with self._changed:
            return self._state

    @property
    def stored_bytes(self) -> int:
        with self._changed:
            return self._bytes

    def after(self, position: LogPosition | None) -> list[Delta] | None:
        """Return the deltas after a position, oldest first; None if the reader needs a snapshot.

        Raises:
            UnavailableError: The log was not opened, or was closed.
        """
        with self._changed:
            log = self._opened()
            if position is None or position.epoch != log.newest.epoch:
                return None
            if not log.oldest - 1 <= position.sequence <= log.newest.sequence:
                return None
            return [delta for delta, _ in self._deltas if delta.position.sequence > position.sequence]

    def snapshot(self, buckets: Tensor | None = None) -> Iterator[Message]:
        """Read the current rows of the shard. The log is not locked meanwhile."""
        with self._changed:
            self._opened()
            take = self._snapshot
        assert take is not None
        return take(buckets)

    def wait(self, position: LogPosition, state: int, timeout: float) -> bool:
        """Wait until there is more than a reader knows; return False after `timeout` seconds without."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._log is None
                    or self._log.newest != position
                    or self._state.number != state
                ),
                timeout,
            )

    def _opened(self) -> ShardLog:
        if self._log is None or self._closed:
            raise UnavailableError("this shard has no publisher now; retry later")
        return self._log


# The channel within one process


@dataclass(frozen=True, slots=True)
class ChannelFaults:
    """Probabilities, from 0 to 1, of what goes wrong with a message in transit."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    """It arrives after the message that follows it."""
    delay: float = 0.0
    """It arrives in a later read of the shard."""


class MemoryChannel:
    """The logs of one model's shards, for writers and readers of this process. Thread-safe.

    Args:
        limit_bytes: Bound on the bytes of each shard's log.
        faults: What goes wrong with messages in transit.
        seed: Seed of the random numbers that decide it.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Publisher, Segment, Subscriber, TableConfig
        >>> from monolith.sync import MemoryChannel, PublisherConfig, TableTarget
        >>> config = TableConfig(name="item", segments=(Segment(dim=1),))
        >>> table, copy = NativeTable(config), NativeTable(config)
        >>> table.assign(torch.tensor([7]), torch.ones(1, 1))
        >>> channel = MemoryChannel()
        >>> _ = Publisher({"item": table}, channel.writer(), PublisherConfig(run="run")).publish_now()
        >>> Subscriber(channel.reader, TableTarget({"item": copy})).catch_up()
        >>> len(copy)
        1
    """

    def __init__(
        self, limit_bytes: int = LOG_BYTES, *, faults: ChannelFaults | None = None, seed: int = 0
    ) -> None:
        self._limit = limit_bytes
        self._lock = concurrency.Lock()
        self._logs: dict[int, DeltaLog] = {}  # guarded by the lock
        self._late: defaultdict[int, list[Message]] = defaultdict(list)
        self._random = random.Random(seed)
        self.faults = faults
        """May be set at any time; None: messages arrive as they were sent."""
        self.broken = False
        """Whether the channel cannot be reached."""

    def writer(self) -> MemoryWriter:
        """Return a publisher's end, for the shard that it opens."""
        return MemoryWriter(self)

    def reader(self) -> MemoryReader:
        """Return a subscriber's end."""
        return MemoryReader(self)

    def check_reached(self) -> None:
        """Raise UnavailableError if the channel is broken."""
        if self.broken:
            raise UnavailableError("the delta channel cannot be reached")

    def open_log(self, log: ShardLog) -> DeltaLog:
        """Return the log of a shard. Logs of another number of shards are closed: they are out of date."""
        with self._lock:
            for number, other in list(self._logs.items()):
                known = other.log
                if known is None or known.shard[1] != log.shard[1]:
                    other.close()
                    del self._logs[number]
            return self._logs.setdefault(log.shard[0], DeltaLog(self._limit))

    def logs(self) -> list[DeltaLog]:
        with self._lock:
            return list(self._logs.values())

    def log_of(self, shard: int) -> DeltaLog:
        with self._lock:
            if shard not in self._logs:
                raise UnavailableError(f"shard {shard} has no publisher now; retry later")
            return self._logs[shard]

    def in_transit(self, shard: int, messages: Iterator[Message]) -> Iterator[Message]:
        """Yield messages as they arrive: late ones of earlier reads included, lost ones left out."""
        late, self._late[shard] = self._late[shard], []
        yield from late
        overtaken: list[Message] = []
        for message in messages:
            faults = self.faults or ChannelFaults()
            self.check_reached()
            if self._happens(faults.drop):
                continue
            if self._happens(faults.delay):
                self._late[shard].append(message)
                continue
            if self._happens(faults.reorder):
                overtaken.append(message)
                continue
            yield message
            if self._happens(faults.repeat):
                yield message
            yield from overtaken
            overtaken.clear()
        yield from overtaken

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance


class MemoryWriter:
    """A `DeltaWriter` to a log in memory."""

    address = None

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self._log: DeltaLog | None = None

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        self._channel.check_reached()
        self._log = self._channel.open_log(log)
        self._log.open(log, snapshot)

    def append(self, delta: Delta) -> None:
        self._opened().append(delta)

    def set_state(self, state: PublishState) -> None:
        self._opened().set_state(state)

    def unfinished(self) -> Unfinished | None:
        return None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _opened(self) -> DeltaLog:
        self._channel.check_reached()
        if self._log is None:
            raise UnavailableError("the log of the shard was not opened")
        return self._log


class MemoryReader:
    """A `DeltaReader` of logs in memory."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def logs(self) -> Sequence[ShardLog]:
        self._channel.check_reached()
        found = [log.log for log in self._channel.logs()]
        return sorted((log for log in found if log is not None), key=lambda log: log.shard)

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        self._channel.check_reached()
        log = self._channel.log_of(shard)
        return self._channel.in_transit(shard, _messages(log, after, wait))

    def read_buckets(self, shard: int, buckets: Tensor) -> Iterator[Message]:
        self._channel.check_reached()
        return self._channel.in_transit(shard, self._channel.log_of(shard).snapshot(buckets))

    def close(self) -> None: ...


def _messages(log: DeltaLog, position: LogPosition | None, wait: float) -> Iterator[Message]:
    sent: PublishState | None = None
    while True:
        state = log.state
        if state != sent:
            sent = state
            yield state
        deltas = log.after(position)
        if deltas is None:
            for message in log.snapshot():
                if isinstance(message, SnapshotBegin):
                    position = message.position
                yield message
            continue
        for delta in deltas:
            position = delta.position
            yield delta
        assert position is not None
        if not deltas and not log.wait(position, state.number, wait):
            return


# Snapshots for channels whose readers cannot ask the publisher

WriteSnapshot = Callable[[Iterator[Message]], None]
"""Writes all messages of a snapshot, or raises and leaves nothing that a reader would take."""


class SnapshotMaker:
    """A thread that writes a snapshot whenever one is wanted, and retries if that fails. Thread-safe.

    Args:
        write: Receives the messages; called from the thread.
        asked: Whether a reader wants a snapshot; called every `check_every` seconds, from the thread.
    """

    def __init__(
        self, write: WriteSnapshot, *, asked: Callable[[], bool] = lambda: False, check_every: float = 1.0
    ) -> None:
        self._write = write
        self._asked = asked
        self._check_every = check_every
        self._changed = concurrency.Condition()  # guards everything below
        self._take: TakeSnapshot | None = None
        self._wanted = self._closed = False
        self._unwritten = False
        """Whether a snapshot was wanted by `begin` or `want`, and none was written since."""
        self._trouble = ""
        """Why the last attempt to write it failed."""
        self._written = 0
        """Messages of it that were written before the first failure."""
        self._epoch = 0
        self._thread: concurrency.Thread | None = None

    def begin(self, take: TakeSnapshot) -> None:
        """Write snapshots of a new epoch from now on, the first at once; one in progress is abandoned."""
        with self._changed:
            self._take = take
            self._epoch += 1
            self._wanted = self._unwritten = True
            self._trouble, self._written = "", 0
            if self._thread is None:
                self._thread = concurrency.Thread(target=self._run, name="snapshots", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def want(self) -> None:
        """Write a snapshot soon."""
        with self._changed:
            self._wanted = self._unwritten = True
            self._changed.notify_all()

    def unfinished(self) -> Unfinished | None:
        """Return the snapshot that is wanted and not written: without it, readers may find deltas that they
        cannot start from."""
        with self._changed:
            if not self._unwritten:
                return None
            why = f": {self._trouble}" if self._trouble else ""
            return Unfinished(f"the snapshot is not written yet{why}", self._written)

    def close(self) -> None:
        """Abandon a snapshot in progress; return when the thread has ended. Closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        failures, worth_logging = 0, Doublings()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, self._check_every)
                if self._closed:
                    return
                wanted, self._wanted = self._wanted, False
                take, epoch = self._take, self._epoch
            assert take is not None
            try:
                if wanted or self._asked():
                    self._write(self._while_current(take, epoch))
                    failures, worth_logging = 0, Doublings()
                    with self._changed:
                        self._unwritten = self._wanted  # again, if one was asked for meanwhile
                        self._trouble, self._written = "", 0
            except _AbandonedError:
                continue
            except Exception as error:  # any failure: publishing continues, and the next attempt may succeed
                failures += 1
                level = logging.WARNING if isinstance(error, MonolithError) else logging.ERROR
                if worth_logging.due(failures):  # a disk may be full for hours, and this retries every second
                    text = "delta channel: a snapshot could not be written (%d times), retrying: %s"
                    _log.log(level, text, failures, error)
                with self._changed:
                    self._trouble = str(error)
                    self._changed.wait_for(lambda: self._closed, self._check_every)
                    self._wanted = True

    def _while_current(self, take: TakeSnapshot, epoch: int) -> Iterator[Message]:
        for message in take(None):
            with self._changed:
                if self._closed or self._epoch != epoch:
                    raise _AbandonedError
                if not self._trouble:
                    self._written += 1
            yield message


class _AbandonedError(Exception):
    """A new epoch started, or the channel was closed, while a snapshot was written."""
