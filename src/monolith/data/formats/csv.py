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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import torch

from monolith import native
from monolith.concurrency import Future, Lock
from monolith.data.format import BadRecord, Chunk, OddColumn, Part, TextFormat
from monolith.data.formats.compressed import READ_BYTES, OpenText, TextWindow, compression_of, write_text
from monolith.data.records import DTYPES, Records, as_read
from monolith.data.row_gathering import GatheredColumns, RowBlock
from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.feature import ColumnKind
from monolith.feature.spec.times import TIME

_log = logging.getLogger(__name__)

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

    def parts(
        self, path: str, *, start: int = 0, columns: Sequence[str] | None = None, end: int | None = None
    ) -> Iterator[Part]:
        with OpenText(path, end) as text:
            layout = self._head(path, lambda: self._read_layout(text.file, path, columns))
            if layout is None:
                return
            if not start:
                self._warn_of_delimiter(path, layout.names)
            wanted = [name for name in layout.names if columns is None or name in columns]
            lines = _Lines(path)
            self._warn_of_odd(text.file, layout, wanted, lines)
            positions = [(layout.names.index(name), _TYPES[layout.types[name]]) for name in wanted]
            parser = native.CsvParser(self._dialect, len(layout.names), positions)
            # The first part tells how columns are written again; parsing later ones waits for that.
            kinds: Future[dict[str, ColumnKind]] = Future()
            tell: Callable[[Records, memoryview], dict[str, ColumnKind]] | None
            tell = partial(self._kinds, layout)
            if self._heads is not None:
                # Of pieces in any order, it is the beginning of the file that tells, for all of them.
                kinds.set_result(
                    self._head(path, lambda: self._first_kinds(path, layout, parser, wanted), "kinds")
                )
                tell = None
            window = TextWindow(text.file, max(start, layout.begin))
            for place, view in window.cut(self._chunk_bytes, self._find_end):
                part = _CsvPart(place, view, window.place, text.reached(window.place))
                yield partial(part.parse, parser, wanted, lines, kinds, tell)
                tell = None

    def _find_end(self, view: memoryview, last: bool, chunk_bytes: int) -> tuple[bool, int]:
        return native.find_csv_chunk_end(self._dialect, view, last, chunk_bytes)

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
        """Return the bytes at which chunks begin, reading the file once; see `Format`."""
        if compression_of(path) is not None:
            return None
        with OpenText(path) as text:
            layout = self._head(path, lambda: self._read_layout(text.file, path))
            if layout is None:
                return []
            window = TextWindow(text.file, layout.begin)
            ends = [place + len(view) for place, view in window.cut(self._chunk_bytes, self._find_end)]
        return [0, *ends] if ends else []

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
            window = TextWindow(file, layout.begin)
            first: tuple[int, bytes] | None = None
            line = records = odd = 0
            while (left := layout.begin + layout.sniffed - window.place) > 0:
                size = min(left, self._chunk_bytes)
                window.fill(size + READ_BYTES)
                parsed = parser.parse(window.view, window.last, size)
                found = [(begin, value) for begin, _, _, column, value in parsed.bad if column is not None]
                if found and first is None:
                    first = found[0]
                    line = lines.number(window.place + first[0])
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

    def _first_kinds(
        self, path: str, layout: _Layout, parser: native.CsvParser, wanted: Sequence[str]
    ) -> dict[str, ColumnKind]:
        """Return the same as `_kinds` of the first chunk of a file."""
        with OpenText(path) as text:
            window = TextWindow(text.file, layout.begin)
            _, view = next(window.cut(self._chunk_bytes, self._find_end), (0, memoryview(b"")))
            return self._kinds(layout, csv_records(parser.parse(view, True, len(view)), wanted), view)

    def _kinds(self, layout: _Layout, records: Records, view: memoryview) -> dict[str, ColumnKind]:
        """Return how the columns of a file are written again, as a chunk of it tells."""
        kinds = {}
        for name, column in records.columns.items():
            written = _WRITTEN[column.dtype]
            if column.dtype is torch.int64 and bool((column.flat_values < 0).any()):
                # A negative number, or an unsigned one of more than 63 bits: only its text says which.
                texts = native.CsvParser(
                    self._dialect, len(layout.names), [(layout.names.index(name), native.ColumnType.BYTES)]
                ).parse(view, True, len(view))
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
        window = TextWindow(file, 0)
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
                window.fill(2 * len(window.view) + READ_BYTES)
            for name, found in zip(names, sniffer.types, strict=True):
                is_rounded = _DTYPES[found] is torch.float32 and self._types.get(name) is TIME
                # A time with fractions stays text: a float32 holds today's seconds to a minute or two.
                types.setdefault(name, torch.uint8 if is_rounded else _DTYPES[found])
        return _Layout(names, types, begin, max(window.place - begin, 1))

    def _first_record(self, window: TextWindow, path: str) -> list[bytes] | None:
        """Move behind the first record, and return its fields; None if there is none."""
        while True:
            try:
                end, fields = native.first_csv_record(self._dialect, window.view, window.last)
            except ValueError as cause:
                raise CorruptFileError(path, 0, f"not a header of a CSV file: {cause}") from cause
            most = max(self._record_bytes, READ_BYTES)
            if max(end, len(window.view) if fields is None else 0) > most:
                raise CorruptFileError(path, 0, f"not a header of a CSV file: longer than {most:,} bytes")
            window.move(end)
            if fields is not None or window.last:
                return fields
            window.fill(2 * len(window.view) + READ_BYTES)


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
    """Tells which line of a file a byte is in, as an editor counts them. Safe from any thread.

    Remembers the lines it was asked for: the next question is mostly about a byte a little further on.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = Lock()  # guards both lists, which rise together
        self._places, self._lines = [0], [1]

    def number(self, place: int) -> int:
        """Return the line, from 1 on, that a byte of the file is in."""
        with self._lock:
            nearest = bisect_right(self._places, place) - 1
            at, line = self._places[nearest], self._lines[nearest]
            with OpenText(self.path) as text:
                text.file.seek(at)
                while at < place and (piece := text.file.read(min(place - at, 1 << 20))):
                    at += len(piece)
                    line += piece.count(b"\n")
            if at > self._places[nearest]:
                self._places.insert(nearest + 1, at)
                self._lines.insert(nearest + 1, line)
            return line


class _CsvPart(NamedTuple):
    """The bytes of a chunk, and where it is."""

    place: int
    view: memoryview
    next: int
    reached: int

    def parse(
        self,
        parser: native.CsvParser,
        names: Sequence[str],
        lines: _Lines,
        kinds: Future[dict[str, ColumnKind]],
        tell: Callable[[Records, memoryview], dict[str, ColumnKind]] | None,
    ) -> tuple[Chunk]:
        """Return the records of the chunk.

        Args:
            tell: Says of what kinds columns are, if no other part does; otherwise those are waited for.
        """
        try:
            parsed = parser.parse(self.view, True, len(self.view))
            records = csv_records(parsed, names)
            if tell is not None:
                # Looking at values moves them, so that is done with records of its own.
                kinds.set_result(tell(records.take(torch.arange(len(records))), self.view))
        except BaseException as error:
            if tell is not None:
                kinds.set_exception(error)
            raise
        bad = []
        for begin, size, reason, column, value in parsed.bad:
            what = "" if column is None else f"column {names[column]!r}: {_shown(value)} "
            place, payload = self.place + begin, bytes(self.view[begin : begin + size])
            bad.append(BadRecord(place, f"line {lines.number(place)}: {what}{reason}", payload))
        return (Chunk(replace(records, kinds=kinds.result()), self.next, tuple(bad), self.reached),)


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
