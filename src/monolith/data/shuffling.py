"""The order of records: epochs, shuffling that can be resumed, and batches of one size.

A shuffle buffer from which records are drawn at random would have to be saved whole. Here a block of records
is permuted by a function of the seed and of where the block begins, so a position needs only two more
numbers: the length of the block and how many of its records were yielded.

A source reads *blocks* (chunks of files, batches of another stream) and yields batches of one size, maybe in
another order. Records that it buffers meanwhile must neither be lost nor come twice. So each block knows the
*cursor* before each of its records, and the two classes below report the cursor they have come to:

    blocks ──Shuffler──► shuffled blocks          blocks ──Batcher──► (batch, cursor after it), ...

A cursor is a place between two records, in the terms of the source; a `Position` is a cursor as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from monolith import native
from monolith.data.records import Records, concat
from monolith.errors import ConfigError, DataError
from monolith.table.hashing import mix_one

_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF

Cursor = TypeVar("Cursor")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleConfig:
    """How records are shuffled.

    Examples:
        >>> from monolith import MemorySource, Pipeline, ShuffleConfig
        >>> source = MemorySource({"user": list(range(100))}, batch_size=100)
        >>> [records] = Pipeline(source).shuffle(ShuffleConfig(seed=7, buffer=100))
        >>> users = records["user"].flat_values.tolist()
        >>> users == list(range(100)), sorted(users) == list(range(100))
        (False, True)
    """

    seed: int = 0
    buffer: int = 65_536
    """Records that are buffered and permuted together."""
    files: bool = True
    """Whether a list of files is shuffled over its whole length: pieces of all files are read in a random
    order, a new one in each epoch. False permutes `buffer` records at a time, in the order of the files."""
    piece_bytes: int = 512 << 10
    """Bytes of a text or TFRecord file that are one piece; of Parquet, a row group is."""

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ConfigError(f"shuffle: buffer must be at least 1 record, got {self.buffer}")
        if self.piece_bytes < 1:
            raise ConfigError(f"shuffle: piece_bytes must be at least 1, got {self.piece_bytes}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"shuffle: seed must be from 0 to 2^64 - 1, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """How often data is read, and in what order if its source has none of its own.

    A task makes its stream as if it were read once; the run calls `stream.read_epochs(Epochs(count=3))`
    before the first read. Sources count epochs in their position, so a restart resumes within an epoch.
    """

    count: int
    seed: int = 0
    buffer: int = ShuffleConfig().buffer
    """Records that are permuted together; 0 leaves the order."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"epochs: data is read at least once, got {self.count}")

    @property
    def shuffle(self) -> ShuffleConfig | None:
        """How to shuffle; None leaves the order."""
        return ShuffleConfig(seed=self.seed, buffer=self.buffer) if self.buffer else None


def check_epochs_unset(source: str, own: int | None, *, settled: bool) -> None:
    """Refuse to set the epochs of a source that was read already, or that has its own number of them.

    Args:
        source: The name of the source in messages.
        own: The number of epochs that it was made with.
    """
    if settled:
        raise ConfigError(f"{source}: it was read already, so it is too late to set its number of epochs")
    if own != 1:
        raise ConfigError(
            f"{source}: it was made with epochs={own}, and the run has train.epochs; leave one of them out"
        )


def permutation(count: int, *key: int) -> Tensor:
    """Return the numbers from 0 to `count` - 1 in an order that the key alone decides: int64 (count,)."""
    state = 0
    for number in key:
        state = mix_one((state + number + 1) & _ALL_BITS)
    return torch.from_numpy(native.permutation(count, state))


@dataclass(frozen=True, slots=True)
class Block(Generic[Cursor]):
    """Records that were read together; all of them are yielded before the next block."""

    records: Records
    cursor: Callable[[int], Cursor]
    """Returns the cursor before record `number`; for `len(records)`, the one after the block. Only valid
    until the source reads the next block."""
    first: int = 0
    """The first of `records` to yield; those before it were yielded earlier."""
    length: int = 0
    """Records of the shuffled block that starts at `first`, if it was started before a restart; otherwise
    0."""
    taken: int = 0
    """Records of that shuffled block that were yielded before the restart."""


