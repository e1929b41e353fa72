"""The versions of one shard that a serving server has open.

A version is opened when it is the newest, or when an entry requests it: during a hot swap, entries request
two. Files are mapped, so that another version costs next to nothing; but only so many stay open, and the
least recently used one is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from torch import Tensor

from monolith import concurrency, filesystem
from monolith.errors import CorruptFileError, FileMissingError, LostStateError
from monolith.observe import Progress
from monolith.serve.manifest import MANIFEST_NAME, Servable
from monolith.serve.predictor import claim_of
from monolith.serve.rows import ClaimCell, RowsClaim, spanning
from monolith.serve.shards.protocol import ShardAbout, shard_part
from monolith.serve.versions import (
    LockedVersion,
    check_version,
    describe_withheld,
    list_versions,
    withheld_versions,
)
from monolith.store import TableIds
from monolith.store.row_requests import incarnation_bytes
from monolith.table import FrozenTable, FrozenTables, OverlaidTables

_log = logging.getLogger(__name__)


class ShardVersion:
    """One version, locked and mapped. Its files are unmapped after the last lookup."""

    def __init__(
        self, locked: LockedVersion, shard: int, threads: int | None, memory_bytes: int | None
    ) -> None:
        self._locked = locked
        self.servable = locked.servable
        self.over: tuple[OverlaidTables, ClaimCell] | None = None
        """The tables with the overlay of deltas above them, and their claim; None serves the rows as
        exported."""
        self._exported = claim_of(locked.servable)
        self.about = _about(locked.servable, shard)
        self.tables = FrozenTables(_open_tables(locked), threads=threads, memory_bytes=memory_bytes)
        self.used = 0
        """Order of its last use, as a number that grows."""

    def lookup(self, ids: TableIds) -> tuple[Tensor, RowsClaim]:
        """Return rows, and how new they are; see `monolith.serve.rows`."""
        over = self.over  # read once, so that rows and claim belong together
        if over is None:
            return self.tables.lookup(ids.ids, ids.sizes), self._exported
        tables, claims = over
        before = claims.now
        rows = tables.lookup(ids.ids, ids.sizes)
        return rows, spanning(before, claims.now)

    def close(self) -> None:
        """Unlock the folder, so that it can be removed. Files are unmapped after the last running lookup."""
        self._locked.close()


class ShardVersions:
    """Opens versions of DIR/ps_<i> and keeps the most recently used ones open. Thread-safe.

    Args:
        folder: DIR.
        most: Number of versions that stay open.
        threads: Threads that a large lookup is spread over; see `FrozenTables`.
        memory_bytes: For the rows of each open version; see `FrozenTables`.
        serve_withheld: Versions that may be the newest although they are withheld.
    """

    def __init__(
        self,
        folder: str,
        shard: int,
        *,
        most: int,
        threads: int | None,
        memory_bytes: int | None = None,
        serve_withheld: Collection[str] = (),
    ) -> None:
        self._root = filesystem.join(folder, shard_part(shard))
        self._shard = shard
        self._most = most
        self._threads = threads
        self._memory_bytes = memory_bytes
        self._serve_withheld = frozenset(serve_withheld)
        self.withheld: dict[str, str] = {}
        """Version -> why it is withheld, as of the last call of `newest`."""
        self._lock = concurrency.Lock()  # one thread opens a version at a time; guards all below
        self._uses = 0
        self._by_name: dict[str, ShardVersion] = {}
        self._by_key: dict[bytes, ShardVersion] = {}  # replaced as a whole: lookups take no lock

    @property
    def root(self) -> str:
        return self._root

    def all(self) -> list[ShardVersion]:
        with self._lock:
            return list(self._by_name.values())

    def newest(self) -> str:
        """Return the newest version that is not withheld.

        Raises:
            FileMissingError: There is none.
        """
        versions = list_versions(self._root)
        found = withheld_versions(self._root, versions)
        withheld = {one: mark for one, mark in found.items() if one not in self._serve_withheld}
        for version, mark in withheld.items():
            if version not in self.withheld:
                _log.warning(
                    "%s: version %s is withheld and not served: %s",
                    *(self._root, version, mark.describe()),
                )
        self.withheld = {version: mark.describe() for version, mark in withheld.items()}
        if offered := [version for version in versions if version not in withheld]:
            return offered[-1]
        raise FileMissingError(
            f"there is no version in {self._root}{describe_withheld(withheld)}. Write one with: monolith "
            f"export --to {filesystem.parent(self._root)} --shards N, with N above {self._shard}"
        )

    def open(self, version: str) -> ShardVersion:
        """Return a version, after opening it if necessary.

        Raises:
            FileMissingError: There is no such version; names those that exist.
            CorruptFileError: Its files are damaged, or do not match the manifest.
        """
        check_version(version)
        with self._lock:
            found = self._by_name.get(version)
            if found is None:
                found = self._opened(version)
                self._by_name[version] = found
                self._drop_oldest(found)
                self._by_key = {incarnation_bytes(name): one for name, one in self._by_name.items()}
            self._touch(found)
            return found

    def find(self, key: bytes) -> ShardVersion:
        """Return the open version of a lookup, by `incarnation_bytes` of its name.

        Raises:
            LostStateError: It is not open.
        """
        found = self._by_key.get(key)
        if found is None:
            raise LostStateError(
                f"{shard_part(self._shard)} does not have the requested version open; it has "
                f"{', '.join(self._by_name) or 'none'} open. Send hello with the version first"
            )
        self._touch(found)
        return found

    def prefault(self, version: str, progress: Progress | None = None) -> None:
        """Load the rows of a version into memory."""
        self.open(version).tables.prefault(progress)

    def close(self) -> None:
        """Close all versions."""
        with self._lock:
            for version in self._by_name.values():
                version.close()
            self._by_name, self._by_key = {}, {}

    def _touch(self, version: ShardVersion) -> None:
        self._uses += 1
        version.used = self._uses

    def _opened(self, version: str) -> ShardVersion:
        try:
            locked = LockedVersion(filesystem.join(self._root, version))
        except FileMissingError as cause:
            there = ", ".join(list_versions(self._root)) or "none"
            raise FileMissingError(
                f"{shard_part(self._shard)} has no version {version}; in {self._root} there are: {there}"
            ) from cause
        try:
            return ShardVersion(locked, self._shard, self._threads, self._memory_bytes)
        except BaseException:
            locked.close()
            raise

    def _drop_oldest(self, but: ShardVersion) -> None:
        while len(self._by_name) > self._most:
            others: Callable[[str], int] = lambda name: (  # noqa: E731
                self._uses + 1 if self._by_name[name] is but else self._by_name[name].used
            )
            self._by_name.pop(min(self._by_name, key=others)).close()


def _about(servable: Servable, shard: int) -> ShardAbout:
    return ShardAbout(
        model=servable.model,
        version=servable.version,
        digest=servable.digest,
        shard=shard,
        shards=servable.shards,
        tables={name: servable.tables[name].dim for name in sorted(servable.tables)},
        rows=servable.rows,
        bytes=servable.bytes,
    )


def _open_tables(locked: LockedVersion) -> dict[str, FrozenTable]:
    tables = {}
    for name, listed in locked.servable.tables.items():
        table = FrozenTable(filesystem.join(locked.folder, listed.file))
        if (table.dim, table.rows) != (listed.dim, listed.rows):
            raise CorruptFileError(
                table.path,
                0,
                f"it has {table.rows} rows of {table.dim} floats, and {MANIFEST_NAME} says {listed.rows} of "
                f"{listed.dim}",
            )
        tables[name] = table
    return tables
