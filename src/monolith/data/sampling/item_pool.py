"""The item pool: items that were recently seen in each channel, to draw negatives from; and its files.

A channel is a queue: an item enters at the end, and when there are too many, the oldest leaves. Each item is
in it once. Seen again, it keeps its rank, with the features of the last time.

What each draw finds depends on every record before it, so the queues are plain Python: numbers in lists, a
few operations per item. The features of the items, which are the bulk, stay in columns and move many at a
time; the queues only contain their row numbers.

On disk, `<basename>-00002-of-00004` has the channels whose id is 2 modulo 4. A file is framed as TFRecord,
each record with its checksum: first a JSON header, then one record per channel, which is a JSON description
and the arrays it describes, concatenated and little-endian. Save a pool in the same step as its model: its
state is part of the position of the stream."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import filesystem
from monolith.data.records import Records, concat
from monolith.errors import ConfigError, CorruptFileError, DataError, MonolithError, RestoreError
from monolith.table.sharded_files import find_sharded, replace_sharded, tfrecord
from monolith.table.sharded_files import records as read_records
from monolith.tensors import RaggedTensor

_SPARE_ROWS = 4096
"""Rows of removed items, at least, before the remaining rows are compacted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemPoolConfig:
    """How many items a channel has."""

    start_num: int = 500
    """Items that a channel must exceed before anything is drawn from it."""
    max_item_num_per_channel: int = 10_000
    """The most items of a channel; the oldest is evicted."""

    def __post_init__(self) -> None:
        if self.start_num < 0:
            raise ConfigError(f"item pool: start_num must be 0 or more, got {self.start_num}")
        if self.max_item_num_per_channel <= self.start_num:
            raise ConfigError(
                f"item pool: max_item_num_per_channel must be above start_num, or nothing is ever drawn; got "
                f"{self.max_item_num_per_channel} and {self.start_num}"
            )


class Drawn(NamedTuple):
    """An item that was drawn."""

    item: int
    row: int
    """Of its features: see `ItemPool.features`."""
    times: int
    """How often it was drawn since it entered, this time included."""
    place: int
    """In its queue; 0 is the oldest."""
    size: int
    """Of the queue."""


@dataclass(slots=True)
class ChannelItems:
    """The queue of one channel, oldest first; its columns side by side."""

    items: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)
    """How often each item was seen."""
    sampled: list[int] = field(default_factory=list)
    """How often each item was drawn."""
    gone: int = 0
    """How many left since the queue began."""
    head: int = 0
    """How many of those are still in the lists, before the oldest."""
    turns: dict[int, int] = field(default_factory=dict)
    """Item to how many entered the queue before it."""

    def __len__(self) -> int:
        return len(self.items) - self.head

    def place_of(self, item: int | None) -> int | None:
        turn = self.turns.get(item) if item is not None else None
        return None if turn is None else turn - self.gone

    def put(self, item: int, row: int, limit: int) -> None:
        place = self.place_of(item)
        if place is not None:
            self.rows[self.head + place] = row
            self.origin[self.head + place] += 1
            return
        self.turns[item] = self.gone + len(self)
        self.items.append(item)
        self.rows.append(row)
        self.origin.append(1)
        self.sampled.append(0)
        if len(self) > limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self.turns[self.items[self.head]]
        self.head += 1
        self.gone += 1
        if self.head >= max(64, len(self)):  # so that each drop costs the same in the long run
            for column in (self.items, self.rows, self.origin, self.sampled):
                del column[: self.head]
            self.head = 0


