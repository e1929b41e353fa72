"""A plain reader of CSV, with an object per field: what the native one is compared with."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from monolith.data import BadRecord
from monolith.errors import CorruptFileError

_WHOLE = re.compile(rb"[+-]?[0-9]+")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)", re.IGNORECASE)


@dataclass(slots=True)
class PlainChunk:
    """What a chunk should be: the cells of each column by record."""

    begin: int
    types: Mapping[str, torch.dtype]
    next: int = 0
    size: int = 0
    cells: dict[str, list[list[Any]]] = field(default_factory=dict)
    bad: list[BadRecord] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainCsv:
    """Reads as `CsvFormat` of the same options does."""

    delimiter: str = ","
    list_separator: str | None = None
    header: bool = True
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    infer_rows: int = 1000
    chunk_bytes: int = 4 << 20
    record_bytes: int = 1 << 20

    def chunks(
        self, data: bytes, *, start: int = 0, columns: Sequence[str] | None = None
    ) -> Iterator[PlainChunk]:
        file = io.BytesIO(data)
        lines = self._lines(file, 0)
        head = 0
        names = list(self.types)
        if self.header:
            first = next(lines, None)
            if first is None:
                return
            names = self._names(first[1])
            head = first[0] + len(first[1])
        types = self._all_types(names, lines)
        wanted = {name: dtype for name, dtype in types.items() if columns is None or name in columns}
        place = max(start, head)
        file.seek(place)

        def new_chunk(begin: int) -> PlainChunk:
            return PlainChunk(begin, wanted, cells={name: [] for name in wanted})

        chunk = new_chunk(place)
        for begin, line in self._lines(file, place):
            if begin - chunk.begin >= self.chunk_bytes and (chunk.size or chunk.bad):
                chunk.next = begin
                yield chunk
                chunk = new_chunk(begin)
            try:
                row = self._row(line, names, wanted)
            except ValueError as cause:
                number = 1 + data.count(b"\n", 0, begin)
                chunk.bad.append(BadRecord(begin, f"line {number}: {cause}", line))
            else:
                chunk.size += 1
                for name in wanted:
                    chunk.cells[name].append(row[name])
            place = begin + len(line)
        chunk.next = place
        if chunk.size or chunk.bad:
            yield chunk

    def _names(self, line: bytes) -> list[str]:
        try:
            names = [name.decode() for name in self._fields(line)]
        except ValueError as cause:
            raise CorruptFileError("", 0, f"not a header of a CSV file: {cause}") from cause
        if len(set(names)) < len(names) or not all(names):
            raise CorruptFileError("", 0, f"a header with empty or repeated names: {names}")
        return names

    def _all_types(self, names: Sequence[str], lines: Iterator[tuple[int, bytes]]) -> dict[str, torch.dtype]:
        rows: list[list[bytes]] = []
        for _, line in lines:
            if len(rows) == self.infer_rows:
                break
            try:
                fields = self._fields(line)
            except ValueError:
                continue
            if len(fields) == len(names):
                rows.append(fields)
        types = {}
        for column, name in enumerate(names):
            values = [value for row in rows for value in self._values(row[column])]
            types[name] = self.types[name] if name in self.types else _narrowest(values)
        return types

    def _row(self, line: bytes, names: Sequence[str], wanted: Mapping[str, torch.dtype]) -> dict[str, Any]:
        if len(line) > self.record_bytes:
            raise ValueError(f"longer than {self.record_bytes} bytes, cut there")
        fields = self._fields(line)
        if len(fields) != len(names):
            raise ValueError(f"{len(fields)} fields instead of {len(names)}")
        row = {}
        for name, dtype in wanted.items():
            try:
                row[name] = [_parse(text, dtype) for text in self._values(fields[names.index(name)])]
            except ValueError as cause:
                raise ValueError(f"column {name!r}: {cause}") from cause
        return row

    def _lines(self, file: BinaryIO, place: int) -> Iterator[tuple[int, bytes]]:
        record = b""
        while True:
            line = file.readline(self.record_bytes + 1)
            record += line
            opened = record.count(b'"') % 2 == 1
            if opened and (not line or len(record) > self.record_bytes):
                record = record[: record.find(b"\n") + 1 or len(record)]
                file.seek(place + len(record))
            elif opened or (line and not line.endswith(b"\n") and len(record) <= self.record_bytes):
                continue
            if record.strip(b"\r\n"):
                yield place, record
            place, record = place + len(record), b""
            if not line and not opened:
                return

    def _fields(self, line: bytes) -> list[bytes]:
        text = line.rstrip(b"\r\n")
        if b'"' not in text:
            return text.split(self.delimiter.encode())
        lines = io.StringIO(text.decode("utf-8", "surrogateescape"), newline="")
        try:
            rows = list(csv.reader(lines, delimiter=self.delimiter, strict=True))
        except csv.Error as cause:
            raise ValueError(str(cause)) from cause
        if len(rows) != 1:
            raise ValueError("a quote is not closed")
        return [text.encode("utf-8", "surrogateescape") for text in rows[0]]

    def _values(self, text: bytes) -> list[bytes]:
        if not text:
            return []
        if self.list_separator is None:
            return [text]
        return [part for part in text.split(self.list_separator.encode()) if part]


def _parse(text: bytes, dtype: torch.dtype) -> bytes | int | float:
    if dtype is torch.uint8:
        return text
    text = text.strip()
    shown = repr(text[:40].decode("utf-8", "replace"))
    if dtype is torch.float32:
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"{shown} is not a number")
        return float(text)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shown} is not a whole number")
    number = int(text)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{shown} does not fit into 64 bits")
    return number - (1 << 64) if number >= 1 << 63 else number


def _narrowest(values: Sequence[bytes]) -> torch.dtype:
    for dtype in (torch.int64, torch.float32):
        try:
            for value in values:
                _parse(value, dtype)
        except ValueError:
            continue
        if values:
            return dtype
    return torch.uint8
