"""Statistics of records: what each column holds, in one pass and bounded memory.

Distinct values are estimated by a HyperLogLog sketch: 16 KiB a column, within about one
percent, and exact enough to be told from a count for a few thousand. Sketches of
different files can be merged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.data.records import Records
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor

KINDS = {torch.int64: "ids", torch.float32: "floats", torch.uint8: "strings"}

_BITS = 14
_REGISTERS = 1 << _BITS


class Distinct:
    """Counts different hashes, about."""

    def __init__(self) -> None:
        self._ranks: NDArray[np.uint8] = np.zeros(_REGISTERS, dtype=np.uint8)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Count uint64 hashes, whose bits must be as good as random."""
        place = (hashes >> np.uint64(64 - _BITS)).astype(np.int64)
        rest = hashes << np.uint64(_BITS) | np.uint64(1 << (_BITS - 1))
        # The place of the highest bit set, by way of the exponent of a double: 1 is the very first bit.
        rank = (64 - np.frexp(rest.astype(np.float64))[1] + 1).astype(np.uint8)
        np.maximum.at(self._ranks, place, rank)

    def merge(self, other: Distinct) -> None:
        np.maximum(self._ranks, other._ranks, out=self._ranks)

    def __len__(self) -> int:
        """Return the estimate."""
        bias = 0.7213 / (1 + 1.079 / _REGISTERS)
        estimate = bias * _REGISTERS**2 / float(np.exp2(-self._ranks.astype(np.float64)).sum())
        empty = int((self._ranks == 0).sum())
        if estimate <= 2.5 * _REGISTERS and empty:
            estimate = _REGISTERS * math.log(_REGISTERS / empty)  # few: better told from what is still empty
        return round(estimate)


@dataclass(slots=True)
class ColumnStatistics:
    """What one column holds."""

    kind: str
    """ids, floats or strings."""
    filled: int = 0
    """Records that have a value."""
    values: int = 0
    most: int = 0
    """Values of the record that has most."""
    low: float = math.inf
    high: float = -math.inf
    """Of numbers; of strings, their lengths."""
    total: float = 0.0
    distinct: Distinct = field(default_factory=Distinct)

    @property
    def mean(self) -> float:
        """Of all values; NaN where there is none."""
        return self.total / self.values if self.values else math.nan

    def add(self, column: RaggedTensor) -> None:
        lengths = column.row_lengths()
        self.filled += int((lengths > 0).sum())
        self.most = max(self.most, int(lengths.max()) if len(lengths) else 0)
        values, hashes = _numbers(column)
        self.values += len(values)
        if len(values):
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))
            self.total += float(values.sum(dtype=np.float64))
            self.distinct.add(hashes)


@dataclass(slots=True)
class Statistics:
    """What some records hold."""

    records: int = 0
    columns: dict[str, ColumnStatistics] = field(default_factory=dict)

    def add(self, records: Records) -> None:
        """Count more records."""
        self.records += len(records)
        for name in records.columns:
            column = records[name]
            kind = KINDS[column.dtype]
            known = self.columns.setdefault(name, ColumnStatistics(kind))
            known.kind = kind if known.kind == kind else "mixed"
            known.add(column)

    def to_json(self) -> dict[str, object]:
        """Return plain values, column by column in order of their names."""
        return {
            "records": self.records,
            "columns": {
                name: {
                    "kind": column.kind,
                    "fill": column.filled / self.records if self.records else 0.0,
                    "values": column.values,
                    "values_per_record": column.values / self.records if self.records else 0.0,
                    "most_values": column.most,
                    "distinct": len(column.distinct),
                    "low": column.low if column.values else None,
                    "mean": column.mean if column.values else None,
                    "high": column.high if column.values else None,
                }
                for name, column in sorted(self.columns.items())
            },
        }


def _numbers(column: RaggedTensor) -> tuple[NDArray[np.generic], NDArray[np.uint64]]:
    """Return the numbers of a column, of strings their lengths, and a hash for each value."""
    values = column.values
    if isinstance(values, RaggedTensor):
        flat, splits = values.flat_values.numpy(), values.row_splits.numpy()
        return np.diff(splits), _mixed(native.hash_strings(flat.tobytes(), splits, 0, 1))
    numbers = values.numpy()
    if numbers.dtype == np.float32:
        return numbers, _mixed(native.hash_floats(np.ascontiguousarray(numbers), 0, 1))
    return numbers, mix(numbers)


def _mixed(fids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Spread the 54 bits of a signature over all 64."""
    return mix(fids)
