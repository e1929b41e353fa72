"""Records as Arrow batches, and back."""

from __future__ import annotations

import builtins

import pytest
import torch
from data.lists import records, rows_of
from hypothesis import given
from hypothesis import strategies as st

from monolith.data import Records
from monolith.data.join.store import records_from_bytes, records_to_bytes
from monolith.data.service.messages import from_batch, to_batch
from monolith.errors import DataError, MissingExtraError
from monolith.tensors import RaggedTensor

pa = pytest.importorskip("pyarrow")


@st.composite
def some_records(draw: st.DrawFn) -> Records:
    size = draw(st.integers(0, 5))
    columns, shared = {}, set()
    numbers = {
        torch.int64: st.integers(-(2**63), 2**63 - 1),
        torch.float32: st.floats(width=32, allow_nan=False),
        torch.uint8: st.lists(st.integers(0, 255), max_size=3),
    }
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        rows = size
        if draw(st.booleans()):
            rows = 1
            shared.add(name)
        dtype = draw(st.sampled_from(list(numbers)))
        values = draw(st.lists(st.lists(numbers[dtype], max_size=3), min_size=rows, max_size=rows))
        columns[name] = RaggedTensor.from_list(
            values, dtype=dtype, ragged_rank=2 if dtype is torch.uint8 else 1
        )
    return Records(size, columns, frozenset(shared))


def same(one: Records, other: Records) -> bool:
    return (
        one.size == other.size
        and one.shared == other.shared
        and list(one.columns) == list(other.columns)
        and all(
            column.dtype is other.columns[name].dtype and column.to_list() == other.columns[name].to_list()
            for name, column in one.columns.items()
        )
    )


@given(some_records())
def test_every_column_comes_back_as_it_was(some):
    assert same(from_batch(to_batch(some)), some)


@given(some_records())
def test_and_through_a_stream_of_arrow(some):
    batch = to_batch(some)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert same(from_batch(pa.ipc.open_stream(sink.getvalue()).read_next_batch()), some)


@given(some_records())
def test_and_through_bytes_of_our_own(some):
    assert same(records_from_bytes(records_to_bytes(some), "memory"), some)


def test_a_slice_of_a_batch_is_those_records():
    some = records(
        ["user"], id=[[1, 2], [], [3], [4]], text=[[b"a"], [b"bc", b""], [], [b"d"]], user=[[b"u"]]
    )
    part = from_batch(to_batch(some).slice(1, 2))
    assert rows_of(part) == rows_of(some)[1:3]


def test_values_are_not_copied():
    some = records(id=[[1, 2], [3]])
    there = from_batch(to_batch(some))
    assert there.columns["id"].flat_values.data_ptr() == some.columns["id"].flat_values.data_ptr()


def test_arrow_users_see_what_each_record_holds():
    batch = to_batch(records(["user"], id=[[1, 2], []], user=[[b"u"]]))
    assert batch.to_pylist() == [{"id": [1, 2], "user": [b"u"]}, {"id": [], "user": [b"u"]}]


def test_what_records_cannot_hold_is_refused():
    with pytest.raises(DataError, match="large_list"):
        from_batch(pa.RecordBatch.from_pydict({"x": [1, 2]}))
    narrow = pa.RecordBatch.from_arrays([pa.array([[1]], pa.large_list(pa.int32()))], ["x"])
    with pytest.raises(DataError, match="not int64"):
        from_batch(narrow)
    with pytest.raises(DataError, match="without a column"):
        to_batch(Records(3, {}))


def test_without_pyarrow_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[arrow\]"):
        to_batch(records(id=[[1]]))
