"""Row requests: how one call of a store is split among the shards that hold its rows, and written as bytes.

A step looks up and pushes rows on every parameter server, or every rank, so these requests are not JSON: a
header of fixed size and one buffer of arrays. `RequestPartitioner` checks a call, asks `Routes` for the shard
of each ID, and makes one `RowHeader` and one buffer per shard, which the receiver reads as a `RowRequest`:

    ids of a call   7 4 9 2 | 5 8      two tables, one batch: sizes = [4, 2]
    shard 0 of 2    4 2 | 8            sizes = [2, 1]: the layout of a whole call, with fewer IDs
    shard 1 of 2    7 9 | 5            sizes = [2, 1]

So a shard need not know that there are others, and answers are gathered back into the caller's order. Headers
are checked when they are received: a request that does not fit is a `RequestError` before anything changed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import RequestError, TableArgumentError
from monolith.store.store import TableIds
from monolith.table import TableConfig, arguments
from monolith.wire.bulk import Bytes


class RowProtocol(Enum):
    """The first bytes of the headers of a protocol, and the flags that it knows."""

    SERVERS = (b"MRow", 1, 31)
    """Between workers and parameter servers."""
    RANKS = (b"MRnk", 2, 63)
    """Between ranks. In version 1 they sent the headers of servers, each in an exchange of its own."""

    def __init__(self, magic: bytes, version: int, flags: int) -> None:
        self.magic = magic
        self.version = version
        self.flags = flags


_HEADER = struct.Struct("<4sBBHIIQQqQ8s8sQ")
HEADER_BYTES = _HEADER.size
_ANSWER = struct.Struct("<4sBBHQ")
ANSWER_BYTES = _ANSWER.size
"""Bytes of the header of an answer; serving servers append a claim to it."""
_ANSWER_STARTS = RowProtocol.SERVERS.magic + bytes([RowProtocol.SERVERS.version])
_ANYTHING = bytes(8)
_MOST_PADDING = 8
"""A header is followed by fewer than this many bytes of padding. See `BulkMessages.padded`."""
_MOST = 1 << 53
_MOST_BATCHES = 1 << 20


class RowCall(IntEnum):
    LOOKUP = 1
    PUSH = 2


class RowFlags:
    """Which optional arrays a message has, and how its rows are encoded.

    Plain integers: an `IntFlag` takes a microsecond for every operation, and a call has dozens of them.
    """

    NONE: Final = 0
    TIMES: Final = 1
    COUNTS: Final = 2
    LATEST: Final = 4
    HALF: Final = 8
    """Rows are half floats; in a request: the answer may have half floats."""
    REPEATED: Final = 16
    """In a push: IDs of one table may repeat within a batch."""
    MORE: Final = 32
    """Between ranks: a request of this rank is larger than its space, see `RankExchange`."""


@lru_cache(maxsize=64)
def incarnation_bytes(name: str | None) -> bytes:
    """Return the 8 bytes of an incarnation in a header; zeros accept any incarnation."""
    return _ANYTHING if name is None else hashlib.blake2b(name.encode(), digest_size=8).digest()


class RowHeader(NamedTuple):
    """The header of a lookup or a push."""

    call: RowCall
    store: int
    batches: int
    ids: int
    floats: int = 0
    flags: int = RowFlags.NONE
    step: int = 0
    event_time: int = 0
    incarnation: bytes = _ANYTHING
    sender: str = "00" * 8
    """8 bytes, as hexadecimal digits."""
    number: int = 0
    """From 1 on in a push; see `monolith.store.pushes`."""

    def packed(self, protocol: RowProtocol = RowProtocol.SERVERS) -> bytes:
        return _HEADER.pack(
            protocol.magic,
            protocol.version,
            self.call,
            self.flags,
            self.store,
            self.batches,
            self.ids,
            self.floats,
            self.step,
            self.event_time,
            self.incarnation,
            bytes.fromhex(self.sender),
            self.number,
        )

    @classmethod
    def read(cls, data: bytes, protocol: RowProtocol = RowProtocol.SERVERS) -> Self:
        """Return the header of a message.

        Raises:
            RequestError: These bytes are no header, of another version, or have a number out of bounds.
        """
        if not _HEADER.size <= len(data) < _HEADER.size + _MOST_PADDING:
            raise RequestError(f"a header of rows has {_HEADER.size} bytes and padding, got {len(data)}")
        magic, version, call, flags, *rest = _HEADER.unpack_from(data)
        store, batches, ids, floats, step, event_time, incarnation, sender, number = rest
        if magic != protocol.magic or version != protocol.version:
            raise RequestError(
                f"its header begins with {magic!r}, version {version}, not {protocol.magic!r}, version "
                f"{protocol.version}. Both sides must run the same version"
            )
        if call not in _CALLS or flags > protocol.flags:
            raise RequestError(f"its header has the call {call} and the flags {flags:#x}, which do not exist")
        if not 1 <= batches <= _MOST_BATCHES:
            raise RequestError(f"batches must be a whole number from 1 to {_MOST_BATCHES}, got {batches}")
        if ids > _MOST or floats > _MOST or event_time > _MOST or number > _MOST:
            sent = {"ids": ids, "floats": floats, "event_time": event_time, "number": number}
            name, value = next((name, value) for name, value in sent.items() if value > _MOST)
            raise RequestError(f"{name} must be a whole number from 0 to {_MOST}, got {value}")
        if call == RowCall.PUSH and number < 1:
            raise RequestError("a push must have a number from 1 on, got 0")
        return cls(
            _CALLS[call],
            store,
            batches,
            ids,
            floats,
            flags,
            step,
            event_time,
            incarnation,
            sender.hex(),
            number,
        )


_CALLS = {int(call): call for call in RowCall}


def pack_answer(flags: int, floats: int) -> bytes:
    """Return the header of an answer."""
    return _ANSWER.pack(RowProtocol.SERVERS.magic, RowProtocol.SERVERS.version, 0, flags, floats)


def read_answer(data: bytes) -> tuple[int, int]:
    """Return the flags and the number of floats of an answer.

    Raises:
        RequestError: These bytes are no header of an answer, or of another version.
    """
    if not _ANSWER.size <= len(data) < _ANSWER.size + _MOST_PADDING or data[:5] != _ANSWER_STARTS:
        raise RequestError("the answer has no valid row header. Both sides must run the same version")
    *_, flags, floats = _ANSWER.unpack_from(data)
    return flags & 15, floats


class RowRequest:
    """The arrays of a request, as views into one buffer. 8-byte arrays come first, so that all are aligned.

        sizes      int64   (cells,)     IDs of each cell; a cell is one table of one batch
        ids        int64   (ids,)
        times      int64   (ids,)       event times, if each ID has its own
        counts     int64   (ids,)       sightings, if an admission filter counts them
        gradients  float32 (floats,)    of a push: one row per ID, widths differ by table
        latest     float32 (floats,)    the rows these gradients were computed on, for delay compensation

    Args:
        cells: Batches times tables.
        ids: The number of IDs.
        floats: The number of floats of all rows; 0 for a lookup.
    """

    def __init__(
        self, data: Bytes | None = None, *, cells: int, ids: int, floats: int = 0, flags: int = RowFlags.NONE
    ) -> None:
        size = self.size(cells=cells, ids=ids, floats=floats, flags=flags)
        self.data: Bytes = np.empty(size, np.uint8) if data is None else data
        if len(self.data) != size:
            raise TableArgumentError(
                f"parameter server: received {len(self.data)} bytes for {ids} ids and {floats} floats, "
                f"expected {size}. Both sides must run the same version."
            )
        # One view for all arrays of a type: views are most of what it costs to read a small request.
        end = cells + ids * (1 + bool(flags & RowFlags.TIMES) + bool(flags & RowFlags.COUNTS))
        numbers, rows = self.data[: 8 * end].view(np.int64), self.data[8 * end :].view(np.float32)
        self.sizes, self.ids = numbers[:cells], numbers[cells : cells + ids]
        self.times = numbers[cells + ids : cells + 2 * ids] if flags & RowFlags.TIMES else None
        self.counts = numbers[end - ids :] if flags & RowFlags.COUNTS else None
        self.gradients = rows[:floats]
        self.latest = rows[floats:] if flags & RowFlags.LATEST else None

    @staticmethod
    def size(*, cells: int, ids: int, floats: int = 0, flags: int = RowFlags.NONE) -> int:
        """Return the bytes of a request."""
        numbers = 1 + bool(flags & RowFlags.TIMES) + bool(flags & RowFlags.COUNTS)
        rows = 1 + bool(flags & RowFlags.LATEST)
        return 8 * (cells + numbers * ids) + 4 * rows * floats


Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Memory = Callable[[Sequence[int]], Sequence[Bytes]]
"""From the bytes of each request to the memory it is written to."""


class Routes:
    """The shard of each ID of one call: ID i belongs to the shard that `shard_of_ids` returns.

    This runs for every step of every worker: the native core writes the requests of all shards in one call.

    Args:
        ids: int64, batch after batch and, within a batch, table after table.
        sizes: IDs of each cell: table k of batch b is cell `b * tables + k`.
        widths: Floats per row, for each table.
        batches: 1 or more.
        num_shards: 1 or more.

    Raises:
        TableArgumentError: Sizes do not fit tables, batches or ids.
    """

    def __init__(self, ids: Ids, sizes: Ids, widths: Ids, batches: int, num_shards: int) -> None:
        try:
            self._routes = native.Routes(ids, sizes, widths, batches, num_shards)
        except ValueError as cause:
            raise TableArgumentError(
                f"{cause} ({len(widths)} tables, {batches} batches, {len(ids)} ids)"
            ) from cause
        self.num_ids = self._routes.num_ids
        self.num_floats = self._routes.num_floats
        self.floats = self._routes.floats
        """Floats of all rows of the call."""

    def write_requests(
        self, numbers: Sequence[Ids], rows: Sequence[Floats] = (), memory: Memory | None = None
    ) -> list[Bytes]:
        """Write the request of each shard, which it reads as a `RowRequest`.

        Args:
            numbers: Arrays with a number per ID, in the order of a `RowRequest`; the IDs themselves first.
            rows: Flat arrays with a row per ID, in the order of a `RowRequest`.
            memory: Allocates the requests; by default each is memory of its own.
        """
        sizes = self._routes.request_bytes(len(numbers), len(rows))
        to = [np.empty(size, np.uint8) for size in sizes] if memory is None else list(memory(sizes))
        self._routes.write_requests(list(numbers), list(rows), to)
        return to

    def gather_rows(self, answers: Sequence[Floats]) -> Floats:
        """Return rows in the caller's order, from those of each shard. A single answer is not copied."""
        if len(answers) == 1:
            return answers[0]
        rows = np.empty(self.floats, np.float32)
        self._routes.gather_rows(list(answers), rows)
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class PartitionedRequest:
    """One call, split by shard: a header and the bytes of a request per shard, perhaps without IDs."""

    routes: Routes
    headers: list[RowHeader]
    requests: list[Bytes]


