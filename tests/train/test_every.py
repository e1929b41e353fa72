from __future__ import annotations

import pytest

from monolith.errors import ConfigError
from monolith.train.hook import Every


def test_steps_that_follow_each_other_cross_at_multiples() -> None:
    every = Every(3)
    assert [step for step in range(1, 10) if every.crossed(step)] == [3, 6, 9]


def test_steps_that_jump_cross_too_and_once() -> None:
    every = Every(100)
    every.begin(0)
    assert [step for step in (98, 101, 150, 199, 203, 600, 601) if every.crossed(step)] == [101, 203, 600]


def test_all_that_were_crossed_are_told() -> None:
    every = Every(100)
    every.begin(95)
    assert list(every.multiples(305)) == [100, 200, 300]
    assert list(every.multiples(399)) == []


def test_the_beginning_counts() -> None:
    late = Every(2)
    late.begin(0)
    assert late.crossed(3)
    without = Every(2)
    assert not without.crossed(3)
    restored = Every(10)
    restored.begin(10)
    assert not restored.crossed(11)


def test_after_going_back_it_counts_from_there() -> None:
    every = Every(10)
    every.begin(0)
    assert every.crossed(25)
    assert not every.crossed(12)
    assert every.crossed(21)


def test_less_than_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="summaries: every_steps must be at least 1, got 0"):
        Every(0, "summaries: every_steps")
