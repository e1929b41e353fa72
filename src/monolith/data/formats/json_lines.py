"""JSON lines: an object per line, for data that comes from scripts or goes to them.

    {"user": 17, "tags": [3, 9], "price": 0.5, "word": "hi"}
    {"user": 18, "tags": [], "price": null}

A value is a number, a text, a bool, or a list of these; a key that is missing, null, NaN and [] are no
values. Whole numbers and bools are int64, other numbers float32. A line that does not fit is a bad
record; the lines around it are read.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from monolith import native
from monolith.data.format import BadRecord, Chunk, Part, TextFormat
from monolith.data.formats.compressed import OpenText, TextWindow, compression_of, write_text
from monolith.data.formats.memory import (
    Cell,
    cells_of,
    json_object,
    kind_of_cells,
    read_row,
    rows_as_records,
    values_of,
    wider,
)
from monolith.data.records import DTYPES, Records, as_read, concat
from monolith.data.row_gathering import GatheredColumns, RowBlock
from monolith.errors import ConfigError, DataError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME

_COLUMNS = {
    torch.int64: native.ColumnType.INT64,
    torch.float32: native.ColumnType.FLOAT,
    torch.uint8: native.ColumnType.BYTES,
    TIME: native.ColumnType.BYTES,
}

_Found = tuple[dict[str, torch.dtype], dict[str, ColumnKind]]
"""What the first records of a file tell: the type of each key, and how it is written there."""


class JsonLinesFormat(TextFormat):
    """Reads and writes JSON lines, compressed where the name ends so (.gz).

    Args:
        types: Key to int64, float32 or uint8 (text). A key that is not here gets the narrowest type that
            fits the first `infer_records` records of the file; one that first appears later makes its
            record a bad one. Give types where files should agree.
        expected: Key to type, as `FeatureSpec.columns`, for types that the first records do not settle: a key
            without a value in them, whole numbers that fractions may follow, times.
        chunk_bytes: Of the file that make a chunk.
        record_bytes: The most that one line may have.
    """

    name = "jsonl"

    def __init__(
        self,
        *,
        types: Mapping[str, torch.dtype] | None = None,
        expected: Mapping[str, torch.dtype] | None = None,
        infer_records: int = 1000,
        chunk_bytes: int = 4 << 20,
        record_bytes: int = 1 << 20,
    ) -> None:
        if wrong := {name: dtype for name, dtype in (types or {}).items() if dtype not in (*DTYPES, TIME)}:
            raise ConfigError(f"jsonl: types must be of int64, float32 and uint8, got {wrong}")
        if min(infer_records, chunk_bytes, record_bytes) < 1:
            raise ConfigError("jsonl: infer_records, chunk_bytes and record_bytes must be at least 1")
        self._types = dict(types or {})
        self._expected = dict(expected or {})
        self._infer_records = infer_records
        super().__init__(chunk_bytes)
        self._record_bytes = record_bytes

    def parts(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Part]:
        with OpenText(path, end) as text:
            file = text.file
            # Nothing is to be told from the first records if all that is wanted has a type. Those of a file
            # that grows may not be there yet, and are not looked at again for each line that is appended.
            known = self._types if end is None else self._expected | self._types
            typed = columns is not None and all(name in known for name in columns)
            types, found = (known, {}) if typed else self._head(path, lambda: self._infer(file))
            wanted = {name: dtype for name, dtype in types.items() if columns is None or name in columns}
            kinds = {name: kind for name, kind in found.items() if name in wanted}
            # Other keys than these are ignored, or make a record a bad one.
            parser = JsonRows(wanted, None if typed else types, kinds)
            window = TextWindow(file, start)
            for place, view in window.cut(self._chunk_bytes, self._find_end):
                reached = text.reached(window.place)
                yield partial(self._parse, parser, place, view, window.place, reached)

    def _find_end(self, view: memoryview, last: bool, chunk_bytes: int) -> tuple[bool, int]:
        return native.find_lines_chunk_end(view, last, chunk_bytes, self._record_bytes)

    def _parse(
        self, parser: JsonRows, place: int, view: memoryview, after: int, reached: int
    ) -> tuple[Chunk]:
        """Return the records of the lines that begin at a place of the file."""
        bad: list[BadRecord] = []

        def judge(begin: int, size: int, read: Callable[[bytes], Row]) -> Row | None:
            line = bytes(view[begin : begin + size])
            try:
                if size > self._record_bytes:
                    raise ValueError(f"longer than {self._record_bytes} bytes, cut there")
                return read(line)
            except ValueError as cause:  # malformed JSON and UTF-8, too
                at = place + begin
                bad.append(BadRecord(at, f"line at byte {at}: {cause}", line))
                return None

        records = parser.records(parser.native.parse_lines(view, self._record_bytes), judge)
        return (Chunk(records, after, tuple(bad), reached),)

    def finished_bytes(self, piece: bytes) -> int:
        end = piece.rfind(b"\n") + 1
        return end if end or len(piece) <= self._record_bytes else len(piece)

    def inferring(self, records: int) -> Self:
        other = copy.copy(self)
        other._infer_records = records
        return other

    def bounds(self, path: str) -> list[int] | None:
        """Return the bytes at which chunks begin, by looking for line ends alone; see `Format`."""
        if compression_of(path) is not None:
            return None
        with OpenText(path) as text:
            window = TextWindow(text.file, 0)
            ends = [place + len(view) for place, view in window.cut(self._chunk_bytes, self._find_end)]
        return [0, *ends] if ends else []

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        with write_text(path) as file:
            yield _Writer(file)

    def _infer(self, file: BinaryIO) -> _Found:
        """Return the type of every key in the first records, and how it is written there; what is malformed
        is found again later."""
        types, seen = dict(self._types), 0
        cells: dict[str, list[Any]] = {}
        for _, line in self._lines(file, 0):
            if seen == self._infer_records:
                break
            try:
                row = json_object(line)
            except ValueError:
                continue
            seen += 1
            for name, value in row.items():
                cells.setdefault(name, []).append(value)
                if name not in self._types:
                    types[name] = wider(types.get(name), values_of(value))
        for name, dtype in self._expected.items():
            found = types.get(name)
            # A time with fractions stays text: a float32 holds today's seconds to a minute or two.
            is_rounded = found is torch.float32 and dtype is TIME
            if found is None or is_rounded or (found is torch.int64 and dtype is torch.float32):
                types[name] = self._types.get(name, dtype)
        # A key without a value anywhere says nothing; text reads anything that may still come.
        settled = {name: torch.uint8 if dtype is None else dtype for name, dtype in types.items()}
        kinds = {name: kind_of_cells(cells[name], settled[name]) for name in cells}
        return settled, kinds

    def _lines(self, file: BinaryIO, place: int) -> Iterator[tuple[int, bytes]]:
        """Yield where each line begins, and its bytes with the newline; a long one comes in pieces."""
        while line := file.readline(self._record_bytes + 1):
            if line.strip():
                yield place, line
            place += len(line)


Row = Mapping[str, Cell]


class JsonRows:
    """Makes records of JSON objects: by the core, and by Python those that the core finds odd.

    Both make the same of an object, so where the line between them is only matters for speed.

    Args:
        wanted: Key to its type.
        known: All keys that an object may have; None if it may have any.
    """

    def __init__(
        self,
        wanted: Mapping[str, torch.dtype],
        known: Mapping[str, torch.dtype] | None = None,
        kinds: Mapping[str, ColumnKind] | None = None,
    ) -> None:
        self._wanted, self._known, self._kinds = wanted, known, kinds or {}
        others = None if known is None else [name for name in known if name not in wanted]
        self.native = native.JsonParser(
            [(name, _COLUMNS[dtype], dtype is TIME) for name, dtype in wanted.items()], others
        )

    def records(
        self,
        parsed: native.ParsedJson,
        judge: Callable[[int, int, Callable[[bytes], Row]], Row | None],
    ) -> Records:
        """Return the records that the core has read, with the odd ones in their places.

        Args:
            judge: Is given where an odd object begins and its size, and what reads it or raises ValueError;
                returns the row, or None if it is bad.
        """
        rows: list[Row] = []
        places: list[int] = []
        for before, begin, size in parsed.odd:
            row = judge(begin, size, self._read)
            if row is not None:
                rows.append(row)
                places.append(before)
        count, names = parsed.records, list(self._wanted)
        if not names:
            return Records(count + len(rows), {})
        block = RowBlock.parsed(names, parsed.take_block())
        read = Records(count, GatheredColumns.of(block, np.arange(count)), kinds=self._kinds)
        if not rows:
            return read
        both = concat([read, rows_as_records(rows, self._wanted, self._kinds)])
        # The odd rows are behind the plain ones; name them where they belong.
        order = np.insert(np.arange(count), places, np.arange(count, count + len(rows)))
        return both.take(torch.from_numpy(order))

    def _read(self, text: bytes) -> Row:
        found = json_object(text)
        if self._known is None:
            return cells_of(found, self._wanted)
        return read_row(found, self._known, self._wanted)


class _Writer:
    """Writes records as lines: one value as it is, several as a list, none, and NaN, as null.

    A column of lists is a list in every line.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, records: Records) -> None:
        cells = {name: self._cells(records, name) for name in records.columns}
        for number in range(len(records)):
            row = {name: column[number] for name, column in cells.items()}
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _cells(self, records: Records, name: str) -> list[Any]:
        column, kind = records[name], records.kinds.get(name)
        rows: list[list[Any]]
        if column.dtype is torch.uint8:
            rows = [[t.decode("utf-8", "surrogateescape") for t in row] for row in records.strings(name)]
        elif column.dtype is torch.int64:
            flat = as_read(column.flat_values, kind).tolist()
            rows = [flat[begin:end] for begin, end in pairwise(column.row_splits.tolist())]
        else:
            # As short as reads back the same.
            flat = [float(text) for text in column.flat_values.numpy().astype(str).tolist()]
            if any(map(math.isinf, flat)):
                raise DataError(f"jsonl: column {name!r} has an infinite number, which JSON cannot hold")
            splits = column.row_splits.tolist()
            rows = [
                [value for value in flat[begin:end] if not math.isnan(value)]
                for begin, end in pairwise(splits)
            ]
        single = kind is None or kind.single
        return [None if not row else row[0] if single and len(row) == 1 else row for row in rows]
