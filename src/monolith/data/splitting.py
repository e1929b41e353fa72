"""Splitting: which records of a set are trained on, evaluated on and predicted.

A hash of its values, as a number from 0 to 1, decides the part of a record. So splitting needs no state, no
second pass and no order, and a copy of a record is always in the same part. Leave-one-out (`last_of`) alone
needs to know all records: a first pass finds the last ones and keeps their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.concurrency import Lock
from monolith.data.config import DataSplit, Part, moment_of
from monolith.data.records import Records
from monolith.data.source import Stream
from monolith.errors import DataError
from monolith.feature.spec import UnmovedRows
from monolith.feature.spec.times import TIME, read_times, whole_texts, without_empty_texts
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor


def types_for(split: DataSplit | None, types: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return the types of all columns to read, including those that a split names."""
    named = {} if split is None else dict.fromkeys(split.columns, torch.uint8)
    if split is not None and split.time is not None:
        named[split.time] = TIME
    return {**named, **types}


def times_in(types: Mapping[str, torch.dtype]) -> frozenset[str]:
    """Return the columns that hold times."""
    return frozenset(name for name, dtype in types.items() if dtype is TIME)


def part_filter(
    part: Part,
    split: DataSplit,
    columns: Sequence[str] | None = None,
    times: Collection[str] = (),
) -> Callable[[Records], Tensor]:
    """Return a predicate: whether each record is in this part.

    Args:
        columns: Those that decide if the split names none; None means all there are.
        times: Those that hold times, which may be numbers as texts.
    """
    if split.time is not None:
        low, high = _times_in(part, split)
        within = native.RowTest("between", decimals=[low, high], any=1)
        return lambda records: _by_time(part, split, within, records)
    deciding = split.by or columns

    def by_chance(records: Records) -> Tensor:
        low, high = _range(part, split)
        chosen = list(records.columns) if deciding is None else deciding
        if (rows := records.in_blocks()) is None:
            drawn = fractions(records, chosen, split.seed, times)
            return torch.from_numpy((drawn >= low) & (drawn < high))
        hashed = _hashed_columns(rows, _there(records, chosen), times)
        seed = split.seed % (1 << 64)
        kept = native.drawn_rows(rows.blocks, rows.block_of, rows.rows, hashed, seed, low, high)
        return torch.from_numpy(kept.view(np.bool_))

    return by_chance


