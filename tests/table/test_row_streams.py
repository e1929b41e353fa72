"""The rows of dumps in the order of their hashes: what a table would hold, without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contracts.tables import ids

from monolith.errors import CorruptFileError, RestoreError
from monolith.table import (
    Adagrad,
    NativeTable,
    Rows,
    Segment,
    TableConfig,
    dump_changes,
    dump_snapshot,
    iterate,
    load,
    load_changes,
)
from monolith.table.dumps import dump_rows
from monolith.table.hashing import mix
from monolith.table.row_streams import (
    HASHES,
    DumpStep,
    describe_dump,
    find_row,
    in_chunks,
    newest_rows,
    shard_range,
    side_by_side,
)

ITEM = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(), learning_rate=0.5),))


def table_of(*keys: int) -> NativeTable:
    table = NativeTable(ITEM)
    table.track_changes()
    if keys:
        table.apply_gradients(ids(*keys), torch.ones(len(keys), 2), event_time=1)
    return table


def save(table: NativeTable, basename: Path, changes: bool) -> DumpStep:
    """Dump a table in blocks of three rows, so that few rows are many blocks."""
    cut = table.snapshot()
    if changes:
        dump_changes(cut, str(basename))
    else:
        dump_snapshot(cut, str(basename), num_shards=3)
    step = DumpStep(str(basename), changes, changes and cut.cleared)
    cut.close(saved=True)
    shards = 1 if changes else 3
    held = list(newest_rows([[DumpStep(step.basename)]]))

    def scan(shard: int, _limit: int) -> Iterator[Rows]:
        begin, end = shard_range(shard, shards)
        for rows in in_chunks(held, 1):
            if begin <= int(mix(rows.ids.numpy())[0]) < end:
                mine.append(rows)
        yield from in_chunks(mine, 3)
        mine.clear()

    mine: list[Rows] = []
    dump_rows(step.basename, describe_dump(step.basename), scan, num_shards=shards, workers=1)
    return step


def content(chunks: Iterator[Rows]) -> dict[int, tuple[int, list[float], list[float]]]:
    found: dict[int, tuple[int, list[float], list[float]]] = {}
    last = -1
    for rows in chunks:
        hashes = mix(rows.ids.numpy()).tolist()
        assert hashes == sorted(hashes)
        assert hashes[0] > last
        last = hashes[-1]
        for key, time, values, state in zip(
            rows.ids.tolist(),
            rows.event_times.tolist(),
            rows.values.tolist(),
            rows.state.tolist(),
            strict=True,
        ):
            found[key] = time, values, state
    return found


def test_a_dump_and_its_changes_come_to_what_a_table_would_hold(tmp_path: Path) -> None:
    """Random training, removal and clearing, over several dumps, in any range of hashes."""
    chance = random.Random(7)
    for trial in range(15):
        table, other = table_of(), NativeTable(ITEM)
        history: list[list[DumpStep]] = []
        for number in range(5):
            if number and chance.random() < 0.2:
                table.clear()
            for _ in range(chance.randrange(4)):
                keys = [chance.randrange(-40, 40) for _ in range(chance.randrange(1, 20))]
                table.apply_gradients(
                    ids(*keys), torch.ones(len(keys), 2), event_time=chance.randrange(1, 99), dedup=True
                )
                table.remove(ids(*(chance.randrange(-40, 40) for _ in range(chance.randrange(6)))))
            step = save(table, tmp_path / f"{trial}-{number}", changes=number > 0)
            history.append([step])
            if number:
                load_changes(other, step.basename, cleared=step.cleared)
            else:
                load(other, step.basename)
            expected = content(iterate(table))
            assert content(iterate(other)) == expected
            assert content(newest_rows(history)) == expected
            parts = [content(newest_rows(history, *shard_range(shard, 4))) for shard in range(4)]
            assert sum(map(len, parts)) == len(expected)
            assert {key: row for part in parts for key, row in part.items()} == expected


def test_one_row_is_found_among_many_blocks(tmp_path: Path) -> None:
    step = save(table_of(*range(-50, 50)), tmp_path / "item", changes=False)
    for key in (-50, -1, 0, 49, 17):
        rows = find_row(step.basename, key)
        assert rows is not None
        assert rows.ids.tolist() == [key]
    assert find_row(step.basename, 50) is None
    assert find_row(step.basename, 1 << 62) is None


def test_two_histories_are_walked_range_by_range(tmp_path: Path) -> None:
    before = save(table_of(*range(30)), tmp_path / "before", changes=False)
    after = save(table_of(*range(20, 60)), tmp_path / "after", changes=False)
    both, last = [], -1
    only_before = only_after = 0
    for beside in side_by_side([[before]], [[after]]):
        assert beside.before.ids.tolist() == beside.after.ids.tolist()
        for one in mix(beside.before.ids.numpy()).tolist():
            assert one > last
            last = one
        both += beside.before.ids.tolist()
        only_before += beside.only_before
        only_after += beside.only_after
    assert sorted(both) == list(range(20, 30))
    assert (only_before, only_after) == (20, 30)


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    step = save(table_of(), tmp_path / "item", changes=False)
    assert list(newest_rows([[step]])) == []
    assert find_row(step.basename, 3) is None
    assert list(side_by_side([[step]], [[step]])) == []


def test_changes_to_nothing_are_refused(tmp_path: Path) -> None:
    table = table_of(1)
    step = save(table, tmp_path / "item", changes=True)
    with pytest.raises(RestoreError, match="changes to a dump that is not there"):
        list(newest_rows([[step]]))
    table.clear()
    assert list(newest_rows([[save(table, tmp_path / "cleared", changes=True)]])) == []


def test_rows_of_another_layout_are_refused(tmp_path: Path) -> None:
    step = save(table_of(1), tmp_path / "item", changes=False)
    wide = NativeTable(TableConfig(name="item", segments=(Segment(dim=3),)))
    wide.track_changes()
    other = save(wide, tmp_path / "wide", changes=True)
    with pytest.raises(RestoreError, match="wide has 3 values"):
        list(newest_rows([[step], [other]]))


def test_rows_out_of_order_are_refused_by_the_name_of_their_file(tmp_path: Path) -> None:
    step = save(table_of(*range(9)), tmp_path / "item", changes=False)
    rows = list(newest_rows([[step]]))
    dump_rows(
        step.basename, describe_dump(step.basename), lambda *_: iter(rows[::-1]), num_shards=1, workers=1
    )
    with pytest.raises(CorruptFileError, match=r"item\..*not in the order"):
        list(newest_rows([[step]]))


def test_chunks_are_of_the_size_that_is_asked_for(tmp_path: Path) -> None:
    step = save(table_of(*range(20)), tmp_path / "item", changes=False)
    assert [len(rows) for rows in in_chunks(newest_rows([[step]], 0, HASHES), 7)] == [7, 7, 6]
    assert list(in_chunks([], 7)) == []
