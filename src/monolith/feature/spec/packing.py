"""Packing: plain features of a whole batch in two calls into the core, one for ids and one for numbers.

Most features are one column each, and most batches have nothing wrong in them. Those are read here, all at
once, since a call for each column would cost more than its work. Where anything is odd (a value that cannot
be read, a column of another type, a number that is missing) nothing is packed, and `RawReader` goes feature
by feature, which finds out what it was and makes the same of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """How many cells each feature has: one where its column is shared."""

    def ragged(self, name: str) -> RaggedTensor:
        """Return the ids of one feature."""
        place = self.names.index(name)
        first = sum(self.rows[:place])
        splits = self.splits[first : first + self.rows[place] + 1]
        begin, end = int(splits[0]), int(splits[-1])
        return RaggedTensor(self.ids[begin:end], splits - begin, validate=False)


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
numbers and of numbers, each None where it cannot hold that; boundaries of the last two; separator, slot."""


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
        for name, one in spec.features.items():
            is_bucket = isinstance(one, BucketFeature) and one.boundaries is not None
            if is_bucket or (isinstance(one, IdFeature) and one.weights is None):
                assert isinstance(one, IdFeature | BucketFeature)
                self._columns[name] = one.column or name
                plans.append(_plan_of(one, spec.slots.get(name)))
            elif isinstance(one, FloatFeature) and one.width == 1:
                self._floats[name] = one
        self._names = tuple(self._columns)
        self._packer = native.IdPacker(plans, torch.uint8, torch.int64, torch.float32)

    def ids(self, records: RawColumns) -> PackedIds | None:
        """Return the ids of all plain features; None where something is odd."""
        if not self._names:
            return None
        columns = records.columns
        read: list[tuple[object, object | None, object]] = []
        rows: list[int] = []
        for column in self._columns.values():
            raw = columns.get(column)
            if raw is None:
                return None
            values, splits = raw.values, raw.row_splits
            if isinstance(values, RaggedTensor):
                read.append((values.flat_values, values.row_splits, splits))
            else:
                read.append((values, None, splits))
            rows.append(splits.numel() - 1)
        packed = self._packer.pack(read)
        if packed is None:
            return None
        return PackedIds(self._names, torch.from_numpy(packed[0]), torch.from_numpy(packed[1]), tuple(rows))

    def floats(self, records: RawColumns) -> dict[str, Tensor] | None:
        """Return the numbers of all plain features, before they are scaled; None where something is odd."""
        if not self._floats:
            return None
        columns: list[Any] = []
        for name, one in self._floats.items():
            raw = records.columns.get(one.column or name)
            if raw is None or raw.dtype is torch.uint8 or raw.nrows != records.size:
                return None
            values, rows = raw.flat_values.contiguous().numpy(), raw.row_splits.contiguous().numpy()
            columns.append((values, None, rows) if raw.dtype is torch.int64 else (None, values, rows))
        out = torch.empty((len(columns), records.size))
        if not native.pack_numbers(columns, records.size, out.numpy()):
            return None
        return dict(zip(self._floats, out.unsqueeze(2).unbind(0), strict=True))
