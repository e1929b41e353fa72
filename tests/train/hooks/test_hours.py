"""The daily window in which a run may train."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta

import pytest
from train.runs import FakeClock, FakeRun, train

from monolith.concurrency import Clocks
from monolith.errors import ConfigError
from monolith.train.hooks import DailyHours, SlowStartHook, StopOutsideHoursHook, before, slow_start_target
from monolith.train.hooks.hours import SlowStart


def at(hour: int, minute: int = 0, second: int = 0) -> float:
    return datetime(2024, 5, 17, hour, minute, second, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ((1, 30), (2, 0), True),
        ((2, 0), (1, 59), False),
        ((1, 10), (1, 20), True),
        ((1, 20), (1, 20), False),
        ((1, None), (1, 1), True),
        ((1, None), (1, 0), False),
    ],
)
def test_before_is_strictly_earlier_and_no_minute_is_minute_0(first, second, expected):
    assert before(*first, *second) is expected


@pytest.mark.parametrize(
    "now, inside",
    [(at(0, 59, 59), False), (at(1), True), (at(2), True), (at(2, 59, 59), True), (at(3), False)],
)
def test_a_window_has_its_start_and_not_its_end(now, inside):
    assert DailyHours(1, 0, 3, 0).contains(now) is inside


@pytest.mark.parametrize(
    "now, inside",
    [
        (at(21, 59), False),
        (at(22), True),
        (at(23, 59), True),
        (at(0), True),
        (at(5, 59), True),
        (at(6), False),
    ],
)
def test_a_window_that_ends_before_it_starts_goes_over_midnight(now, inside):
    assert DailyHours(22, None, 6, None).contains(now) is inside


@pytest.mark.parametrize("now", [at(0), at(7), at(7, 30), at(23, 59)])
def test_a_window_that_ends_where_it_starts_is_all_day(now):
    assert DailyHours(7, None, 7, 0).contains(now)


def test_minutes_count_within_an_hour():
    window = DailyHours(7, None, 7, 30)
    assert window.contains(at(7))
    assert not window.contains(at(7, 30))


@pytest.mark.parametrize("window", [(24, 0, 1, 0), (1, 60, 2, 0), (1, 0, -1, 0), (1, 0, 2, 99)])
def test_a_time_that_no_day_has_is_refused(window):
    with pytest.raises(ConfigError, match="daily window"):
        DailyHours(*window)


@pytest.mark.parametrize(
    "window, stops",
    [
        (DailyHours(1, 0, 5, 0), True),
        (DailyHours(1, 0, 12, 0), False),
        (DailyHours(22, 0, 6, 0), True),
        (None, False),
    ],
)
def test_a_run_is_stopped_outside_its_window(window, stops):
    run = FakeRun()
    StopOutsideHoursHook(window, clock=FakeClock(at(10))).before_step(run)
    assert (run.stop_reason is not None) is stops


def test_the_step_that_was_begun_is_finished():
    clock = FakeClock(at(4, 59, 59))
    run = train(
        [StopOutsideHoursHook(DailyHours(1, 0, 5, 0), clock=clock)], 10, on_step=lambda _: clock.sleep(1)
    )
    assert run.step == 2
    assert run.stop_reason == "outside the daily window 01:00-05:00 UTC"


def test_the_clock_is_read_once_a_step():
    reads = iter([at(2)])
    StopOutsideHoursHook(DailyHours(1, 0, 3, 0), clock=lambda: next(reads)).before_step(FakeRun())
    assert list(reads) == []


# Workers that join a young model late.


class Fixed(random.Random):
    """Draws the same share of every range."""

    share = 0.0

    def uniform(self, a: float, b: float) -> float:
        return a + self.share * (b - a)


def hook(target: int, clock: FakeClock, global_step, **options) -> SlowStartHook:
    options = {"rng": Fixed(), **options}
    waits = {name: options.pop(name) for name in ("max_wait", "grace") if name in options}
    return SlowStartHook(
        SlowStart(target_step=target, **waits),
        clocks=Clocks(wall=clock, timer=clock, sleep=clock.sleep),
        global_step=global_step,
        **options,
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
    hook(1000, clock, lambda: 0, hours=DailyHours(1, 0, 5, 0)).before_step(run)
    assert run.stop_reason is not None
    assert clock.sleeps == []


def test_inside_the_tide_it_waits():
    run, clock = FakeRun(), at_ten()
    hook(1000, clock, lambda: 2000 * len(clock.sleeps), hours=DailyHours(1, 0, 12, 0)).before_step(run)
    assert run.stop_reason is None
    assert clock.sleeps == [0.5]


def test_the_tide_may_end_while_it_waits():
    run, clock = FakeRun(), at_ten()
    begin = clock.now
    hook(1000, clock, lambda: 0, hours=DailyHours(1, 0, 10, 1)).before_step(run)
    assert run.stop_reason is not None
    assert clock.now - begin == 60


def test_worker_0_obeys_the_tide_as_well():
    run = FakeRun()
    hook(0, at_ten(), lambda: 0, hours=DailyHours(1, 0, 5, 0)).before_step(run)
    assert run.stop_reason is not None


def test_a_stop_that_another_thread_asked_for_ends_the_wait():
    run, clock = FakeRun(), FakeClock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        run.request_stop("somebody")

    SlowStartHook(
        SlowStart(target_step=1000),
        clocks=Clocks(wall=clock, timer=clock, sleep=sleep),
        global_step=lambda: 0,
    ).before_step(run)
    assert clock.sleeps == [0.5]
