"""CSV files: a line per record, for data that people made.

    user,tags,price,label
    17,3|9,0.5,1
    18,,,0

An empty field is a record without values in that column. Where lists are allowed, an
inner separator stands between their values. A line that does not fit (too many fields, a
word where a number should be) is a bad record; the lines around it are read.

The native core reads bytes straight to columns; `native/src/csv_parser.h` says what becomes of
what. Here is what surrounds it: the names, the types, and the stretch of the file that it sees.
"""

from __future__ import annotations

import codecs
import copy
import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import torch

from monolith import native
from monolith.data.format import BadRecord, Chunk
from monolith.data.formats.compressed import OpenText, write_text
from monolith.data.records import DTYPES, Records
from monolith.errors import ConfigError, CorruptFileError, DataError
from monolith.tensors import RaggedTensor

_log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
"""Read beyond a chunk, so that its last record is there to the end and more."""

_TYPES = {
    torch.int64: native.ColumnType.INT64,
    torch.float32: native.ColumnType.FLOAT,
    torch.uint8: native.ColumnType.BYTES,
}
_ODD_SHARE = 0.1
"""Of the values of a column: where no more are texts, they are taken for mistakes."""

_OTHER_DELIMITERS = ";\t|,"
"""What else stands between fields: a header of one column with one of these in it was read wrongly."""

_DTYPES = {type_: dtype for dtype, type_ in _TYPES.items()}


class CsvFormat:
    """Reads and writes CSV, in UTF-8 or whatever bytes there are, compressed where the name ends so (.gz).

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
        self._dialect = native.CsvDialect(delimiter, list_separator, record_bytes)
        self._looked_at: set[str] = set()
        """Columns that were read as text, and whether that was meant was looked into."""

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the records of a file from byte `start` on; see `Format`."""
        with OpenText(path) as text:
            layout = self._layout(text.file, path)
            if layout is None:
                return
            if not start:
                self._warn_of_delimiter(path, layout.names)
            wanted = [name for name in layout.names if columns is None or name in columns]
            lines = _Lines(path)
            self._warn_of_odd(text.file, layout, wanted, lines)
            positions = [(layout.names.index(name), _TYPES[layout.types[name]]) for name in wanted]
            parser = native.CsvParser(self._dialect, len(layout.names), positions)
            window = _Window(text.file, max(start, layout.begin))
            window.fill(self._chunk_bytes + _READ_BYTES)
            while True:
                parsed = parser.parse(window.view, window.last, self._chunk_bytes)
                if parsed.whole:
                    bad = _bad_records(parsed, wanted, window, lines)
                    window.move(parsed.next)
                    if not parsed.records and not bad:
                        return
                    yield Chunk(_records(parsed, wanted), window.place, bad, text.reached(window.place))
                    window.fill(self._chunk_bytes + _READ_BYTES)
                else:
                    window.move(parsed.next)
                    window.fill(2 * len(window.view) + _READ_BYTES)

    def in_chunks_of(self, chunk_bytes: int) -> CsvFormat:
        """Return the same with other chunks."""
        other = copy.copy(self)
        other._chunk_bytes = chunk_bytes
        return other

    @contextmanager
    def writer(self, path: str) -> Iterator[_Writer]:
        """Open a file to write; see `Format`."""
        with write_text(path) as file:
            yield _Writer(file, self._delimiter, self._separator, self._header)

    def odd_values(self, path: str) -> list[str]:
        """Return what is odd in a file: columns that are text only because a few values are no numbers."""
        with OpenText(path) as text:
            layout = self._layout(text.file, path)
            return [] if layout is None else list(self._odd(text.file, layout, layout.names, _Lines(path)))

    # Reading

    def _warn_of_delimiter(self, path: str, names: Sequence[str]) -> None:
        """Say that one column with a semicolon in its name is many, read with the wrong delimiter."""
        other = next((one for one in _OTHER_DELIMITERS if len(names) == 1 and one in names[0]), None)
        if other is not None:
            _log.warning(
                "csv: %s: the header is one column, %r: its fields seem to be separated by %r, and %r was "
                "expected. Read it with CsvFormat(delimiter=%r)%s, or write it with %r.",
                *(path, names[0], other, self._delimiter, other),
                " or the format tsv" if other == "\t" else "",
                self._delimiter,
            )

    def _warn_of_odd(self, file: BinaryIO, layout: _Layout, wanted: Sequence[str], lines: _Lines) -> None:
        names = [name for name in wanted if name not in self._looked_at]
        self._looked_at |= {name for name in names if layout.types[name] is torch.uint8}
        for text in self._odd(file, layout, names, lines):
            _log.warning("csv: %s: %s", lines.path, text)

    def _odd(self, file: BinaryIO, layout: _Layout, names: Sequence[str], lines: _Lines) -> Iterator[str]:
        """Yield a text for each column whose type follows from a few of its values."""
        guessed = [name for name in names if name not in self._types and layout.types[name] is torch.uint8]
        if not guessed:
            return
        window = _Window(file, layout.begin)
        window.fill(layout.sniffed + _READ_BYTES)
        for name in guessed:
            number = (layout.names.index(name), native.ColumnType.FLOAT)
            parser = native.CsvParser(self._dialect, len(layout.names), [number])
            parsed = parser.parse(window.view, window.last, layout.sniffed)
            odd = [(begin, value) for begin, _, _, column, value in parsed.bad if column is not None]
            if odd and len(odd) <= _ODD_SHARE * parsed.records:
                begin, value = odd[0]
                line = lines.number(layout.begin + begin, window)
                yield (
                    f"line {line}: column {name!r}: {_shown(value)} is not a number, "
                    f"and {parsed.records:,} other records have one, so the column is read as text. Mend the "
                    f"line, or give the column's type: CsvFormat(types={{{name!r}: ...}})."
                )

    def _layout(self, file: BinaryIO, path: str) -> _Layout | None:
        """Read names and types from the head of a file; None for an empty one."""
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
        types = dict(self._types)
        if any(name not in types for name in names):
            sniffer = native.CsvSniffer(self._dialect, len(names), self._infer_rows)
            while not sniffer.done:
                window.move(sniffer.take(window.view, window.last))
                if window.last:
                    break
                window.fill(2 * len(window.view) + _READ_BYTES)
            for name, found in zip(names, sniffer.types, strict=True):
                types.setdefault(name, _DTYPES[found])
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
    """Tells which line of a file a byte is in, as an editor counts them. Reads on from where it was last."""

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
    """A stretch of a file, which moves on."""

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


def _records(parsed: native.ParsedCsv, names: Sequence[str]) -> Records:
    columns = {}
    for name, (flat, splits, inner) in zip(names, parsed.take_columns(), strict=True):
        values: torch.Tensor | RaggedTensor = torch.from_numpy(flat)
        if inner is not None:
            values = RaggedTensor(values, torch.from_numpy(inner), validate=False)
        columns[name] = RaggedTensor(values, torch.from_numpy(splits), validate=False)
    return Records(parsed.records, columns, complete=True)


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
            flat = column.flat_values.numpy().astype(str).tolist()  # as short as reads back the same
            splits = column.row_splits.tolist()
            cells = [flat[begin:end] for begin, end in pairwise(splits)]
        if self._separator is None and any(len(row) > 1 for row in cells):
            raise DataError(
                f"csv: column {name!r} has more than one value in a record; give CsvFormat a list_separator"
            )
        return [(self._separator or "").join(row) for row in cells]