@dataclass(frozen=True, slots=True)
class ShuffledBlock(Generic[Cursor]):
    """Records that were permuted together, and the cursors around them."""

    begin: Cursor
    end: Cursor
    records: Records
    first: int
    """The first of `records` to yield; those before it were yielded earlier."""


class Shuffler(Generic[Cursor]):
    """Permutes blocks of records by numbers that a position contains; see `permutation`.

    A block that was started before a restart has the same length again, however much data there is now.

    Args:
        buffer: Records of a shuffled block; only one that the source ends is shorter.
        order: Returns the permutation of so many records from a cursor on.
        name_of: Returns what to call the data at a cursor in a message.
    """

    def __init__(
        self, buffer: int, order: Callable[[Cursor, int], Tensor], name_of: Callable[[Cursor], str]
    ) -> None:
        self._buffer = buffer
        self._order = order
        self._name_of = name_of
        self._buffered: list[Records] = []
        self._begin: Cursor | None = None
        self._missing = self._resumed = self._taken = 0

    @property
    def begin(self) -> Cursor | None:
        """Where the unfinished block begins; None if there is none."""
        return self._begin

    def add(self, block: Block[Cursor]) -> Iterator[ShuffledBlock[Cursor]]:
        """Yield the shuffled blocks that a block completes, and buffer the rest of it."""
        here, size = block.first, len(block.records)
        while here < size:
            if self._begin is None:
                # A block that was started before a restart gets the same records, so the same order: its
                # length comes from the position, and it begins with the first block that is read.
                self._resumed = block.length if here == block.first else 0
                self._taken = block.taken if self._resumed else 0
                self._missing = self._resumed or self._buffer
                self._begin = block.cursor(here)
            before, here = here, min(here + self._missing, size)
            self._buffered.append(block.records.slice(before, here))
            self._missing -= here - before
            if not self._missing:
                yield self._shuffled(self._begin, block.cursor(here))

    def end(self, cursor: Cursor) -> ShuffledBlock[Cursor] | None:
        """Return the unfinished block, short as it is; None if there is none.

        Raises:
            DataError: It was longer before a restart.
        """
        begin = self._begin
        if begin is None:
            return None
        if self._resumed:
            raise DataError(
                f"{self._name_of(begin)} has fewer records than when its position was saved: the data was "
                "replaced since. Restore the data, or start from the beginning."
            )
        return self._shuffled(begin, cursor)

    def _shuffled(self, begin: Cursor, end: Cursor) -> ShuffledBlock[Cursor]:
        records = concat(self._buffered)
        self._buffered, self._begin = [], None
        return ShuffledBlock(begin, end, records.take(self._order(begin, len(records))), self._taken)


class Batcher(Generic[Cursor]):
    """Makes batches of one size out of blocks, across their ends.

    batcher = Batcher(4)
    [(len(batch), cursor) for batch, cursor in batcher.add(block_of_6)]   # [(4, cursor before record 4)]
    len(batcher.rest())                                                   # 2
    """

    def __init__(self, size: int) -> None:
        self._size = self._missing = size
        self._buffered: list[Records] = []

    def add(self, block: Block[Cursor]) -> Iterator[tuple[Records, Cursor]]:
        """Yield the batches that a block completes, each with the cursor after it, and buffer the rest."""
        done = block.first
        while done < len(block.records):
            end = min(done + self._missing, len(block.records))
            self._buffered.append(block.records.slice(done, end))
            self._missing -= end - done
            done = end
            if not self._missing:
                yield self._batch(), block.cursor(done)

    def rest(self) -> Records | None:
        """Return the buffered records, which are less than a batch; None if there are none."""
        return self._batch() if self._buffered else None

    @property
    def is_empty(self) -> bool:
        return not self._buffered

    def _batch(self) -> Records:
        # Slices share memory with their blocks; only here, once per batch, are records copied.
        batch = concat(self._buffered)
        self._buffered, self._missing = [], self._size
        return batch
