"""Where the first empty cell of a column is in a file, for whoever has to mend it.

Records that were shuffled, split and batched do not know their lines any more. So the file is read once
more, that column alone, up to the first record without a value: only when somebody asks, and once.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from monolith.data.format import Format
from monolith.data.formats.compressed import OpenText
from monolith.data.records import missing_rows

_FINER = (64 << 10, 1 << 10, 1)
"""Chunks in bytes that a record is looked for in, one after the other; the last ones hold one record."""
_PIECE_BYTES = 1 << 20


@runtime_checkable
class LinedFormat(Protocol):
    """A format of lines, whose places are bytes."""

    def in_chunks_of(self, chunk_bytes: int) -> Format:
        """Return the same with other chunks."""


def place_of_empty(form: Format, path: str, column: str) -> str | None:
    """Return where the first record without a value in a column is: `line 7`, or `record 7` of a format
    without lines; None where every record has one."""
    place = records = 0
    for chunk in form.chunks(path, columns=[column]):
        there = chunk.records.columns.get(column)
        if there is not None:
            empty = missing_rows(chunk.records[column]).nonzero()
            if len(empty):
                row = int(empty[0])
                if isinstance(form, LinedFormat):
                    return f"line {_line_of(form, path, column, place, row)}"
                return f"record {records + row + 1}"
        records += len(chunk.records) + len(chunk.bad)
        place = chunk.next
    return None


def _line_of(form: LinedFormat, path: str, column: str, place: int, row: int) -> int:
    """Return the line of a record, the last one where it has several.

    Args:
        place: Where the chunk of the record begins.
        row: Which of the good records from there on it is.
    """
    end = place
    for size in _FINER:
        for chunk in form.in_chunks_of(size).chunks(path, start=place, columns=[column]):
            end = chunk.next
            if row < len(chunk.records):
                break
            row -= len(chunk.records)
            place = chunk.next
    return 1 + _newlines(path, end - 1)


def _newlines(path: str, size: int) -> int:
    """Return how many there are in the first bytes of a file."""
    found = 0
    with OpenText(path) as text:
        while size > 0 and (piece := text.file.read(min(size, _PIECE_BYTES))):
            found += piece.count(b"\n")
            size -= len(piece)
    return found
