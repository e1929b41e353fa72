"""Gathering: an embedding for every id of a batch, out of one per distinct id.

The gradient of a gather is a sum per distinct id. torch derives it; the functions named
`..._gradient` are for callers that keep the indices and write the backward pass themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_dims, check_indices, check_range, check_rows, describe


def map_id_to_embedding(ids: Sequence[Tensor], embeddings: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """Return the embedding of every id of `inputs`, looked up in several lists.

    Args:
        ids: int64 of shape (n,) each. An id in several lists is found in the first.
        embeddings: Of shape (n, dim) each, one per list of ids.
        inputs: int64 of any shape.

    Returns:
        Shape inputs.shape + (dim,). The gradient of an embedding is the sum over its uses.

    Raises:
        TensorArgumentError: An id is in no list, or the lists do not match.
    """
    if len(ids) != len(embeddings) or not ids:
        raise TensorArgumentError(
            f"map_id_to_embedding needs embeddings for each list of ids, got {len(ids)} and {len(embeddings)}"
        )
    for one, rows in zip(ids, embeddings, strict=True):
        check_indices(one, "ids")
        check_rows(rows, len(one), "embeddings")
    if len({rows.shape[1:] for rows in embeddings}) != 1:
        raise TensorArgumentError(f"embeddings differ in width: {[tuple(rows.shape) for rows in embeddings]}")
    return gather_embeddings_by_input(torch.cat(list(ids)), torch.cat(list(embeddings)), inputs)[0]


def gather_embeddings_by_input(ids: Tensor, embeddings: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embedding of every id of `inputs`, and its position in `ids`.

    Args:
        ids: int64 of shape (n,). Where an id stands twice, the first counts.
        embeddings: Of shape (n, dim).
        inputs: int64 of any shape.

    Returns:
        Embeddings of shape inputs.shape + (dim,), differentiable, and positions of the
        shape of `inputs`.

    Raises:
        TensorArgumentError: An id is not in `ids`, or the counts do not match.
    """
    check_indices(ids, "ids")
    check_rows(embeddings, len(ids), "embeddings")
    if not isinstance(inputs, Tensor) or inputs.dtype is not torch.int64:
        raise TensorArgumentError(f"inputs must be int64, got {describe(inputs)}")
    flat = inputs.reshape(-1)
    positions = _positions(ids, flat)
    output = embeddings.index_select(0, positions)
    return output.reshape(*inputs.shape, *embeddings.shape[1:]), positions.reshape(inputs.shape)


def gather_embeddings_by_input_gradient(ids: Tensor, grads: Tensor, index_mapping: Tensor) -> Tensor:
    """Return the gradient of the embeddings: for each id the sum of `grads` at its positions.

    Args:
        ids: int64 of shape (n,).
        grads: Of shape index_mapping.shape + (dim,).
        index_mapping: int64 positions in `ids`, from `gather_embeddings_by_input`.
    """
    check_indices(ids, "ids")
    inner = grads.shape[index_mapping.ndim :]
    if grads.shape[: index_mapping.ndim] != index_mapping.shape:
        raise TensorArgumentError(
            f"grads must have shape {tuple(index_mapping.shape)} + (dim,), got {describe(grads)}"
        )
    check_range(index_mapping, len(ids), "index_mapping")
    return grads.new_zeros(len(ids), *inner).index_add(
        0, index_mapping.reshape(-1), grads.reshape(-1, *inner)
    )


def fused_gather_embeddings_by_input(
    fused_embeddings: Tensor, offsets: Sequence[Tensor], dims: Sequence[int], *, validate: bool = True
) -> list[Tensor]:
    """Return `dims[m]` floats from each of `offsets[m]`, for every m.

    Args:
        fused_embeddings: Of shape (f,): embeddings of several widths end to end.
        offsets: int64 of shape (n,) each: where embeddings begin.
        dims: Floats per embedding, for each of `offsets`.
        validate: Whether to look into the offsets, which waits for a CUDA device.

    Returns:
        One tensor of shape (n, dim) for each of `offsets`, differentiable.
    """
    if fused_embeddings.ndim != 1:
        raise TensorArgumentError(f"fused_embeddings must have shape (f,), got {describe(fused_embeddings)}")
    index = _float_index(offsets, dims, len(fused_embeddings), fused_embeddings.device, validate)
    # One gather for all, so that the gradient is one vector, not one per width.
    flat = fused_embeddings.index_select(0, index)
    sizes = [len(one) * dim for one, dim in zip(offsets, dims, strict=True)]
    parts = torch.split(flat, sizes)
    return [part.reshape(-1, dim) for part, dim in zip(parts, dims, strict=True)]


def fused_gather_embeddings_by_input_gradient(
    size: int,
    grads: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dims: Sequence[int],
    scale: float = 1.0,
    *,
    validate: bool = True,
) -> Tensor:
    """Return the gradient of the fused embeddings, (size,): `grads` summed per offset, times `scale`."""
    check_dims(dims, len(grads))
    if not grads:
        raise TensorArgumentError("cannot sum no gradients: their dtype is unknown")
    index = _float_index(offsets, dims, size, grads[0].device, validate)
    for grad, one, dim in zip(grads, offsets, dims, strict=True):
        if grad.shape != (len(one), dim):
            raise TensorArgumentError(f"grads must have shape ({len(one)}, {dim}), got {describe(grad)}")
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    return flat.new_zeros(size).index_add(0, index, flat * scale)


def _positions(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return where each wanted id first stands in `ids`."""
    if not len(wanted):
        return wanted.clone()
    # Sorting keeps the order of equal ids, and the search finds the first of them.
    ordered, order = torch.sort(ids, stable=True)
    found = torch.searchsorted(ordered, wanted).clamp(max=max(len(ids) - 1, 0))
    known = ordered[found] == wanted if len(ids) else torch.zeros_like(wanted, dtype=torch.bool)
    if not bool(known.all()):
        missing = wanted[~known]
        raise TensorArgumentError(f"{len(missing)} ids have no embedding, the first is {int(missing[0])}")
    return order[found]


def _float_index(
    offsets: Sequence[Tensor], dims: Sequence[int], size: int, device: torch.device, validate: bool
) -> Tensor:
    """Return the position of every float that embeddings at `offsets` consist of."""
    check_dims(dims, len(offsets))
    for one in offsets:
        check_indices(one, "offsets")
    index = [
        (one[:, None] + torch.arange(dim, device=device)).reshape(-1)
        for one, dim in zip(offsets, dims, strict=True)
    ]
    joined = torch.cat(index) if index else torch.empty(0, dtype=torch.int64, device=device)
    if validate:
        check_range(joined, size, "offsets and the floats that follow")
    return joined
