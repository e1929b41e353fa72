"""Where the joiner stores impressions until their windows close: memory first, then disk.

Impressions come in blocks and stay in blocks; none is ever changed. When memory has more than allowed, the
oldest blocks are written to one file together and read again from there. A snapshot writes the blocks that
have no file yet and names the files, so a second snapshot costs only what came since the first. A file is
deleted when no block is left in it, unless a snapshot still names it.

Files are named arrays, little-endian, in this order:

    head         magic "MONOCOLS", version, length and CRC of the description, length and CRC of the payload
    description  JSON: a header of the writer, then name, dtype and count of every array
    payload      the arrays, each padded with zeros to a multiple of 8 bytes

CRC is CRC-32C. Lengths and checksums are verified first, so a truncated or altered file is refused with its
name and the offending byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import concurrency, filesystem, native
from monolith.data.records import Records, column_from_arrays, concat
from monolith.errors import CorruptFileError, FileMissingError, RestoreError
from monolith.feature import ColumnKind
from monolith.tensors import RaggedTensor

_HEAD = struct.Struct("<8sIIIIQ")
_MAGIC, _VERSION, _ALIGN = b"MONOCOLS", 1, 8
_DTYPES = {name: np.dtype(f"<{name}") for name in ("i8", "f4", "u1")}

Arrays = dict[str, NDArray[Any]]


def pack(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return JSON-able values and one-dimensional arrays of int64, float32 or uint8 as bytes."""
    named = [(name, _short(array.dtype), len(array)) for name, array in arrays.items()]
    description = json.dumps({"about": about, "arrays": named}).encode()
    parts = []
    for array in arrays.values():
        raw = np.ascontiguousarray(array).tobytes()
        parts += [raw, b"\0" * (-len(raw) % _ALIGN)]
    payload = b"".join(parts)
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        len(description),
        native.crc32c(description),
        native.crc32c(payload),
        len(payload),
    )
    return head + description + payload


def unpack(data: bytes, path: str) -> tuple[dict[str, Any], Arrays]:
    """Return what `pack` was given; the arrays may be written to.

    Args:
        path: Where the bytes came from, for the error.

    Raises:
        CorruptFileError: They are not what `pack` returned.
    """
    if len(data) < _HEAD.size:
        raise CorruptFileError(
            path, len(data), f"{len(data)} bytes are too few for the {_HEAD.size} of a head"
        )
    magic, version, about_bytes, about_crc, payload_crc, payload_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptFileError(path, 0, f"begins with {magic!r} version {version}, not {_MAGIC!r} {_VERSION}")
    begin = _HEAD.size + about_bytes
    if len(data) != begin + payload_bytes:
        raise CorruptFileError(
            path,
            min(len(data), begin + payload_bytes),
            f"has {len(data)} bytes, its head says {begin + payload_bytes}",
        )
    writable = bytearray(data)  # arrays over bytes are read-only, which torch does not take well
    view = memoryview(writable)
    if native.crc32c(bytes(view[_HEAD.size : begin])) != about_crc:
        raise CorruptFileError(path, _HEAD.size, "the description does not match its checksum")
    if native.crc32c(bytes(view[begin:])) != payload_crc:
        raise CorruptFileError(path, begin, "the payload does not match its checksum")
    description = json.loads(data[_HEAD.size : begin])
    arrays: Arrays = {}
    for name, short, count in description["arrays"]:
        dtype = _DTYPES[short]
        arrays[name] = np.frombuffer(writable, dtype, count, begin)
        begin += count * dtype.itemsize + (-count * dtype.itemsize % _ALIGN)
    return description["about"], arrays


def records_to_bytes(records: Records) -> bytes:
    """Return records as bytes, column by column."""
    arrays: Arrays = {}
    for name, column in records.columns.items():
        arrays[f"{name}/values"] = column.flat_values.numpy()
        arrays[f"{name}/rows"] = column.row_splits.numpy()
        if isinstance(column.values, RaggedTensor):
            arrays[f"{name}/texts"] = column.values.row_splits.numpy()
    about = {
        "size": records.size,
        "columns": list(records.columns),
        "shared": sorted(records.shared),
        "kinds": {name: [kind.type, kind.single] for name, kind in records.kinds.items()},
    }
    return pack(about, arrays)


