"""Exported rows, brought up to date by deltas and snapshots, of all ids or of those of one serving server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, TableArgumentError
from monolith.observe import Metrics
from monolith.serve.metrics import FollowMetrics
from monolith.serve.overlay import FollowedTables, FollowTarget
from monolith.sync.messages import BUCKETS
from monolith.table import (
    FrozenSegment,
    FrozenTable,
    FrozenTables,
    NativeTable,
    OverlaidTables,
    Rows,
    Segment,
    TableConfig,
    write_frozen_table,
)
from monolith.table.frozen_table import Coding
from monolith.table.hashing import mix

ALL = torch.arange(BUCKETS)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def rows(values: dict[int, float]) -> Rows:
    keys = ids(*values)
    filled = torch.tensor([[one, one] for one in values.values()], dtype=torch.float32).reshape(-1, 2)
    return Rows(keys, torch.zeros_like(keys), filled, torch.empty(len(keys), 0))


def below(
    folder: Path, values: dict[int, float], coding: Coding = "fp32", name: str = "item"
) -> FrozenTables:
    path = str(folder / f"{len(list(folder.iterdir()))}.rows")
    some = rows(values)
    write_frozen_table(
        path, [FrozenSegment(2, coding)], [(some.ids.numpy(), some.values.numpy())], rows=len(values)
    )
    return FrozenTables({name: FrozenTable(path)}, threads=1)


def present(tables: OverlaidTables, name: str = "item") -> dict[int, float]:
    found, values = tables.present(name, 0, (1 << 64) - 1)
    return dict(zip(found.tolist(), values[:, 0].tolist(), strict=True))


def trainer(values: dict[int, float]) -> NativeTable:
    table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
    table.assign(rows(values).ids, rows(values).values)
    return table


def snapshot(tables: FollowedTables, values: dict[int, float], share=(0, 1), buckets=None) -> int:
    tables.begin_snapshot(share, buckets)
    tables.snapshot_rows("item", rows(values))
    return tables.end_snapshot()


def test_a_delta_adds_rows_and_removes_ids(tmp_path):
    tables = FollowedTables()
    view = tables.attach(below(tmp_path, {1: 1, 2: 2}))
    assert tables.apply({"item": rows({2: 5, 3: 6})}, {"item": ids(1)}) == 3
    assert present(view) == {2: 5, 3: 6}
    assert tables.apply({"item": rows({1: 7})}, {}) == 1
    assert view.lookup(ids(1, 4), ids(2)).tolist() == [7, 7, 0, 0]


def test_a_generation_ends_when_its_rows_are_dropped(tmp_path):
    tables = FollowedTables()
    tables.attach(below(tmp_path, {1: 1}))
    first = tables.generation
    tables.attach(below(tmp_path, {1: 2}))
    assert tables.generation == first, "what was brought stays over a newer export"
    tables.attach(below(tmp_path, {1: 2}, name="user"))
    second = tables.generation
    tables.drop()
    third = tables.generation
    tables.attach(below(tmp_path, {1: 2}))
    assert first < second < third < tables.generation


def test_before_a_version_is_attached_nothing_is_kept():
    tables = FollowedTables()
    assert tables.apply({"item": rows({1: 1})}, {}) == 0
    assert (tables.tables, tables.rows, tables.bytes) == ({}, 0, 0)
    assert snapshot(tables, {1: 1}) == 0


def test_a_table_that_the_model_does_not_read_is_skipped_and_named_once(tmp_path, caplog):
    tables = FollowedTables()
    tables.attach(below(tmp_path, {}))
    for _ in range(2):
        assert tables.apply({"other": rows({1: 1})}, {"other": ids(2)}) == 0
    assert caplog.text.count("publishes table 'other'") == 1


def test_a_row_of_another_width_is_refused(tmp_path):
    tables = FollowedTables()
    tables.attach(below(tmp_path, {1: 1}))
    wide = Rows(ids(1), ids(0), torch.zeros(1, 3), torch.empty(1, 0))
    with pytest.raises(TableArgumentError):
        tables.apply({"item": wide}, {})


def test_a_snapshot_replaces_the_ids_of_its_share_and_keeps_only_what_differs(tmp_path):
    tables = FollowedTables()
    view = tables.attach(below(tmp_path, {1: 1, 2: 2, 3: 3, 4: 4}))
    tables.apply({"item": rows({5: 5, 6: 6})}, {})
    assert snapshot(tables, {1: 1, 3: 9}, share=(1, 2)) == 1  # 5 has gone
    assert present(view) == {1: 1, 2: 2, 3: 9, 4: 4, 6: 6}
    assert tables.rows == 3  # 3, 6, and that 5 has gone


def test_a_snapshot_of_some_buckets_leaves_all_other_rows(tmp_path):
    tables = FollowedTables()
    view = tables.attach(below(tmp_path, dict.fromkeys(range(50), 1.0)))
    bucket = int(mix(np.array([7]))[0] >> np.uint64(52))
    assert snapshot(tables, {}, buckets=ids(bucket)) == 1
    assert sorted(present(view)) == [one for one in range(50) if one != 7]


def test_a_snapshot_that_breaks_off_takes_nothing_away(tmp_path):
    tables = FollowedTables()
    view = tables.attach(below(tmp_path, {1: 1, 2: 2}))
    tables.begin_snapshot((0, 1), None)
    tables.snapshot_rows("item", rows({1: 8}))
    tables.abort_snapshot()
    assert tables.end_snapshot() == 0
    assert present(view) == {1: 8, 2: 2}


def test_a_serving_server_takes_its_own_ids_of_any_share_of_training(tmp_path):
    negative = -3 % (1 << 64) % 2
    tables = FollowedTables((negative, 2))
    view = tables.attach(below(tmp_path, {1: 1, 3: 3}))
    tables.apply({"item": rows({-3: 5, 2: 9, 7: 7})}, {"item": ids(1, 4)})
    assert present(view) == {-3: 5, 3: 3, 7: 7}
    assert snapshot(tables, {3: 4, 9: 9, 6: 6}, share=(0, 3)) == 0
    assert present(view) == {-3: 5, 3: 4, 7: 7, 9: 9}
    assert snapshot(tables, {3: 4, 6: 6}, share=(0, 3)) == (2 if -3 % (1 << 64) % 3 == 0 else 1)
    with pytest.raises(ConfigError):
        FollowedTables((2, 2))


def test_digests_are_those_of_a_table_with_the_same_rows(tmp_path):
    values = {number: float(number) for number in range(-40, 40)}
    tables = FollowedTables()
    tables.attach(below(tmp_path, dict.fromkeys(range(-20, 60), 0.5)))
    tables.apply({"item": rows(values)}, {"item": ids(*range(40, 60))})
    for share in [(0, 1), (1, 3)]:
        ours = tables.digests("item", share, ALL)
        assert torch.equal(ours, trainer(values).digests(ALL, share=share))
    tables.apply({"item": rows({7: 8.0})}, {})
    differing = (tables.digests("item", (0, 1), ALL) != trainer(values).digests(ALL)).nonzero().flatten()
    assert differing.tolist() == [int(mix(np.array([7]))[0] >> np.uint64(52))]


def test_what_cannot_be_compared_has_no_digest(tmp_path):
    coded = FollowedTables()
    coded.attach(below(tmp_path, {1: 0.1}, "fp16"))
    assert coded.digests("item", (0, 1), ALL) is None
    second = FollowedTables((1, 2))
    second.attach(below(tmp_path, {1: 1, 3: 3}))
    assert second.digests("item", (0, 1), ALL) is None  # it has only half of the ids
    assert second.digests("item", (0, 4), ALL) is None  # and none of these
    assert second.digests("other", (1, 2), ALL) is None
    assert torch.equal(second.digests("item", (3, 4), ALL), trainer({3: 3}).digests(ALL))


def test_a_newer_version_takes_over_and_what_is_newer_stays(tmp_path):
    tables = FollowedTables()
    first = tables.attach(below(tmp_path, {1: 1, 2: 2}))
    tables.apply({"item": rows({1: 5, 3: 3})}, {"item": ids(2)})
    second = tables.attach(below(tmp_path, {1: 5, 2: 2, 3: 2.5}))
    assert present(first) == present(second) == {1: 5, 3: 3}
    assert tables.settle() == 1
    assert present(second) == {1: 5, 3: 3}
    tables.apply({"item": rows({2: 4})}, {})
    assert present(second)[2] == 4


def test_what_was_brought_is_dropped_and_nothing_comes_until_a_version_is_attached(tmp_path):
    tables = FollowedTables()
    tables.attach(below(tmp_path, {1: 1}))
    tables.apply({"item": rows({1: 5})}, {})
    tables.drop()
    assert tables.apply({"item": rows({1: 6})}, {}) == 0
    view = tables.attach(below(tmp_path, {1: 2}))
    assert present(view) == {1: 2}
    tables.pause_applying(True)
    assert tables.apply({"item": rows({1: 6})}, {}) == 0
    tables.pause_applying(False)
    tables.apply({"item": rows({1: 7})}, {})
    assert present(view) == {1: 7}


def test_a_model_with_other_tables_starts_again(tmp_path):
    tables = FollowedTables()
    tables.attach(below(tmp_path, {1: 1}))
    tables.apply({"item": rows({1: 5})}, {})
    view = tables.attach(below(tmp_path, {1: 2}, name="user"))
    assert dict(tables.tables) == {"user": 2}
    assert present(view, "user") == {1: 2}


def test_a_skipped_snapshot_removes_nothing(tmp_path):
    tables = FollowedTables()
    view = tables.attach(below(tmp_path, {1: 1, 2: 2}))
    tables.pause_applying(True)
    assert snapshot(tables, {1: 5}) == 0
    assert present(view) == {1: 1, 2: 2}
    tables.pause_applying(False)
    assert snapshot(tables, {1: 5}) == 1
    assert present(view) == {1: 5}


class SlowPredictor:
    """Takes long to swap its first weights: newer ones come meanwhile."""

    weight_names = ("bias",)

    def __init__(self) -> None:
        self.swapped: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def swap_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.swapped.append(float(weights["bias"]))


def test_newer_weights_that_come_while_a_version_is_added_are_swapped_last() -> None:
    target = FollowTarget("m", FollowedTables(), FollowMetrics(Metrics(), "m"), go_to=lambda _: None)
    target.swap_dense({"bias": torch.tensor(1.0)})
    threads: list[threading.Thread] = []

    def newer_arrive() -> None:
        threads.append(
            threading.Thread(target=lambda: target.swap_dense({"bias": torch.tensor(2.0)}), daemon=True)
        )
        threads[0].start()
        threads[0].join(0.2)  # it waits, unless it overtakes

    predictor: Any = SlowPredictor()
    predictor.meanwhile = newer_arrive
    target.add(predictor, newer_dense=True)
    threads[0].join(60)
    assert predictor.swapped == [1.0, 2.0]
