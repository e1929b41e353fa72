"""Cold files: rows of a tiered table in a dump that links to them instead of writing them again.

A tiered table keeps its cold rows in files that never change (`native/src/cold_store.h`). A dump gives each
of them a second name, and says in a small file next to it which of its rows are of the dump:

    runs/item.4f0c9b1e2a7d3358.cold-00000-of-00003     the file of the table: whole rows, as it stores them
    runs/item.4f0c9b1e2a7d3358.alive-00000-of-00003    a bit for each of these rows

A cold file is blocks of 4 KiB, or more for long rows: a head, rows in the order of their hashes, and a
directory of their hashes and event times. A block begins with its CRC, the stamp of the file and its own
number. The other file has the frame of a shard file, with parts that begin at multiples of 64 bytes:

    header    magic "MONOLINK", version, length and CRC of the description, CRC of these 32 bytes; then the
              description: JSON, filled up with spaces
    bits      a bit for each row of the cold file, the lowest of a byte first; filled up with zeros
    trailer   magic "LINK_END", rows of the cold file, rows with a bit, newest event time of these, CRC of the
              bits, CRC of the description, CRC of these 64 bytes

Shapes: r bytes of a record are 16 (hash uint64, event time uint32, and an epoch that means nothing elsewhere)
and the row: d values as the table stores them, filled up to 4 bytes, and s floats of state; float32 rows are
filled up to 16 bytes, others to 8. Values of int8 are codes, filled up to 4 bytes, and a float32 scale for
each segment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.errors import CorruptFileError, RestoreError
from monolith.front_door import module_when_used
from monolith.table.compressors import narrow_bytes
from monolith.table.config import EmbeddingDtype
from monolith.table.hashing import unmix
from monolith.table.shard_files import Description, ShardInfo, padded, seal, sealed
from monolith.table.table import Rows, Scan

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = module_when_used("torch")


_BLOCK_HEAD = struct.Struct("<IIQ")  # CRC of what follows, stamp of the file, number
_HEAD = struct.Struct("<8sIIQQQQQIIII")
_MAGIC, _VERSION = b"MONOCOLD", 1
_RECORD_HEAD = 16
_LEAST_BLOCK = 4096
_CHUNK_BYTES = 4 << 20  # that are read at once
_MERGED_BYTES = 64 << 20  # of all files that are merged
_MERGED_ROWS = 1 << 16  # at a time
_HASHES = 1 << 64

_LINK_VERSION = 1
_LINK_HEADER = struct.Struct("<8sIIQI4x")  # and the CRC of these bytes, in the last four
_LINK_TRAILER = struct.Struct("<8sQQQII20x4x")
_LINK_MAGIC, _LINK_END = b"MONOLINK", b"LINK_END"


class LinkableFile(NamedTuple):
    """A cold file with rows of a snapshot."""

    path: str
    rows: int
    """In the file."""
    alive_rows: int
    """In the snapshot."""
    alive: NDArray[np.uint8]
    """A bit for each row of the file, the lowest of a byte first."""


class ColdRows(NamedTuple):
    """The rows of a snapshot that are in files which never change."""

    files: Sequence[LinkableFile]
    scan_others: Callable[..., Scan]
    """As `TableSnapshot.scan`: rows that are in none of the files."""


def link_names(basename: str, links: int) -> list[tuple[str, str]]:
    """Return the names of a dump's linked files, each with that of the file that says which rows count."""
    ends = [f"-{number:05d}-of-{links:05d}" for number in range(links)]
    return [(f"{basename}.cold{end}", f"{basename}.alive{end}") for end in ends]


