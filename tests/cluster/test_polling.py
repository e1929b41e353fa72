"""Asking again until there is an answer, by a clock that a test turns."""

from __future__ import annotations

from datetime import timedelta

from monolith.cluster.addresses import poll


class Time:
    """A clock that moves only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def ask_after(tries: int, answer: str = "here"):
    asked = iter([None] * (tries - 1))
    return lambda: next(asked, answer)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_the_first_answer_is_returned_without_waiting():
    time = Time()
    assert (
        poll(ask_after(1), timeout=seconds(9), every=seconds(5), clock=time.clock, sleep=time.sleep) == "here"
    )
    assert time.slept == []


def test_it_asks_again_after_each_pause():
    time = Time()
    assert poll(ask_after(3), timeout=None, every=seconds(5), clock=time.clock, sleep=time.sleep) == "here"
    assert time.slept == [5, 5]


def test_it_asks_a_last_time_at_the_very_end_and_gives_up():
    time = Time()
    found = poll(ask_after(3), timeout=seconds(7), every=seconds(5), clock=time.clock, sleep=time.sleep)
    assert (found, time.slept) == ("here", [5, 2])
    assert (
        poll(ask_after(9), timeout=seconds(7), every=seconds(5), clock=time.clock, sleep=time.sleep) is None
    )


def test_no_time_at_all_asks_once_and_never_sleeps():
    time = Time()
    assert (
        poll(ask_after(2), timeout=seconds(0), every=seconds(5), clock=time.clock, sleep=time.sleep) is None
    )
    assert time.slept == []
