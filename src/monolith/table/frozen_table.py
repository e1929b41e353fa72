"""Frozen tables: rows that are written once, mapped, and only read.

    write_frozen_table("item.rows", [FrozenSegment(17)], chunks, rows=10_000_000, name="item")
    FrozenTable("item.rows").lookup(ids)

What a server needs of a table is its rows, as they were at one moment. They are in one file
with an index from id to row, which is mapped read-only: opening takes no time however large
it is, and all processes and threads of a machine that serve the same file share its memory.
Values are floats, halves, or bytes with a scale for each row and segment; what that costs is
measured while the file is written. Where memory has no room for all rows, the index and the
rows that are asked for most are kept there, and all others of a call are read at once. Format
and lookups are in `native/src/frozen_*`, the rows that are kept in `row_cache.h`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import CorruptFileError, FilesystemError, TableArgumentError, TableClosedError
from monolith.observe import Progress
from monolith.table import arguments
from monolith.table.sharded_files import in_parallel

Coding = Literal["fp32", "fp16", "int8", "int4"]

_CODINGS = {
    "fp32": native.FrozenCoding.FP32,
    "fp16": native.FrozenCoding.FP16,
    "int8": native.FrozenCoding.INT8,
    "int4": native.FrozenCoding.INT4,
}
_CODING_NAMES: dict[native.FrozenCoding, Coding] = {
    native.FrozenCoding.FP32: "fp32",
    native.FrozenCoding.FP16: "fp16",
    native.FrozenCoding.INT8: "int8",
    native.FrozenCoding.INT4: "int4",
}
_PIECE_BYTES = 32 << 20
"""What one thread checks or reads before it says how far it is."""


@dataclass(frozen=True, slots=True)
class FrozenSegment:
    """Values of a row that share one coding."""

    dim: int
    coding: Coding = "fp32"
    """`int8` has one float32 scale for each row and segment: its largest value is 127 steps; of `int4`, 7."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise TableArgumentError(f"a segment needs a dim of at least 1, got {self.dim}")
        if self.coding not in _CODINGS:
            raise TableArgumentError(f"a segment is coded as {', '.join(_CODINGS)}, got {self.coding!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenInfo:
    """One file of rows, and what their coding cost."""

    path: str
    name: str
    rows: int
    bytes: int
    dim: int
    segments: tuple[FrozenSegment, ...]
    largest_error: float
    """Of a value as it will be read, against the one that was given."""
    mean_error: float
    crc: int
    """CRC-32C of the whole file."""


def write_frozen_table(
    path: str,
    segments: Sequence[FrozenSegment],
    chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]],
    *,
    rows: int,
    name: str = "",
) -> FrozenInfo:
    """Write rows to a file that appears under its name when it is complete.

    Rows leave as they come. Memory holds 8 bytes for each and, at the end, about 18 more for the index.

    Args:
        segments: What a row is made of, from its first value on.
        chunks: Ids of shape (n,) and their values of shape (n, dim): no id twice, all values finite. One that
            is too large for a half becomes the largest one.
        rows: At most so many will come.
        name: Of the table, for people.

    Raises:
        TableArgumentError: What came does not fit. Nothing was put in place.
        FilesystemError: The disk is full, or cannot be written. Nothing was put in place.
    """
    with open_frozen_writer(path, segments, rows=rows, name=name) as writer:
        for ids, values in chunks:
            writer.add(ids, values)
    return writer.info


