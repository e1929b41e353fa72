"""Each id once, in the order ids are first seen.

Asking a shard for the same row twice is waste. The order of first sight needs no
agreement between the two ends and does not change when ids are added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monolith.tensors.arguments import check_indices


class Unique(NamedTuple):
    """Where each distinct id is first seen, and which one every id is."""

    first: Tensor
    """int64 of shape (u,), rising: positions in the ids given."""
    inverse: Tensor
    """int64 of shape (n,): the number of each id among the distinct ones."""


def unique_in_order(ids: Tensor, groups: Tensor | None = None) -> Unique:
    """Find the distinct ids of int64 `ids`, numbered in the order they are first seen.

    With `groups`, of the same shape, equal ids of different groups are distinct.
    """
    check_indices(ids, "ids")
    order = torch.argsort(ids, stable=True)
    if groups is not None:
        check_indices(groups, "groups")
        order = order[torch.argsort(groups[order], stable=True)]
    begins = _changes(ids[order])
    if groups is not None:
        begins |= _changes(groups[order])
    # Sorting kept the order of equal ids, so each run begins with the first one seen.
    first, numbers = torch.sort(order[begins])
    run_number = torch.empty_like(numbers)
    run_number[numbers] = torch.arange(len(numbers), device=ids.device)
    inverse = torch.empty_like(ids)
    inverse[order] = run_number[begins.cumsum(0) - 1]
    return Unique(first, inverse)


def _changes(values: Tensor) -> Tensor:
    """Return a mask of the values that differ from the one before, the first included."""
    changes = torch.ones_like(values, dtype=torch.bool)
    changes[1:] = values[1:] != values[:-1]
    return changes
