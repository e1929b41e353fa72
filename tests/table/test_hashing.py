from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monolith.table.hashing import draws, mix, mix_one, slot_of, unmix

INT64 = st.integers(-(2**63), 2**63 - 1)
MASK = (1 << 64) - 1


def plain_mix(number: int) -> int:
    h = number & MASK
    h ^= h >> 32
    h = h * 0xD6E8FEB86659FD93 & MASK
    h ^= h >> 32
    h = h * 0xD6E8FEB86659FD93 & MASK
    return h ^ h >> 32


def plain_draw(seed: int, key: int, column: int, salt: int = 0) -> float:
    z = plain_mix(plain_mix(key) + plain_mix(seed) + 0x9E3779B97F4A7C15 * (column + 1) + salt)
    return (z >> 40) / 2**24


@given(INT64)
def test_mix_is_the_documented_function(number: int) -> None:
    assert mix_one(number) == plain_mix(number)
    assert mix(np.array([number])).tolist() == [plain_mix(number)]


@given(INT64)
def test_a_hash_leads_back_to_its_id(number: int) -> None:
    assert unmix(mix(np.array([number]))).tolist() == [number]


@given(INT64)
def test_mix_can_be_undone(number: int) -> None:
    h, inverse = plain_mix(number), 0xCFEE444D8B59A89B
    for _ in range(2):
        h ^= h >> 32
        h = h * inverse & MASK
    assert h ^ h >> 32 == number & MASK


def test_mix_leaves_its_input_alone() -> None:
    given_ids = np.array([1, 2])
    mix(given_ids)
    assert given_ids.tolist() == [1, 2]


@given(st.integers(0, MASK), INT64, st.integers(0, 2000))
def test_a_draw_is_fixed_by_seed_id_and_column(seed: int, key: int, column: int) -> None:
    (drawn,) = draws(seed, np.array([key]), range(column, column + 2)).tolist()
    assert drawn == [plain_draw(seed, key, column), plain_draw(seed, key, column + 1)]


@given(INT64, st.integers(0, MASK))
def test_salt_is_added_in(key: int, salt: int) -> None:
    drawn = draws(3, np.array([key]), range(1), salt=np.array([[salt]], dtype=np.uint64))
    assert drawn.tolist() == [[plain_draw(3, key, 0, salt)]]


def test_draws_are_spread_evenly() -> None:
    drawn = draws(0, np.arange(20_000), range(4))
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    counts = np.histogram(drawn, bins=16, range=(0, 1))[0]
    assert abs(counts / drawn.size - 1 / 16).max() < 0.005
    assert abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.03


def test_a_slot_is_bits_48_to_62() -> None:
    keys = np.array([0, (1 << 48) - 1, 1 << 48, 123 << 48 | 5, 32767 << 48, -1, -(1 << 63)])
    assert slot_of(keys).tolist() == [0, 0, 1, 123, 32767, 32767, 0]