def fractions(
    records: Records, columns: Sequence[str], seed: int = 0, times: Collection[str] = ()
) -> NDArray[np.float64]:
    """Return a number for each record, even over 0 to below 1, that follows from its values in some columns.

    Raises:
        DataError: None of these columns is there.
    """
    total = _record_hashes(records, columns, seed, times)
    return (total >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _record_hashes(
    records: Records, columns: Sequence[str], seed: int, times: Collection[str]
) -> NDArray[np.uint64]:
    there, seed = _there(records, columns), seed % (1 << 64)
    if (rows := records.in_blocks()) is not None:
        hashed = _hashed_columns(rows, there, times)
        return native.hash_rows(rows.blocks, rows.block_of, rows.rows, hashed, seed)
    # Some columns are shared by all records: the same, column by column.
    total = mix(np.full(len(records), seed, dtype=np.uint64))
    for name in there:
        total = mix(total ^ _row_hashes(records[name], name in times))
    return total


def _there(records: Records, columns: Sequence[str]) -> list[str]:
    there = [name for name in sorted(columns) if name in records.columns]
    if not there:
        raise DataError(f"cannot split: the data has none of the columns {', '.join(columns)}")
    return there


def _hashed_columns(
    rows: UnmovedRows, names: Sequence[str], times: Collection[str]
) -> list[tuple[int, bool]]:
    """Return columns as the core hashes them; of times, the text of a whole number counts as that number."""
    return [(rows.numbers[name], name in times) for name in names]


def last_filter(
    part: Part, split: DataSplit, source: Stream[Records], columns: Sequence[str] | None = None
) -> Callable[[Records], Tensor]:
    """Return a predicate as `part_filter` does, for a split by the last records of each user.

    Args:
        source: All records, in the order of the files. They are read when the first batch is asked about.
        columns: Those by which a record is known again; None means all there are.
    """
    user = split.last_of
    assert user is not None

    def find() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the hashes of the records to evaluate on, and of those to predict."""
        whose, when, which = [], [], []
        with closing(source):
            for records in source:
                timed, seconds = _times_of(split, records)
                known = (timed & (records[user].row_lengths() == 1)).numpy()
                whose.append(_record_hashes(records, [user], 0, ())[known])
                when.append(seconds[known])
                which.append(hashed(records)[known])
        if not whose:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        users, moments, hashes = np.concatenate(whose), np.concatenate(when), np.concatenate(which)
        hashes = hashes[np.lexsort((moments, users))]  # stable: at the same time, the order of the files
        _, counts = np.unique(users, return_counts=True)
        last = (np.cumsum(counts) - 1)[counts >= 3]
        return hashes[last - 1], hashes[last]

    lock = Lock()
    outcome: list[native.MarkedIds | Exception] = []

    def withheld() -> native.MarkedIds:
        """Return what `find` found, or raise what it raised; the first thread that asks looks."""
        with lock:
            if not outcome:
                try:
                    evaluated, predicted = find()
                    marks = [np.full(len(evaluated), 1, np.uint64), np.full(len(predicted), 2, np.uint64)]
                    ids = np.concatenate([evaluated, predicted]).view(np.int64)
                    outcome.append(native.MarkedIds(ids, np.concatenate(marks)))
                except Exception as error:
                    outcome.append(error)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def hashed(records: Records) -> NDArray[np.uint64]:
        return _record_hashes(records, list(records.columns) if columns is None else columns, 0, ())

    def decide(records: Records) -> Tensor:
        marks = withheld().find(hashed(records).view(np.int64))
        masks = {"predict": marks >= 2, "evaluate": marks == 1, "train": marks == 0}
        return torch.from_numpy(masks[part])

    return decide


def _range(part: Part, split: DataSplit) -> tuple[float, float]:
    """Return the range of hashes of a part: records to evaluate on first, then those to predict."""
    withheld = split.evaluate + split.predict
    bounds = {
        "evaluate": (0.0, split.evaluate),
        "predict": (split.evaluate, withheld),
        "train": (withheld, 1.0),
    }
    return bounds[part]


def _by_time(part: Part, split: DataSplit, within: native.RowTest, records: Records) -> Tensor:
    assert split.time is not None
    if _are_times(split) or split.time not in records.columns or records.dtype_of(split.time) is torch.uint8:
        timed, values = _times_of(split, records)
        low, high = _times_in(part, split)
        kept = torch.from_numpy((values >= low) & (values < high))
        return torch.where(timed, kept, part == "train")
    views = records.views([split.time])
    found = within.passing(views, len(records), empty=part == "train", single=True)
    if found.max(initial=0) > 1:
        raise _several_times(split)
    return torch.from_numpy(found.view(np.bool_))


def _times_in(part: Part, split: DataSplit) -> tuple[float, float]:
    """Return the first time of a part, and the first after it."""
    end = float("inf")
    predicted = end if split.predict_from is None else moment_of(split.predict_from)
    evaluated = predicted if split.evaluate_from is None else moment_of(split.evaluate_from)
    bounds = {"train": (-end, evaluated), "evaluate": (evaluated, predicted), "predict": (predicted, end)}
    return bounds[part]


def _are_times(split: DataSplit) -> bool:
    """Whether numbers are times, too; otherwise they may be of any kind, such as days, and stay."""
    return any(isinstance(at, str) for at in (split.evaluate_from, split.predict_from))


def _several_times(split: DataSplit) -> DataError:
    return DataError(f"cannot split by time: a record has several values in column {split.time!r}")


def _times_of(split: DataSplit, records: Records) -> tuple[Tensor, NDArray[np.float64]]:
    """Return which records have a time, and the time of each: NaN without one."""
    assert split.time is not None
    column = records[split.time]
    if bool((column.row_lengths() > 1).any()):
        raise _several_times(split)
    values = column.flat_values.double()
    are_times = _are_times(split)
    if column.dtype is torch.uint8 or are_times:
        column, values = _moments(column, split.time, are_times)
    timed = column.row_lengths() == 1
    seconds = np.full(len(records), np.nan)
    seconds[timed.numpy()] = values.numpy()
    return timed, seconds


def _moments(column: RaggedTensor, name: str, are_times: bool) -> tuple[RaggedTensor, Tensor]:
    """Return a column of times, and its values as Unix seconds.

    Args:
        are_times: Whether numbers are times, too; otherwise they may be of any kind, such as days, and stay.
    """
    times = read_times(column)
    values = times.seconds.flat_values.double()
    if column.dtype is not torch.uint8:
        return times.seconds, values
    texts = without_empty_texts(column).values
    assert isinstance(texts, RaggedTensor)
    if bool(times.wrong.any()):
        wrong = bytes(texts.to_list()[int(times.wrong.nonzero()[0])])[:40].decode("utf-8", "replace")
        raise DataError(
            f"cannot split by time: column {name!r} has {wrong!r}, which is neither a time nor a number"
        )
    if not are_times and texts.nrows:
        whole = whole_texts(texts)
        values = torch.where(torch.from_numpy(whole.are), torch.from_numpy(whole.values).double(), values)
    return times.seconds, values


def _row_hashes(column: RaggedTensor, is_time: bool) -> NDArray[np.uint64]:
    """Return a hash of the values of each row, in their order."""
    values = _value_hashes(column, is_time)
    splits = column.row_splits.numpy()
    lengths = np.diff(splits)
    places = np.arange(len(values), dtype=np.uint64) - np.repeat(splits[:-1], lengths).astype(np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix(values + mix(places)), dtype=np.uint64)])
    return mix(sums[splits[1:]] - sums[splits[:-1]] + lengths.astype(np.uint64))


def _value_hashes(column: RaggedTensor, is_time: bool) -> NDArray[np.uint64]:
    values = column.values
    if isinstance(values, RaggedTensor):
        text = values.flat_values.numpy().tobytes()
        hashed = native.hash_strings(text, values.row_splits.numpy(), None, 2).view(np.uint64)
        if is_time and values.nrows:  # a Unix time is the same as text and as number
            whole = whole_texts(values)
            hashed = np.where(whole.are, whole.values.view(np.uint64), hashed)
        return hashed
    numbers = values.numpy()
    if numbers.dtype == np.float32:
        return numbers.view(np.uint32).astype(np.uint64)
    return numbers.astype(np.int64).view(np.uint64)
