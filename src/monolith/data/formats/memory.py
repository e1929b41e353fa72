"""Python objects and arrays as records, and a source of records in memory.

For small data, for tests, and for tables in numpy or pandas:

    MemorySource({"user": users, "tags": [[1, 2], [], [3]], "label": clicks}, batch_size=512)

Objects by key, of JSON or of Python, become records with the declared type of each column. A value is a
number, a text, a bool, a datetime, or a list of these; a missing key, None, NaN and [] are no values. Whole
numbers and bools are int64, other numbers float32, datetimes Unix seconds. In a list of numbers a missing
item stays, as NaN; in other lists it is dropped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time
from math import floor, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.data.records import Records, text_rows
from monolith.data.shuffling import Epochs, check_epochs_unset, permutation
from monolith.data.source import Position, Shard, ShardChoice, Source
from monolith.errors import ConfigError, DataError, RestoreError, TensorArgumentError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME
from monolith.tensors import RaggedTensor

_EXACT = 1 << 24
"""Whole numbers up to here are the same as float32."""

Cell = list[Any]
ColumnType = torch.dtype | type[int] | type[float] | type[str] | str
"""The type of a column: int, float or str; "int64", "float32" or "text"; or the dtype that records have."""

TYPES: dict[ColumnType, torch.dtype] = {
    int: torch.int64,
    float: torch.float32,
    str: torch.uint8,
    "int64": torch.int64,
    "float32": torch.float32,
    "text": torch.uint8,
    torch.int64: torch.int64,
    torch.float32: torch.float32,
    torch.uint8: torch.uint8,
    TIME: TIME,
}


def column_types(columns: Mapping[str, ColumnType], who: str) -> dict[str, torch.dtype]:
    """Return the dtype of each column; ConfigError that begins with `who` for a type that there is not."""
    if wrong := {name: kind for name, kind in columns.items() if kind not in TYPES}:
        name, kind = next(iter(wrong.items()))
        raise ConfigError(f"{who}: column {name!r} must be int, float or str, got {kind!r}")
    return {name: TYPES[kind] for name, kind in columns.items()}


def json_object(text: bytes) -> dict[str, Any]:
    """Return the object in a JSON text; ValueError if it is another value."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got a {type(found).__name__}")
    return found


def are_whole(values: NDArray[np.float64]) -> bool:
    """Whether doubles are better held by int64 than by float32, as ids of which some are missing and Unix
    times with fractions are: some are beyond 2^24, from where on float32 has no fractions and not all whole
    numbers, and the rest are whole. NaN is skipped."""
    there = values[~np.isnan(values)]
    sizes = np.abs(there)
    if not len(there) or not _EXACT < sizes.max() < 2.0**63:
        return False
    return bool(((np.floor(there) == there) | (sizes > _EXACT)).all())


def is_missing(value: Any) -> bool:
    """Whether a value is none: None, NaN, or the NaT and NA of pandas, which need not be installed."""
    if value is None:
        return True
    if isinstance(value, float | np.floating | np.datetime64):
        return bool(value != value)  # noqa: PLR0124  as NaN and NaT are
    return type(value).__name__ in ("NAType", "NaTType")


