"""Merging: a list of feature embeddings becomes the one tensor that a layer takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_choice

MERGE_TYPES = ("stack", "concat")


def merge_tensor_list(
    features: Tensor | Sequence[Tensor],
    merge_type: str | None = "concat",
    *,
    axis: int = 1,
    keep_list: bool = False,
) -> Tensor | list[Tensor]:
    """Merge the features of a batch.

    Args:
        features: Tensors of shape (batch, dim), or one of shape (batch, n, dim), which
            counts as n features.
        merge_type: "stack" gives (batch, n, dim) and wants equal dims; "concat" gives
            (batch, sum of dims); None gives the list of features.
        axis: Where to stack or concatenate a list.
        keep_list: Return the merged tensor as a list of one, for callers that expect a list.
    """
    if merge_type is not None:
        check_choice("merge_tensor_list", "merge_type", merge_type, MERGE_TYPES)
    if isinstance(features, Tensor):
        if features.ndim != 3:
            raise LayerArgumentError(
                "merge_tensor_list: give a list, or one tensor of shape (batch, n, dim), "
                f"got shape {tuple(features.shape)}"
            )
        if merge_type is None:
            return list(features.unbind(1))
        merged = features if merge_type == "stack" else features.flatten(1)
        return [merged] if keep_list else merged
    tensors = list(features)
    if not tensors:
        raise LayerArgumentError("merge_tensor_list: there is nothing to merge: the list is empty")
    if merge_type is None:
        return tensors
    if merge_type == "stack" and any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise LayerArgumentError(f"merge_tensor_list: features of different shapes do not stack: {shapes}")
    merged = torch.stack(tensors, axis) if merge_type == "stack" else torch.cat(tensors, axis)
    return [merged] if keep_list else merged
