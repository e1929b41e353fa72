"""A snapshot that is wanted is unfinished until it is written: a run that ends waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

from store.fleets import wait_until
from sync.sample_messages import make_snapshot
from torch import Tensor

from monolith.errors import UnavailableError
from monolith.sync import LogPosition, Message
from monolith.sync.channel import SnapshotMaker, Unfinished


def take(_: Tensor | None = None) -> Iterator[Message]:
    return iter(make_snapshot(LogPosition("e", 0), [1, 2]))


def test_it_is_unfinished_until_it_is_written_and_tells_how_far_it_is() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def write(messages: Iterator[Message]) -> None:
        next(messages)
        begun.set()
        assert may_end.wait(60)
        list(messages)

    maker = SnapshotMaker(write, check_every=0.01)
    assert maker.unfinished() is None
    with closing(maker):
        maker.begin(take)
        assert maker.unfinished() is not None
        assert begun.wait(60)
        assert maker.unfinished() == Unfinished("the snapshot is not written yet", 1)
        may_end.set()
        wait_until(lambda: maker.unfinished() is None)
        may_end.clear()
        maker.want()
        assert maker.unfinished() is not None
        may_end.set()
        wait_until(lambda: maker.unfinished() is None)


def test_one_that_fails_tells_why_and_counts_as_no_progress_from_then_on() -> None:
    works, failures = threading.Event(), threading.Semaphore(0)

    def write(messages: Iterator[Message]) -> None:
        next(messages)
        if not works.is_set():
            failures.release()
            raise UnavailableError("the disk is full")
        list(messages)

    with closing(maker := SnapshotMaker(write, check_every=0.01)):
        maker.begin(take)
        for _ in range(3):
            assert failures.acquire(timeout=60)
        assert maker.unfinished() == Unfinished("the snapshot is not written yet: the disk is full", 1)
        works.set()
        wait_until(lambda: maker.unfinished() is None)
