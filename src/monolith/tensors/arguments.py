"""Arguments of tensor calls: refused in words, before a kernel does it with a crash.

An index out of range stops a CUDA process for good, so ranges are checked even there,
at the price of waiting for the device once. Callers that made the indices themselves
may pass `validate=False`, if it is offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError


def check_indices(indices: object, name: str) -> None:
    """Refuse what is not int64 of shape (n,)."""
    if not isinstance(indices, Tensor) or indices.dtype is not torch.int64 or indices.ndim != 1:
        raise TensorArgumentError(f"{name} must be int64 of shape (n,), got {describe(indices)}")


def check_range(indices: Tensor, below: int, name: str) -> None:
    """Refuse indices outside of 0 to `below` - 1. Waits for a CUDA device."""
    if not indices.numel():
        return
    low, high = torch.stack(torch.aminmax(indices)).tolist()
    if low < 0 or high >= below:
        raise TensorArgumentError(f"{name} must be within 0 and {below - 1}, got {low} to {high}")


def check_rows(values: object, n: int, name: str) -> None:
    """Refuse what is not a tensor of shape (n, ...)."""
    if not isinstance(values, Tensor) or not values.ndim or len(values) != n:
        raise TensorArgumentError(f"{name} must have shape ({n}, ...), got {describe(values)}")


def check_dims(dims: Sequence[int], count: int, name: str = "dims") -> None:
    """Refuse what is not `count` numbers from 1."""
    if len(dims) != count or any(not isinstance(dim, int) or dim < 1 for dim in dims):
        raise TensorArgumentError(f"{name} must be {count} numbers from 1, got {list(dims)}")


def check_count(count: int, name: str, least: int = 1) -> None:
    """Refuse a number below `least`."""
    if not isinstance(count, int) or count < least:
        raise TensorArgumentError(f"{name} must be at least {least}, got {count!r}")


def describe(value: object) -> str:
    """Return what a message says about an argument."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return repr(value)
