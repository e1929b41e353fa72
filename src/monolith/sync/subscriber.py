"""Subscriber: keeps a target equal to the published rows, whatever the network does.

It follows every shard of a model from the position reached. Messages may be lost, repeated, late or
reordered; their numbers tell what fits. A message that does not fit is not applied, and the shard is read
again from the position reached. If the log no longer has that position, or has started another epoch, it
answers with a snapshot. The states of one shard:

                  snapshot begins                      snapshot complete, at (e, m)
    no position ───────────────────▶ taking a snapshot ─────────────────────────────▶ at (e, m)
         ▲                             │        ▲                                     │    ▲ │
         │ the snapshot breaks off     │        │ gap in the log, or a new epoch      │    │ │ delta n + 1
         ├─────────────────────────────┘        └─────────────────────────────────────┘    └─┘ applied
         │ a rollback to a version, or the target dropped its rows: from any state
         └──────────────────────────────────────────────────────────────────────────

    position         message                             next position
    ────────         ───────                             ─────────────
    (epoch, n)       delta n + 1 of the epoch            (epoch, n + 1): applied
    (epoch, n)       delta up to n of the epoch          (epoch, n): ignored, it was applied before
    (epoch, n)       any other delta                     (epoch, n): read again after n
    any              a whole snapshot at (e, m)          (e, m)
    (epoch, n)       buckets at (epoch, m)               (epoch, min(n, m))
    (epoch, n)       part of a snapshot at (epoch, m)    (epoch, min(n, m)): its rows may be older than n
    (epoch, n)       part of one of another epoch        none: a snapshot is next
    any              a version to roll back to           none, until publishing resumes
    any              the target dropped its rows         none: a snapshot is next

If digests differ, the buckets are read again. A shard is identified by its number and the number of shards:
when that changes, all positions are forgotten and every shard starts with a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from monolith import concurrency
from monolith.checkpoint.saved_tables import IdShard
from monolith.errors import ConfigError, MonolithError
from monolith.sync.channel import DeltaReader, OpenReader, ShardLog
from monolith.sync.messages import (
    Delta,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.sync.target import DeltaTarget

_log = logging.getLogger(__name__)

RefuseRun = Callable[[str, int, LogPosition], str]
"""Takes the identity of a run, a shard and a position in its log; returns why not to follow it, or ""."""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """How far a subscriber is with one shard."""

    shard: IdShard
    position: LogPosition | None = None
    """Position of the last applied message; None: a snapshot is needed."""
    learned: LearnedUpTo = field(default_factory=LearnedUpTo)
    """The training progress that the target contains."""
    received_at: float = 0.0
    """When the last applied message arrived, in Unix seconds."""
    applied_at: float = 0.0
    state: PublishState = field(default_factory=PublishState)
    run: str = ""
    """The run that publishes it, as its messages tell."""
    generation: int = -1
    """The target's generation at that time: another generation does not contain this progress."""
    newest_step: int | None = None
    """No row of the shard has an update of a later step; None if unknown, as after a snapshot of rows that
    were being trained."""
    error: str = ""
    """Why the shard cannot be followed now, for an operator; empty if it can."""
    deltas: int = 0
    """Number of applied deltas."""
    snapshots: int = 0
    """Number of completed snapshots."""
    clock_offset: float | None = None
    """Seconds that the publisher's clock is ahead of ours; None if the channel cannot measure it."""
    repaired: int = 0
    """Number of buckets that were read again because they differed."""


