from __future__ import annotations

import numpy as np
import pytest

from monolith.errors import ConfigError
from monolith.table import INITIALIZERS, BatchSoftmaxInit, Constant, Ones, RandomUniform, Zeros

KEYS = np.array([1, -2, 3])


def test_the_table_of_initializers_is_named_by_kind() -> None:
    assert {kind: cls.kind for kind, cls in INITIALIZERS.items()} == {kind: kind for kind in INITIALIZERS}


def test_constants_fill() -> None:
    for initializer, fill in ((Zeros(), 0), (Ones(), 1), (Constant(3.5), 3.5), (BatchSoftmaxInit(7), 7)):
        values = initializer.values(KEYS, range(2), 0)
        assert values.dtype == np.float32
        assert values.tolist() == [[fill, fill]] * 3


def test_uniform_values_are_in_their_range() -> None:
    values = RandomUniform().values(np.arange(10_000), range(8), 5)
    assert values.dtype == np.float32
    assert values.min() >= np.float32(-0.05)
    assert values.max() <= np.float32(0.05)
    assert abs(values.mean()) < 0.001


def test_uniform_values_count_columns_over_the_whole_entry() -> None:
    whole = RandomUniform().values(KEYS, range(5), 5)
    assert whole[:, 2:].tolist() == RandomUniform().values(KEYS, range(2, 5), 5).tolist()


def test_an_empty_range_is_a_constant() -> None:
    assert RandomUniform(low=0.5, high=0.5).values(KEYS, range(1), 0).tolist() == [[0.5]] * 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError):
        RandomUniform(low=1.0, high=0.0)
    with pytest.raises(ConfigError):
        RandomUniform(low=0.0, high=float("inf"))
    with pytest.raises(ConfigError):
        Constant(float("nan"))
    with pytest.raises(ConfigError):
        BatchSoftmaxInit(0.5)


def test_they_print_their_settings() -> None:
    assert str(RandomUniform()) == "random_uniform(high=0.05, low=-0.05)"
    assert str(Zeros()) == "zeros()"