class FrozenTableWriter:
    """Takes the rows of a file that is being written; see `open_frozen_writer`."""

    def __init__(
        self,
        path: str,
        segments: Sequence[FrozenSegment],
        name: str,
        core: native.FrozenWriter,
        file: BinaryIO,
    ) -> None:
        self._path = path
        self._segments = tuple(segments)
        self._name = name
        self._core = core
        self._file = file

    def add(self, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Write rows; see the `chunks` of `write_frozen_table`."""
        _check_chunk(ids, values, self._core.dim)
        coded = np.empty(len(ids) * self._core.row_bytes, np.uint8)
        with _names_file(self._path):
            self._core.add(ids, values, coded)
        self._file.write(coded.data)

    @property
    def info(self) -> FrozenInfo:
        """The counts of the written file, once it is complete."""
        core = self._core
        return FrozenInfo(
            path=self._path,
            name=self._name,
            rows=core.rows,
            bytes=core.size,
            dim=core.dim,
            segments=self._segments,
            largest_error=core.largest_error,
            mean_error=core.mean_error,
            crc=core.crc,
        )


@contextmanager
def open_frozen_writer(
    path: str, segments: Sequence[FrozenSegment], *, rows: int, name: str = ""
) -> Iterator[FrozenTableWriter]:
    """Like `write_frozen_table`, for a caller that writes several files at once: the block adds the rows.

    The file appears when the block ends without an exception.
    """
    with arguments.core_errors():
        core = native.FrozenWriter([(each.dim, _CODINGS[each.coding]) for each in segments], name, rows)
    with filesystem.atomic_write(path) as file:
        file.write(core.begin())
        yield FrozenTableWriter(path, segments, name, core, file)
        with _names_file(path):
            tail = core.finish()
        file.write(tail.data)


class FrozenTable:
    """The rows of one file, mapped. Thread-safe.

    Shapes: n ids of a call, int64 of shape (n,), give rows of dim floats, float32 of shape (n, dim).

    Header, sizes and the checksums of both are always checked, so that a file that is foreign, cut or
    unfinished is refused; a row number that makes no sense is, when it is met. A file is never changed in
    place: to replace one, write another under its name, or delete it. A process that has it mapped keeps the
    old rows.

    Args:
        path: On a local disk.
        verify: Whether to read all bytes and compare their checksums.
        progress: Advanced by bytes that are verified.

    Raises:
        FileMissingError: There is no such file.
        CorruptFileError: Which file makes no sense, where and why.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> from monolith.table.frozen_table import FrozenSegment, FrozenTable, write_frozen_table
        >>> chunk = (np.array([7, 8]), np.ones((2, 2), np.float32))
        >>> _ = write_frozen_table("item.rows", [FrozenSegment(2, "fp16")], [chunk], rows=2)
        >>> table = FrozenTable("item.rows")
        >>> table.lookup(torch.tensor([7, 9]))  # ID 9 has no row
        tensor([[1., 1.],
                [0., 0.]])
        >>> table.close()
    """

    def __init__(self, path: str, *, verify: bool = False, progress: Progress | None = None) -> None:
        if filesystem.is_remote(path):
            raise FilesystemError(
                f"cannot map {path}: rows are served from a local disk. Copy it there first."
            )
        with filesystem.open_read(path) as file, frozen_errors():
            try:
                core = native.FrozenTable(file.fileno(), path)
            except OSError as cause:
                raise FilesystemError(f"cannot map {path}: {cause.strerror}") from cause
        self._path = path
        self._core: native.FrozenTable | None = core
        self._dim, self._rows, self._bytes = core.dim, core.rows, core.bytes
        self._segments = tuple(FrozenSegment(dim, _CODING_NAMES[coding]) for dim, coding in core.segments)
        self._is_bounded = False
        if verify:
            self.verify(progress)

    @property
    def path(self) -> str:
        return self._path

    @property
    def name(self) -> str:
        return self.core.name

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def bytes(self) -> int:
        """Of the file."""
        return self._bytes

    @property
    def segments(self) -> tuple[FrozenSegment, ...]:
        return self._segments

    @property
    def largest_error(self) -> float:
        """As in `FrozenInfo`."""
        return self.core.largest_error

    @property
    def mean_error(self) -> float:
        """As in `FrozenInfo`."""
        return self.core.mean_error

    @property
    def core(self) -> native.FrozenTable:
        """The compiled table, for calls over many tables."""
        core = self._core
        if core is None:
            raise TableClosedError(f"the table in {self._path} was closed")
        return core

    def __len__(self) -> int:
        return self._rows

    def lookup(self, ids: Tensor) -> Tensor:
        """Return one row per id, in the order given; zeros for an id without one.

        Args:
            ids: int64 of shape (n,).

        Returns:
            float32 of shape (n, dim).
        """
        core = self.core
        keys = arguments.id_array(ids)
        answer, values = arguments.out_array(None, len(keys), self._dim)
        with frozen_errors():
            core.lookup(keys, values)
        return answer

    def verify(self, progress: Progress | None = None, *, threads: int | None = None) -> None:
        """Compare all bytes with their checksums.

        Raises:
            CorruptFileError: Which file, and the first byte of the MiB that differs.
        """
        core = self.core
        with frozen_errors():
            _by_pieces(core.verify, core.checked_bytes, progress, threads)

    def prefault(self, progress: Progress | None = None, *, threads: int | None = None) -> None:
        """Bring the whole file into memory, so that no lookup waits for the disk.

        The system may take memory back that it needs for something else.

        Args:
            progress: Advanced by bytes.
            threads: As many as there are processors by default.
        """
        _by_pieces(self.core.prefault, self._bytes, progress, threads)

    @property
    def reads(self) -> RowReads | None:
        """What lookups read from disk; None if all rows are mapped, and once it is closed."""
        core = self._core
        if core is None or not self._is_bounded:
            return None
        stats = core.cache_stats
        return RowReads(stats.found, stats.in_memory, stats.reads, stats.bytes_read, stats.bytes)

    def bound_memory(self, row_bytes: int, reader: native.BlockReader) -> None:
        """Keep the index and so many bytes of rows in memory from now on, and read all other rows from disk.

        Called before the first lookup.
        """
        with filesystem.open_read(self._path) as file:
            try:
                self.core.bound_memory(file.fileno(), row_bytes, reader)
            except OSError as cause:
                raise FilesystemError(f"cannot read rows of {self._path}: {cause.strerror}") from cause
        self._is_bounded = True

    def close(self) -> None:
        """Close the file once calls under way and groups that use it have ended; again does nothing."""
        self._core = None


@dataclass(frozen=True, slots=True)
class RowReads:
    """Rows that were looked up in files of which memory has a part."""

    found: int = 0
    """Rows that were asked for and are there."""
    in_memory: int = 0
    """Of these, rows that needed no read."""
    reads: int = 0
    bytes_read: int = 0
    memory_bytes: int = 0
    """For the index and for rows."""

    def __sub__(self, before: RowReads) -> RowReads:
        return RowReads(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def __add__(self, other: RowReads) -> RowReads:
        return RowReads(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


class FrozenTables:
    """Frozen tables by name, and one native call for all of them. Thread-safe.

    Args:
        tables: Closed by `close`.
        threads: That share large calls, the caller's counted; as many as there are processors by default.
            Those of a few thousand ids are answered by the caller's thread alone.
        memory_bytes: For all of them; None is as much as they need. Tables that fit are mapped. Of all others
            the index is in memory, and the rows that are asked for most.

    Raises:
        TableArgumentError: `memory_bytes` is less than the indexes need.
    """

    def __init__(
        self,
        tables: Mapping[str, FrozenTable],
        *,
        threads: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._members = {name: tables[name] for name in sorted(tables)}
        if memory_bytes is not None:
            _bound_memory(list(self._members.values()), memory_bytes)
        self._widths = {name: table.dim for name, table in self._members.items()}
        self._dims = np.array(list(self._widths.values()), np.int64)
        count = processors() if threads is None else threads
        if count < 1:
            raise TableArgumentError(f"threads must be at least 1, got {threads}")
        self._group: native.FrozenGroup | None = native.FrozenGroup(
            [table.core for table in self._members.values()], native.Workers(count) if count > 1 else None
        )

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""
        return MappingProxyType(self._widths)

    @property
    def members(self) -> Mapping[str, FrozenTable]:
        """The tables, sorted by name."""
        return MappingProxyType(self._members)

    @property
    def rows(self) -> int:
        """Of all tables together."""
        return sum(table.rows for table in self._members.values())

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(table.bytes for table in self._members.values())

    def lookup(self, ids: Tensor, sizes: Tensor) -> Tensor:
        """Return the rows of all ids of several batches.

        Args:
            ids: int64: batch after batch and, within a batch, table after table, sorted by name.
            sizes: int64 of shape (batches * tables,): how many ids each table has in each batch.

        Returns:
            float32, flat: one row per id, each as wide as its table. Zeros for an id without a row.
        """
        return fused_lookup(self.group, ids, sizes, self._dims)

    @property
    def group(self) -> native.FrozenGroup:
        """The tables for the core.

        Raises:
            TableClosedError: They were closed.
        """
        if self._group is None:
            raise TableClosedError("these tables were closed")
        return self._group

    def present_ids(self, name: str, first: int, last: int) -> Tensor:
        """Return the ids of a table that hash to `first` to `last`, both included; int64 in no order."""
        with frozen_errors():
            return torch.from_numpy(self._members[name].core.scan(first, last)[0])

    def prefault(self, progress: Progress | None = None, *, threads: int | None = None) -> None:
        """As `FrozenTable.prefault`, for all tables of which all rows may be in memory."""
        for table in self._members.values():
            if table.reads is None:
                table.prefault(progress, threads=threads)
            elif progress is not None:
                progress.advance(table.bytes)

    @property
    def reads(self) -> RowReads | None:
        """What lookups in all tables read from disk; None if all rows are mapped."""
        bounded = [reads for table in self._members.values() if (reads := table.reads) is not None]
        return sum(bounded, RowReads()) if bounded else None

    def close(self) -> None:
        """Close all tables. Again does nothing."""
        self._group = None
        for table in self._members.values():
            table.close()


def _bound_memory(tables: Sequence[FrozenTable], memory_bytes: int) -> None:
    """Divide memory among tables: all get their index, and the rows of small ones come first."""
    indexes = sum(table.core.index_bytes for table in tables)
    left = memory_bytes - indexes
    if left < 0:
        raise TableArgumentError(
            f"memory of {memory_bytes:,} bytes is too little for {len(tables)} tables of "
            f"{sum(table.rows for table in tables):,} rows: finding a row without reading the disk takes "
            f"{indexes:,} bytes, and rows come on top of that. Give more, or spread the rows over several "
            "servers (export --shards)"
        )
    reader = native.BlockReader()
    wanted = {table: table.rows * table.core.kept_row_bytes for table in tables}
    for number, table in enumerate(sorted(tables, key=wanted.__getitem__)):
        share = min(wanted[table], left // (len(tables) - number))
        left -= share
        if share < wanted[table]:
            table.bound_memory(share, reader)


def fused_lookup(
    group: native.FrozenGroup | native.OverlaidGroup, ids: Tensor, sizes: Tensor, dims: NDArray[np.int64]
) -> Tensor:
    """Return the rows of all ids of a call, flat, by one call of the core; see `FrozenTables.lookup`."""
    keys, counts = arguments.id_array(ids), arguments.id_array(sizes, "sizes")
    batches = len(counts) // max(1, len(dims)) or 1
    with frozen_errors():
        floats = int(native.fused_offsets(dims, counts, batches, len(keys))[-1][-1])
        rows = torch.empty(floats, dtype=torch.float32)
        group.lookup(keys, counts, batches, rows.numpy())
    return rows


@contextmanager
def frozen_errors() -> Iterator[None]:
    """Let what the core says of a file or of arguments be an error of ours."""
    try:
        yield
    except native.FrozenDamageError as damage:
        path, offset, reason = damage.args
        raise CorruptFileError(path, offset, reason) from None
    except ValueError as cause:
        raise TableArgumentError(str(cause)) from cause


@contextmanager
def _names_file(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as cause:
        raise TableArgumentError(f"cannot write {path}: {cause}") from cause


def _check_chunk(ids: NDArray[np.int64], values: NDArray[np.float32], dim: int) -> None:
    if (
        ids.dtype != np.int64
        or values.dtype != np.float32
        or ids.ndim != 1
        or values.shape != (len(ids), dim)
        or not ids.flags.c_contiguous
        or not values.flags.c_contiguous
    ):
        raise TableArgumentError(
            f"a chunk is int64 ids of shape (n,) and float32 values of shape (n, {dim}), contiguous; got "
            f"{ids.dtype} {ids.shape} and {values.dtype} {values.shape}"
        )


def _by_pieces(
    work: Callable[[int, int], None], total: int, progress: Progress | None, threads: int | None
) -> None:
    def one(number: int, _: object) -> None:
        start = number * _PIECE_BYTES
        size = min(_PIECE_BYTES, total - start)
        work(start, size)
        if progress is not None:
            progress.advance(size)

    pieces = range(math.ceil(total / _PIECE_BYTES))
    in_parallel(one, pieces, processors() if threads is None else threads)


def processors() -> int:
    """Return how many this process may use."""
    return len(os.sched_getaffinity(0))
