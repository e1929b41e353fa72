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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, BinaryIO, Self

import torch

from monolith.data.format import BadRecord, Chunk, TextFormat
from monolith.data.formats.compressed import OpenText, compression_of, write_text
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
from monolith.data.records import DTYPES, Records, as_read
from monolith.errors import ConfigError, DataError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME

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

    def chunks(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Chunk]:
        with OpenText(path, end) as text:
            file = text.file
            # Nothing is to be told from the first records if all that is wanted has a type. Those of a file
            # that grows may not be there yet, and are not looked at again for each line that is appended.
            known = self._types if end is None else self._expected | self._types
            typed = columns is not None and all(name in known for name in columns)
            types, found = (known, {}) if typed else self._head(path, lambda: self._infer(file))
            wanted = {name: dtype for name, dtype in types.items() if columns is None or name in columns}
            kinds = {name: kind for name, kind in found.items() if name in wanted}
            file.seek(start)
            rows: list[Mapping[str, Cell]] = []
            bad: list[BadRecord] = []
            begun = reached = start
            for place, line in self._lines(file, start):
                if place - begun >= self._chunk_bytes and (rows or bad):
                    yield Chunk(rows_as_records(rows, wanted, kinds), place, tuple(bad), text.reached(place))
                    rows, bad, begun = [], [], place
                reached = place + len(line)
                try:
                    if len(line) > self._record_bytes:
                        raise ValueError(f"longer than {self._record_bytes} bytes, cut there")
                    row = json_object(line)
                    rows.append(cells_of(row, wanted) if typed else read_row(row, types, wanted))
                except ValueError as cause:  # malformed JSON and UTF-8, too
                    bad.append(BadRecord(place, f"line at byte {place}: {cause}", line))
            if rows or bad:
                yield Chunk(rows_as_records(rows, wanted, kinds), reached, tuple(bad), text.reached(reached))

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
        found, end = [0], 0
        with OpenText(path) as text:
            for place, line in self._lines(text.file, 0):
                if end and place - found[-1] >= self._chunk_bytes:
                    found.append(place)
                end = place + len(line)
        return [*found, end] if end else []

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
