"""Records: consecutive examples, column by column.

Sources yield them and transforms work on them. A column is ragged: a record has any number of
values of each feature, none included. There is no object per record anywhere, so a thousand
records cost little more than one.

Columns with a meaning have these names:

    label            float32, as many as there are tasks
    instance_weight  float32, one
    line_id.FIELD    what identifies the event: uid, req_time, item_id (int64), actions, pre_actions
                     (int64, many), chnid, sample_rate (float32), user_id, device_type (bytes) and so on
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.data.row_gathering import GatheredColumns, RowBlock, Rows, View, bytes_of
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, ColumnKind, FeatureIds, FeatureSpec
from monolith.feature.batches import newest_of_each
from monolith.feature.spec import UnmovedRows
from monolith.table.arguments import MAX_EVENT_TIME, wrong_second
from monolith.tensors import RaggedTensor, ranges

LABEL = "label"
WEIGHT = "instance_weight"
LINE_ID = "line_id."
"""What the columns of a LineId begin with."""

REQ_TIME = LINE_ID + "req_time"

DTYPES = (torch.int64, torch.float32, torch.uint8)
"""Ids and whole numbers, numbers, and the bytes of strings."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Some records, by column, in order. Never changes.

    Shapes: n records, v values of one column.

        int64, float32    values (v,), row_splits (n + 1,): values of record i start at row_splits[i]
        strings           uint8 (bytes,) in rows (v,) of rows (n,): ragged rank 2

    Examples:
        >>> import torch
        >>> from monolith import MemorySource
        >>> [records] = MemorySource({"user": [17, 18], "tags": [[3, 9], []]}, batch_size=2)
        >>> records["tags"].flat_values, records["tags"].row_splits
        (tensor([3, 9]), tensor([0, 2, 2]))
        >>> records.take(torch.tensor([1, 0]))["user"].flat_values  # the same records in another order
        tensor([18, 17])
    """

    size: int
    """How many there are."""
    columns: Mapping[str, RaggedTensor]
    """By name: int64 or float32 of ragged rank 1, or strings: uint8 of ragged rank 2."""
    shared: frozenset[str] = field(default_factory=frozenset)
    """Columns of a single row that every record has, such as the user of a whole request."""
    complete: bool = False
    """Whether a column that is not here is not in the data at all, as in a table. False if each record has
    columns of its own, so the next records may have it."""
    kinds: Mapping[str, ColumnKind] = field(default_factory=dict)
    """By name: how the data stores a column, if that is known."""
    _block: RowBlock | None = field(default=None, init=False, repr=False)
    """The columns as the core gathers from them, once that was asked for."""

    def __post_init__(self) -> None:
        if isinstance(self.columns, GatheredColumns):
            return  # rows of records that were checked
        for name, column in self.columns.items():
            rows = 1 if name in self.shared else self.size
            if column.nrows != rows:
                raise DataError(f"records: column {name!r} has {column.nrows} rows instead of {rows}")
            rank = 2 if column.dtype is torch.uint8 else 1
            if column.dtype not in DTYPES or column.ragged_rank != rank or column.flat_values.ndim != 1:
                raise DataError(
                    f"records: column {name!r} must be ragged int64 or float32, or strings as uint8 of "
                    f"ragged rank 2, got {column!r}"
                )
        if unknown := self.shared - self.columns.keys():
            raise DataError(f"records: shared names columns that are not there: {sorted(unknown)}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, name: str) -> RaggedTensor:
        """Return a column with one row per record, also if it is shared."""
        if name not in self.columns:
            raise DataError(f"records have no column {name!r}; {known_columns(name, self.columns)}")
        column = self.columns[name]
        if name not in self.shared:
            return column
        return take_rows(column, torch.zeros(self.size, dtype=torch.int64))

    def take(self, rows: Tensor) -> Records:
        """Return the records at these positions, int64, in any order and as often as they are given.

        Values are moved when the first column is looked at; see `row_gathering`.
        """
        if (chosen := self._choose(rows.numpy())) is not None:
            return self._with(len(rows), chosen)
        return Records(
            len(rows),
            {
                name: column if name in self.shared else take_rows(column, rows)
                for name, column in self.columns.items()
            },
            self.shared,
            self.complete,
            self.kinds,
        )

    def keep(self, mask: Tensor) -> Records:
        """Return the records where the bool `mask` is True."""
        return self if bool(checked_mask(self, mask).all()) else self.take(mask.nonzero().squeeze(1))

    def slice(self, begin: int, end: int) -> Records:
        """Return records [begin, end). Values are moved as in `take`."""
        begin = min(max(begin, 0), self.size)
        end = min(max(begin, end), self.size)
        if (begin, end) == (0, self.size):
            return self
        if (chosen := self._choose(slice(begin, end))) is not None:
            return self._with(end - begin, chosen)
        return Records(
            end - begin,
            {
                name: column if name in self.shared else slice_rows(column, begin, end)
                for name, column in self.columns.items()
            },
            self.shared,
            self.complete,
            self.kinds,
        )

    @property
    def nbytes(self) -> int:
        """Memory of all columns; of rows that were not moved yet, that of the chunks they are in."""
        if isinstance(self.columns, GatheredColumns):
            return self.columns.nbytes
        return sum(map(bytes_of, self.columns.values()))

    def prepare(self) -> None:
        """Make `take` and `slice` cheap from now on; for a thread that has time for it."""
        self._choose(slice(0, 0))

    def glance(self) -> Records:
        """Return the same records for a look at a few columns, such as those that a filter decides by.

        Looking at a column moves its values alone, so that of records which are dropped the rest never moves.
        """
        columns = self.columns
        if not isinstance(columns, GatheredColumns):
            return self
        return self._with(self.size, columns.one_by_one())

    @property
    def unmoved(self) -> UnmovedRows | None:
        """Where the values of all columns are, if none of them was looked at yet and none is shared."""
        return self.columns.unmoved if isinstance(self.columns, GatheredColumns) else None

    def in_blocks(self) -> UnmovedRows | None:
        """Return where the core finds the values of all columns; None if some are shared. Moves nothing."""
        chosen = self._choose(slice(0, self.size))
        return None if chosen is None else chosen.unmoved

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of the values of a column that is there. Moves nothing."""
        if isinstance(self.columns, GatheredColumns):
            return self.columns.dtype_of(name)
        return self.columns[name].dtype

    def views(self, names: Sequence[str]) -> list[View]:
        """Return where the core finds the values of some columns that are there: one row per record."""
        if (places := self.in_blocks()) is not None:
            numbers = [places.numbers[name] for name in names]
            return [(places.blocks, places.block_of, places.rows, numbers)]
        found: list[View] = []
        for name in names:
            shared = name in self.shared
            rows = np.zeros(self.size, np.int64) if shared else np.arange(self.size)
            found.append(((RowBlock.copied(self.columns[name]),), None, rows, [0]))
        return found

    def mark(self, key: object, found: Tensor) -> None:
        """Keep what was found about each record, where it lies: those taken out of these have it, too.

        For the thread that made the records, before another one has them. Does nothing if columns are shared.

        Args:
            key: By which `marks` finds it, the same object.
            found: bool, one per record.
        """
        places = self.in_blocks()
        if places is not None and len(places.blocks) == 1:
            marks = np.zeros(len(places.blocks[0]), np.uint8)
            marks[places.rows] = found.numpy()
            places.blocks[0].mark(key, marks)

    def marks(self, key: object) -> Tensor | None:
        """Return the marks under a key; None if there are none, or values were moved since."""
        places = self.unmoved
        if places is None:
            return None
        found = native.marked_rows(places.blocks, places.block_of, places.rows, key)
        return None if found is None else torch.from_numpy(found.view(np.bool_))

    def _choose(self, rows: Rows) -> GatheredColumns | None:
        """Return some rows, to be moved later; None if only this class can move them: some are shared."""
        if isinstance(self.columns, GatheredColumns) and (found := self.columns.take(rows)) is not None:
            return found
        if self.shared or not self.columns:
            return None
        if self._block is None:
            object.__setattr__(self, "_block", RowBlock.of(self.size, self.columns))
            if self._block is None:
                return None
        if isinstance(rows, slice):
            return GatheredColumns.of(self._block, np.arange(rows.start, rows.stop))
        # A copy: the caller may change its own. Numbers below 0 count from the end, as torch has them.
        return GatheredColumns.of(self._block, np.where(rows < 0, rows + self.size, rows))

    def _with(self, size: int, columns: GatheredColumns) -> Records:
        return Records(size, columns, self.shared, self.complete, self.kinds)

    def with_columns(self, columns: Mapping[str, RaggedTensor]) -> Records:
        """Return the same records with these columns added, or in place of those of the same name."""
        return Records(
            self.size,
            {**self.columns, **columns},
            self.shared - columns.keys(),
            self.complete,
            {name: kind for name, kind in self.kinds.items() if name not in columns},
        )

    def select(self, names: Iterable[str]) -> Records:
        """Return the same records with these columns only; missing ones are skipped."""
        wanted = [name for name in names if name in self.columns]
        return Records(
            self.size,
            {name: self.columns[name] for name in wanted},
            self.shared & set(wanted),
            self.complete,
            {name: self.kinds[name] for name in wanted if name in self.kinds},
        )

    def strings(self, name: str) -> list[list[bytes]]:
        """Return a column of strings as Python objects, for people to look at.

        Raises:
            DataError: The column holds numbers. One without any value may be of any type.
        """
        column = self.columns.get(name)
        if column is not None and column.dtype is not torch.uint8 and len(column.flat_values):
            raise DataError(
                f"records: column {name!r} holds {_said(self.columns[name])}, not strings; read it with "
                f"records[{name!r}].to_list(), or have it read as text, as with "
                f"CsvFormat(types={{{name!r}: torch.uint8}})"
            )
        return [[bytes(text) for text in row] for row in self[name].to_list()]


