"""Records: taken, kept, joined, and made into batches."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from monolith.data import BatchSpec, Records, concat, make_batch
from monolith.data.formats.memory import to_records
from monolith.data.records import BatchMaker, empty_rows
from monolith.errors import ConfigError, DataError
from monolith.tensors import RaggedTensor


@pytest.fixture
def records() -> Records:
    """Three records, and a user that all of them share."""
    own = to_records({"id": [[1], [], [2, 3]], "x": [[0.5], [1.5, 2.5], []], "s": [["a"], ["b", ""], []]})
    user = to_records({"user": [[7, 8]]}).columns["user"]
    return Records(3, {**own.columns, "user": user}, frozenset({"user"}))


def test_a_shared_column_reads_as_if_every_record_had_it(records: Records) -> None:
    assert records.columns["user"].nrows == 1
    assert records["user"].to_list() == [[7, 8]] * 3
    assert records["id"].to_list() == [[1], [], [2, 3]]


def test_a_column_that_is_not_there_is_an_error_that_names_the_others(records: Records) -> None:
    with pytest.raises(DataError, match="no column 'no'; they have id, x, s, user"):
        records["no"]


def test_take_gives_rows_in_any_order_and_as_often_as_asked(records: Records) -> None:
    taken = records.take(torch.tensor([2, 0, 2]))
    assert taken["id"].to_list() == [[2, 3], [1], [2, 3]]
    assert taken.strings("s") == [[], [b"a"], []]
    assert taken["user"].to_list() == [[7, 8]] * 3
    assert len(records.take(torch.empty(0, dtype=torch.int64))) == 0


def test_keep_gives_the_rows_of_a_mask(records: Records) -> None:
    kept = records.keep(torch.tensor([False, True, True]))
    assert kept["x"].to_list() == [[1.5, 2.5], []]
    assert kept.strings("s") == [[b"b", b""], []]
    assert records.keep(torch.ones(3, dtype=torch.bool)) is records
    for mask in (torch.ones(3), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(DataError, match="mask"):
            records.keep(mask)


@pytest.mark.parametrize(
    ("begin", "end", "ids"), [(1, 3, [[], [2, 3]]), (-1, 1, [[1]]), (2, 9, [[2, 3]]), (2, 1, [])]
)
def test_slice_returns_consecutive_records(
    records: Records, begin: int, end: int, ids: list[list[int]]
) -> None:
    cut = records.slice(begin, end)
    assert len(cut) == len(ids)
    assert cut["id"].to_list() == ids
    assert cut["user"].to_list() == [[7, 8]] * len(ids)


def test_the_whole_slice_is_the_same_object(records: Records) -> None:
    assert records.slice(0, 3) is records


def test_columns_are_added_replaced_and_left_out(records: Records) -> None:
    other = to_records({"user": [1, 2, 3], "new": [4, 5, 6]})
    more = records.with_columns(other.columns)
    assert more["user"].to_list() == [[1], [2], [3]]
    assert more.shared == frozenset()
    few = records.select(["user", "id", "no"])
    assert list(few.columns) == ["user", "id"]
    assert few.shared == {"user"}


def test_concat_lays_records_end_to_end_and_fills_what_some_lack(records: Records) -> None:
    more = to_records({"id": [[9]], "late": [[0.5]]})
    together = concat([records, more])
    assert len(together) == 4
    assert together["id"].to_list() == [[1], [], [2, 3], [9]]
    assert together["late"].to_list() == [[], [], [], [0.5]]
    assert together.strings("s") == [[b"a"], [b"b", b""], [], []]
    assert together["user"].to_list() == [[7, 8], [7, 8], [7, 8], []]
    assert together.shared == frozenset()


def test_concat_of_one_is_that_one(records: Records) -> None:
    assert concat([records]) is records


def test_concat_of_a_column_of_several_types_has_all_of_its_values() -> None:
    def joined(*columns: Any) -> RaggedTensor:
        return concat([to_records({"a": column}) for column in columns])["a"]

    assert joined([1, 2], [0.5], [3]).to_list() == [[1.0], [2.0], [0.5], [3.0]]
    lists = concat([to_records({"a": [[7, 8], []]}), to_records({"a": ["x"]})])
    assert lists.strings("a") == [[b"7", b"8"], [], [b"x"]]
    floats = RaggedTensor.from_row_lengths(torch.tensor([0.1, torch.nan]), torch.tensor([1, 1]))
    texts = concat([to_records({"a": [2**24 + 1]}), Records(2, {"a": floats})]).strings("a")
    assert texts[0] == [b"16777217"]  # exact, as float32 is not
    assert (float(texts[1][0]), texts[2]) == (pytest.approx(0.1), [b""])
    assert concat([to_records({"a": [2**64 - 1]}), to_records({"a": ["x"]})]).strings("a")[0] == [
        b"%d" % (2**64 - 1)
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_empty_rows_are_a_column_like_others(dtype: torch.dtype) -> None:
    records = Records(2, {"a": empty_rows(dtype, 2)})
    assert records["a"].to_list() == [[], []]
    assert len(records.take(torch.tensor([1]))) == 1


def test_columns_of_other_shapes_and_types_are_refused() -> None:
    def ragged(values: torch.Tensor) -> RaggedTensor:
        return RaggedTensor.from_row_lengths(values, torch.ones(len(values), dtype=torch.int64))

    for column in (ragged(torch.zeros(2, dtype=torch.float64)), ragged(torch.zeros(2, dtype=torch.uint8))):
        with pytest.raises(DataError, match="must be ragged int64 or float32, or strings"):
            Records(2, {"a": column})
    with pytest.raises(DataError, match="2 rows instead of 3"):
        Records(3, {"a": ragged(torch.zeros(2))})
    with pytest.raises(DataError, match="2 rows instead of 1"):
        Records(2, {"a": ragged(torch.zeros(2))}, frozenset({"a"}))
    with pytest.raises(DataError, match="not there: \\['b'\\]"):
        Records(2, {"a": ragged(torch.zeros(2))}, frozenset({"b"}))


def test_a_batch_has_what_the_spec_names(records: Records) -> None:
    labels = to_records({"label": [[1.0], [0.0, 1.0], []], "line_id.req_time": [[5], [9], [7]]})
    spec = BatchSpec(
        ids=("id", "user", "missing"),
        floats={"x": 2, "absent": 1},
        labels={"click": ("label", 0), "like": ("label", 1), "none": ("no column", 0)},
        optional=("missing", "absent", "no column"),
    )
    batch = make_batch(records.with_columns(labels.columns), spec)
    assert len(batch) == 3
    assert batch.ids["id"].to_list() == [[1], [], [2, 3]]
    assert batch.ids["user"].to_list() == [[7, 8]]
    assert batch.ids.event_time == 9
    assert batch.floats["x"].tolist() == [[0.5, 0.0], [1.5, 2.5], [0.0, 0.0]]
    assert batch.floats["absent"].tolist() == [[0.0]] * 3
    assert batch.labels["click"].nan_to_num(-1).tolist() == [1.0, 0.0, -1.0]
    assert batch.labels["like"].nan_to_num(-1).tolist() == [-1.0, 1.0, -1.0]
    assert "none" not in batch.labels


def test_a_batch_needs_ids_where_it_asks_for_ids(records: Records) -> None:
    with pytest.raises(DataError, match="'x' must hold ids"):
        make_batch(records, BatchSpec(ids=("x",), labels={}))


def test_without_event_times_a_batch_has_none(records: Records) -> None:
    assert make_batch(records, BatchSpec(ids=("id",), labels={}, event_time=None)).ids.event_time == 0
    assert make_batch(records, BatchSpec(ids=("id",), labels={})).ids.event_time == 0


# Columns that are not there


@pytest.mark.parametrize(
    "spec",
    [
        BatchSpec(ids=("usr",), labels={}),
        BatchSpec(ids=(), floats={"usr": 1}, labels={}),
        BatchSpec(ids=(), labels={"click": ("usr", 0)}),
        BatchSpec(ids=(), labels={}, event_time="usr"),
    ],
    ids=["ids", "floats", "labels", "event_time"],
)
def test_a_wrong_column_is_an_error_that_names_what_there_is(spec: BatchSpec) -> None:
    records = to_records({"user": [1, 2], "item": [3, 4]})
    with pytest.raises(
        DataError,
        match=r"no column 'usr'; .*the columns that are read are user, item\. Did you mean 'user'\?",
    ):
        make_batch(records, spec)


def test_a_column_that_is_optional_may_be_missing() -> None:
    spec = BatchSpec(
        ids=("id", "rare"),
        floats={"price": 2},
        labels={"like": ("likes", 0)},
        event_time="time",
        optional=("rare", "price", "likes", "time"),
    )
    batch = make_batch(to_records({"id": [1]}), spec)
    assert batch.ids["rare"].to_list() == [[]]
    assert batch.floats["price"].tolist() == [[0.0, 0.0]]
    assert not batch.labels
    assert batch.ids.event_time == 0


def test_what_is_optional_must_be_read() -> None:
    with pytest.raises(ConfigError, match=r"optional names 'itm'.*it reads item, label.*Did you mean 'item'"):
        BatchSpec(ids=("item",), optional=("itm",))


@pytest.mark.parametrize("label", [[0, 1], [False, True], np.array([0, 1], np.uint8), [0.0, 1.0]])
def test_labels_and_floats_may_be_whole_numbers_or_bools(label: Any) -> None:
    batch = make_batch(
        to_records({"label": label, "age": label}), BatchSpec(ids=(), floats={"age": 1}, event_time=None)
    )
    assert batch.labels["label"].dtype is torch.float32
    assert batch.labels["label"].tolist() == [0.0, 1.0]
    assert batch.floats["age"].dtype is torch.float32


def test_texts_are_no_ids_no_labels_and_no_times_and_one_is_shown() -> None:
    records = to_records({"user": ["ann", "bob"]})
    for spec in (
        BatchSpec(ids=("user",), labels={}),
        BatchSpec(ids=(), labels={"click": ("user", 0)}),
        BatchSpec(ids=(), labels={}, event_time="user"),
    ):
        with pytest.raises(DataError, match=r"'user' must .*got texts such as 'ann'"):
            make_batch(records, spec)


class TestAStreamOfRecords:
    """Of records that bring columns of their own, unless they say that they are complete."""

    def records(self, size: int, **columns: Any) -> Records:
        return replace(to_records({"id": list(range(size)), **columns}), complete=False)

    def test_a_column_may_be_missing_at_first(self) -> None:
        make = BatchMaker(BatchSpec(ids=("id", "rare"), labels={}))
        assert make(self.records(2)).ids["rare"].to_list() == [[], []]
        assert make(self.records(1, rare=[7])).ids["rare"].to_list() == [[7]]
        make(self.records(5000))
        make.end()

    def test_a_column_that_none_of_the_first_thousand_has_is_missing(self) -> None:
        make = BatchMaker(BatchSpec(ids=("idd",), labels={}))
        make(self.records(999))
        with pytest.raises(
            DataError,
            match=r"none of the first 1,004 records has a column 'idd'; .*the columns that are read are id",
        ):
            make(self.records(5))

    def test_a_column_that_no_record_has_is_missing_when_they_end(self) -> None:
        make = BatchMaker(BatchSpec(ids=("idd",), labels={}))
        make(self.records(3))
        with pytest.raises(DataError, match=r"none of the 3 records has a column 'idd'.*Did you mean 'id'"):
            make.end()

    def test_the_end_of_what_was_resumed_says_nothing_of_columns(self) -> None:
        spec = BatchSpec(ids=("id", "rare"), labels={})
        for resumed, end in (
            (False, pytest.raises(DataError, match="has a column 'rare'")),
            (True, nullcontext()),
        ):
            make = BatchMaker(spec, resumed=resumed)
            assert make(self.records(3)).ids["rare"].to_list() == [[], [], []]
            with end:
                make.end()

    def test_a_table_is_refused_at_once_in_its_second_file_too(self) -> None:
        make = BatchMaker(BatchSpec(ids=("id", "rare"), labels={}))
        make(to_records({"id": [1], "rare": [2]}))
        with pytest.raises(DataError, match="no column 'rare'"):
            make(to_records({"id": [1]}))

    def test_that_rows_get_no_event_time_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        make = BatchMaker(BatchSpec(ids=("id",), labels={}))
        for _ in range(3):
            make(to_records({"id": [1]}))
        assert [
            record.getMessage() for record in caplog.records if "never expire" in record.getMessage()
        ] == [
            "batch: the records have no column 'line_id.req_time', so rows get no event time and never "
            "expire; name the column with BatchSpec(event_time=...), or None if there is none"
        ]


@pytest.mark.parametrize("labels", [("click",), "click", {"click": "click"}, {"click": ("click",)}])
def test_labels_of_another_shape_are_told_how_they_are_given(labels: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'labels gives each task a column .* \{"click": \("click", 0\)\}; got'
    ):
        BatchSpec(ids=("user",), labels=labels)


def test_strings_of_a_column_of_numbers_are_an_error_that_says_what_to_do() -> None:
    some = Records(1, {"item": RaggedTensor.from_list([[1]], dtype=torch.int64)})
    with pytest.raises(DataError, match=r"column 'item' holds int64, not strings; read it with"):
        some.strings("item")
