"""Records: a stretch of examples, column by column.

What sources yield and transforms work on. A column is ragged: a record has any number
of values of each feature, none included. There is no object per record anywhere, so a
stretch of a thousand costs little more than one.

Columns with a meaning have these names:

    label            float32, as many as there are tasks
    instance_weight  float32, one
    line_id.FIELD    what identifies the event: uid, req_time, item_id (int64), actions, pre_actions
                     (int64, many), chnid, sample_rate (float32), user_id, device_type (bytes) and so on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, FeatureIds
from monolith.table.arguments import MAX_EVENT_TIME, wrong_second
from monolith.tensors import RaggedTensor, ranges

LABEL = "label"
WEIGHT = "instance_weight"
LINE_ID = "line_id."
"""What the columns of a LineId begin with."""

DTYPES = (torch.int64, torch.float32, torch.uint8)
"""Ids and whole numbers, numbers, and the bytes of strings."""


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Some records, in order. Never changes."""

    size: int
    """How many there are."""
    columns: Mapping[str, RaggedTensor]
    """By name: int64 or float32 of ragged rank 1, or strings: uint8 of ragged rank 2."""
    shared: frozenset[str] = field(default_factory=frozenset)
    """Columns of a single row that stands for every record."""

    def __post_init__(self) -> None:
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
        """Return a column with one row per record, also where it is shared."""
        if name not in self.columns:
            raise DataError(f"records have no column {name!r}; they have {', '.join(self.columns) or 'none'}")
        column = self.columns[name]
        if name not in self.shared:
            return column
        return take_rows(column, torch.zeros(self.size, dtype=torch.int64))

    def take(self, rows: Tensor) -> Records:
        """Return the records at these positions, int64, in any order and as often as they are given."""
        return Records(
            len(rows),
            {
                name: column if name in self.shared else take_rows(column, rows)
                for name, column in self.columns.items()
            },
            self.shared,
        )

    def keep(self, mask: Tensor) -> Records:
        """Return the records where the bool `mask` is True."""
        if mask.dtype is not torch.bool or mask.shape != (self.size,):
            raise DataError(f"records: a mask must be bool of shape ({self.size},), got {tuple(mask.shape)}")
        return self if bool(mask.all()) else self.take(mask.nonzero().squeeze(1))

    def slice(self, begin: int, end: int) -> Records:
        """Return records [begin, end), over the same memory."""
        begin = min(max(begin, 0), self.size)
        end = min(max(begin, end), self.size)
        if (begin, end) == (0, self.size):
            return self
        return Records(
            end - begin,
            {
                name: column if name in self.shared else slice_rows(column, begin, end)
                for name, column in self.columns.items()
            },
            self.shared,
        )

    def with_columns(self, columns: Mapping[str, RaggedTensor]) -> Records:
        """Return the same records with these columns added, or in place of those of the same name."""
        return Records(self.size, {**self.columns, **columns}, self.shared - columns.keys())

    def select(self, names: Iterable[str]) -> Records:
        """Return the same records with these columns only; those that are not there are passed over."""
        wanted = [name for name in names if name in self.columns]
        return Records(self.size, {name: self.columns[name] for name in wanted}, self.shared & set(wanted))

    def strings(self, name: str) -> list[list[bytes]]:
        """Return a column of strings as Python objects, for people to look at."""
        return [[bytes(text) for text in row] for row in self[name].to_list()]


def concat(parts: Sequence[Records]) -> Records:
    """Lay records end to end. A column that some do not have is empty there.

    Raises:
        DataError: A column has different types in different parts.
    """
    if len(parts) == 1:
        return parts[0]
    dtypes: dict[str, torch.dtype] = {}
    for part in parts:
        for name, column in part.columns.items():
            if dtypes.setdefault(name, column.dtype) is not column.dtype:
                raise DataError(f"records: column {name!r} is {dtypes[name]} here and {column.dtype} there")
    columns = {
        name: concat_rows(
            [part[name] if name in part.columns else empty_rows(dtype, part.size) for part in parts]
        )
        for name, dtype in dtypes.items()
    }
    return Records(sum(part.size for part in parts), columns)


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


def not_finite(column: RaggedTensor) -> Tensor:
    """Return which rows of a column have a float that is NaN or infinite: bool of shape (rows,)."""
    values = column.values
    if not isinstance(values, Tensor) or not values.is_floating_point() or bool(values.isfinite().all()):
        return torch.zeros(column.nrows, dtype=torch.bool)
    bad = torch.zeros(len(values) + 1, dtype=torch.int64)
    torch.cumsum(~values.isfinite(), 0, out=bad[1:])
    return bad[column.row_splits[1:]] > bad[column.row_splits[:-1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Which columns a model reads, and as what."""

    ids: tuple[str, ...]
    """Features of ids: int64 columns. One that records lack reads as no ids."""
    floats: Mapping[str, int] = field(default_factory=dict)
    """Features of numbers: float32 column to its width. Short rows are filled with zeros, long ones cut."""
    labels: Mapping[str, tuple[str, int]] = field(default_factory=lambda: {LABEL: (LABEL, 0)})
    """Task to the column it reads and the position in it; NaN where a record has none there. A record that
    has a NaN or an infinity in such a column is a bad one, and is left out."""
    event_time: str | None = LINE_ID + "req_time"
    """An int64 column of Unix seconds; None, or a column that is not there, leaves 0."""
    max_bad_times: float = 0.1
    """The share of records whose event time may be out of range, 0 to 1. They are left out, counted and put
    where the source puts malformed records; more of them end the run, and with 0 the first does."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_times <= 1:
            raise ConfigError(f"batch: max_bad_times must be from 0 to 1, got {self.max_bad_times}")


def timely(records: Records, column: str | None) -> Tensor:
    """Return a bool per record: whether its event time, if it has one, is a second that a row can keep."""
    fine = torch.ones(records.size, dtype=torch.bool)
    times = records.columns.get(column or "")
    if times is None:
        return fine
    wrong = (times.flat_values < 0) | (times.flat_values > MAX_EVENT_TIME)
    if bool(wrong.any()):
        if column in records.shared:
            return ~fine
        rows = torch.repeat_interleave(torch.arange(times.nrows), times.row_lengths())
        fine[rows[wrong]] = False
    return fine


def make_batch(records: Records, spec: BatchSpec) -> Batch:
    """Return what a model reads of some records.

    Raises:
        DataError: An event time is out of range. `Pipeline.to_batches` leaves such records out.
    """
    ids = {name: records.columns[name] for name in spec.ids if name in records.columns}
    for name, column in ids.items():
        if column.dtype is not torch.int64:
            raise DataError(f"batch: feature {name!r} must hold ids, int64, got {column.dtype}")
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
            name: records[name].to_padded(width)
            if name in records.columns
            else torch.zeros(records.size, width)
            for name, width in spec.floats.items()
        },
        {
            task: records[column].to_padded(position + 1, float("nan"))[:, position]
            for task, (column, position) in spec.labels.items()
            if column in records.columns
        },
    )


def _event_times(records: Records, column: str | None) -> Tensor | None:
    """Return Unix seconds of all records that have one; None where there is no such column."""
    found = records.columns.get(column or "")
    if found is None:
        return None
    times = found.flat_values.long()
    if len(times) and not 0 <= int(times.min()) <= int(times.max()) <= MAX_EVENT_TIME:
        wrong = times[(times < 0) | (times > MAX_EVENT_TIME)]
        raise DataError(f"batch: event time {column!r} {wrong_second(int(wrong[0]))}")
    return times
