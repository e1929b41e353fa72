"""Shard files: rows of a table in one file, column by column, every byte under a checksum.

All numbers are little-endian. Every part begins at a multiple of 64 bytes:

    header    magic "MONOROWS", format version, length and CRC of the description, CRC of these 32 bytes;
              then the description: JSON, filled up with spaces
    block     magic "ROWBLOCK", number, rows, payload length and CRC, CRC of these 64 bytes;
              then the payload: four columns, each filled up with zeros to a multiple of 64 bytes:
              ids int64, event times uint32, values float32 (rows, dim), state float32 (rows, state_dim)
    ...       more blocks, of a few MiB each, none empty
    index     per block: offset uint64, rows uint32, CRC of its payload uint32; filled up with zeros
    trailer   magic "ROWS_END", rows, blocks, offset of the index, newest event time, CRC of the index,
              CRC of the description, CRC of these 64 bytes

A reader starts at the trailer. What it says must add up to the size of the file, to the
byte, before a length is believed or memory set aside; so a file that was cut, padded,
altered or mixed from two is refused with its name and the byte where it went wrong.
CRC is CRC-32C. State is raw floats: a counter is two floats of bits, so columns are
copied, never computed with.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from monolith import filesystem, native
from monolith.errors import CorruptFileError
from monolith.front_door import module_when_used
from monolith.table.config import TableConfig
from monolith.table.table import Rows

if TYPE_CHECKING:
    import torch
else:
    torch = module_when_used("torch")

VERSION = 1
BLOCK_BYTES = 4 << 20

_ALIGN = 64
_HEADER = struct.Struct("<8sIIQI4x")  # and the CRC of these bytes, in the last four
_BLOCK = struct.Struct("<8sQQQI28x")
_INDEX = np.dtype([("offset", "<u8"), ("rows", "<u4"), ("crc", "<u4")])
_TRAILER = struct.Struct("<8sQQQQII16x")
_HEADER_MAGIC, _BLOCK_MAGIC, _TRAILER_MAGIC = b"MONOROWS", b"ROWBLOCK", b"ROWS_END"
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The layout of a segment in a row."""

    dim: int
    state_dim: int
    optimizer: str
    """The kind of update rule, which says what the state means."""
    compressor: str

    def __str__(self) -> str:
        return f"{self.dim} x {self.optimizer}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What a row is made of: whether rows of one table fit into another."""

    segments: tuple[SegmentLayout, ...]

    @classmethod
    def of(cls, config: TableConfig) -> RowLayout:
        return cls(
            tuple(
                SegmentLayout(
                    dim=segment.dim,
                    state_dim=0 if config.serving else segment.state_dim,
                    optimizer=segment.optimizer.rule.kind,
                    compressor=segment.compressor.kind,
                )
                for segment in config.segments
            )
        )

    @property
    def dim(self) -> int:
        return sum(segment.dim for segment in self.segments)

    @property
    def state_dim(self) -> int:
        return sum(segment.state_dim for segment in self.segments)

    def __str__(self) -> str:
        return f"{self.dim} values + {self.state_dim} state ({', '.join(map(str, self.segments))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a shard file says of itself, ahead of its rows."""

    table: str
    layout: RowLayout
    shard: int
    num_shards: int
    dump: str
    """The same for all shards that were written together, and for no others."""
    stamp: str | int
    """The caller's name for the moment that was dumped."""
    scales: tuple[float, ...]
    """One per segment: how steep a one_bit segment had become."""
    linked: str = ""
    """The checksum of which rows are in linked files, and so in no shard; empty without such files."""

    def to_json(self) -> bytes:
        found = asdict(self)
        if not self.linked:  # as before there were any
            del found["linked"]
        return json.dumps(found, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        """Raises ValueError, TypeError or KeyError for what `to_json` does not write."""
        found: dict[str, Any] = json.loads(text)
        segments = tuple(SegmentLayout(**segment) for segment in found["layout"]["segments"])
        if not segments or any(type(n) is not int or n < 0 for s in segments for n in (s.dim, s.state_dim)):
            raise ValueError("segments must have dims")
        scales = tuple(float(scale) for scale in found["scales"])
        return cls(**(found | {"layout": RowLayout(segments), "scales": scales}))


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of a dump: what it says of itself, and how much it holds."""

    path: str
    description: Description
    rows: int
    blocks: int
    bytes: int
    max_event_time: int
    linked: bool = False
    """Whether it is not a shard file, but one of a tiered table that a dump links to; see `cold_files`."""


def rows_per_block(layout: RowLayout) -> int:
    """Return how many rows make a block of about `BLOCK_BYTES`."""
    return max(1, min(1 << 16, BLOCK_BYTES // saved_row_bytes(layout)))


def saved_row_bytes(layout: RowLayout) -> int:
    """Return the bytes of a row: ID, event time, values and state."""
    return 12 + 4 * (layout.dim + layout.state_dim)


def write_shard(path: str, description: Description, chunks: Iterable[Rows]) -> ShardInfo:
    """Write rows, one block per chunk, to a file that appears under its name when it is complete.

    Raises:
        FilesystemError: It could not be written; what had the name before is still there.
    """
    with filesystem.atomic_write(path) as file:
        return _write(file, path, description, chunks)


def inspect(path: str, *, verify: bool = False) -> ShardInfo:
    """Return what is in a shard file; with `verify`, after reading all of it.

    Raises:
        CorruptFileError: The file is not a shard file, or damaged.
    """
    with ShardReader(path) as shard:
        if verify:
            for _ in shard:
                pass
        return shard.info


class ShardReader(AbstractContextManager["ShardReader"]):
    """Reads one shard file, block by block. Not thread-safe.

    Opening checks header, index and trailer; iterating checks each block before it
    yields its rows. `Rows` share the memory of the block they were read into.

    Raises:
        FileMissingError: There is no such file.
        CorruptFileError: Where and why the file does not make sense.
    """

    def __init__(self, path: str) -> None:
        self._file = filesystem.open_read(path)
        self._path = path
        try:
            self.info, self._index = self._open()
        except BaseException:
            self._file.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __iter__(self) -> Iterator[Rows]:
        layout = self.info.description.layout
        newest = 0
        for number, (offset, rows, crc) in enumerate(self._index.tolist()):
            rows_read = self._block(number, offset, rows, crc, layout)
            newest = max(newest, int(rows_read.event_times.max()))
            yield rows_read
        if newest != self.info.max_event_time:
            raise self._corrupt(
                self.info.bytes - _TRAILER.size,
                f"the newest event time is {newest}, the trailer says {self.info.max_event_time}",
            )

    def block(self, number: int) -> Rows:
        """Return the rows of one of the `info.blocks` blocks, checked."""
        offset, rows, crc = self._index[number].tolist()
        return self._block(number, offset, rows, crc, self.info.description.layout)

    def _open(self) -> tuple[ShardInfo, NDArray[Any]]:
        size = self._file.seek(0, 2)
        least = _ALIGN + _TRAILER.size
        if size < least or size % _ALIGN:
            raise self._corrupt(
                size, f"a shard file has at least {least} bytes, in whole {_ALIGN}s; this has {size}"
            )
        at = size - _TRAILER.size
        trailer = self._sealed(at, _TRAILER.size, _TRAILER_MAGIC, "trailer")
        _, rows, blocks, index_at, newest, index_crc, description_crc = _TRAILER.unpack(trailer)
        index_bytes = blocks * _INDEX.itemsize
        if index_at < _ALIGN or index_at + padded(index_bytes) != at:
            raise self._corrupt(at, f"an index of {blocks} blocks at {index_at} does not end at the trailer")
        raw = self._read(index_at, at - index_at)
        if native.crc32c(raw) != index_crc:
            raise self._corrupt(index_at, "the index does not match its checksum")
        index = np.frombuffer(raw, _INDEX, blocks)
        description, end = self._description(index_at, description_crc)
        self._check_index(index, description.layout, end, index_at, rows)
        info = ShardInfo(self._path, description, rows, blocks, size, newest)
        return info, index

    def _description(self, limit: int, crc: int) -> tuple[Description, int]:
        header = self._sealed(0, _HEADER.size, _HEADER_MAGIC, "header")
        _, version, own_crc, length, _ = _HEADER.unpack(header)
        if version != VERSION:
            raise self._corrupt(8, f"it is of format version {version}, this program reads {VERSION}")
        end = _HEADER.size + length
        if end > limit or end % _ALIGN:
            raise self._corrupt(16, f"a description of {length} bytes does not end where blocks may begin")
        text = self._read(_HEADER.size, length)
        if native.crc32c(text) != own_crc or own_crc != crc:
            raise self._corrupt(_HEADER.size, "the description does not match its checksum")
        try:
            return Description.from_json(bytes(text)), end
        except (ValueError, TypeError, KeyError) as cause:
            raise self._corrupt(_HEADER.size, f"the description is malformed: {cause}") from cause

    def _check_index(self, index: NDArray[Any], layout: RowLayout, begin: int, end: int, rows: int) -> None:
        at, total = begin, 0
        for number, (offset, count, _) in enumerate(index.tolist()):
            if offset != at or count == 0:
                raise self._corrupt(
                    end + number * _INDEX.itemsize, f"block {number} does not begin where it should"
                )
            at += _BLOCK.size + _payload_bytes(count, layout)
            total += count
        if at != end or total != rows:
            raise self._corrupt(
                end,
                f"{len(index)} blocks of {total} rows end at {at}; {rows} rows up to {end} were announced",
            )

    def _block(self, number: int, offset: int, rows: int, crc: int, layout: RowLayout) -> Rows:
        header = self._sealed(offset, _BLOCK.size, _BLOCK_MAGIC, f"block {number}")
        length = _payload_bytes(rows, layout)
        if _BLOCK.unpack(header)[1:] != (number, rows, length, crc):
            raise self._corrupt(offset, f"block {number} is not the one in the index")
        payload = self._read(offset + _BLOCK.size, length)
        if native.crc32c(payload) != crc:
            raise self._corrupt(
                offset + _BLOCK.size, f"the rows of block {number} do not match their checksum"
            )
        at = 0
        columns = []
        for dtype, width in (("<i8", None), ("<u4", None), ("<f4", layout.dim), ("<f4", layout.state_dim)):
            count = rows * (1 if width is None else width)
            column = np.frombuffer(payload, dtype, count, at)
            columns.append(column if width is None else column.reshape(rows, width))
            at += padded(column.nbytes)
        columns[1] = columns[1].astype(np.int64)
        return Rows(*map(torch.from_numpy, columns))

    def _sealed(self, at: int, size: int, magic: bytes, what: str) -> bytes:
        return sealed(self._path, at, self._read(at, size), magic, what)

    def _read(self, at: int, size: int) -> bytearray:
        """Read exactly `size` bytes, a number that was checked against the size of the file."""
        buffer = bytearray(size)
        self._file.seek(at)
        with memoryview(buffer) as view:
            have = 0
            while have < size:
                got = self._file.readinto(view[have:])  # type: ignore[attr-defined]
                if not got:
                    raise self._corrupt(at + have, f"the file ends {size - have} bytes early")
                have += got
        return buffer

    def _corrupt(self, offset: int, reason: str) -> CorruptFileError:
        return CorruptFileError(self._path, offset, reason)


def _write(file: BinaryIO, path: str, description: Description, chunks: Iterable[Rows]) -> ShardInfo:
    text = description.to_json()
    text = text.ljust(padded(_HEADER.size + len(text)) - _HEADER.size)
    text_crc = native.crc32c(text)
    file.write(seal(_HEADER.pack(_HEADER_MAGIC, VERSION, text_crc, len(text), 0)))
    file.write(text)
    at = _HEADER.size + len(text)
    index: list[tuple[int, int, int]] = []
    newest = 0
    for rows in chunks:
        if not len(rows):
            continue
        columns = _columns(rows, description.layout)
        newest = max(newest, int(columns[1].max()))
        crc, length = 0, 0
        pieces: list[Any] = []
        for column in columns:
            padding = bytes(padded(column.nbytes) - column.nbytes)
            pieces += [column.data.cast("B") if column.size else b"", padding]
        for piece in pieces:
            crc = native.crc32c(piece, crc)
            length += len(piece)
        file.write(seal(_BLOCK.pack(_BLOCK_MAGIC, len(index), len(rows), length, crc)))
        for piece in pieces:
            file.write(piece)
        index.append((at, len(rows), crc))
        at += _BLOCK.size + length
    table = np.array(index, _INDEX).tobytes()
    table = table.ljust(padded(len(table)), b"\0")
    file.write(table)
    count = sum(rows for _, rows, _ in index)
    file.write(
        seal(_TRAILER.pack(_TRAILER_MAGIC, count, len(index), at, newest, native.crc32c(table), text_crc))
    )
    return ShardInfo(path, description, count, len(index), at + len(table) + _TRAILER.size, newest)


def _columns(rows: Rows, layout: RowLayout) -> list[NDArray[Any]]:
    """Return the columns of rows as a block stores them."""
    n = len(rows)
    columns = [
        np.ascontiguousarray(column.numpy(), dtype)
        for column, dtype in zip(
            (rows.ids, rows.event_times, rows.values, rows.state), ("<i8", "<u4", "<f4", "<f4"), strict=True
        )
    ]
    shapes = [column.shape for column in columns]
    assert shapes == [(n,), (n,), (n, layout.dim), (n, layout.state_dim)], shapes
    return columns


def _payload_bytes(rows: int, layout: RowLayout) -> int:
    return sum(padded(rows * width) for width in (8, 4, 4 * layout.dim, 4 * layout.state_dim))


def padded(size: int, unit: int = _ALIGN) -> int:
    """Return the next multiple of `unit`."""
    return -(-size // unit) * unit


def seal(part: bytes) -> bytes:
    """Put the CRC of a fixed part into its last four bytes."""
    body = part[: -_CRC.size]
    return body + _CRC.pack(native.crc32c(body))


def sealed(path: str, at: int, part: bytes | bytearray, magic: bytes, what: str) -> bytes:
    """Return a fixed part of a file without its CRC, if it begins with its magic and ends with that CRC."""
    if not part.startswith(magic):
        raise CorruptFileError(
            path, at, f"no {what} here: it begins with {bytes(part[:8])!r} instead of {magic!r}"
        )
    body = bytes(part[: -_CRC.size])
    if native.crc32c(body) != _CRC.unpack_from(part, len(body))[0]:
        raise CorruptFileError(path, at, f"the {what} does not match its checksum")
    return body + bytes(_CRC.size)
