"""Files that grow: logs that other processes append to, and new files in the same folders.

A watch finds files that match patterns. Where these are text, a file may be appended to while it is read, so
it has no end: its reader takes the lines that are finished, continues with the next file that has new lines,
and comes back. A position therefore has a place in every file, and not only in one:

    {"grown": {"logs/a.csv": [4096, 4096, 0], "logs/b.csv": [1024, 2048, 17]}}
                              |     |     records after that place which came before
                              |     bytes that the file had
                              the first byte that was not read

A file all of whose bytes were read may be deleted, also while no run reads. One that was deleted before is
an error: its records would be lost.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from monolith import filesystem
from monolith.data.files.cursors import FileCursor, Left, OldWorker
from monolith.data.files.discovery import Watch, expand
from monolith.data.files.order import Files, Step
from monolith.data.format import Chunk, Format, RecordWriter, TextFormat
from monolith.data.formats.compressed import compression_of
from monolith.data.records import Records
from monolith.data.source import Position, Shard
from monolith.errors import ConfigError, DataError, FileMissingError, RestoreError
from monolith.table.hashing import mix_one

_log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""How much of a file is looked through for the end of its last finished record at a time."""
_LOOK_S = 1.0
"""Seconds between two looks at all files. In between, files that grew of late and the folders are looked at:
with ten thousand files at rest, one look at all of them takes longer than a poll."""
_REMOTE_LOOK_S = 5.0
"""The same where each look is requests to a remote store."""
_HOT = 100
"""How many files, those that grew last, are looked at in every poll."""
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


class _Place(NamedTuple):
    """How far a file was read."""

    place: int = 0
    size: int = 0
    """Bytes that it had when it was last looked at."""
    skip: int = 0

    @property
    def is_read(self) -> bool:
        return self.place >= self.size and not self.skip


class Growing(Files):
    """Files that match now and those that will, all of which may grow. One thread reads; see `Files`.

    Files with news are read by turns, in the order of their names.
    """

    grows = True
    live = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._shard = Shard()
        self._places: dict[str, _Place] = {}
        self._sizes: dict[str, int] = {}
        """Of each file, the size for which it was last read."""
        self._stood: tuple[FileCursor, dict[str, _Place]] = (FileCursor(), {})
        """Where the consumer stood last, and how far each file was read then: what was read since may be held
        back."""
        self._hot: dict[str, None] = {}
        """The local files that grew last, the latest at the end."""
        self._folders: dict[str, int] = {}
        """Local folders in which files may appear, and when one last did."""
        self._look_at = 0.0
        self._unfinished: dict[str, tuple[int, float]] = {}
        """Files whose last line has no line break: their size, and since when."""

    def deal(self, shard: Shard) -> None:
        self._shard = shard

    def after(self, spot: FileCursor) -> FileCursor | Step:
        if spot.file is not None and spot.file in self._places:
            self._places[spot.file] = _Place(spot.place, self._places[spot.file].size)
        now = self._watch.now()
        if now >= self._look_at or self._has_new_names():
            self._look(now)
        for path in list(self._hot):
            self._see(path, _local_size(path))
        news = sorted(path for path, one in self._places.items() if one.size > self._sizes.get(path, 0))
        if not news:
            self._warn_of_unfinished(now)
            return Step.END if self._watch.is_over() else Step.WAIT
        self._watch.found()
        path = next((one for one in news if spot.file is not None and one > spot.file), news[0])
        one = self._places[path]
        self._sizes[path] = one.size
        return FileCursor(file=path, place=one.place, skip=one.skip)

    def _look(self, now: float) -> None:
        """Look at all files there are."""
        found = [path for path in self._watch.list_files() if _is_of(path, self._shard)]
        for path in found:
            remote = filesystem.is_remote(path)
            with suppress(FileMissingError):  # it went since it was listed
                self._see(path, filesystem.file_size(path) if remote else _local_size(path))
        for path in self._places.keys() - set(found):
            self._check_gone(path, self._places[path], DataError, "read")
        local = [one for pattern in self._watch.patterns for one in expand(pattern)]
        folders = {filesystem.parent(one) for one in [*local, *found] if not filesystem.is_remote(one)}
        self._folders = {folder: _changed_at(folder) for folder in folders}
        anywhere = any(map(filesystem.is_remote, self._watch.patterns))
        self._look_at = now + (_REMOTE_LOOK_S if anywhere else _LOOK_S)

    def _has_new_names(self) -> bool:
        return any(_changed_at(folder) != at for folder, at in self._folders.items())

    def _see(self, path: str, size: int | None) -> None:
        """Take in the size of a file; None where it is gone, which the next look at all files judges."""
        known = self._places.get(path, _Place())
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

    def _check_gone(self, path: str, one: _Place, kind: type[DataError | RestoreError], doing: str) -> None:
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
        """Say of a line that stays unfinished that it is waited for."""
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
                )
                since = float("inf")  # once
            self._unfinished[path] = (one.size, since)

    def wait(self) -> None:
        self._watch.wait()

    def rewind(self, spot: FileCursor) -> None:
        stood, places = self._stood
        if stood != spot:
            places = self._placed(spot, self._places)
            self._stood = (spot, places)
        self._places = dict(places)
        self._sizes = {path: one.size for path, one in places.items() if one.is_read}

    def lost(self, spot: FileCursor) -> bool:
        return spot.file not in self._places  # it was read, and is gone

    def taken(self, spot: FileCursor, *, ended: bool) -> None:  # noqa: ARG002
        self._stood = (spot, self._placed(spot, self._places))

    def save(self, spot: FileCursor) -> Position:
        # Right after a batch the consumer is in the file that is being read, and everything read of the other
        # files is in this batch or an earlier one. Later, reading may have come further than the consumer.
        stood, places = self._stood
        found = places if stood == spot else self._placed(spot, self._places)
        return {"grown": {path: list(one) for path, one in found.items()}}

    def _placed(self, spot: FileCursor, places: Mapping[str, _Place]) -> dict[str, _Place]:
        """Return how far each file was read; the file of `spot`, up to `spot`."""
        found = dict(places)
        if spot.file is not None and spot.file in found:
            found[spot.file] = _Place(spot.place, found[spot.file].size, spot.skip)
        return found

    def restore(self, saved: Position, spot: FileCursor) -> None:
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
        self._stood = (spot, dict(self._places))

    # For another number of workers: the name of a file decides its worker, so nothing is dealt.

    def left(self, old: Sequence[OldWorker]) -> list[list[Left]]:
        return [[] for _ in old]

    def begin(self, old: Sequence[OldWorker], left: Sequence[Left], shard: Shard) -> Position:  # noqa: ARG002
        places = {path: one for worker in old for path, one in _read_places(worker.position).items()}
        return {"grown": {path: list(one) for path, one in places.items() if _is_of(path, shard)}}


def _read_places(saved: Position) -> dict[str, _Place]:
    """Return how far each file was read, by a position.

    Raises:
        RestoreError: It does not say so.
    """
    grown = saved.get("grown")
    if isinstance(grown, Mapping) and all(
        isinstance(path, str)
        and isinstance(one, list)
        and len(one) == len(_Place._fields)
        and all(isinstance(number, int) and number >= 0 for number in one)
        for path, one in grown.items()
    ):
        return {path: _Place(*one) for path, one in grown.items()}
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
