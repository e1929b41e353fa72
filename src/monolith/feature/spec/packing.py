"""Packing: plain features of a whole batch in two calls into the core, one for ids and one for numbers.

Most features are one column each, and most batches have nothing wrong in them. Those are read here, all at
once, since a call for each column would cost more than its work. If anything is odd (a value that cannot be
read, a column of another type, a missing number) nothing is packed, and `RawReader` reads feature by feature:
it finds the odd value and gives the same result for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.feature.spec.kinds import BucketFeature, FloatFeature, IdFeature
from monolith.tensors import RaggedTensor

if TYPE_CHECKING:
    from monolith.feature.spec.feature_spec import FeatureSpec
    from monolith.feature.spec.reading import RawColumns


@dataclass(frozen=True, slots=True)
class PackedIds:
    """The ids of some features, as a batch has them."""

    names: tuple[str, ...]
    ids: Tensor
    splits: Tensor
    rows: tuple[int, ...]
    """How many cells each feature has: one if its column is shared."""

    def ragged(self, name: str) -> RaggedTensor:
        """Return the ids of one feature."""
        place = self.names.index(name)
        first = sum(self.rows[:place])
        splits = self.splits[first : first + self.rows[place] + 1]
        begin, end = int(splits[0]), int(splits[-1])
        return RaggedTensor(self.ids[begin:end], splits - begin, validate=False)


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


def _plan_of(one: IdFeature | BucketFeature, slot: int | None) -> _Plan:
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


class Packer:
    """Packs the plain features of one spec. Safe from any thread."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._columns: dict[str, str] = {}
        self._floats: dict[str, FloatFeature] = {}
        plans: list[_Plan] = []
        for name, one in spec.read_features.items():
            is_bucket = isinstance(one, BucketFeature) and one.boundaries is not None
            if is_bucket or (isinstance(one, IdFeature) and one.weights is None):
                assert isinstance(one, IdFeature | BucketFeature)
                self._columns[name] = one.column or name
                plans.append(_plan_of(one, spec.slots.get(name)))
            elif isinstance(one, FloatFeature) and one.width == 1:
                self._floats[name] = one
        self._names = tuple(self._columns)
        self._plans = plans
        self._packer = native.IdPacker(plans, torch.uint8, torch.int64, torch.float32)
        self.packs_all = len(plans) + len(self._floats) == len(spec.read_features)
        """Whether all features are plain."""

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

    def ids(self, records: RawColumns) -> PackedIds | None:
        """Return the ids of all plain features; None if something is odd."""
        columns: dict[str, RawCells] = {}
        for column in self._columns.values():
            raw = records.columns.get(column)
            if raw is None:
                return None
            columns[column] = RawCells.of(raw)
        return self.ids_of(columns)

    def ids_of(self, columns: Mapping[str, RawCells]) -> PackedIds | None:
        """Return the same of columns in the core's form, which may be more than are needed."""
        if not self._names:
            return None
        read: list[Any] = [columns[column] for column in self._columns.values()]
        packed = self._packer.pack(read)
        if packed is None:
            return None
        rows = tuple(one.splits.numel() - 1 for one in read)
        return PackedIds(self._names, torch.from_numpy(packed[0]), torch.from_numpy(packed[1]), rows)

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
