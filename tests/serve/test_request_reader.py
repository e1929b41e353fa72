"""Raw columns become batches: plain ones at once, all others one by one, and both come to the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monolith.data import MemorySource
from monolith.errors import RequestError
from monolith.feature import (
    Batch,
    BucketFeature,
    FeatureSpec,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
)
from monolith.serve.request_reader import RequestReader

SPEC = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "tags": IdFeature(kind="string", separator="|"),
        "item": IdFeature(),
        "age": BucketFeature(boundaries=(18.0, 30.0)),
        "price": FloatFeature(scale="log"),
    },
    labels={"click": Label()},
    event_time="time",
)
RAW: dict[str, Any] = {
    "user": ["ann", "bob", ""],
    "tags": ["a|b", "", "c"],
    "item": [7, -1, 1 << 40],
    "age": [17.0, 18.0, 99.5],
    "price": [1.5, 0.0, -3.0],
}


class NotAtOnce(RequestReader):
    """Goes column by column."""

    def _packed(self, columns: Any) -> None:  # noqa: ARG002
        return None


class AtOnce(RequestReader):
    """Refuses to go column by column."""

    def _columns(self, columns: Any) -> Any:  # noqa: ARG002
        raise AssertionError("not at once")


def same(one: Batch, other: Batch) -> bool:
    return (
        len(one) == len(other)
        and one.ids.names == other.ids.names
        and torch.equal(one.ids.ids, other.ids.ids)
        and torch.equal(one.ids.splits, other.ids.splits)
        and one.ids.shared == other.ids.shared
        and one.floats.keys() == other.floats.keys()
        and all(torch.equal(one.floats[name], other.floats[name]) for name in one.floats)
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"user": [b"ann", b"bob", b""], "item": (7, -1, 1 << 40)},
        {"item": np.array([7, -1, 1 << 40]), "age": np.array([17.0, 18.0, 99.5], dtype=np.float32)},
        {"age": [17, 18, 99], "price": np.array([1, 0, -3])},
        {"click": [1.0, 0.0, 1.0], "time": [1, 2, 3]},
    ],
)
def test_plain_columns_are_read_at_once_and_as_records_are(change):
    raw = {**RAW, **change}
    found = AtOnce(SPEC).batch(raw)
    assert same(found, NotAtOnce(SPEC).batch(raw))
    records = next(iter(MemorySource({name: raw[name] for name in RAW}, batch_size=3)))
    assert same(found, SPEC.only(SPEC.features).make(records))


@pytest.mark.parametrize(
    "change",
    [
        {"user": ["änn", "b", "c"]},
        {"item": [[7], [], [1, 2]]},
        {"item": [7, None, 3]},
        {"item": [7, 2, 1 << 63]},
        {"item": torch.tensor([7, 2, 3])},
        {"item": np.array([7, 2, 3], dtype=np.int32)},
        {"price": [1, 2.5, 3]},
        {"price": ["1", "2", "3"]},
        {"item": [7, 8], "item.row_splits": [0, 1, 1, 2]},
        {name: values[:0] for name, values in RAW.items()},
    ],
)
def test_what_is_not_plain_is_read_column_by_column(change):
    raw = {**RAW, **change}
    assert same(RequestReader(SPEC).batch(raw), NotAtOnce(SPEC).batch(raw))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"price": [1.0, float("inf"), 2.0]}, r"row 1 of 3: features\.price: column 'price' is \[inf\]"),
        ({"item": [1, 2]}, r"column 'item' has 2 rows, and 'user' has 3"),
        ({"item": None}, r"column 'item' must be a list"),
        ({"item": 7}, r"column 'item' must be a list.*got int"),
        ({"itm": [1, 2, 3]}, r"no column 'itm'; did you mean 'item'\?"),
        ({"user": [1, 2, 3]}, r"column 'user' has whole numbers"),
        ({"user": "ann"}, r"column 'user' must be a list.*got str"),
    ],
)
def test_what_is_wrong_is_named_whichever_way_it_is_read(change, said):
    for reader in (RequestReader(SPEC), NotAtOnce(SPEC)):
        with pytest.raises(RequestError, match=said):
            reader.batch({**RAW, **change})


def test_a_model_of_features_by_hand_is_asked_with_ids_by_feature():
    reader = RequestReader(None, ["user", "item"], {"price": 1, "where": 2})
    asked = {"user": [1, 2], "item": [[1, 2], []], "price": [1.5, 2.5], "where": [[1.0, 2.0], [3.0, 4.0]]}
    batch = reader.batch(asked)
    assert batch.ids["item"].to_list() == [[1, 2], []]
    assert batch.floats["where"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert [one.datatype for one in reader.inputs] == ["INT64", "INT64", "FP32", "FP32"]
    for change, said in [
        ({"user": ["a", "b"]}, "'user' must have IDs"),
        ({"price": ["a", "b"]}, "'price' must have numbers"),
        ({"where": [[1.0, 2.0], [3.0]]}, "'where': row 1 has 1 numbers instead of 2"),
        ({"price": [1.0, float("inf")]}, r"'price': row 1 is \[inf\]"),
    ]:
        with pytest.raises(RequestError, match=said):
            reader.batch({**asked, **change})


HISTORY = FeatureSpec(
    features={
        "item": IdFeature(kind="string"),
        "action": IdFeature(),
        "history": HistoryFeature(of="item", max=2, with_=("action", "time"), by="item", only="click"),
    },
    labels={"click": Label()},
    event_time="time",
)


def test_a_history_is_asked_for_as_lists_of_the_types_that_training_reads():
    found = {one.name: one for one in RequestReader(HISTORY).inputs}
    lists = [found[name] for name in ("history", "history.action", "history.time")]
    assert [(one.datatype, one.shape) for one in lists] == [
        ("BYTES", (-1, -1)),
        ("INT64", (-1, -1)),
        ("INT64", (-1, -1)),
    ]
    assert lists[2].meaning == "time"
    assert found["time"].optional


def test_a_history_comes_as_nested_lists_or_as_values_with_row_splits():
    reader = RequestReader(HISTORY.only(["history"]))
    nested = {
        "history": [["a", "b", "c"], [], ["d"]],
        "history.action": [[1, 2, 3], [], [4]],
        "history.time": [["1700000000", "2024-05-01T10:00:00Z", "1714557601000"], [], ["5"]],
    }
    batch = reader.batch(nested)
    assert batch.ids["history.action"].to_list() == [[2, 3], [], [4]]
    assert batch.ids["history.time"].to_list() == [[1_714_557_600, 1_714_557_601], [], [5]]
    splits = np.array([0, 3, 3, 4])
    flat: dict[str, Any] = {
        "history": ["a", "b", "c", "d"],
        "history.action": np.array([1, 2, 3, 4]),
        "history.time": np.array([1_700_000_000, 1_714_557_600, 1_714_557_601, 5]),
    }
    assert same(batch, reader.batch({**flat, **{f"{name}.row_splits": splits for name in flat}}))


def test_a_history_without_the_time_at_which_it_is_asked_for_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = RequestReader(HISTORY.only(["history"]))
    asked = {"history": [["a"]], "history.action": [[1]], "history.time": [[5]]}
    reader.batch({**asked, "time": [9]})
    assert not caplog.text
    for _ in range(2):
        reader.batch(asked)
    assert caplog.text.count("requests lack the event time 'time'") == 1


def test_lists_of_a_history_that_differ_in_length_are_refused_by_name():
    reader = RequestReader(HISTORY.only(["history"]))
    columns = {"history": [["a"], ["b"]], "history.action": [[1], []], "history.time": [[5], [6]]}
    with pytest.raises(
        RequestError, match=r"row 1 of 2: .*'history' has 1 steps, and column 'history.action' 0"
    ):
        reader.batch(columns)
