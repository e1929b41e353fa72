"""Files that grow: logs that other processes append to, and new files in the same folders.

A watch finds files that match patterns. If these are text, a file may be appended to while it is read, so it
has no end: the reader takes the finished lines, continues with the next file that has new lines, and returns
to it later. A position therefore has a place in every file, and not only in one:

    {"grown": {"logs/a.csv": [4096, 4096, 0], "logs/b.csv": [1024, 2048, 17]}}
                              |     |     records after that place which were yielded
                              |     bytes that the file had
                              the first byte that was not read

A file that was read completely may be deleted, also while no run reads. One that is deleted before that is an
error: its records would be lost.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from monolith import filesystem
from monolith.concurrency import Event
from monolith.data.files.cursors import FileCursor, FormerWorker, RemainingFile
from monolith.data.files.discovery import Watch, expand
from monolith.data.files.order import FileOrder, Step
from monolith.data.format import Chunk, Format, RecordWriter, TextFormat
from monolith.data.formats.compressed import compression_of
from monolith.data.records import Records
from monolith.data.source import Position, Shard
from monolith.errors import ConfigError, DataError, FileMissingError, RestoreError
from monolith.table.hashing import mix_one

_log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""How many bytes of a file are searched at a time for the end of the last finished record."""
_SCAN_S = 1.0
"""Seconds between two scans of all files. In between, only folders and files that grew lately are checked:
with ten thousand files at rest, a scan takes longer than a poll."""
_REMOTE_SCAN_S = 5.0
"""The same for a remote store, where each scan is many requests."""
_HOT = 100
"""How many files, those that grew last, are checked in every poll."""
_UNFINISHED_S = 30.0
"""Seconds after which a last line without a line break is worth a warning."""


def can_grow(form: Format, patterns: Sequence[str]) -> bool:
    """Return whether files of a format may be read while other processes append to them: plain text can."""
    return form.text is not None and not any(map(compression_of, patterns))


def growing_text(form: Format, patterns: Sequence[str]) -> GrowingText:
    """Return a format that reads the finished records of files of another format.

    Raises:
        ConfigError: Files of that format cannot grow.
    """
    if form.text is None or not can_grow(form, patterns):
        raise ConfigError(
            f"file source: files of {', '.join(patterns)} cannot be read while they grow: their format is "
            f"{form.name}, and only CSV, TSV and JSON lines that are not compressed are text. Watch them "
            "without grows, and move each into the folder when it is whole."
        )
    return GrowingText(form.text)


class GrowingText(Format):
    """Reads the records of a file that are finished by now, and leaves a last one that is being written."""

    def __init__(self, form: TextFormat) -> None:
        self._form = form
        self.name = form.name

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """Yield the finished records of a file from byte `start` on; see `Format`."""
        while (end := self._finished(path, start)) > start:
            for chunk in self._form.chunks(path, start=start, columns=columns, end=end):
                yield chunk
                start = chunk.next
            if start < end:  # blank lines at the end are in no chunk, and neither is a header alone
                yield Chunk(Records(0, {}), end)
                start = end

    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        return self._form.writer(path)

    def _finished(self, path: str, start: int) -> int:
        size = _PIECE_BYTES
        with filesystem.open_read(path) as file:
            while True:
                file.seek(start)
                piece = file.read(size)
                done = self._form.finished_bytes(piece)
                if done or len(piece) < size:
                    return start + done
                size *= 2  # one record is longer than that


class _FilePlace(NamedTuple):
    """How far a file was read."""

    place: int = 0
    size: int = 0
    """Bytes that it had when it was last checked."""
    skip: int = 0

    @property
    def is_read(self) -> bool:
        return self.place >= self.size and not self.skip


