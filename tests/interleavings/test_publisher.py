"""The publisher: rows are trained, published, paused and copied at the same time, and no copy is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from interleavings.mutants import check_found
from sync.tables import held, ids, make_table, write

from monolith.errors import UnavailableError
from monolith.sync import MemoryChannel, Publisher, PublisherConfig, Subscriber, TableTarget, publisher
from monolith.sync.messages import LearnedUpTo
from monolith.table import Table
from monolith.testing.interleavings import explore, run_threads

HERE = sys.modules[__name__]
MODULES = [publisher, HERE]


class Training:
    """A table whose row 1 has the number of the last step, and one row of each step, the newest two of which
    exist."""

    def __init__(self, **config: Any) -> None:
        self.table: Table = make_table()
        self.channel = MemoryChannel()
        self.step = 0
        self.publisher = Publisher(
            {"item": self.table},
            self.channel.writer(),
            PublisherConfig(run="run", **config),
            learned=lambda: LearnedUpTo(step=self.step),
        )
        self.copy: Table = make_table()
        self.subscriber = Subscriber(self.channel.reader, TableTarget({"item": self.copy}))

    def train(self) -> None:
        for step in range(1, 4):
            write(self.table, {1: float(step), 10 + step: float(step)})
            self.table.remove(ids(8 + step))
            self.step = step

    def follow(self) -> None:
        """Read what is published; the copy is at least as new as it says."""
        for _ in range(2):
            with suppress(UnavailableError):
                self.subscriber.catch_up()
            self.check()

    def check(self) -> None:
        progress = self.subscriber.progress.get(0)
        if progress is None or progress.position is None or not progress.learned.step:
            return
        step = progress.learned.step
        rows = held(self.copy)
        assert rows[1][0] >= step, f"says step {step}, and has {rows}"
        assert 8 + step not in rows, f"says step {step}, and row {8 + step} was removed then"

    def end(self) -> None:
        """Publish and read the rest: the copy is the table."""
        assert self.publisher.flush()
        self.subscriber.catch_up()
        assert held(self.copy) == held(self.table)
        self.publisher.close()


def published(**config: Any) -> Callable[[], None]:
    def scenario() -> None:
        training = Training(**config)
        training.publisher.publish_now()  # opens the log, so that a snapshot can be taken at any moment

        def publish() -> None:
            for _ in range(2):
                training.publisher.publish_now()

        run_threads(training.train, publish, training.follow)
        training.end()

    return scenario


def copied() -> None:
    """A snapshot is taken while the trainer trains and publishes. Without digests, which would repair it."""
    training = Training(digest_buckets=0)
    training.publisher.publish_now()

    def train() -> None:
        training.train()
        training.publisher.publish_now()

    run_threads(train, training.follow)
    training.end()


def paused() -> None:
    """An operator pauses and resumes, rolls servers back, and a restore begins another epoch."""
    training = Training()
    one = training.publisher

    def operate() -> None:
        one.pause("by hand")
        one.resume()
        one.rollback("1")
        one.resume()

    def publish() -> None:
        for _ in range(2):
            one.publish_now()

    run_threads(training.train, operate, publish, training.follow)
    training.end()


def counted() -> None:
    """Figures are complete although snapshots are counted without the publisher's lock."""
    training = Training()
    training.train()
    training.publisher.publish_now()

    def copy() -> None:
        other = Subscriber(training.channel.reader, TableTarget({"item": make_table()}))
        other.catch_up()

    run_threads(copy, copy, training.publisher.publish_now)
    assert training.publisher.stats.snapshots == 2


def in_the_background() -> None:
    """The publisher's own thread, and an end at any moment."""
    training = Training(interval=0.01)
    training.publisher.start()
    training.train()
    training.publisher.close()
    training.publisher.close()
    assert training.publisher.stats.pending == 0
    assert training.publisher.stats.rows + training.publisher.stats.removed >= 4


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(published(), id="published"),
        pytest.param(published(touched_capacity=2), id="too many changes"),
        copied,
        paused,
        counted,
        in_the_background,
    ],
)
def test_a_copy_is_as_new_as_it_says_and_equal_in_the_end(
    scenario: Callable[[], None], schedules: int
) -> None:
    explore(scenario, MODULES, schedules=schedules)


def _stolen_after_the_rows(self: Publisher, name: str) -> Any:
    stolen = self._touched[name].steal()
    self._touched[name].steal()  # what changed in between is forgotten
    waiting = self._pending.pop(name, None)
    return stolen if waiting is None else publisher._union([waiting, stolen])


def _position_after_the_rows(self: Publisher, buckets: Any = None) -> Any:
    messages = list(_right_snapshot(self, buckets))
    begin, *rows, end = messages
    yield replace(begin, position=self._position)
    yield from rows
    yield replace(end, position=self._position, whole_at=self._position)


_right_snapshot = Publisher._take_snapshot


def _counted_without_lock(self: Publisher, **more: float) -> None:
    counted = {name: getattr(self._stats, name) + value for name, value in more.items()}
    self._stats = replace(self._stats, **counted)


@pytest.mark.parametrize(
    ("scenario", "name", "wrong"),
    [
        pytest.param(  # the first two take some hundred schedules
            published(),
            "_changed",
            _stolen_after_the_rows,
            id="changes meanwhile are lost",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            copied,
            "_take_snapshot",
            _position_after_the_rows,
            id="a snapshot says a later position",
            marks=pytest.mark.soak,
        ),
        pytest.param(counted, "_count", _counted_without_lock, id="snapshots are counted without a lock"),
    ],
)
def test_a_deliberate_bug_is_found(
    scenario: Callable[[], None], name: str, wrong: Callable[..., object]
) -> None:
    check_found(scenario, MODULES, Publisher, name, wrong)