def checked_mask(records: Records, mask: Tensor) -> Tensor:
    """Return the mask; DataError if it is not one of these records."""
    if mask.dtype is not torch.bool or mask.shape != (len(records),):
        raise DataError(f"records: a mask must be bool of shape ({len(records)},), got {tuple(mask.shape)}")
    return mask


def concat(parts: Sequence[Records]) -> Records:
    """Concatenate records. A column that some parts lack is empty there, and one without a value in some
    parts has the type of the remaining parts.

    A column of several types, as files of different days have it, becomes one that has all of their values:
    float32 if it is of numbers that are exact as such, otherwise text. A `FeatureSpec` reads numbers in texts
    as it reads numbers.
    """
    if len(parts) == 1:
        return parts[0]
    complete = all(part.complete for part in parts)
    size = sum(part.size for part in parts)
    chosen = [part._choose(slice(0, part.size)) for part in parts]
    named = [one for one in chosen if one is not None]
    if len(named) == len(parts) and (joined := GatheredColumns.concat(named)) is not None:
        return Records(size, joined, complete=complete, kinds=_common_kinds(parts, joined))
    dtypes: dict[str, torch.dtype] = {}
    empty: dict[str, torch.dtype] = {}
    for part in parts:
        for name, column in part.columns.items():
            if not len(column.flat_values):
                empty.setdefault(name, column.dtype)
            elif (known := dtypes.setdefault(name, column.dtype)) is not column.dtype:
                is_text = torch.uint8 in (known, column.dtype)
                numbers = () if is_text else (one.columns[name] for one in parts if name in one.columns)
                exact = not is_text and all(map(_fits_float32, numbers))
                dtypes[name] = torch.float32 if exact else torch.uint8
    order = dict.fromkeys(name for part in parts for name in part.columns)
    dtypes = {name: dtypes.get(name) or empty[name] for name in order}
    columns = {
        name: concat_rows(
            [
                _as_type(part[name], dtype, part.kinds.get(name))
                if name in part.columns and len(part.columns[name].flat_values)
                else empty_rows(dtype, part.size)
                for part in parts
            ]
        )
        for name, dtype in dtypes.items()
    }
    return Records(size, columns, complete=complete, kinds=_common_kinds(parts, columns))


