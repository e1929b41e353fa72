from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.errors import TableArgumentError, TableClosedError
from monolith.table import (
    FrozenSegment,
    FrozenTable,
    FrozenTables,
    OverlaidTables,
    RowOverlay,
    write_frozen_table,
)
from monolith.table.frozen_table import Coding
from monolith.table.hashing import mix
from monolith.table.overlaid_tables import hash_spans

ALL_HASHES = (0, (1 << 64) - 1)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def floats(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def frozen(
    folder: Path, rows: dict[int, list[float]], coding: Coding = "fp32", name: str = "item"
) -> FrozenTable:
    path = str(folder / f"{name}.{len(list(folder.iterdir()))}.rows")
    values = np.array(list(rows.values()), np.float32).reshape(len(rows), -1)
    dim = values.shape[1] if rows else 2
    chunk = (np.array(list(rows), np.int64), values.reshape(-1, dim))
    write_frozen_table(path, [FrozenSegment(dim, coding)], [chunk], rows=len(rows), name=name)
    return FrozenTable(path)


def overlaid(table: FrozenTable, overlay: RowOverlay | None = None) -> OverlaidTables:
    below = FrozenTables({"item": table}, threads=1)
    return OverlaidTables(below, RowOverlay({"item": table.dim}) if overlay is None else overlay, threads=1)


def read(tables: OverlaidTables, *numbers: int) -> list[list[float]]:
    rows = tables.lookup(ids(*numbers), ids(len(numbers)))
    return rows.reshape(-1, tables.tables["item"]).tolist()  # type: ignore[no-any-return]


def present(tables: OverlaidTables) -> dict[int, list[float]]:
    found, values = tables.present("item", *ALL_HASHES)
    assert len(set(found.tolist())) == len(found)
    return dict(zip(found.tolist(), values.tolist(), strict=True))


@pytest.fixture
def tables(tmp_path: Path) -> OverlaidTables:
    return overlaid(frozen(tmp_path, {1: [1, 2], 2: [3, 4], -3: [5, 6]}))


def test_an_overlay_row_counts_and_all_others_are_those_of_the_file(tables: OverlaidTables) -> None:
    tables.above.put("item", ids(2, 9), floats([7, 8], [9, 10]))
    assert read(tables, 1, 2, 9, 4) == [[1, 2], [7, 8], [9, 10], [0, 0]]


def test_an_id_that_went_reads_as_zeros_until_it_comes_again(tables: OverlaidTables) -> None:
    tables.above.bury("item", ids(1, 8))
    assert read(tables, 1, 8) == [[0, 0], [0, 0]]
    assert 1 not in present(tables)
    tables.above.put("item", ids(1), floats([4, 4]))
    assert read(tables, 1) == [[4, 4]]
    assert present(tables)[1] == [4, 4]


def test_what_is_there_is_what_lookups_find(tables: OverlaidTables) -> None:
    tables.above.put("item", ids(2, 9), floats([7, 8], [0, 0]))
    tables.above.bury("item", ids(1))
    assert present(tables) == {2: [7, 8], -3: [5, 6], 9: [0, 0]}
    first = int(mix(np.array([9]))[0])
    assert tables.present("item", first, first)[0].tolist() == [9]


def test_one_call_reads_all_tables(tmp_path: Path) -> None:
    below = FrozenTables({"b": frozen(tmp_path, {1: [1]}), "a": frozen(tmp_path, {1: [2, 3]})}, threads=2)
    overlay = RowOverlay(below.tables)
    tables = OverlaidTables(below, overlay, threads=2)
    overlay.put("b", ids(5), floats([9]))
    asked = ids(1, 7, 5, 1), ids(2, 2)
    assert tables.lookup(*asked).tolist() == [2, 3, 0, 0, 9, 1]


def test_other_tables_or_widths_are_refused(tmp_path: Path, tables: OverlaidTables) -> None:
    with pytest.raises(TableArgumentError, match="cannot cover tables"):
        overlaid(frozen(tmp_path, {1: [1, 2]}), RowOverlay({"item": 3}))
    with pytest.raises(TableArgumentError, match="no table 'user' to follow; the model has item"):
        tables.above.put("user", ids(1), floats([1, 2]))
    with pytest.raises(TableArgumentError):
        tables.above.put("item", ids(1), floats([1, 2, 3]))
    tables.close()
    with pytest.raises(TableClosedError):
        read(tables, 1)


@pytest.mark.parametrize("coding", ["fp32", "fp16", "int8"])
def test_rows_that_the_file_says_as_well_are_not_kept_twice(tmp_path: Path, coding: Coding) -> None:
    tables = overlaid(frozen(tmp_path, {1: [0.1, 0.2], 2: [0.3, 0.4]}, coding))
    assert tables.is_exact("item") == (coding == "fp32")
    tables.above.put("item", ids(1), floats([5, 5]))
    assert tables.put_changed("item", ids(1, 2, 3), floats([0.1, 0.2], [0.3, 0.5], [1, 1])) == 2
    assert len(tables.above) == 2
    assert read(tables, 1)[0] == pytest.approx([0.1, 0.2], abs=2e-3)
    assert read(tables, 2, 3) == [pytest.approx([0.3, 0.5]), [1, 1]]


def test_what_a_snapshot_does_not_contain_is_buried_in_its_share_and_span(tables: OverlaidTables) -> None:
    tables.above.put("item", ids(4, 5, 6), floats([1, 1], [1, 1], [1, 1]))
    odd = [one for one in (1, 5, -3) if one % (1 << 64) % 2 == 1]
    assert odd == [1, 5, -3]
    assert tables.bury_others("item", ids(-3), (1, 2), hash_spans()) == 2
    assert set(present(tables)) == {-3, 2, 4, 6}
    where = int(mix(np.array([4]))[0])
    assert tables.bury_others("item", ids(), (0, 1), iter([range(where, where + 1)])) == 1
    assert set(present(tables)) == {-3, 2, 6}


def test_a_newer_file_takes_over_and_what_is_newer_stays(tmp_path: Path, tables: OverlaidTables) -> None:
    overlay = tables.above
    overlay.put("item", ids(1, 2, 7), floats([8, 8], [9, 9], [7, 7]))
    overlay.bury("item", ids(-3, 11))
    newer = overlaid(frozen(tmp_path, {1: [8, 8], 2: [1, 1], 5: [5, 5], -3: [5, 6]}), overlay)
    want = {1: [8, 8], 2: [9, 9], 7: [7, 7], 5: [5, 5]}
    assert present(newer) == want
    assert newer.settle() == 1
    assert present(newer) == want
    assert len(overlay) == 4  # 2, 7, and two that have gone: a file that is being written may have 11
    assert newer.settle() == 1
    assert present(newer) == want
    assert read(newer, -3) == [[0, 0]]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "bury", "changed", "settle"]), st.integers(-4, 12), st.integers(0, 3)),
    max_size=30,
)