class Subscriber:
    """Follows all shards of a model. Thread-safe.

    Shapes: n rows of a delta, d floats per row: ids int64 (n,), values float32 (n, d).

    Args:
        open_reader: Opens an end of the channel; each thread has its own.
        target: The rows to keep up to date.
        positions: Shard to the position that the target has already, from an export or a checkpoint.
        wait: Seconds to wait for new messages before checking whether the shards have changed.
        clock: Returns Unix seconds.
        on_applying: Called before rows change, on the thread that changes them: with the shard, and the
            delta's training progress, or None before rows of a snapshot.
        on_applied: Called after a delta (after the last one if a publication was split) and after a snapshot,
            on the thread that applied it.
        refuse: Returns why a run must not be followed, for an operator; empty if it may. By default all may.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Publisher, Segment, Subscriber, TableConfig
        >>> from monolith.sync import MemoryChannel, PublisherConfig, TableTarget
        >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
        >>> table, copy = NativeTable(config), NativeTable(config)
        >>> channel = MemoryChannel()
        >>> publisher = Publisher({"item": table}, channel.writer(), PublisherConfig(run="clicks"))
        >>> table.assign(torch.tensor([7]), torch.ones(1, 2))
        >>> _ = publisher.publish_now()
        >>> subscriber = Subscriber(channel.reader, TableTarget({"item": copy}))
        >>> subscriber.catch_up()
        >>> copy.lookup(torch.tensor([7]))
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        open_reader: OpenReader,
        target: DeltaTarget,
        *,
        positions: Mapping[int, LogPosition] | None = None,
        wait: float = 1.0,
        clock: Callable[[], float] = concurrency.time,
        on_applying: Callable[[IdShard, LearnedUpTo | None], None] = lambda _shard, _learned: None,
        on_applied: Callable[[ShardProgress], None] = lambda _: None,
        refuse: RefuseRun | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._refuse: RefuseRun = (lambda *_: "") if refuse is None else refuse
        self._target = _SharedTarget(target, clock, on_applying, on_applied)
        self._positions = dict(positions or {})
        self._wait = wait
        self._stop = concurrency.Event()
        self._thread: concurrency.Thread | None = None
        self._reader: DeltaReader | None = None
        # Replaced as a whole by the thread that looks for shards; read by any thread, without a lock. The
        # `progress` of a follower is likewise one value that its own thread replaces.
        self._followers: dict[int, _Follower] = {}
        self._log_limit = _LogLimit()
        self.error = ""
        """Why the published shards cannot be listed, for an operator; empty if they can."""
        self.refused = ""
        """Why a publisher that was found is not followed, for an operator; empty if all are."""
        self.missing: tuple[int, ...] = ()
        """Shards without a publisher, although the other shards tell how many there are."""

    @property
    def progress(self) -> Mapping[int, ShardProgress]:
        """The progress of each shard, by its number."""
        return {
            number: replace(one.progress, clock_offset=one.clock_offset)
            for number, one in sorted(self._followers.items())
        }

    def start(self) -> None:
        """Follow from now on, in threads: one that looks for shards, and one for each shard."""
        if self._thread is None:
            self._thread = concurrency.Thread(target=self._keep_following, name="subscriber", daemon=True)
            self._thread.start()

    def catch_up(self, *, wait: float = 0.0) -> None:
        """Read each shard once, in this thread, until no message has come for `wait` seconds.

        For callers that did not call `start`. Failures are in `progress` and `error`.
        """
        self._look_for_shards()
        for follower in self._followers.values():
            follower.open()
            follower.read(wait)

    def wait_for(self, positions: Mapping[int, LogPosition], timeout: float) -> bool:
        """Wait until the shards have reached these positions; return False after `timeout` seconds."""

        def reached() -> bool:
            progress = self.progress
            return all(
                number in progress and _has_reached(progress[number].position, position)
                for number, position in positions.items()
            )

        return self._target.wait_for(reached, timeout)

    def close(self) -> None:
        """Stop. Applied rows stay. Closing again does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._leave()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # Finding shards

    def _keep_following(self) -> None:
        delay = 0.0
        while not self._stop.wait(delay):
            try:
                self._look_for_shards()
            except Exception as cause:  # any failure: the shards that were found are still followed
                if self._log_limit.is_due(repr(cause)):
                    _log.exception("cannot list the published shards; retrying")
                self.error = str(cause)
            for follower in self._followers.values():
                follower.start(self._wait)
            stale = any(follower.stale for follower in self._followers.values())
            soon = min(self._wait, max(2 * delay, 0.05)) if self.error else min(self._wait, 0.05)
            delay = soon if stale or not self._followers else self._wait

    def _look_for_shards(self) -> None:
        """Follow the shards that are published now."""
        try:
            if self._reader is None:
                self._reader = self._open_reader()
            logs = self._reader.logs()
        except MonolithError as cause:
            if self._log_limit.is_due(str(cause)):
                _log.warning("cannot list the published shards: %s; retrying", cause)
            self.error = str(cause)
            return
        refused = [self._refuse(log.run, log.shard[0], log.newest) for log in logs]
        found = [log for log, why in zip(logs, refused, strict=True) if not why]
        self.error = self.refused = next(filter(None, refused), "")
        if self.refused and self._log_limit.is_due(self.refused):
            _log.warning("a publisher is not followed: %s", self.refused)
        current = next((one.shard[1] for one in self._followers.values()), None)
        total = _number_of_shards(found, current)
        if total is None:
            return
        if current not in (None, total):
            _log.warning("the number of shards is %d now and was %d: taking snapshots of all", total, current)
            self._leave()
            self._positions = {}
        for log in found:
            number, of = log.shard
            if of == total and number not in self._followers:
                position = self._positions.pop(number, None)
                follower = _Follower(
                    log, position, self._open_reader, self._target, self._stop, refuse=self._refuse
                )
                self._followers = {**self._followers, number: follower}
            if of == total:
                self._followers[number].clock_offset = log.clock_offset
        self._look_for_missing(total)

    def _look_for_missing(self, total: int) -> None:
        missing = tuple(number for number in range(total) if number not in self._followers)
        if missing:
            which = ", ".join(map(str, missing))
            self.error = (
                f"no publisher found for shards {which} of {total}; their rows will not update. Add the "
                "missing addresses to --follow"
            )
            if missing != self.missing:
                _log.warning("%s; retrying", self.error)
        elif self.missing:
            _log.info("all %d shards have a publisher now", total)
        self.missing = missing

    def _leave(self) -> None:
        for follower in self._followers.values():
            follower.close()
        self._followers = {}
        self._target.forget_states()


