"""JSON lines: an object per line, for data that comes from scripts or goes to them.

    {"user": 17, "tags": [3, 9], "price": 0.5, "word": "hi"}
    {"user": 18, "tags": [], "price": null}

A value is a number, a text, a bool, or a list of these; a key that is missing, null and [] are no
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
from typing import Any, BinaryIO

import torch

from monolith.data.format import BadRecord, Chunk
from monolith.data.formats.compressed import OpenText, write_text
from monolith.data.formats.objects import (
    Cell,
    json_object,
    read_row,
    rows_as_records,
    values_of,
    wider,
)
from monolith.data.records import DTYPES, Records
from monolith.errors import ConfigError, DataError


class JsonLinesFormat:
    """Reads and writes JSON lines, compressed where the name ends so (.gz).

    Args:
        types: Key to int64, float32 or uint8 (text). A key that is not here gets the narrowest type that
            fits the first `infer_records` records of the file; one that first appears later makes its
            record a bad one. Give types where files should agree.
        chunk_bytes: Of the file that make a chunk.
        record_bytes: The most that one line may have.
    """

    name = "jsonl"

    def __init__(
        self,
        *,
        types: Mapping[str, torch.dtype] | None = None,
        infer_records: int = 1000,
        chunk_bytes: int = 4 << 20,
        record_bytes: int = 1 << 20,
    ) -> None:
        if wrong := {name: dtype for name, dtype in (types or {}).items() if dtype not in DTYPES}:
            raise ConfigError(f"jsonl: types must be of int64, float32 and uint8, got {wrong}")
        if min(infer_records, chunk_bytes, record_bytes) < 1:
            raise ConfigError("jsonl: infer_records, chunk_bytes and record_bytes must be at least 1")
        self._types = dict(types or {})
        self._infer_records = infer_records
        self._chunk_bytes = chunk_bytes
        self._record_bytes = record_bytes

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the records of a file from byte `start` on; see `Format`."""
        with OpenText(path) as text:
            file = text.file
            types = self._infer(file)
            wanted = {name: dtype for name, dtype in types.items() if columns is None or name in columns}
            file.seek(start)
            rows: list[Mapping[str, Cell]] = []
            bad: list[BadRecord] = []
            begun = end = start
            for place, line in self._lines(file, start):
                if place - begun >= self._chunk_bytes and (rows or bad):
                    yield Chunk(rows_as_records(rows, wanted), place, tuple(bad), text.reached(place))
                    rows, bad, begun = [], [], place
                end = place + len(line)
                try:
                    if len(line) > self._record_bytes:
                        raise ValueError(f"longer than {self._record_bytes} bytes, cut there")
                    rows.append(read_row(json_object(line), types, wanted))
                except ValueError as cause:  # malformed JSON and UTF-8, too
                    bad.append(BadRecord(place, f"line at byte {place}: {cause}", line))
            if rows or bad:
                yield Chunk(rows_as_records(rows, wanted), end, tuple(bad), text.reached(end))

    def in_chunks_of(self, chunk_bytes: int) -> JsonLinesFormat:
        """Return the same with other chunks."""
        other = copy.copy(self)
        other._chunk_bytes = chunk_bytes
        return other

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        """Open a file to write; see `Format`."""
        with write_text(path) as file:
            yield _Writer(file)

    def _infer(self, file: BinaryIO) -> dict[str, torch.dtype]:
        """Return the type of every key in the first records; what is malformed is found again later."""
        types, seen = dict(self._types), 0
        for _, line in self._lines(file, 0):
            if seen == self._infer_records:
                break
            try:
                row = json_object(line)
            except ValueError:
                continue
            seen += 1
            for name, value in row.items():
                if name not in self._types:
                    types[name] = wider(types.get(name), values_of(value))
        # A key without a value anywhere says nothing; text reads anything that may still come.
        return {name: torch.uint8 if dtype is None else dtype for name, dtype in types.items()}

    def _lines(self, file: BinaryIO, place: int) -> Iterator[tuple[int, bytes]]:
        """Yield where each line begins, and its bytes with the newline; a long one comes in pieces."""
        while line := file.readline(self._record_bytes + 1):
            if line.strip():
                yield place, line
            place += len(line)


class _Writer:
    """Writes records as lines: one value as it is, several as a list, none, and NaN, as null."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, records: Records) -> None:
        cells = {name: self._cells(records, name) for name in records.columns}
        for number in range(len(records)):
            row = {name: column[number] for name, column in cells.items()}
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def _cells(self, records: Records, name: str) -> list[Any]:
        column = records[name]
        rows: list[list[Any]]
        if column.dtype is torch.uint8:
            rows = [[t.decode("utf-8", "surrogateescape") for t in row] for row in records.strings(name)]
        elif column.dtype is torch.int64:
            rows = column.to_list()
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
        return [None if not row else row[0] if len(row) == 1 else row for row in rows]
