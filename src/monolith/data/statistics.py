"""Statistics of the columns of records, in one pass and bounded memory.

Distinct values are counted exactly up to `EXACT` of them, by their hashes. Beyond, they are
estimated by a HyperLogLog sketch: 16 KiB a column, within about one percent; `is_exact` says
which. A value that is missing (an empty cell, null, NaN) is none of the values of a column.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import native
from monolith.data.records import Records, missing_rows
from monolith.feature.spec.times import read_times, without_empty_texts
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor

KINDS = {torch.int64: "ids", torch.float32: "floats", torch.uint8: "strings"}

EXACT = 1 << 17
"""Different values of a column that are counted one by one: 1 MiB of hashes."""

_BITS = 14
_REGISTERS = 1 << _BITS


class Distinct:
    """Counts different hashes: exactly while they are few, then about."""

    def __init__(self) -> None:
        self._ranks: NDArray[np.uint8] = np.zeros(_REGISTERS, dtype=np.uint8)
        self._seen: NDArray[np.uint64] | None = np.empty(0, dtype=np.uint64)
        """All hashes; None when there were too many."""

    @property
    def is_exact(self) -> bool:
        """Whether the number is a count and no estimate."""
        return self._seen is not None

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Count uint64 hashes, whose bits must be as good as random."""
        if self._seen is not None:
            seen = np.union1d(self._seen, hashes)
            self._seen = seen if len(seen) <= EXACT else None
        place = (hashes >> np.uint64(64 - _BITS)).astype(np.int64)
        rest = hashes << np.uint64(_BITS) | np.uint64(1 << (_BITS - 1))
        # The place of the highest bit set, by way of the exponent of a double: 1 is the very first bit.
        rank = (64 - np.frexp(rest.astype(np.float64))[1] + 1).astype(np.uint8)
        np.maximum.at(self._ranks, place, rank)

    def merge(self, other: Distinct) -> None:
        np.maximum(self._ranks, other._ranks, out=self._ranks)
        if self._seen is not None and other._seen is not None:
            seen = np.union1d(self._seen, other._seen)
            self._seen = seen if len(seen) <= EXACT else None
        else:
            self._seen = None

    def __len__(self) -> int:
        """Return the count, or the estimate."""
        if self._seen is not None:
            return len(self._seen)
        bias = 0.7213 / (1 + 1.079 / _REGISTERS)
        estimate = bias * _REGISTERS**2 / float(np.exp2(-self._ranks.astype(np.float64)).sum())
        empty = int((self._ranks == 0).sum())
        if estimate <= 2.5 * _REGISTERS and empty:
            # With few values, the number of empty registers gives the better estimate.
            estimate = _REGISTERS * math.log(_REGISTERS / empty)
        return round(estimate)


@dataclass(slots=True)
class Span:
    """The least, greatest and mean of some numbers."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """NaN if there is no number."""
        return self.total / self.count if self.count else math.nan

    def add(self, values: NDArray[np.generic]) -> None:
        if len(values):
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))
            self.total += float(values.sum(dtype=np.float64))
            self.count += len(values)


@dataclass(slots=True)
class ColumnStatistics:
    """The statistics of one column."""

    type: str
    """ids (whole numbers), floats or strings."""
    filled: int = 0
    """Records that have a value."""
    values: int = 0
    most: int = 0
    """Values of the record that has most."""
    numbers: Span = field(default_factory=Span)
    """Of numbers; of strings, their lengths in bytes."""
    seconds: Span | None = None
    """Of times; None if some value is not a time."""
    distinct: Distinct = field(default_factory=Distinct)

    @property
    def kind(self) -> str:
        """ids, floats, strings, or times."""
        return self.type if self.seconds is None else "times"

    @property
    def unit(self) -> str | None:
        """The unit of `span`, if it is not that of the values themselves."""
        return {"times": "Unix seconds", "strings": "bytes"}.get(self.kind)

    @property
    def span(self) -> Span:
        """The least, mean and greatest: number, length in bytes, or Unix second."""
        return self.numbers if self.seconds is None else self.seconds

    def add(self, column: RaggedTensor, is_time: bool) -> None:
        lengths = column.row_lengths()
        self.filled += int((~missing_rows(column)).sum())
        self.most = max(self.most, int(lengths.max()) if len(lengths) else 0)
        values, hashes = _numbers(column)
        if values.dtype.kind == "f":
            there = ~np.isnan(values.astype(np.float32))
            values, hashes = values[there], hashes[there]
        if not len(values):
            return
        if not self.values and (is_time or column.dtype is torch.uint8):
            self.seconds = Span()
        if self.seconds is not None:
            times = read_times(column, "iso")  # numbers are then seconds
            if (is_time or column.dtype is torch.uint8) and not bool(times.wrong.any()):
                self.seconds.add(times.seconds.flat_values.numpy())
            else:
                self.seconds = None
        self.values += len(values)
        self.numbers.add(values)
        self.distinct.add(hashes)


@dataclass(slots=True)
class Statistics:
    """The statistics of some records."""

    records: int = 0
    columns: dict[str, ColumnStatistics] = field(default_factory=dict)

    def add(self, records: Records, times: Collection[str] = ()) -> None:
        """Count more records.

        Args:
            times: Columns of Unix seconds, as the data says; texts in ISO 8601 are found to be times.
        """
        self.records += len(records)
        for name in records.columns:
            column = records[name]
            if column.dtype is torch.uint8:
                column = without_empty_texts(column)
            found = KINDS[column.dtype]
            known = self.columns.setdefault(name, ColumnStatistics(found))
            if len(column.flat_values):  # without a value, the type may be a guess
                known.type = found if known.type == found or not known.values else "mixed"
            known.add(column, name in times)

    def to_json(self) -> dict[str, object]:
        """Return plain values, column by column in order of their names."""
        return {
            "records": self.records,
            "columns": {
                name: {
                    "kind": column.kind,
                    "fill": column.filled / self.records if self.records else 0.0,
                    "missing": 1 - column.filled / self.records if self.records else 0.0,
                    "values": column.values,
                    "values_per_record": column.values / self.records if self.records else 0.0,
                    "most_values": column.most,
                    "distinct": len(column.distinct),
                    "distinct_is_exact": column.distinct.is_exact,
                    "unit": column.unit,
                    "low": column.span.low if column.values else None,
                    "mean": column.span.mean if column.values else None,
                    "high": column.span.high if column.values else None,
                }
                for name, column in sorted(self.columns.items())
            },
        }


def _numbers(column: RaggedTensor) -> tuple[NDArray[np.generic], NDArray[np.uint64]]:
    """Return the numbers of a column, of strings their lengths, and a hash for each value.

    A signature has 54 bits; `mix` spreads them over all 64, of which the sketch uses the highest.
    """
    values = column.values
    if isinstance(values, RaggedTensor):
        flat, splits = values.flat_values.numpy(), values.row_splits.numpy()
        return np.diff(splits), mix(native.hash_strings(flat.tobytes(), splits, 0, 1))
    numbers = values.numpy()
    if numbers.dtype == np.float32:
        return numbers, mix(native.hash_floats(np.ascontiguousarray(numbers), 0, 1))
    return numbers, mix(numbers)
