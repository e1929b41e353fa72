from __future__ import annotations

import os
import sys
import threading

import pytest

from monolith.observe import Resting, yield_to_others


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_the_thread_that_asks_steps_back() -> None:
    found = {}

    def background() -> None:
        yield_to_others()
        found["background"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert found["background"] == 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_share_of_a_processor_is_not_passed() -> None:
    work, rests = iter([1.0, 1.0, 3.0, 3.0, 3.5, 3.5]), []
    resting = Resting(0.2, clock=lambda: next(work), sleep=rests.append, rests=lambda: True)
    for _ in range(3):
        resting.advance(100)
    assert rests == pytest.approx([2.0 * 4, 0.5 * 4])  # 2 seconds of work, then half of one


def test_the_whole_of_a_processor_never_rests() -> None:
    resting = Resting(1.0, sleep=lambda _: pytest.fail("it rested"), rests=lambda: True)
    for _ in range(3):
        resting.advance()


def test_nothing_rests_while_it_is_waited_for() -> None:
    work, rests = iter([0.0, 0.0, 1.0, 1.0]), []
    resting = Resting(0.5, clock=lambda: next(work), sleep=rests.append, rests=lambda: True)
    resting.advance()
    with resting.awaited():
        resting.advance()
    assert rests == []
    resting.advance()
    assert rests == [1.0]


def test_each_thread_has_its_own_share() -> None:
    rests: list[float] = []
    resting = Resting(0.5, sleep=rests.append, rests=lambda: True)
    thread = threading.Thread(target=resting.advance)
    thread.start()
    thread.join()
    resting.advance()
    assert rests == []  # the first call of a thread has nothing to look back to


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_threads_that_yielded_rest_and_those_they_started() -> None:
    rests: list[float] = []
    ticks = iter(range(100))
    resting = Resting(0.5, clock=lambda: float(next(ticks)), sleep=rests.append)
    for _ in range(3):
        resting.advance()  # this thread is waited for
    assert rests == []

    def beside() -> None:
        yield_to_others()
        helper = threading.Thread(target=lambda: [resting.advance() for _ in range(3)])
        helper.start()
        helper.join()

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert rests == [1.0, 1.0]
