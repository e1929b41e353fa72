"""CSV files: a line per record, for data that people made.

    user,tags,price,label
    17,3|9,0.5,1
    18,,,0

An empty field is a record without values in that column. Where lists are allowed, an
inner separator stands between their values. A line that does not fit (too many fields, a
word where a number should be) is a bad record; the lines around it are read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import torch

from monolith.data.format import BadRecord, Chunk
from monolith.data.records import DTYPES, Records
from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.filesystem import atomic_write, open_read
from monolith.tensors import RaggedTensor

_WHOLE = re.compile(rb"[+-]?[0-9]+")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)", re.IGNORECASE)


class CsvFormat:
    """Reads and writes CSV, in UTF-8 or whatever bytes there are.

    Args:
        delimiter: Between fields: one character.
        list_separator: Between the values of one field; None takes a field as one value.
        header: Whether the first line has the names. Without one, `types` must name all columns in order.
        types: Column to int64, float32 or uint8 (text). A column that is not here gets the narrowest type
            that fits the first `infer_rows` records of the file. Give types where files should agree.
        chunk_bytes: Of the file that make a chunk.
        record_bytes: The most that one record may have: an open quote ends there and not with the file.
    """

    name = "csv"

    def __init__(
        self,
        *,
        delimiter: str = ",",
        list_separator: str | None = None,
        header: bool = True,
        types: Mapping[str, torch.dtype] | None = None,
        infer_rows: int = 1000,
        chunk_bytes: int = 4 << 20,
        record_bytes: int = 1 << 20,
    ) -> None:
        for what, text in (("delimiter", delimiter), ("list_separator", list_separator)):
            if text is not None and (len(text) != 1 or not text.isascii() or text in '"\r\n'):
                raise ConfigError(
                    f"csv: {what} must be one ASCII character, not a quote or newline, got {text!r}"
                )
        if delimiter == list_separator:
            raise ConfigError(f"csv: {delimiter!r} cannot stand between fields and between values")
        if not header and not types:
            raise ConfigError("csv: without a header, give types to name the columns")
        if wrong := {name: dtype for name, dtype in (types or {}).items() if dtype not in DTYPES}:
            raise ConfigError(f"csv: types must be of int64, float32 and uint8, got {wrong}")
        if min(infer_rows, chunk_bytes, record_bytes) < 1:
            raise ConfigError("csv: infer_rows, chunk_bytes and record_bytes must be at least 1")
        self._delimiter = delimiter
        self._separator = list_separator
        self._header = header
        self._types = dict(types or {})
        self._infer_rows = infer_rows
        self._chunk_bytes = chunk_bytes
        self._record_bytes = record_bytes

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the records of a file from byte `start` on; see `Format`."""
        with open_read(path) as file:
            layout = self._layout(file, path)
            if layout is None:
                return
            wanted = [name for name in layout.names if columns is None or name in columns]
            place = max(start, layout.begin)
            file.seek(place)
            parsed = _Parsed(layout, wanted, place)
            for begin, line in self._lines(file, place):
                if begin - parsed.begin >= self._chunk_bytes and len(parsed):
                    yield parsed.chunk(begin)
                    parsed = _Parsed(layout, wanted, begin)
                if len(line) > self._record_bytes:
                    parsed.add_bad(begin, line, f"longer than {self._record_bytes} bytes, cut there")
                else:
                    try:
                        parsed.add(begin, line, self._fields(line))
                    except csv.Error as cause:
                        parsed.add_bad(begin, line, str(cause))
                place = begin + len(line)
            if len(parsed):
                yield parsed.chunk(place)

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        """Open a file to write; see `Format`."""
        with atomic_write(path) as file:
            yield _Writer(file, self._delimiter, self._separator, self._header)

    # Reading

    def _layout(self, file: BinaryIO, path: str) -> _Layout | None:
        """Read names and types from the head of a file; None for an empty one."""
        lines = self._lines(file, 0)
        begin = 0
        if self._header:
            first = next(lines, None)
            if first is None:
                return None
            try:
                names = [name.decode() for name in self._fields(first[1])]
            except (csv.Error, UnicodeDecodeError) as cause:
                raise CorruptFileError(path, 0, f"not a header of a CSV file: {cause}") from cause
            if len(set(names)) < len(names) or not all(names):
                raise CorruptFileError(path, 0, f"a header with empty or repeated names: {names}")
            begin = first[0] + len(first[1])
        else:
            names = list(self._types)
        missing = [name for name in names if name not in self._types]
        types = {name: self._types[name] for name in names if name in self._types}
        if missing:
            rows = []
            for _, line in lines:
                fields = self._try_fields(line)
                if len(fields) == len(names):
                    rows.append(fields)
                if len(rows) == self._infer_rows:
                    break
            for name in missing:
                column = names.index(name)
                types[name] = _narrowest(
                    [value for row in rows for value in _split(row[column], self._separator)]
                )
        return _Layout(names, types, self._separator, begin)

    def _lines(self, file: BinaryIO, place: int) -> Iterator[tuple[int, bytes]]:
        """Yield where each record begins, and its bytes with the newline: one line, or more in quotes."""
        record = b""
        while True:
            line = file.readline(self._record_bytes + 1)
            record += line
            opened = record.count(b'"') % 2 == 1
            if opened and (not line or len(record) > self._record_bytes):
                # A quote that nobody closed. The line is bad, but the next may be a good one.
                record = record[: record.find(b"\n") + 1 or len(record)]
                file.seek(place + len(record))
            elif opened or (line and not line.endswith(b"\n") and len(record) <= self._record_bytes):
                continue
            if record.strip(b"\r\n"):
                yield place, record
            place, record = place + len(record), b""
            if not line and not opened:
                return

    def _fields(self, line: bytes) -> list[bytes]:
        text = line.rstrip(b"\r\n")
        if b'"' not in text:
            return text.split(self._delimiter.encode())
        lines = io.StringIO(text.decode("utf-8", "surrogateescape"), newline="")
        rows = list(csv.reader(lines, delimiter=self._delimiter, strict=True))
        if len(rows) != 1:
            raise csv.Error("a quote is not closed")
        return [field.encode("utf-8", "surrogateescape") for field in rows[0]]

    def _try_fields(self, line: bytes) -> list[bytes]:
        try:
            return self._fields(line)
        except csv.Error:
            return []


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the head of a file says about the rest."""

    names: list[str]
    types: Mapping[str, torch.dtype]
    separator: str | None
    begin: int
    """Where the first record is."""


class _Parsed:
    """Records on their way into a chunk."""

    def __init__(self, layout: _Layout, wanted: Sequence[str], begin: int) -> None:
        self._layout = layout
        self._wanted = [(name, layout.names.index(name), layout.types[name]) for name in wanted]
        self.begin = begin
        self._size = 0
        self._values: list[list[bytes | int | float]] = [[] for _ in wanted]
        self._lengths: list[list[int]] = [[] for _ in wanted]
        self._bad: list[BadRecord] = []

    def __len__(self) -> int:
        return self._size + len(self._bad)

    def add(self, place: int, line: bytes, fields: Sequence[bytes]) -> None:
        """Take in a record, or put it to the bad ones."""
        if len(fields) != len(self._layout.names):
            self.add_bad(place, line, f"{len(fields)} fields instead of {len(self._layout.names)}")
            return
        row = []
        for name, position, dtype in self._wanted:
            try:
                row.append([_PARSE[dtype](text) for text in _split(fields[position], self._layout.separator)])
            except ValueError as cause:
                self.add_bad(place, line, f"column {name!r}: {cause}")
                return
        for values, lengths, cell in zip(self._values, self._lengths, row, strict=True):
            values.extend(cell)
            lengths.append(len(cell))
        self._size += 1

    def add_bad(self, place: int, line: bytes, reason: str) -> None:
        self._bad.append(BadRecord(place, f"line at byte {place}: {reason}", line))

    def chunk(self, end: int) -> Chunk:
        columns = {
            name: _to_ragged(values, lengths, dtype)
            for (name, _, dtype), values, lengths in zip(
                self._wanted, self._values, self._lengths, strict=True
            )
        }
        return Chunk(Records(self._size, columns), end, tuple(self._bad))


def _to_ragged(values: Sequence[bytes | int | float], lengths: list[int], dtype: torch.dtype) -> RaggedTensor:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    if dtype is not torch.uint8:
        return RaggedTensor.from_row_lengths(torch.tensor(values, dtype=dtype), sizes, validate=False)
    texts = [text for text in values if isinstance(text, bytes)]
    flat = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).copy())
    inner = RaggedTensor.from_row_lengths(flat, torch.tensor([*map(len, texts)], dtype=torch.int64))
    return RaggedTensor.from_row_lengths(inner, sizes, validate=False)


def _split(field: bytes, separator: str | None) -> list[bytes]:
    if not field:
        return []
    return [field] if separator is None else [text for text in field.split(separator.encode()) if text]


def _whole(text: bytes) -> int:
    text = text.strip()
    # Python would take 1_000, too.
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{_short(text)} is not a whole number")
    number = int(text)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{_short(text)} does not fit into 64 bits")
    return number - (1 << 64) if number >= 1 << 63 else number  # an unsigned id keeps its bits


def _number(text: bytes) -> float:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{_short(text)} is not a number")
    return float(text)


def _short(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "replace"))


_PARSE: Mapping[torch.dtype, Callable[[bytes], bytes | int | float]] = {
    torch.int64: _whole,
    torch.float32: _number,
    torch.uint8: bytes,
}


def _narrowest(values: Sequence[bytes]) -> torch.dtype:
    """Return the type of a column with these values; text if there are none, which says nothing."""
    for dtype in (torch.int64, torch.float32):
        try:
            for value in values:
                _PARSE[dtype](value)
        except ValueError:
            continue
        if values:
            return dtype
    return torch.uint8


class _Writer:
    """Writes records as lines. An empty text cannot be told from none, and reads as none."""

    def __init__(self, file: BinaryIO, delimiter: str, separator: str | None, header: bool) -> None:
        self._file = file
        self._delimiter = delimiter
        self._separator = separator
        self._header = header
        self._names: list[str] | None = None

    def write(self, records: Records) -> None:
        names = list(records.columns)
        lines = io.StringIO(newline="")
        rows = csv.writer(lines, delimiter=self._delimiter, lineterminator="\n")
        if self._names is None:
            self._names = names
            if self._header:
                rows.writerow(names)
        if names != self._names:
            raise DataError(
                f"csv: all records of a file must have the same columns: it has {', '.join(self._names)}, "
                f"these have {', '.join(names)}"
            )
        rows.writerows(zip(*(self._fields(records, name) for name in names), strict=True))
        self._file.write(lines.getvalue().encode("utf-8", "surrogateescape"))

    def _fields(self, records: Records, name: str) -> list[str]:
        column = records[name]
        if column.dtype is torch.uint8:
            cells = [
                [text.decode("utf-8", "surrogateescape") for text in row] for row in records.strings(name)
            ]
            if self._separator is not None and any(self._separator in text for row in cells for text in row):
                raise DataError(
                    f"csv: column {name!r} has a text with {self._separator!r} in it, which separates lists"
                )
        else:
            flat = column.flat_values.numpy().astype(str).tolist()  # as short as reads back the same
            splits = column.row_splits.tolist()
            cells = [flat[begin:end] for begin, end in pairwise(splits)]
        if self._separator is None and any(len(row) > 1 for row in cells):
            raise DataError(
                f"csv: column {name!r} has more than one value in a record; give CsvFormat a list_separator"
            )
        return [(self._separator or "").join(row) for row in cells]
