"""Sharded names: one thing kept in several files, `<basename>-00002-of-00004`.

The name of each file says how many there are, so a set with a piece missing, or with
pieces of two sets, is noticed before anything is read. Names that are not exactly of
that form belong to someone else: unfinished files (`...-tmp-<random>`), or another
basename that begins alike (`table1` and `table1-extra`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from monolith import filesystem
from monolith.errors import FileMissingError, RestoreError, TableArgumentError

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
    """Return (shard, number of shards) of a name; None where it is not a shard of `basename`."""
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
    """Push what was written as far as it goes, so that a full disk shows while the old set is still there."""
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
