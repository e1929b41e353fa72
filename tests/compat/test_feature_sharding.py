"""Sharding a batch: where the ids go, and where their embeddings come back from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.errors import FeatureError
from monolith.feature import FeatureIds
from monolith.tensors import RaggedTensor
from monolith_compat.feature_sharding import SHARED_BIT, ShardedFeature, ShardedFids, shard_features

FEATURES = {
    "a": ShardedFeature("t", 3),
    "b": ShardedFeature("t", 3),
    "c": ShardedFeature("s", 2),
}


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_list(list(rows), dtype=torch.int64, ragged_rank=1)


def followed(found: ShardedFids, version: int, shards: int) -> list[int]:
    """Follow every pointer to an id, over blocks in which id i's embedding is i repeated."""
    tables = ["s", "t"]
    ids = []
    for first, second in found.pointers.tolist():
        if version == 2:
            members = {"s": 1, "t": 2}
            at, block = 0, None
            for t, table in enumerate(tables):
                for shard in range(shards):
                    for feature in range(members[table]):
                        if at == first:
                            block = (t * shards + shard, feature)
                        at += 1
            assert block is not None
            begin = int(found.row_splits[block[0]][block[1]])
            ids.append(int(found.fids[block[0]][begin + second]))
        else:
            dim = 2 if first < shards else 3
            row = second if version == 1 else second // dim
            assert version == 1 or second % dim == 0
            ids.append(int(found.fids[first][row]))
    return ids


@settings(max_examples=tries(20), deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-9, 9), max_size=3), min_size=3, max_size=3),
    version=st.sampled_from([1, 2, 3, 4]),
    shards=st.integers(1, 3),
    unique=st.booleans(),
)
def test_every_pointer_leads_to_its_id(
    rows: list[list[int]], version: int, shards: int, unique: bool
) -> None:
    batch = FeatureIds.pack({"c": ragged(*rows), "a": ragged(*rows[::-1]), "b": ragged([1], [2], [1])})
    found = shard_features(batch, FEATURES, shards, unique=unique, version=version)
    wanted = [i for name in ("a", "b", "c") for i in batch[name].flat_values.tolist()]
    assert followed(found, version, shards) == wanted
    for number, fids in enumerate(found.fids):
        assert all(fid % (1 << 64) % shards == number % shards for fid in fids.tolist())


def test_a_shared_or_absent_feature_has_one_marked_cell() -> None:
    batch = FeatureIds.pack({"b": ragged([5, 6]), "c": ragged([1], [2])}, shared=["b"])
    found = shard_features(batch, FEATURES, 2)
    assert found.feature_offsets.tolist() == [SHARED_BIT, 1 | SHARED_BIT, 2, 5]
    assert found.cell_offsets.tolist() == [0, 0, 2, 3, 4]
    assert found.batch_size == 2


def test_repeats_are_removed_within_a_feature_only() -> None:
    batch = FeatureIds.pack({"a": ragged([4, 4]), "b": ragged([4])})
    assert shard_features(batch, FEATURES, 1).fids[1].tolist() == [4, 4]
    assert shard_features(batch, FEATURES, 1, unique=False).fids[1].tolist() == [4, 4, 4]


def test_there_are_four_versions() -> None:
    with pytest.raises(FeatureError, match="version 1 to 4, got 5"):
        shard_features(FeatureIds.pack({"a": ragged([1])}), FEATURES, 1, version=5)
