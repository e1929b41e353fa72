"""The pass over all candidates, and how well they are found."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, FeatureIds
from monolith.tensors import RaggedTensor
from monolith.train import Candidates


class Lookup(nn.Module):
    """Towers that say what they are told."""

    item_id = "item"

    def users(self, batch: Batch) -> Tensor:
        return batch.floats["vector"]

    def items(self, batch: Batch) -> Tensor:
        return batch.floats["vector"]


def items(ids: list[int], *vectors: list[float]) -> Batch:
    return Batch(FeatureIds.pack({"item": torch.tensor(ids)}), {"vector": torch.tensor(vectors)})


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


THREE = Candidates(torch.tensor([5, 7, 9]), torch.tensor([[3.0], [2.0], [1.0]]))


def test_all_items_are_embedded_and_found_by_their_ids() -> None:
    done: list[int] = []
    found = Candidates.of(Lookup(), [items([9, 5], [1.0], [3.0]), items([7], [2.0])], done.append)
    assert found.ids.tolist() == [5, 7, 9]
    assert found.vectors.tolist() == [[3.0], [2.0], [1.0]]
    assert done == [2, 1]


def test_of_an_item_that_comes_twice_the_last_counts_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = Candidates.of(Lookup(), [items([9, 5], [1.0], [3.0]), items([9], [8.0])])
    assert (found.ids.tolist(), found.vectors.tolist()) == ([5, 9], [[3.0], [8.0]])
    assert "1 of 3 items come twice" in caplog.text


def test_what_was_wanted_is_ranked_among_all() -> None:
    found = THREE.ranked(torch.tensor([[1.0], [-1.0]]), ragged([7], [7, 9]), (1, 2))
    assert found["recall@1"].tolist() == [0.0, 0.5]
    assert found["hit_rate@2"].tolist() == [1.0, 1.0]
    assert found["mrr"].tolist() == [0.5, 1.0]


def test_what_is_barred_is_not_offered_unless_it_is_wanted() -> None:
    found = THREE.ranked(torch.tensor([[1.0], [1.0]]), ragged([7], [5]), (1,), ragged([5, 100], [5]))
    assert found["mrr"].tolist() == [1.0, 1.0]


def test_what_is_no_candidate_counts_as_not_found() -> None:
    found = THREE.ranked(torch.tensor([[1.0], [1.0]]), ragged([100], [5, 100]), (1,))
    assert found["recall@1"].tolist() == [0.0, 0.5]
    assert found["mrr"].tolist() == [0.25, 1.0]


def test_a_query_that_wanted_nothing_has_nothing_to_say() -> None:
    assert math.isnan(THREE.ranked(torch.tensor([[1.0]]), ragged([]), (1,))["recall@1"].item())


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="there are no items"):
        Candidates.of(Lookup(), [])
    several = Batch(FeatureIds.pack({"item": torch.tensor([[1, 2]])}), {"vector": torch.zeros(1, 1)})
    with pytest.raises(DataError, match="one id in feature 'item'"):
        Candidates.of(Lookup(), [several])
    with pytest.raises(ConfigError, match="Linear has no towers"):
        Candidates.of(nn.Linear(1, 1), [])
