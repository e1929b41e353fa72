"""Pooling: the embeddings of a row become one, whatever their number.

Rows are given by the row index of every value, as `RaggedTensor.value_rowids` has it;
they need not be sorted. A row without values pools to zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_count, check_indices, check_range, check_rows, describe
from monolith.tensors.ragged import RaggedTensor


def reduce_sum(indices: Tensor, values: Tensor, batch: int, *, validate: bool = True) -> Tensor:
    """Return the sum of the values of each row.

    Args:
        indices: int64 of shape (n,): the row of each value.
        values: Of shape (n, ...).
        batch: How many rows there are.
        validate: Whether to look into `indices`, which waits for a CUDA device.

    Returns:
        Shape (batch, ...), differentiable.
    """
    _check(indices, values, batch, validate)
    return values.new_zeros(batch, *values.shape[1:]).index_add(0, indices, values)


def reduce_mean(indices: Tensor, values: Tensor, batch: int, *, validate: bool = True) -> Tensor:
    """Return the mean of the values of each row; see `reduce_sum`."""
    sums = reduce_sum(indices, values, batch, validate=validate)
    counts = indices.new_zeros(batch).index_add(0, indices, torch.ones_like(indices)).clamp(min=1)
    return sums / counts.reshape(-1, *[1] * (values.ndim - 1)).to(values.dtype)


def reduce_sqrtn(indices: Tensor, values: Tensor, batch: int, *, validate: bool = True) -> Tensor:
    """Return the length of the values of each row, column by column: the root of the sum of their squares.

    Not a sum divided by the root of n, in spite of the name it has always had. The
    gradient is value / length, and 0 where the length is 0. See `reduce_sum`.
    """
    squares = reduce_sum(indices, values * values, batch, validate=validate)
    # The root of 0 has an infinite slope, so it is never taken.
    present = squares > 0
    return torch.where(present, torch.where(present, squares, 1).sqrt(), 0)


def fused_reduce_sum_and_split(
    indices: Tensor, values: Tensor, batch: int, split_dims: Sequence[int], *, validate: bool = True
) -> list[Tensor]:
    """Return `reduce_sum` of values of shape (n, dim), cut into columns of `split_dims`, which sum to dim."""
    return _columns(reduce_sum(indices, values, batch, validate=validate), split_dims)


def fused_sorted_segment_sum(
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    validate: bool = True,
) -> list[Tensor]:
    """Return a `reduce_sum` for each input, of the output shapes given."""
    if not len(indices) == len(values) == len(shapes):
        raise TensorArgumentError(
            "each segment sum needs indices, values and a shape, "
            f"got {len(indices)}, {len(values)} and {len(shapes)}"
        )
    for part, shape in zip(values, shapes, strict=True):
        if not shape or tuple(part.shape[1:]) != tuple(shape[1:]):
            raise TensorArgumentError(
                f"values must have shape (n, *{tuple(shape[1:])}), got {describe(part)}"
            )
    return [
        reduce_sum(rows, part, shape[0], validate=validate)
        for rows, part, shape in zip(indices, values, shapes, strict=True)
    ]


def fused_reduce_and_split(
    row_splits: Sequence[Tensor], embeddings: Sequence[Tensor], slice_dims: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Return, for each feature, the sum of the embeddings of each row, cut into columns.

    Args:
        row_splits: int64 of shape (rows + 1,) each. Trusted: a device is not asked.
        embeddings: Of shape (n, dim) each, n being the last of the splits.
        slice_dims: Widths of the columns, which sum to dim, for each feature.
    """
    if not len(row_splits) == len(embeddings) == len(slice_dims):
        raise TensorArgumentError(
            "each feature needs row splits, embeddings and widths, "
            f"got {len(row_splits)}, {len(embeddings)} and {len(slice_dims)}"
        )
    pooled = []
    for splits, rows, dims in zip(row_splits, embeddings, slice_dims, strict=True):
        ragged = RaggedTensor(rows, splits, validate=False)
        pooled.append(_columns(reduce_sum(ragged.value_rowids, rows, ragged.nrows, validate=False), dims))
    return pooled


def _columns(pooled: Tensor, dims: Sequence[int]) -> list[Tensor]:
    if pooled.ndim != 2 or any(dim < 0 for dim in dims) or sum(dims) != pooled.shape[1]:
        raise TensorArgumentError(
            f"columns of {list(dims)} do not make up values of shape (n, {tuple(pooled.shape[1:])})"
        )
    return list(torch.split(pooled, list(dims), dim=1))


def _check(indices: Tensor, values: Tensor, batch: int, validate: bool) -> None:
    check_indices(indices, "indices")
    check_rows(values, len(indices), "values")
    check_count(batch, "batch", least=0)
    if validate:
        check_range(indices, batch, "indices")
