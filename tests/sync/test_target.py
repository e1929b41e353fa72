"""Tables that take deltas and snapshots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sync.tables import held, ids, make_table, write

from monolith.sync import PublishState, TableTarget
from monolith.table import DictTable, NativeTable, Rows, bucket_of


@pytest.fixture(params=[DictTable, NativeTable], ids=lambda cls: cls.__name__)
def table(request: pytest.FixtureRequest) -> Any:
    return make_table(cls=request.param)


def rows(*keys: int, value: float = 9.0) -> Rows:
    n = len(keys)
    return Rows(ids(*keys), torch.zeros(n, dtype=torch.int64), torch.full((n, 2), value), torch.empty(n, 0))


def test_rows_are_put_in_place_and_ids_dropped(table: Any) -> None:
    target = TableTarget({"item": table})
    assert target.tables == {"item": 2}
    write(table, {1: 1.0, 2: 2.0})
    target.apply({"item": rows(2, 3), "unknown": rows(1)}, {"item": ids(1, 7), "other": ids(1)})
    assert held(table) == {2: [9.0, 9.0], 3: [9.0, 9.0]}


def test_a_snapshot_replaces_a_share_and_nothing_else(table: Any) -> None:
    target = TableTarget({"item": table})
    write(table, dict.fromkeys(range(-6, 6), 1.0))
    target.begin_snapshot((1, 3), None)
    target.snapshot_rows("item", rows(1))
    target.snapshot_rows("item", rows(7))
    target.snapshot_rows("unknown", rows(4))
    target.end_snapshot()
    kept = {key: 1.0 for key in range(-6, 6) if (key % 2**64) % 3 != 1} | {1: 9.0, 7: 9.0}
    assert held(table) == {key: [value] * 2 for key, value in kept.items()}


def test_a_snapshot_of_some_buckets_leaves_all_other_rows(table: Any) -> None:
    target = TableTarget({"item": table})
    write(table, dict.fromkeys(range(30), 1.0))
    target.begin_snapshot((0, 1), bucket_of(ids(3, 4)).sort().values)
    target.snapshot_rows("item", rows(3))
    target.end_snapshot()
    expected = {key: [1.0, 1.0] for key in range(30) if key != 4} | {3: [9.0, 9.0]}
    assert held(table) == expected


def test_an_empty_snapshot_leaves_nothing(table: Any) -> None:
    target = TableTarget({"item": table})
    write(table, {1: 1.0})
    target.begin_snapshot((0, 1), None)
    target.end_snapshot()
    assert held(table) == {}


def test_a_snapshot_that_breaks_off_drops_nothing(table: Any) -> None:
    target = TableTarget({"item": table})
    write(table, {1: 1.0})
    target.begin_snapshot((0, 1), None)
    target.snapshot_rows("item", rows(2))
    target.abort_snapshot()
    target.end_snapshot()
    assert set(held(table)) == {1, 2}


def test_dense_weights_and_states_are_handed_on(table: Any) -> None:
    swapped: list[Any] = []
    target = TableTarget({"item": table}, swap=swapped.append)
    weights = {"w": torch.ones(2)}
    target.swap_dense(weights)
    target.set_state(PublishState(paused=True, number=3))
    assert swapped == [weights]
    assert target.dense is weights
    assert target.state.paused