def _has_reached(position: LogPosition | None, wanted: LogPosition) -> bool:
    return position is not None and position.epoch == wanted.epoch and position.sequence >= wanted.sequence


def _number_of_shards(found: Sequence[ShardLog], current: int | None) -> int | None:
    """Return the number of shards; None if it is not known yet.

    While a run changes its number of shards, logs of both numbers may be found. The number that is complete
    counts; before one is, the number that was followed so far.
    """
    present: dict[int, set[int]] = {}
    for log in found:
        present.setdefault(log.shard[1], set()).add(log.shard[0])
    whole = [total for total, numbers in present.items() if len(numbers) == total]
    if current in whole or (not whole and current in present):
        return current
    if whole:
        return max(whole)
    return None if current is not None or not present else max(present, key=lambda n: len(present[n]))


class _LogLimit:
    """Limits the log lines about a publisher: one per change, and at most one a second.

    A publisher that does not answer, or fails differently each time, would flood the log of a server.
    """

    def __init__(self, every: float = 1.0, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._last: str | None = None
        self._due_at = 0.0

    def is_due(self, text: str) -> bool:
        """Whether to log a text; the empty text stands for a publisher without errors."""
        if text == self._last or self._clock() < self._due_at:
            return False
        self._last, self._due_at = text, self._clock() + self._every
        return True


class _SharedTarget:
    """The target of several shards: one call at a time, and one snapshot at a time."""

    def __init__(
        self,
        target: DeltaTarget,
        clock: Callable[[], float],
        on_applying: Callable[[IdShard, LearnedUpTo | None], None],
        on_applied: Callable[[ShardProgress], None],
    ) -> None:
        self.target = target
        self.clock = clock
        self.on_applying = on_applying
        self.on_applied = on_applied
        self.turn = concurrency.Lock()
        """Locked from the start of a snapshot to its end: the target takes one at a time."""
        self.generation = target.generation
        """The target's generation when it was passed in: the positions passed in with it are of that one."""
        self._changed = concurrency.Condition()
        # The state of each shard, and the combined one that the target knows: guarded by the condition.
        self._states: dict[int, PublishState] = {}
        self._told: PublishState | None = None

    def __enter__(self) -> DeltaTarget:
        self._changed.acquire()
        return self.target

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()

    def wait_for(self, reached: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(reached, timeout)

    def set_state(self, shard: int, state: PublishState) -> None:
        """Take note of the state of a shard, and tell the target the combined state of all shards.

        If one shard is rolled back to a version, all are; if one is paused, all are: publishers receive an
        order one after the other, and their clocks cannot be compared.
        """
        with self as target:
            self._states[shard] = state
            told = max(
                self._states.values(), key=lambda one: (one.version is not None, one.paused, one.since)
            )
            if told != self._told:
                self._told = told
                target.set_state(told)

    def forget_states(self) -> None:
        """Forget the states of shards that are no longer followed."""
        with self:
            self._states.clear()


@dataclass(slots=True)
class _Snapshot:
    """A snapshot in progress."""

    begin: SnapshotBegin
    received_at: float
    numbers: set[int] = field(default_factory=set)
    end: SnapshotEnd | None = None

    @property
    def whole(self) -> bool:
        if self.end is None:
            return False
        return self.end.chunks is None or len(self.numbers) == self.end.chunks


class _Follower:
    """Follows one shard."""

    def __init__(
        self,
        log: ShardLog,
        position: LogPosition | None,
        open_reader: OpenReader,
        target: _SharedTarget,
        stop: concurrency.Event,
        *,
        refuse: RefuseRun,
    ) -> None:
        self.shard = shard = log.shard
        self.progress = ShardProgress(shard, position, run=log.run)
        self.clock_offset = log.clock_offset
        """The latest measurement; set by the thread that looks for shards."""
        self.stale = False
        """Whether messages of the shard name another number of shards than it was found with."""
        self._open_reader = open_reader
        self._target = target
        self._stop = stop
        self._refuse = refuse
        self._log_limit = _LogLimit()
        self._left = concurrency.Event()
        self._thread: concurrency.Thread | None = None
        self._reader: DeltaReader | None = None
        self._snapshot: _Snapshot | None = None
        self._generation = target.generation  # the target's, when the position was reached
        self._compare_after = 0  # digests of deltas up to this sequence are not compared
        self._differing: set[int] = set()

    def start(self, wait: float) -> None:
        if self._thread is None:
            name = f"subscriber-{self.shard[0]}"
            self._thread = concurrency.Thread(target=self._keep_reading, args=(wait,), name=name, daemon=True)
            self._thread.start()

    def _keep_reading(self, wait: float) -> None:
        while not self._stopped():
            try:
                again = self.open() and self.read(wait)
            except Exception as cause:  # any failure: the shard is read again
                if self._log_limit.is_due(repr(cause)):
                    _log.exception("shard %d of %d cannot be followed; retrying", *self.shard)
                self.progress = replace(self.progress, error=str(cause) or type(cause).__name__)
                again = False
            if not again:
                self._left.wait(min(wait, 0.5))

    def _stopped(self) -> bool:
        return self._stop.is_set() or self._left.is_set()

    def open(self) -> bool:
        """Open a reader unless there is one; return whether there is one now."""
        if self._reader is None:
            try:
                self._reader = self._open_reader()
            except MonolithError as cause:
                self._fail(cause)
                return False
        return True

    def close(self) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        self._drop_snapshot()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def read(self, wait: float) -> bool:
        """Read from the position reached; return whether to read again at once."""
        if self._reader is None:
            return False
        number = self.shard[0]
        try:
            self._apply_all(self._reader.read(number, self.progress.position, wait=wait))
            if self._differing and self.progress.position is not None:
                self._repair(self._reader)
        except MonolithError as cause:
            self._fail(cause)
            return False
        finally:
            self._drop_snapshot()
        if self.progress.error:
            self.progress = replace(self.progress, error="")
            if self._log_limit.is_due(""):
                _log.info("following shard %d of %d again", *self.shard)
        return self.progress.state.version is None and not self.stale

    def _fail(self, cause: MonolithError) -> None:
        if self._log_limit.is_due(str(cause)):
            _log.warning("cannot follow shard %d of %d: %s; retrying", *self.shard, cause)
        self.progress = replace(self.progress, error=str(cause))

    def _apply_all(self, messages: Iterator[Message]) -> None:
        try:
            for message in messages:
                if self._stopped() or not self._apply(message):
                    return
        finally:
            # A generator that is abandoned half-way tells its publisher that the rest is not needed.
            if (close := getattr(messages, "close", None)) is not None:
                with suppress(MonolithError):
                    close()

    def _apply(self, message: Message) -> bool:
        """Apply a message if it fits; return False to read again from the position reached."""
        if isinstance(message, PublishState):
            return self._apply_state(message)
        if isinstance(message, SnapshotRows):
            return self._apply_rows(message)
        if isinstance(message, SnapshotEnd):
            return self._apply_end(message)
        # The run was resized: the thread that looks for shards replaces all followers.
        if message.shard != self.shard:
            self.stale = True
            return False
        self.stale = False
        if message.run != self.progress.run:
            if why := self._refuse(message.run, self.shard[0], message.position):
                raise ConfigError(why)
            self.progress = replace(self.progress, run=message.run)
        return self._begin(message) if isinstance(message, SnapshotBegin) else self._apply_delta(message)

    def _apply_state(self, state: PublishState) -> bool:
        known = self.progress.state
        # A state may arrive late or twice. Numbers order the states of one publisher; a new publisher knows
        # nothing of the numbers before it, so its state always counts.
        if state.publisher == known.publisher and state.number < known.number:
            return True
        if state != known:
            self.progress = replace(self.progress, state=state)
            self._target.set_state(self.shard[0], state)
        if state.version is None:
            return True
        self.progress = replace(self.progress, position=None)  # the target drops all rows of deltas
        return False

    # Deltas

    def _apply_delta(self, delta: Delta) -> bool:
        if self._snapshot is not None:
            return True  # the rest of the snapshot may still come; if not, this delta is read again
        position, following = self.progress.position, delta.position
        # A gap or another epoch: read again, and the log answers with the missing deltas or a snapshot.
        if (
            position is None
            or following.epoch != position.epoch
            or following.sequence > position.sequence + 1
        ):
            return False
        if following.sequence <= position.sequence:
            return True  # applied before
        received = self._target.clock()
        with self._target as target:
            if self._has_dropped_rows(target):
                return False
            self._target.on_applying(self.shard, delta.learned)
            target.apply(delta.rows, delta.removed)
            if delta.dense is not None:
                target.swap_dense(delta.dense)
            # Rows of a snapshot were read while they were trained, and may be newer than a delta that was
            # being made at its end: only a delta that was begun afterwards says how new they may be.
            covered = following.sequence > self._compare_after
            self.progress = replace(
                self.progress,
                position=following,
                learned=delta.learned if delta.complete else self.progress.learned,
                received_at=received,
                applied_at=self._target.clock(),
                generation=self._generation,
                newest_step=(delta.learned.newest_step or None) if covered else None,
                deltas=self.progress.deltas + 1,
            )
            if delta.complete:
                self._target.on_applied(replace(self.progress, clock_offset=self.clock_offset))
            # Up to the end of a snapshot, rows may be newer than the digests say: a difference means nothing.
            if following.sequence > self._compare_after:
                self._compare(target, delta)
        return not self._differing

    def _has_dropped_rows(self, target: DeltaTarget) -> bool:
        """Whether the target has dropped its rows since the position was reached; if so, forget the
        position."""
        if target.generation == self._generation:
            return False
        self._generation = target.generation
        self.progress = replace(self.progress, position=None)
        return True

    def _compare(self, target: DeltaTarget, delta: Delta) -> None:
        for table, digests in delta.digests.items():
            if table in target.tables and len(digests.buckets):
                ours = target.digests(table, self.shard, digests.buckets)
                if ours is not None:
                    self._differing.update(digests.buckets[ours != digests.sums].tolist())

    def _repair(self, reader: DeltaReader) -> None:
        """Read the buckets that differ again."""
        buckets = torch.tensor(sorted(self._differing), dtype=torch.int64)
        repaired = self.progress.snapshots
        _log.warning(
            "shard %d of %d differs from the published rows in %d buckets of ids: reading them again",
            *self.shard,
            len(buckets),
        )
        self._differing.clear()
        self._apply_all(reader.read_buckets(self.shard[0], buckets))
        if self.progress.snapshots > repaired:
            self.progress = replace(self.progress, repaired=self.progress.repaired + len(buckets))

    # Snapshots

    def _begin(self, begin: SnapshotBegin) -> bool:
        if self._snapshot is not None and begin.snapshot and begin.snapshot == self._snapshot.begin.snapshot:
            return True
        self._drop_snapshot()
        # Followers of other shards wait here: the target takes one snapshot at a time. Their deltas do not
        # wait, since `turn` is not the lock of the target. Released by `_finish` or `_drop_snapshot`.
        self._target.turn.acquire()
        self._snapshot = _Snapshot(begin, self._target.clock())
        with self._target as target:
            # Some buckets repair a copy. If the target has just dropped its rows, there is no copy to repair.
            if self._has_dropped_rows(target) and begin.buckets is not None:
                return False
            target.begin_snapshot(self.shard, begin.buckets)
        return True

    def _apply_rows(self, message: SnapshotRows) -> bool:
        snapshot = self._snapshot
        if snapshot is None or message.snapshot != snapshot.begin.snapshot:
            return True
        if message.snapshot and message.number in snapshot.numbers:
            return True  # repeated in transit
        with self._target as target:
            if not snapshot.numbers:
                self._target.on_applying(self.shard, None)
            snapshot.numbers.add(message.number)
            target.snapshot_rows(message.table, message.rows)
        return self._finish(snapshot) if snapshot.whole else True

    def _apply_end(self, end: SnapshotEnd) -> bool:
        snapshot = self._snapshot
        if snapshot is None or end.snapshot != snapshot.begin.snapshot:
            return True
        snapshot.end = end
        return self._finish(snapshot) if snapshot.whole else True

    def _finish(self, snapshot: _Snapshot) -> bool:
        begin, end = snapshot.begin, snapshot.end
        assert end is not None
        # Buckets are newer than the rest of the shard, or older: the deltas after the lower position bring
        # both to the same state. Applying some of them twice is harmless.
        position = begin.position if begin.buckets is None else _lower(self.progress.position, begin.position)
        with self._target as target:
            if self._has_dropped_rows(target):
                return False
            if not snapshot.numbers:
                self._target.on_applying(self.shard, None)
            target.end_snapshot()
            if begin.dense is not None:
                target.swap_dense(begin.dense)
            learned = begin.learned
            if begin.buckets is not None and learned.step >= self.progress.learned.step:
                learned = self.progress.learned  # the remaining buckets are as they were
            self.progress = replace(
                self.progress,
                position=position,
                learned=learned,
                received_at=snapshot.received_at,
                applied_at=self._target.clock(),
                generation=self._generation,
                newest_step=None,
                snapshots=self.progress.snapshots + 1,
            )
            # Rows were read while they were trained: digests can be compared once the delta that was being
            # made at the end of the snapshot is applied.
            self._compare_after = end.whole_at.sequence
            self._target.on_applied(replace(self.progress, clock_offset=self.clock_offset))
        # Only now, together: if a call above raises, `_drop_snapshot` finds the snapshot and releases the
        # turn, for which the other shards wait without a limit.
        self._snapshot = None
        self._target.turn.release()
        self._differing.clear()
        return True

    def _drop_snapshot(self) -> None:
        """Forget a snapshot that broke off.

        Its rows may be older than the position, if it arrived late. Then the position is set back: the deltas
        that are read again from there are newer than these rows.
        """
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        with self._target as target:
            target.abort_snapshot()
            if snapshot.numbers:
                position, begun = self.progress.position, snapshot.begin.position
                same = position is not None and position.epoch == begun.epoch
                self.progress = replace(self.progress, position=_lower(position, begun) if same else None)
        self._target.turn.release()


def _lower(position: LogPosition | None, other: LogPosition) -> LogPosition | None:
    """Return the earlier of two positions of an epoch; the first if their epochs differ."""
    if position is None or position.epoch != other.epoch:
        return position
    return min(position, other, key=lambda one: one.sequence)
