"""Workers that join a young model late."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

import pytest
from train.runs import FakeClock, FakeRun, train

from monolith.train.hooks import SlowStartHook, TideWindow, slow_start_target


class Fixed(random.Random):
    """Draws the same share of every range."""

    share = 0.0

    def uniform(self, a: float, b: float) -> float:
        return a + self.share * (b - a)


def hook(target: int, clock: FakeClock, global_step, **options) -> SlowStartHook:
    options = {"rng": Fixed(), **options}
    return SlowStartHook(
        target, global_step=global_step, clock=clock, timer=clock, sleep=clock.sleep, **options
    )


@pytest.mark.parametrize("worker", [0, 1, 2, 9])
def test_the_target_grows_with_the_worker(worker):
    assert slow_start_target(1000, worker) == int(1000 * math.log(1 + worker))


def test_worker_0_has_no_target():
    assert slow_start_target(1000, 0) == 0


@pytest.mark.parametrize("target", [0, -1])
def test_without_a_target_a_worker_starts_at_once(target):
    clock = FakeClock()
    hook(target, clock, lambda: 0).before_step(FakeRun())
    assert clock.sleeps == []


def test_a_worker_starts_when_the_model_has_reached_its_target():
    clock = FakeClock()
    hook(1000, clock, lambda: [0, 500, 1100][len(clock.sleeps)]).before_step(FakeRun())
    assert clock.sleeps == [0.5, 0.5]


def test_once_started_it_never_waits_again():
    clock = FakeClock()
    steps = iter([1000])
    assert train([hook(1000, clock, lambda: next(steps))], 3).step == 3


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_it_starts_anyway_ten_minutes_and_a_random_while_after_the_model_moved(share):
    clock = FakeClock()
    rng = Fixed()
    rng.share = share
    begin = clock.now
    hook(1000, clock, lambda: 2 if clock.now >= begin + 100 else 0, rng=rng).before_step(FakeRun())
    assert clock.now - begin == 100 + 600 + 600 * share


def test_a_model_that_never_moves_is_waited_for_no_longer_than_the_grace_and_the_wait():
    clock = FakeClock()
    begin = clock.now
    waiting = hook(1000, clock, lambda: 1, grace=timedelta(seconds=50), max_wait=timedelta(seconds=20))
    waiting.before_step(FakeRun())
    assert clock.now - begin == 70


def at_ten() -> FakeClock:
    return FakeClock(datetime(2024, 5, 17, 10, tzinfo=UTC).timestamp())


def test_outside_the_tide_the_run_stops_instead():
    run, clock = FakeRun(), at_ten()
    hook(1000, clock, lambda: 0, tide=TideWindow(1, 0, 5, 0)).before_step(run)
    assert run.stop_reason is not None
    assert clock.sleeps == []


def test_inside_the_tide_it_waits():
    run, clock = FakeRun(), at_ten()
    hook(1000, clock, lambda: 2000 * len(clock.sleeps), tide=TideWindow(1, 0, 12, 0)).before_step(run)
    assert run.stop_reason is None
    assert clock.sleeps == [0.5]


def test_the_tide_may_end_while_it_waits():
    run, clock = FakeRun(), at_ten()
    begin = clock.now
    hook(1000, clock, lambda: 0, tide=TideWindow(1, 0, 10, 1)).before_step(run)
    assert run.stop_reason is not None
    assert clock.now - begin == 60


def test_worker_0_obeys_the_tide_as_well():
    run = FakeRun()
    hook(0, at_ten(), lambda: 0, tide=TideWindow(1, 0, 5, 0)).before_step(run)
    assert run.stop_reason is not None


def test_a_stop_that_another_thread_asked_for_ends_the_wait():
    run, clock = FakeRun(), FakeClock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        run.request_stop("somebody")

    SlowStartHook(1000, global_step=lambda: 0, clock=clock, timer=clock, sleep=sleep).before_step(run)
    assert clock.sleeps == [0.5]
