"""Many reshapes in one call, with shapes known when the code is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monolith.errors import TensorArgumentError
from monolith.tensors.arguments import describe

Shape = Sequence[int | None]
"""Sizes of dimensions; at most one is None, and follows from the number of elements."""


def static_reshape(
    inputs: Sequence[Tensor], shapes: Sequence[Shape], enable_parallelism: bool = True
) -> tuple[list[Tensor], Tensor]:
    """Reshape each input to its shape.

    Args:
        inputs: Tensors of any dtypes.
        shapes: One for each input. A dimension of None is 0 if the other dimensions multiply to 0.
        enable_parallelism: Taken for callers that name it, without effect: most reshapes
            only look at the same memory in another way.

    Returns:
        The reshaped tensors, sharing memory where they can, and how many elements each
        has, int64 on the CPU.

    Raises:
        TensorArgumentError: A shape is empty, has two Nones, or does not hold its input.
    """
    del enable_parallelism
    if len(inputs) != len(shapes):
        raise TensorArgumentError(
            f"static_reshape needs a shape for each input, got {len(inputs)} and {len(shapes)}"
        )
    outputs = [tensor.reshape(settled(shape, tensor)) for tensor, shape in zip(inputs, shapes, strict=True)]
    return outputs, torch.tensor([tensor.numel() for tensor in inputs], dtype=torch.int64)


class StaticReshapeNBuilder:
    """Collects reshapes one by one, to run them together."""

    def __init__(self, enable_parallelism: bool = True) -> None:
        self._inputs: list[Tensor] = []
        self._shapes: list[Shape] = []
        self._enable_parallelism = enable_parallelism

    def add(self, tensor: Tensor, shape: Shape) -> int:
        """Return the position `tensor` will have among the outputs."""
        self._inputs.append(tensor)
        self._shapes.append(tuple(shape))
        return len(self._inputs) - 1

    def build(self) -> tuple[list[Tensor], Tensor]:
        """Reshape all that was added; see `static_reshape`."""
        return static_reshape(self._inputs, self._shapes, self._enable_parallelism)


def settled(shape: Shape, tensor: Tensor) -> list[int]:
    """Return `shape` with its None replaced by what fits the elements of `tensor`."""
    if not isinstance(shape, Sequence) or not shape:
        raise TensorArgumentError(f"a shape must list at least one dimension, got {shape!r}")
    known = [size for size in shape if size is not None]
    if any(not isinstance(size, int) or size < 0 for size in known) or len(shape) - len(known) > 1:
        raise TensorArgumentError(f"a shape holds numbers from 0 and at most one None, got {shape!r}")
    elements, product = tensor.numel(), math.prod(known)
    rest = elements // product if product else 0
    sizes = [rest if size is None else size for size in shape]
    if math.prod(sizes) != elements:
        raise TensorArgumentError(
            f"shape {shape!r} does not hold the {elements} elements of {describe(tensor)}"
        )
    return sizes
