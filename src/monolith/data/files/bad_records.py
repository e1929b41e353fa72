"""Checks of the records that a file source reads: bad records, files without records, missing columns.

Bad records are counted, quarantined and, if there are too many, end the run. Records that were shuffled,
split and batched no longer know their lines. To name the line of an empty cell, the file is read once more,
that column alone, up to the first record without a value: only on demand, and once."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from monolith.data.format import BadRecord, Chunk, Format, TextFormat
from monolith.data.formats.compressed import OpenText
from monolith.data.records import Records, known_columns, missing_rows
from monolith.data.source import closed_after
from monolith.errors import ConfigError, DataError, TooManyBadRecordsError
from monolith.filesystem import atomic_write, base_name, join, make_dirs
from monolith.observe import Metrics

_log = logging.getLogger(__name__)

_FINER = (64 << 10, 1 << 10, 1)
"""Sizes of chunks, in bytes, in which a record is located, one after the other; the last has one record."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecordPolicy:
    """What happens to records that cannot be read."""

    max_fraction: float = 0.0
    """The fraction of malformed records that is tolerated; more end the run, and with 0 the first does."""
    after: int = 1000
    """Records to read before `max_fraction` is checked: one bad record in the first ten says little. It is
    checked at the end in any case."""
    quarantine: str | None = None
    """A folder for malformed records: one file of JSON lines per chunk that had any, with path, place, reason
    and payload in base64. A chunk that is read again, after a restart or in another epoch, writes the same
    file."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(f"bad records: max_fraction must be from 0 to 1, got {self.max_fraction}")
        if self.after < 0:
            raise ConfigError(f"bad records: after must be 0 or more, got {self.after}")


_SAID = {torch.int64: "whole numbers", torch.float32: "numbers", torch.uint8: "text"}


class RecordChecks:
    """Checks every chunk that a file source reads, and all of them at the end.

    Args:
        columns: The columns to read; None for all.
    """

    def __init__(
        self, policy: BadRecordPolicy | None, columns: Sequence[str] | None, metrics: Metrics | None
    ) -> None:
        self._policy = policy or BadRecordPolicy()
        self._columns = columns
        self._metrics = metrics
        self._columns_checked = columns is None
        self._types: dict[str, tuple[torch.dtype, str]] = {}
        """Column -> its type, and the first file that has it."""
        self._changed: set[str] = set()
        self._empty: set[str] = set()

    def read(self, path: str, place: int, chunk: Chunk, good: int, bad: int) -> None:
        """Count a chunk, and quarantine its bad records.

        Args:
            place: Where the chunk begins in its file.
            good, bad: Records that the source has read so far, this chunk included.

        Raises:
            TooManyBadRecordsError: More records are bad than the policy allows.
        """
        if self._metrics is not None:
            self._metrics.counter("data_records", "Records read from files.").inc(len(chunk.records))
        self._count_bad(len(chunk.bad))
        if chunk.bad:
            if self._policy.quarantine is not None:
                _quarantine(self._policy.quarantine, path, place, chunk.bad)
            self._judge(good, bad, at_end=False, last=f"{path}: {chunk.bad[0].reason}")

    def check_columns(self, form: Format, path: str, records: Records) -> None:
        """Warn once of columns to read that a table does not have, most likely a typo, and of each column
        that changes its type between files."""
        for name in records.columns:
            dtype = records.dtype_of(name)
            known, first = self._types.setdefault(name, (dtype, path))
            if known is not dtype and name not in self._changed:
                self._note_change(name, path, first, records)
        if self._columns_checked or not records.complete:
            return
        self._columns_checked = True
        missing = [name for name in self._columns or () if name not in records.columns]
        if missing:
            with closed_after(form.chunks(path)) as chunks:
                there = [name for chunk in islice(chunks, 1) for name in chunk.records.columns]
            _log.warning(
                "file source: %s has no column %s; %s",
                path,
                ", ".join(map(repr, missing)),
                known_columns(missing[0], there, "it has"),
                extra={"cause": f"missing columns {missing}"},
            )

    def _note_change(self, name: str, path: str, first: str, records: Records) -> None:
        column = records.glance()[name]
        if not len(column.flat_values):
            return  # a file without a value in it may be of any type
        self._changed.add(name)
        _log.warning(
            "file source: column %r has %s in %s and %s in %s. Both are read as the features say; where that "
            "fails, write the column with one type in all files, or leave some of them out of data.path",
            name,
            _SAID[self._types[name][0]],
            first,
            _SAID[column.dtype],
            path,
            extra={"cause": f"the type of column {name} changes"},
        )

    def note_empty(self, path: str) -> None:
        """Warn once of a file without records."""
        if path not in self._empty:
            text = "file source: %s is empty: it has no records"
            _log.warning(text, path, extra={"cause": "empty files"})
        self._empty.add(path)

    def finish(self, good: int, bad: int, *, has_all_files: bool, last_file: str | None) -> None:
        """Check all records at the end of the data.

        Args:
            has_all_files: Whether this worker reads all files; the files of other workers may have records.

        Raises:
            TooManyBadRecordsError: More records are bad than the policy allows.
            DataError: None of the files has a record.
        """
        self._judge(good, bad, at_end=True)
        if self._empty and has_all_files and not good and not bad:
            files = "the only file has" if len(self._empty) == 1 else f"all {len(self._empty)} files have"
            raise DataError(f"file source: {files} no record; the last is {last_file}")

    def reject(self, bad: Sequence[BadRecord], file: str | None) -> None:
        """Count and quarantine records that could be read, and that a later stage found bad.

        The policy does not count them: the stage that found them has its own limit.
        """
        self._count_bad(len(bad))
        if self._policy.quarantine is not None and bad:
            # Named after the content, so that finding them again writes the same file, and not one more.
            number = zlib.crc32(b"".join(record.payload for record in bad))
            _quarantine(self._policy.quarantine, file or "records", number, bad)

    def _count_bad(self, count: int) -> None:
        if self._metrics is not None:
            bad = self._metrics.counter("data_bad_records", "Records of files that could not be used.")
            bad.inc(count)

    def _judge(self, good: int, bad: int, *, at_end: bool, last: str = "") -> None:
        total, most = good + bad, self._policy.max_fraction
        if total < self._policy.after and not at_end and most > 0:
            return
        if bad > most * total:
            raise TooManyBadRecordsError(
                f"file source: {bad} of {total} records could not be read, more than the fraction of {most} "
                f"that is allowed{f'; one of the last is in {last}' if last else ''}. Look at the data, or "
                "allow more with data.max_unreadable of the config (--data.max-unreadable 0.01), in Python "
                "BadRecordPolicy(max_fraction=...) of the source."
            )


def _quarantine(folder: str, path: str, place: int, bad: Sequence[BadRecord]) -> None:
    """Write bad records of a file to a folder."""
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


def locate_empty_cell(form: Format, path: str, column: str) -> str | None:
    """Return where the first record without a value in a column is: `line 7`, or `record 7` of a format
    without lines; None if every record has one."""
    place = records = 0
    for chunk in form.chunks(path, columns=[column]):
        if column in chunk.records.columns:
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
    """Return the line of a record; the last one if it has several.

    Args:
        place: Where the chunk of the record begins.
        row: The number of the record among the good ones from there on.
    """
    end = place
    for size in _FINER:  # read ever smaller chunks, so that the last one is the record alone
        for chunk in form.in_chunks_of(size).chunks(path, start=place, columns=[column]):
            end = chunk.next
            if row < len(chunk.records):
                break
            row -= len(chunk.records)
            place = chunk.next
    lines, left = 1, end - 1
    with OpenText(path) as text:
        while left > 0 and (piece := text.file.read(min(left, _PIECE_BYTES))):
            lines += piece.count(b"\n")
            left -= len(piece)
    return lines