def records_from_bytes(data: bytes, path: str) -> Records:
    """Return what `records_to_bytes` was given.

    Raises:
        CorruptFileError: The bytes of `path` are not that.
    """
    about, arrays = unpack(data, path)
    columns = {}
    for name in about["columns"]:
        flat, splits = arrays[f"{name}/values"], arrays[f"{name}/rows"]
        columns[name] = column_from_arrays(flat, splits, arrays.get(f"{name}/texts"))
    # Files of an earlier version do not say how the data stored their columns.
    kinds = {name: ColumnKind(*kind) for name, kind in about.get("kinds", {}).items()}
    return Records(about["size"], columns, frozenset(about["shared"]), kinds=kinds)


def _short(dtype: np.dtype[Any]) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)


BLOCK_RECORDS = 4096
"""The most records of a block, and about as many as a file is given: what one look-up on disk reads."""

_LOW_WATER = 0.75  # Of the limit: to write a little more at a time makes fewer and larger files.
_ROWS = "rows-"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that a snapshot can name."""

    number: int
    file: str
    """In the store's folder."""
    first: int
    """Of its records in the file."""
    size: int


@dataclass(slots=True)
class _Block:
    size: int
    size_bytes: int = 0
    records: Records | None = None
    """None when it is on disk only."""
    file: str | None = None
    first: int = 0


