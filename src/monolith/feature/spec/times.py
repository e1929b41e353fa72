"""Times: texts, dates and numbers of several units become Unix seconds.

    2024-05-01T10:00:00          1714557600      a time without a zone is UTC
    2024-05-01 12:00+02:00       1714557600
    2024-05-01                   1714521600      midnight, UTC
    1714557600 or ...600.25      1714557600      seconds
    1714557600000                1714557600      milliseconds; microseconds and nanoseconds likewise

The unit of a number follows from its size alone, unless it is declared: in each unit, times from March 1973
to 2106 are numbers that are no time in any other form. So a record reads the same in whatever batch it is.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from math import floor
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.table.arguments import MAX_EVENT_TIME
from monolith.tensors import RaggedTensor

_log = logging.getLogger(__name__)

TimeUnit = Literal["auto", "iso", "s", "ms", "us", "ns"]
"""What the numbers of a column of times count; "iso" for texts in ISO 8601."""

TIME = torch.bits16
"""The type of a column of times, for a format that would have to guess: it reads texts, numbers and
timestamps without loss, as texts or whole numbers. A dtype that has no other use: no tensor is of it."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_OLDEST = 10**8
"""March 1973. A number that would be older in the smallest unit that it could be of is of a larger one."""
_LONGEST = 40
"""Characters of a time, at most; ISO 8601 with nanoseconds and a zone has 35."""
_ISO = "texts in ISO 8601, UTC without a zone"
_FORM_OF = {name: {f"Unix {_UNITS[name]}": name} for name in ("ms", "us", "ns")} | {"iso": {_ISO: "iso"}}
"""`ReadTimes.forms` of each unit that is not plain seconds, in the order of `RowTimes::Form`."""
_ZONE = re.compile(rb"(?:[Zz]| ?(?:UTC|GMT)| ?([+-])(\d\d):?(\d\d)?)")


class ReadTimes(NamedTuple):
    """A column of times, read."""

    seconds: RaggedTensor
    """int64, Unix seconds rounded down; 0 for a value that is no time."""
    wrong: Tensor
    """Bool for each value: whether it is no time at all."""
    forms: dict[str, str]
    """The recognised form, in plain words -> the `TimeUnit` that declares it; not plain seconds."""


def core_plan(unit: TimeUnit) -> tuple[int, bool, int, int]:
    """Return how the core reads times of a unit, as `native.IdPacker` has it."""
    return 0 if unit == "auto" else _PER_SECOND.get(unit, 1), unit == "iso", _OLDEST, MAX_EVENT_TIME


def core_forms(bits: int) -> dict[str, str]:
    """Return the forms that the core recognised, as those of `ReadTimes`."""
    found: dict[str, str] = {}
    for place, form in enumerate(_FORM_OF.values()):
        if bits >> place & 1:
            found |= form
    return found


def read_times(raw: RaggedTensor, unit: TimeUnit = "auto", separator: str | None = None) -> ReadTimes:
    """Return a column of times as Unix seconds. Texts are read in one go; an empty text is no value.

    Args:
        raw: Whole numbers, numbers, or texts.
        unit: Of numbers. Texts in ISO 8601 are read whatever it is, and with "iso" texts must be that;
            numbers that are no texts are then seconds, as columns of timestamps are.
        separator: Stands between the times of a list in one text.
    """
    if raw.dtype is not torch.uint8:
        found = _Found(len(raw.flat_values))
        found.numbers(raw.flat_values.numpy(), slice(None), "s" if unit == "iso" else unit)
        return found.times(raw)
    column = without_empty_texts(raw if separator is None else split_texts(raw, separator))
    texts = column.values
    assert isinstance(texts, RaggedTensor)
    found = _Found(texts.nrows)
    if texts.nrows:
        found.texts(_matrix(texts), unit)
    return found.times(column)


