"""Sharding a batch of features: which ids go to which shard, and where each comes back from.

The embeddings of a sharded lookup come back as one block per (table, shard). For every
id of the batch a pointer says in which block its embedding is, and where in it, so
that the layouts can be filled without sorting anything back. The encodings are those
of upstream's `sharding_sparse_fids`:

    version  first index                                     second index
    1        table * shards + shard                          row in the block
    2        a block for each table, shard and feature       row in the feature's block
    3, 4     as 1                                            float in the block

Version 4 differs from 3 only in how the blocks are laid end to end: shard after shard
instead of table after table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from monolith.errors import FeatureError
from monolith.feature.batches import FeatureIds
from monolith_compat.sharding import shard_of_ids
from monolith_compat.uniqueness import unique_in_order

SHARED_BIT = 1 << 31


@dataclass(frozen=True, slots=True)
class ShardedFeature:
    """Whose rows a feature reads, and how wide they are."""

    table: str
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardedFids:
    """A batch, cut up. Tables and features are numbered in the order of their names."""

    fids: list[Tensor]
    """One int64 vector per (table, shard), table after table: each feature's ids in turn."""
    row_splits: list[Tensor]
    """One int64 vector per (table, shard): where each feature's ids begin in it, then their number."""
    pointers: Tensor
    """int64 of shape (ids, 2), feature after feature, row after row: see the module."""
    cell_offsets: Tensor
    """int64: where each (feature, row) begins among the pointers, then their number."""
    feature_offsets: Tensor
    """int64 of shape (features + 1,): each feature's first cell, with `SHARED_BIT` where there is one cell
    for all rows; then the number of cells plus one."""
    batch_size: int


def shard_features(
    batch: FeatureIds,
    features: Mapping[str, ShardedFeature],
    num_shards: int,
    *,
    unique: bool = True,
    version: int = 3,
) -> ShardedFids:
    """Cut a batch up by table and shard.

    Args:
        features: By name. One that the batch does not have counts as shared, without ids.
        unique: Whether an id of a feature is sent once however often it stands there.
        version: Of the pointers, 1 to 4.
    """
    if version not in (1, 2, 3, 4):
        raise FeatureError(f"pointers are of version 1 to 4, got {version!r}")
    names = sorted(features)
    tables = sorted({feature.table for feature in features.values()})
    members = {table: [name for name in names if features[name].table == table] for table in tables}
    blocks: dict[tuple[int, int], list[Tensor]] = {
        (t, s): [] for t in range(len(tables)) for s in range(num_shards)
    }
    pointers: dict[str, Tensor] = {}
    for t, table in enumerate(tables):
        before = torch.zeros(num_shards, dtype=torch.int64)  # rows, or floats, of earlier features by shard
        for name in members[table]:
            ids = batch[name].flat_values if name in batch.names else torch.empty(0, dtype=torch.int64)
            sent, place = ids, torch.arange(len(ids))
            if unique:
                found = unique_in_order(ids)
                sent, place = ids[found.first], found.inverse
            shards = shard_of_ids(sent, num_shards)
            order = torch.argsort(shards, stable=True)
            counts = torch.bincount(shards, minlength=num_shards)
            row = torch.empty_like(order)
            row[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[shards[order]]
            for s, part in enumerate(torch.split(sent[order], counts.tolist())):
                blocks[t, s].append(part)
            width = features[name].dim if version >= 3 else 1
            if version == 2:
                # The tables' blocks follow one another; a table's are one per shard and feature.
                base = sum(len(members[earlier]) for earlier in tables[:t]) * num_shards
                first = base + shards * len(members[table]) + members[table].index(name)
                second = row
            else:
                first = t * num_shards + shards
                second = before[shards] + row * width
                before = before + counts * width
            pointers[name] = torch.stack([first, second], dim=1)[place]
    cells, firsts = _cells(batch, names)
    return ShardedFids(
        fids=[torch.cat(parts) for parts in blocks.values()],
        row_splits=[_splits(parts) for parts in blocks.values()],
        pointers=torch.cat([pointers[name] for name in names])
        if names
        else torch.empty(0, 2, dtype=torch.int64),
        cell_offsets=cells,
        feature_offsets=firsts,
        batch_size=batch.batch_size,
    )


def _cells(batch: FeatureIds, names: list[str]) -> tuple[Tensor, Tensor]:
    lengths, firsts, cells = [torch.zeros(1, dtype=torch.int64)], [], 0
    for name in names:
        if name in batch.names:
            shared = batch.shared[batch.names.index(name)]
            lengths.append(batch[name].row_lengths())
        else:
            shared = True
            lengths.append(torch.zeros(1, dtype=torch.int64))
        firsts.append(cells | (SHARED_BIT if shared else 0))
        cells += len(lengths[-1])
    return torch.cat(lengths).cumsum(0), torch.tensor([*firsts, cells + 1])


def _splits(parts: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, parts)]).cumsum(0)