@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS)
def test_it_is_like_a_dict(
    operations: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = {one: [float(one % 4), 1.0] for one in range(0, 12, 2)}
    tables = overlaid(frozen(tmp_path_factory.mktemp("rows"), rows))
    for what, number, value in operations:
        values = [float(value), 1.0]
        if what == "put":
            tables.above.put("item", ids(number), floats(values))
            rows[number] = values
        elif what == "changed":
            tables.put_changed("item", ids(number), floats(values))
            rows[number] = values
        elif what == "bury":
            tables.above.bury("item", ids(number))
            rows.pop(number, None)
        else:
            tables.settle()
        assert present(tables) == rows
    asked = range(-4, 13)
    assert read(tables, *asked) == [rows.get(one, [0.0, 0.0]) for one in asked]


def test_rows_are_read_whole_while_they_are_replaced(tmp_path: Path) -> None:
    numbers = list(range(500))
    tables = overlaid(frozen(tmp_path, {one: [0.0] * 8 for one in numbers}))
    done = threading.Event()

    def write() -> None:
        for round_ in range(200):
            tables.above.put("item", ids(*numbers), torch.full((len(numbers), 8), float(round_)))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    asked = ids(*numbers), ids(len(numbers))
    torn = 0
    while not done.is_set():
        rows = tables.lookup(*asked).reshape(-1, 8)
        torn += int((rows != rows[:, :1]).sum())
    thread.join()
    assert torn == 0
    assert tables.lookup(*asked).unique().tolist() == [199.0]
