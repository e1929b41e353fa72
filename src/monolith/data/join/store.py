"""Where the joiner keeps impressions until their windows close: memory first, then disk.

Impressions come in blocks and stay in blocks; none is ever changed. When there are
more in memory than allowed, the oldest blocks are written to a file together and read
again from there. A snapshot writes the blocks that have no file yet and names the
files, so a second snapshot costs only what came since the first.

A file goes when no block is left in it, unless a snapshot still names it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from monolith import filesystem
from monolith.data.join.record_bytes import records_from_bytes, records_to_bytes
from monolith.data.records import Records, concat
from monolith.errors import FileMissingError, RestoreError

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
        self._run = secrets.token_hex(4)  # no two processes give a file the same name
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
        self._make_room()
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
        """Hold these blocks and no others; they stay on disk until they are asked for.

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
        """Keep these files whatever becomes of their blocks, and remove all others that hold no block."""
        self._pinned = set(files)
        for path in self._list():
            name = filesystem.base_name(path)
            if name.startswith(_ROWS) and name not in self._pinned and name not in self._users:
                self._remove(name)

    def clear(self) -> None:
        """Forget all blocks."""
        for number in list(self._blocks):
            self.drop(number)

    def _make_room(self) -> None:
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

    def _is_over(self, records: int, size_bytes: int, share: float) -> bool:
        most_records, most_bytes = self._limits
        return (most_records is not None and records > most_records * share) or (
            most_bytes is not None and size_bytes > most_bytes * share
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
