"""Packing: plain features of a whole batch in two calls into the core, one for ids and one for numbers.

Most features are one column each, and most batches have nothing wrong in them. Those are read here, all at
once, since a call for each column would cost more than its work. Where anything is odd (a value that cannot
be read, a column of another type, a number that is missing) nothing is packed, and `RawReader` goes feature
by feature, which finds out what it was and makes the same of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.feature.spec.kinds import AnyFeature, BucketFeature, FloatFeature, IdFeature
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
    """How many cells each feature has: one where its column is shared."""

    def ragged(self, name: str) -> RaggedTensor:
        """Return the ids of one feature."""
        place = self.names.index(name)
        first = sum(self.rows[:place])
        splits = self.splits[first : first + self.rows[place] + 1]
        begin, end = int(splits[0]), int(splits[-1])
        return RaggedTensor(self.ids[begin:end], splits - begin, validate=False)


class RawCells(NamedTuple):
    """A column as the core takes it: one of texts, whole numbers and numbers, and where each row begins."""

    splits: NDArray[np.int64]
    texts: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None
    """Their bytes, and where each text begins."""
    ints: NDArray[np.int64] | None = None
    floats: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, raw: RaggedTensor) -> RawCells:
        """Return a column of records in this form."""
        values, splits = raw.values, raw.row_splits.contiguous().numpy()
        if isinstance(values, RaggedTensor):
            texts = values.flat_values.contiguous().numpy(), values.row_splits.contiguous().numpy()
            return cls(splits, texts=texts)
        numbers = values.contiguous().numpy()
        return cls(splits, ints=numbers) if values.dtype is torch.int64 else cls(splits, floats=numbers)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the core reads one feature, by what its column holds; None where it cannot hold that."""

    column: str
    of_texts: native.RawKind | None
    of_ints: native.RawKind | None
    of_floats: native.RawKind | None
    boundaries: Any
    rounded: Any
    """The boundaries as a column of floats would have them: one written as a number is that number."""
    separator: str | None
    slot: int | None


def _plan_of(name: str, one: AnyFeature, slot: int | None) -> _Plan:
    kinds = native.RawKind
    if isinstance(one, BucketFeature):
        exact = np.array(one.boundaries, dtype=np.float64)
        rounded = exact.astype(np.float32).astype(np.float64)
        column, buckets = one.column or name, (kinds.INT_BUCKETS, kinds.FLOAT_BUCKETS)
        return _Plan(column, None, *buckets, exact, rounded, one.separator, slot)
    assert isinstance(one, IdFeature)
    is_text = one.kind == "string"
    of_texts, of_ints = (kinds.HASHED, None) if is_text else (kinds.WHOLE_TEXTS, kinds.INTS)
    return _Plan(one.column or name, of_texts, of_ints, None, None, None, one.separator, slot)


class Packer:
    """Packs the plain features of one spec. Safe from any thread."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._plans: list[_Plan] = []
        self._floats: dict[str, FloatFeature] = {}
        names = []
        for name, one in spec.features.items():
            is_bucket = isinstance(one, BucketFeature) and one.boundaries is not None
            if is_bucket or (isinstance(one, IdFeature) and one.weights is None):
                names.append(name)
                self._plans.append(_plan_of(name, one, spec.slots.get(name)))
            elif isinstance(one, FloatFeature) and one.width == 1:
                self._floats[name] = one
        self._names = tuple(names)
        self.packs_all = len(self._plans) + len(self._floats) == len(spec.features)
        """Whether all features are plain."""

    def ids(self, records: RawColumns) -> PackedIds | None:
        """Return the ids of all plain features; None where something is odd."""
        columns = records.columns
        wanted = {plan.column for plan in self._plans}
        if not wanted <= columns.keys():
            return None
        return self.ids_of({name: RawCells.of(columns[name]) for name in wanted})

    def ids_of(self, columns: Mapping[str, RawCells]) -> PackedIds | None:
        """Return the same of columns in the core's form, which may have more than are needed."""
        if not self._plans:
            return None
        features: list[Any] = []
        rows: list[int] = []
        for plan in self._plans:
            splits, texts, ints, floats = columns[plan.column]
            if texts is not None:
                kind, boundaries = plan.of_texts, None
            elif ints is not None:
                kind, boundaries = plan.of_ints, plan.boundaries
            else:
                kind, boundaries = plan.of_floats, plan.rounded
            if kind is None:
                return None
            features.append((kind, texts, ints, floats, splits, boundaries, plan.separator, plan.slot))
            rows.append(len(splits) - 1)
        ids, cells, fine = native.pack_ids(features)
        if not fine:
            return None
        return PackedIds(self._names, torch.from_numpy(ids), torch.from_numpy(cells), tuple(rows))

    def floats(self, records: RawColumns) -> dict[str, Tensor] | None:
        """Return the numbers of all plain features, before they are scaled; None where something is odd."""
        if not self._floats:
            return None
        columns: dict[str, RawCells] = {}
        for name, one in self._floats.items():
            raw = records.columns.get(one.column or name)
            if raw is None or raw.dtype is torch.uint8 or raw.nrows != records.size:
                return None
            columns[one.column or name] = RawCells.of(raw)
        return self.floats_of(columns, records.size)

    def floats_of(self, columns: Mapping[str, RawCells], size: int) -> dict[str, Tensor] | None:
        """Return the same of columns in the core's form, of so many rows each."""
        given: list[Any] = []
        for name, one in self._floats.items():
            splits, texts, ints, floats = columns[one.column or name]
            if texts is not None:
                return None
            given.append((ints, floats, splits))
        out = torch.empty((len(given), size))
        if not native.pack_numbers(given, size, out.numpy()):
            return None
        return dict(zip(self._floats, out.unsqueeze(2).unbind(0), strict=True))
