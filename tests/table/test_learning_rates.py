from __future__ import annotations

import pytest

from monolith.errors import ConfigError
from monolith.table import (
    Adagrad,
    ConstantRate,
    MovingAverage,
    PolynomialDecay,
    Sgd,
    StochasticRounding,
    warmup,
)


def test_a_decay_falls_then_stays() -> None:
    rate = PolynomialDecay(initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0)
    assert [rate(step) for step in (0, 1, 2, 4, 5, 1000)] == [1.0, 0.75, 0.5, 0.0, 0.0, 0.0]


def test_power_bends_the_decay() -> None:
    rate = PolynomialDecay(initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0, power=2.0)
    assert [rate(step) for step in (0, 2, 4)] == [1.0, 0.25, 0.0]


def test_a_cycle_stretches_instead_of_staying() -> None:
    rate = PolynomialDecay(initial_learning_rate=1.0, decay_steps=10, end_learning_rate=0.0, cycle=True)
    assert [rate(step) for step in (0, 5, 10, 15, 20, 25)] == pytest.approx([1, 0.5, 0, 0.25, 0, 1 / 6])


def test_the_end_rate_is_upstreams_by_default() -> None:
    assert PolynomialDecay(initial_learning_rate=1.0, decay_steps=1)(9) == 0.0001


def test_equal_schedules_are_equal_and_print_the_same() -> None:
    one, other = (PolynomialDecay(initial_learning_rate=1.0, decay_steps=4) for _ in "ab")
    assert one == other
    assert str(one) == str(other)
    assert str(one) == (
        "PolynomialDecay(cycle=False, decay_steps=4, end_learning_rate=0.0001, "
        "initial_learning_rate=1.0, power=1.0)"
    )
    assert one != PolynomialDecay(initial_learning_rate=1.0, decay_steps=5)
    assert str(ConstantRate(0.5)) == "ConstantRate(rate=0.5)"


def test_warm_up_grows_from_zero_to_the_optimizers_rate() -> None:
    rate = warmup(StochasticRounding(Sgd(learning_rate=0.05, warmup_steps=10)))
    assert [rate(step) for step in (0, 3, 10, 50)] == pytest.approx([0.0, 0.015, 0.05, 0.05])


def test_without_warm_up_the_rate_is_the_optimizers() -> None:
    assert warmup(Adagrad(learning_rate=0.25)) == ConstantRate(0.25)
    assert warmup(MovingAverage()) == ConstantRate(0.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="decay_steps"):
        PolynomialDecay(initial_learning_rate=1.0, decay_steps=0)
    with pytest.raises(ConfigError, match="end_learning_rate"):
        PolynomialDecay(initial_learning_rate=1.0, decay_steps=1, end_learning_rate=-1.0)
    with pytest.raises(ConfigError):
        ConstantRate(float("nan"))
