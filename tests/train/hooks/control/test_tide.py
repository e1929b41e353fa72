"""The daily window in which a run may train."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from train.runs import FakeClock, FakeRun, train

from monolith.errors import ConfigError
from monolith.train.hooks import TideStoppingHook, TideWindow, before


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
    assert TideWindow(1, 0, 3, 0).contains(now) is inside


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
    assert TideWindow(22, None, 6, None).contains(now) is inside


@pytest.mark.parametrize("now", [at(0), at(7), at(7, 30), at(23, 59)])
def test_a_window_that_ends_where_it_starts_is_all_day(now):
    assert TideWindow(7, None, 7, 0).contains(now)


def test_minutes_count_within_an_hour():
    window = TideWindow(7, None, 7, 30)
    assert window.contains(at(7))
    assert not window.contains(at(7, 30))


@pytest.mark.parametrize("window", [(24, 0, 1, 0), (1, 60, 2, 0), (1, 0, -1, 0), (1, 0, 2, 99)])
def test_a_time_that_no_day_has_is_refused(window):
    with pytest.raises(ConfigError, match="tide window"):
        TideWindow(*window)


@pytest.mark.parametrize(
    "window, stops",
    [
        (TideWindow(1, 0, 5, 0), True),
        (TideWindow(1, 0, 12, 0), False),
        (TideWindow(22, 0, 6, 0), True),
        (None, False),
    ],
)
def test_a_run_is_stopped_outside_its_window(window, stops):
    run = FakeRun()
    TideStoppingHook(window, clock=FakeClock(at(10))).before_step(run)
    assert (run.stop_reason is not None) is stops


def test_the_step_that_was_begun_is_finished():
    clock = FakeClock(at(4, 59, 59))
    run = train([TideStoppingHook(TideWindow(1, 0, 5, 0), clock=clock)], 10, on_step=lambda _: clock.sleep(1))
    assert run.step == 2
    assert run.stop_reason == "outside the tide window 01:00-05:00 UTC"


def test_the_clock_is_read_once_a_step():
    reads = iter([at(2)])
    TideStoppingHook(TideWindow(1, 0, 3, 0), clock=lambda: next(reads)).before_step(FakeRun())
    assert list(reads) == []