class ItemPool:
    """Items by channel. One thread uses it at a time."""

    def __init__(self, config: ItemPoolConfig) -> None:
        self.config = config
        self._channels: dict[int, ChannelItems] = {}
        self._parts: list[Records] = []  # features of items, row after row
        self._starts: list[int] = []  # the first row of each part
        self._rows = 0

    def __len__(self) -> int:
        """Return how many items all channels hold."""
        return sum(map(len, self._channels.values()))

    def channels(self) -> list[int]:
        """Return the channels that have items, in the order they were first seen."""
        return [channel for channel, queue in self._channels.items() if len(queue)]

    def size(self, channel: int) -> int:
        """Return how many items a channel holds."""
        return len(self._channels[channel]) if channel in self._channels else 0

    def items(self, channel: int) -> list[int]:
        """Return the items of a channel, oldest first."""
        queue = self._channels.get(channel, ChannelItems())
        return queue.items[queue.head :]

    def counts(self, channel: int, item: int) -> tuple[int, int]:
        """Return how often an item was seen, and drawn, since it entered; zeros if it is not there."""
        queue = self._channels.get(channel, ChannelItems())
        place = queue.place_of(item)
        if place is None:
            return 0, 0
        return queue.origin[queue.head + place], queue.sampled[queue.head + place]

    def add(self, channels: Sequence[int], items: Sequence[int], features: Records) -> None:
        """Add items, in order.

        Args:
            channels: Of each item.
            features: One record per item: the columns that belong to an item.
        """
        if not len(channels) == len(items) == len(features):
            raise DataError(
                f"item pool: {len(channels)} channels, {len(items)} items and {len(features)} records of "
                "features must be equally many"
            )
        first = self.store(features)
        for row, (channel, item) in enumerate(zip(channels, items, strict=True), start=first):
            self.put(channel, item, row)
        self.settle()

    def store(self, features: Records) -> int:
        """Store features until `settle`, for items that may enter; return the row of the first."""
        first = self._rows
        if len(features):
            self._parts.append(features)
            self._starts.append(first)
            self._rows += len(features)
        return first

    def put(self, channel: int, item: int, row: int) -> None:
        """Add an item whose features are at a row; or refresh it, if it is there."""
        if channel not in self._channels:
            self._channels[channel] = ChannelItems()
        self._channels[channel].put(item, row, self.config.max_item_num_per_channel)

    def draw(self, channel: int, luck: float, but: int | None = None) -> Drawn | None:
        """Draw an item of a channel, each as likely as the other; None if there is nothing to draw.

        Args:
            luck: In [0, 1): decides which.
            but: An item that is not drawn.
        """
        queue = self._channels.get(channel)
        if queue is None or len(queue) <= self.config.start_num:
            return None
        size = len(queue)
        barred = queue.place_of(but)
        offered = size if barred is None else size - 1
        if not offered:
            return None
        # Draw among the other items: skip the barred one by moving the places from it on up by one.
        place = int(luck * offered)
        if barred is not None and place >= barred:
            place += 1
        at = queue.head + place
        queue.sampled[at] += 1
        return Drawn(queue.items[at], queue.rows[at], queue.sampled[at], place, size)

    def other_channel(self, channel: int, luck: float) -> int | None:
        """Draw another channel that may be drawn from, the larger the likelier; None if there is none."""
        ready = [
            (other, len(queue))
            for other, queue in self._channels.items()
            if other != channel and len(queue) > self.config.start_num
        ]
        if not ready:
            return None
        left = int(luck * sum(size for _, size in ready))
        for other, size in ready:
            if left < size:
                return other
            left -= size
        raise AssertionError("unreachable: a random draw is below 1")

    def features(self, rows: Iterable[int]) -> Records:
        """Return the features at rows, in the order given. Rows are good until `settle`."""
        wanted = np.fromiter(rows, np.int64)
        if not len(wanted):
            return Records(0, {})
        part = np.searchsorted(np.array(self._starts), wanted, side="right") - 1
        parts, places = [], []
        for number in np.unique(part):
            chosen = np.flatnonzero(part == number)
            parts.append(self._parts[number].take(torch.from_numpy(wanted[chosen] - self._starts[number])))
            places.append(chosen)
        return concat(parts).take(_inverse(np.concatenate(places)))

    def settle(self) -> None:
        """Drop the features of items that left or never entered, once they are the majority.

        Row numbers change.
        """
        if self._rows > 2 * len(self) + _SPARE_ROWS:
            self._compact()
            return
        # Parts grow towards the front, so that there are few of them and each row moves few times.
        while len(self._parts) > 1 and len(self._parts[-1]) * 2 > len(self._parts[-2]):
            last = self._parts.pop()
            self._starts.pop()
            self._parts[-1] = concat([self._parts[-1], last])

    def _compact(self) -> None:
        queues = self._channels.values()
        remaining = self.features(row for queue in queues for row in queue.rows[queue.head :])
        self._parts, self._starts, self._rows = [], [], 0
        row = self.store(remaining)
        for queue in queues:
            queue.rows[queue.head :] = range(row, row + len(queue))
            row += len(queue)

    # For files: a channel as arrays and a record per item

    def channel_state(self, channel: int) -> tuple[NDArray[np.int64], Records]:
        """Return int64 of shape (3, size): items, times seen and times drawn, oldest first; and features."""
        queue = self._channels[channel]
        columns = (queue.items, queue.origin, queue.sampled)
        numbers = np.array([column[queue.head :] for column in columns], dtype=np.int64)
        return numbers.reshape(3, -1), self.features(queue.rows[queue.head :])

    def set_channel(self, channel: int, numbers: NDArray[np.int64], features: Records) -> None:
        """Restore a channel from its `channel_state`; the oldest items are dropped if this pool is
        smaller."""
        beyond = max(numbers.shape[1] - self.config.max_item_num_per_channel, 0)
        items, origin, sampled = numbers[:, beyond:].tolist()
        first = self.store(features.slice(beyond, len(features)))
        self._channels[channel] = ChannelItems(
            items=items,
            rows=list(range(first, first + len(items))),
            origin=origin,
            sampled=sampled,
            turns={item: place for place, item in enumerate(items)},
        )

    def clear(self) -> None:
        """Forget everything."""
        self._channels.clear()
        self._parts, self._starts, self._rows = [], [], 0


def _inverse(order: NDArray[np.int64]) -> Tensor:
    """Return the permutation that undoes another."""
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return torch.from_numpy(back)


FORMAT = "monolith.item_pool"
VERSION = 1

