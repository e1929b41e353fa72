"""Reading raw columns by a feature spec: texts, numbers and lists become a batch.

Columns are worked on whole: the core hashes and splits their bytes, and no value is a Python object. A value
that cannot be read does not end a run; its record is named, with the reason, and a reader of a stream
drops it.

A missing value is not one that cannot be read. It is a row without values, or NaN if numbers keep their
position in a list, whatever the data had: an empty cell, null, None, NaN, NaT, pd.NA, a key that is not
there.

    numbers            the `missing` of the feature, each number of a list on its own
    ids, buckets       no id
    weights            1
    times, event time  no gap; the record does not move the clock
    steps of a history no step, if one of its lists has no value there
    labels             a bad record, or no label if the column is optional
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from monolith import native
from monolith.errors import DataError
from monolith.feature.batches import Batch, FeatureIds, newest_of_each
from monolith.feature.fids import SIGNATURE_BITS, make_fid
from monolith.feature.gathering import PackedBatch, PackedFeatures
from monolith.feature.spec.kinds import (
    BucketFeature,
    CrossFeature,
    FloatFeature,
    HistoryFeature,
    IdFeature,
    Label,
    SequenceFeature,
)
from monolith.feature.spec.packing import PackedRecords, PackedTimes, Packer, RawCells, UnmovedRows
from monolith.feature.spec.problems import BadReason, EmptyCells
from monolith.feature.spec.times import TIME, Recognised, read_times, split_texts, without_empty_texts
from monolith.table.arguments import MAX_EVENT_TIME
from monolith.tensors import RaggedTensor, ranges

if TYPE_CHECKING:
    from monolith.feature.spec.feature_spec import FeatureSpec, HistoryList

_SHOWN = 40
"""Bytes of a wrong value that a message shows."""
_EXACT = 1 << 24
"""Whole numbers up to here are the same as float32."""


class RawColumns(Protocol):
    """Some records, column by column, as `monolith.data.Records` are."""

    @property
    def size(self) -> int: ...
    @property
    def columns(self) -> Mapping[str, RaggedTensor]: ...
    @property
    def shared(self) -> frozenset[str]: ...
    @property
    def unmoved(self) -> UnmovedRows | None:
        """Where the values of all columns are, if none of them was looked at yet."""

    def glance(self) -> RawColumns:
        """Return the same records for a look at a few columns."""

    def __getitem__(self, name: str) -> RaggedTensor:
        """Return a column with one row per record, also if it is shared."""


@dataclass(slots=True)
class Reading:
    """What came of some records."""

    size: int
    bad: dict[int, str] = field(default_factory=dict)
    """Record to why it cannot be trained on; the first reason found."""
    packed: FeatureIds | None = None
    """Features that were read at once; the remaining ones are in `ids`."""
    ids: dict[str, RaggedTensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    floats: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    event_times: Tensor | None = None
    empty: dict[str, int] = field(default_factory=dict)
    """Float feature to how many records had nothing in its column."""
    no_label: dict[str, str] = field(default_factory=dict)
    """Column of a label to why its records are bad, where some have none."""
    group: str | None = None
    """The feature that groups examples."""

    def blame(self, rows: Tensor, of: int, reason: Callable[[int], str]) -> None:
        """Note that rows of a column cannot be read; of a shared column, that is every record's.

        Args:
            rows: int64 positions.
            of: How many rows the column has.
        """
        for row in rows.tolist():
            records = [row] if of == self.size else range(self.size)
            for record in records:
                self.bad.setdefault(record, reason(row))

    def ids_of(self, name: str) -> RaggedTensor:
        """Return the ids of one feature."""
        if self.packed is not None and name in self.packed.names:
            return self.packed[name]
        return self.ids[name]

    def batch(self) -> Batch:
        """Return it as a batch; only if nothing is bad."""
        return Batch(self._feature_ids(), self.floats, self.labels, group=self.group)

    def _feature_ids(self) -> FeatureIds:
        times, packed = self.event_times, self.packed
        event_time = 0 if times is None or not len(times) else int(times.max())
        if packed is not None and not self.ids:
            return packed if times is None else replace(packed, event_time=event_time, event_times=times)
        rest = FeatureIds.pack(
            self.ids,
            shared=self.shared,
            batch_size=self.size,
            event_time=event_time,
            event_times=times,
            weights=self.weights or None,
        )
        if packed is None:
            return rest
        parts, weights = (packed, rest), None
        if any(part.weights is not None for part in parts):
            each = (torch.ones(len(part.ids)) if part.weights is None else part.weights for part in parts)
            weights = torch.cat(list(each))
        return replace(
            rest,
            names=(*packed.names, *rest.names),
            ids=torch.cat([packed.ids, rest.ids]),
            splits=torch.cat([packed.splits, rest.splits[1:] + len(packed.ids)]),
            shared=(*packed.shared, *rest.shared),
            weights=weights,
        )


class RawReader:
    """Makes batches by one spec. Safe from any thread."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._packer = Packer(spec)
        if spec.to_learn:
            self._unlearned: str | None = spec.to_learn[0]
        else:
            self._unlearned = None
        self.empty = EmptyCells(
            {
                name: one.missing
                for name, one in spec.read_features.items()
                if isinstance(one, FloatFeature) and one.missing is not None
            }
        )
        """What was empty of all that `batch` was asked for."""
        self.told: set[str] = set()
        """Causes of bad records that were logged, by whatever stream is read with this reader."""
        self._recognised = Recognised()

    def make(self, records: RawColumns) -> Batch:
        """Return a batch of all records; see `FeatureSpec.make`."""
        for column in self._spec.required:
            if column not in records.columns:
                raise DataError(
                    f"features: the records have no column {column!r}; they have "
                    f"{', '.join(records.columns) or 'none'}. If the data may lack it, say "
                    f"examples.optional = [{column!r}] in the config, or optional=[{column!r}] of a "
                    "FeatureSpec."
                )
        reading = self.read(records)
        if reading.bad:
            record = min(reading.bad)
            raise DataError(f"features: record {record} of {records.size} is bad: {reading.bad[record]}")
        return self.batch(reading)

    def batch(self, reading: Reading) -> Batch:
        """Return a batch of the records read, none of them bad, and count the empty cells."""
        self.empty.note(reading.empty, reading.size)
        return reading.batch()

    @property
    def packs_all(self) -> bool:
        """Whether `pack` may work: all features are plain."""
        return self._unlearned is None and self._packer.packs_all and not self._spec.labels

    def pack(self, columns: Mapping[str, RawCells], size: int) -> Batch | None:
        """Return a batch of columns in the core's form, by two calls into it; None if something is odd.

        Args:
            columns: All that the spec reads, and perhaps more.
            size: Rows of each of them.
        """
        floats = self._packer.floats_of(columns, size)
        ids = self._packer.ids_of(columns, size)
        if floats is None or ids is None:
            return None
        return Batch(ids, self._all_scaled(floats), group=self._spec.group)

    def request_plan(self, inputs: Sequence[tuple[str, native.WireType, bool]]) -> native.RequestPlan | None:
        """Return how the core packs requests; see `Packer.request_plan`."""
        return self._packer.request_plan(inputs)

    def packed_batch(self, rows: native.PackedRows) -> PackedBatch:
        """Return the batch of rows that a request plan of this reader has packed."""
        return PackedBatch(
            PackedFeatures(self._packer.names, rows), self._all_scaled(self._packer.numbers(rows))
        )

    def batch_of(self, rows: native.PackedRows) -> Batch:
        """Return the same with tensors of IDs."""
        packed = self.packed_batch(rows)
        return Batch(packed.ids.ids(), packed.floats, group=self._spec.group)

    def _all_scaled(self, floats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        features = self._spec.features
        return {name: _scaled(features[name], one) for name, one in floats.items()}  # type: ignore[arg-type]

    def read(self, records: RawColumns) -> Reading:
        """Return what comes of some records, bad ones named; a column that is not there reads as empty.

        Raises:
            DataError: A whole column is of another type than the spec says; says what to change.
        """
        spec = self._spec
        if self._unlearned is not None:
            raise DataError(
                f"features.{self._unlearned}: its mean or its boundaries are to be learned from data first: "
                "spec = spec.fit(records)"
            )
        found = Reading(records.size, group=spec.group)
        unmoved = records.unmoved
        rows = None if unmoved is None else self._packer.rows(unmoved)
        if rows is None:
            rows = PackedRecords(self._packer.ids(records), self._packer.floats(records) or {}, {}, {})
        elif rows.ids is not None:
            records = records.glance()  # most columns were packed: of the rest, only those needed are moved
        times = self._event_times(records, found, rows.times)
        for column, forms in rows.forms if spec.event_time_unit == "auto" else ():
            self._recognised.say(column, forms, setting="event_time_unit")
        found.packed = rows.ids
        for name, given in rows.floats.items():
            one, missing = spec.features[name], rows.missing.get(name, 0)
            assert isinstance(one, FloatFeature)
            if not missing:
                found.floats[name] = _scaled(one, given)
            elif one.missing is not None:
                found.floats[name] = _scaled(one, given).masked_fill(given.isnan(), one.missing)
                found.empty[name] = missing
        packed = len(found.floats)
        for name in self._packer.left_by(found.packed, found.floats):
            one = spec.features[name]
            if isinstance(one, IdFeature):
                self._ids(name, one, records, found)
            elif isinstance(one, BucketFeature):
                self._buckets(name, one, records, found)
            elif isinstance(one, SequenceFeature):
                self._sequence(name, one, records, found, times)
            elif isinstance(one, HistoryFeature):
                self._history(name, one, records, found)
            elif isinstance(one, FloatFeature):
                self._floats(name, one, records, found)
        if len(found.floats) > packed:  # in the order of the features again
            found.floats = {name: found.floats[name] for name in spec.floats if name in found.floats}
        for name in self._packer.crosses:
            one = spec.features[name]
            assert isinstance(one, CrossFeature)
            self._cross(name, one, found)
        for task, label in spec.labels.items():
            if task in rows.labels:
                found.labels[task] = rows.labels[task]
            else:
                self._label(task, label, records, found)
        return found

    # Ids

    def _ids(self, name: str, one: IdFeature, records: RawColumns, found: Reading) -> None:
        column = one.column or name
        together = one.weights is None or (column in records.shared) == (one.weights in records.shared)
        raw = self._raw(records, column, torch.int64, together)
        ids = self._items(name, one, raw, column, found)
        self._put(name, ids, found)
        if one.weights is None:
            return
        given = self._raw(records, one.weights, torch.float32, together)
        weights = numbers_of(name, one.weights, given, one.separator, found)
        weights = _or_ones(weights, ids)
        _check_lengths(name, one.weights, ids, weights, found)
        _check_finite(name, one.weights, weights, found)
        found.weights[name] = weights.flat_values.nan_to_num(nan=1.0)

    def _items(
        self,
        name: str,
        one: IdFeature | SequenceFeature,
        raw: RaggedTensor,
        column: str,
        found: Reading,
    ) -> RaggedTensor:
        slot = self._spec.slots.get(name)
        if one.kind == "string":
            if raw.dtype is not torch.uint8:
                raise DataError(
                    f"features.{name}: column {column!r} has {_said(raw)}, and the feature hashes strings. "
                    'Say kind = "int" for numbers that are ids; or have the column read as text, as with '
                    "CsvFormat(types=spec.columns)."
                )
            ids, splits, _ = native.hash_cells(*_texts(raw), one.separator, slot)
            return _ragged(ids, splits)
        if raw.dtype is torch.uint8:
            values = _whole(name, column, raw, one.separator, found)
        elif raw.dtype is torch.int64:
            values = raw
        else:
            values = _present(raw)  # whole numbers with gaps are floats in pandas and many files
            numbers = values.flat_values
            if not bool(((numbers == numbers.floor()) & (numbers.abs() <= _EXACT)).all()):
                raise DataError(
                    f"features.{name}: column {column!r} has {_said(raw)}, and ids are whole numbers. "
                    "Read numbers with FloatFeature, or make ids of them with BucketFeature. Ids above "
                    f"{_EXACT:,} that a file has as floats need ParquetFormat(types=spec.columns)."
                )
            values = values.with_flat_values(numbers.long())
        return values if slot is None else _with_slot(name, column, values, slot, found)

    def _buckets(self, name: str, one: BucketFeature, records: RawColumns, found: Reading) -> None:
        column = one.column or name
        raw = self._raw(records, column, torch.float32)
        numbers = _present(numbers_of(name, column, raw, one.separator, found))
        _check_finite(name, column, numbers, found)
        assert one.boundaries is not None
        self._put(name, self._bucketed(name, numbers, one.boundaries), found)

    def _bucketed(self, name: str, numbers: RaggedTensor, boundaries: tuple[float, ...]) -> RaggedTensor:
        values = numbers.flat_values
        if values.dtype is torch.int64:
            values = values.double()  # float32 would move large ones over a boundary
        buckets = torch.bucketize(values, torch.tensor(boundaries, dtype=values.dtype), right=True)
        slot = self._spec.slots.get(name)
        return numbers.with_flat_values(buckets if slot is None else make_fid(slot, buckets))

    def _sequence(
        self,
        name: str,
        one: SequenceFeature,
        records: RawColumns,
        found: Reading,
        event_times: RaggedTensor | None,
    ) -> None:
        column = one.column or name
        items = self._items(
            name, one, self._raw(records, column, torch.int64, one.times is None), column, found
        )
        self._put(name, _cut(items, one.length, one.keep), found)
        if one.times is None:
            return
        assert event_times is not None
        times = self._times(
            f"features.{name}: column {one.times!r}",
            one.times,
            self._raw(records, one.times, torch.int64, False),
            one.separator,
            found,
        )
        times = _only_rows(times, (event_times.row_lengths() > 0) | (items.row_lengths() == 0))
        lacking = (times.row_lengths() == 0) & (items.row_lengths() > 0)  # of the items or of the event
        _check_lengths(name, one.times, _only_rows(items, ~lacking), times, found)
        several = (event_times.row_lengths() > 1).nonzero().squeeze(1)
        reason = f"features.{name}: no time gaps with several event times in {self._spec.event_time!r}"
        found.blame(several, found.size, lambda _: reason)
        if found.bad:  # rows of different lengths have no gaps
            self._put(name + ".gap", _empty(torch.int64, found.size), found)
            return
        newest = torch.zeros(found.size, dtype=torch.int64)
        newest[event_times.row_lengths() > 0] = event_times.flat_values
        each = torch.repeat_interleave(newest, times.row_lengths())
        gaps = times.with_flat_values((each - times.flat_values).clamp(min=0))
        gaps = self._bucketed(name + ".gap", gaps, one.gaps)
        self._put(name + ".gap", _cut(gaps, one.length, one.keep), found)

    def _history(self, name: str, one: HistoryFeature, records: RawColumns, found: Reading) -> None:
        lists = self._spec.histories[name]
        together = len({each.column in records.shared for each in lists}) == 1
        raw = [self._raw(records, each.column, torch.int64, together) for each in lists]
        made = [
            self._steps(each, one.separator, column, found) for each, column in zip(lists, raw, strict=True)
        ]
        # Most histories have a value of each list at each step. Only if not are steps looked at one by one.
        if not _same_rows(made) or any(
            len(values.flat_values) != _count_steps(column, one.separator)
            for values, column in zip(made, raw, strict=True)
        ):
            raw = [_one_per_step(column, one.separator) for column in raw]
            for each, column in zip(lists[1:], raw[1:], strict=True):
                _check_steps(name, lists[0].column, each.column, raw[0], column, found)
            if _same_rows(raw):
                raw = _without_gaps(raw)
                made = [
                    self._steps(each, None, column, found) for each, column in zip(lists, raw, strict=True)
                ]
        is_fine = _same_rows(made)  # or there is a bad record, and nothing is read of this
        for each, values in zip(lists, made, strict=True):
            kept = _cut(values, one.max, "last") if is_fine else _empty(torch.int64, values.nrows)
            self._put(each.name, kept, found)

    def _steps(
        self, each: HistoryList, separator: str | None, raw: RaggedTensor, found: Reading
    ) -> RaggedTensor:
        """Return one list of a history: IDs as its feature has them, or seconds. Missing values are left
        out."""
        if each.feature is None:
            return self._times(f"column {each.column!r}", each.column, raw, separator, found)
        of = self._spec.features[each.feature]
        assert isinstance(of, IdFeature)
        return self._items(each.name, replace(of, separator=separator), raw, each.column, found)

    def _cross(self, name: str, one: CrossFeature, found: Reading) -> None:
        parts = [found.ids_of(part) for part in one.of]
        if len({part.nrows for part in parts}) > 1:
            parts = [_spread(part, found.size) for part in parts]
        ids, splits, bad = native.cross_cells(
            [(part.flat_values.numpy(), part.row_splits.numpy()) for part in parts],
            one.most,
            self._spec.slots.get(name),
        )
        if len(bad):
            found.blame(
                torch.from_numpy(bad),
                len(splits) - 1,
                lambda row: BadReason(
                    f"features.{name}: more than {one.most} crosses of … ids; raise `most`",
                    " and ".join(str(len(_row(part, row))) for part in parts),
                ),
            )
        self._put(name, _ragged(ids, splits), found)

    def _put(self, name: str, ids: RaggedTensor, found: Reading) -> None:
        found.ids[name] = ids
        if ids.nrows != found.size:
            found.shared.add(name)

    # Numbers

    def _floats(self, name: str, one: FloatFeature, records: RawColumns, found: Reading) -> None:
        column = one.column or name
        numbers = numbers_of(name, column, self._raw(records, column, torch.float32), one.separator, found)
        _check_finite(name, column, numbers, found)
        lengths = numbers.row_lengths()
        rows = numbers.nrows
        values = numbers.flat_values.to(torch.float32)
        if len(values) == rows * one.width and bool((lengths == one.width).all()):
            given = values.view(rows, one.width)
        else:
            wrong = (lengths != one.width) & (lengths != 0)
            found.blame(
                wrong.nonzero().squeeze(1),
                rows,
                lambda row: BadReason(
                    f"features.{name}: column {column!r} has … numbers, not {one.width}",
                    str(int(lengths[row])),
                ),
            )
            given = torch.full((rows, one.width), torch.nan)
            whole = lengths == one.width
            places = ranges(numbers.row_splits[:-1][whole], lengths[whole])
            given[whole] = values[places].view(-1, one.width)
        made, gone = _scaled(one, given), given.isnan()
        if bool(gone.any()):
            without = gone.any(1)
            if one.missing is None:
                reason = (
                    f"features.{name}: column {column!r} has no value; say what that means with `missing`"
                )
                found.blame(without.nonzero().squeeze(1), rows, lambda _: reason)
            elif column in records.columns:
                found.empty[name] = int(without.sum()) * (1 if rows == found.size else found.size)
            made = made.masked_fill(gone, one.missing or 0.0)
        found.floats[name] = made if rows == found.size else made.expand(found.size, one.width)

    def _label(self, task: str, label: Label, records: RawColumns, found: Reading) -> None:
        column = label.column or task
        if column not in records.columns:
            return
        raw = records[column]
        if raw.dtype is torch.uint8 and len(raw.flat_values):
            raise DataError(f"labels.{task}: column {column!r} must hold numbers, got {_said(raw)}")
        if raw.dtype is torch.uint8:
            raw = _empty(torch.float32, found.size)
        numbers = raw.with_flat_values(raw.flat_values.to(torch.float32))
        values = _values_at(numbers, label.position)
        if label.loss == "binary" and label.at_least is None and bool(((values == 0) | (values == 1)).all()):
            # As they should be. What is wrong takes many small operations to say, and each of these waits for
            # the other threads that read.
            found.labels[task] = values
            return
        found.blame(
            values.isinf().nonzero().squeeze(1),
            found.size,
            lambda row: BadReason(f"label {column!r} is …", str(_row(raw, row))),
        )
        if column not in self._spec.optional and bool(values.isnan().any()):
            where = f" at position {label.position}" if label.position else ""
            found.no_label[column] = reason = f"label {column!r} is empty{where}"
            found.blame(values.isnan().nonzero().squeeze(1), found.size, lambda _: reason)
        if label.at_least is not None:
            values = torch.where(values.isnan(), values, (values >= label.at_least).to(torch.float32))
        elif label.loss == "binary":
            odd = ((values != 0) & (values != 1) & values.isfinite()).nonzero().squeeze(1)
            found.blame(
                odd,
                found.size,
                lambda row: (
                    f"label {column!r} is {float(values[row]):g}, and a class is 0 or 1. For a number set "
                    f'labels.{task}.loss to "mse", "huber" or "log"; at_least makes a class of a number'
                ),
            )
        elif label.loss == "log":
            found.blame(
                (values < 0).nonzero().squeeze(1),
                found.size,
                lambda row: (
                    f'label {column!r} is {float(values[row]):g}, and labels.{task}.loss = "log" takes '
                    'numbers of 0 or more; choose "mse" or "huber"'
                ),
            )
        found.labels[task] = values

    def _event_times(
        self, records: RawColumns, found: Reading, packed: PackedTimes | None = None
    ) -> RaggedTensor | None:
        column = self._spec.event_time
        if column is None:
            return None
        if packed is not None:
            if packed.forms and self._spec.event_time_unit == "auto":
                self._recognised.say(column, packed.forms, setting="event_time_unit")
            found.event_times = newest_of_each(packed.seconds)
            return packed.seconds
        if column not in records.columns:
            return _empty(torch.int64, found.size)
        times = self._times(f"event time {column!r}", column, records[column], None, found)
        seconds = times.flat_values
        if len(seconds) and not 0 <= int(seconds.min()) <= int(seconds.max()) <= MAX_EVENT_TIME:
            wrong = (seconds < 0) | (seconds > MAX_EVENT_TIME)
            rows = torch.repeat_interleave(torch.arange(times.nrows), times.row_lengths())[wrong]
            found.blame(
                rows,
                found.size,
                lambda row: BadReason.of_time(column, int(_row(times, row)[0])),
            )
        found.event_times = newest_of_each(times)
        return times

    def _times(
        self, what: str, column: str, raw: RaggedTensor, separator: str | None, found: Reading
    ) -> RaggedTensor:
        """Return a column of times as Unix seconds.

        Args:
            what: Holds them, as a message begins.
        """
        unit = self._spec.event_time_unit
        given = _present(raw) if raw.dtype is torch.float32 else raw
        times = read_times(given, unit, separator)
        if unit == "auto":
            self._recognised.say(column, times.forms, setting="event_time_unit")
        if raw.dtype is torch.float32 and bool((times.seconds.flat_values > _EXACT).any()):
            self._recognised.warn_of_rounding(column)
        if bool(times.wrong.any()):
            of = times.seconds
            rows = torch.repeat_interleave(torch.arange(of.nrows), of.row_lengths())[times.wrong]
            wanted = "ISO 8601, such as 2024-05-01T10:00:00Z" if unit in ("auto", "iso") else "ISO 8601"
            known = "" if unit == "iso" else f", or a Unix time{'' if unit == 'auto' else f' in {unit}'}"
            found.blame(
                rows,
                of.nrows,
                lambda row: BadReason(
                    f"{what} has …, which is no time: expected {wanted}{known}",
                    _cell(given, row) if given.dtype is torch.uint8 else str(_row(given, row)),
                ),
            )
        return times.seconds

    def _raw(
        self, records: RawColumns, column: str, dtype: torch.dtype, as_it_is: bool = True
    ) -> RaggedTensor:
        """Return a column, of one row if it is shared and `as_it_is`; without values if it is missing."""
        declared = self._spec.columns.get(column, dtype)
        dtype = torch.int64 if declared is TIME else declared
        if column not in records.columns:
            return _empty(dtype, records.size)
        raw = records.columns[column] if as_it_is else records[column]
        # Without a value, nothing in a column says of what type it is: a file may have guessed.
        return raw if raw.dtype is dtype or len(raw.flat_values) else _empty(dtype, raw.nrows)


def _whole(name: str, column: str, raw: RaggedTensor, separator: str | None, found: Reading) -> RaggedTensor:
    if raw.dtype is torch.int64:
        return raw
    if raw.dtype is not torch.uint8:
        raise DataError(f"features.{name}: column {column!r} must hold whole numbers, got {_said(raw)}")
    values, splits, bad = native.read_whole_cells(*_texts(raw), separator)
    if len(bad):
        found.blame(
            torch.from_numpy(bad),
            raw.nrows,
            lambda row: BadReason(
                f"features.{name}: column {column!r} has …, which is not a whole number; if its ids are "
                'strings, say kind = "string"',
                _cell(raw, row),
            ),
        )
    return _ragged(values, splits)


def numbers_of(
    name: str, column: str, raw: RaggedTensor, separator: str | None, found: Reading
) -> RaggedTensor:
    """Return a column of numbers: int64 or float32."""
    if raw.dtype is not torch.uint8:
        return raw
    values, splits, bad = native.read_number_cells(*_texts(raw), separator)
    if len(bad):
        found.blame(
            torch.from_numpy(bad),
            raw.nrows,
            lambda row: BadReason(
                f"features.{name}: column {column!r} has …, which is not a number", _cell(raw, row)
            ),
        )
    return _ragged(values, splits)


def _check_finite(name: str, column: str, numbers: RaggedTensor, found: Reading) -> None:
    """Name the records that have an infinite number; NaN is a missing one."""
    values = numbers.flat_values
    if not values.is_floating_point() or not bool(values.isinf().any()):
        return
    rows = torch.repeat_interleave(torch.arange(numbers.nrows), numbers.row_lengths())[values.isinf()]
    found.blame(
        rows,
        numbers.nrows,
        lambda row: BadReason(f"features.{name}: column {column!r} is …", str(_row(numbers, row))),
    )


def _present(numbers: RaggedTensor) -> RaggedTensor:
    """Return a column without the numbers that are missing."""
    values = numbers.flat_values
    if not values.is_floating_point() or not bool(values.isnan().any()):
        return numbers
    there = ~values.isnan()
    before = torch.zeros(len(values) + 1, dtype=torch.int64)
    torch.cumsum(there, 0, out=before[1:])
    return RaggedTensor(values[there], before[numbers.row_splits], validate=False)


def _only_rows(column: RaggedTensor, kept: Tensor) -> RaggedTensor:
    """Return a column with the values of some rows alone; all other rows are empty."""
    if bool(kept.all()):
        return column
    lengths = torch.where(kept, column.row_lengths(), 0)
    places = ranges(column.row_splits[:-1], lengths)
    return RaggedTensor.from_row_lengths(column.flat_values[places], lengths, validate=False)


def _or_ones(weights: RaggedTensor, ids: RaggedTensor) -> RaggedTensor:
    """Return weights with ones for the ids of records that have none at all."""
    mine = weights.row_lengths()
    without = (mine == 0) & (ids.row_lengths() > 0)
    values = weights.flat_values.to(torch.float32)
    if not bool(without.any()):
        return weights.with_flat_values(values)
    lengths = torch.where(without, ids.row_lengths(), mine)
    made = torch.ones(int(lengths.sum()))
    made[torch.repeat_interleave(~without, lengths)] = values
    return RaggedTensor.from_row_lengths(made, lengths, validate=False)


def _check_lengths(name: str, column: str, items: RaggedTensor, others: RaggedTensor, found: Reading) -> None:
    if torch.equal(items.row_splits, others.row_splits):
        return
    mine, theirs = items.row_lengths(), others.row_lengths()
    found.blame(
        (mine != theirs).nonzero().squeeze(1),
        items.nrows,
        lambda row: BadReason(
            f"features.{name}: … items, and … values in column {column!r}",
            str(int(mine[row])),
            str(int(theirs[row])),
        ),
    )


def _with_slot(name: str, column: str, ids: RaggedTensor, slot: int, found: Reading) -> RaggedTensor:
    values = ids.flat_values
    wrong = values >> SIGNATURE_BITS[2] != 0
    if bool(wrong.any()):
        rows = torch.repeat_interleave(torch.arange(ids.nrows), ids.row_lengths())[wrong]
        found.blame(
            rows,
            ids.nrows,
            lambda row: BadReason(
                f"features.{name}: column {column!r} has …, which does not fit into the "
                f"{SIGNATURE_BITS[2]} bits that a fid has for it; leave fids off",
                str(_row(ids, row)),
            ),
        )
    return ids.with_flat_values(make_fid(slot, values))


def _scaled(one: FloatFeature, numbers: Tensor) -> Tensor:
    if one.scale == "log":
        return torch.log1p(numbers.abs()).copysign(numbers)
    if one.scale == "standard":
        assert one.mean is not None
        assert one.std is not None
        return (numbers - torch.tensor(one.mean)) / torch.tensor([std or 1.0 for std in one.std])
    return numbers


def _cut(items: RaggedTensor, most: int, keep: Literal["first", "last"]) -> RaggedTensor:
    """Return the first or last ids of each row."""
    lengths = items.row_lengths()
    if not len(lengths) or int(lengths.max()) <= most:
        return items
    kept = lengths.clamp(max=most)
    starts = items.row_splits[:-1] if keep == "first" else items.row_splits[1:] - kept
    return RaggedTensor.from_row_lengths(items.flat_values[ranges(starts, kept)], kept, validate=False)


def _same_rows(columns: Sequence[RaggedTensor]) -> bool:
    return all(torch.equal(columns[0].row_splits, one.row_splits) for one in columns[1:])


def _count_steps(raw: RaggedTensor, separator: str | None) -> int:
    """Return how many values a column of a history has, missing ones included."""
    texts = raw.values
    if not isinstance(texts, RaggedTensor):
        return len(texts)
    if separator is None:
        return texts.nrows
    # An empty text is a row without steps, not one with a step that is missing.
    cuts = int((texts.flat_values == ord(separator)).sum())
    return cuts + int((texts.row_lengths() > 0).sum())


def _one_per_step(raw: RaggedTensor, separator: str | None) -> RaggedTensor:
    is_cut = raw.dtype is torch.uint8 and separator is not None
    return split_texts(without_empty_texts(raw), separator or "") if is_cut else raw


def _check_steps(
    name: str, column: str, other: str, items: RaggedTensor, others: RaggedTensor, found: Reading
) -> None:
    mine, theirs = items.row_lengths(), others.row_lengths()
    found.blame(
        (mine != theirs).nonzero().squeeze(1),
        items.nrows,
        lambda row: BadReason(
            f"features.{name}: column {column!r} has … steps, and column {other!r} …: each step has a value "
            "in both",
            str(int(mine[row])),
            str(int(theirs[row])),
        ),
    )


def _without_gaps(columns: Sequence[RaggedTensor]) -> list[RaggedTensor]:
    """Return columns of one length without the steps at which one of them has no value."""
    there = torch.ones(int(columns[0].row_splits[-1]), dtype=torch.bool)
    for column in columns:
        values = column.values
        if isinstance(values, RaggedTensor):
            there &= values.row_lengths() > 0
        elif values.is_floating_point():
            there &= ~values.isnan()
    places = there.nonzero().squeeze(1)
    before = torch.zeros(len(there) + 1, dtype=torch.int64)
    torch.cumsum(there, 0, out=before[1:])
    splits = before[columns[0].row_splits]
    found = []
    for column in columns:
        values = column.values
        if isinstance(values, RaggedTensor):
            lengths = values.row_lengths()[places]
            flat = values.flat_values[ranges(values.row_splits[places], lengths)]
            kept: Tensor | RaggedTensor = RaggedTensor.from_row_lengths(flat, lengths, validate=False)
        else:
            kept = values[places]
        found.append(RaggedTensor(kept, splits, validate=False))
    return found


def _spread(column: RaggedTensor, rows: int) -> RaggedTensor:
    """Return a column of one row as one of many, and others as they are."""
    if column.nrows == rows:
        return column
    values = column.flat_values
    return RaggedTensor(values.repeat(rows), torch.arange(rows + 1) * len(values), validate=False)


def _empty(dtype: torch.dtype, rows: int) -> RaggedTensor:
    values: Tensor | RaggedTensor = torch.empty(0, dtype=dtype)
    if dtype is torch.uint8:
        values = RaggedTensor(values, torch.zeros(1, dtype=torch.int64), validate=False)
    return RaggedTensor(values, torch.zeros(rows + 1, dtype=torch.int64), validate=False)


def _texts(raw: RaggedTensor) -> tuple[Any, Any, Any]:
    """Return the bytes, the texts and the rows of a column, as the core takes them."""
    texts = raw.values
    assert isinstance(texts, RaggedTensor)
    return (
        texts.flat_values.contiguous().numpy(),
        texts.row_splits.contiguous().numpy(),
        raw.row_splits.contiguous().numpy(),
    )


def _ragged(values: Any, splits: Any) -> RaggedTensor:
    return RaggedTensor(torch.from_numpy(values), torch.from_numpy(splits), validate=False)


def _row(column: RaggedTensor, row: int) -> list[Any]:
    begin, end = column.row_splits[row : row + 2].tolist()
    listed: list[Any] = column.flat_values[begin:end].tolist()
    return listed


def _cell(raw: RaggedTensor, row: int) -> str:
    """Return the texts of a row, for a message."""
    texts = raw.values
    assert isinstance(texts, RaggedTensor)
    begin, end = raw.row_splits[row : row + 2].tolist()
    first, last = int(texts.row_splits[begin]), int(texts.row_splits[end])
    return repr(
        bytes(texts.flat_values[first : min(last, first + _SHOWN)].tolist()).decode("utf-8", "replace")
    )


def _said(raw: RaggedTensor) -> str:
    if raw.dtype is torch.uint8:
        rows = (raw.row_lengths() > 0).nonzero().squeeze(1)
        return f"texts such as {_cell(raw, int(rows[0]))}" if len(rows) else "texts"
    return {torch.int64: "whole numbers", torch.float32: "numbers"}[raw.dtype]


def _values_at(numbers: RaggedTensor, position: int) -> Tensor:
    """Return the value at a position of each row, NaN where a row has fewer: float32 (rows,)."""
    values = numbers.flat_values
    if (
        position == 0
        and len(values) == numbers.nrows
        and torch.equal(numbers.row_splits, torch.arange(numbers.nrows + 1))
    ):
        return values
    return numbers.to_padded(position + 1, float("nan"))[:, position]
