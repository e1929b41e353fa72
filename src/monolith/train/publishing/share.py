"""One share of a model's rows, published by the process that holds it.

    made ──start──► publishing ◄──restored──► paused, while rows are restored
                      │    ▲
            hold, or  │    │ resume: what is current, in a new epoch after a rollback
            a guard   ▼    │
                       held ──rollback──► held, and servers go back to an exported version

One that was held when the run ended, or was killed, is held from its start (see `hold_file`).

Whatever a channel does wrong is counted and said in the log, and training goes on: nothing here waits for
anybody who reads, and nothing raises into a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from monolith.checkpoint.saved_tables import IdShard
from monolith.errors import MonolithError
from monolith.observe import Doublings, Metrics
from monolith.sync.channel import DeltaWriter
from monolith.sync.guard import AllGuards, PublishGuard, RowGuard
from monolith.sync.messages import LearnedUpTo, LogPosition, PublishState
from monolith.sync.publish_config import PublishConfig
from monolith.sync.publisher import DELTA_IDS, Publisher, PublisherConfig
from monolith.train.publishing.bodies import PublishOrder, ShareStanding
from monolith.train.publishing.counted_writer import CountedWriter
from monolith.train.publishing.hold_file import HoldFile
from monolith.train.publishing.learning import Learning

_log = logging.getLogger(__name__)

OpenShareWriter = Callable[[IdShard], DeltaWriter]
"""Opens the channel of a share."""


@dataclass(frozen=True, kw_only=True)
class PublishPlan:
    """What whoever holds rows needs to publish them."""

    config: PublishConfig
    run: str
    """Names the run, in every message."""
    open_writer: OpenShareWriter
    hold_file: HoldFile | None = None
    """Where it is kept whether publishing is held; None forgets it when the run ends."""
    metrics: Metrics = field(default_factory=Metrics)
    clock: Callable[[], float] = time.time
    """Unix seconds."""


_COST = 20
"""Publishing takes at most one part in so many of the time, of a run that changes many rows at a time. With
10 such a run kept 0.85 of its speed, with 20 it keeps 0.90."""
_LONGEST_S = 0.25
"""The longest that publishing waits for that reason: rows stay fresh, whatever it costs."""


def seconds_between(took: float, interval: float) -> float:
    """Return the seconds between the beginnings of two publications, the first of which took so long."""
    return max(interval, min(_COST * took, _LONGEST_S))


class _Opened(NamedTuple):
    """What publishes, once rows may be seen."""

    publisher: Publisher
    writer: CountedWriter
    thread: threading.Thread


class SharePublisher:
    """Publishes the tables of one share. Thread-safe.

    Args:
        tables: By name; they outlive this.
        learned: Says what the rows have learned from; by default what `learning` was told.
        guards: Asked besides the one that looks at rows.
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
        self._news = threading.Event()
        self.learning = Learning(on_note=self._news.set)
        self._learned = self.learning.now if learned is None else learned
        self._rows = RowGuard(plan.config.guard)
        self._guard = AllGuards([self._rows, *guards])
        self._weights: Mapping[str, Tensor] | None = None
        self._turn = threading.Lock()  # held while something is published, or rows are restored
        self._opened: _Opened | None = None
        self._by_person = False
        self._first_bad_step: int | None = None
        """While publishing is paused, the first step whose rows are not trusted; None: not decided yet."""
        self._failures, self._failed = 0, Doublings()
        self._closed = threading.Event()

    @property
    def place(self) -> LogPosition | None:
        """How far the share is published; None before it is."""
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
        kept = None if plan.hold_file is None else plan.hold_file.read()
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
            self._by_person = not kept.by_guard
            self._first_bad_step = kept.first_bad_step
            _log.warning(
                "publishing share %d of %d is %s. It was so before this start, and stays so until somebody "
                "resumes it: monolith publish resume",
                *self._share,
                kept.describe(),
            )
        thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._opened = _Opened(publisher, writer, thread)
        thread.start()

    def bring(self, weights: Mapping[str, Tensor]) -> None:
        """Take a copy of the dense weights, to be published with the next delta."""
        self._weights = weights

    def obey(self, order: PublishOrder) -> tuple[ShareStanding, ...]:
        """Do as somebody says; return where the share stands then, or nothing before it is published."""
        if self._opened is None:
            return ()
        publisher = self._opened.publisher
        if order.action == "hold":
            self._hold(publisher, order)
        elif order.action == "resume":
            if not order.by_guard:
                self._guard.accept()
            self._by_person = False
            publisher.resume()
            self._first_bad_step = None
        elif order.action == "rollback":
            assert order.version is not None, "an order to go back names the version"
            self._by_person = True
            publisher.rollback(order.version)
        return (self._standing(self._opened),)

    def _standing(self, opened: _Opened) -> ShareStanding:
        publisher, writer = opened.publisher, opened.writer
        state, place, newest = publisher.state, publisher.position, writer.newest
        by_guard = state.paused and not self._by_person
        if state.paused and self._first_bad_step is None:
            # What was published last had passed the guard, or whoever paused publishing did not object to it.
            # Before anything was published all that is known is how far this process has learned.
            step = newest.step + 1 if newest.step else max(1, self._learned().step)
            # Metrics tell later than a delta is let out, and since when the model may be bad.
            known = self._guard.first_bad_step if by_guard else None
            self._first_bad_step = step if known is None else min(step, known)
        return ShareStanding(
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
        """Publish nothing while rows are restored, and begin a new epoch with what they are then."""
        with self._turn:
            yield
            self._weights = None  # the next that are brought fit the rows
            self.learning.forget()
            if self._opened is not None:
                publisher = self._opened.publisher
                self._try(lambda: publisher.begin_epoch("rows were restored"))

    def publish(self) -> bool:
        """Publish what has changed, now; return whether there may be more than one delta holds. Called by the
        thread of its own, and by tests."""
        opened = self._opened
        if opened is None:
            return False
        before = opened.writer.rows
        with self._turn:
            if not self._closed.is_set():
                self._try(opened.publisher.publish_now)
        return opened.writer.rows - before >= DELTA_IDS

    def flush(self) -> None:
        """Publish all that has changed."""
        with self._turn:
            if self._opened is not None and not self._closed.is_set():
                self._try(self._opened.publisher.flush)

    def close(self) -> None:
        """Stop, and let go of the tables. Closing again does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._news.set()
        if self._opened is not None:
            self._opened.thread.join(10)
            with self._turn:
                self._try(self._opened.publisher.close)

    # Inside

    def _run(self) -> None:
        # A step that changed rows wakes this thread, so a delta does not wait for the clock. Two deltas are
        # still an interval or more apart, or a fast run would publish every step. The wait ends by itself
        # after an interval: a parameter server is pushed rows and hears nothing of steps.
        due = time.monotonic() + self._interval
        while True:
            self._news.wait(self._interval)
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            self._news.clear()
            began, deltas = time.monotonic(), self._deltas()
            if self.publish():
                self._news.set()
            elif self._deltas() != deltas:  # a look that found nothing delays nothing
                due = began + seconds_between(time.monotonic() - began, self._interval)

    def _deltas(self) -> int:
        return 0 if self._opened is None else self._opened.writer.deltas

    def _hold(self, publisher: Publisher, order: PublishOrder) -> None:
        self._by_person = self._by_person or not order.by_guard
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

    def _try(self, call: Callable[[], object]) -> None:
        """Do what may fail; a failure is counted, and said now and then."""
        try:
            call()
        except Exception as error:
            self._failures += 1
            if self._failed.due(self._failures):
                unexpected = None if isinstance(error, MonolithError) else error
                _log.error(
                    "share %d of %d was not published (%d times so far); training goes on, and it is tried "
                    "again: %s",
                    *self._share,
                    self._failures,
                    error,
                    exc_info=unexpected,
                )
