"""Layouts: the positions of slices of features in the tensors that a model reads.

A layout is named and takes slices in an order. CONCAT puts them side by side, STACK
one above the other, ADDN adds them up, NONE leaves each a tensor of its own. Slices of
features that keep their first L ids have L positions:

    kind     combined               first L
    CONCAT   (B, sum of dims)       (B, L, sum of dims)
    STACK    (B, slices, dim)       (B, slices, L, dim)
    ADDN     (B, dim)               not possible
    NONE     (B, dim) each          (B, L, dim) each

All layouts of a model are filled from looked-up rows by one call into the core, and
their gradients come back by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from monolith import native
from monolith.errors import ConfigError, DuplicateNameError, FeatureError, UnknownFeatureError
from monolith.feature.combiners import Combiner
from monolith.feature.slots import SliceUse


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


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """All layouts of a model, worked out: the form in which the core and the torch path read them."""

    tables: tuple[str, ...]
    """Sorted."""
    table_dims: tuple[int, ...]
    features: tuple[InputSpec, ...]
    """Sorted by name."""
    uses: tuple[Use, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of each output, without the examples."""
    names: dict[str, tuple[int, ...]]
    """Layout to its outputs, in sorted order of layouts; one each, or one per slice for NONE."""
    lists: frozenset[str]
    """Layouts that are NONE."""

    def by_name(self, outputs: tuple[Tensor, ...]) -> dict[str, Tensor | list[Tensor]]:
        """Return outputs by layout: a tensor, or for NONE a list with one for each slice."""
        return {
            name: [outputs[number] for number in numbers] if name in self.lists else outputs[numbers[0]]
            for name, numbers in self.names.items()
        }

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
    names: dict[str, tuple[int, ...]] = {}
    for layout in sorted(layouts, key=lambda layout: layout.name):
        if layout.name in names:
            raise DuplicateNameError(f"two layouts are named {layout.name!r}")
        for one in layout.slices:
            _check_slice(layout, one, numbers, ordered, tables)
        first = len(shapes)
        lengths = [ordered[numbers[one.feature]].combiner.length for one in layout.slices]
        shapes += _place(layout, lengths, first, [numbers[one.feature] for one in layout.slices], uses)
        names[layout.name] = tuple(range(first, len(shapes)))
    return LayoutPlan(
        tables=tuple(table_names),
        table_dims=tuple(tables[name] for name in table_names),
        features=tuple(ordered),
        uses=tuple(uses),
        shapes=tuple(shapes),
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


def _place(
    layout: LayoutSpec, lengths: list[int], first: int, features: list[int], uses: list[Use]
) -> list[tuple[int, ...]]:
    """Append the uses of one layout; return the shapes of its outputs."""
    if not layout.slices:
        raise ConfigError(f"layout {layout.name!r} has no slices")
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
