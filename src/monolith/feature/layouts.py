"""Layouts: the positions of slices of features in the tensors that a model reads.

A layout is named and takes slices in an order. CONCAT puts them side by side, STACK
one above the other, ADDN adds them up, NONE leaves each a tensor of its own. Slices of
features that keep their first L ids have L positions. Of a feature that keeps each of its
ids, n in all examples together, a layout is a `RaggedTensor` with values of shape (n, ...):

    kind     combined               first L                each
    CONCAT   (B, sum of dims)       (B, L, sum of dims)    (n, sum of dims), slices of one feature
    STACK    (B, slices, dim)       (B, slices, L, dim)    not possible
    ADDN     (B, dim)               not possible           not possible
    NONE     (B, dim) each          (B, L, dim) each       (n, dim) each

All layouts of a model are filled from looked-up rows by one call into the core, and
their gradients come back by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from monolith import native
from monolith.errors import ConfigError, DuplicateNameError, FeatureError, UnknownFeatureError
from monolith.feature.batches import FeatureIds
from monolith.feature.combiners import Combiner, Each
from monolith.feature.slots import SliceUse
from monolith.tensors import RaggedTensor


class LayoutKind(Enum):
    """How slices become tensors; the values are upstream's `OutType`."""

    CONCAT = 0
    STACK = 1
    ADDN = 2
    NONE = 3


