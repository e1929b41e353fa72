"""Work behind its caller's back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from monolith.store.dense_cache import BackgroundQueue

SECONDS = 60.0


@pytest.fixture
def behind() -> Iterator[BackgroundQueue]:
    behind = BackgroundQueue("some work")
    yield behind
    behind.close()


def test_everything_is_done_in_order(behind: BackgroundQueue) -> None:
    done: list[int] = []
    for number in range(5):
        behind.give(lambda number=number: done.append(number))  # type: ignore[misc]
    behind.wait()
    assert done == [0, 1, 2, 3, 4]


def test_the_caller_waits_only_until_few_enough_are_left(behind: BackgroundQueue) -> None:
    gate = threading.Event()
    done: list[int] = []
    behind.give(lambda: done.append(1))
    behind.give(lambda: (gate.wait(SECONDS), done.append(2))[1])  # type: ignore[func-returns-value]
    behind.wait(at_most=1)
    assert done == [1]
    gate.set()
    behind.wait()
    assert done == [1, 2]


def test_what_went_wrong_is_raised_to_the_caller_and_nothing_is_done_after_it(
    behind: BackgroundQueue,
) -> None:
    done: list[int] = []
    behind.give(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        behind.wait()
    with pytest.raises(ZeroDivisionError):
        behind.give(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        behind.wait()
    assert done == []


def test_work_that_was_never_begun_is_dropped_and_said(
    behind: BackgroundQueue, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gate, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait(SECONDS)

    behind.give(first)
    behind.give(lambda: done.append(1))
    assert begun.wait(SECONDS)
    gate_opener = threading.Timer(0.05, gate.set)
    gate_opener.start()
    behind.close()
    gate_opener.join()
    assert done == []
    assert "some work: dropped 1" in caplog.text
