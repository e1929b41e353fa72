"""Offset maps: where in one buffer of floats the embedding of each distinct key belongs.

All embeddings of a batch are laid out in one buffer, key by key, repeats included. A
shard answers each distinct key once; the offset map says to which places its floats are
copied, and from which places their gradient is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_dims, check_range, describe
from monolith.tensors.ragged import RaggedTensor, ranges
from monolith_compat.uniqueness import unique_in_order


class OffsetMap(NamedTuple):
    """The distinct keys of each row, and every place that wants their embedding."""

    unique_key: RaggedTensor
    """int64: per row, each key once, in the order first seen."""
    value_offset: RaggedTensor
    """int64 of ragged rank 2: per row and distinct key, the floats' offsets in the buffer."""
    buffer_size: int
    """Floats of the whole buffer."""


def unique_key_with_value_and_offset(key: RaggedTensor, dims: Sequence[int]) -> OffsetMap:
    """Find the distinct keys of each row and where their embeddings belong.

    Args:
        key: int64 of ragged rank 1. The buffer holds one embedding per key, in order.
        dims: Floats per embedding, for each row.
    """
    if not isinstance(key, RaggedTensor) or key.ragged_rank != 1:
        raise TensorArgumentError(f"key must be a RaggedTensor of ragged rank 1, got {key!r}")
    check_dims(dims, key.nrows)
    rows, keys = key.value_rowids, key.flat_values
    first, inverse = unique_in_order(keys, rows)
    widths = torch.tensor(dims, dtype=torch.int64, device=key.device)[rows]
    offsets = widths.cumsum(0) - widths
    uses = torch.bincount(inverse, minlength=len(first))
    places = RaggedTensor.from_row_lengths(offsets[torch.argsort(inverse, stable=True)], uses, validate=False)
    row_lengths = torch.bincount(rows[first], minlength=key.nrows)
    unique_key = RaggedTensor.from_row_lengths(keys[first], row_lengths, validate=False)
    return OffsetMap(unique_key, unique_key.with_values(places), int(widths.sum()))


def fill_with_offset_map(
    pos: RaggedTensor, value: Tensor, value_offset: RaggedTensor, value_buffer: Tensor, dims: Sequence[int]
) -> Tensor:
    """Copy embeddings to all their places in the buffer.

    Args:
        pos: int64 of ragged rank 1: which distinct key each embedding belongs to,
            numbered through all rows of `value_offset`. A key named twice gets one of
            the two, no telling which.
        value: Of shape (f,): the embeddings end to end, `dims[i]` floats for each `pos`
            of row i, no more and no less.
        value_offset: From `unique_key_with_value_and_offset`.
        value_buffer: Of shape (buffer_size,). Not written to.
        dims: Floats per embedding, for each row of `pos`.

    Returns:
        A buffer like `value_buffer` with the places filled. The gradient of `value` is
        the sum over all places it was copied to.
    """
    if not isinstance(pos, RaggedTensor) or pos.ragged_rank != 1 or pos.dtype is not torch.int64:
        raise TensorArgumentError(f"pos must be an int64 RaggedTensor of ragged rank 1, got {pos!r}")
    if not isinstance(value_offset, RaggedTensor) or not isinstance(value_offset.values, RaggedTensor):
        raise TensorArgumentError(
            f"value_offset must be a RaggedTensor of ragged rank 2, got {value_offset!r}"
        )
    check_dims(dims, pos.nrows)
    places, entries = value_offset.values, pos.flat_values
    check_range(entries, places.nrows, "pos")
    widths = torch.tensor(dims, dtype=torch.int64, device=pos.device)[pos.value_rowids]
    needed = int(widths.sum())
    if value.ndim != 1 or len(value) != needed or value_buffer.ndim != 1:
        raise TensorArgumentError(
            f"pos and dims ask for {needed} floats to put in a flat buffer, "
            f"got {describe(value)} and the buffer {describe(value_buffer)}"
        )
    uses = places.row_lengths()[entries]
    offsets = places.flat_values[ranges(places.row_splits[entries], uses)]
    # From here on one item per copy: an embedding and one of its places.
    copies = torch.repeat_interleave(widths, uses)
    sources = torch.repeat_interleave(widths.cumsum(0) - widths, uses)
    targets = ranges(offsets, copies)
    check_range(targets, len(value_buffer), "the places of value_offset")
    return value_buffer.index_copy(0, targets, value[ranges(sources, copies)])


def finalize_shared_tensor(buffers: Sequence[Tensor]) -> Tensor:
    """Return the one buffer that several shards filled, each starting from zeros, at places of their own.

    Gradients pass through to every one of them.
    """
    if not buffers or any(buffer.shape != buffers[0].shape for buffer in buffers):
        raise TensorArgumentError(
            f"buffers to join must be of one shape, got {[tuple(buffer.shape) for buffer in buffers]}"
        )
    return buffers[0] if len(buffers) == 1 else torch.stack(list(buffers)).sum(0)
