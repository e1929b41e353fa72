"""A wall clock that is set while a process runs is said once."""

from __future__ import annotations

import time

import pytest

from monolith.observe import ClockWatch, Metrics, Sightings


class Hands:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_each_jump_is_said_once_with_its_size_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    wall, timer, metrics = Hands(1_700_000_000.0), Hands(5.0), Metrics()
    watch = ClockWatch(metrics, clock=wall, timer=timer)
    found = []
    for jump in (0.0, 86_400.0, 0.0, 0.0, -86_400.0, 0.0):
        wall.now += 2 + jump
        timer.now += 2
        found.append(watch.look())
    assert found == [None, 86_400.0, None, None, -86_400.0, None]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "jumped ahead by 86400 s" in caplog.text
    assert "jumped back by 86400 s" in caplog.text
    assert "monolith_clock_jumps_total 2.0" in metrics.render().decode()


def test_a_clock_that_is_slewed_has_not_jumped(caplog: pytest.LogCaptureFixture) -> None:
    wall, timer = Hands(1_700_000_000.0), Hands(5.0)
    watch = ClockWatch(clock=wall, timer=timer)
    for _ in range(1000):
        wall.now += 2.001
        timer.now += 2
        assert watch.look() is None
    assert caplog.text == ""


def test_a_process_that_was_stopped_between_two_readings_has_seen_no_jump() -> None:
    wall, readings = Hands(1_700_000_000.0), iter([0.0, 0.0, 2.0, 62.0, 64.0, 64.0])
    watch = ClockWatch(clock=wall, timer=lambda: next(readings))
    wall.now += 62
    assert watch.look() is None
    wall.now += 2
    assert watch.look() is None


def test_it_looks_by_itself_while_the_block_lasts(caplog: pytest.LogCaptureFixture) -> None:
    wall = Hands(1_700_000_000.0)
    with ClockWatch(every=0.01, clock=wall, timer=lambda: 5.0):
        wall.now += 86_400
        deadline = time.monotonic() + 60
        while "jumped ahead" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_age_of_a_sign_of_life_counts_from_when_it_was_seen_to_change() -> None:
    wall, timer = Hands(1000.0), Hands(5.0)
    sightings = Sightings(wall, timer)

    def age(stamp: float) -> float:
        return sightings.age("ps 0", stamp, renewed_at=stamp, most=60)

    assert age(990.0) == 10  # first seen: as the clocks say
    timer.now += 5
    assert age(990.0) == 15
    assert age(991.0) == 0
    wall.now += 86_400
    assert age(991.0) == 0
    sightings.keep([])
    assert age(991.0) == 0  # first seen, with a clock that was set: nobody knows


def test_a_stamp_from_the_future_is_new_and_grows_old_all_the_same() -> None:
    timer = Hands(5.0)
    sightings = Sightings(lambda: 1000.0 + timer.now, timer)
    assert sightings.age("ps 0", 90_000.0, renewed_at=90_000.0, most=60) == 0
    timer.now += 61
    assert sightings.age("ps 0", 90_000.0, renewed_at=90_000.0, most=60) == 61