class RequestPartitioner:
    """Splits the calls of one store by shard, in the same way for parameter servers and ranks.

        partitioner = RequestPartitioner(configs, shards=2, number=0)
        call = partitioner.lookup(TableIds(ids, sizes))
        call.headers[1].ids             # how many of the IDs shard 1 owns

    Args:
        configs: The tables of the store.
        shards: How many parameter servers or ranks hold rows.
        number: The index of this store among the model's stores.
    """

    def __init__(self, configs: Mapping[str, TableConfig], shards: int, number: int) -> None:
        self.dims = {name: configs[name].dim for name in sorted(configs)}
        """Table to the width of its rows, sorted by name."""
        self.counts_sightings = True
        """Whether `TableIds.counts` matter to an admission filter; otherwise they are not sent."""
        self._widths = np.array(list(self.dims.values()), np.int64)
        self._delayed = next((config for config in configs.values() if _is_delayed(config)), None)
        self._shards = shards
        self.number = number
        self.memory: Memory | None = None
        """Allocates the memory that requests are written to; None gives each memory of its own."""

    @property
    def delay_compensated(self) -> bool:
        return self._delayed is not None

    def lookup(self, ids: TableIds, flags: int = RowFlags.NONE) -> PartitionedRequest:
        """Split a lookup; see `Store.lookup`.

        Raises:
            TableArgumentError: An argument does not fit.
        """
        keys, routes = self._routes(ids)
        headers = [
            RowHeader(RowCall.LOOKUP, self.number, ids.batches, count, 0, flags) for count in routes.num_ids
        ]
        return PartitionedRequest(routes, headers, routes.write_requests([keys], memory=self.memory))

    def push(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int,
        event_time: int | Tensor,
        latest_values: Tensor | None,
    ) -> PartitionedRequest:
        """Split gradients; see `Store.apply_gradients`.

        Raises:
            TableArgumentError: An argument does not fit.
        """
        arguments.check_step(step)
        if self._delayed is not None and latest_values is None:
            arguments.latest_array(None, self._delayed, 0)
        keys, routes = self._routes(ids)
        numbers = [keys]
        rows = [arguments.float_array(gradients, (routes.floats,), "gradients")]
        flags = RowFlags.NONE if ids.distinct else RowFlags.REPEATED
        if latest_values is not None:
            latest = arguments.float_array(latest_values, (routes.floats,), "latest_values")
            if self._delayed is not None:
                rows.append(latest)
                flags |= RowFlags.LATEST
        times, one_time = arguments.event_time_array(event_time, len(keys)), 0
        if isinstance(event_time, Tensor):
            numbers.append(times)
            flags |= RowFlags.TIMES
        else:
            one_time = event_time
        if ids.counts is not None and self.counts_sightings:
            arguments.count_array(ids.counts, len(keys))
            numbers.append(arguments.id_array(ids.counts, "counts"))
            flags |= RowFlags.COUNTS
        headers = [
            RowHeader(RowCall.PUSH, self.number, ids.batches, count, floats, flags, step, one_time)
            for count, floats in zip(routes.num_ids, routes.num_floats, strict=True)
        ]
        return PartitionedRequest(routes, headers, routes.write_requests(numbers, rows, self.memory))

    def _routes(self, ids: TableIds) -> tuple[Ids, Routes]:
        """Check IDs and sizes; return the IDs and the shard of each."""
        keys, sizes = arguments.id_array(ids.ids), arguments.id_array(ids.sizes, "sizes")
        batches = ids.batches
        if not isinstance(batches, int) or batches < 1:
            raise TableArgumentError(f"batches must be a whole number, 1 or more, got {batches!r}")
        return keys, Routes(keys, sizes, self._widths, batches, self._shards)


def _is_delayed(config: TableConfig) -> bool:
    return any(segment.optimizer.delay_compensation is not None for segment in config.segments)
