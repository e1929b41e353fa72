"""The layouts of a model as kernels read them: computed once, and stored on the device.

The structures here are those of `layouts.cu`, byte by byte. Features are in the order of their tables, as
the rows of a batch do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda import Device, Kernels
from monolith.errors import FeatureError
from monolith.feature.combiners import Max
from monolith.feature.layouts import LayoutPlan
from monolith.native import Pooling

MOST_OUTPUTS = 448
"""Of a plan: their addresses go to each kernel, whose arguments may have 4 KB."""

FEATURE = np.dtype(
    [("base", "<i8"), ("begin", "<i8")]
    + [(name, "<i4") for name in ("first", "cell", "shift", "step", "dim", "pooling", "length", "weighted")]
    + [("columns", "<i4"), ("count", "<i4")]
)
"""A feature in a batch."""
PART = np.dtype([("floats", "<i8"), ("first", "<i4"), ("dim", "<i4")])
"""A table in a batch."""


class BatchStruct(ctypes.Structure):
    """A batch, as kernels take it."""

    _fields_ = [
        ("features", ctypes.c_void_p),
        ("splits", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("examples", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


class PlanStruct(ctypes.Structure):
    """A plan, as kernels take it."""

    _fields_ = [
        ("columns", ctypes.c_void_p),
        ("uses", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("backs", ctypes.c_void_p),
        ("width", ctypes.c_int),
    ]


class DevicePlan:
    """A `LayoutPlan` in the memory of a device, with the kernels for it.

    Outputs that keep each ID are no part of it: they are parts of the rows of a batch as they are.

    Raises:
        FeatureError: It has more outputs than kernels can be told of.
    """

    def __init__(self, plan: LayoutPlan, device: Device) -> None:
        plan = plan.without_each()
        if len(plan.shapes) > MOST_OUTPUTS:
            raise FeatureError(
                f"layouts on a GPU can have {MOST_OUTPUTS} outputs, got {len(plan.shapes)}; use CONCAT or "
                "STACK in place of NONE, or keep the rows in host memory"
            )
        tables = {name: number for number, name in enumerate(plan.tables)}
        numbers = [tables[feature.table] for feature in plan.features]
        self.order = sorted(range(len(numbers)), key=lambda feature: (numbers[feature], feature))
        """Features of the plan, by table."""
        self.table_of: NDArray[np.int64] = np.array([numbers[feature] for feature in self.order], np.int64)
        """By place in `order`."""
        self.dims: NDArray[np.int64] = np.array(plan.table_dims, np.int64)
        self.takes_maximum = any(isinstance(feature.combiner, Max) for feature in plan.features)
        self.features = self._features(plan)
        self._outputs = 1 << max(4, (len(plan.shapes) - 1).bit_length())
        self._outputs = min(self._outputs, MOST_OUTPUTS)
        columns, uses = _columns(plan, self.order)
        firsts, backs = _backs(plan, self.order, self.features["dim"])
        with device.active():
            self._arrays = [_put(array, device) for array in (columns, uses, firsts, backs)]
        self.width = len(columns)
        """Floats of an example, in all outputs together."""
        self.struct = PlanStruct(*(array.data_ptr() for array in self._arrays), self.width)
        self.kernels: Kernels = device.kernels(layout_source(self._outputs), "layouts")

    def pointers(self, tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
        """Return the addresses of outputs or their gradients; null for None."""
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return (ctypes.c_void_p * self._outputs)(*addresses)

    def _features(self, plan: LayoutPlan) -> NDArray[np.void]:
        """Return what does not change from batch to batch."""
        found = np.zeros(len(self.order), FEATURE)
        combiners = [plan.features[feature].combiner for feature in self.order]
        found["dim"] = self.dims[self.table_of]
        found["pooling"] = [_POOLINGS.get(combiner.pooling, 0) for combiner in combiners]
        found["length"] = [combiner.length for combiner in combiners]
        found["columns"] = np.cumsum(found["dim"]) - found["dim"]
        return found


_POOLINGS = {Pooling.SUM: 0, Pooling.MEAN: 1, Pooling.MAX: 2, Pooling.FIRST_N: 3}
"""Their numbers in `layouts.cu`. No kernel fills an output that keeps each ID: any number will do there."""


def _columns(plan: LayoutPlan, order: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the structs Column and Use: for each float of an example's outputs what adds up to it."""
    places = {feature: place for place, feature in enumerate(order)}
    begins, floats = _outputs(plan)
    sources: list[list[tuple[int, int]]] = [[] for _ in range(begins[-1])]
    position_of = np.zeros(begins[-1], np.int64)
    for use in plan.uses:
        for position in range(max(plan.features[use.feature].combiner.length, 1)):
            first = begins[use.output] + use.offset + position * use.stride
            position_of[first : first + use.width] = position
            for k in range(use.width):
                sources[first + k].append((places[use.feature], use.start + k))
    many = np.array([len(one) for one in sources], np.int64)
    assert many.all(), "the uses of an output fill it"
    output_of = np.repeat(np.arange(len(floats)), floats)
    columns = np.stack(
        [
            output_of,
            np.array(floats, np.int64)[output_of],
            np.arange(begins[-1]) - np.array(begins, np.int64)[output_of],
            np.cumsum(many) - many,
            many,
            position_of,
        ],
        axis=1,
    )
    uses = np.array([use for several in sources for use in several], np.int32)
    return columns.astype(np.int32), uses


def _backs(
    plan: LayoutPlan, order: list[int], dims: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return, for each float of each feature's row, its first Back; and the structs Back."""
    begins, floats = _outputs(plan)
    backs: list[list[tuple[int, ...]]] = []
    for feature, dim in zip(order, dims.tolist(), strict=True):
        columns: list[list[tuple[int, ...]]] = [[] for _ in range(dim)]
        for use in plan.uses:
            if use.feature != feature:
                continue
            for k in range(use.width):
                column = use.offset + k
                flat = begins[use.output] + column
                columns[use.start + k].append((use.output, floats[use.output], column, use.stride, flat))
        backs += columns
    firsts = np.array([0, *accumulate(len(several) for several in backs)], np.int32)
    return firsts, np.array([back for several in backs for back in several], np.int32)


def _outputs(plan: LayoutPlan) -> tuple[list[int], list[int]]:
    """Return where each output begins among the floats of an example, with their number; and its floats."""
    floats = [int(np.prod(shape)) for shape in plan.shapes]
    return [0, *accumulate(floats)], floats


def _put(array: NDArray[np.int32], device: Device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).to(device.torch_device)


def layout_source(outputs: int) -> str:
    """Return the source of what fills so many outputs."""
    text = resources.files(__package__).joinpath("layouts.cu").read_text("utf-8")
    return f"#define OUTPUTS {outputs}\n{text}"
