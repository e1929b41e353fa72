"""What time it is for rows: by many events, and by no few of them."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch

from monolith.errors import ConfigError
from monolith.table import EventClock

DAY = 86_400
TODAY = 20_000 * DAY


def clock(wall: float = TODAY + 365 * DAY) -> EventClock:
    return EventClock(max_ahead=timedelta(hours=1), wall=lambda: wall)


def batch(*times: int) -> torch.Tensor:
    return torch.tensor(times)


def day(number: int, records: int = 100) -> torch.Tensor:
    """A day of records, evenly."""
    return TODAY + number * DAY + torch.arange(records) * DAY // records


def test_it_follows_the_events() -> None:
    one = clock()
    for number in range(100):
        one.observe(day(number))
        if number >= 3:
            now = one.now()
            assert now is not None
            assert number - 6.5 < (now - TODAY) / DAY < number + 1


def test_a_few_events_do_not_tell_the_time() -> None:
    one = clock()
    assert one.now() is None
    one.observe(batch(TODAY))
    assert one.now() is None
    for _ in range(3):
        one.observe(day(0))
    assert one.now() is None
    one.observe(day(0))
    assert one.now() is not None


@pytest.mark.parametrize("size", [1, 8, 100, 4096])
def test_a_few_events_cannot_move_it_whatever_their_dates(size: int) -> None:
    for wrong in (TODAY + 40 * DAY, 2**32 - 1, 1, TODAY - 400 * DAY):
        one = clock(wall=2**32)
        for number in range(200):
            times = torch.full((size,), TODAY + number)
            if number % 50 == 20:
                times[0] = wrong
            one.observe(times)
            if number >= 70:
                assert TODAY + number - 64 <= (one.now() or 0) <= TODAY + number


def test_it_goes_back_with_the_data_it_trains_on() -> None:
    one = clock()
    for number in range(100):
        one.observe(day(number))
    for _ in range(64):
        one.observe(day(0))
    assert (one.now() or 0) < TODAY + DAY


def test_it_is_never_far_ahead_of_the_wall_clock() -> None:
    one = clock(wall=TODAY)
    for _ in range(64):
        one.observe(day(5))
    assert one.now() == TODAY + 3600


def test_events_without_a_time_say_nothing() -> None:
    one = clock()
    for _ in range(64):
        one.observe(torch.zeros(100, dtype=torch.int64))
        one.observe(torch.empty(0, dtype=torch.int64))
    assert one.now() is None
    assert one.state() == []


def test_a_saved_clock_resumes_as_if_nothing_had_happened() -> None:
    one, other = clock(), clock()
    for number in range(70):
        one.observe(day(number))
    other.restore(json.loads(json.dumps(one.state())))
    for number in range(70, 90):
        assert other.now() == one.now()
        one.observe(day(number))
        other.observe(day(number))


def test_a_clock_that_may_not_even_reach_the_wall_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_ahead"):
        EventClock(max_ahead=timedelta(seconds=-1))