class _Found:
    """The seconds of values, as far as they were read."""

    def __init__(self, size: int) -> None:
        self.seconds = np.zeros(size, dtype=np.int64)
        self.wrong = np.zeros(size, dtype=bool)
        self.forms: dict[str, str] = {}

    def times(self, column: RaggedTensor) -> ReadTimes:
        values = torch.from_numpy(self.seconds)
        seconds = RaggedTensor(values, column.row_splits, validate=False)
        return ReadTimes(seconds, torch.from_numpy(self.wrong), self.forms)

    def numbers(self, values: NDArray[Any], rows: Any, unit: TimeUnit) -> None:
        """Read numbers, of the unit that is declared or of that which their size tells."""
        if values.dtype.kind == "f":
            fine = np.isfinite(values) & (np.abs(values) < 2.0**63)
            values = np.floor(np.where(fine, values, 0)).astype(np.int64)
        else:
            fine = np.ones(len(values), dtype=bool)
        if unit == "auto":
            seconds = values
            if len(values) and int(values.max()) >= _OLDEST * 1000:
                seconds = values.copy()
                for name in ("ms", "us", "ns"):
                    per_second = _PER_SECOND[name]
                    these = values >= _OLDEST * per_second
                    if bool(these.any()):
                        seconds[these] = values[these] // per_second
                        last = values < _OLDEST * per_second * 1000 if name != "ns" else these
                        if bool((these & last).any()):
                            self.forms |= _FORM_OF[name]
        else:
            per_second = _PER_SECOND[unit]
            seconds = values // per_second
            if per_second > 1:  # a column of timestamps is read as seconds, and would be in 1970
                fine &= values >= _OLDEST * per_second
        self.seconds[rows] = np.where(fine, seconds, 0)
        self.wrong[rows] = ~fine

    def texts(self, matrix: NDArray[np.uint8], unit: TimeUnit) -> None:
        """Read texts.

        Args:
            matrix: A text in each row, with zeros behind.
        """
        width = matrix.shape[1]
        if width <= 18 and bool(_digits(matrix).all()):  # the plain case: whole numbers of one length
            powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
            values = (matrix - 48).astype(np.int64) @ powers
            is_number = np.ones(len(matrix), dtype=bool)
        else:
            is_number = _are_numbers(matrix)
            values = None  # of several lengths, or with a sign or a point: one by one
        if unit == "iso":
            self.wrong[is_number] = True
        elif values is not None:
            self.numbers(values, slice(None), unit)
        elif bool(is_number.any()):
            rows = is_number.nonzero()[0]
            texts = np.ascontiguousarray(matrix[rows]).view(f"S{width}").ravel()
            whole = [_whole(text) for text in texts.tolist()]
            self.numbers(np.array([number or 0 for number in whole], dtype=np.int64), rows, unit)
            self.wrong[rows] |= np.array([number is None for number in whole])
        rest = (~is_number).nonzero()[0]
        if len(rest):
            self._iso(matrix[rest].copy(), rest)

    def _iso(self, matrix: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        # numpy reads "today" and years of any length as well, and warns of zones: so the shape is looked at
        # here, and zones are taken off before.
        width = matrix.shape[1]
        fine = np.zeros(len(matrix), dtype=bool)
        if 8 <= width < _LONGEST:
            fine = _digits(matrix[:, :4]).all(1) & (matrix[:, 4] == ord("-")) & _digits(matrix[:, 5])
        offsets = _cut_zones(matrix, fine) if width > 11 else np.zeros(len(matrix), dtype=np.int64)
        texts = np.ascontiguousarray(matrix).view(f"S{width}").ravel()
        moments = np.zeros(len(matrix), dtype="M8[us]")
        try:
            moments[fine] = texts[fine].astype("M8[us]")
        except ValueError:  # some are none; few columns have many different ones
            for text in np.unique(texts[fine]):
                same = fine & (texts == text)
                try:
                    moments[same] = np.array([text]).astype("M8[us]")
                except ValueError:
                    fine[same] = False
        fine &= ~np.isnat(moments)
        seconds = moments.astype(np.int64) // 10**6 - offsets
        self.seconds[rows] = np.where(fine, seconds, 0)
        self.wrong[rows] = ~fine
        if bool(fine.any()):
            self.forms[_ISO] = "iso"


def _cut_zones(matrix: NDArray[np.uint8], fine: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Blank the zones behind texts, and return how far ahead of UTC they are, in seconds."""
    offsets = np.zeros(len(matrix), dtype=np.int64)
    tail = matrix[:, 11:]
    # The first character behind the date that is none of a time of day.
    other = (tail != 0) & ~_digits(tail) & (tail != ord(":")) & (tail != ord("."))
    zoned = other.any(1) & fine
    begins = other.argmax(1)
    for begin in np.unique(begins[zoned]):
        these = (zoned & (begins == begin)).nonzero()[0]
        zones = np.ascontiguousarray(tail[these, begin:]).view(f"S{tail.shape[1] - begin}").ravel()
        for zone in np.unique(zones):
            same = these[zones == zone]
            match = _ZONE.fullmatch(bytes(zone))
            if match is None:
                fine[same] = False
                continue
            sign, hours, minutes = match.groups()
            seconds = 0 if sign is None else 3600 * int(hours) + 60 * int(minutes or 0)
            offsets[same] = -seconds if sign == b"-" else seconds
            tail[same, begin:] = 0
    return offsets


class WholeTexts(NamedTuple):
    """Which texts are whole numbers, and what they are; 0 for all other texts."""

    are: NDArray[np.bool_]
    values: NDArray[np.int64]


def whole_texts(texts: RaggedTensor) -> WholeTexts:
    """Return which texts are whole numbers of up to 18 digits."""
    matrix = _matrix(texts)
    are = _are_numbers(matrix) & ~(matrix == ord(".")).any(1) & ((matrix != 0).sum(1) <= 18)
    are &= (matrix[:, 0] != ord("-")) | ((matrix != 0).sum(1) > 1)
    values = np.zeros(len(matrix), dtype=np.int64)
    values[are] = np.ascontiguousarray(matrix[are]).view(f"S{matrix.shape[1]}").ravel().astype(np.int64)
    return WholeTexts(are, values)


def _digits(texts: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which characters are digits."""
    found: NDArray[np.bool_] = texts - np.uint8(48) < 10  # what is below wraps around
    return found


def _are_numbers(matrix: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which texts have digits and points alone, but for a sign before them."""
    inner = matrix[:, 1:]
    plain = _digits(inner) | (inner == 0) | (inner == ord("."))
    found: NDArray[np.bool_] = (_digits(matrix[:, 0]) | (matrix[:, 0] == ord("-"))) & plain.all(1)
    return found


def _whole(text: bytes) -> int | None:
    """Return the whole part of a number that is written with digits, a point and a sign; None if it is
    none."""
    try:
        number = int(text) if b"." not in text else floor(float(text))
    except ValueError:
        return None
    return number if -(1 << 63) <= number < 1 << 63 else None


def _matrix(texts: RaggedTensor) -> NDArray[np.uint8]:
    """Return texts as rows of bytes, with zeros behind them; one that is too long is cut."""
    flat, splits = texts.flat_values.numpy(), texts.row_splits.numpy()
    lengths = np.diff(splits)
    width = min(int(lengths.max()), _LONGEST)
    if bool((lengths == width).all()):
        return flat[splits[0] : splits[-1]].reshape(-1, width)
    places = splits[:-1, None] + np.arange(width)
    inside = np.arange(width) < lengths[:, None]
    matrix = np.zeros((len(lengths), width), dtype=np.uint8)
    matrix[inside] = flat[places[inside]]
    return matrix


def without_empty_texts(column: RaggedTensor) -> RaggedTensor:
    """Return a column of texts without those that are empty: they are no values."""
    texts = column.values
    assert isinstance(texts, RaggedTensor)
    some = texts.row_lengths() > 0
    if bool(some.all()):
        return column
    before = torch.zeros(texts.nrows + 1, dtype=torch.int64)
    torch.cumsum(some, 0, out=before[1:])
    splits = texts.row_splits[torch.cat([some, torch.ones(1, dtype=torch.bool)])]
    kept = RaggedTensor(texts.flat_values, splits, validate=False)
    return RaggedTensor(kept, before[column.row_splits], validate=False)


def split_texts(column: RaggedTensor, separator: str) -> RaggedTensor:
    """Return a column of texts with each text cut at a separator."""
    texts = column.values
    assert isinstance(texts, RaggedTensor)
    flat, splits = texts.flat_values.numpy(), texts.row_splits.numpy()
    at = (flat == ord(separator)).nonzero()[0]
    # A separator ends a text as the end of a cell does. In bytes without them, each is where it was, less
    # those before it.
    ends = np.concatenate([at, splits[1:]])
    order = np.argsort(ends, kind="stable")
    is_cell = np.concatenate([np.zeros(len(at), dtype=bool), np.ones(len(splits) - 1, dtype=bool)])[order]
    gone = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_cell)])[:-1]
    inner = np.concatenate([np.zeros(1, np.int64), ends[order] - gone])
    counts = np.concatenate([np.zeros(1, np.int64), is_cell.nonzero()[0] + 1])
    pieces = RaggedTensor(
        torch.from_numpy(flat[flat != ord(separator)]), torch.from_numpy(inner), validate=False
    )
    return RaggedTensor(pieces, torch.from_numpy(counts)[column.row_splits], validate=False)


class Recognised:
    """Reports the forms recognised in a column of times, each form once. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._said: set[tuple[str, str]] = set()

    def warn_of_rounding(self, column: str) -> None:
        """Log, once, that a column came as float32, which rounds today's seconds to about two minutes."""
        with self._lock:
            if (column, "") in self._said:
                return
            self._said.add((column, ""))
        _log.warning(
            "column %r: its times were read as 32-bit floats, and are rounded to some two minutes. Have them "
            "read exactly, as with ParquetFormat(types=spec.columns) or CsvFormat(types=spec.columns).",
            column,
        )

    def say(self, column: str, forms: Mapping[str, str], *, setting: str) -> None:
        """Log what is new.

        Args:
            forms: As of `ReadTimes`.
            setting: Declares it.
        """
        for form, unit in forms.items():
            with self._lock:
                if (column, form) in self._said:
                    continue
                self._said.add((column, form))
            _log.info(
                'column %r: its times are recognised as %s; %s = "%s" declares it.',
                column,
                form,
                setting,
                unit,
            )
