"""Batches: the ids of many features in one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monolith.errors import FeatureError
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def test_features_are_laid_end_to_end_and_found_again() -> None:
    batch = FeatureIds.pack({"clicks": ragged([1, 2], [], [3]), "user": torch.tensor([7, 8, 9])})
    assert batch.ids.tolist() == [1, 2, 3, 7, 8, 9]
    assert batch.splits.tolist() == [0, 2, 2, 3, 4, 5, 6]
    assert (batch.names, len(batch)) == (("clicks", "user"), 3)
    assert batch["clicks"].to_list() == [[1, 2], [], [3]]
    assert batch["user"].to_list() == [[7], [8], [9]]


def test_a_tensor_of_two_dimensions_has_as_many_ids_in_each_example() -> None:
    assert FeatureIds.pack({"f": torch.tensor([[1, 2], [3, 4]])})["f"].to_list() == [[1, 2], [3, 4]]
    assert FeatureIds.pack({"f": torch.empty(2, 0, dtype=torch.int64)})["f"].to_list() == [[], []]


def test_a_shared_feature_has_one_row_for_all() -> None:
    batch = FeatureIds.pack({"user": ragged([7, 8]), "item": torch.tensor([1, 2, 3])}, shared=["user"])
    assert (batch.shared, batch.batch_size) == ((True, False), 3)
    assert batch["user"].to_list() == [[7, 8]]


def test_with_shared_features_only_the_number_of_examples_must_be_told() -> None:
    assert len(FeatureIds.pack({"user": ragged([7])}, shared=["user"], batch_size=5)) == 5
    with pytest.raises(FeatureError, match="give batch_size"):
        FeatureIds.pack({"user": ragged([7])}, shared=["user"])


def test_one_id_of_each_feature_in_each_example() -> None:
    batch = FeatureIds.one_each(["a", "b"], torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert batch["a"].to_list() == [[1], [3], [5]]
    assert batch["b"].to_list() == [[2], [4], [6]]


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ({"a": torch.tensor([1, 2]), "b": torch.tensor([1])}, {}, "'b' has 1 rows instead of 2"),
        ({"a": torch.tensor([1.0])}, {}, "'a' must hold int64 ids"),
        ({"a": RaggedTensor.from_list([[[1]]], dtype=torch.int64)}, {}, "'a' must hold int64 ids in rows"),
        ({"a": torch.tensor(1)}, {}, "one or two dimensions"),
        ({"a": torch.tensor([1])}, {"shared": ["b"]}, "not there: \\['b'\\]"),
    ],
)
def test_what_is_no_batch_is_refused(features: Any, options: Any, message: str) -> None:
    with pytest.raises(FeatureError, match=message):
        FeatureIds.pack(features, **options)


def test_columns_of_the_wrong_kind_are_refused() -> None:
    splits = torch.tensor([0, 1])
    with pytest.raises(FeatureError, match="ids must be int64"):
        FeatureIds(("a",), torch.tensor([1], dtype=torch.int32), splits, 1)
    with pytest.raises(FeatureError, match="2 entries for 1 features"):
        FeatureIds(("a",), torch.tensor([1]), splits, 1, shared=(True, False))
    with pytest.raises(FeatureError, match=r"shape \(examples, 2\)"):
        FeatureIds.one_each(["a", "b"], torch.tensor([[1, 2, 3]]))


def test_asking_for_an_unknown_feature_names_the_known_ones() -> None:
    with pytest.raises(FeatureError, match="no feature 'b'; it has a"):
        FeatureIds.pack({"a": torch.tensor([1])})["b"]


def test_a_batch_has_floats_and_labels_of_its_size() -> None:
    ids = FeatureIds.pack({"a": torch.tensor([1, 2])})
    batch = Batch(ids, floats={"age": torch.ones(2, 1)}, labels={"click": torch.tensor([0.0, 1.0])})
    assert batch.label.tolist() == [0, 1]
    assert len(batch) == 2
    with pytest.raises(FeatureError, match="label 'click' has 3 rows for 2 examples"):
        Batch(ids, labels={"click": torch.zeros(3)})
    with pytest.raises(FeatureError, match="2 labels"):
        _ = Batch(ids, labels={"click": torch.zeros(2), "buy": torch.zeros(2)}).label


def test_the_first_id_of_each_example_and_0_where_there_is_none():
    ragged = RaggedTensor.from_row_lengths(torch.tensor([4, 5, 6]), torch.tensor([2, 0, 1]))
    ids = FeatureIds.pack({"user": torch.tensor([9]), "item": ragged}, shared=["user"])
    assert ids.first("item").tolist() == [4, 0, 6]
    assert ids.first("user").tolist() == [9, 9, 9]