class ColdFile:
    """What a cold file says of itself, and its rows. Any thread may read; each call opens the file.

    Raises:
        FileMissingError: There is no such file.
        CorruptFileError: A block is not as it was written, or what the head says does not add up.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with filesystem.open_read(path) as file:
            self.bytes = file.seek(0, 2)
            file.seek(0)
            first = file.read(_LEAST_BLOCK)
        if len(first) < _LEAST_BLOCK:
            raise CorruptFileError(path, len(first), f"a file of cold rows has at least {_LEAST_BLOCK} bytes")
        self.stamp: int = _BLOCK_HEAD.unpack_from(first)[1]
        magic, version, self._record, self._block, self.rows, self._row_blocks, directory, *_ = (
            _HEAD.unpack_from(first, _BLOCK_HEAD.size)
        )
        if magic != _MAGIC or version != _VERSION:
            raise CorruptFileError(
                path, 0, f"it begins with {magic!r}, version {version}, instead of {_MAGIC!r}, {_VERSION}"
            )
        room = self._block - _BLOCK_HEAD.size
        self._per_block = room // max(self._record, 1)
        self._heads_per_block = room // _RECORD_HEAD
        if (
            self._block % _LEAST_BLOCK
            or self._per_block < 1
            or self._row_blocks != -(-self.rows // self._per_block)
            or directory != -(-self.rows // self._heads_per_block)
            or self.bytes != (1 + self._row_blocks + directory) * self._block
        ):
            raise CorruptFileError(path, 0, f"{self.rows} rows do not make a file of {self.bytes} bytes")
        self._read(0, 1)

    @property
    def row_bytes(self) -> int:
        return int(self._record) - _RECORD_HEAD

    @property
    def rows_per_block(self) -> int:
        return int(self._per_block)

    @property
    def blocks(self) -> int:
        """With rows."""
        return int(self._row_blocks)

    def heads(self) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint32]]]:
        """Yield the number of a row, and hashes and event times from there on; reads no row."""
        step = max(_CHUNK_BYTES // self._block, 1)
        count = -(-self.rows // self._heads_per_block)
        for at in range(0, count, step):
            blocks = self._read(1 + self._row_blocks + at, min(step, count - at))
            first = at * self._heads_per_block
            heads = _unpacked(blocks, self._heads_per_block, _RECORD_HEAD)[: self.rows - first]
            yield first, _column(heads, 0, 8, "<u8")[:, 0], _column(heads, 8, 4, "<u4")[:, 0]

    def records(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return up to `count` records, of shape (n, r), from row `first` on, which begins a block."""
        count = min(count, self.rows - first)
        blocks = self._read(1 + first // self._per_block, -(-count // self._per_block))
        return _unpacked(blocks, self._per_block, self._record)[:count]

    def _read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return blocks, of shape (count, bytes of a block), checked."""
        found = np.empty((count, self._block), np.uint8)
        have = 0
        with filesystem.open_read(self.path) as file, found.reshape(-1).data as view:
            file.seek(first * self._block)
            while have < len(view):
                got = file.readinto(view[have:])  # type: ignore[attr-defined]
                if not got:
                    raise CorruptFileError(self.path, first * self._block + have, "the file ends too early")
                have += got
        bad = native.first_bad_block(found.reshape(-1), self._block, self.stamp, first)
        if bad >= 0:
            crc, *_ = _BLOCK_HEAD.unpack_from(found[bad])
            reason = (
                "a block is not the one that was written here"
                if native.crc32c(found[bad, 4:]) == crc
                else "the checksum of a block does not match its content"
            )
            raise CorruptFileError(self.path, (first + bad) * self._block, reason)
        return found


class LinkedRows:
    """The rows of a dump that are in one linked file. Any thread may read.

    Raises:
        FileMissingError: One of the two files is missing.
        CorruptFileError: One of the two is damaged.
        RestoreError: They do not belong together.
    """

    def __init__(self, path: str, alive_path: str) -> None:
        self._link = _read_link(alive_path)
        self.file = ColdFile(path)
        self._layout = layout = self._link.description.layout
        self.values = self._link.values
        self._dims = [segment.dim for segment in layout.segments]
        self._state_at = values_bytes(self.values, self._dims)
        row_bytes = padded(self._state_at + 4 * layout.state_dim, 16 if self.values == "float32" else 8)
        seen = (self.file.stamp, self.file.rows, self.file.row_bytes)
        if seen != (self._link.stamp, self._link.rows, row_bytes):
            expected = (self._link.stamp, self._link.rows, row_bytes)
            raise RestoreError(
                f"{path} is not the file that was linked: (stamp, rows, bytes of a row) are {seen}, "
                f"{alive_path} says {expected}. Restore the files as they were written, or use another dump."
            )
        self.info = ShardInfo(
            path=path,
            description=self._link.description,
            rows=self._link.alive_rows,
            blocks=self.file.blocks,
            bytes=self.file.bytes + self._link.bytes,
            max_event_time=self._link.newest,
            linked=True,
        )

    def __iter__(self) -> Iterator[Rows]:
        """Yield the rows in the order of their hashes, checked, a few MiB at a time."""
        step = self._rows_in(_CHUNK_BYTES)
        last, count, newest = -1, 0, 0
        for first in range(0, self.file.rows, step):
            chunk = self.read(first, step, after=last)
            last = chunk.last
            if len(chunk.rows):
                count += len(chunk.rows)
                newest = max(newest, int(chunk.rows.event_times.max()))
                yield chunk.rows
        if (count, newest) != (self._link.alive_rows, self._link.newest):
            raise CorruptFileError(
                self.info.path, 0, f"{count} rows up to time {newest} are in it, others were dumped"
            )

    def verified(self) -> Iterator[Rows]:
        """Yield the rows as iterating does, and check the rest of the file, too."""
        yield from self
        for _ in self.file.heads():
            pass

    @property
    def alive(self) -> NDArray[np.uint8]:
        """A bit for each row of the file, the lowest of a byte first."""
        return self._link.bits

    def ids(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the number of a row, and from there on the ids of rows, and which are of the dump."""
        for first, hashes, _ in self.file.heads():
            yield first, unmix(hashes), self._alive(first, len(hashes))

    def read(self, first: int, count: int, *, after: int = -1) -> _Chunk:
        """Return the rows of the dump among `count` of the file from `first` on, which begins a block."""
        records = self.file.records(first, count)
        hashes = _column(records, 0, 8, "<u8")[:, 0]
        if int(hashes[0]) <= after or not bool((hashes[1:] > hashes[:-1]).all()):
            raise CorruptFileError(self.info.path, 0, "its rows are not in the order of their hashes")
        alive = self._alive(first, len(records))
        mine = records if bool(alive.all()) else records[alive]
        rows, state_at = mine[:, _RECORD_HEAD:], self._state_at
        values = _values(rows, self.values, self._dims)
        times = _column(mine, 8, 4, "<u4")[:, 0].astype(np.int64)
        state = _column(rows, state_at, 4 * self._layout.state_dim, "<f4")
        columns = (unmix(hashes[alive]), times, values, state)
        return _Chunk(hashes[alive], Rows(*map(torch.from_numpy, columns)), int(hashes[-1]))

    def first_row(self, begin: int) -> int:
        """Return the first row of the first block with a hash of `begin` or more."""
        low, high, below, above = 0, self.file.blocks if begin else 0, 0, _HASHES
        # Hashes are spread evenly, so guess; halve every other time, in case they are not.
        guess = True
        while low < high:
            share = (begin - below) / (above - below) if guess else 0.5
            guess = not guess
            middle = min(low + int((high - low) * share), high - 1)
            found = self.file.records(middle * self.file.rows_per_block, self.file.rows_per_block)
            last = int(_column(found[-1:], 0, 8, "<u8")[0, 0])
            if last < begin:
                low, below = middle + 1, last
            else:
                high, above = middle, last
        return low * self.file.rows_per_block

    def _rows_in(self, size: int) -> int:
        """Return how many rows in whole blocks are about so many bytes."""
        per_block = self.file.rows_per_block
        return max(size // ((self.file.row_bytes + _RECORD_HEAD) * per_block), 1) * per_block

    def _alive(self, first: int, count: int) -> NDArray[np.bool_]:
        begin, end = first // 8, -(-(first + count) // 8)
        bits = np.unpackbits(self._link.bits[begin:end], bitorder="little")
        return bits[first - 8 * begin :][:count].view(np.bool_)


def values_bytes(dtype: EmbeddingDtype, dims: Sequence[int]) -> int:
    """Return the bytes of a stored row before its state."""
    scales = 4 * len(dims) if dtype == "int8" else 0
    return padded(narrow_bytes(dtype, dims) - scales, 4) + scales


def _values(rows: NDArray[np.uint8], dtype: EmbeddingDtype, dims: Sequence[int]) -> NDArray[np.float32]:
    """Return the values of stored rows."""
    dim = sum(dims)
    if dtype == "float32":
        return _column(rows, 0, 4 * dim, "<f4")
    if dtype == "bfloat16":
        return (_column(rows, 0, 2 * dim, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return _column(rows, 0, 2 * dim, "<f2").astype(np.float32)
    scales = _column(rows, padded(dim, 4), 4 * len(dims), "<f4")
    codes = _column(rows, 0, dim, "<i1").astype(np.float32)
    values: NDArray[np.float32] = codes * np.repeat(scales, dims, axis=1)
    return values


class _Chunk(NamedTuple):
    hashes: NDArray[np.uint64]
    """Of the rows of the dump."""
    rows: Rows
    last: int
    """The last hash, of a row that may not be of the dump."""


def in_order_of_hashes(
    links: Sequence[LinkedRows],
    begin: int,
    end: int,
    others: Iterable[tuple[NDArray[np.uint64], Rows]] = (),
) -> Iterator[tuple[NDArray[np.uint64], Rows]]:
    """Yield the rows of linked files with hashes in [begin, end), in the order of their hashes.

    Hashes are spread evenly, so the range is divided into equal parts, and each file is read once.

    Args:
        others: More rows, in the same range and order, and their hashes.
    """
    parts = max(sum(link.info.rows for link in links) * (end - begin) // (_HASHES * _MERGED_ROWS), 1)
    cursors = [_Cursor(_chunks(link, begin, end, _MERGED_BYTES // len(links))) for link in links]
    cursors.append(_Cursor(_Chunk(hashes, rows, int(hashes[-1])) for hashes, rows in others))
    for part in range(parts):
        upto = begin + (end - begin) * (part + 1) // parts
        found = [piece for cursor in cursors for piece in cursor.upto(upto)]
        if found:
            yield _sorted(found)


def _sorted(pieces: Sequence[_Chunk]) -> tuple[NDArray[np.uint64], Rows]:
    """Return the rows of several chunks in the order of their hashes."""
    hashes = np.concatenate([piece.hashes for piece in pieces])
    order = np.argsort(hashes)
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum([len(piece.hashes) for piece in pieces])

    # By numpy: torch would have all cores spin for so many small pieces. Each row is copied once.
    def joined(name: str) -> Tensor:
        columns = [getattr(piece.rows, name).numpy() for piece in pieces]
        out = np.empty((len(order), *columns[0].shape[1:]), columns[0].dtype)
        for column, last in zip(columns, ends, strict=True):
            out[places[last - len(column) : last]] = column
        return torch.from_numpy(out)

    return hashes[order], Rows(joined("ids"), joined("event_times"), joined("values"), joined("state"))


def _chunks(link: LinkedRows, begin: int, end: int, size: int) -> Iterator[_Chunk]:
    """Yield the rows of one linked file in a range, at most about `size` bytes at a time."""
    per_block = link.file.rows_per_block
    wanted = link.file.rows * (end - begin) // _HASHES  # about as many rows are in the range
    blocks = min(max(size, 64 << 10) // (link.file.row_bytes * per_block), wanted // per_block + 1)
    step, last = max(blocks, 1) * per_block, -1
    for first in range(link.first_row(begin), link.file.rows, step):
        chunk = link.read(first, step, after=last)
        last = chunk.last
        yield _part(chunk, _place(chunk.hashes, begin), _place(chunk.hashes, end))
        if last >= end - 1:
            return


class _Cursor:
    """Where the reading of one stream of rows is."""

    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        self._chunks = chunks
        self._held: _Chunk | None = None

    def upto(self, end: int) -> Iterator[_Chunk]:
        """Yield the next rows, with hashes below `end`."""
        while (held := self._held or next(self._chunks, None)) is not None:
            count = _place(held.hashes, end)
            if count:
                yield _part(held, 0, count)
            self._held = _part(held, count, len(held.hashes)) if count < len(held.hashes) else None
            if self._held is not None:
                return


def _part(chunk: _Chunk, begin: int, end: int) -> _Chunk:
    return _Chunk(chunk.hashes[begin:end], chunk.rows.slice(begin, end), chunk.last)


def _place(hashes: NDArray[np.uint64], wanted: int) -> int:
    """Return how many hashes are below `wanted`."""
    return len(hashes) if wanted >= _HASHES else int(np.searchsorted(hashes, np.uint64(wanted)))


def _unpacked(blocks: NDArray[np.uint8], per_block: int, size: int) -> NDArray[np.uint8]:
    """Return the items of blocks, of shape (items, size)."""
    head = _BLOCK_HEAD.size
    return blocks[:, head : head + per_block * size].reshape(-1, size)


def _column(items: NDArray[np.uint8], at: int, size: int, dtype: str) -> NDArray[Any]:
    """Return bytes [at, at + size) of each item as numbers, of shape (items, numbers)."""
    found = np.ascontiguousarray(items[:, at : at + size])
    return found.view(dtype) if size else np.empty((len(items), 0), dtype)


# Which rows of a cold file are of the dump


@dataclass(frozen=True, slots=True)
class _Link:
    description: Description
    values: EmbeddingDtype
    stamp: int
    rows: int
    alive_rows: int
    newest: int
    bits: NDArray[np.uint8]
    bytes: int


def write_link(
    path: str,
    description: Description,
    values: EmbeddingDtype,
    file: ColdFile,
    alive: NDArray[np.uint8],
    newest: int,
) -> int:
    """Write which rows of a cold file are of a dump, and return the bytes of that.

    Args:
        alive: A bit for each row of the file, the lowest of a byte first.
        newest: The newest event time of these rows.
    """
    about = {"description": json.loads(description.to_json()), "values": values, "stamp": file.stamp}
    text = json.dumps(about, sort_keys=True).encode()
    text = text.ljust(padded(_LINK_HEADER.size + len(text)) - _LINK_HEADER.size)
    crc, bits = native.crc32c(text), alive.tobytes()
    bits = bits.ljust(padded(len(bits)), b"\0")
    alive_rows = int(np.unpackbits(alive).sum())
    parts = (
        seal(_LINK_HEADER.pack(_LINK_MAGIC, _LINK_VERSION, crc, len(text), 0)),
        text,
        bits,
        seal(_LINK_TRAILER.pack(_LINK_END, file.rows, alive_rows, newest, native.crc32c(bits), crc)),
    )
    with filesystem.atomic_write(path) as out:
        for part in parts:
            out.write(part)
    return sum(map(len, parts))


def _read_link(path: str) -> _Link:
    content = filesystem.read_bytes(path)
    at = len(content) - _LINK_TRAILER.size
    if at < _LINK_HEADER.size:
        raise CorruptFileError(path, len(content), f"it has only {len(content)} bytes")
    header = sealed(path, 0, content[: _LINK_HEADER.size], _LINK_MAGIC, "header")
    trailer = sealed(path, at, content[at:], _LINK_END, "trailer")
    _, version, own_crc, length, _ = _LINK_HEADER.unpack(header)
    _, rows, alive_rows, newest, bits_crc, crc = _LINK_TRAILER.unpack(trailer)
    if version != _LINK_VERSION:
        raise CorruptFileError(
            path, 8, f"it is of format version {version}, this program reads {_LINK_VERSION}"
        )
    begin = _LINK_HEADER.size + length
    if begin + padded(-(-rows // 8)) != at:
        raise CorruptFileError(path, at, f"{rows} bits from {begin} on do not end at the trailer")
    text, bits = content[_LINK_HEADER.size : begin], content[begin:at]
    if native.crc32c(text) != own_crc or own_crc != crc:
        raise CorruptFileError(path, _LINK_HEADER.size, "the description does not match its checksum")
    if native.crc32c(bits) != bits_crc:
        raise CorruptFileError(path, begin, "the bits do not match their checksum")
    try:
        about = json.loads(text)
        description = Description.from_json(json.dumps(about["description"]).encode())
        if about["values"] not in get_args(EmbeddingDtype):
            raise ValueError(f"values are stored as {about['values']!r}")
    except (ValueError, TypeError, KeyError) as cause:
        raise CorruptFileError(path, _LINK_HEADER.size, f"the description is malformed: {cause}") from cause
    alive = np.frombuffer(bits, np.uint8)[: -(-rows // 8)]
    return _Link(description, about["values"], about["stamp"], rows, alive_rows, newest, alive, len(content))
