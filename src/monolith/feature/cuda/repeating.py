"""Repeating: rows of distinct ids on a device, as often as their ids occur, with a gradient.

Rows in host memory come to a device once for each distinct id, and layouts there are made of a row for each
occurrence. One launch expands them in the forward pass; in the backward pass occurrences are sorted by their
ids, and one launch adds up the gradients of each, in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda import Device, blocks_for
from monolith.errors import FeatureError

PART = np.dtype(
    [("floats", "<i8"), ("base", "<i8")] + [(name, "<i4") for name in ("first", "number", "dim", "unused")]
)
"""A table in a batch, as kernels read it."""

_FLOATS = 4  # that a thread does, as in repeated.cu
_MOST = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """Where the ids of a batch occur, on a device."""

    parts: Tensor
    """The result of `Repeater.parts`."""
    numbers: Tensor
    """int64: the number of each occurrence's id among the distinct ones, table after table."""
    distinct: int
    """How many distinct ids there are; each occurs at least once."""
    floats: int
    """Floats of a row for each occurrence."""


class Repeater:
    """Repeats the rows of tables on one device. Thread-safe.

    Args:
        dims: The width of each table's rows.
    """

    def __init__(self, dims: Sequence[int], device: Device) -> None:
        self.device = device
        self._dims: NDArray[np.int64] = np.array(dims, np.int64)
        self._kernels = device.kernels(repeated_source(), "repeated")

    @property
    def part_bytes(self) -> int:
        """Bytes of the result of `parts`."""
        return len(self._dims) * PART.itemsize

    def parts(self, distinct: NDArray[np.int64], occurring: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the places of the rows of each table, for a batch, to be copied to the device.

        Args:
            distinct: How many distinct ids each table has.
            occurring: How many occurrences.

        Raises:
            FeatureError: The batch is too large for a kernel.
        """
        if int(occurring.sum()) >= _MOST or int((occurring * self._dims).max(initial=0)) >= 2 * _MOST:
            raise FeatureError("batch: it has too many ids for one call on a GPU; use smaller batches")
        found = np.zeros(len(self._dims), PART)
        firsts = np.cumsum(distinct) - distinct
        found["dim"] = self._dims
        found["first"] = np.cumsum(occurring) - occurring
        found["number"] = firsts
        found["floats"] = np.cumsum(occurring * self._dims) - occurring * self._dims
        found["base"] = np.cumsum(distinct * self._dims) - distinct * self._dims - firsts * self._dims
        return found.view(np.uint8)

    def repeated(self, rows: Tensor, occurrences: Occurrences) -> Tensor:
        """Return a row for each occurrence, differentiable in `rows`.

        Args:
            rows: float32 of one dimension, on the device: a row for each distinct id, table after table.
        """
        found: Tensor = _Repeated.apply(rows, self, occurrences)  # type: ignore[no-untyped-call]
        return found

    # Without autograd

    def repeat(self, rows: Tensor, occurrences: Occurrences) -> Tensor:
        floats = occurrences.floats
        with self.device.active():
            out = rows.new_empty(floats)
            self._launch(
                "repeat",
                blocks_for(blocks_for(floats, per_block=_FLOATS)),
                occurrences.parts,
                len(self._dims),
                occurrences.numbers,
                rows,
                floats,
                out,
            )
        return out

    def summed(self, gradients: Tensor, occurrences: Occurrences, floats: int) -> Tensor:
        """Return the gradient of each distinct row, of so many floats in all."""
        numbers, distinct = occurrences.numbers, occurrences.distinct
        with self.device.active():
            in_order, order = torch.sort(numbers.to(torch.int32), stable=True)
            starts = torch.empty(occurrences.distinct + 1, dtype=torch.int32, device=gradients.device)
            out = gradients.new_empty(floats)
            self._launch("find_starts", blocks_for(len(numbers)), in_order, len(numbers), distinct, starts)
            self._launch(
                "sum_repeated",
                blocks_for(occurrences.distinct * 32),
                occurrences.parts,
                len(self._dims),
                starts,
                order,
                distinct,
                gradients,
                out,
            )
        return out

    def _launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        self._kernels.launch(kernel, blocks, *arguments, stream=self.device.current_stream().handle)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, repeater: Repeater, occurrences: Occurrences) -> Tensor:
        ctx.repeater, ctx.occurrences, ctx.floats = repeater, occurrences, rows.numel()
        return repeater.repeat(rows.detach(), occurrences)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.repeater.summed(gradient.contiguous(), ctx.occurrences, ctx.floats), None, None


def repeated_source() -> str:
    """Return the source of the kernels that repeat rows and sum their gradients."""
    return resources.files(__package__).joinpath("repeated.cu").read_text("utf-8")
