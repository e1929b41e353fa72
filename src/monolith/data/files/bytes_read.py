"""How far reading a list of files has come, in bytes of the files as they are on disk.

The number of records of a CSV is unknown before it is read, but its size is known. A chunk says how many
bytes of its file it ends after, and a position how many records lie before it; so a record inside of a chunk
is that far between the ends of the chunk. The sizes of files are looked up on the first call.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from monolith import filesystem
from monolith.data.files.cursors import FileCursor
from monolith.data.files.order import ListedPaths
from monolith.data.format import Chunk
from monolith.errors import FilesystemError

MOST_CHUNKS = 4096
"""Chunks of which the ends are known: more than any stage holds back."""
MOST_REMOTE_FILES = 1000
"""The size of each remote file is a request; with more files the fraction is unknown."""


class _Mark(NamedTuple):
    """Where a chunk lies."""

    file: FileCursor
    first: int
    """Records of the reader before it."""
    last: int
    begin: int
    """Bytes of its file before it."""
    end: int


class BytesRead:
    """Which part of a list of files lies before a place. One thread reads, and any may ask."""

    def __init__(self, files: ListedPaths) -> None:
        self._files = files
        self._lock = threading.Lock()  # guards what follows
        self._marks: deque[_Mark] = deque(maxlen=MOST_CHUNKS)
        self._unknown = False
        """Whether the format does not say where chunks end, or the sizes cannot be had."""
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        """Hear that reading begins, wherever it had come to before."""
        with self._lock:
            self._marks.clear()

    def note(self, spot: FileCursor, chunk: Chunk) -> None:
        """Hear of a chunk that begins at a spot."""
        with self._lock:
            if chunk.reached is None:
                self._unknown = True
                return
            # Where reading went on in the middle of a file, only the end of its first chunk is known.
            begin = chunk.reached if spot.place else 0
            if self._marks and (last := self._marks[-1]).file.is_in_file_of(spot):
                begin = last.end
            first, size = spot.good, len(chunk.records)
            self._marks.append(_Mark(spot, first, first + size, begin, chunk.reached))

    def fraction(self, spot: FileCursor, records: int) -> float | None:
        """Return which part of all bytes lies before the place so many records after a spot; None where
        nobody knows."""
        number = spot.good + spot.skip + spot.taken + records
        with self._lock:
            file, inside = self._find(number)
            sizes = None if self._unknown else self._look_up()
            self._unknown = sizes is None
        if sizes is None:
            return None
        try:
            total, before = self._files.weight(sizes), self._files.weight_before(file or spot, sizes)
        except (KeyError, ValueError):  # other files were dealt to this worker just now
            return None
        return (before + inside) / total if total else None

    def _find(self, number: int) -> tuple[FileCursor | None, float]:
        """Return the file in which a record is, by its number among all that were read, and the bytes of the
        file before it."""
        found: _Mark | None = None
        for mark in reversed(self._marks):
            if found is not None and mark.last < number:
                break
            found = mark
        if found is None:
            return None, 0.0
        passed = min(max(number - found.first, 0) / max(found.last - found.first, 1), 1.0)
        return found.file, found.begin + passed * (found.end - found.begin)

    def _look_up(self) -> dict[str, int] | None:
        """Return the size of every file, or nothing where that costs much."""
        missing = self._files.paths - self._sizes.keys()
        if sum(map(filesystem.is_remote, missing)) > MOST_REMOTE_FILES:
            return None
        try:
            self._sizes |= {path: filesystem.file_size(path) for path in missing}
        except FilesystemError:  # reading the file reports it
            return None
        return self._sizes
