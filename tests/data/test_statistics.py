"""Statistics: what columns hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from monolith.data import Records
from monolith.data.formats.memory import to_records
from monolith.data.statistics import EXACT, Distinct, Statistics
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor


def records() -> Records:
    return Records(
        3,
        {
            "item": RaggedTensor.from_list([[7, 8], [], [7]], dtype=torch.int64),
            "price": RaggedTensor.from_list([[1.5], [-2.5], []]),
            "word": RaggedTensor.from_list(
                [[[65, 66]], [[67]], [[65, 66]]], dtype=torch.uint8, ragged_rank=2
            ),
            "user": RaggedTensor.from_list([[1]], dtype=torch.int64),
        },
        shared=frozenset({"user"}),
    )


def test_columns_are_counted() -> None:
    statistics = Statistics()
    statistics.add(records())
    found = {
        name: (column.kind, column.filled, column.values, column.most, len(column.distinct))
        for name, column in statistics.columns.items()
    }
    assert found == {
        "item": ("ids", 2, 3, 2, 2),
        "price": ("floats", 2, 2, 1, 2),
        "word": ("strings", 3, 3, 1, 2),
        "user": ("ids", 3, 3, 1, 1),  # one row stands for all
    }
    price, word = statistics.columns["price"].span, statistics.columns["word"].span
    assert (price.low, price.mean, price.high) == (-2.5, -0.5, 1.5)
    assert (word.low, word.high) == (1, 2)
    assert statistics.columns["word"].unit == "bytes"  # lengths
    assert (statistics.columns["item"].span.mean, statistics.columns["item"].unit) == (22 / 3, None)


def test_what_is_missing_is_none_of_the_values() -> None:
    nan = float("nan")
    statistics = Statistics()
    statistics.add(to_records({"x": np.array([1.0, nan, 3.0, nan]), "text": ["a", "", None, "b"]}))
    x, text = statistics.columns["x"], statistics.columns["text"]
    assert (x.filled, x.values, x.span.low, x.span.mean, x.span.high) == (2, 2, 1.0, 2.0, 3.0)
    assert (text.filled, text.values, len(text.distinct)) == (2, 2, 2)
    shown = statistics.to_json()["columns"]["x"]  # type: ignore[index]
    assert (shown["fill"], shown["missing"], shown["mean"]) == (0.5, 0.5, 2.0)


def test_times_are_told_from_texts_and_numbers() -> None:
    at = 1_714_557_600
    statistics = Statistics()
    texts = ["2024-05-01T10:00:00", "", "2024-05-01 12:02+02:00"]
    columns = {"iso": texts, "stamp": [at, None, at + 120], "number": [at, None, at], "word": ["x", "", "y"]}
    statistics.add(to_records(columns), times=["stamp"])
    assert {name: one.kind for name, one in statistics.columns.items()} == {
        "iso": "times",
        "stamp": "times",
        "number": "ids",
        "word": "strings",
    }
    for name in ("iso", "stamp"):
        span = statistics.columns[name].span
        assert (span.low, span.mean, span.high) == (at, at + 60, at + 120)
    assert statistics.to_json()["columns"]["iso"]["unit"] == "Unix seconds"  # type: ignore[index]
    statistics.add(to_records({"iso": ["soon"]}))  # so they were texts
    assert (statistics.columns["iso"].kind, statistics.columns["iso"].span.low) == ("strings", 4)


def test_distinct_values_are_counted_exactly_until_they_are_too_many() -> None:
    distinct = Distinct()
    for part in range(4):
        distinct.add(mix(np.arange(part * 10_000, 20_000 + part * 10_000)))
    assert (len(distinct), distinct.is_exact) == (50_000, True)
    distinct.add(mix(np.arange(EXACT + 1)))
    assert not distinct.is_exact
    assert len(distinct) == pytest.approx(EXACT + 1, rel=0.03)
    exact = Distinct()
    exact.add(mix(np.arange(3)))
    exact.merge(distinct)
    assert not exact.is_exact


def test_more_records_add_up_and_columns_may_come_later() -> None:
    statistics = Statistics()
    statistics.add(records().select(["item"]))
    statistics.add(records())
    assert (statistics.records, statistics.columns["item"].values, statistics.columns["price"].values) == (
        6,
        6,
        2,
    )
    shown = statistics.to_json()
    json.dumps(shown)
    assert shown["columns"]["price"]["fill"] == pytest.approx(2 / 6)  # type: ignore[index]


def test_a_column_of_several_kinds_is_said_to_be_mixed() -> None:
    statistics = Statistics()
    for values in (torch.tensor([1]), torch.tensor([1.5])):
        statistics.add(Records(1, {"a": RaggedTensor(values, torch.tensor([0, 1]))}))
    assert statistics.columns["a"].kind == "mixed"


def test_no_records_are_no_trouble() -> None:
    statistics = Statistics()
    statistics.add(records().slice(0, 0))
    assert statistics.to_json()["records"] == 0
    json.dumps(statistics.to_json())


@pytest.mark.parametrize("many", [0, 1, 100, 5000, 60_000, 1_000_000])
def test_distinct_values_are_estimated_within_three_percent(many: int) -> None:
    distinct = Distinct()
    hashes = mix(np.arange(many))
    distinct.add(hashes)
    distinct.add(hashes[: many // 2])  # again
    assert len(distinct) == pytest.approx(many, rel=0.03)


def test_sketches_of_different_files_can_be_merged() -> None:
    one, other = Distinct(), Distinct()
    one.add(mix(np.arange(3000)))
    other.add(mix(np.arange(2000, 6000)))
    one.merge(other)
    assert len(one) == pytest.approx(6000, rel=0.03)