def values_of(value: Any) -> Cell:
    """Return the values of one key: none, one or several. What is missing in a list is None there."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "M":
        value = seconds_of(value)
    elif isinstance(value, np.ndarray | np.generic | torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [None if is_missing(one) else _second(one) for one in value]
    return [] if is_missing(value) else [_second(value)]


def seconds_of(times: Any) -> Any:
    """Return datetimes of numpy as Unix seconds, None for NaT: a list, or one of them."""
    seconds = times.astype("M8[s]").astype(np.int64)
    plain = seconds.tolist()
    if not times.ndim:
        return None if np.isnat(times) else plain
    return [None if gone else one for gone, one in zip(np.isnat(times).tolist(), plain, strict=True)]


def _second(value: Any) -> Any:
    """Return the Unix second of a datetime or a date, which are UTC without a zone; others as they are."""
    if isinstance(value, np.datetime64):
        return seconds_of(value)
    if not isinstance(value, date):
        return value
    moment = value if isinstance(value, datetime) else datetime.combine(value, time())
    return floor((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())


def wider(known: torch.dtype | None, values: Cell) -> Any:
    """Return the narrowest type for what there was so far and these values; None while there are none."""
    for value in values:
        if isinstance(value, str | bytes):
            return torch.uint8
        if isinstance(value, float) and known is not torch.uint8:
            known = torch.float32
        elif isinstance(value, int):
            known = known or torch.int64
    return known


def read_row(
    found: Mapping[str, Any], types: Mapping[str, torch.dtype], wanted: Mapping[str, torch.dtype]
) -> dict[str, Cell]:
    """Return the cells of a record that are wanted, each value of its column's type.

    Raises:
        ValueError: A key has no type, or a value is of another.
    """
    if unknown := [name for name in found if name not in types]:
        raise ValueError(f"key {unknown[0]!r} is not among those of the first records; give its type")
    return cells_of(found, wanted)


def cells_of(found: Mapping[str, Any], wanted: Mapping[str, torch.dtype]) -> dict[str, Cell]:
    """Return the cells of an object that are wanted; other keys are ignored.

    Raises:
        ValueError: A value is not of its column's type.
    """
    return {
        name: [
            nan if value is None else _value(value, dtype, name)
            for value in values_of(found.get(name))
            if value is not None or dtype is torch.float32
        ]
        for name, dtype in wanted.items()
    }


def _value(value: Any, dtype: torch.dtype, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if dtype is TIME and isinstance(value, int | float):
        return repr(value).encode()  # as exact as it came
    if dtype is TIME:
        dtype = torch.uint8
    if dtype is torch.uint8 and isinstance(value, bytes):
        return value
    if dtype is torch.uint8 and isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if dtype is torch.float32 and isinstance(value, int | float):
        return float(value)
    if dtype is torch.int64 and isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"key {name!r}: {value} does not fit into 64 bits")
        return value - (1 << 64) if value >= 1 << 63 else value  # an unsigned id keeps its bits
    kind = {torch.uint8: "a text", torch.float32: "a number", torch.int64: "a whole number"}[dtype]
    raise ValueError(f"key {name!r}: {value!r:.40} is not {kind}")


def kind_of_cells(cells: Iterable[Any], dtype: torch.dtype) -> ColumnKind:
    """Return how a column of such cells, each a value, a list of values or None, is written again."""
    cells = list(cells)
    single = not any(isinstance(cell, list | tuple | np.ndarray | torch.Tensor) for cell in cells)
    values = [value for cell in cells for value in values_of(cell)]
    if dtype is TIME:  # as exact as it came: see `_value`
        dtype = wider(None, values) or torch.int64
    if dtype is torch.uint8:
        is_bytes = any(isinstance(value, bytes) for value in values)
        return ColumnKind("binary" if is_bytes else "string", single)
    if dtype is torch.float32:
        return ColumnKind("double", single)
    if values and all(isinstance(value, bool) for value in values):
        return ColumnKind("bool", single)
    is_unsigned = any(isinstance(value, int) and value >= 1 << 63 for value in values)
    return ColumnKind("uint64" if is_unsigned else "int64", single)


def rows_as_records(
    rows: Sequence[Mapping[str, Cell]],
    types: Mapping[str, torch.dtype],
    kinds: Mapping[str, ColumnKind] | None = None,
) -> Records:
    """Turn rows into columns."""
    columns = {}
    for name, dtype in types.items():
        lengths = torch.tensor([len(row[name]) for row in rows], dtype=torch.int64)
        flat = [value for row in rows for value in row[name]]
        values = text_rows(flat) if dtype in (torch.uint8, TIME) else torch.tensor(flat, dtype=dtype)
        columns[name] = RaggedTensor.from_row_lengths(values, lengths, validate=False)
    return Records(len(rows), columns, kinds=kinds or {})


Column = Any
"""A RaggedTensor; a tensor or array of shape (records,) or (records, k); a list with a number, a text, a list
of these, a datetime or None per record; or what `numpy.asarray` makes an array of, such as a column of
pandas."""


class MemorySource(Source):
    """Yields records that are at hand, in batches.

    Args:
        data: Records, or columns by name: a dict, a DataFrame.
        worker: Which of `num_workers` this is; record i is for worker i modulo `num_workers`. By default
            what `read_shard` says.
        epochs: How often to read the records; None without end. Batches continue across epochs.
        shuffle_seed: Puts each epoch into an order of its own; None leaves the order.
        drop_remainder: Leave out the last batch if it is shorter.

    Examples:
        >>> from monolith import MemorySource
        >>> source = MemorySource({"user": [17, 18, 19], "price": [0.5, 2.0, 1.0]}, batch_size=2)
        >>> [records["user"].flat_values.tolist() for records in source]
        [[17, 18], [19]]
    """

    repeats_order = True
    live = False

    def __init__(
        self,
        data: Records | Mapping[str, Column],
        *,
        batch_size: int,
        worker: int | None = None,
        num_workers: int | None = None,
        epochs: int | None = 1,
        shuffle_seed: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"memory source: batch_size must be at least 1, got {batch_size}")
        self._choice = ShardChoice("memory source", worker, num_workers)
        if epochs is not None and epochs < 1:
            raise ConfigError(f"memory source: epochs must be at least 1, or None for ever, got {epochs}")
        self._records = replace(data, complete=True) if isinstance(data, Records) else to_records(data)
        self._batch_size = batch_size
        self._epochs = epochs
        self._total: int | None = 0
        self._seed = shuffle_seed
        self._drop_remainder = drop_remainder
        self._next = 0
        self._ordered: tuple[int, Tensor] | None = None
        self._settings: Position = {}  # until the shard is settled

    @property
    def reads_again(self) -> bool:
        return self._epochs != 1

    def read_shard(self, shard: Shard) -> None:
        """Read every `shard.workers`-th record."""
        self._choice.choose(shard)

    def size(self) -> int | None:
        """Return how many records there are to read; None without end."""
        self._settle()
        return self._total

    def fraction_read(self, position: Position, records: int = 0) -> float | None:
        """Return the fraction of the records before a position; see `Stream.fraction_read`."""
        total = self.size()
        return None if not total else min(1.0, (position["next"] + records) / total)

    def read_epochs(self, epochs: Epochs) -> None:
        """Read all records several times; see `Epochs`. An order of its own, if it has one, stays."""
        check_epochs_unset("memory source", self._epochs, settled=bool(self._settings))
        self._epochs = epochs.count
        if self._seed is None and epochs.shuffle is not None:
            self._seed = epochs.seed

    def __iter__(self) -> Iterator[Records]:
        self._settle()
        while self._total is None or self._next < self._total:
            begin, end = self._next, self._next + self._batch_size
            if self._total is not None and end > self._total:
                end = self._total
                if self._drop_remainder:
                    self._next = end
                    return
            self._next = end
            yield self._records.take(self._rows(begin, end))

    def position(self) -> Position:
        self._settle()
        return {**self._settings, "next": self._next}

    def restore(self, position: Position) -> None:
        if not isinstance(position, Mapping) or position.get("source") != "memory":
            raise RestoreError(f"cannot restore a memory source from {position!r:.200}: of another kind")
        self._settle()
        for name, value in self._settings.items():
            if name not in position or position[name] != value:
                raise RestoreError(
                    f"cannot restore a memory source: the position was taken with {name} "
                    f"{position.get(name)}, this one has {value}"
                )
        number = position.get("next")
        if not isinstance(number, int) or number < 0 or (self._total is not None and number > self._total):
            raise RestoreError(f"cannot restore a memory source: there is no record {number!r}")
        self._next = number

    def _settle(self) -> None:
        """Select the records of this worker, once."""
        if self._settings:
            return
        shard = self._choice.settle()
        size = len(self._records)
        self._records = self._records.take(torch.arange(min(shard.worker, size), size, shard.workers))
        size, epochs = len(self._records), self._epochs
        self._total = None if epochs is None and size else size * (epochs or 1)
        self._settings = {"source": "memory", "records": size, "shard": list(shard), "seed": self._seed}

    def _rows(self, begin: int, end: int) -> Tensor:
        size = len(self._records)
        if self._seed is None:
            return torch.arange(begin, end) % size
        parts = []
        while begin < end:
            epoch, first = divmod(begin, size)
            count = min(size - first, end - begin)
            if self._ordered is None or self._ordered[0] != epoch:
                self._ordered = (epoch, permutation(size, self._seed, epoch))
            parts.append(self._ordered[1][first : first + count])
            begin += count
        return torch.cat(parts)


def to_records(columns: Mapping[str, Column]) -> Records:
    """Return columns by name as records; whole numbers and bools become int64, others float32, text bytes."""
    made = {str(name): to_column(columns[name], str(name)) for name in columns}
    sizes = {name: column.nrows for name, column in made.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"memory: columns must have one row per record each, got {sizes}")
    kinds = {name: _kind(columns[name], column) for name, column in zip(columns, made.values(), strict=True)}
    kinds = {str(name): kind for name, kind in kinds.items()}
    return Records(next(iter(sizes.values()), 0), made, complete=True, kinds=kinds)


def _kind(values: Column, column: RaggedTensor) -> ColumnKind:
    """Return how the caller represented a column, so that it is written the same way again."""
    if isinstance(values, RaggedTensor):
        names = {torch.int64: "int64", torch.float32: "float", torch.uint8: "binary"}
        return ColumnKind(names[column.dtype], single=False)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return kind_of_cells(values, column.dtype)
    array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype == object or array.dtype.kind in "SU":
        return kind_of_cells(array.tolist(), column.dtype)
    named = {"float64": "double", "float32": "float", "float16": "double"}
    return ColumnKind(named.get(array.dtype.name, array.dtype.name), array.ndim == 1)


def to_column(values: Column, name: str = "") -> RaggedTensor:
    """Return one column as records store it."""
    try:
        if isinstance(values, RaggedTensor):
            return _typed(values)
        if isinstance(values, Tensor):
            return _dense(values)
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):
            return _from_rows(values)
        array = np.asarray(values)
        if array.dtype.kind == "M":
            return _from_rows(seconds_of(array))
        if array.dtype == np.float64 and array.ndim == 1 and are_whole(array):
            return _from_rows(array.tolist())
        if array.dtype == object or array.dtype.kind in "SU":
            return _from_rows(array.tolist())
        return _dense(torch.from_numpy(np.array(array)))
    except (TensorArgumentError, TypeError, ValueError, OverflowError) as cause:
        raise DataError(f"memory: cannot read column {name!r}: {cause}") from cause


def _dense(values: Tensor) -> RaggedTensor:
    if values.ndim not in (1, 2):
        raise DataError(f"a tensor must have the shape (records,) or (records, k), got {tuple(values.shape)}")
    each = 1 if values.ndim == 1 else values.shape[1]
    lengths = torch.full((len(values),), each, dtype=torch.int64)
    return _typed(RaggedTensor.from_row_lengths(values.reshape(-1), lengths, validate=False))


def _typed(column: RaggedTensor) -> RaggedTensor:
    dtype = column.dtype
    if dtype in (torch.int64, torch.float32) or (dtype is torch.uint8 and column.ragged_rank == 2):
        return column
    if dtype is torch.uint64:
        return column.with_flat_values(column.flat_values.view(torch.int64))
    return column.with_flat_values(
        column.flat_values.to(torch.float32 if dtype.is_floating_point else torch.int64)
    )


def _from_rows(rows: Sequence[Any]) -> RaggedTensor:
    lists = [values_of(row) for row in rows]
    there = [value for row in lists for value in row if value is not None]
    is_number = any(isinstance(value, float | np.floating) for value in there)
    if not is_number:  # in a list of numbers, a missing item keeps its position
        lists = [[value for value in row if value is not None] for row in lists]
    flat: list[Any] = [nan if value is None else value for row in lists for value in row]
    lengths = torch.tensor([len(row) for row in lists], dtype=torch.int64)
    if any(isinstance(value, str | bytes) for value in flat):
        if strange := [value for value in flat if not isinstance(value, str | bytes)]:
            raise DataError(f"it has texts, and {strange[0]!r}")
        texts = [value.encode() if isinstance(value, str) else value for value in flat]
        return RaggedTensor.from_row_lengths(text_rows(texts), lengths, validate=False)
    whole = all(isinstance(value, int | np.integer | np.bool_) for value in flat)
    if whole:
        values = torch.from_numpy(np.array([_signed(int(value)) for value in flat], dtype=np.int64))
    else:
        doubles = np.array([float(value) for value in flat])
        if are_whole(doubles):
            return _from_rows(
                [[None if value is None else int(value // 1) for value in row] for row in lists]
            )
        values = torch.from_numpy(doubles.astype(np.float32))
    return RaggedTensor.from_row_lengths(values, lengths, validate=False)


def _signed(number: int) -> int:
    """Return an unsigned id as the int64 of the same bits."""
    return number - (1 << 64) if 1 << 63 <= number < 1 << 64 else number
