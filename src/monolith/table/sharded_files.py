"""Sharded files: one dump in several files, `<basename>-00002-of-00004`, written and read in parallel.

The name of each file says how many there are, so a set with a file missing, or with files of two sets, is
noticed before anything is read. Names that are not exactly of that form are ignored: unfinished files
(`...-tmp-<random>`), or another basename with the same beginning (`table1` and `table1-extra`).

Writing and reading release the GIL in the core and in the system, so each file has a thread. When one file
fails, the other threads stop at their next chunk.

Files of the original system are TFRecord files: a length, its checksum, a payload, its checksum. The
functions here are for few, long records; the native codec frames millions of rows itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TypeVar

from monolith import filesystem, native
from monolith.concurrency import Event, ThreadPoolExecutor, wait
from monolith.errors import CorruptFileError, FileMissingError, RestoreError, TableArgumentError

MAX_SHARDS = 99_999
"""What five digits can say."""

_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})", re.ASCII)
_SHOWN = 5


def sharded_names(basename: str, num_shards: int) -> list[str]:
    """Return the names of all shards, in order."""
    if not 1 <= num_shards <= MAX_SHARDS:
        raise TableArgumentError(f"num_shards must be from 1 to {MAX_SHARDS}, got {num_shards!r}")
    return [f"{basename}-{shard:05d}-of-{num_shards:05d}" for shard in range(num_shards)]


def parse(basename: str, name: str) -> tuple[int, int] | None:
    """Return (shard, number of shards) of a name; None if it is not a shard of `basename`."""
    found = _SUFFIX.fullmatch(name, len(basename)) if name.startswith(basename) else None
    return (int(found[1]), int(found[2])) if found else None


def validate_sharded(basename: str, names: Iterable[str]) -> list[str]:
    """Return the shards among `names`, in order, if they are one complete set.

    Raises:
        RestoreError: A name begins differently, there is no shard, one is missing, or
            their totals differ.
    """
    shards: dict[int, set[int]] = {}
    for name in names:
        if not name.startswith(basename):
            raise RestoreError(f"{name!r} is not a file of {basename!r}: its name begins differently")
        if (found := parse(basename, name)) is not None:
            shards.setdefault(found[1], set()).add(found[0])
    if not shards:
        raise RestoreError(
            f"there are no files {basename}-ddddd-of-ddddd. Check the path; a dump that was interrupted "
            "leaves only files ending in -tmp-<random>, which do not count."
        )
    if len(shards) > 1:
        raise RestoreError(
            f"the files of {basename} are of different sets, of {' and of '.join(map(str, sorted(shards)))} "
            "shards. Remove the set that is not wanted."
        )
    ((total, present),) = shards.items()
    if max(present) >= total:
        raise RestoreError(
            f"{basename}: there cannot be a shard {max(present)} of {total}; they count from 0"
        )
    missing = sorted(set(range(total)) - present)
    if missing:
        listed = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        raise RestoreError(
            f"{basename}: {len(missing)} of {total} shards are missing: {listed}. "
            "Copy them here, or restore from another dump."
        )
    return sharded_names(basename, total)


def find_sharded(basename: str) -> list[str]:
    """Return the paths of the shards of `basename`, in order.

    Raises:
        RestoreError: They are not one complete set; see `validate_sharded`.
    """
    return validate_sharded(basename, _paths(basename))


def has_shards(basename: str) -> bool:
    """Whether there is any shard of `basename`, of a complete set or not."""
    return bool(_paths(basename))


@contextlib.contextmanager
def replace_sharded(basename: str, num_shards: int) -> Iterator[Sequence[BinaryIO]]:
    """Open all shards of a new set, which takes the place of the old one when the block ends.

    The old set is untouched until every new file is complete. A kill in the moment the
    one replaces the other leaves neither complete, which `find_sharded` refuses; never
    a mixture that passes for whole.
    """
    filesystem.make_dirs(filesystem.parent(basename) or ".")
    with contextlib.ExitStack() as writing:
        files = [
            writing.enter_context(filesystem.atomic_write(name))
            for name in sharded_names(basename, num_shards)
        ]
        yield files
        for file in files:
            _settle(file)
        for path in _paths(basename):
            filesystem.remove(path)


def _settle(file: BinaryIO) -> None:
    """Flush the written files to the disk, so that a full disk shows while the old set is still there."""
    file.flush()
    if isinstance(file, io.BufferedWriter):  # a local file; a store syncs when it closes
        os.fsync(file.fileno())


def _paths(basename: str) -> list[str]:
    stem = filesystem.base_name(basename)
    return [basename + name[len(stem) :] for name in _beside(basename) if parse(stem, name)]


def _beside(basename: str) -> list[str]:
    """Names of the files in the folder of `basename`, sorted."""
    try:
        found = filesystem.list_files(filesystem.parent(basename))
    except FileMissingError:
        return []
    return [filesystem.base_name(path) for path in found]


Item = TypeVar("Item")
Result = TypeVar("Result")


class StopTogether:
    """Passed to each task, which iterates through `chunks` so that it stops when another task fails."""

    def __init__(self) -> None:
        self._stop = Event()

    def set(self) -> None:
        self._stop.set()

    def chunks(self, source: Iterable[Item]) -> Iterator[Item]:
        """Yield from `source` until another task has failed."""
        for chunk in source:
            if self._stop.is_set():
                raise _StoppedError
            yield chunk


class _StoppedError(Exception):
    """Another task failed; never leaves this module."""


def in_parallel(
    work: Callable[[Item, StopTogether], Result], items: Sequence[Item], workers: int
) -> list[Result]:
    """Return `work` of each item, in order, `workers` at a time; raise the first failure once all ended."""
    if workers < 1:
        raise TableArgumentError(f"workers must be at least 1, got {workers}")
    stop = StopTogether()

    def one(item: Item) -> Result:
        for _ in stop.chunks([item]):
            try:
                return work(item, stop)
            except BaseException:
                stop.set()
                raise
        raise AssertionError("unreachable: the loop returns or raises")

    if min(workers, len(items)) <= 1:  # no thread for one file
        return [work(item, stop) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "table-files") as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            wait(futures)
        except BaseException:  # the caller was interrupted
            stop.set()
            raise
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]


_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 4 << 20


def tfrecord(payload: bytes) -> bytes:
    """Return a payload framed as one record."""
    length = _LENGTH.pack(len(payload))
    return b"".join(
        (
            length,
            _CRC.pack(native.masked_crc32c(length)),
            payload,
            _CRC.pack(native.masked_crc32c(payload)),
        )
    )


def records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, payload) of each record in an open file.

    Raises:
        CorruptFileError: A checksum is wrong, or the file ends inside a record.
    """
    at = 0
    while header := _upto(file, _LENGTH.size + _CRC.size):
        if len(header) < _LENGTH.size + _CRC.size:
            raise CorruptFileError(path, at, "the file ends inside the header of a record")
        if native.masked_crc32c(header[: _LENGTH.size]) != _CRC.unpack_from(header, _LENGTH.size)[0]:
            raise CorruptFileError(path, at, "bad length checksum")
        (length,) = _LENGTH.unpack_from(header)
        # Read in chunks: even a length with a good checksum may promise more than the file has.
        body = _upto(file, length + _CRC.size)
        if len(body) < length + _CRC.size:
            raise CorruptFileError(path, at, f"the file ends inside a record of {length} bytes")
        payload = body[:length]
        if native.masked_crc32c(payload) != _CRC.unpack_from(body, length)[0]:
            raise CorruptFileError(path, at, "bad data checksum")
        yield at, payload
        at += len(header) + len(body)


def _upto(file: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or what is left of the file."""
    pieces: list[bytes] = []
    while size and (piece := file.read(min(size, _CHUNK_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
