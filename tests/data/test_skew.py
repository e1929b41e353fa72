"""Skew: rows in which a served feature or score is not what training computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from monolith.data import Records
from monolith.data.served import SCORE, ServedRequest, served_records
from monolith.data.skew import SkewLog
from monolith.errors import DataError
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor


def batch_of(items: list[int], tags: list[list[int]], prices: list[float]) -> Batch:
    ids = FeatureIds.pack(
        {"item": torch.tensor(items), "tags": RaggedTensor.from_list(tags, dtype=torch.int64)}
    )
    return Batch(ids, floats={"price": torch.tensor(prices).unsqueeze(1)})


SERVED = batch_of([1, 2, 3], [[5, 6], [], [7]], [0.5, 1.5, 2.5])
REQUESTS = [
    ServedRequest(
        id=name, time=9, model="m", version="4", step=step, rows=rows, scores={"click": np.full(rows, 0.25)}
    )
    for name, rows, step in (("a", 2, 4), ("b", 1, 5))
]
KEYS = [b"a/0", b"a/1", b"b"]
SCORES = {"click": torch.full((3,), 0.25)}


@pytest.fixture
def log() -> SkewLog:
    return SkewLog(served_records(SERVED, REQUESTS))


def test_the_same_features_have_no_differences(log: SkewLog) -> None:
    log.compare(KEYS, SERVED, SCORES, step=4)
    found = {name: (one.kind, one.compared, one.different) for name, one in log.differences.items()}
    assert found == {
        "item": ("ids", 3, 0),
        "tags": ("ids", 3, 0),
        "price": ("floats", 3, 0),
        SCORE + "click": ("score", 2, 0),  # b was served by another step
    }
    assert (len(log), log.matched, log.unknown, log.other_steps) == (3, 3, 0, 1)


def test_each_feature_has_its_own_differences_with_an_example(log: SkewLog) -> None:
    other = batch_of([1, 9, 3], [[5, 6], [8], [9]], [0.5, 1.5, 2.75])
    log.compare(KEYS, other, SCORES, step=4)
    item, tags, price = (log.differences[name] for name in ("item", "tags", "price"))
    assert (item.different, item.example) == (1, ("a/1", [2], [9]))
    assert (tags.different, tags.example) == (2, ("a/1", [], [8]))
    assert (price.different, price.largest, price.example) == (1, 0.25, ("b/0", [2.5], [2.75]))


def test_the_order_of_ids_counts(log: SkewLog) -> None:
    log.compare(KEYS[:1], batch_of([1], [[6, 5]], [0.5]), {}, step=None)
    assert log.differences["tags"].different == 1


def test_the_last_bits_of_a_score_do_not_count_and_not_a_number_does(log: SkewLog) -> None:
    log.compare(KEYS, SERVED, {"click": torch.tensor([0.250001, torch.nan, 9.0])}, step=4)
    assert log.differences[SCORE + "click"].different == 1


def test_events_that_only_one_side_has_are_counted(log: SkewLog) -> None:
    log.compare([b"other", b"b/0"], batch_of([4, 3], [[], [7]], [1.0, 2.5]), {}, step=None)
    assert (log.matched, log.unknown) == (1, 1)
    assert not any(one.different for one in log.differences.values())


def test_a_feature_that_the_log_does_not_have_differs_wherever_it_has_a_value(log: SkewLog) -> None:
    ids = FeatureIds.pack({"new": RaggedTensor.from_list([[1], [], [2]], dtype=torch.int64)})
    log.compare(KEYS, replace(SERVED, ids=ids), {}, step=None)
    assert (log.differences["new"].compared, log.differences["new"].different) == (3, 2)


def test_records_without_keys_are_no_log() -> None:
    with pytest.raises(DataError, match="log-served"):
        SkewLog(Records(0, {}))
