"""Packing: plain features, labels and event times of a whole batch in one call into the core.

Most features are one column each, and most batches have nothing wrong in them. Those are read here, all at
once, since a call for each column would cost more than its work. If anything is odd (a value that cannot be
read, a column of another type, a missing number) it is not packed, and `RawReader` reads feature by feature:
it finds the odd value and gives the same result for the rest.

Records that were not moved yet (`UnmovedRows`) are read straight from the blocks that hold them, ids,
numbers and event times in one call, and none of their columns becomes an object of Python. The same call
packs IDs with weights, sequences and histories behind the plain features: all before the first that is odd,
so that the features of a batch are in the same order whatever is odd in it. Columns of tensors take a call
for ids and one for numbers, of which there must be one in each row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.feature.batches import FeatureIds, one_each_splits
from monolith.feature.spec.kinds import (
    AnyFeature,
    BucketFeature,
    CrossFeature,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    SequenceFeature,
)
from monolith.feature.spec.times import core_forms, core_plan
from monolith.tensors import RaggedTensor

if TYPE_CHECKING:
    from monolith.feature.spec.feature_spec import FeatureSpec
    from monolith.feature.spec.reading import RawColumns


class UnmovedRows(NamedTuple):
    """Rows of blocks of the same columns, in order, whose values are still in the blocks."""

    blocks: tuple[native.ColumnBlock, ...]
    block_of: NDArray[np.int32] | None
    """The block of each row; None if there is one block."""
    rows: NDArray[np.int64]
    numbers: Mapping[str, int]
    """Which column of each block has a name. Rows of the same blocks share this object."""


class PackedRecords(NamedTuple):
    """What the core has read of some records; what it could not read is not in it."""

    ids: FeatureIds | None
    floats: dict[str, Tensor]
    """Float features, before they are scaled: float32 (n, width), NaN where a record has no number."""
    labels: dict[str, Tensor]
    """float32 (n,), by task."""
    missing: dict[str, int]
    """Float feature to how many of its records lack a number, if some do."""
    times: PackedTimes | None = None
    """The times of events."""
    forms: Sequence[tuple[str, Mapping[str, str]]] = ()
    """Column to `ReadTimes.forms`, of other times that were read."""


class PackedTimes(NamedTuple):
    """Times that the core has read."""

    seconds: RaggedTensor
    """int64, Unix seconds, at most one of each record."""
    forms: dict[str, str]
    """See `ReadTimes.forms`."""


class RawCells(NamedTuple):
    """A column as the core takes it: contiguous tensors on the CPU."""

    values: Tensor
    """Bytes of texts, whole numbers or numbers: uint8, int64 or float32."""
    texts: Tensor | None
    """Where each text begins; None of numbers."""
    splits: Tensor
    """Where each row begins."""

    @classmethod
    def of(cls, raw: RaggedTensor) -> RawCells:
        """Return a column of records in this form."""
        values = raw.values
        if isinstance(values, RaggedTensor):
            return cls(values.flat_values, values.row_splits, raw.row_splits)
        return cls(values, None, raw.row_splits)


_Plan = tuple[
    native.RawKind | None,
    native.RawKind | None,
    native.RawKind | None,
    Sequence[float],
    Sequence[float],
    str | None,
    int | None,
]
"""How the core reads a feature, as `native.IdPacker` has it: as which kind a column of texts, of whole
numbers and of numbers, each None if it cannot hold that; boundaries of the last two; separator, slot."""


_ListColumn = tuple[native.RowColumnKind, _Plan, tuple[int, bool, int, int]]
"""What a column holds, how its IDs are read, and how times are."""


class _List(NamedTuple):
    """A feature of several columns, or one of which a row keeps some values."""

    names: tuple[str, ...]
    """In a batch."""
    columns: tuple[str, ...]
    plan: tuple[list[_ListColumn], int, bool, bool]
    """How the core reads it, as `native.IdPacker` has it: its columns, how many values a row keeps, whether
    the last ones, and whether they are steps."""


class _RowPlan(NamedTuple):
    """How the core reads rows of blocks of some columns."""

    ids: list[int]
    """The column of each ID feature."""
    numbers: list[tuple[int, native.RowNumbers, int, bool, str | None]]
    """Of float features, then of labels: column, kind, width, and whether texts are read, with what
    separator."""
    floats: tuple[str, ...]
    labels: tuple[str, ...]
    times: tuple[int, int, bool, int, int] | None
    """The column of event times, and how they are read; see `core_plan`."""
    lists: list[list[int]]
    """The columns of the first lists, up to one that lacks a column."""


def _plan_of(one: IdFeature | BucketFeature | SequenceFeature, slot: int | None) -> _Plan:
    kinds = native.RawKind
    if isinstance(one, BucketFeature):
        exact = np.array(one.boundaries, dtype=np.float64)
        # As a column of floats would have them: one written as a number is that number.
        rounded = exact.astype(np.float32).astype(np.float64)
        boundaries = (exact.tolist(), rounded.tolist())
        return (None, kinds.INT_BUCKETS, kinds.FLOAT_BUCKETS, *boundaries, one.separator, slot)
    is_text = one.kind == "string"
    of_texts, of_ints = (kinds.HASHED, None) if is_text else (kinds.WHOLE_TEXTS, kinds.INTS)
    return (of_texts, of_ints, None, (), (), one.separator, slot)


def _list_of(spec: FeatureSpec, name: str, one: AnyFeature) -> _List | None:
    kinds, times = native.RowColumnKind, core_plan(spec.event_time_unit)

    def ids(name: str, of: IdFeature | SequenceFeature) -> _ListColumn:
        return kinds.IDS, _plan_of(of, spec.slots.get(name)), times

    def others(
        kind: native.RowColumnKind,
        separator: str | None,
        buckets: Sequence[float] = (),
        slot: int | None = None,
    ) -> _ListColumn:
        return kind, (None, native.RawKind.INT_BUCKETS, None, buckets, (), separator, slot), times

    if isinstance(one, IdFeature) and one.weights is not None:
        plans = [ids(name, one), others(kinds.WEIGHTS, one.separator)]
        return _List((name,), (one.column or name, one.weights), (plans, 0, False, False))
    if isinstance(one, SequenceFeature):
        names, columns, plans = [name], [one.column or name], [ids(name, one)]
        if one.times is not None:
            names.append(name + ".gap")
            columns.append(one.times)
            plans.append(others(kinds.GAPS, one.separator, one.gaps, spec.slots.get(name + ".gap")))
        return _List(tuple(names), tuple(columns), (plans, one.length, one.keep == "last", False))
    if isinstance(one, HistoryFeature):
        lists, plans = spec.histories[name], []
        for each in lists:
            of = None if each.feature is None else spec.features[each.feature]
            if of is None:
                plans.append(others(kinds.SECONDS, one.separator))
            else:
                assert isinstance(of, IdFeature)
                plans.append(ids(each.name, replace(of, separator=one.separator)))
        named = tuple(each.name for each in lists), tuple(each.column for each in lists)
        return _List(*named, (plans, one.max, True, True))
    return None


def _packed_times(seconds: NDArray[np.int64], splits: NDArray[np.int64] | None, forms: int) -> PackedTimes:
    ends = one_each_splits(len(seconds)) if splits is None else torch.from_numpy(splits)
    return PackedTimes(RaggedTensor(torch.from_numpy(seconds), ends, validate=False), core_forms(forms))


class Packer:
    """Packs the plain features of one spec. Safe from any thread."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._columns: dict[str, str] = {}
        self._floats: dict[str, FloatFeature] = {}
        """Those of one number."""
        self._numbers = {
            name: one for name, one in spec.read_features.items() if isinstance(one, FloatFeature)
        }
        self._event_time, self._time_unit = spec.event_time, spec.event_time_unit
        self._apart: list[str] = []
        """Features that are not plain, crosses left out."""
        self.crosses: list[str] = []
        plans: list[_Plan] = []
        for name, one in spec.read_features.items():
            is_bucket = isinstance(one, BucketFeature) and one.boundaries is not None
            if is_bucket or (isinstance(one, IdFeature) and one.weights is None):
                assert isinstance(one, IdFeature | BucketFeature)
                self._columns[name] = one.column or name
                plans.append(_plan_of(one, spec.slots.get(name)))
            elif isinstance(one, FloatFeature) and one.width == 1:
                self._floats[name] = one
            elif isinstance(one, CrossFeature):
                self.crosses.append(name)
            else:
                self._apart.append(name)
        self._lists: list[_List] = []
        for name in self._apart:
            if name in self._numbers:
                continue
            made = _list_of(spec, name, spec.features[name])
            if made is None:
                break
            self._lists.append(made)
        self._all = [name for name in spec.read_features if name not in self.crosses]
        self._names = tuple(self._columns)
        self._plans = plans
        self._names_with = [self._names]
        """The features that are packed with so many lists."""
        for some in self._lists:
            self._names_with.append((*self._names_with[-1], *some.names))
        of_lists = [some.plan for some in self._lists]
        self._packer = native.IdPacker(plans, of_lists, torch.uint8, torch.int64, torch.float32)
        self._labels = {
            task: label
            for task, label in spec.labels.items()
            if label.position == 0 and (label.loss != "log" or label.at_least is not None)
        }
        self._known: tuple[Mapping[str, int], _RowPlan | None] = ({}, None)
        """The columns of the latest rows, and the plan for these."""

    @property
    def packs_all(self) -> bool:
        """Whether all features are plain."""
        return not self._apart and not self.crosses

    def left_by(self, ids: FeatureIds | None, floats: Collection[str]) -> Iterable[str]:
        """Return the features that were not packed, in their order, crosses left out."""
        packed = {*(() if ids is None else ids.names), *floats}
        left = self._apart if ids is not None and self._floats.keys() <= packed else self._all
        return [name for name in left if name not in packed]

    def rows(self, unmoved: UnmovedRows) -> PackedRecords | None:
        """Return what can be packed of rows that were not moved; None if they lack a column of an ID
        feature."""
        numbers, plan = self._known
        if numbers is not unmoved.numbers:
            plan = self._row_plan(unmoved.numbers)
            self._known = (unmoved.numbers, plan)
        if plan is None:
            return None
        size = len(unmoved.rows)
        flat_ids, splits, flat, counts, times, (lists, forms, weights) = self._packer.pack_rows(
            unmoved.blocks, unmoved.block_of, unmoved.rows, plan.ids, plan.numbers, plan.times, plan.lists
        )
        ids, names = None, self._names_with[lists]
        if splits is not None and names:
            ends = one_each_splits(len(flat_ids)) if isinstance(splits, bool) else torch.from_numpy(splits)
            each_weight = None if weights is None else torch.from_numpy(weights)
            ids = FeatureIds(names, torch.from_numpy(flat_ids), ends, size, weights=each_weight)
        columns = (column for one in self._lists for column in one.columns)
        said = [(column, core_forms(bits)) for column, bits in zip(columns, forms, strict=False) if bits]
        found = PackedRecords(ids, {}, {}, {}, None if times is None else _packed_times(*times), said)
        each = torch.split(torch.from_numpy(flat), [one[2] * size for one in plan.numbers]) if counts else ()
        of_floats = len(plan.floats)
        for name, one, missing in zip(plan.floats, each, counts, strict=False):
            if missing >= 0:
                found.floats[name] = one.view(size, self._numbers[name].width)
            if missing > 0:
                found.missing[name] = missing
        for task, one, missing in zip(plan.labels, each[of_floats:], counts[of_floats:], strict=True):
            if missing == 0:
                least = self._labels[task].at_least
                found.labels[task] = one if least is None else (one >= least).to(torch.float32)
        return found

    def _row_plan(self, numbers: Mapping[str, int]) -> _RowPlan | None:
        """Return which columns of blocks are read, and as what."""
        if any(column not in numbers for column in self._columns.values()):
            return None
        floats = {name: one.column or name for name, one in self._numbers.items()}
        floats = {name: column for name, column in floats.items() if column in numbers}
        labels = {task: label.column or task for task, label in self._labels.items()}
        labels = {task: column for task, column in labels.items() if column in numbers}
        kinds = native.RowNumbers
        read: list[tuple[int, native.RowNumbers, int, bool, str | None]] = []
        for name, column in floats.items():
            one = self._numbers[name]
            read.append((numbers[column], kinds.ANY, one.width, True, one.separator))
        for task, column in labels.items():
            label = self._labels[task]
            is_class = label.loss == "binary" and label.at_least is None
            read.append((numbers[column], kinds.CLASSES if is_class else kinds.ANY, 1, False, None))
        ids = [numbers[column] for column in self._columns.values()]
        place = None if self._event_time is None else numbers.get(self._event_time)
        times = None if place is None else (place, *core_plan(self._time_unit))
        lists = []
        for some in self._lists:
            if any(column not in numbers for column in some.columns):
                break
            lists.append([numbers[column] for column in some.columns])
        return _RowPlan(ids, read, tuple(floats), tuple(labels), times, lists)

    def request_plan(self, inputs: Sequence[tuple[str, native.WireType, bool]]) -> native.RequestPlan | None:
        """Return how the core packs requests with these inputs; None if a feature cannot be read of them.

        Args:
            inputs: Name, type, and whether the input has one dimension.
        """
        places = {name: (place, kind) for place, (name, kind, _) in enumerate(inputs)}
        ids = []
        for column, plan in zip(self._columns.values(), self._plans, strict=True):
            of_texts, of_ints, of_floats, exact, rounded, separator, slot = plan
            place, kind = places[column]
            is_float = kind is native.WireType.FLOATS
            read = of_texts if kind is native.WireType.TEXTS else of_floats if is_float else of_ints
            if read is None:
                return None
            ids.append((place, read, rounded if is_float else exact, separator, slot))
        floats = [places[one.column or name] for name, one in self._floats.items()]
        if not ids or not self.packs_all or any(kind is not native.WireType.FLOATS for _, kind in floats):
            return None
        return native.RequestPlan(inputs, ids, [place for place, _ in floats])

    @property
    def names(self) -> tuple[str, ...]:
        """The ID features, in the order in which they are packed."""
        return self._names

    def numbers(self, packed: native.PackedRows) -> dict[str, Tensor]:
        """Return the float features that such a plan has packed; they are not scaled."""
        if not self._floats:
            return {}
        numbers = torch.from_numpy(packed.floats).view(len(self._floats), packed.rows, 1).unbind(0)
        return dict(zip(self._floats, numbers, strict=True))

    def ids(self, records: RawColumns) -> FeatureIds | None:
        """Return the ids of all plain features; None if something is odd."""
        columns: dict[str, RawCells] = {}
        for column in self._columns.values():
            raw = records.columns.get(column)
            if raw is None:
                return None
            columns[column] = RawCells.of(raw)
        return self.ids_of(columns, records.size)

    def ids_of(self, columns: Mapping[str, RawCells], size: int) -> FeatureIds | None:
        """Return the same of columns in the core's form, which may be more than are needed.

        Args:
            size: Rows of each of them; one of another size is shared.
        """
        if not self._names:
            return None
        read: list[Any] = [columns[column] for column in self._columns.values()]
        packed = self._packer.pack(read)
        if packed is None:
            return None
        shared = tuple(one.splits.numel() - 1 != size for one in read)
        return FeatureIds(self._names, torch.from_numpy(packed[0]), torch.from_numpy(packed[1]), size, shared)

    def floats(self, records: RawColumns) -> dict[str, Tensor] | None:
        """Return the numbers of all plain features, before they are scaled; None if something is odd."""
        if not self._floats:
            return None
        columns: dict[str, RawCells] = {}
        for name, one in self._floats.items():
            raw = records.columns.get(one.column or name)
            if raw is None or raw.nrows != records.size:
                return None
            columns[one.column or name] = RawCells.of(raw)
        return self.floats_of(columns, records.size)

    def floats_of(self, columns: Mapping[str, RawCells], size: int) -> dict[str, Tensor] | None:
        """Return the same of columns in the core's form, of so many rows each."""
        given: list[Any] = []
        for name, one in self._floats.items():
            cells = columns[one.column or name]
            if cells.texts is not None:
                return None
            values, rows = cells.values.contiguous().numpy(), cells.splits.contiguous().numpy()
            given.append((values, None, rows) if cells.values.dtype is torch.int64 else (None, values, rows))
        out = torch.empty((len(given), size))
        if not native.pack_numbers(given, size, out.numpy()):
            return None
        return dict(zip(self._floats, out.unsqueeze(2).unbind(0), strict=True))
