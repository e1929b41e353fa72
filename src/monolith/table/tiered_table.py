"""TieredTable: a table whose hot rows are in memory and all others in files.

    config = TableConfig(name="item", segments=segments, storage="tiered", memory_bytes=4 << 30)
    table = TieredTable(config)

A row is hot or cold, never both. A batch that is written has its cold rows moved in first, with their state
and times; the rows that were used least move out for them, many at a time. Looking up moves nothing: a cold
row is read and kept for a while, since training is likely to write it next.

    written by a batch --> hot ---- used least, and memory_bytes is spent ----> cold
                            ^                                                     |
                            +------------- in a batch that is written ------------+

What stays in memory for a cold row is 9 to 10 bytes of an index. Its files are in a folder of this process,
which is removed when the table is closed, or by the next table in the same `storage_dir` if the process was
killed. A checkpoint has links of its own to the files, and says which of their rows count: neither saving
nor restoring reads cold rows. See `cold_files`.

The core of it is in `native/src/tiered_table.h` and `cold_store.h`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FilesystemError,
    RestoreError,
    TableArgumentError,
    TableClosedError,
)
from monolith.table import arguments
from monolith.table.admission import AdmissionFilter, Refusals
from monolith.table.cold_files import ColdRows, LinkableFile
from monolith.table.config import EmbeddingDtype, TableConfig
from monolith.table.native_table import NativeTable, NativeTableSnapshot
from monolith.table.table import Rows, Scan, TableStats, joined_scan
from monolith.table.touched_keys import TouchedKeySet
from monolith.table.update_rules import decays_lazily

_PARTS = 32  # one in so many of the memory's bytes is a buffer of rows that are written as one file
_MOST_BUFFER_BYTES = 64 << 20
_LEAST_BUFFER_BYTES = 64 << 10
_RECENT = 32  # one in so many is for rows that lookups read, until their batches say how many they are
_REMOVED_AT_MOST = 100  # times, a hundredth of a second apart, that a folder is emptied
_MOST_SIDE_BY_SIDE = 32  # calls of tables at a time: a reader has as many threads
_SAY_AGAIN = 30.0  # seconds between two log lines about a disk that takes no rows
_LAST_HASH = (1 << 64) - 1

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class TieredTable:
    """A `Table` in memory and in files. Thread-safe: writers take turns, and lookups do not wait for them.

    Shapes: n ids of a call, dim floats of an embedding, state_dim floats of optimizer state.

    While the disk takes no rows (it is full, for example), writers wait, and a warning says why.

    `memory_bytes` has to hold an index of all rows. Where it can hold no more, new ids are refused like those
    of a table in memory that is full: they read as zeros, and a warning says how much memory is needed.

    Args:
        config: With `storage="tiered"`; `memory_bytes` is for hot rows, the index of cold ones, and buffers.
        admission: Asked about ids without a row before they are given one; None admits all.
        touched: Gets the ids whose rows change or are removed; see `touch`.
        workers: Threads that share large batches; None works on the calling thread alone.
        reader: Threads that read files. Tables of a process may share them; None makes some.
        most_hot_rows: Fewer hot rows than `memory_bytes` allows: for tests.

    Attributes:
        elsewhere: Rows of a table above this one, on a device, that may all be restored here later: new ids
            leave room for them in the index.

    Raises:
        ConfigError: The config is of a table in memory.
        FilesystemError: There can be no files in `storage_dir`.

    Examples:
        >>> import torch
        >>> from monolith import Segment, TableConfig
        >>> from monolith.table import TieredTable
        >>> segments = (Segment(dim=2),)
        >>> config = TableConfig(name="item", segments=segments, storage="tiered", memory_bytes=16 << 20)
        >>> table = TieredTable(config)
        >>> table.assign(torch.tensor([7, 8]), torch.ones(2, 2))  # n = 2, dim = 2
        >>> stats = table.stats()
        >>> stats.rows, stats.cold_rows
        (2, 0)
        >>> table.close()
    """

    def __init__(
        self,
        config: TableConfig,
        *,
        admission: AdmissionFilter | None = None,
        touched: TouchedKeySet | None = None,
        workers: native.Workers | None = None,
        reader: native.BlockReader | None = None,
        most_hot_rows: int = 0,
    ) -> None:
        if config.storage != "tiered" or config.memory_bytes is None:
            raise ConfigError(
                f"table {config.name!r}: a TieredTable needs storage='tiered' and memory_bytes, got "
                f"storage={config.storage!r}"
            )
        self._config = config
        in_memory = replace(config, storage="memory", memory_bytes=None, storage_dir=None, initial_rows=0)
        self._refusals = Refusals(config)
        self._hot = NativeTable(
            in_memory, admission=admission, touched=touched, workers=workers, warns_of_refusals=False
        )
        self._folder = _OwnFolder(config)
        self._core: native.TieredTable | None = native.TieredTable(
            hot=self._hot.core,
            reader=native.BlockReader() if reader is None else reader,
            folder=str(self._folder.path),
            name=config.name,
            memory_bytes=config.memory_bytes,
            most_hot_rows=most_hot_rows,
            **_buffer_sizes(config.memory_bytes),
        )
        self.elsewhere = 0
        self._warned = False
        self._lock = threading.Lock()
        self._thawed = threading.Condition(self._lock)
        self._frozen = 0  # guarded by the lock
        self._counting = threading.Lock()  # of its own, since lookups do not wait for writers
        self._ids = 0  # looked up or written; guarded by _counting
        self._files_adopted = 0  # guarded by the lock
        self._snapshots = 0  # open ones; guarded by the lock

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def dim(self) -> int:
        return self._config.dim

    @property
    def state_dim(self) -> int:
        return self._config.state_dim

    @property
    def core(self) -> native.TieredTable:
        """The compiled table."""
        core = self._core
        if core is None:
            raise TableClosedError(f"table {self._config.name!r} was closed")
        return core

    @property
    def cuda(self) -> None:
        return None

    @property
    def cold(self) -> TieredTable | None:
        # Rows that decay lazily say which step was the newest: they have to be read. Those of a serving table
        # are compressed.
        return None if self._config.serving or decays_lazily(self._config) else self

    @property
    def stored_values(self) -> EmbeddingDtype:
        """How rows in files have their values."""
        return self._config.embedding_dtype

    @property
    def folder(self) -> Path:
        """The folder of its files, which is removed when the table is closed."""
        return self._folder.path

    def __len__(self) -> int:
        with self._open() as core:
            return len(self._hot) + core.cold_rows

    # Reading

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        core = self.core
        keys = arguments.id_array(ids)
        answer, values = arguments.out_array(out, len(keys), self.dim)
        self._count(len(keys))
        with _errors():
            core.lookup(keys, values)
        return answer

    def read_ahead(self, ids: Tensor) -> None:
        """Read the cold rows of a batch that will be looked up soon, so that the lookup need not wait.

        It changes no row and no count of uses: what is looked up later is what it is then. Rows are kept as
        long as after a lookup. Any thread may call it, while others write.
        """
        core = self.core
        keys = arguments.id_array(ids)
        with _errors():
            core.lookup(keys, np.empty((len(keys), self.dim), np.float32))

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        core = self.core
        keys = arguments.id_array(ids)
        self._count(len(keys))
        found = np.empty(len(keys), np.uint8)
        times = np.empty(len(keys), np.int64)
        values = np.empty((len(keys), self.dim), np.float32)
        state = np.empty((len(keys), self.state_dim), np.float32)
        with _errors():
            core.lookup_rows(keys, found, times, values, state)
        columns = (keys.copy(), times, values, state)
        return _mask(found), Rows(*(torch.from_numpy(column) for column in columns))

    def contains(self, ids: Tensor) -> Tensor:
        core = self.core
        keys = arguments.id_array(ids)
        found = np.empty(len(keys), np.uint8)
        with _errors():
            core.contains(keys, found)
        return _mask(found)

    # Writing

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._writing(ids):
            self._hot.assign(ids, values, event_time=event_time)

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        with self._writing(ids):
            self._hot.assign_add(ids, values, event_time=event_time)

    def apply_gradients(
        self, ids: Tensor, gradients: Tensor, **options: Unpack[arguments.UpdateOptions]
    ) -> None:
        with self._writing(ids):
            self._hot.apply_gradients(ids, gradients, **options)

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        with self._writing(ids):
            return self._hot.reinitialize(ids, now=now)

    def remove(self, ids: Tensor) -> int:
        keys = arguments.id_array(ids)
        self._count(len(keys))
        with self._open(writing=True) as core, _errors():
            return core.remove(keys)

    def restore(self, rows: Rows) -> None:
        """Write whole rows; raise RestoreError if `memory_bytes` has no room for an index of them."""
        arguments.row_arrays(rows, self._config)  # refuses rows that do not fit before any moves
        with self._writing(rows.ids, elsewhere=0) as absent:
            self._check_room(self.core, absent)
            self._hot.restore(rows)

    def adopt(self, path: str, alive: NDArray[np.uint8]) -> int:
        """Take over rows of a cold file that a dump links to, and return how many; reads none of them.

        Args:
            path: The file, which this table gets a link to, or a copy of. Its rows are as this table stores
                them.
            alive: A bit for each row of the file, the lowest of a byte first; no such id has a row.

        Raises:
            RestoreError: `memory_bytes` has no room for an index of these rows.
            CorruptFileError: The file is damaged, or of other rows; some may have been taken over.
        """
        with self._open(writing=True) as core:
            self._check_room(core, int(np.unpackbits(alive).sum()))
            self._files_adopted += 1
            own = str(self._folder.path / f"{self._files_adopted}-{filesystem.base_name(path)}")
            filesystem.link_or_copy(path, own, durable=False, private=True)
            try:
                rows = core.adopt(own, alive)
            except native.ColdDamageError as cause:
                raise CorruptFileError(path, *cause.args[1:]) from cause
            if core.must_shrink:
                self._shrink(core)
            return rows

    def count_expired(self, now: int) -> int:
        with _errors():
            return self.core.count_expired(now)

    def evict(self, now: int | None = None) -> int:
        """Drop expired rows, a part at a time: writers take turns with it, and none waits for the disk."""
        core, count = self.core, 0
        expiry = core.expiry(self._hot.core.max_event_time if now is None else now)
        while True:
            with _errors():
                if not core.find_expired(expiry):
                    return count
            with self._open(writing=True), _errors():
                count += core.drop_expired(expiry)

    # Whole tables

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows in the order of their hashes: a shard is a range of hashes, a cursor the next one."""
        with self._open() as core:
            begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
            hot = self._hot.scan(cursor, limit=limit, shard=shard, num_shards=num_shards)
            return joined_scan([hot, _cold_rows(core, begin, end, limit)], limit)

    def clear(self, *, expect_rows: int = 0) -> None:
        with self._open(writing=True) as core, _errors():
            core.clear(expect_rows)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Pause writers while the block runs; readers continue. Nests."""
        with self._open():
            self._frozen += 1
        try:
            yield
        finally:
            with self._lock:
                self._frozen -= 1
                self._thawed.notify_all()

    def snapshot(self) -> TieredTableSnapshot:
        """Open a snapshot; waits for the write in progress, not longer."""
        with self._open():
            snapshot = TieredTableSnapshot(self, self._hot, self._lock, self._closed_snapshot)
            self._snapshots += 1
            return snapshot

    def track_changes(self, on: bool = True) -> None:
        with self._open() as core:
            core.track_changes(on)

    def touch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._hot.touch(touched)

    def untouch(self, touched: TouchedKeySet) -> None:
        with self._open():
            self._hot.untouch(touched)

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        keys = arguments.id_array(buckets, "buckets")
        sums = np.empty(len(keys), np.uint64)
        with self._open() as core, _errors():
            core.digests(keys, *share, sums)
        return torch.from_numpy(sums.view(np.int64))

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""
        return self._hot.scales

    def set_scales(self, scales: list[float]) -> None:
        self._hot.set_scales(scales)

    def stats(self) -> TableStats:
        """Return the sizes of both tiers; `bytes_*` are of memory, and the fields `cold_*` of files."""
        with self._open() as core:
            hot, cold = self._hot.stats(), core.stats()
            return replace(
                hot,
                rows=hot.rows + cold.rows,
                bytes_total=hot.bytes_total + core.cold_memory_bytes,
                bytes_index=hot.bytes_index + cold.bytes_index,
                inserted=hot.inserted + core.adopted,
                evicted=hot.evicted + core.evicted,
                removed=hot.removed + core.removed,
                tiered_ids=self._ids,
                cold_rows=cold.rows,
                cold_bytes=cold.bytes_files,
                cold_found=cold.rows_found,
                cold_found_in_memory=cold.rows_recent,
                cold_reads=cold.reads,
                cold_bytes_read=cold.bytes_read,
                cold_bytes_written=cold.bytes_written,
                compactions=cold.compactions,
            )

    def flush(self) -> None:
        """Wait until rows that moved out are in files, and files that are mostly dead are gone: for tests."""
        with self._open() as core:
            core.flush()

    def close(self) -> None:
        with self._lock:
            if self._core is None:
                return
            self._core = None  # calls still running hold on to it; the last one removes the files
            self._hot.close()
            if not self._snapshots:  # which may still be dumped, by links to the files
                self._folder.remove()

    # Inside

    def _closed_snapshot(self) -> None:
        self._snapshots -= 1
        if self._core is None and not self._snapshots:
            self._folder.remove()

    def _count(self, ids: int) -> None:
        with self._counting:
            self._ids += ids

    @contextmanager
    def _open(self, *, writing: bool = False) -> Iterator[native.TieredTable]:
        with self._lock:
            if writing:
                self._thawed.wait_for(lambda: not self._frozen)
            yield self.core

    @contextmanager
    def _writing(self, ids: Tensor, *, elsewhere: int | None = None) -> Iterator[int]:
        """Have all rows of a batch be hot while it is written; yields how many ids have no row.

        Args:
            elsewhere: `self.elsewhere` by default.
        """
        with self._open(writing=True) as core:
            keys = arguments.id_array(ids)
            self._count(len(keys))
            with _errors():
                missing = core.count_missing(keys)
                self._make_room(core, missing)
                absent = core.bring(self.elsewhere if elsewhere is None else elsewhere)
            yield absent
            if refused := self._hot.core.refused:
                self._refusals.note(refused, lambda: len(self._hot) + core.cold_rows + self.elsewhere)
            # A batch may have more rows than are to be hot: they leave with the next one, and no later.
            core.count_missing(np.zeros(0, np.int64))
            self._make_room(core, 0)
            if core.must_shrink:
                self._shrink(core)

    def check_room(self, absent: int) -> None:
        """Raise RestoreError if `memory_bytes` has no index for so many rows more, with those elsewhere."""
        with self._open() as core:
            self._check_room(core, absent + self.elsewhere)

    def _check_room(self, core: native.TieredTable, absent: int) -> None:
        """Refuse rows that are to be restored where there is no memory for their index: none may be lost."""
        rows = len(self._hot) + core.cold_rows + absent
        if rows > core.most_rows:
            memory = self._config.memory_bytes or 0
            raise RestoreError(
                f"cannot restore table {self._config.name!r}: its memory_bytes ({memory:,}) has room for an "
                f"index of {core.most_rows:,} rows, and there are at least {rows:,}. Set memory_bytes to at "
                f"least {memory * rows // core.most_rows + 1:,}"
            )

    def _make_room(self, core: native.TieredTable, rows: int) -> None:
        while True:
            self._wait_for_disk(core)
            if not core.spill(rows):
                return

    def _shrink(self, core: native.TieredTable) -> None:
        """Give the hot table less memory, because the index of cold rows needs it, or what lookups read."""
        _log.debug(
            "table %r: hot rows get less of memory_bytes (%s): %s cold rows need an index, and batches may "
            "have become larger",
            self._config.name,
            f"{self._config.memory_bytes:,}",
            f"{core.cold_rows:,}",
        )
        core.shrink()
        allowed = core.stats().bytes_index
        if (
            self._config.memory_bytes is not None
            and 2 * allowed > self._config.memory_bytes
            and not self._warned
        ):
            self._warned = True
            _log.warning(
                "table %r: the index of its %s cold rows takes %s of %s bytes of memory; set memory_bytes to "
                "at least %s, or let rows expire",
                self._config.name,
                f"{core.cold_rows:,}",
                f"{allowed:,}",
                f"{self._config.memory_bytes:,}",
                f"{4 * allowed:,}",
            )

    def _wait_for_disk(self, core: native.TieredTable) -> None:
        """Wait until files take rows again, and say why that takes so long."""
        begun = said = None
        while not core.wait_for_room(1.0):
            now = time.monotonic()
            begun = now if begun is None else begun
            trouble = core.trouble
            if trouble and (said is None or now - said >= _SAY_AGAIN):
                said = now
                _log.warning(
                    "table %r is paused: its cold rows cannot be written (%s). No row is lost; it "
                    "resumes when the disk takes them. Make room on %s",
                    self._config.name,
                    trouble,
                    self._folder.path.parent,
                )
        if said is not None and begun is not None:
            _log.warning(
                "table %r resumes: its cold rows are written again, after %.0f s",
                self._config.name,
                time.monotonic() - begun,
            )


def tier_sizes(row_bytes: int, memory_bytes: int, rows: int) -> native.TierSizes:
    """Return what a tiered table with this memory would take; a row in memory has `row_bytes`."""
    return native.TierSizes(
        row_bytes=row_bytes, memory_bytes=memory_bytes, rows=rows, **_buffer_sizes(memory_bytes)
    )


class TieredTableSnapshot:
    """A `TableSnapshot` of both tiers. Rows that move afterwards stay where they were, in the snapshot."""

    def __init__(
        self, table: TieredTable, hot: NativeTable, lock: threading.Lock, on_close: Callable[[], None]
    ) -> None:
        self._on_close: Callable[[], None] | None = on_close
        self._config = table.config
        self._core = table.core
        self._lock = lock  # of the table: rows do not move while a snapshot is closed
        self._hot = NativeTableSnapshot(hot)
        self._cold_rows = self._core.open_snapshot()

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def scales(self) -> list[float]:
        return self._hot.scales

    @property
    def max_event_time(self) -> int:
        return self._hot.max_event_time

    @property
    def captured_bytes(self) -> int:
        return self._hot.captured_bytes

    @property
    def tracked(self) -> bool:
        return self._hot.tracked

    @property
    def cleared(self) -> bool:
        return self._hot.cleared

    @cached_property
    def cold(self) -> ColdRows | None:
        # Which files these are is settled once: a second attempt to write them may keep shards of the first.
        if self._config.serving:
            return None
        with _errors():
            files = [LinkableFile(*file) for file in self._core.links()]
        return ColdRows(files, self._scan_others) if files else None

    def __len__(self) -> int:
        return len(self._hot) + self._cold_rows

    def removed(self) -> Tensor:
        return self._hot.removed()

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
        hot = self._hot.scan(
            cursor, limit=limit, shard=shard, num_shards=num_shards, changed_only=changed_only
        )
        cold = _cold_rows(self._core, begin, end, limit, of_snapshot=True, changed_only=changed_only)
        return joined_scan([hot, cold], limit)

    def _scan_others(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return rows that are in memory, or in a file that is not linked."""
        begin, end = arguments.scan_range(cursor, limit, shard, num_shards)
        hot = self._hot.scan(cursor, limit=limit, shard=shard, num_shards=num_shards)
        cold = _cold_rows(self._core, begin, end, limit, of_snapshot=True, unlinked=True)
        return joined_scan([hot, cold], limit)

    def close(self, *, saved: bool) -> None:
        with self._lock:
            self._hot.close(saved=saved)
            self._core.close_snapshot(saved)
            if self._on_close is not None:
                self._on_close()
                self._on_close = None


