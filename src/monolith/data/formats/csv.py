"""CSV files: a line per record, for data that people made.

    user,tags,price,label
    17,3|9,0.5,1
    18,,,0

An empty field is a record without values in that column. Where lists are allowed, an
inner separator is between their values. A line that does not fit (too many fields, a
word where a number should be) is a bad record; the lines around it are read.

The native core reads bytes straight to columns; `native/src/csv_parser.h` lists the
conversions. This module does the rest: names, types, and the part of the file that the parser sees.
"""

from __future__ import annotations

import codecs
import copy
import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import BinaryIO, Self

import numpy as np
import torch

from monolith import native
from monolith.data.format import BadRecord, Chunk, OddColumn, TextFormat
from monolith.data.formats.compressed import OpenText, compression_of, write_text
from monolith.data.records import DTYPES, Records, as_read
from monolith.data.row_gathering import GatheredColumns, RowBlock
from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME

_log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
"""Read beyond a chunk, so that its last record is there to the end and more."""

_TYPES = {
    torch.int64: native.ColumnType.INT64,
    torch.float32: native.ColumnType.FLOAT,
    torch.uint8: native.ColumnType.BYTES,
}
_WRITTEN = {torch.int64: "int64", torch.float32: "double", torch.uint8: "string"}
"""How a column of each type is written again; numbers with a point are float64 to other readers of CSV."""
_ODD_FRACTION = 0.1
"""If at most this fraction of the values of a column are texts, they may be mistakes."""
_SLIP_FRACTION = 0.001
"""If at most this fraction of the values are texts, they are mistakes and not codes with letters."""

_OTHER_DELIMITERS = ";\t|,"
"""Other delimiters: a header of one column that contains one of these was read wrongly."""

_DTYPES = {type_: dtype for dtype, type_ in _TYPES.items()}


