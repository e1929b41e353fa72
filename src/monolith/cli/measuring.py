"""What this machine does in a second: reads of its disk, and work on rows of a table.

`monolith doctor --disk` and `monolith plan --measure` ask. All of it takes a few seconds; files are small,
have no name once they are open, and are gone when the process is, whatever ends it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import FilesystemError
from monolith.table import NativeTable, TableConfig, TieredTable, dump, load

BLOCK = 4096
MOST_FILE_BYTES = 256 << 20
LEAST_FILE_BYTES = 8 << 20
FREE_SHARE = 10
"""The file takes at most one in so many of the free bytes."""
_PIECE = 1 << 20  # bytes of one write, as cold rows are written
_MOST_READS = 4096  # asked for at once

SAMPLE_BYTES = 96 << 20
"""Of the table whose rows are timed: more than most processors cache."""
_MOST_SAMPLE_ROWS = 500_000
_BATCH = 10_000


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What a folder's disk does, past the kernel's cache."""

    folder: str
    reads_per_s: float
    """Random reads of 4 KiB, as many at a time as a tiered table has under way."""
    threads: int
    """That read, which is how many reads were under way."""
    write_bytes_per_s: float
    """One after the other, and on the disk at the end."""
    file_bytes: int
    """Of the file that was written and read."""
    free_bytes: int


def measure_disk(folder: Path, *, seconds: float = 1.0, most_bytes: int = MOST_FILE_BYTES) -> DiskSpeed:
    """Write a file for half of the time, at most, and read blocks of it for as long.

    Raises:
        FilesystemError: The folder cannot be written, has too little free space, or its files cannot be read
            past the kernel's cache.
    """
    try:
        free = shutil.disk_usage(folder).free
        size = min(most_bytes, free // FREE_SHARE) // _PIECE * _PIECE
        if size < min(most_bytes, LEAST_FILE_BYTES):
            raise FilesystemError(f"{folder} has {free:,} free bytes, too few to measure with")
        with _unnamed_file(folder) as file:
            written, took = _write(file, size, seconds / 2)
            reader = native.BlockReader()
            reads = _read(file, written, reader, seconds / 2)
    except OSError as cause:
        if isinstance(cause, FilesystemError):
            raise
        raise FilesystemError(cause.errno, f"{folder}: {cause.strerror}") from cause
    return DiskSpeed(str(folder), reads, reader.threads, written / took, written, free)


@contextmanager
def _unnamed_file(folder: Path) -> Iterator[int]:
    """Open a file without a name that bypasses the kernel's cache."""
    if not hasattr(os, "O_DIRECT"):
        raise FilesystemError("this system has no reads past the kernel's cache (O_DIRECT)")
    with filesystem.temporary_folder("monolith-disk-", folder) as made:
        try:
            file = filesystem.open_regular(
                made / "blocks", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, own=True
            )
        except OSError as cause:
            raise FilesystemError(
                cause.errno, f"files in {folder} cannot be read past the kernel's cache (O_DIRECT)"
            ) from cause
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, size: int, seconds: float) -> tuple[int, float]:
    """Return the bytes written, and the seconds until they were on the disk."""
    with mmap.mmap(-1, _PIECE) as piece:  # aligned, as O_DIRECT requires
        piece.write(np.random.default_rng(0).bytes(_PIECE))
        began, written = time.perf_counter(), 0
        while written < size and (written < LEAST_FILE_BYTES or time.perf_counter() - began < seconds):
            written += os.pwrite(file, piece, written)
    os.fsync(file)
    return written // BLOCK * BLOCK, time.perf_counter() - began


def _read(file: int, size: int, reader: native.BlockReader, seconds: float) -> float:
    """Return reads per second."""
    random = np.random.default_rng(0)
    ahead = 2 * reader.threads
    began, done, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        reader.read(file, random.integers(0, size // BLOCK, ahead) * BLOCK, BLOCK)
        done += ahead
        elapsed = time.perf_counter() - began
        # A tenth of a second at a time: long enough that its start and end hardly count, on any disk.
        ahead = max(2 * reader.threads, min(_MOST_READS, round(done / elapsed / 10)))
    return done / elapsed


@dataclass(frozen=True, slots=True)
class RowSpeed:
    """Processor seconds of a table's own work."""

    row: float
    """To look up a row in memory and update it."""
    cold_row: float
    """The same of a row that is in a file, in addition: to read it, to move it in, and to write another."""
    save_byte: float
    restore_byte: float


def measure_rows(config: TableConfig, folder: Path, *, seconds: float = 0.5) -> RowSpeed:
    """Make a table like this one and work with it; the folder has its dump and its cold rows."""
    in_memory = replace(config, storage="memory", memory_bytes=None, storage_dir=None)
    memory = NativeTable(in_memory)
    rows = min(_MOST_SAMPLE_ROWS, SAMPLE_BYTES // memory.core.row_bytes)
    gradients = torch.full((_BATCH, config.dim), 0.01)
    step = 0

    def train(table: NativeTable | TieredTable, ids: Tensor) -> None:
        nonlocal step
        step += 1
        table.lookup(ids)
        table.apply_gradients(ids, gradients[: len(ids)], step=step)

    def per_row(table: NativeTable | TieredTable, rows: int) -> float:
        for ids in torch.split(torch.arange(rows), _BATCH):
            train(table, ids)
        batches = [torch.randperm(rows)[:_BATCH] for _ in range(8)]
        return _per_call(lambda number: train(table, batches[number % 8]), seconds) / min(rows, _BATCH)

    row = per_row(memory, rows)
    with filesystem.temporary_folder("monolith-rows-", folder) as made:
        began = time.process_time()
        written = dump(memory, f"{made}/rows").bytes
        saved = time.process_time()
        restored = NativeTable(in_memory)
        load(restored, f"{made}/rows")
        restore = time.process_time() - saved
        memory.close()
        restored.close()
        tiers = replace(in_memory, storage="tiered", memory_bytes=64 << 20, storage_dir=str(made))
        with closing(TieredTable(tiers, most_hot_rows=_BATCH)) as tiered:
            cold = per_row(tiered, min(rows, 20 * _BATCH))
    return RowSpeed(row, max(cold - row, 0.0), (saved - began) / written, restore / written)


def _per_call(call: Callable[[int], object], seconds: float) -> float:
    """Repeat a call for a while; return its processor seconds."""
    began, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds or count < 3:
        call(count)
        count += 1
    return (time.process_time() - used) / count