def _fits_float32(column: RaggedTensor) -> bool:
    """Return whether all values are the same numbers as float32."""
    flat = column.flat_values
    return flat.dtype is torch.float32 or not bool((flat.abs() > 2**24).any())


def _as_type(column: RaggedTensor, dtype: torch.dtype, kind: ColumnKind | None) -> RaggedTensor:
    """Return a column as float32, or as text: the shortest that reads as the same number, empty for NaN."""
    if column.dtype is dtype:
        return column
    if dtype is not torch.uint8:
        return column.with_flat_values(column.flat_values.to(dtype))
    texts = [b"" if math.isnan(one) else b"%r" % one for one in as_read(column.flat_values, kind).tolist()]
    return RaggedTensor(text_rows(texts), column.row_splits, validate=False)


def _common_kinds(parts: Sequence[Records], columns: Iterable[str]) -> Mapping[str, ColumnKind]:
    """Return the kinds of columns on which all parts that have them agree."""
    first = parts[0].kinds
    if all(part.kinds is first or part.kinds == first for part in parts):
        return first  # as parts of one file
    kinds: dict[str, ColumnKind] = {}
    for name in columns:
        found = {part.kinds.get(name) for part in parts if name in part.columns}
        if len(found) == 1 and (kind := found.pop()) is not None:  # where parts differ, nothing is known
            kinds[name] = kind
    return kinds


