"""Tensors of the wire become columns of a model, or an error that says what is wrong with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.server.linear import LinearSignature, Spec

from monolith.errors import RequestError
from monolith.serve.server.tensors import (
    DTYPES,
    columns_of,
    listed_tensor,
    merged,
    output_tensor,
    raw_bytes,
    raw_tensor,
)

SIGNATURE = LinearSignature()


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_numbers_are_read_as_they_were_written(datatype):
    values = np.array([0, 1, 1], DTYPES[datatype])
    read = raw_tensor("x", datatype, [3], raw_bytes(values))
    assert read.values.tolist() == values.tolist()
    assert read.values.dtype == DTYPES[datatype]


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_raw_texts_are_read_as_they_were_written(texts):
    assert raw_tensor("x", "BYTES", [len(texts)], raw_bytes(texts)).values == texts


@given(st.binary(max_size=40), st.lists(st.integers(-2, 1 << 40), max_size=3))
def test_any_bytes_are_texts_or_refused(data, shape):
    try:
        read = raw_tensor("x", "BYTES", shape, data)
    except RequestError:
        return
    assert raw_bytes(read.values) == data


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "says"),
    [
        ("INT64", [2], b"\0" * 15, "INT64 of shape [2] takes 16 bytes, got 15"),
        ("INT65", [1], b"", "no datatype 'INT65'"),
        ("FP32", [-1], b"", "negative"),
        ("FP32", [1] * 9, b"", "9 dimensions"),
        ("BYTES", [1], b"\5\0\0\0ab", "text 0 at byte 0 would end at 9, the tensor at 6"),
        ("BYTES", [1 << 60], b"\0", "the most of one input are"),
        ("BYTES", [1 << 10], b"\0", "take at least"),
        ("BYTES", [1], b"\0\0\0\0\0", "1 bytes are left after its 1 texts"),
    ],
)
def test_raw_tensors_that_do_not_fit_are_refused(datatype, shape, data, says):
    with pytest.raises(RequestError, match="input 'x'") as caught:
        raw_tensor("x", datatype, shape, data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT64", [1.5]),
        ("INT64", [True]),
        ("INT64", [1 << 64]),
        ("INT8", [128]),
        ("UINT8", [-1]),
        ("BOOL", [1]),
        ("FP32", ["1"]),
        ("FP32", [{}]),
        ("BYTES", [1]),
        ("BYTES", ["\ud800"]),
        ("FP32", []),
        ("FP32", [1, 2]),
    ],
)
def test_values_of_another_type_or_number_are_refused(datatype, values):
    with pytest.raises(RequestError, match="input 'x'"):
        listed_tensor("x", datatype, [1], values)


def test_columns_are_what_a_model_takes():
    columns = columns_of(
        [
            listed_tensor("user", "BYTES", [2, 1], ["a", "b"]),
            listed_tensor("item", "INT32", [2], [1, 2]),
            listed_tensor("price", "FP64", [2], [0.5, 1]),
            listed_tensor("tags", "BYTES", [2, 2], ["a", "b", "c", "d"]),
        ],
        SIGNATURE,
    )
    assert columns.rows == 2
    assert columns.values["user"] == [b"a", b"b"]
    assert columns.values["item"].dtype == np.int64
    assert columns.values["price"].dtype == np.float32
    assert columns.values["tags"] == [[b"a", b"b"], [b"c", b"d"]]


def test_lists_of_any_length_are_items_and_where_rows_begin():
    columns = columns_of(
        [
            listed_tensor("tags", "BYTES", [3], ["a", "b", "c"]),
            listed_tensor("tags.row_splits", "INT64", [3], [0, 0, 3]),
        ],
        SIGNATURE,
    )
    assert columns.rows == 2
    assert columns.values["tags"] == [b"a", b"b", b"c"]
    assert columns.values["tags.row_splits"].tolist() == [0, 0, 3]


def test_a_row_without_a_value_is_an_empty_cell():
    columns = columns_of(
        [
            listed_tensor("user", "BYTES", [3], ["a", None, "b"]),
            listed_tensor("item", "INT64", [3], [None, 7, None]),
            listed_tensor("price", "FP32", [3], [None] * 3),
        ],
        SIGNATURE,
    )
    assert columns.rows == 3
    assert (columns.values["user"], columns.values["user.row_splits"].tolist()) == (
        [b"a", b"b"],
        [0, 1, 1, 2],
    )
    assert columns.values["item"].tolist() == [7]
    assert columns.values["item.row_splits"].tolist() == [0, 0, 1, 1]
    assert columns.values["price.row_splits"].tolist() == [0] * 4
    assert columns.layout == (("item", -1), ("price", -1), ("user", -1))


def test_a_value_that_is_missing_in_a_row_is_left_out_or_nan_among_numbers():
    texts = listed_tensor("x", "BYTES", [2, 2], ["a", None, None, None])
    assert texts.values == [b"a"]
    assert texts.row_ends.tolist() == [0, 1, 1]
    numbers = listed_tensor("x", "FP32", [1, 2], [None, 1.0])
    assert numbers.row_ends is None
    assert np.isnan(numbers.values).tolist() == [True, False]


def test_items_and_where_rows_begin_cannot_be_missing():
    items = listed_tensor("tags", "BYTES", [2], ["a", None])
    with pytest.raises(RequestError, match=r"no item can be null with 'tags\.row_splits'"):
        columns_of([items, listed_tensor("tags.row_splits", "INT64", [2], [0, 2])], SIGNATURE)
    items = listed_tensor("tags", "BYTES", [1], ["a"])
    with pytest.raises(RequestError, match="row_splits"):
        columns_of([items, listed_tensor("tags.row_splits", "INT64", [3], [0, None, 1])], SIGNATURE)


@pytest.mark.parametrize("splits", [[], [1, 3], [0, 2], [0, 3, 2, 3], [0, 4]])
def test_rows_that_begin_nowhere_are_refused(splits):
    items = listed_tensor("tags", "BYTES", [3], ["a", "b", "c"])
    with pytest.raises(RequestError, match="row_splits"):
        columns_of([items, listed_tensor("tags.row_splits", "INT64", [len(splits)], splits)], SIGNATURE)


@pytest.mark.parametrize("datatype", ["INT64", "UINT64"])
def test_unsigned_ids_keep_their_bits_as_in_training(datatype):
    tensors = [("user", "BYTES", [2], ["a", "b"]), ("item", datatype, [2], [7, (1 << 64) - 5])]
    found = columns_of([listed_tensor(*one) for one in tensors], SIGNATURE)
    assert found.values["item"].tolist() == [7, -5]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([], "no inputs"),
        ([("usr", "BYTES", [1], ["a"])], "no input 'usr'"),
        ([("user", "BYTES", [1], ["a"]), ("user", "BYTES", [1], ["a"])], "twice"),
        ([("user", "BYTES", [3], ["a", "b", "c"]), ("item", "INT64", [2], [1, 2])], "'item' has 2 rows"),
        ([("user", "INT64", [1], [1])], "'user' must be BYTES, got INT64"),
        ([("item", "BYTES", [1], ["a"])], "'item' must be INT64, got BYTES"),
        ([("item", "FP32", [1], [1.0])], "whole number, got FP32"),
        ([("user", "BYTES", [], ["a"])], "must have the shape"),
        ([("item", "INT64", [1, 1, 1], [1])], "must have the shape"),
    ],
)
def test_tensors_that_the_model_does_not_take_are_refused(tensors, says):
    with pytest.raises(RequestError) as caught:
        columns_of([listed_tensor(*one) for one in tensors], SIGNATURE)
    assert says in str(caught.value)


def test_a_width_that_the_model_names_must_be_met():
    signature = LinearSignature(inputs=(Spec("x", "FP32", (-1, 2)),))
    with pytest.raises(RequestError, match="2 values in each row"):
        columns_of([listed_tensor("x", "FP32", [1, 3], [1, 2, 3])], signature)


def test_rows_of_several_requests_follow_each_other():
    parts = [
        columns_of(
            [
                listed_tensor("user", "BYTES", [rows], ["u"] * rows),
                listed_tensor("item", "INT64", [rows], range(rows)),
                listed_tensor("tags", "BYTES", [2 * rows], ["t"] * 2 * rows),
                listed_tensor("tags.row_splits", "INT64", [rows + 1], range(0, 2 * rows + 1, 2)),
            ],
            SIGNATURE,
        )
        for rows in (1, 2)
    ]
    whole = merged(parts)
    assert whole["user"] == [b"u"] * 3
    assert whole["item"].tolist() == [0, 0, 1]
    assert whole["tags.row_splits"].tolist() == [0, 2, 4, 6]
    assert len(whole["tags"]) == 6


def test_outputs_have_the_datatype_of_their_values():
    assert output_tensor("p", np.zeros((2, 3), np.float32)).shape == (2, 3)
    assert output_tensor("p", np.zeros(1, np.int64)).datatype == "INT64"
