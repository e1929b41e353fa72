"""Rows that are moved when a column is looked at: the same as if each step had moved them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.data import Records, concat
from monolith.data.formats.memory import to_records
from monolith.data.records import concat_rows, slice_rows, take_rows
from monolith.data.row_gathering import GatheredColumns, RowBlock
from monolith.tensors import RaggedTensor

CELLS = {
    "id": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    "x": st.lists(st.floats(width=32, allow_nan=False), max_size=3),
    "s": st.lists(st.binary(max_size=4), max_size=3),
}
TYPES = {"id": torch.int64, "x": torch.float32, "s": torch.uint8}


@st.composite
def some_records(draw: st.DrawFn) -> Records:
    size = draw(st.integers(1, 6))
    columns = {}
    for name, cells in CELLS.items():
        rows = draw(st.lists(cells, min_size=size, max_size=size))
        if name == "s":
            texts = [list(text) for row in rows for text in row]
            inner = RaggedTensor.from_list(texts, torch.uint8) if texts else None
            if inner is None:
                inner = RaggedTensor(torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
            lengths = torch.tensor([len(row) for row in rows])
            columns[name] = RaggedTensor.from_row_lengths(inner, lengths)
        else:
            columns[name] = RaggedTensor.from_list(rows, TYPES[name])
    return Records(size, columns)


def lists(records: Records) -> dict[str, object]:
    return {name: column.to_list() for name, column in records.columns.items()}


@given(st.lists(some_records(), min_size=1, max_size=4), st.data())
@settings(max_examples=tries(40), deadline=None)
def test_take_slice_and_concat_move_values_as_the_columns_alone_would(
    parts: list[Records], data: st.DataObject
) -> None:
    joined = concat(parts)
    order = data.draw(st.lists(st.integers(0, joined.size - 1), max_size=8))
    begin = data.draw(st.integers(0, len(order)))
    rows = torch.tensor(order, dtype=torch.int64)
    found = concat([joined.take(rows).slice(begin, len(order)), parts[0]])
    for name in CELLS:
        column = take_rows(concat_rows([part.columns[name] for part in parts]), rows)
        expected = concat_rows([slice_rows(column, begin, len(order)), parts[0].columns[name]])
        assert found[name].to_list() == expected.to_list()
        assert found[name].dtype is TYPES[name]


def test_nothing_is_moved_before_a_column_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    gather = GatheredColumns._gathered
    monkeypatch.setattr(GatheredColumns, "_gathered", lambda self: (moved.append(1), gather(self))[1])
    records = to_records({"id": list(range(10)), "x": [0.5] * 10})
    batch = concat([records.take(torch.arange(9, -1, -1)).slice(0, 3), records.slice(4, 6)])
    assert (len(batch), list(batch.columns), "x" in batch.columns, moved) == (5, ["id", "x"], True, [])
    assert batch["id"].to_list() == [[9], [8], [7], [4], [5]]
    assert moved


def test_the_caller_may_change_its_numbers_afterwards() -> None:
    rows = torch.tensor([1, -1])
    taken = to_records({"id": [3, 4, 5]}).take(rows)
    rows[0] = 0
    assert taken["id"].to_list() == [[4], [5]]


def test_parts_of_other_columns_are_joined_all_the_same() -> None:
    joined = concat([to_records({"id": [1, 2]}).slice(0, 1), to_records({"id": [3], "x": [0.5]})])
    assert lists(joined) == {"id": [[1], [3]], "x": [[], [0.5]]}


def test_a_row_beyond_its_block_is_refused() -> None:
    block = RowBlock.of(2, to_records({"id": [1, 2]}).columns)
    assert block is not None
    with pytest.raises(ValueError, match="beyond its block"):
        GatheredColumns.of(block, np.array([2]))["id"]


def test_threads_that_look_at_the_same_records_see_the_same() -> None:
    records = to_records({"id": list(range(5000))}).take(torch.arange(4999, -1, -1))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: records["id"].flat_values.sum().item(), range(16)))
    assert set(found) == {sum(range(5000))}


def test_a_glance_moves_one_column_and_leaves_the_rest_named() -> None:
    records = to_records({"id": [1, 2, 3], "word": ["a", "b", "c"]}).take(torch.tensor([2, 0, 1]))
    glanced = records.glance()
    assert glanced["word"].to_list() == [[[99]], [[97]], [[98]]]
    assert glanced["word"] is glanced["word"]
    kept = records.keep(glanced["id"].flat_values > 1)
    assert isinstance(records.columns, GatheredColumns)
    assert records.unmoved is not None
    assert lists(kept) == {"id": [[3], [2]], "word": [[[99]], [[98]]]}
    assert lists(glanced) == lists(records)
    assert records.glance()["id"].to_list() == [[3], [1], [2]]  # moved by now, and the same
    with pytest.raises(KeyError):
        glanced.columns["x"]