class CsvFormat(TextFormat):
    """Reads and writes CSV, in UTF-8 or whatever bytes there are, compressed where the name ends so (.gz).

    Args:
        delimiter: Between fields: one character.
        list_separator: Between the values of one field; None takes a field as one value.
        header: Whether the first line has the names. Without one, `types` must name all columns in order.
        types: Column to int64, float32 or uint8 (text), or all of them as `FeatureSpec.columns`. A column
            that is not here gets the narrowest type that fits the first `infer_rows` records of the file.
            Give types where files should agree.
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
            raise ConfigError(f"csv: {delimiter!r} cannot separate both fields and values")
        if not header and not types:
            raise ConfigError("csv: without a header, give types to name the columns")
        if wrong := {name: dtype for name, dtype in (types or {}).items() if dtype not in (*DTYPES, TIME)}:
            raise ConfigError(f"csv: types must be of int64, float32 and uint8, got {wrong}")
        if min(infer_rows, chunk_bytes, record_bytes) < 1:
            raise ConfigError("csv: infer_rows, chunk_bytes and record_bytes must be at least 1")
        self._delimiter = delimiter
        self._separator = list_separator
        self._header = header
        self._types = dict(types or {})
        self._infer_rows = infer_rows
        super().__init__(chunk_bytes)
        self._record_bytes = record_bytes
        self._dialect = native.CsvDialect(delimiter, list_separator, record_bytes)
        self._looked_at: set[str] = set()
        """Columns that were read as text, and whether that was meant was looked into."""

    def chunks(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Chunk]:
        with OpenText(path, end) as text:
            layout = self._head(path, lambda: self._read_layout(text.file, path, columns))
            if layout is None:
                return
            if not start:
                self._warn_of_delimiter(path, layout.names)
            wanted = [name for name in layout.names if columns is None or name in columns]
            kinds: dict[str, ColumnKind] | None = None
            lines = _Lines(path)
            self._warn_of_odd(text.file, layout, wanted, lines)
            positions = [(layout.names.index(name), _TYPES[layout.types[name]]) for name in wanted]
            parser = native.CsvParser(self._dialect, len(layout.names), positions)
            window = _Window(text.file, max(start, layout.begin))
            while True:
                parsed = self._parse(parser, window)
                bad = _bad_records(parsed, wanted, window, lines)
                records = csv_records(parsed, wanted)
                if kinds is None and self._heads is None:
                    kinds = self._kinds(records, layout, window)
                elif kinds is None:
                    # Of pieces in any order, it is the beginning of the file that tells, for all of them.
                    kinds = self._head(path, lambda: self._first_kinds(path, layout, wanted), "kinds")
                window.move(parsed.next)
                if not parsed.records and not bad:
                    return
                yield Chunk(replace(records, kinds=kinds), window.place, bad, text.reached(window.place))

    def _parse(self, parser: native.CsvParser, window: _Window) -> native.ParsedCsv:
        """Return the chunk at the beginning of a window, which the parser is shown as much of as it takes.

        That is the same amount for a window that was filled further before: a chunk must not depend on the
        one before it.
        """
        shown = self._chunk_bytes + _READ_BYTES
        while True:
            window.fill(shown)
            last = window.last and len(window.view) <= shown
            parsed = parser.parse(window.view[:shown], last, self._chunk_bytes)
            if parsed.whole:
                return parsed
            # The chunk's last record is longer than the bytes shown: show more.
            window.move(parsed.next)
            shown = 2 * shown + _READ_BYTES

    def finished_bytes(self, piece: bytes) -> int:
        """Return how many bytes of a piece, which begins with a record, are records that are finished.

        A line break ends a record unless it is within quotes. A quote that stays open for longer than a
        record may be is a stray one: it is left to the parser, as in a file that does not grow.
        """
        # With an odd number of quotes the last line break is inside of quotes: search backwards line by line.
        end = piece.rfind(b"\n") + 1
        quotes, at = piece.count(b'"', 0, end), end
        while quotes % 2 and at:
            before = piece.rfind(b"\n", 0, at - 1) + 1
            quotes -= piece.count(b'"', before, at)
            at = before
        return end if end - at > self._record_bytes else at

    def bounds(self, path: str) -> list[int] | None:
        """Return the bytes at which chunks begin, reading the file once; see `Format`.

        A newline in quotes ends no record, so the native core finds the end of each chunk with a quote in it.
        Without a quote, the next newline is the end: about ten times as fast.
        """
        if compression_of(path) is not None:
            return None
        with OpenText(path) as text:
            layout = self._head(path, lambda: self._read_layout(text.file, path))
            if layout is None:
                return []
            parser = native.CsvParser(self._dialect, len(layout.names), [])
            window, found = _Window(text.file, layout.begin), [0]
            while True:
                window.fill(self._chunk_bytes + _READ_BYTES)
                end = self._plain_end(bytes(window.view[: self._chunk_bytes + _READ_BYTES]))
                if end is None:
                    parsed = self._parse(parser, window)
                    if not parsed.records and not parsed.bad:
                        return found if len(found) > 1 else []
                    end = parsed.next
                window.move(end)
                found.append(window.place)

    def _plain_end(self, data: bytes) -> int | None:
        """Return where a chunk at the beginning of some bytes ends; None if only a parser can tell: there is
        a quote, a blank line at its end, nothing but blank lines, or maybe a truncated record."""
        end = data.find(b"\n", self._chunk_bytes - 1) + 1
        if not 0 < end < len(data) or b'"' in data or len(data) > self._record_bytes:
            return None
        if data[end] in b"\r\n" or not data[:end].strip(b"\r\n"):
            return None
        return end

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        with write_text(path) as file:
            yield _Writer(file, self._delimiter, self._separator, self._header)

    def inferring(self, records: int) -> Self:
        other = copy.copy(self)
        other._infer_rows, other._looked_at = records, set()
        return other

    def odd_values(self, path: str) -> list[OddColumn]:
        """Return the columns that are text only because of a few values; reading then logs them no more."""
        with OpenText(path) as text:
            layout = self._head(path, lambda: self._read_layout(text.file, path))
            self._looked_at |= set(() if layout is None else layout.names)
            return [] if layout is None else list(self._odd(text.file, layout, layout.names, _Lines(path)))

    # Reading

    def _warn_of_delimiter(self, path: str, names: Sequence[str]) -> None:
        """Say that one column with a semicolon in its name is many, read with the wrong delimiter."""
        other = next((one for one in _OTHER_DELIMITERS if len(names) == 1 and one in names[0]), None)
        if other is not None and names[0] not in self._looked_at:  # once, and not for each file
            self._looked_at.add(names[0])
            _log.warning(
                "csv: %s: the header is one column, %r: its fields seem to be separated by %r, and %r was "
                "expected. Read it with CsvFormat(delimiter=%r)%s, or write it with %r.",
                *(path, names[0], other, self._delimiter, other),
                " or the format tsv" if other == "\t" else "",
                self._delimiter,
                extra={"cause": f"delimiter of {names[0]}"},
            )

    def _warn_of_odd(self, file: BinaryIO, layout: _Layout, wanted: Sequence[str], lines: _Lines) -> None:
        names = [name for name in wanted if name not in self._looked_at]
        self._looked_at |= {name for name in names if layout.types[name] is torch.uint8}
        for odd in self._odd(file, layout, names, lines):
            _log.warning("csv: %s: %s", lines.path, odd.text, extra={"cause": odd.text})

    def _odd(
        self, file: BinaryIO, layout: _Layout, names: Sequence[str], lines: _Lines
    ) -> Iterator[OddColumn]:
        """Yield the columns whose type follows from a few of their values."""
        for name in names:
            if name in self._types or layout.types[name] is not torch.uint8:
                continue
            number = (layout.names.index(name), native.ColumnType.FLOAT)
            parser = native.CsvParser(self._dialect, len(layout.names), [number])
            window = _Window(file, layout.begin)
            first: tuple[int, bytes] | None = None
            line = records = odd = 0
            while (left := layout.begin + layout.sniffed - window.place) > 0:
                size = min(left, self._chunk_bytes)
                window.fill(size + _READ_BYTES)
                parsed = parser.parse(window.view, window.last, size)
                found = [(begin, value) for begin, _, _, column, value in parsed.bad if column is not None]
                if found and first is None:
                    first = found[0]
                    line = lines.number(window.place + first[0], window)
                records, odd = records + parsed.records, odd + len(found)
                if not parsed.next or odd > _ODD_FRACTION * records:
                    break
                window.move(parsed.next)
            if first is not None and odd <= _ODD_FRACTION * records:
                text = (
                    f"line {line}: column {name!r}: {_shown(first[1])} is not a number, "
                    f"and {records:,} other records have one, so the column is read as text. Mend the "
                    f"line, or give the column's type: CsvFormat(types={{{name!r}: ...}})."
                )
                yield OddColumn(text, odd <= _SLIP_FRACTION * records)

    def _first_kinds(self, path: str, layout: _Layout, wanted: Sequence[str]) -> dict[str, ColumnKind]:
        """Return the same as `_kinds` of the first chunk of a file."""
        with OpenText(path) as text:
            window = _Window(text.file, layout.begin)
            positions = [(layout.names.index(name), _TYPES[layout.types[name]]) for name in wanted]
            parser = native.CsvParser(self._dialect, len(layout.names), positions)
            records = csv_records(self._parse(parser, window), wanted)
            return self._kinds(records, layout, window)

    def _kinds(self, records: Records, layout: _Layout, window: _Window) -> dict[str, ColumnKind]:
        """Return how the columns of a file are written again, as its first chunk tells."""
        kinds = {}
        for name, column in records.columns.items():
            written = _WRITTEN[column.dtype]
            if column.dtype is torch.int64 and bool((column.flat_values < 0).any()):
                # A negative number, or an unsigned one of more than 63 bits: only its text says which.
                texts = native.CsvParser(
                    self._dialect, len(layout.names), [(layout.names.index(name), native.ColumnType.BYTES)]
                ).parse(window.view, window.last, self._chunk_bytes)
                rows = csv_records(texts, [name]).strings(name)
                if any(text.isdigit() and int(text) >= 1 << 63 for row in rows for text in row):
                    written = "uint64"
            kinds[name] = ColumnKind(written, single=not bool((column.row_lengths() > 1).any()))
        return kinds

    def _read_layout(self, file: BinaryIO, path: str, columns: Sequence[str] | None = None) -> _Layout | None:
        """Return names and types from the head of a file; None for an empty one.

        Args:
            columns: Those whose types are wanted; None for all.
        """
        window = _Window(file, 0)
        window.fill(len(codecs.BOM_UTF8))
        if bytes(window.view).startswith(codecs.BOM_UTF8):  # spreadsheets put it before the first name
            window.move(len(codecs.BOM_UTF8))
        if self._header:
            first = self._first_record(window, path)
            if first is None:
                return None
            try:
                names = [name.decode() for name in first]
            except UnicodeDecodeError as cause:
                raise CorruptFileError(path, 0, f"not a header of a CSV file: {cause}") from cause
            if len(set(names)) < len(names) or not all(names):
                raise CorruptFileError(path, 0, f"a header with empty or repeated names: {names}")
        else:
            names = list(self._types)
        begin = window.place
        types = {name: dtype for name, dtype in self._types.items() if dtype is not TIME}
        if any(name not in types for name in names if columns is None or name in columns):
            sniffer = native.CsvSniffer(self._dialect, len(names), self._infer_rows)
            while not sniffer.done:
                window.move(sniffer.take(window.view, window.last))
                if window.last:
                    break
                window.fill(2 * len(window.view) + _READ_BYTES)
            for name, found in zip(names, sniffer.types, strict=True):
                is_rounded = _DTYPES[found] is torch.float32 and self._types.get(name) is TIME
                # A time with fractions stays text: a float32 holds today's seconds to a minute or two.
                types.setdefault(name, torch.uint8 if is_rounded else _DTYPES[found])
        return _Layout(names, types, begin, max(window.place - begin, 1))

    def _first_record(self, window: _Window, path: str) -> list[bytes] | None:
        """Move behind the first record, and return its fields; None if there is none."""
        while True:
            try:
                end, fields = native.first_csv_record(self._dialect, window.view, window.last)
            except ValueError as cause:
                raise CorruptFileError(path, 0, f"not a header of a CSV file: {cause}") from cause
            window.move(end)
            if fields is not None or window.last:
                return fields
            window.fill(2 * len(window.view) + _READ_BYTES)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the head of a file says about the rest."""

    names: list[str]
    types: Mapping[str, torch.dtype]
    begin: int
    """Where the first record is."""
    sniffed: int
    """Bytes from there on that the types follow from."""


