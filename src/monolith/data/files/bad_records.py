"""Bad records of files: how many may be dropped, their quarantine, and where the first empty cell is.

Records that were shuffled, split and batched no longer know their lines. To name the line of an empty cell,
the file is read once more, that column alone, up to the first record without a value: only on demand, and
once."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from monolith.data.format import BadRecord, Format, TextFormat
from monolith.data.formats.compressed import OpenText
from monolith.data.records import missing_rows
from monolith.errors import ConfigError
from monolith.filesystem import atomic_write, base_name, join, make_dirs


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecordPolicy:
    """What becomes of records that cannot be read."""

    max_share: float = 0.0
    """The share of malformed records that is tolerated; more stop the reading, and with 0 the first does."""
    after: int = 1000
    """Records to read before `max_share` is checked: one in the first ten says little. It is checked at the
    end in any case."""
    quarantine: str | None = None
    """A folder for malformed records: one file of JSON lines per chunk that had any, with path, place, reason
    and payload in base64. A chunk that is read again, after a restart or in another epoch, writes the
    same."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad records: max_share must be from 0 to 1, got {self.max_share}")
        if self.after < 0:
            raise ConfigError(f"bad records: after must be 0 or more, got {self.after}")


def quarantine(folder: str, path: str, place: int, bad: Sequence[BadRecord]) -> None:
    """Keep bad records of a file in a folder."""
    # Named after the chunk, so that reading it again writes the file again, and not one more.
    name = f"{base_name(path)}-{zlib.crc32(path.encode()):08x}-{place}.jsonl"
    make_dirs(folder)
    with atomic_write(join(folder, name)) as file:
        for record in bad:
            line = {
                "path": path,
                "place": record.place,
                "reason": record.reason,
                "payload": base64.b64encode(record.payload).decode(),
            }
            file.write(json.dumps(line).encode() + b"\n")


_FINER = (64 << 10, 1 << 10, 1)
"""Chunks in bytes that a record is looked for in, one after the other; the last ones hold one record."""
_PIECE_BYTES = 1 << 20


def locate_empty_cell(form: Format, path: str, column: str) -> str | None:
    """Return where the first record without a value in a column is: `line 7`, or `record 7` of a format
    without lines; None if every record has one."""
    place = records = 0
    for chunk in form.chunks(path, columns=[column]):
        there = chunk.records.columns.get(column)
        if there is not None:
            empty = missing_rows(chunk.records[column]).nonzero()
            if len(empty):
                row = int(empty[0])
                if form.text is not None:
                    return f"line {_line_of(form.text, path, column, place, row)}"
                return f"record {records + row + 1}"
        records += len(chunk.records) + len(chunk.bad)
        place = chunk.next
    return None


def _line_of(form: TextFormat, path: str, column: str, place: int, row: int) -> int:
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