class GrowingFiles(FileOrder):
    """Files that match patterns, now or later, and may grow. One thread reads; see `FileOrder`.

    Files with new records are read in turn, in the order of their names.
    """

    grows = True
    live = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._shard = Shard()
        self._places: dict[str, _FilePlace] = {}
        self._sizes: dict[str, int] = {}
        """By file, its size when it was last read."""
        self._consumed: tuple[FileCursor, dict[str, _FilePlace]] = (FileCursor(), {})
        """The cursor of the consumer after its last batch, and how far each file was read then. Records that
        were read since may still be buffered, so a position must not use `_places`."""
        self._hot: dict[str, None] = {}
        """The local files that grew last, the latest at the end."""
        self._folders: dict[str, int] = {}
        """Local folders in which files may appear, with the time of their last change."""
        self._scan_at = 0.0
        self._unfinished: dict[str, tuple[int, float]] = {}
        """Files whose last line has no line break: their size, and since when."""

    def assign(self, shard: Shard) -> None:
        self._shard = shard

    def after(self, cursor: FileCursor) -> FileCursor | Step:
        # The file of the cursor was read up to it; remember that before another file is chosen.
        if cursor.file is not None and cursor.file in self._places:
            self._places[cursor.file] = _FilePlace(cursor.place, self._places[cursor.file].size)
        now = self._watch.now()
        if now >= self._scan_at or self._has_new_names():
            self._scan(now)
        for path in list(self._hot):
            self._see(path, _local_size(path))
        grown = sorted(path for path, one in self._places.items() if one.size > self._sizes.get(path, 0))
        if not grown:
            self._warn_of_unfinished(now)
            return Step.END if self._watch.is_over() else Step.WAIT
        self._watch.found()
        path = next((one for one in grown if cursor.file is not None and one > cursor.file), grown[0])
        one = self._places[path]
        self._sizes[path] = one.size
        return FileCursor(file=path, place=one.place, skip=one.skip)

    def _scan(self, now: float) -> None:
        """Check the sizes of all files."""
        found = [path for path in self._watch.list_files() if _is_of(path, self._shard)]
        for path in found:
            remote = filesystem.is_remote(path)
            with suppress(FileMissingError):  # it was deleted since it was listed
                self._see(path, filesystem.file_size(path) if remote else _local_size(path))
        for path in self._places.keys() - set(found):
            self._check_gone(path, self._places[path], DataError, "read")
        local = [one for pattern in self._watch.patterns for one in expand(pattern)]
        folders = {filesystem.parent(one) for one in [*local, *found] if not filesystem.is_remote(one)}
        self._folders = {folder: _changed_at(folder) for folder in folders}
        anywhere = any(map(filesystem.is_remote, self._watch.patterns))
        self._scan_at = now + (_REMOTE_SCAN_S if anywhere else _SCAN_S)

    def _has_new_names(self) -> bool:
        return any(_changed_at(folder) != at for folder, at in self._folders.items())

    def _see(self, path: str, size: int | None) -> None:
        """Note the size of a file; None if it is gone, which the next scan judges."""
        known = self._places.get(path, _FilePlace())
        if size is None or (path in self._places and size == known.size):
            return
        if size < known.place:
            raise DataError(
                f"file source: {path} has {size:,} bytes, and {known.place:,} of it were read: it was "
                "truncated or replaced. Write new records to the end of it, or to a file of another name."
            )
        self._places[path] = known._replace(size=size)
        self._heat(path)

    def _heat(self, path: str) -> None:
        if not filesystem.is_remote(path):
            self._hot.pop(path, None)
            self._hot[path] = None
        if len(self._hot) > _HOT:
            del self._hot[next(iter(self._hot))]

    def _check_gone(
        self, path: str, one: _FilePlace, kind: type[DataError | RestoreError], doing: str
    ) -> None:
        """Forget a file that is gone, if all of it was read.

        Raises:
            DataError: Some of it was not; or the other error of `kind`.
        """
        if not one.is_read:
            raise kind(
                f"cannot {doing} a file source: {path} was deleted or renamed, and only the first "
                f"{one.place:,} of its {one.size:,} bytes were trained on. Put it back under that name; or, "
                "to read all files that are there from their start, start a new model_dir from this one with "
                "restore.dir and restore.restart_data."
            )
        del self._places[path]
        for each in (self._sizes, self._hot, self._unfinished):
            each.pop(path, None)

    def _warn_of_unfinished(self, now: float) -> None:
        """Warn of a last line that stays unfinished."""
        for path, one in self._places.items():
            if one.is_read:
                self._unfinished.pop(path, None)
                continue
            size, since = self._unfinished.get(path, (one.size, now))
            if size != one.size:
                since = now
            elif now - since >= _UNFINISHED_S:
                _log.warning(
                    "file source: the last line of %s, at byte %d, has no line break at its end, so it is "
                    "not read: it may be incomplete. End the file with a line break.",
                    path,
                    one.place,
                    extra={"cause": "last lines without a line break"},
                )
                since = float("inf")  # once
            self._unfinished[path] = (one.size, since)

    def wait(self, stop: Event) -> None:
        self._watch.wait(stop)

    def rewind(self, cursor: FileCursor) -> None:
        consumed, places = self._consumed
        if consumed != cursor:
            places = self._places_at(cursor)
            self._consumed = (cursor, places)
        self._places = dict(places)
        self._sizes = {path: one.size for path, one in places.items() if one.is_read}

    def is_lost(self, cursor: FileCursor) -> bool:
        return cursor.file not in self._places  # it was read completely, and deleted

    def consumed(self, cursor: FileCursor, *, ended: bool) -> None:  # noqa: ARG002
        self._consumed = (cursor, self._places_at(cursor))

    def save(self, cursor: FileCursor) -> Position:
        # Right after a batch the consumer is in the file that is being read, and everything read of the other
        # files is in this batch or an earlier one. Later, reading may have come further than the consumer.
        consumed, places = self._consumed
        found = places if consumed == cursor else self._places_at(cursor)
        return {"grown": {path: list(one) for path, one in found.items()}}

    def _places_at(self, cursor: FileCursor) -> dict[str, _FilePlace]:
        """Return how far each file was read; the file of `cursor`, up to `cursor`."""
        found = dict(self._places)
        if cursor.file is not None and cursor.file in found:
            found[cursor.file] = _FilePlace(cursor.place, found[cursor.file].size, cursor.skip)
        return found

    def restore(self, saved: Position, cursor: FileCursor) -> None:
        places = _read_places(saved)
        there = set(self._watch.list_files())
        self._places = dict(places)
        for path in places.keys() - there:
            self._check_gone(path, places[path], RestoreError, "restore")
        for path, one in self._places.items():
            self._heat(path)
            size = filesystem.file_size(path)
            if size < one.place:
                raise RestoreError(
                    f"cannot restore a file source: {path} has {size:,} bytes, and {one.place:,} of it were "
                    "trained on: it was truncated or replaced. Put it back; or, to read all files that are "
                    "there from their start, start a new model_dir from this one with restore.dir and "
                    "restore.restart_data."
                )
        self._sizes = {path: one.size for path, one in self._places.items() if one.is_read}
        self._consumed = (cursor, dict(self._places))

    # Another number of workers: the name of a file decides its worker, so no file is distributed.

    def remaining(self, former: Sequence[FormerWorker]) -> list[list[RemainingFile]]:
        return [[] for _ in former]

    def begin(
        self,
        former: Sequence[FormerWorker],
        remaining: Sequence[RemainingFile],  # noqa: ARG002
        shard: Shard,
    ) -> Position:
        places = {path: one for worker in former for path, one in _read_places(worker.position).items()}
        return {"grown": {path: list(one) for path, one in places.items() if _is_of(path, shard)}}


def _read_places(saved: Position) -> dict[str, _FilePlace]:
    """Return how far each file was read, according to a position.

    Raises:
        RestoreError: It does not say.
    """
    grown = saved.get("grown")
    if isinstance(grown, Mapping) and all(
        isinstance(path, str)
        and isinstance(one, list)
        and len(one) == len(_FilePlace._fields)
        and all(isinstance(number, int) and number >= 0 for number in one)
        for path, one in grown.items()
    ):
        return {path: _FilePlace(*one) for path, one in grown.items()}
    raise RestoreError(
        "cannot restore a file source: the position is not of one that watches files which grow. Was "
        "data.watch another setting when it was saved?"
    )


def _is_of(path: str, shard: Shard) -> bool:
    """Return whether a file is in a shard: by its name alone, since the number of files is unknown."""
    # The low bits of crc32 are the same for many names that differ in one digit.
    return mix_one(zlib.crc32(path.encode())) % shard.workers == shard.worker


def _local_size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return None


def _changed_at(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