class JoinStore:
    """Blocks of records by number. Not thread-safe.

    Args:
        folder: For the files; made when it is first needed. None keeps everything in memory.
        memory_records, memory_bytes: The most to keep in memory; None for no limit.
    """

    def __init__(
        self, folder: str | None, *, memory_records: int | None = None, memory_bytes: int | None = None
    ) -> None:
        self._folder = folder
        self._limits = (memory_records, memory_bytes)
        self._run = concurrency.token_hex(4)  # no two processes give a file the same name
        self._files = 0
        self._blocks: dict[int, _Block] = {}
        self._next = 0
        self._users: dict[str, int] = {}
        """File to how many blocks are in it."""
        self._pinned: set[str] = set()
        self.memory_records = 0
        self.memory_bytes = 0

    @property
    def disk_records(self) -> int:
        """How many can only be had from disk."""
        return sum(block.size for block in self._blocks.values() if block.records is None)

    @property
    def next_block(self) -> int:
        """The number that the next block will have."""
        return self._next

    def add(self, records: Records) -> int:
        """Keep a block, of at most BLOCK_RECORDS, and return its number: one more than the last."""
        number, self._next = self._next, self._next + 1
        block = _Block(records.size, _size_bytes(records), records)
        self._blocks[number] = block
        self.memory_records += block.size
        self.memory_bytes += block.size_bytes
        self._evict_to_disk()
        return number

    def take(self, numbers: NDArray[np.int64], rows: NDArray[np.int64]) -> Records:
        """Return one record per pair of block and row in it, in the order given.

        A file is read once in a call, however many of its records are asked for.
        """
        order = np.argsort(numbers, kind="stable")
        found, begins = np.unique(numbers[order], return_index=True)
        read: dict[str, Records] = {}
        parts = []
        for number, places in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
            block = self._blocks[number]
            if block.records is not None:
                parts.append(block.records.take(torch.from_numpy(rows[places])))
                continue
            assert block.file is not None
            if block.file not in read:
                read[block.file] = self._read(block.file)
            parts.append(read[block.file].take(torch.from_numpy(rows[places] + block.first)))
        # Parts are grouped by block; `back` puts their records into the order that was asked for.
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        together = concat(parts)
        return together if (back[1:] > back[:-1]).all() else together.take(torch.from_numpy(back))

    def drop(self, number: int) -> None:
        """Forget a block."""
        block = self._blocks.pop(number)
        if block.records is not None:
            self._leave_memory(block)
        if block.file is None:
            return
        self._users[block.file] -= 1
        if not self._users[block.file]:
            del self._users[block.file]
            if block.file not in self._pinned:
                self._remove(block.file)

    def persist(self) -> list[StoredBlock]:
        """See that every block has a file, and say where each one is."""
        self._write([block for block in self._blocks.values() if block.file is None])
        return [
            StoredBlock(number, block.file or "", block.first, block.size)
            for number, block in self._blocks.items()
        ]

    def restore(self, blocks: Iterable[StoredBlock], next_block: int) -> None:
        """Have exactly these blocks; they stay on disk until they are needed.

        Raises:
            RestoreError: A file is not there any more.
        """
        self.clear()
        present = {filesystem.base_name(path) for path in self._list()}
        for stored in blocks:
            if stored.file not in present:
                raise RestoreError(
                    f"cannot restore the joiner: {stored.file} of its snapshot is not in {self._folder}. "
                    "Keep the whole folder for as long as its snapshots may be needed."
                )
            self._blocks[stored.number] = _Block(stored.size, file=stored.file, first=stored.first)
            self._users[stored.file] = self._users.get(stored.file, 0) + 1
        self._next = next_block

    def pin(self, files: Collection[str]) -> None:
        """Keep these files even without blocks, and remove all other files without a block."""
        self._pinned = set(files)
        for path in self._list():
            name = filesystem.base_name(path)
            if name.startswith(_ROWS) and name not in self._pinned and name not in self._users:
                self._remove(name)

    def clear(self) -> None:
        """Forget all blocks."""
        for number in list(self._blocks):
            self.drop(number)

    def _evict_to_disk(self) -> None:
        records, size_bytes = self.memory_records, self.memory_bytes
        if not self._is_over(records, size_bytes, 1.0):
            return
        going: list[_Block] = []
        for block in self._blocks.values():  # oldest first
            if not self._is_over(records, size_bytes, _LOW_WATER):
                break
            if block.records is not None:
                going.append(block)
                records -= block.size
                size_bytes -= block.size_bytes
        self._write([block for block in going if block.file is None])
        for block in going:  # only now: a full disk must not cost a record
            self._leave_memory(block)
            block.records = None

    def _is_over(self, records: int, size_bytes: int, fraction: float) -> bool:
        most_records, most_bytes = self._limits
        return (most_records is not None and records > most_records * fraction) or (
            most_bytes is not None and size_bytes > most_bytes * fraction
        )

    def _leave_memory(self, block: _Block) -> None:
        self.memory_records -= block.size
        self.memory_bytes -= block.size_bytes

    def _write(self, blocks: list[_Block]) -> None:
        """Write blocks that are in memory, some to a file."""
        group: list[_Block] = []
        for block in blocks:
            if group and sum(one.size for one in group) + block.size > BLOCK_RECORDS:
                self._write_file(group)
                group = []
            group.append(block)
        if group:
            self._write_file(group)

    def _write_file(self, blocks: list[_Block]) -> None:
        assert self._folder is not None
        name = f"{_ROWS}{self._run}-{self._files:08}"
        self._files += 1
        filesystem.make_dirs(self._folder)
        records = concat([block.records for block in blocks if block.records is not None])
        with filesystem.atomic_write(filesystem.join(self._folder, name)) as file:
            file.write(records_to_bytes(records))
        first = 0
        for block in blocks:
            block.file, block.first = name, first
            first += block.size
        self._users[name] = len(blocks)

    def _read(self, name: str) -> Records:
        path = filesystem.join(self._folder or "", name)
        return records_from_bytes(filesystem.read_bytes(path), path)

    def _remove(self, name: str) -> None:
        filesystem.remove(filesystem.join(self._folder or "", name))

    def _list(self) -> list[str]:
        if self._folder is None:
            return []
        try:
            return filesystem.list_files(self._folder)
        except FileMissingError:
            return []


def _size_bytes(records: Records) -> int:
    total = 0
    for column in records.columns.values():
        total += column.flat_values.nbytes + column.row_splits.nbytes
        if not isinstance(column.values, torch.Tensor):
            total += column.values.row_splits.nbytes
    return total