_LENGTH = struct.Struct("<I")
_DTYPES = {"int64": (torch.int64, "<i8"), "float32": (torch.float32, "<f4"), "bytes": (torch.uint8, "u1")}


def save_pool(pool: ItemPool, basename: str, num_shards: int = 1) -> None:
    """Write a pool, replacing the files at `basename` when all new ones are complete.

    Raises:
        FilesystemError: A file could not be written; the old ones are still there.
    """
    channels = pool.channels()
    with replace_sharded(basename, num_shards) as files:
        for shard, file in enumerate(files):
            mine = [channel for channel in channels if channel % num_shards == shard]
            header = {"format": FORMAT, "version": VERSION, "order": [channels.index(one) for one in mine]}
            file.write(tfrecord(json.dumps(header).encode()))
            for channel in mine:
                file.write(tfrecord(encode_channel(pool, channel)))


def restore_pool(pool: ItemPool, basename: str) -> None:
    """Restore a saved pool. Everything is read before anything changes.

    Raises:
        RestoreError: Files are missing, or not of a pool.
        CorruptFileError: A file is damaged; says where.
    """
    found: list[tuple[int, bytes]] = []
    for path in find_sharded(basename):
        found += _read(path)
    restore_channels(pool, [payload for _, payload in sorted(found, key=lambda one: one[0])])


def old_worker(worker: int, old_workers: int) -> int:
    """Return the old worker whose pool a worker takes over when the number of workers has changed."""
    return worker % old_workers


def restore_channels(pool: ItemPool, payloads: list[bytes]) -> None:
    """Restore a pool from the payloads of its channels, in order."""
    decoded = [_decode_channel(payload) for payload in payloads]
    pool.clear()
    for channel, numbers, features in decoded:
        pool.set_channel(channel, numbers, features)
    pool.settle()


def _read(path: str) -> list[tuple[int, bytes]]:
    """Return the channels of a file, each with its place among those of the pool."""
    with filesystem.open_read(path) as file:
        found = list(read_records(file, path))
    if not found:
        raise CorruptFileError(path, 0, "the file is empty; it should begin with a header")
    try:
        header = json.loads(found[0][1])
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise RestoreError(f"cannot restore the item pool from {path}: it is of {header}")
        order = [int(place) for place in header["order"]]
    except (ValueError, KeyError, TypeError) as cause:
        if isinstance(cause, MonolithError):
            raise
        raise CorruptFileError(path, 0, f"not the header of an item pool: {cause}") from cause
    if len(order) != len(found) - 1:
        end = found[-1][0]
        raise CorruptFileError(path, end, f"it has {len(found) - 1} channels of {len(order)}")
    return list(zip(order, (payload for _, payload in found[1:]), strict=True))


def encode_channel(pool: ItemPool, channel: int) -> bytes:
    """Return a channel as bytes: its items in order, with counts and features."""
    numbers, features = pool.channel_state(channel)
    arrays: list[tuple[str, NDArray[Any]]] = [("<i8", numbers.reshape(-1))]
    columns = []
    for name in features.columns:
        column = features[name]
        kind = next(kind for kind, (dtype, _) in _DTYPES.items() if dtype is column.dtype)
        values = column.values
        sizes = [len(values)]
        arrays.append(("<i8", column.row_lengths().numpy()))
        if isinstance(values, RaggedTensor):
            arrays.append(("<i8", values.row_lengths().numpy()))
            sizes.append(len(values.flat_values))
        arrays.append((_DTYPES[kind][1], column.flat_values.numpy()))
        columns.append({"name": name, "kind": kind, "sizes": sizes})
    header = json.dumps({"channel": channel, "size": numbers.shape[1], "columns": columns}).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *(a.astype(d).tobytes() for d, a in arrays)))


def _decode_channel(payload: bytes) -> tuple[int, NDArray[np.int64], Records]:
    """Raises RestoreError for what `encode_channel` did not write."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        header = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
        at = _LENGTH.size + length
        size = int(header["size"])

        def take(count: int, kind: str) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(payload, kind, count, at)
            at += array.nbytes
            return array.astype(array.dtype.newbyteorder("="))  # a copy of our own

        numbers = take(3 * size, "<i8").reshape(3, size)
        columns = {}
        for column in header["columns"]:
            lengths = torch.from_numpy(take(size, "<i8"))
            values: Tensor | RaggedTensor
            if column["kind"] == "bytes":
                inner = torch.from_numpy(take(column["sizes"][0], "<i8"))
                values = RaggedTensor.from_row_lengths(
                    torch.from_numpy(take(column["sizes"][1], "u1")), inner
                )
            else:
                values = torch.from_numpy(take(column["sizes"][0], _DTYPES[column["kind"]][1]))
            columns[column["name"]] = RaggedTensor.from_row_lengths(values, lengths)
        if at != len(payload):
            raise ValueError(f"{len(payload) - at} bytes are left over")
        return int(header["channel"]), numbers, Records(size, columns)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as cause:
        raise RestoreError(f"cannot restore the item pool: a channel is malformed: {cause}") from cause