def text_rows(texts: Sequence[bytes]) -> RaggedTensor:
    """Return strings as rows of bytes: uint8 of ragged rank 1, the values of a column of strings."""
    flat = torch.from_numpy(np.frombuffer(bytearray().join(texts), np.uint8))
    lengths = torch.from_numpy(np.fromiter(map(len, texts), np.int64, len(texts)))
    return RaggedTensor.from_row_lengths(flat, lengths, validate=False)


def column_from_arrays(
    flat: NDArray[Any], splits: NDArray[np.int64], texts: NDArray[np.int64] | None
) -> RaggedTensor:
    """Return a column over the memory of arrays, as the native parsers return them.

    Args:
        splits: int64 of shape (records + 1,).
        texts: Of strings, int64 of shape (values + 1,): where each begins in `flat`. None for numbers.
    """
    values: Tensor | RaggedTensor = torch.from_numpy(flat)
    if texts is not None:
        values = RaggedTensor(values, torch.from_numpy(texts), validate=False)
    return RaggedTensor(values, torch.from_numpy(splits), validate=False)


def empty_rows(dtype: torch.dtype, rows: int) -> RaggedTensor:
    """Return a column of records that have no values in it."""
    splits = torch.zeros(rows + 1, dtype=torch.int64)
    values: Tensor | RaggedTensor = torch.empty(0, dtype=dtype)
    if dtype is torch.uint8:
        values = RaggedTensor(values, torch.zeros(1, dtype=torch.int64), validate=False)
    return RaggedTensor(values, splits, validate=False)


def take_rows(column: RaggedTensor, rows: Tensor) -> RaggedTensor:
    """Return rows of a ragged tensor, in the order given."""
    starts = column.row_splits[rows]
    lengths = column.row_splits[rows + 1] - starts
    places = ranges(starts, lengths)
    values = column.values
    taken = take_rows(values, places) if isinstance(values, RaggedTensor) else values[places]
    return RaggedTensor.from_row_lengths(taken, lengths, validate=False)


def slice_rows(column: RaggedTensor, begin: int, end: int) -> RaggedTensor:
    """Return rows [begin, end) of a ragged tensor, over the same memory."""
    splits = column.row_splits[begin : end + 1]
    first, last = int(splits[0]), int(splits[-1])
    values = column.values
    inner = slice_rows(values, first, last) if isinstance(values, RaggedTensor) else values[first:last]
    return RaggedTensor(inner, splits - first, validate=False)


def concat_rows(columns: Sequence[RaggedTensor]) -> RaggedTensor:
    """Lay ragged tensors of one type end to end."""
    lengths = torch.cat([column.row_lengths() for column in columns])
    inner = [column.values for column in columns]
    if isinstance(inner[0], RaggedTensor):
        values: Tensor | RaggedTensor = concat_rows([one for one in inner if isinstance(one, RaggedTensor)])
    else:
        values = torch.cat([one for one in inner if isinstance(one, Tensor)])
    return RaggedTensor.from_row_lengths(values, lengths, validate=False)