class SideBySide:
    """Runs calls of several tables at once, so that what they read from files is under way together.

    Thread-safe. The calling thread takes calls, too: it does not depend on helpers, which may all be waiting
    for a disk, or for a frozen table.

    Args:
        tables: How many there are.
    """

    def __init__(self, tables: int) -> None:
        self._most = min(tables, _MOST_SIDE_BY_SIDE)
        self._helpers = ThreadPoolExecutor(max(self._most - 1, 1), "tables")

    def each(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Run all calls and return their results in this order.

        If calls raise, all other calls are run nevertheless, and one of the errors is raised at the end.
        """
        results: dict[int, _Result] = {}
        errors: list[BaseException] = []
        left = deque(enumerate(calls))

        def work() -> None:
            while left:
                with suppress(IndexError):  # another thread has taken the last
                    number, call = left.popleft()
                    try:
                        results[number] = call()
                    except BaseException as error:
                        errors.append(error)

        helpers = [self._helpers.submit(work) for _ in range(min(len(calls), self._most) - 1)]
        work()
        wait([helper for helper in helpers if not helper.cancel()])
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(calls))]


class _OwnFolder:
    """The folder of one table's files, locked while the table is open; removes those without an owner."""

    def __init__(self, config: TableConfig) -> None:
        stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.name)[:64]
        try:
            if config.storage_dir is None:
                parent = filesystem.private_folder(
                    Path(tempfile.gettempdir()) / f"monolith-cold-{os.geteuid()}"
                )
            else:
                parent = Path(config.storage_dir)
                filesystem.make_dirs(parent)
            _remove_ownerless(parent)
            # A table that is made at the same time may take the folder for one without an owner and remove it
            # before it is locked. Then another is made.
            while True:
                self.path = filesystem.new_folder(f"{stem}-", parent, suffix=".cold")
                if (lock := _locked(self.path)) is not None:
                    self._lock = lock
                    break
        except OSError as cause:
            raise FilesystemError(
                cause.errno,
                f"table {config.name!r}: cannot keep cold rows in {cause.filename or config.storage_dir}: "
                f"{cause.strerror or cause}; set storage_dir to a folder on a local disk that can be written",
            ) from cause

    def remove(self) -> None:
        # A lookup that is still under way keeps the core alive, which may write one more file meanwhile.
        for _ in range(_REMOVED_AT_MOST):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(0.01)
        os.close(self._lock)


