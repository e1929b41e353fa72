"""When a save is due."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from train.runs import FakeClock

from monolith.errors import ConfigError
from monolith.train.hooks import SaveTimer, TideWindow


def clock_at(hour: int) -> FakeClock:
    return FakeClock(datetime(2024, 5, 17, hour, tzinfo=UTC).timestamp())


@pytest.mark.parametrize("intervals", [{}, {"every_secs": 10, "every_steps": 10}])
def test_exactly_one_interval_must_be_given(intervals):
    with pytest.raises(ValueError, match="exactly one of every_secs and every_steps"):
        SaveTimer(**intervals)


@pytest.mark.parametrize("name", ["every_secs", "every_steps"])
def test_an_interval_is_above_0(name):
    with pytest.raises(ConfigError, match=name):
        SaveTimer(**{name: 0})


def test_the_first_save_is_due_at_once():
    assert SaveTimer(every_steps=100).should_trigger(7)


def test_a_step_is_due_once_only():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(7)
    clock.now += 100
    assert not timer.should_trigger(7)
    assert timer.should_trigger(8)


def test_by_seconds():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(1)
    clock.now += 5
    assert not timer.should_trigger(2)
    clock.now += 10
    assert timer.should_trigger(2)


def test_by_steps():
    timer = SaveTimer(every_steps=10, clock=FakeClock())
    timer.stamp(5)
    assert not timer.should_trigger(14)
    assert timer.should_trigger(15)


def test_inside_the_tide_the_usual_interval_holds():
    clock = clock_at(2)
    timer = SaveTimer(every_secs=10, tide=TideWindow(1, 0, 3, 0), tide_every_secs=5, clock=clock, timer=clock)
    timer.stamp(1)
    clock.now += 5
    assert not timer.should_trigger(2)
    clock.now += 10
    assert timer.should_trigger(2)


def test_outside_the_tide_its_own_interval_holds():
    clock = clock_at(4)
    timer = SaveTimer(every_secs=10, tide=TideWindow(1, 0, 3, 0), tide_every_secs=5, clock=clock, timer=clock)
    timer.stamp(1)
    clock.now += 2
    assert not timer.should_trigger(2)
    clock.now += 7
    assert timer.should_trigger(2)


def test_outside_the_tide_steps_do_not_count():
    timer = SaveTimer(every_steps=1, tide=TideWindow(1, 0, 3, 0), tide_every_secs=5, clock=clock_at(4))
    timer.stamp(1)
    assert not timer.should_trigger(100)


def test_without_an_interval_for_it_the_tide_changes_nothing():
    timer = SaveTimer(every_steps=1, tide=TideWindow(1, 0, 3, 0), clock=clock_at(4))
    timer.stamp(1)
    assert timer.should_trigger(2)


def test_a_disabled_timer_is_never_due():
    timer = SaveTimer(every_steps=1)
    timer.enabled = False
    assert not timer.should_trigger(7)
    timer.enabled = True
    assert timer.should_trigger(7)


def test_after_a_reset_a_save_is_due_at_once():
    timer = SaveTimer(every_steps=100)
    timer.stamp(7)
    timer.reset()
    assert timer.last_step is None
    assert timer.should_trigger(7)


def test_a_stamp_says_what_passed_since_the_last():
    clock = FakeClock()
    timer = SaveTimer(every_steps=100, clock=clock, timer=clock)
    assert timer.stamp(5) is None
    clock.now += 3
    assert timer.stamp(12) == (3, 7)
    assert timer.last_step == 12


def test_a_rearmed_timer_is_due_after_the_back_off():
    clock = FakeClock()
    timer = SaveTimer(every_secs=600, clock=clock, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 29
    assert not timer.should_trigger(2)
    clock.now += 1
    assert timer.should_trigger(2)
    timer.stamp(2)
    clock.now += 100
    assert not timer.should_trigger(3)


def test_a_back_off_does_not_delay_what_is_due_sooner():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, clock=clock, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 10
    assert timer.should_trigger(2)


def test_a_wall_clock_that_jumps_changes_no_interval():
    wall, timer = FakeClock(), FakeClock(0.0)
    due = SaveTimer(every_secs=10, clock=wall, timer=timer)
    due.stamp(1)
    for step, jump in enumerate((86_400, -86_400, -86_400), 2):
        wall.now += jump
        timer.now += 9
        assert not due.should_trigger(step)
        timer.now += 1
        assert due.should_trigger(step)
        due.stamp(step)


def test_a_back_off_that_is_not_to_be_cut_short_delays_what_is_due_sooner():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, timer=clock)
    timer.stamp(1)
    timer.rearm(30, not_sooner=True)
    clock.now += 29
    assert timer.backs_off
    assert not timer.should_trigger(2)
    clock.now += 1
    assert timer.retry_due
    assert timer.should_trigger(2)


def test_a_save_that_failed_is_due_again_although_no_step_was_taken():
    clock = FakeClock()
    timer = SaveTimer(every_secs=10, timer=clock)
    timer.stamp(1)
    timer.rearm(30)
    clock.now += 30
    assert timer.should_trigger(1)