def as_read(values: Tensor, kind: ColumnKind | None) -> NDArray[Any]:
    """Return int64 or float32 as the numbers that the data held.

    An unsigned number gets its sign bit back, and a float64 the digits that it had: 0.1 was read as the
    float32 next to it, which as a float64 is 0.10000000149.
    """
    array = values.numpy()
    if kind is not None and kind.type == "uint64":
        return array.view(np.uint64)
    if kind is not None and kind.type == "bool":
        return array.astype(bool)
    if kind is not None and kind.type == "double" and array.dtype == np.float32:
        return array.astype(str).astype(np.float64)
    return array


def infinite_rows(column: RaggedTensor) -> Tensor:
    """Return which rows of a column have an infinite float: bool of shape (rows,)."""
    values = column.values
    if not isinstance(values, Tensor) or not values.is_floating_point() or not bool(values.isinf().any()):
        return torch.zeros(column.nrows, dtype=torch.bool)
    bad = torch.zeros(len(values) + 1, dtype=torch.int64)
    torch.cumsum(values.isinf(), 0, out=bad[1:])
    return bad[column.row_splits[1:]] > bad[column.row_splits[:-1]]


def missing_rows(column: RaggedTensor) -> Tensor:
    """Return which rows of a column have no value, or only NaN: bool of shape (rows,)."""
    values, lengths = column.values, column.row_lengths()
    if not isinstance(values, Tensor) or not values.is_floating_point() or not bool(values.isnan().any()):
        return lengths == 0
    there = torch.zeros(len(values) + 1, dtype=torch.int64)
    torch.cumsum(~values.isnan(), 0, out=there[1:])
    return there[column.row_splits[1:]] == there[column.row_splits[:-1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Which columns a model reads, and as what.

    A column that the data does not have is an error, unless it is `optional`: it is most likely a typo, and
    the model would train without that feature.
    """

    ids: tuple[str, ...]
    """Features of ids: int64 columns."""
    floats: Mapping[str, int] = field(default_factory=dict)
    """Features of numbers: column to its width. Short rows are filled with zeros, long ones cut, and a number
    that is missing (null, NaN) is 0."""
    labels: Mapping[str, tuple[str, int]] = field(default_factory=lambda: {LABEL: (LABEL, 0)})
    """Task to the column of numbers it reads and the position in it; NaN where a record has none there, which
    an empty cell, null and NaN all are. A record that has an infinity in such a column is a bad one, and is
    left out; so is one that has none of its labels, unless their column is optional."""
    event_time: str | None = REQ_TIME
    """An int64 column of Unix seconds; None leaves 0: rows then never expire. That of a LineId, the default,
    may be missing, and a warning says so."""
    optional: Collection[str] = ()
    """Columns that the data may lack: ids then read as none, numbers as zeros, and a label is not there."""
    max_bad: float = 0.1
    """The fraction of records whose event time may be out of range, or a label NaN, 0 to 1. They are dropped,
    counted and rejected to the source; more end the run, and with 0 the first does."""

    def __post_init__(self) -> None:
        pairs = list(self.labels.values()) if isinstance(self.labels, Mapping) else [None]
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
            raise ConfigError(
                "batch spec: labels gives each task a column and the position in it, as in "
                f'{{"click": ("click", 0)}}; got {self.labels!r}'
            )
        if isinstance(self.optional, str):
            object.__setattr__(self, "optional", (self.optional,))
        if unknown := [name for name in self.optional if name not in self.columns]:
            raise ConfigError(
                f"batch spec: optional names {unknown[0]!r}, which it does not read; "
                f"{known_columns(unknown[0], self.columns, 'it reads')}"
            )
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"batch spec: max_bad must be from 0 to 1, got {self.max_bad}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        times = () if self.event_time is None else (self.event_time,)
        labels = (column for column, _ in self.labels.values())
        return tuple(dict.fromkeys((*self.ids, *self.floats, *labels, *times)))

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that must be there."""
        return tuple(name for name in self.columns if name not in self.optional and name != REQ_TIME)


def timely(records: Records, column: str | None) -> Tensor:
    """Return a bool per record: whether its event time, if it has one, is a second that a row can keep."""
    fine = torch.ones(records.size, dtype=torch.bool)
    times = records.columns.get(column or "")
    if times is None or times.dtype is torch.uint8:
        return fine
    wrong = (times.flat_values < 0) | (times.flat_values > MAX_EVENT_TIME)
    if bool(wrong.any()):
        if column in records.shared:
            return ~fine
        rows = torch.repeat_interleave(torch.arange(times.nrows), times.row_lengths())
        fine[rows[wrong]] = False
    return fine


def make_batch(records: Records, spec: BatchSpec | FeatureSpec) -> Batch:
    """Turn records into the batch that a model reads.

    Raises:
        DataError: They lack a column that is not optional, one is of another type, or an event time is out
            of range. `Pipeline.to_batches` leaves such records out.

    Examples:
        >>> from monolith import FeatureSpec, IdFeature, Label, MemorySource, make_batch
        >>> [records] = MemorySource({"user": [17, 18], "click": [1, 0]}, batch_size=2)
        >>> spec = FeatureSpec(features={"user": IdFeature()}, labels={"click": Label()})
        >>> batch = make_batch(records, spec)
        >>> batch.ids.ids, batch.label
        (tensor([17, 18]), tensor([1., 0.]))
    """
    if isinstance(spec, FeatureSpec):
        return spec.make(records)
    _check_of(spec).look(records, complete=True)
    return read_batch(records, spec)


class ColumnCheck:
    """Checks that a stream of records has the required columns.

    A table lacks a column or has it: its first records say so. Where each record brings columns of its own,
    as a tf.Example does, a column counts as missing when none of the first `PATIENCE` records has it.

    Args:
        who: The name of the reader that needs them, with which an error begins.
        optional: How a user declares that a column may be missing, with {} for its name; None: not at all.
    """

    PATIENCE = 1000

    def __init__(self, who: str, names: Iterable[str], optional: str | None = None) -> None:
        self._who = who
        self._unseen = list(names)
        self._optional = optional
        self._known: dict[str, None] = {}
        self._records = 0

    def look(self, records: Records, *, complete: bool | None = None) -> None:
        """Check the next records.

        Args:
            complete: Whether a column that they do not have is missing for good; by default
                `records.complete`.

        Raises:
            DataError: A column is missing; names those that are there.
        """
        if not self._unseen:
            return
        self._known |= dict.fromkeys(records.columns)
        self._records += len(records)
        self._unseen = [name for name in self._unseen if name not in records.columns]
        if not self._unseen:
            return
        if records.complete if complete is None else complete:
            raise self._missing("the records have no")
        if self._records >= self.PATIENCE:
            raise self._missing(f"none of the first {self._records:,} records has a")

    def end(self) -> None:
        """Check the whole stream, after its last record.

        Raises:
            DataError: None of them had a column.
        """
        if self._unseen and self._records:
            raise self._missing(f"none of the {self._records:,} records has a")

    def _missing(self, found: str) -> DataError:
        name = self._unseen[0]
        # Not "they have": sources read only columns that are asked for, and a file may have more.
        there = known_columns(name, self._known, "the columns that are read are")
        said = f"{self._who}: {found} column {name!r}; {there}"
        if self._optional is None:
            return DataError(said)
        optional = self._optional.replace("{}", repr(name))
        return DataError(f"{said} If the data may lack it, say {optional}.")


class BatchMaker:
    """Makes batches of a stream of records, and refuses columns that it does not have; see `ColumnCheck`.

    Args:
        resumed: Whether earlier records were read before a restart, so a column may have been in those.
    """

    def __init__(self, spec: BatchSpec, *, resumed: bool = False) -> None:
        self._spec = spec
        self._check = _check_of(spec)
        self._resumed = resumed
        self._untimed = 0 if spec.event_time == REQ_TIME and REQ_TIME not in spec.optional else None
        """Records without an event time so far; None once the check is over."""

    def __call__(self, records: Records) -> Batch:
        if records.complete:
            _check_of(self._spec).look(records)  # one file of a table may lack what the one before has
        else:
            self._check.look(records)
        self._look_for_times(records)
        return read_batch(records, self._spec)

    def end(self) -> None:
        """Check the whole stream, after its last record.

        Raises:
            DataError: None of the records had a column that is not optional.
        """
        if not self._resumed:
            self._check.end()

    def _look_for_times(self, records: Records) -> None:
        if self._untimed is None:
            return
        self._untimed += len(records)
        if REQ_TIME in records.columns:
            self._untimed = None
        elif records.complete or self._untimed >= ColumnCheck.PATIENCE:
            self._untimed = None
            _log.warning(
                "batch: the records have no column %r, so rows get no event time and never expire; name the "
                "column with BatchSpec(event_time=...), or None if there is none",
                REQ_TIME,
            )


def _check_of(spec: BatchSpec) -> ColumnCheck:
    return ColumnCheck("batch", spec.required, "BatchSpec(optional=[{}])")


def read_batch(records: Records, spec: BatchSpec) -> Batch:
    """Return the same as `make_batch`, with missing columns left empty."""
    there = records.columns
    ids = {name: there[name] if name in there else empty_rows(torch.int64, records.size) for name in spec.ids}
    for name, column in ids.items():
        if column.dtype is not torch.int64:
            raise DataError(
                f"batch: feature {name!r} must hold ids, int64, got {_said(column)}. A FeatureSpec in place "
                'of the BatchSpec makes ids of texts and numbers: IdFeature(kind="string"), BucketFeature.'
            )
    times = _event_times(records, spec.event_time)
    return Batch(
        FeatureIds.pack(
            ids,
            shared=records.shared & ids.keys(),
            batch_size=records.size,
            event_time=0 if times is None or not len(times) else int(times.max()),
            event_times=times,
        ),
        {
            name: _numbers(records, name, "feature").to_padded(width).nan_to_num(0.0, torch.inf, -torch.inf)
            if name in there
            else torch.zeros(records.size, width)
            for name, width in spec.floats.items()
        },
        {
            task: _numbers(records, column, "label").to_padded(position + 1, float("nan"))[:, position]
            for task, (column, position) in spec.labels.items()
            if column in there
        },
    )


def _event_times(records: Records, column: str | None) -> Tensor | None:
    """Return Unix seconds of each record, 0 for one that has none; None if there is no such column."""
    if column is None or column not in records.columns:
        return None
    found = records[column]
    if found.dtype is torch.uint8:
        raise DataError(f"batch: event time {column!r} must be Unix seconds, got {_said(found)}")
    times = found.flat_values.long()
    if len(times) and not 0 <= int(times.min()) <= int(times.max()) <= MAX_EVENT_TIME:
        wrong = times[(times < 0) | (times > MAX_EVENT_TIME)]
        raise DataError(f"batch: event time {column!r} {wrong_second(int(wrong[0]))}")
    return newest_of_each(found.with_flat_values(times))


def _numbers(records: Records, name: str, what: str) -> RaggedTensor:
    """Return a column as float32: of whole numbers, as most files have them, too."""
    column = records[name]
    if column.dtype is torch.uint8:
        raise DataError(f"batch: {what} {name!r} must hold numbers, got {_said(column)}")
    return column.with_flat_values(column.flat_values.to(torch.float32))


def _said(column: RaggedTensor) -> str:
    """Return what a column holds, with a value of it, for a message."""
    if column.dtype is not torch.uint8:
        return str(column.dtype).removeprefix("torch.")
    texts = column.values
    assert isinstance(texts, RaggedTensor)
    if not texts.nrows:
        return "texts"
    first = bytes(slice_rows(texts, 0, 1).flat_values.tolist()[:40])
    return f"texts such as {first.decode('utf-8', 'replace')!r}"


def known_columns(name: str, known: Iterable[str], they: str = "they have") -> str:
    """Return what there is instead of a column, the nearest named first, as a sentence."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{they} {', '.join(names) or 'none'}.{hint}"