def _buffer_sizes(memory_bytes: int) -> dict[str, int]:
    return {
        "buffer_bytes": min(_MOST_BUFFER_BYTES, max(_LEAST_BUFFER_BYTES, memory_bytes // _PARTS)),
        "recent_bytes": memory_bytes // _RECENT,
    }


def _locked(folder: Path) -> int | None:
    """Lock the folder of a table; None if it is gone, or another process or table has locked it.

    Returns:
        The lock file, which is locked until it is closed.

    Raises:
        OSError: The folder or its lock file is not this user's own, or they cannot be opened.
    """
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(here).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
            file = filesystem.open_regular("lock", os.O_RDWR | os.O_CREAT, own=True, folder=here)
        finally:
            os.close(here)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:  # else its folder was removed meanwhile
            return file
    except BlockingIOError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _remove_ownerless(parent: Path) -> None:
    """Remove the folders of processes that were killed, and none that another user may have put there."""
    for folder in parent.glob("*.cold"):
        try:
            # One without a lock file is what is left of a removal that was not finished.
            lock = _locked(folder)
        except OSError as error:
            _log.debug("left alone %s: %s", folder, error)
            continue
        if lock is None:
            continue
        try:
            size = sum(file.lstat().st_size for file in folder.iterdir())
            shutil.rmtree(folder)
            _log.info("removed %s (%s bytes): the process that wrote it is gone", folder, f"{size:,}")
        except OSError as error:
            # Its owner has made it a moment ago, and locks another file in it.
            _log.debug("did not remove %s: %s", folder, error)
        finally:
            os.close(lock)


@contextmanager
def _errors() -> Iterator[None]:
    """Translate the errors of the core."""
    try:
        yield
    except native.ColdDamageError as cause:
        raise CorruptFileError(*cause.args) from cause
    except ValueError as cause:
        if isinstance(cause, TableArgumentError):
            raise
        raise TableArgumentError(str(cause)) from cause


def _cold_rows(
    core: native.TieredTable,
    begin: int,
    end: int,
    limit: int,
    *,
    of_snapshot: bool = False,
    changed_only: bool = False,
    unlinked: bool = False,
) -> Scan:
    with _errors():
        *columns, following = core.scan_cold(
            begin, min(end - 1, _LAST_HASH), limit, of_snapshot, changed_only, unlinked
        )
    return Scan(Rows(*(torch.from_numpy(column) for column in columns)), following)


def _mask(found: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(found.view(np.bool_))
