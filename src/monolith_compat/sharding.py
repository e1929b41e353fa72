"""Sharding: which part of a batch goes to which shard, and in which order.

Every shard holds its share of the rows of a table. A batch of ids is cut into one part
per shard, duplicates left out, and what comes back is put together again; gradients
take the same way in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_count, check_dims, check_indices, check_range, check_rows
from monolith.tensors.ragged import RaggedTensor
from monolith_compat.uniqueness import unique_in_order


def shard_of_ids(ids: Tensor, num_shards: int, rank0_empty: bool = False) -> Tensor:
    """Return the shard of every id: the id as an unsigned number, modulo `num_shards`.

    Args:
        ids: int64 of any shape. Negative ids stand for numbers from 2^63 up.
        num_shards: At least 1.
        rank0_empty: Whether to leave shard 0 without ids when there are more than 4
            shards, since rank 0 has other work in synchronous training.
    """
    check_count(num_shards, "num_shards")
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64:
        raise TensorArgumentError(f"ids must be int64, got {getattr(ids, 'dtype', ids)!r}")
    if rank0_empty and num_shards > 4:
        return shard_of_ids(ids, num_shards - 1) + 1
    # remainder() takes the sign of the divisor, so what a negative id lacks is 2^64.
    lacking = (ids < 0).to(torch.int64) * (2**64 % num_shards)
    return (ids.remainder(num_shards) + lacking).remainder(num_shards)


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    """Return `num_splits` parts: `tensor[i]` goes to part `indices[i]`, and keeps its order there.

    Gradients of the parts flow back to where each came from.
    """
    check_rows(tensor, len(indices), "tensor")
    order, sizes = _grouped(indices, num_splits, "indices")
    return list(torch.split(tensor.index_select(0, order), sizes.tolist()))


def ragged_split_by_indices(
    indices: Tensor, ragged: RaggedTensor, num_splits: int
) -> tuple[list[RaggedTensor], list[RaggedTensor]]:
    """Return `num_splits` ragged parts, each with all rows, and where their values stood.

    Args:
        indices: int64 of shape (n,): the part each flat value of `ragged` goes to.
        ragged: Of ragged rank 1, with n values.
        num_splits: At least 1.

    Returns:
        The parts, and in the same rows the positions of their values among the flat
        values of `ragged`.
    """
    if not isinstance(ragged, RaggedTensor) or ragged.ragged_rank != 1:
        raise TensorArgumentError(f"ragged must be a RaggedTensor of ragged rank 1, got {ragged!r}")
    check_rows(ragged.flat_values, len(indices), "the values of ragged")
    order, sizes = _grouped(indices, num_splits, "indices")
    cells = indices * ragged.nrows + ragged.value_rowids
    lengths = torch.bincount(cells, minlength=num_splits * ragged.nrows).reshape(num_splits, ragged.nrows)
    row_splits = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    counts = sizes.tolist()
    values = torch.split(ragged.flat_values.index_select(0, order), counts)
    positions = torch.split(order, counts)
    return (
        [RaggedTensor(part, splits, validate=False) for part, splits in zip(values, row_splits, strict=True)],
        [
            RaggedTensor(part, splits, validate=False)
            for part, splits in zip(positions, row_splits, strict=True)
        ],
    )


def reorder_by_indices(ids: Tensor, shard_ids: Tensor, num_of_shards: int) -> tuple[Tensor, Tensor]:
    """Return each distinct id once, grouped by shard, and the int64 number of ids per shard.

    Inside a shard ids stand in the order they are first seen. An id that names two
    shards goes to the one it names first.
    """
    check_rows(shard_ids, len(ids), "shard_ids")
    first = unique_in_order(ids).first
    order, sizes = _grouped(shard_ids[first], num_of_shards, "shard_ids")
    return ids[first[order]], sizes


class FusedReorder(NamedTuple):
    """The distinct ids of several inputs, ready to be sent to their shards."""

    output: Tensor
    """int64: ids by shard, then by input, then in the order first seen."""
    shard_sizes: Tensor
    """int64 of shape (shards,): how many ids each shard gets."""
    sharded_slot_sizes: Tensor
    """int64 of shape (shards * inputs,): how many of each input, by shard, then by input."""
    input_lengths: Tensor
    """int64 of shape (inputs,), on the CPU: how many ids each input has, repeats counted."""
    embedding_offsets: list[Tensor]
    """Per input, int64: where the embedding of each id begins, if they come in the order of `output`."""


def fused_reorder_by_indices(
    inputs: Sequence[Tensor], num_of_shards: int, dim_sizes: Sequence[int], rank0_empty: bool = False
) -> FusedReorder:
    """Leave out repeated ids and order the rest by shard, for many inputs at once.

    Args:
        inputs: int64 ids of shape (n,) each. Equal ids of different inputs stay apart.
        num_of_shards: At least 1.
        dim_sizes: Floats per embedding, for each input.
        rank0_empty: See `shard_of_ids`.
    """
    check_dims(dim_sizes, len(inputs), "dim_sizes")
    check_count(num_of_shards, "num_of_shards")
    if not inputs:
        raise TensorArgumentError("fused_reorder_by_indices needs at least one input")
    for ids in inputs:
        check_indices(ids, "each input")
    device, width = inputs[0].device, len(inputs)
    lengths = [len(ids) for ids in inputs]
    ids = torch.cat(list(inputs))
    input_lengths = torch.tensor(lengths, dtype=torch.int64)
    slots = torch.repeat_interleave(
        torch.arange(width, device=device), input_lengths.to(device), output_size=len(ids)
    )
    first, inverse = unique_in_order(ids, slots)
    cells = shard_of_ids(ids[first], num_of_shards, rank0_empty) * width + slots[first]
    order = torch.argsort(cells, stable=True)
    sizes = torch.bincount(cells, minlength=num_of_shards * width)
    dims = torch.tensor(dim_sizes, dtype=torch.int64, device=device)[slots[first[order]]]
    offsets = torch.empty_like(dims)
    offsets[order] = dims.cumsum(0) - dims
    return FusedReorder(
        output=ids[first[order]],
        shard_sizes=sizes.reshape(num_of_shards, width).sum(1),
        sharded_slot_sizes=sizes,
        input_lengths=input_lengths,
        embedding_offsets=list(torch.split(offsets[inverse], lengths)),
    )


def _grouped(parts: Tensor, num_parts: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the positions sorted by part, their order inside a part kept, and the size of each part."""
    check_indices(parts, name)
    check_count(num_parts, "the number of parts")
    check_range(parts, num_parts, name)
    return torch.argsort(parts, stable=True), torch.bincount(parts, minlength=num_parts)