CONCAT, STACK, ADDN, NONE = LayoutKind.CONCAT, LayoutKind.STACK, LayoutKind.ADDN, LayoutKind.NONE


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input feature, resolved: whose rows it reads and how it combines them."""

    name: str
    table: str
    combiner: Combiner


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Columns [start, end) of a feature's rows."""

    feature: str
    start: int
    end: int

    @property
    def dim(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One named output over slices of features."""

    name: str
    kind: LayoutKind
    slices: Sequence[SliceUse]


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """One named output over features by name."""

    name: str
    kind: LayoutKind
    slices: tuple[SliceSpec, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """The position of one slice: see `UseSpec` in the core."""

    feature: int
    start: int
    width: int
    output: int
    offset: int
    stride: int
    adds: bool


LayoutTensor = Tensor | RaggedTensor
"""What a layout has for a model: ragged if it keeps each ID of its feature."""
RowSplits = Mapping[int, Tensor]
"""Feature of a plan that keeps each ID -> its row splits in a batch, int64."""


@dataclass(frozen=True)
class LayoutPlan:
    """All layouts of a model, worked out: the form in which the core and the torch path read them."""

    tables: tuple[str, ...]
    """Sorted."""
    table_dims: tuple[int, ...]
    features: tuple[InputSpec, ...]
    """Sorted by name."""
    uses: tuple[Use, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of each output, without the examples; of one that keeps each ID, without the IDs."""
    each: tuple[int, ...]
    """By output: the feature of which it keeps each ID; -1 if it has one part for each example."""
    names: dict[str, tuple[int, ...]]
    """Layout to its outputs, in sorted order of layouts; one each, or one per slice for NONE."""
    lists: frozenset[str]
    """Layouts that are NONE."""

    @cached_property
    def jagged(self) -> tuple[int, ...]:
        """The features of which some output keeps each ID."""
        return tuple(sorted({*self.each} - {-1}))

    def row_splits(self, batch: FeatureIds) -> dict[int, Tensor]:
        """Return the row splits of the features that keep each ID; of a shared one, of one row."""
        found = {}
        for number in self.jagged:
            name = self.features[number].name
            if batch.batch_size and name in batch.names:
                found[number] = batch[name].row_splits
            else:
                found[number] = torch.zeros(batch.batch_size + 1, dtype=torch.int64)
        return found

    def output_shapes(self, batch_size: int, row_splits: RowSplits) -> list[tuple[int, ...]]:
        """Return the shape of each output of a batch."""
        return [
            (batch_size if number < 0 else int(row_splits[number][-1]), *shape)
            for number, shape in zip(self.each, self.shapes, strict=True)
        ]

    def by_name(
        self, outputs: Sequence[Tensor], row_splits: RowSplits
    ) -> dict[str, LayoutTensor | list[LayoutTensor]]:
        """Return outputs by layout: a tensor, or for NONE a list with one for each slice.

        Args:
            row_splits: Of the features that keep each ID, on the device of the outputs.
        """
        tensors: list[LayoutTensor] = [
            output if number < 0 else RaggedTensor(output, row_splits[number], validate=False)
            for number, output in zip(self.each, outputs, strict=True)
        ]
        return {
            name: [tensors[number] for number in numbers] if name in self.lists else tensors[numbers[0]]
            for name, numbers in self.names.items()
        }

    def without_each(self) -> LayoutPlan:
        """Return the plan without the outputs that keep each ID. Its features stay."""
        kept = [output for output, number in enumerate(self.each) if number < 0]
        places = {output: place for place, output in enumerate(kept)}
        return replace(
            self,
            uses=tuple(replace(use, output=places[use.output]) for use in self.uses if use.output in places),
            shapes=tuple(self.shapes[output] for output in kept),
            each=(-1,) * len(kept),
            names={},
            lists=frozenset(),
        )

    def core(self, workers: native.Workers | None) -> native.Layouts:
        """Return the core's layouts."""
        tables = {name: number for number, name in enumerate(self.tables)}
        return native.Layouts(
            list(self.table_dims),
            [(tables[f.table], f.combiner.pooling, f.combiner.length) for f in self.features],
            [(u.feature, u.start, u.width, u.output, u.offset, u.stride, u.adds) for u in self.uses],
            [_product(shape) for shape in self.shapes],
            workers,
        )


def plan_layouts(
    tables: dict[str, int], features: Sequence[InputSpec], layouts: Sequence[LayoutSpec]
) -> LayoutPlan:
    """Work out where every slice goes.

    Args:
        tables: Table to the width of its rows.

    Raises:
        FeatureError: A slice or layout makes no sense; says which.
    """
    table_names = sorted(tables)
    ordered = sorted(features, key=lambda feature: feature.name)
    numbers: dict[str, int] = {}
    for number, feature in enumerate(ordered):
        if feature.name in numbers:
            raise DuplicateNameError(f"two features are named {feature.name!r}; a feature has one table")
        if feature.table not in tables:
            raise UnknownFeatureError(f"feature {feature.name!r}: there is no table {feature.table!r}")
        numbers[feature.name] = number
    uses: list[Use] = []
    shapes: list[tuple[int, ...]] = []
    each: list[int] = []
    names: dict[str, tuple[int, ...]] = {}
    for layout in sorted(layouts, key=lambda layout: layout.name):
        if layout.name in names:
            raise DuplicateNameError(f"two layouts are named {layout.name!r}")
        for one in layout.slices:
            _check_slice(layout, one, numbers, ordered, tables)
        first = len(shapes)
        used = [numbers[one.feature] for one in layout.slices]
        combiners = [ordered[number].combiner for number in used]
        _check_each(layout, combiners)
        shapes += _place(layout, [one.length for one in combiners], first, used, uses)
        keeps = isinstance(combiners[0], Each)
        each += used[: len(shapes) - first] if keeps else [-1] * (len(shapes) - first)
        names[layout.name] = tuple(range(first, len(shapes)))
    return LayoutPlan(
        tables=tuple(table_names),
        table_dims=tuple(tables[name] for name in table_names),
        features=tuple(ordered),
        uses=tuple(uses),
        shapes=tuple(shapes),
        each=tuple(each),
        names=names,
        lists=frozenset(layout.name for layout in layouts if layout.kind is NONE),
    )


def _check_slice(
    layout: LayoutSpec,
    spec: SliceSpec,
    numbers: dict[str, int],
    features: Sequence[InputSpec],
    tables: dict[str, int],
) -> None:
    if spec.feature not in numbers:
        raise UnknownFeatureError(f"layout {layout.name!r}: there is no feature {spec.feature!r}")
    width = tables[features[numbers[spec.feature]].table]
    if not 0 <= spec.start < spec.end <= width:
        raise FeatureError(
            f"layout {layout.name!r}: floats [{spec.start}, {spec.end}) of feature {spec.feature!r} "
            f"are not within its rows, which have {width}"
        )


def _check_each(layout: LayoutSpec, combiners: Sequence[Combiner]) -> None:
    """Refuse a layout that mixes IDs which are kept with something of another length."""
    if not layout.slices:
        raise ConfigError(f"layout {layout.name!r} has no slices")
    kept = [one.feature for one, way in zip(layout.slices, combiners, strict=True) if isinstance(way, Each)]
    if not kept:
        return
    if layout.kind not in (CONCAT, NONE):
        raise FeatureError(
            f"layout {layout.name!r}: {layout.kind.name} is not possible for feature {kept[0]!r}, of which "
            "each ID is kept; use CONCAT or NONE"
        )
    others = [one.feature for one in layout.slices if one.feature != kept[0]]
    if others and (layout.kind is CONCAT or len(kept) < len(layout.slices)):
        raise FeatureError(
            f"layout {layout.name!r}: each ID of feature {kept[0]!r} is kept, so it has another number of "
            f"parts than feature {others[0]!r}; give it a layout of its own"
        )


def _place(
    layout: LayoutSpec, lengths: list[int], first: int, features: list[int], uses: list[Use]
) -> list[tuple[int, ...]]:
    """Append the uses of one layout; return the shapes of its outputs."""
    dims = [one.dim for one in layout.slices]
    slices = list(zip(features, layout.slices, dims, strict=True))
    if layout.kind is NONE:
        for number, (feature, one, dim) in enumerate(slices):
            uses.append(Use(feature, one.start, dim, first + number, 0, dim, adds=False))
        return [(length, dim) if length else (dim,) for length, dim in zip(lengths, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise FeatureError(
            f"layout {layout.name!r}: {layout.kind.name} needs features with as many positions each, "
            f"got {lengths} (0 is combined)"
        )
    length = lengths[0]
    if layout.kind is CONCAT:
        offset = 0
        for feature, one, dim in slices:
            uses.append(Use(feature, one.start, dim, first, offset, sum(dims), adds=False))
            offset += dim
        return [(length, sum(dims)) if length else (sum(dims),)]
    if len(set(dims)) > 1:
        raise FeatureError(
            f"layout {layout.name!r}: {layout.kind.name} needs slices of one width, got {dims}"
        )
    dim = dims[0]
    if layout.kind is ADDN:
        if length:
            raise FeatureError(
                f"layout {layout.name!r}: features that keep their first ids cannot be added up"
            )
        for number, (feature, one, _) in enumerate(slices):
            uses.append(Use(feature, one.start, dim, first, 0, 0, adds=number > 0))
        return [(dim,)]
    for number, (feature, one, _) in enumerate(slices):
        uses.append(Use(feature, one.start, dim, first, number * max(length, 1) * dim, dim, adds=False))
    return [(len(slices), length, dim) if length else (len(slices), dim)]


def _product(shape: tuple[int, ...]) -> int:
    floats = 1
    for size in shape:
        floats *= size
    return floats
