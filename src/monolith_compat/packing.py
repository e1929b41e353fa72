"""Many tensors in one, for one copy or one message instead of many.

Tensors go by key, in sorted order, so two ends that agree on the keys and shapes agree
on the layout. One packed tensor has one dtype: tensors of several are split by dtype
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import check_count, check_indices, describe
from monolith_compat.reshape import Shape, StaticReshapeNBuilder, static_reshape

ALIGNMENT_BYTES = 16
"""What the widest loads of a GPU ask of an address."""


def pack_tensors(keyed_tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return all elements end to end in the order of the sorted keys, and the int64 count of each tensor.

    The counts are on the CPU, where `unpack_tensors` needs them.
    """
    builder = StaticReshapeNBuilder()
    for key in sorted(keyed_tensors):
        builder.add(keyed_tensors[key], (None,))
    flat, sizes = builder.build()
    return _concatenated(flat), sizes


def unpack_tensors(keyed_shapes: Mapping[str, Shape], packed: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return what `pack_tensors` packed, by sorted key; shares memory with it.

    A shape may have one None, which follows from the count.
    """
    values, sizes = packed
    check_indices(sizes, "sizes")
    if len(sizes) != len(keyed_shapes):
        raise TensorArgumentError(f"{len(keyed_shapes)} shapes do not fit a pack of {len(sizes)} tensors")
    counts = sizes.tolist()
    if values.ndim != 1 or any(count < 0 for count in counts) or sum(counts) != len(values):
        raise TensorArgumentError(f"sizes {counts} do not add up to the packed {describe(values)}")
    keys = sorted(keyed_shapes)
    outputs, _ = static_reshape(torch.split(values, counts), [keyed_shapes[key] for key in keys])
    return dict(zip(keys, outputs, strict=True))


def split_tensors_with_type(keyed_tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return one dict per dtype, in the order of the dtypes' names, each with sorted keys."""
    by_dtype: dict[str, dict[str, Tensor]] = {}
    for key in sorted(keyed_tensors):
        by_dtype.setdefault(str(keyed_tensors[key].dtype), {})[key] = keyed_tensors[key]
    return [by_dtype[dtype] for dtype in sorted(by_dtype)]


def merge_dicts(dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return one dict with the items of all; a key may stand in only one of them."""
    merged: dict[str, Tensor] = {}
    for part in dicts:
        if twice := merged.keys() & part.keys():
            raise TensorArgumentError(f"cannot merge: {sorted(twice)} stand in more than one dict")
        merged.update(part)
    return merged


def pack_typed_keyed_tensors(groups: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return one packed tensor per group, then one int64 tensor that says how to unpack them all.

    That last one, on the CPU, holds the number of tensors of each group, then the count
    of every tensor in the order packed.
    """
    packs = [pack_tensors(group) for group in groups]
    lengths = torch.tensor([len(group) for group in groups], dtype=torch.int64)
    return [*(values for values, _ in packs), torch.cat([lengths, *(sizes for _, sizes in packs)])]


def unpack_packed_tensors(
    keyed_shapes: Sequence[Mapping[str, Shape]], packed_list: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Return the groups that `pack_typed_keyed_tensors` packed, given the shapes of each."""
    if len(packed_list) < 2:
        raise TensorArgumentError("Wrong packed_list length")
    *values, layout = packed_list
    check_indices(layout, "the last of packed_list")
    if len(values) != len(keyed_shapes) or len(layout) < len(values):
        raise TensorArgumentError(
            f"{len(keyed_shapes)} groups of shapes do not fit {len(values)} packed tensors "
            f"and a layout of {len(layout)} numbers"
        )
    lengths, sizes = layout[: len(values)].tolist(), layout[len(values) :]
    if any(length < 0 for length in lengths) or sum(lengths) != len(sizes):
        raise TensorArgumentError(
            f"the layout promises {lengths} tensors, but counts the elements of {len(sizes)}"
        )
    return [
        unpack_tensors(shapes, (pack, part))
        for shapes, pack, part in zip(keyed_shapes, values, torch.split(sizes, lengths), strict=True)
    ]


def aligned_flat_concat(
    tensors: Sequence[Tensor], scale: float | None = None, alignment_bytes: int = ALIGNMENT_BYTES
) -> Tensor:
    """Return all elements end to end, times `scale`, each tensor at a multiple of `alignment_bytes`.

    The gaps are zeros. Gradients flow through.
    """
    flat: list[Tensor] = []
    for tensor, gap in zip(tensors, _gaps(tensors, alignment_bytes), strict=True):
        flat.append(tensor.reshape(-1))
        if gap:
            flat.append(tensor.new_zeros(gap))
    concatenated = _concatenated(flat)
    return concatenated if scale is None else concatenated * scale


def aligned_flat_split(
    flat: Tensor,
    like: Sequence[Tensor],
    scale: float | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> list[Tensor]:
    """Return the tensors in what `aligned_flat_concat` built, times `scale`, with the shapes of `like`."""
    gaps = _gaps(like, alignment_bytes)
    sizes = [tensor.numel() for tensor in like]
    ends = list(accumulate(size + gap for size, gap in zip(sizes, gaps, strict=True)))
    if flat.ndim != 1 or len(flat) != (ends[-1] if ends else 0):
        raise TensorArgumentError(
            f"expected {ends[-1] if ends else 0} elements to split, got {describe(flat)}"
        )
    scaled = flat if scale is None else flat * scale
    starts = [end - size - gap for end, size, gap in zip(ends, sizes, gaps, strict=True)]
    return [
        scaled[start : start + size].reshape(tensor.shape)
        for start, size, tensor in zip(starts, sizes, like, strict=True)
    ]


def _gaps(tensors: Sequence[Tensor], alignment_bytes: int) -> list[int]:
    """Return how many elements to leave after each tensor, for the next one to be aligned."""
    check_count(alignment_bytes, "alignment_bytes")
    steps = [max(1, alignment_bytes // tensor.element_size()) for tensor in tensors]
    return [-tensor.numel() % step for tensor, step in zip(tensors, steps, strict=True)]


def _concatenated(flat: Sequence[Tensor]) -> Tensor:
    if not flat:
        raise TensorArgumentError("cannot pack no tensors: their dtype is unknown")
    if any(tensor.dtype is not flat[0].dtype for tensor in flat):
        raise TensorArgumentError(
            f"tensors of one pack must share a dtype, got {sorted({str(tensor.dtype) for tensor in flat})}; "
            "pack those of split_tensors_with_type each on their own"
        )
    return torch.cat(list(flat))
