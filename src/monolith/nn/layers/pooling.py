"""Pooling: many tensors of one shape become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError


class SumPooling(nn.Module):
    """The elementwise sum of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        return _total(tensors)


class AvgPooling(nn.Module):
    """The elementwise mean of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        return _total(tensors) / len(tensors)


class MaxPooling(nn.Module):
    """The elementwise maximum of a non-empty list of tensors of one shape."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _check(type(self).__name__, tensors)
        largest = tensors[0]
        for tensor in tensors[1:]:
            largest = torch.maximum(largest, tensor)
        return largest


def _total(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    # Into one new tensor: a stack would copy all of them first.
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total += tensor
    return total


def _check(layer: str, tensors: Sequence[Tensor]) -> None:
    if isinstance(tensors, Tensor) or not tensors:
        found = "one tensor" if isinstance(tensors, Tensor) else "an empty one"
        raise LayerArgumentError(f"{layer}: give a non-empty list of tensors, got {found}")
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise LayerArgumentError(f"{layer}: all tensors must have one shape, got {shapes}")