class _Lines:
    """Tells which line of a file a byte is in, as an editor counts them. Continues from the last byte it was
    asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._place = 0
        self._line = 1

    def number(self, place: int, window: _Window) -> int:
        """Return the line, from 1 on, that a byte of a window is in; best asked for in order."""
        if place < self._place:
            self._place, self._line = 0, 1
        if self._place < window.place:
            self._read_to(window.place)
        self._pass(bytes(window.view[self._place - window.place : place - window.place]))
        return self._line

    def _read_to(self, place: int) -> None:
        with OpenText(self.path) as text:
            text.file.seek(self._place)
            while self._place < place and (piece := text.file.read(min(place - self._place, 1 << 20))):
                self._pass(piece)

    def _pass(self, piece: bytes) -> None:
        self._place += len(piece)
        self._line += piece.count(b"\n")


class _Window:
    """A range of bytes of a file, which moves forward."""

    def __init__(self, file: BinaryIO, place: int) -> None:
        file.seek(place)
        self._file = file
        self.place = place
        """Where in the file it begins."""
        self.view = memoryview(b"")
        self.last = False
        """Whether the file ends with it."""

    def fill(self, size: int) -> None:
        """Read on until there are `size` bytes, or all there are."""
        if self.last or len(self.view) >= size:
            return
        parts = [bytes(self.view)]
        missing = size - len(self.view)
        while missing > 0 and not self.last:
            parts.append(self._file.read(missing))
            missing -= len(parts[-1])
            self.last = not parts[-1]
        self.view = memoryview(b"".join(parts))

    def move(self, size: int) -> None:
        """Leave bytes behind."""
        self.view = self.view[size:]
        self.place += size


def csv_parser(
    fields: Sequence[str], types: Mapping[str, torch.dtype], delimiter: str, record_bytes: int = 1 << 20
) -> native.CsvParser:
    """Return a parser of some fields, one value each, for records that are not in a file."""
    # A time stays text: as a float32 it would be a minute or two off.
    dtypes = {name: torch.uint8 if dtype is TIME else dtype for name, dtype in types.items()}
    positions = [(fields.index(name), _TYPES[dtype]) for name, dtype in dtypes.items()]
    return native.CsvParser(native.CsvDialect(delimiter, None, record_bytes), len(fields), positions)


def csv_records(parsed: native.ParsedCsv, names: Sequence[str]) -> Records:
    """Return the records that a parser found, given the names of its columns."""
    rows, block = np.arange(parsed.records), RowBlock.parsed(names, parsed.take_block())
    return Records(parsed.records, GatheredColumns.of(block, rows), complete=True)


def _bad_records(
    parsed: native.ParsedCsv, names: Sequence[str], window: _Window, lines: _Lines
) -> tuple[BadRecord, ...]:
    bad = []
    for begin, size, reason, column, value in parsed.bad:
        place = window.place + begin
        what = "" if column is None else f"column {names[column]!r}: {_shown(value)} "
        payload = bytes(window.view[begin : begin + size])
        bad.append(BadRecord(place, f"line {lines.number(place, window)}: {what}{reason}", payload))
    return tuple(bad)


def _shown(value: bytes) -> str:
    return repr(value.decode("utf-8", "replace"))


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
            # As short as reads back the same; bools as Arrow and pandas read them.
            kind = records.kinds.get(name)
            flat = as_read(column.flat_values, kind).astype(str).tolist()
            if kind is not None and kind.type == "bool":
                flat = [text.lower() for text in flat]
            splits = column.row_splits.tolist()
            cells = [flat[begin:end] for begin, end in pairwise(splits)]
        if self._separator is None and any(len(row) > 1 for row in cells):
            raise DataError(
                f"csv: column {name!r} has more than one value in a record; give CsvFormat a list_separator, "
                "or write to a file that ends in .parquet or .jsonl"
            )
        return [(self._separator or "").join(row) for row in cells]
