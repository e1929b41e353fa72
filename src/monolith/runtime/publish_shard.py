"""One shard of a model's rows, published by the process that stores it.

    created ──start──► publishing ◄──restored──► suspended, while rows are restored
                         │    ▲
         an operator or  │    │ resume: the current rows, in a new epoch after a rollback
         a guard pauses  ▼    │
                        paused ──rollback──► paused, and servers roll back to an exported version

A shard that was paused when its run ended, or was killed, is paused from its next start (see
`publish_pause`).

A failure of the channel is counted and logged, and training continues: publishing never waits for a
subscriber and never raises an error into a training step. At the end of a run `flush` tells what the channel
has not taken, and the process that leads asks again for a while (see `publish_hook`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from monolith import concurrency
from monolith.checkpoint.saved_tables import IdShard
from monolith.errors import MonolithError, UnavailableError
from monolith.feature import FeatureIds
from monolith.observe import Doublings, Metrics
from monolith.runtime.publish_pause import PauseFile
from monolith.sync.channel import DeltaWriter, ShardLog, TakeSnapshot, Unfinished
from monolith.sync.guard import AllGuards, PublishGuard, RowGuard
from monolith.sync.messages import Delta, LearnedUpTo, LogPosition, Message, PublishState
from monolith.sync.publish_config import PublishConfig
from monolith.sync.publish_messages import PublishOrder, ShardPublishStatus, UnpublishedShard
from monolith.sync.publisher import DELTA_IDS, Publisher, PublisherConfig

_log = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_SECONDS = 10.0
"""How long `flush` waits for the publishing thread."""

OpenShareWriter = Callable[[IdShard], DeltaWriter]
"""Opens the channel of a shard."""


@dataclass(frozen=True, kw_only=True)
class PublishPlan:
    """The settings that a process needs to publish the rows it stores."""

    config: PublishConfig
    run: str
    """The name of the run in every message."""
    open_writer: OpenShareWriter
    pause_file: PauseFile | None = None
    """The file that records a pause; without one a pause ends with the run."""
    metrics: Metrics = field(default_factory=Metrics)
    clock: Callable[[], float] = concurrency.time
    """Unix seconds."""


_COST = 20
"""Publishing takes at most one part in this many of the time, in a run that changes many rows at a time. With
10 such a run had 0.85 of its speed, with 20 it has 0.90."""
_LONGEST_S = 0.25
"""The longest that publishing waits for that reason: rows stay fresh, whatever it costs."""


def seconds_between(took: float, interval: float) -> float:
    """Return the seconds between the beginnings of two publications, the first of which took so long."""
    return max(interval, min(_COST * took, _LONGEST_S))


class _Opened(NamedTuple):
    """The publisher with its writer and thread, from `start` on."""

    publisher: Publisher
    writer: CountedWriter
    thread: concurrency.Thread


class ShardPublisher:
    """Publishes the tables of one shard. Thread-safe.

    Args:
        tables: By name; they outlive this.
        learned: Returns the newest event that the rows have learned from; by default that of `learning`.
        guards: Guards in addition to the one that checks rows.
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        share: IdShard,
        plan: PublishPlan,
        *,
        learned: Callable[[], LearnedUpTo] | None = None,
        guards: Sequence[PublishGuard] = (),
    ) -> None:
        self._tables = dict(tables)
        self._share = share
        self._plan = plan
        self._interval = plan.config.interval.total_seconds()
        self._news = concurrency.Event()
        self.learning = Learning(on_note=self._news.set)
        self._learned = self.learning.now if learned is None else learned
        self._rows = RowGuard(plan.config.guard)
        self._guard = AllGuards([self._rows, *guards])
        self._weights: Mapping[str, Tensor] | None = None  # replaced as a whole, by the training thread
        # Held while a delta is published and while rows are restored: a delta never has rows of two states.
        self._turn = concurrency.Lock()
        self._opened: _Opened | None = None
        # Guards the two below. On a server, orders of an operator and questions for the status come from
        # different threads: a status in the middle of a resume would keep the first bad step of that pause.
        self._ordering = concurrency.Lock()
        self._by_operator = False
        self._first_bad_step: int | None = None
        """While publishing is paused, the first step whose rows are not trusted; None: not decided yet."""
        self._failures, self._failed = 0, Doublings()
        self._failure = ""  # the last of them
        self._closed = concurrency.Event()

    @property
    def place(self) -> LogPosition | None:
        """The newest published position of the shard; None before the first."""
        return None if self._opened is None else self._opened.publisher.position

    def start(self) -> None:
        """Publish from now on: the rows are made or restored. Starting again does nothing.

        Raises:
            MonolithError: The channel cannot be opened, such as a port that is taken.
        """
        if self._opened is not None or self._closed.is_set():
            return
        plan, config = self._plan, self._plan.config
        writer = CountedWriter(
            plan.open_writer(self._share),
            plan.metrics,
            self._share[0],
            problem=self._rows.problem,
            clock=plan.clock,
        )
        kept = None if plan.pause_file is None else plan.pause_file.read()
        publisher = Publisher(
            self._tables,
            writer,
            PublisherConfig(
                run=plan.run,
                shard=self._share,
                interval=self._interval,
                dense_interval=config.dense_interval.total_seconds(),
                initial_state=None
                if kept is None
                else PublishState(True, kept.reason, kept.since, kept.version),
            ),
            dense=self._newest_weights,
            learned=self._learned,
            check_delta=self._guard.check,
            clock=plan.clock,
        )
        if kept is not None:
            self._by_operator = not kept.by_guard
            self._first_bad_step = kept.first_bad_step
            _log.warning(
                "publishing of shard %d of %d is %s. It was paused before this start, and stays paused until "
                "an operator runs: monolith publish resume",
                *self._share,
                kept.describe(),
            )
        thread = concurrency.Thread(target=self._run, name="publish", daemon=True)
        self._opened = _Opened(publisher, writer, thread)
        thread.start()

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take a copy of the dense weights, to be published with the next delta."""
        self._weights = weights

    def execute(self, order: PublishOrder) -> tuple[ShardPublishStatus, ...]:
        """Execute an order; return the status of the shard after it, or nothing before it is published."""
        if self._opened is None:
            return ()
        publisher = self._opened.publisher
        with self._ordering:
            if order.action == "hold":
                self._pause(publisher, order)
            elif order.action == "resume":
                if not order.by_guard:
                    self._guard.accept()
                self._by_operator = False
                publisher.resume()
                self._first_bad_step = None
            elif order.action == "rollback":
                assert order.version is not None, "a rollback names the version"
                self._by_operator = True
                publisher.rollback(order.version)
            return (self._status(self._opened),)

    def _status(self, opened: _Opened) -> ShardPublishStatus:
        publisher, writer = opened.publisher, opened.writer
        state, place, newest = publisher.state, publisher.position, writer.newest
        by_guard = state.paused and not self._by_operator
        if state.paused and self._first_bad_step is None:
            # The newest delta passed the guard, and an operator who pauses later did not object to it: so the
            # first bad step is the one after it. Before the first delta only the trained step is known.
            step = newest.step + 1 if newest.step else max(1, self._learned().step)
            # Metrics turn bad some time after the first bad delta; the guard knows the earliest step.
            known = self._guard.first_bad_step if by_guard else None
            self._first_bad_step = step if known is None else min(step, known)
        return ShardPublishStatus(
            share=self._share[0],
            shares=self._share[1],
            held=state.paused,
            reason=state.reason[:4096],
            since=state.since,
            version=state.version,
            epoch=place.epoch,
            sequence=place.sequence,
            step=newest.step,
            watermark=newest.watermark,
            published_at=newest.published_at,
            deltas=writer.deltas,
            rows=writer.rows,
            bytes=writer.bytes,
            errors=publisher.stats.failures + self._failures,
            resyncs=writer.resyncs,
            by_guard=by_guard,
            trouble=publisher.trouble[:4096],
            recovered=by_guard and self._guard.recovered(self._look_up),
            first_bad_step=self._first_bad_step if state.paused else None,
        )

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Publish nothing while rows are restored, and then start a new epoch with the restored rows."""
        with self._turn:
            if self._opened is not None:
                self._opened.publisher.suspend()
            yield
            self._weights = None  # they do not fit the restored rows; the hook sends new ones
            self.learning.forget()
            if self._opened is not None:
                publisher = self._opened.publisher
                self._try(lambda: publisher.begin_epoch("rows were restored"))

    def publish(self) -> bool:
        """Publish the changed rows now; return whether some did not fit into the delta.

        The publishing thread calls it, and tests do."""
        opened = self._opened
        if opened is None:
            return False
        before = opened.writer.rows
        with self._turn:
            if not self._closed.is_set():
                self._try(opened.publisher.publish_now)
        return opened.writer.rows - before >= DELTA_IDS

    def flush(self) -> tuple[UnpublishedShard, ...]:
        """Publish all changes once, unless publishing is paused; return the shard if that did not succeed."""
        opened = self._opened
        if opened is None or self._closed.is_set():
            why = "publishing has ended" if self._closed.is_set() else "publishing could not be started"
            return (self._unpublished(why),)
        # The publishing thread has the turn for as long as the channel takes to refuse a delta. The caller
        # asks again, over a connection whose answers may not take much longer than this.
        if not self._turn.acquire(timeout=FLUSH_SECONDS):
            return (self._unpublished(opened.publisher.trouble or "the channel does not answer"),)
        try:
            done = self._try(opened.publisher.flush)
        finally:
            self._turn.release()
        if opened.publisher.state.paused:
            return ()  # an operator or a guard wants servers to lack these changes
        if not done:
            return (self._unpublished(opened.publisher.trouble or self._failure),)
        unfinished = opened.writer.unfinished()
        if unfinished is None:
            return ()
        unpublished = self._unpublished(unfinished.reason)
        return (replace(unpublished, progress=unfinished.progress, by_readers=unfinished.by_readers),)

    def _unpublished(self, why: str) -> UnpublishedShard:
        step = 0 if self._opened is None else self._opened.writer.newest.step
        return UnpublishedShard(*self._share, reason=why[:4096], step=step)

    def close(self) -> None:
        """Stop, and release the tables. Closing again does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._news.set()  # wakes the thread, which looks at `_closed` next
        if self._opened is not None:
            # Not for longer: a channel that hangs must not keep a run from ending. The thread is a daemon.
            self._opened.thread.join(10)
            with self._turn:
                self._try(self._opened.publisher.close)

    # Inside

    def _run(self) -> None:
        # A step that changed rows wakes this thread, so a delta does not wait for the clock. Two deltas are
        # still an interval or more apart, or a fast run would publish every step. The wait ends by itself
        # after an interval: a parameter server receives pushed rows and no steps.
        due = concurrency.monotonic() + self._interval
        while True:
            self._news.wait(self._interval)
            if self._closed.wait(max(0.0, due - concurrency.monotonic())):
                return
            self._news.clear()
            began, deltas = concurrency.monotonic(), self._deltas()
            if self.publish():
                self._news.set()
            elif self._deltas() != deltas:  # an empty publication delays nothing
                due = began + seconds_between(concurrency.monotonic() - began, self._interval)

    def _deltas(self) -> int:
        return 0 if self._opened is None else self._opened.writer.deltas

    def _pause(self, publisher: Publisher, order: PublishOrder) -> None:
        self._by_operator = self._by_operator or not order.by_guard
        if order.first_bad_step is not None:
            before = self._first_bad_step
            self._first_bad_step = min(order.first_bad_step, before or order.first_bad_step)
        if not publisher.state.paused or not order.by_guard:
            publisher.pause(order.reason)

    def _newest_weights(self) -> Mapping[str, Tensor] | None:
        return self._weights

    def _look_up(self, table: str, ids: Tensor) -> Tensor:
        found: Tensor = self._tables[table].lookup(ids)
        return found

    def _try(self, call: Callable[[], T]) -> T | None:
        """Make a call that may fail; failures are counted, and logged at doubling counts."""
        try:
            return call()
        except Exception as error:
            self._failures += 1
            self._failure = str(error)
            if self._failed.due(self._failures):
                unexpected = None if isinstance(error, MonolithError) else error
                _log.error(
                    "shard %d of %d was not published (%d times so far), retrying; training continues: %s",
                    *self._share,
                    self._failures,
                    error,
                    exc_info=unexpected,
                )
            return None


STAGES = ("read", "train", "publish")
"""The stages of freshness: from the event to its batch, to the end of its step, to its delta."""
FRESHNESS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 18000)


class CountedWriter:
    """A `DeltaWriter` that counts what it passes to another one, for metrics and status; read from any
    thread.

    Args:
        problem: Returns what is wrong with a part of a snapshot, which then ends; the publisher checks
        deltas.
        clock: Unix seconds.
    """

    def __init__(
        self,
        inner: DeltaWriter,
        metrics: Metrics,
        share: int,
        *,
        problem: Callable[[Message], str | None] = lambda _: None,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        self._inner = inner
        self._problem = problem
        self._clock = clock
        name = str(share)
        self._count_rows = metrics.counter(
            "publish_rows", "Rows that were published, removed ones included", ["share"]
        ).series(share=name)
        self._count_bytes = metrics.counter(
            "publish_bytes", "Bytes of the tensors of published deltas", ["share"]
        ).series(share=name)
        self._count_deltas = metrics.counter("publish_deltas", "Published deltas", ["share"]).series(
            share=name
        )
        self._count_errors = metrics.counter(
            "publish_errors", "Deltas that the channel did not take, to be tried again", ["share"]
        ).series(share=name)
        self._count_resyncs = metrics.counter(
            "publish_resyncs",
            "Epochs after the first: subscribers take a snapshot or a difference",
            ["share"],
        ).series(share=name)
        self._name = name
        self._held = metrics.gauge("publish_held", "1 while publishing is paused", ["share"])
        self._time = metrics.gauge("publish_time_seconds", "When the newest delta was published", ["share"])
        self._lag = metrics.gauge(
            "publish_lag_seconds", "From the newest event that a delta has to its publishing", ["share"]
        )
        stages = metrics.histogram(
            "publish_stage_seconds",
            "Of the newest event of each delta: event to batch (read), to its step (train), to its delta "
            "(publish)",
            ["stage"],
            buckets=FRESHNESS_BUCKETS,
        )
        self._stages = {stage: stages.series(stage=stage) for stage in STAGES}
        self._epochs = 0
        self._event_at = 0.0
        self.deltas = self.rows = self.bytes = self.errors = 0
        self.newest = LearnedUpTo()
        """The newest event, step and times that the newest delta has learned from."""

    @property
    def address(self) -> str | None:
        return self._inner.address

    @property
    def resyncs(self) -> int:
        return max(self._epochs - 1, 0)

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        try:
            self._inner.open(log, _CheckedSnapshot(snapshot, self._problem))
        except Exception:
            self._count_error()
            raise
        self._epochs += 1
        if self._epochs > 1:
            self._count_resyncs(1)

    def append(self, delta: Delta) -> None:
        try:
            self._inner.append(delta)
        except Exception:
            self._count_error()
            raise
        rows, size = _size(delta)
        self.deltas, self.rows, self.bytes = self.deltas + 1, self.rows + rows, self.bytes + size
        self._count_deltas(1)
        self._count_rows(rows)
        self._count_bytes(size)
        self._observe(delta.learned)

    def set_state(self, state: PublishState) -> None:
        self._held.set(float(state.paused), share=self._name)
        self._inner.set_state(state)

    def unfinished(self) -> Unfinished | None:
        return self._inner.unfinished()

    def close(self) -> None:
        self._inner.close()

    def _count_error(self) -> None:
        self.errors += 1
        self._count_errors(1)

    def _observe(self, learned: LearnedUpTo) -> None:
        now = learned.published_at or self._clock()
        self.newest = learned
        self._time.set(now, share=self._name)
        if not learned.event_at or learned.event_at <= self._event_at:
            return  # nothing of it is new
        self._event_at = learned.event_at
        self._lag.set(max(now - learned.event_at, 0.0), share=self._name)
        moments = {
            "read": (learned.event_at, learned.read_at),
            "train": (learned.read_at, learned.trained_at),
            "publish": (learned.trained_at, now),
        }
        for stage, (begin, end) in moments.items():
            if begin and end:
                self._stages[stage](max(end - begin, 0.0))


class _CheckedSnapshot:
    """A snapshot that ends with an error at the first bad part."""

    def __init__(self, snapshot: TakeSnapshot, problem: Callable[[Message], str | None]) -> None:
        self._snapshot = snapshot
        self._problem = problem

    def __call__(self, buckets: Tensor | None = None) -> Iterator[Message]:
        for message in self._snapshot(buckets):
            if (why := self._problem(message)) is not None:
                raise UnavailableError(f"there is no snapshot for now: {why}")
            yield message


def _size(delta: Delta) -> tuple[int, int]:
    """Return the rows of a delta, removed ones included, and the bytes of its tensors."""
    tensors = [
        one for rows in delta.rows.values() for one in (rows.ids, rows.event_times, rows.values, rows.state)
    ]
    tensors += delta.removed.values()
    tensors += (delta.dense or {}).values()
    counted = sum(map(len, delta.rows.values())) + sum(map(len, delta.removed.values()))
    return counted, sum(one.numel() * one.element_size() for one in tensors)


class Learning:
    """The newest event that the rows of this process have learned from. One thread writes, any thread reads.

    Args:
        on_note: Called after each `note`, on its thread.
    """

    def __init__(self, on_note: Callable[[], None] = lambda: None) -> None:
        self._newest = LearnedUpTo()
        self._on_note = on_note

    def note(self, learned: LearnedUpTo) -> None:
        """Record the newest event. A late, older event does not replace a newer one."""
        before = self._newest
        if learned.event_at < before.event_at:
            learned = replace(learned, event_at=before.event_at, read_at=before.read_at)
        self._newest = learned
        self._on_note()

    def forget(self) -> None:
        """Forget the newest event: rows were rolled back to an earlier state."""
        self._newest = LearnedUpTo()

    def now(self) -> LearnedUpTo:
        return self._newest


def newest_event(ids: FeatureIds) -> float:
    """Return the event time of the newest event of a batch; 0 if it has none."""
    times = ids.event_times
    if times is None or not len(times):
        return float(ids.event_time)
    return float(times.max())


Learned = Callable[[LearnedUpTo], None]
"""Called with the newest event of a batch when its rows are updated."""
