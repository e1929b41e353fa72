"""What two checkpoints have not in common."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint import small_servers
from checkpoint.small_runs import ITEM, SmallRun, chain, flip, rows_of
from contracts.tables import ids
from torch import nn

from monolith.checkpoint import Checkpointer, DensePart, Saver, TablesPart
from monolith.checkpoint.offline.comparing import TableDifference, compare
from monolith.errors import CorruptFileError, UnknownTableError
from monolith.table import Adam, NativeTable, Segment, Sgd, TableConfig

PLAIN = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Sgd(), learning_rate=1.0),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(folder: Path, step: int, table: NativeTable, model: nn.Module | None = None) -> str:
    parts = [TablesPart({"item": table}), *([] if model is None else [DensePart(model)])]
    return Checkpointer(Saver(str(folder)), parts).save(step)


def counts(one: TableDifference) -> tuple[int, int, int, int]:
    return one.added, one.removed, one.changed, one.touched


def test_a_checkpoint_is_the_same_as_itself_and_as_a_copy(folder: Path, tmp_path: Path) -> None:
    _, prefixes, _ = chain(folder)
    _, others, _ = chain(tmp_path / "again")
    for prefix, other in zip(prefixes, others, strict=True):
        found = compare(prefix, other)
        assert found.same
        assert found.variables_same == 2


def test_rows_are_counted_as_a_table_would_tell(folder: Path) -> None:
    """Every two checkpoints of a chain, both ways round, against the rows of a restored run."""
    _, prefixes, states = chain(folder)
    for before, old in zip(prefixes, states, strict=True):
        for after, new in zip(prefixes, states, strict=True):
            for one in compare(before, after).tables:
                a, b = old["rows"][one.name], new["rows"][one.name]
                both = a.keys() & b.keys()
                assert (one.rows_before, one.rows_after) == (len(a), len(b))
                assert counts(one) == (
                    len(b.keys() - a.keys()),
                    len(a.keys() - b.keys()),
                    sum(a[key][1:] != b[key][1:] for key in both),
                    sum(a[key][1:] == b[key][1:] and a[key][0] != b[key][0] for key in both),
                )


def test_the_rows_that_moved_furthest_are_named_in_order(folder: Path) -> None:
    table = NativeTable(PLAIN)
    table.assign(ids(*range(-5, 5)), torch.zeros(10, 2))
    before = save(folder, 1, table)
    for key in (-4, 3, 2):
        table.assign_add(ids(key), torch.tensor([[3.0 * key, 4.0 * key]]))
    (one,) = compare(before, save(folder, 2, table), top=2).tables
    assert one.changed == 3
    assert [(row.id, row.distance, row.before, row.after) for row in one.largest] == [
        (-4, 20.0, 0.0, 20.0),
        (3, 15.0, 0.0, 15.0),
    ]
    assert compare(before, save(folder, 3, table), top=0).tables[0].largest == []


def test_what_is_no_number_moved_furthest(folder: Path) -> None:
    table = NativeTable(PLAIN)
    table.assign(ids(1, 2), torch.zeros(2, 2))
    before = save(folder, 1, table)
    table.assign(ids(1, 2), torch.tensor([[1e30, 0.0], [math.nan, 0.0]]))
    (one,) = compare(before, save(folder, 2, table)).tables
    assert [row.id for row in one.largest] == [2, 1]
    assert math.isnan(one.largest[0].distance)


def test_only_the_event_time_of_a_row_may_differ(folder: Path) -> None:
    table = NativeTable(PLAIN)
    table.assign(ids(1, 2), torch.ones(2, 2), event_time=1)
    before = save(folder, 1, table)
    table.assign(ids(2), torch.ones(1, 2), event_time=9)
    assert counts(compare(before, save(folder, 2, table)).tables[0]) == (0, 0, 0, 1)


def test_rows_of_another_optimizer_are_compared_by_their_values(folder: Path) -> None:
    table = NativeTable(PLAIN)
    table.assign(ids(1, 2), torch.ones(2, 2))
    before = save(folder, 1, table)
    other = NativeTable(replace(PLAIN, segments=(Segment(dim=2, optimizer=Adam()),)))
    other.assign(ids(2, 3), torch.ones(2, 2))
    (one,) = compare(before, save(folder, 2, other)).tables
    assert counts(one) == (1, 1, 0, 0)
    assert one.layout is not None
    assert "adam" in one.layout[1]
    assert not one.same


def test_rows_of_another_width_are_only_counted(folder: Path) -> None:
    table, wide = NativeTable(PLAIN), NativeTable(ITEM)
    table.assign(ids(1, 2), torch.ones(2, 2))
    wide.assign(ids(2, 3, 4), torch.ones(3, 3))
    (one,) = compare(save(folder, 1, table), save(folder, 2, wide)).tables
    assert counts(one) == (2, 1, 0, 0)


def test_tables_that_came_and_went_are_told(folder: Path) -> None:
    run, prefixes, states = chain(folder)
    table = NativeTable(PLAIN)
    table.assign(ids(1, 2), torch.ones(2, 2))
    checkpointer = Checkpointer(run.checkpointer.saver, [TablesPart({"shop": table})])
    found = {one.name: one for one in compare(prefixes[-1], checkpointer.save(9)).tables}
    assert counts(found["shop"]) == (2, 0, 0, 0)
    assert counts(found["item"]) == (0, len(states[-1]["rows"]["item"]), 0, 0)
    assert len(rows_of(table)) == found["shop"].rows_after


def test_variables_that_moved_came_went_and_changed_their_shape(folder: Path) -> None:
    table = NativeTable(PLAIN)
    first = nn.ModuleDict({"same": nn.Linear(1, 1), "moved": nn.Linear(1, 2), "gone": nn.Linear(1, 1)})
    second = nn.ModuleDict({"same": first["same"], "moved": nn.Linear(1, 2), "new": nn.Linear(1, 1)})
    second["moved"].load_state_dict(first["moved"].state_dict())
    with torch.no_grad():
        second["moved"].bias[1] += 0.5
    second["moved"].weight = nn.Parameter(torch.zeros(2, 7))
    found = compare(save(folder, 1, table, first), save(folder, 2, table, second))
    kinds = {one.name: (one.kind, one.largest) for one in found.variables}
    assert kinds == {
        "gone.weight": ("removed", None),
        "gone.bias": ("removed", None),
        "new.weight": ("added", None),
        "new.bias": ("added", None),
        "moved.weight": ("reshaped", None),
        "moved.bias": ("changed", 0.5),
    }
    assert found.variables_same == 2


def test_the_position_is_told_before_and_after(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    assert compare(prefixes[0], prefixes[1]).states == {"position": ({"next": 100}, {"next": 106})}


def test_some_tables_may_be_left_out(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    found = compare(prefixes[0], prefixes[1], tables=["user"])
    assert [one.name for one in found.tables] == ["user"]
    with pytest.raises(UnknownTableError, match="'shop'; there are item, user"):
        compare(prefixes[0], prefixes[1], tables=["shop"])


def test_damage_is_named(folder: Path) -> None:
    _, prefixes, _ = chain(folder)
    path = next(Path(f"{prefixes[0]}.assets").glob("item.*-of-*"))
    flip(path)
    with pytest.raises(CorruptFileError, match=path.name):
        compare(prefixes[2], prefixes[3])


def test_a_run_of_many_rows_is_compared_in_blocks(folder: Path) -> None:
    run = SmallRun(folder)
    for table in run.tables.values():
        keys = torch.arange(-70_000, 70_000)
        table.assign(keys, torch.zeros(len(keys), table.dim))
    before = run.save(1)
    run.tables["user"].assign_add(ids(*range(1000)), torch.ones(1000, 2))
    (one,) = compare(before, run.save(2), tables=["user"]).tables
    assert (one.changed, one.rows_after) == (1000, 140_000)


# Of several servers


def test_the_same_rows_in_other_shares_are_the_same(tmp_path: Path) -> None:
    prefixes = []
    for servers in (1, 2, 3):
        run = small_servers.Servers(tmp_path / str(servers), servers)
        run.train(*range(-20, 30))
        prefixes.append(run.save(1))
    for other in prefixes[1:]:
        assert compare(prefixes[0], other).same
        assert compare(other, prefixes[0]).same


def test_what_differs_between_other_shares_is_counted(tmp_path: Path) -> None:
    one = small_servers.Servers(tmp_path / "one", 1)
    two = small_servers.Servers(tmp_path / "two", 2)
    for run in (one, two):
        run.train(*range(10))
        run.save(1)
    two.train(3, 4, 20, time=2)
    two.remove("user", 7)
    two.clear("item", 1)
    found = compare(one.save(1), two.save(2))
    item, user = found.tables
    assert (item.rows_before, item.rows_after, item.added, item.removed, item.changed) == (10, 6, 1, 5, 1)
    assert (user.rows_before, user.rows_after, user.added, user.removed, user.changed) == (10, 10, 1, 1, 2)
    assert sorted(row.id for row in user.largest) == [3, 4]
