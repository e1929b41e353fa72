from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import ConfigError
from monolith.table import Expiry

DAY = 86400


def test_nothing_expires_by_default_for_a_century() -> None:
    expired = Expiry().expired(np.array([1]), np.array([0]), 36500 * DAY - 1)
    assert expired.tolist() == [False]
    assert Expiry().expired(np.array([1]), np.array([0]), 36500 * DAY).tolist() == [True]


def test_equality_expires_and_the_future_does_not() -> None:
    expiry = Expiry(default=timedelta(seconds=10))
    times = np.array([90, 91, 89, 200])
    assert expiry.expired(np.zeros(4, np.int64), times, 100).tolist() == [True, False, True, False]


def test_each_slot_has_its_own_time_to_live() -> None:
    expiry = Expiry.days(14, {0: 0, 1: 5, 32767: 1})
    ids = np.array([7, 1 << 48 | 7, 2 << 48, 32767 << 48, -1])
    expired = expiry.expired(ids, np.zeros(5, np.int64), 4 * DAY)
    assert expired.tolist() == [True, False, False, True, True]


@given(
    st.dictionaries(st.integers(0, 32767), st.integers(0, 100)),
    st.lists(st.tuples(st.integers(0, 32767), st.integers(0, 200)), min_size=1),
)
def test_the_mask_agrees_with_the_rule_row_by_row(
    per_slot: dict[int, int], rows: list[tuple[int, int]]
) -> None:
    expiry = Expiry(
        default=timedelta(seconds=50),
        per_slot={slot: timedelta(seconds=ttl) for slot, ttl in per_slot.items()},
    )
    ids = np.array([slot << 48 | 5 for slot, _ in rows])
    times = np.array([time for _, time in rows])
    expected = [150 - time >= per_slot.get(slot, 50) for slot, time in rows]
    assert expiry.expired(ids, times, 150).tolist() == expected


def test_it_keeps_its_own_copy_in_slot_order() -> None:
    mine = {2: timedelta(1), 1: timedelta(2)}
    expiry = Expiry(per_slot=mine)
    mine.clear()
    assert list(expiry.per_slot) == [1, 2]
    assert expiry == Expiry.days(per_slot={1: 2, 2: 1})
    assert hash(expiry) == hash(replace(expiry))
    assert str(Expiry.days(1, {3: 2})) == "expiry(default=86400s, per_slot={3: 172800s})"
    assert asdict(expiry)["per_slot"] == expiry.per_slot


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="slot"):
        Expiry.days(1, {32768: 1})
    with pytest.raises(ConfigError, match="slot"):
        Expiry.days(1, {-1: 1})
    with pytest.raises(ConfigError, match="slot 3"):
        Expiry.days(1, {3: -1})
    with pytest.raises(ConfigError, match="default"):
        Expiry(default=timedelta(microseconds=5))
