from __future__ import annotations

import threading

import pytest
import torch
from contracts.tables import ids
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import ConfigError, TableArgumentError
from monolith.table import (
    TOUCHED_KEY_SET_CAPACITY,
    TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
    DictTable,
    Segment,
    TableConfig,
    TouchedKeySet,
)


def test_constants_are_upstreams() -> None:
    assert (TOUCHED_KEY_SET_CAPACITY, TOUCHED_KEY_SET_CONCURRENCY_LEVEL) == (2_097_152, 1024)
    assert TouchedKeySet().capacity == 2_097_152


def test_keys_are_taken_once() -> None:
    keys = TouchedKeySet(capacity=1000)
    assert keys.steal().tolist() == []
    assert keys.insert(torch.arange(1000)) == 0
    assert keys.insert(torch.arange(1000)) == 0
    assert len(keys) == 1000
    assert sorted(keys.steal().tolist()) == list(range(1000))
    assert keys.steal().dtype == torch.int64
    assert len(keys) == 0


def test_a_set_past_its_capacity_forgets_everything_and_says_so() -> None:
    keys = TouchedKeySet(capacity=1000)
    assert keys.insert(torch.arange(1005)) == 1001
    assert sorted(keys.steal().tolist()) == [1001, 1002, 1003, 1004]


def test_ids_may_have_any_shape() -> None:
    keys = TouchedKeySet(capacity=10)
    keys.insert(torch.tensor([[1, 2], [2, 3]]))
    keys.insert(torch.tensor(4))
    keys.insert(torch.tensor([[5, 0], [6, 0]])[:, 0])
    keys.insert(torch.empty(0, 3, dtype=torch.int64))
    assert sorted(keys.steal().tolist()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TableArgumentError, match="int64"):
        keys.insert(torch.ones(2))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_every_int64_is_a_key(numbers: list[int]) -> None:
    keys = TouchedKeySet(capacity=100)
    assert keys.insert(ids(*numbers, -1, 0)) == 0
    assert sorted(keys.steal().tolist()) == sorted({*numbers, -1, 0})


def in_ten_threads(work: object) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ten_threads_lose_and_duplicate_nothing() -> None:
    keys = TouchedKeySet(capacity=100_000)
    taken: list[int] = []

    def work(number: int) -> None:
        mine = torch.arange(number * 5000, (number + 1) * 5000)
        for chunk in mine.split(250):
            assert keys.insert(chunk) == 0
            if number == 0:
                taken.extend(keys.steal().tolist())

    in_ten_threads(work)
    assert sorted(taken + keys.steal().tolist()) == list(range(50_000))


def test_ten_threads_clear_as_often_as_one_would() -> None:
    keys, capacity = TouchedKeySet(capacity=1000), 1000
    total = 20 * capacity + 10_000
    dropped = [0] * 10

    def work(number: int) -> None:
        for chunk in torch.arange(number, total, 10).split(37):
            dropped[number] += keys.insert(chunk)

    in_ten_threads(work)
    # Each clear drops capacity + 1 keys, and no key is counted twice or lost.
    assert sum(dropped) % (capacity + 1) == 0
    assert sum(dropped) + len(keys) == total


def test_a_name_has_its_suffix() -> None:
    assert TouchedKeySet(name_suffix="_ps_3").name == "MonolithTouchedKeySet_ps_3"
    for settings in ({"capacity": 0}, {"concurrency_level": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            TouchedKeySet(**settings)


def test_what_was_ever_dropped_is_counted() -> None:
    keys = TouchedKeySet(capacity=10)
    assert keys.lost == 0
    keys.insert(torch.arange(12))
    keys.steal()
    keys.insert(torch.arange(12))
    assert keys.lost == 22


def test_a_table_tells_which_rows_it_wrote() -> None:
    keys = TouchedKeySet()
    table = DictTable(TableConfig(name="item", segments=(Segment(dim=1),)), touched=keys)
    table.assign(ids(1, 2), torch.ones(2, 1))
    table.apply_gradients(ids(2, 3, 3), torch.ones(3, 1))
    assert sorted(keys.steal().tolist()) == [1, 2, 3]
