"""Gathering: the rows of a batch become a model's input tensors, with a gradient.

Rows come as one flat tensor, one row per distinct id, table after table. On the CPU the
core fills every output in one call and propagates the gradients in another. On
another device the same is done by torch operations, as many as there are ways to
pool, whatever the number of features.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import FeatureError
from monolith.feature.batches import FeatureIds
from monolith.feature.combiners import Max, largest
from monolith.feature.layouts import LayoutPlan, LayoutTensor, RowSplits


class PackedFeatures(NamedTuple):
    """The ID features of requests, as the core has packed them: a `FeatureIds` without tensors."""

    names: tuple[str, ...]
    packed: native.PackedRows

    def ids(self) -> FeatureIds:
        """Return the same as tensors."""
        packed = self.packed
        ids, splits = torch.from_numpy(packed.ids), torch.from_numpy(packed.splits)
        return FeatureIds(self.names, ids, splits, packed.rows)


class PackedBatch(NamedTuple):
    """The features of requests, as the core has packed them: a `Batch` without tensors of IDs."""

    ids: PackedFeatures
    floats: Mapping[str, Tensor]
    """Float features: float32 of shape (examples, 1)."""


class Gatherer:
    """All layouts of one model, ready for batches. Thread-safe.

    Args:
        workers: Threads that share large batches; None works on the calling thread alone. The
            outcome does not depend on how many there are, so a call has as many as proved fastest.
    """

    def __init__(self, plan: LayoutPlan, workers: native.Workers | None = None) -> None:
        self.plan = plan
        self.core = plan.core(workers)
        self.memory = native.KeptMemory()
        self._places: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self.groups = _group_uses(plan)

    def read(self, batch: FeatureIds) -> GatheredBatch:
        """Find the distinct ids of a batch. Features the model does not read are ignored.

        Raises:
            FeatureError: The splits do not fit the ids, or the number of examples.
        """
        shared, where = self._places_of(batch)
        try:
            core = self.core.plan(
                batch.ids.contiguous().numpy(),
                batch.splits.contiguous().numpy(),
                shared,
                where,
                batch.batch_size,
                None if batch.weights is None else batch.weights.contiguous().numpy(),
            )
        except ValueError as cause:
            raise FeatureError(f"batch: {cause}") from cause
        return GatheredBatch(self, core, self.plan.row_splits(batch))

    def read_rows(
        self, group: native.FrozenGroup | native.OverlaidGroup, batch: FeatureIds
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a batch over the rows of a group of tables, by one call into the core.

        The same as `read`, a lookup and `GatheredBatch.gather`, without weights and without gradients.

        Raises:
            FeatureError: The splits do not fit the ids, or the number of examples.
        """
        size = batch.batch_size
        shapes = self.plan.output_shapes(size, self.plan.row_splits(batch))
        outputs = tuple(self.empty(*shape) for shape in shapes)
        arguments = (
            batch.ids.contiguous().numpy(),
            batch.splits.contiguous().numpy(),
            *self._places_of(batch),
        )
        try:
            self.core.read_rows(group, *arguments, size, [output.numpy() for output in outputs])
        except ValueError as cause:
            raise FeatureError(f"batch: {cause}") from cause
        return outputs

    def read_packed(
        self, group: native.FrozenGroup | native.OverlaidGroup, batch: PackedFeatures
    ) -> tuple[Tensor, ...]:
        """Return the same of requests as the core has packed them, without tensors of their IDs.

        Raises:
            FeatureError: The splits do not fit the ids, or the number of examples.
        """
        where = self._places.get(batch.names)
        if where is None:
            where = self._places[batch.names] = self._where(batch.names)
        splits = self.plan.row_splits(batch.ids()) if self.plan.jagged else {}
        shapes = self.plan.output_shapes(batch.packed.rows, splits)
        outputs = [self.memory.floats(math.prod(shape)).reshape(shape) for shape in shapes]
        try:
            self.core.read_packed(group, batch.packed, where, outputs)
        except ValueError as cause:
            raise FeatureError(f"batch: {cause}") from cause
        return tuple(map(torch.from_numpy, outputs))

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor to be filled, in memory that earlier batches have used and released."""
        return torch.from_numpy(self.memory.floats(math.prod(shape)).reshape(shape))

    def _places_of(self, batch: FeatureIds) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return which features of a batch are shared, and where the batch has those of the model."""
        where = self._places.get(batch.names)
        if where is None:
            where = self._places[batch.names] = self._where(batch.names)
        return np.array(batch.shared, dtype=np.uint8), where

    def _where(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(names):
            raise FeatureError(f"batch: a feature appears twice in {list(names)}")
        return np.array([places.get(feature.name, -1) for feature in self.plan.features], dtype=np.int64)


class GatheredBatch:
    """One batch: its distinct ids, and the way from their rows to the outputs and back.

    Shapes: n examples, u distinct IDs of all tables together. Rows are float32 of shape (floats,): the row of
    each distinct ID, one after the other. Each output is float32 of shape (n, ...); one that keeps each ID of
    its feature has as many as there are in place of n.
    """

    distinct = True

    def __init__(self, gatherer: Gatherer, core: native.LayoutBatch, row_splits: RowSplits) -> None:
        self._gatherer = gatherer
        self._core = core
        self._row_splits = row_splits
        self._shapes = gatherer.plan.output_shapes(core.batch_size, row_splits)

    @property
    def batch_size(self) -> int:
        return self._core.batch_size

    @property
    def ids(self) -> Tensor:
        """int64: distinct ids, table after table, in the order they were met. Not to be written to."""
        return _borrowed(self._core.ids)

    @property
    def sizes(self) -> Tensor:
        """int64 of shape (tables,): how many distinct ids each table has."""
        return _borrowed(self._core.sizes)

    @property
    def counts(self) -> Tensor:
        """int64: how often each distinct id was met."""
        return _borrowed(self._core.counts)

    @property
    def floats(self) -> int:
        """Of the distinct ids' rows, one after another."""
        return self._core.floats

    @property
    def one_each(self) -> bool:
        """Whether every cell that is read has exactly one id."""
        return self._core.one_each

    def number(self, out: Tensor) -> None:
        """Fill int64, for each id that a feature reads, table after table, with its number among `ids`."""
        self._gatherer.core.number(self._core, out.numpy())

    def newest(self, times: Tensor) -> Tensor:
        """Return, for each of `ids`, the newest time of the examples that contain it.

        Args:
            times: int64 of shape (n,).
        """
        out = torch.empty(len(self._core.ids), dtype=torch.int64)
        self._gatherer.core.newest(self._core, times.contiguous().numpy(), out.numpy())
        return out

    def outputs(self, rows: Tensor, scale: Callable[[], float] | None = None) -> tuple[Tensor, ...]:
        """Return the outputs in order of the plan, differentiable in `rows`.

        Args:
            rows: float32 of shape (floats,), on any device.
            scale: Asked in each backward pass by what to multiply the gradient of `rows`; None leaves it.
        """
        if rows.shape != (self.floats,):
            raise FeatureError(f"rows must have shape ({self.floats},), got {tuple(rows.shape)}")
        if rows.device.type == "cpu" and rows.dtype is torch.float32:
            found: tuple[Tensor, ...] = _Gathered.apply(rows, self, scale)  # type: ignore[no-untyped-call]
            return found
        if scale is not None and rows.requires_grad:
            rows = Scaled.apply(rows, scale)  # type: ignore[no-untyped-call]
        return self._by_torch(rows)

    def layouts(self, outputs: tuple[Tensor, ...]) -> dict[str, LayoutTensor | list[LayoutTensor]]:
        """Return outputs by layout: a tensor, or for NONE a list with one for each slice."""
        splits = self._row_splits
        if splits:
            splits = {number: _moved(one, outputs[0].device) for number, one in splits.items()}
        return self._gatherer.plan.by_name(outputs, splits)

    # By the core

    def gather(self, rows: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(self._gatherer.empty(*shape) for shape in self._shapes)
        self._gatherer.core.gather(
            self._core, rows.detach().contiguous().numpy(), [output.numpy() for output in outputs]
        )
        return outputs

    def scatter(self, rows: Tensor, gradients: tuple[Tensor | None, ...], scale: float = 1.0) -> Tensor:
        """Return the gradient of `rows` from those of the outputs, of which None is zeros."""
        out = self._gatherer.empty(self.floats)
        self._gatherer.core.scatter(
            self._core,
            rows.detach().contiguous().numpy(),
            [
                None if gradient is None else gradient.to(torch.float32).contiguous().numpy()
                for gradient in gradients
            ],
            scale,
            out.numpy(),
        )
        return out

    # By torch

    def _by_torch(self, rows: Tensor) -> tuple[Tensor, ...]:
        device = rows.device
        outputs = [rows.new_zeros(math.prod(shape)) for shape in self._shapes]
        for group in self._gatherer.groups:
            moves = self._gatherer.core.moves(self._core, group.uses)
            begin, to, scale = (_moved(torch.from_numpy(array), device) for array in moves)
            offsets = torch.arange(group.width, device=device)
            values = rows[begin[:, None] + offsets] * scale[:, None].to(rows.dtype)
            places = (to[:, None] + offsets).view(-1)
            output = outputs[group.output]
            if group.takes_maximum:
                peaks = largest(values.reshape(-1), places, torch.zeros_like(output))
                outputs[group.output] = output + peaks
            else:
                outputs[group.output] = output.index_add(0, places, values.reshape(-1))
        return tuple(output.view(shape) for output, shape in zip(outputs, self._shapes, strict=True))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, batch: GatheredBatch, scale: Callable[[], float] | None
    ) -> tuple[Tensor, ...]:
        ctx.batch = batch
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        return batch.gather(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        scale = 1.0 if ctx.scale is None else ctx.scale()
        return ctx.batch.scatter(rows, gradients, scale), None, None


class Scaled(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by what `scale` says in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale = scale
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale(), None


@dataclass(frozen=True, slots=True)
class _Group:
    """Uses that torch moves together: of one width, into one output."""

    uses: list[int]
    output: int
    width: int
    takes_maximum: bool


def _group_uses(plan: LayoutPlan) -> list[_Group]:
    """Bring together what is added up; where maxima are added up, each is taken for itself first."""
    together: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, use in enumerate(plan.uses):
        is_maximum = isinstance(plan.features[use.feature].combiner, Max)
        together[use.output, use.width, number if is_maximum else -1].append(number)
    return [_Group(uses, output, width, alone >= 0) for (output, width, alone), uses in together.items()]


def _borrowed(array: NDArray[Any]) -> Tensor:
    """Return a tensor over memory that the core owns."""
    return torch.from_numpy(array)


def _moved(array: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)
