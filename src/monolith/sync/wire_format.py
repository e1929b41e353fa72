"""Messages of a delta channel as bytes: one frame each, with its kind and length.

    magic "MDLT" | version u8 | kind u8 | 0 u16 | head bytes u32 | body bytes u64 | CRC-32C u32
    head: JSON, padded with blanks to a multiple of 8
    body: the tensors that the head counts, one after the other, little-endian, each padded to 8 bytes

The CRC covers everything before and after it. A reader compares the sizes with the bytes present and with a
limit before it allocates anything, and everything in the head with the bytes of the body. Tensors are views
of the bytes they were read from: rows never become Python objects, and a frame is a few copies of memory.

The classes named `_...Head` are the JSON. Their field names are the format: they stay as they are when a
class of `messages` renames a field, since files and topics written by earlier releases must be readable.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monolith import native
from monolith.checkpoint.saved_tables import IdShard
from monolith.errors import CorruptMessageError, RequestError
from monolith.sync.channel import ShardLog
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.table import Rows
from monolith.wire.messages import Count, read_message, write_message

VERSION = 1
FRAME_LIMIT = 1 << 30
"""Default bound on the bytes of a frame, head and body together."""

_MAGIC = b"MDLT"
_LEAD = struct.Struct("<4sBBHIQ")
_CRC = struct.Struct("<I")
LEAD_BYTES = _LEAD.size + _CRC.size
"""Bytes at the start of a frame that `frame_bytes` needs to tell its length."""
_HEAD_LIMIT = 16 << 20
_ALIGNMENT = 8
_MOST_ELEMENTS = 1 << 53
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

Frame = bytes | bytearray | memoryview


# Heads: the names of these fields are the format on the wire


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of rows: `count` ids, each with `dim` values and `state_dim` floats of optimizer state."""

    count: Count
    dim: Count
    state_dim: Count


@dataclass(frozen=True, slots=True)
class _Weight:
    dtype: str
    shape: list[Count]


@dataclass(frozen=True, slots=True)
class _DeltaHead:
    run: str
    share: tuple[Count, Count]
    place: LogPosition
    learned: LearnedUpTo
    rows: dict[str, _Shape]
    removed: dict[str, Count]
    dense: dict[str, _Weight] | None
    digests: dict[str, Count]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class _BeginHead:
    run: str
    share: tuple[Count, Count]
    place: LogPosition
    learned: LearnedUpTo
    buckets: Count | None
    dense: dict[str, _Weight] | None
    snapshot: str


@dataclass(frozen=True, slots=True)
class _RowsHead:
    table: str
    rows: _Shape
    snapshot: str
    number: Count


@dataclass(frozen=True, slots=True)
class _EndHead:
    place: LogPosition
    whole_at: LogPosition
    snapshot: str = ""
    chunks: int | None = None


@dataclass(frozen=True, slots=True)
class StateHead:
    """A `PublishState` in JSON; also part of the messages of the Kafka channel."""

    held: bool = False
    reason: str = ""
    since: float = 0.0
    version: str | None = None
    number: int = 0
    publisher: str = ""

    @classmethod
    def of(cls, state: PublishState) -> StateHead:
        return cls(state.paused, state.reason, state.since, state.version, state.number, state.publisher)

    def state(self) -> PublishState:
        return PublishState(self.held, self.reason, self.since, self.version, self.number, self.publisher)


@dataclass(frozen=True, slots=True)
class _LogHead:
    run: str
    share: tuple[Count, Count]
    newest: LogPosition
    oldest: Count
    tables: dict[str, Count]


_KINDS: Mapping[int, type] = {
    1: _DeltaHead,
    2: _BeginHead,
    3: _RowsHead,
    4: _EndHead,
    5: StateHead,
}


# Writing


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _Body()
    head: object
    match message:
        case Delta():
            kind, head = 1, _delta_head(message, body)
        case SnapshotBegin():
            buckets = None if message.buckets is None else body.add(message.buckets, torch.int64)
            dense = _dense_head(message.dense, body)
            about = (message.run, message.shard, message.position, message.learned)
            kind, head = 2, _BeginHead(*about, buckets, dense, message.snapshot)
        case SnapshotRows():
            rows = _rows_head(message.rows, body)
            kind, head = 3, _RowsHead(message.table, rows, message.snapshot, message.number)
        case SnapshotEnd():
            kind = 4
            head = _EndHead(message.position, message.whole_at, message.snapshot, message.chunks)
        case PublishState():
            kind, head = 5, StateHead.of(message)
    text = json.dumps(write_message(head), separators=(",", ":")).encode()
    text += b" " * (-(LEAD_BYTES + len(text)) % _ALIGNMENT)
    lead = _LEAD.pack(_MAGIC, VERSION, kind, 0, len(text), body.size)
    crc = native.crc32c(text, native.crc32c(lead))
    for part in body.parts:
        crc = native.crc32c(part, crc)
    return b"".join([lead, _CRC.pack(crc), text, *body.parts])


class _Body:
    """The tensors of a message, as bytes to write."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size = 0

    def add(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Append a tensor; return how many elements it has."""
        plain = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
        if plain.numel():
            self.parts.append(plain.view(torch.uint8).numpy())
            self.size += self.parts[-1].nbytes
        if gap := -self.size % _ALIGNMENT:
            self.parts.append(bytes(gap))
            self.size += gap
        return plain.numel()


def _delta_head(delta: Delta, body: _Body) -> _DeltaHead:
    rows = {table: _rows_head(found, body) for table, found in delta.rows.items()}
    removed = {table: body.add(ids, torch.int64) for table, ids in delta.removed.items()}
    dense = _dense_head(delta.dense, body)
    digests: dict[str, int] = {}
    for table, found in delta.digests.items():
        digests[table] = body.add(found.buckets, torch.int64)
        body.add(found.sums, torch.int64)
    return _DeltaHead(
        delta.run, delta.shard, delta.position, delta.learned, rows, removed, dense, digests, delta.complete
    )


def _rows_head(rows: Rows, body: _Body) -> _Shape:
    body.add(rows.ids, torch.int64)
    body.add(rows.event_times, torch.int64)
    body.add(rows.values, torch.float32)
    body.add(rows.state, torch.float32)
    return _Shape(len(rows), int(rows.values.shape[1]), int(rows.state.shape[1]))


def _dense_head(dense: Mapping[str, Tensor] | None, body: _Body) -> dict[str, _Weight] | None:
    if dense is None:
        return None
    for weight in dense.values():
        body.add(weight, weight.dtype)
    return {
        name: _Weight(str(weight.dtype).removeprefix("torch."), list(weight.shape))
        for name, weight in dense.items()
    }


# Reading


def frame_bytes(lead: Frame, *, limit: int = FRAME_LIMIT) -> int:
    """Return how many bytes the frame has that begins with these `LEAD_BYTES`, its lead included.

    Raises:
        CorruptMessageError: These bytes do not start a frame, or it is larger than `limit`.
    """
    if len(lead) < LEAD_BYTES:
        raise CorruptMessageError(
            f"a message is torn: {len(lead)} bytes, and its length is in the first {LEAD_BYTES}"
        )
    magic, version, kind, _, head, body = _LEAD.unpack_from(lead)
    if magic != _MAGIC:
        raise CorruptMessageError("bytes of a delta channel are not a message: they start with other bytes")
    if version != VERSION or kind not in _KINDS:
        raise CorruptMessageError(
            f"a message of kind {kind}, version {version} came over a delta channel; this process reads "
            f"version {VERSION}. Publisher and subscriber must be of one release."
        )
    if head > _HEAD_LIMIT or LEAD_BYTES + head + body > limit:
        raise CorruptMessageError(
            f"a message claims {head:,} and {body:,} bytes; {limit:,} are allowed, and "
            f"{_HEAD_LIMIT:,} of its head"
        )
    return int(LEAD_BYTES + head + body)


def decode(frame: Frame, *, limit: int = FRAME_LIMIT) -> Message:
    """Return the message of exactly one frame.

    Its tensors are views of the frame if it is writable, else of a copy.

    Raises:
        CorruptMessageError: The frame is torn, altered, of another version, or its content makes no sense.
    """
    size = frame_bytes(frame, limit=limit)
    if size != len(frame):
        raise CorruptMessageError(f"a message is torn: it claims {size:,} bytes, there are {len(frame):,}")
    data = memoryview(frame).cast("B")
    if data.readonly:
        data = memoryview(bytearray(data))
    _, _, kind, _, head_bytes, _ = _LEAD.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _LEAD.size)
    if native.crc32c(data[LEAD_BYTES:], native.crc32c(data[: _LEAD.size])) != crc:
        raise CorruptMessageError(f"a message of {size:,} bytes was altered on its way: its checksum differs")
    begin = LEAD_BYTES + head_bytes
    try:
        head: object = read_message(_KINDS[kind], json.loads(bytes(data[LEAD_BYTES:begin])))
        return _message(head, _Tensors(data[begin:]))
    except (RequestError, RecursionError, ValueError) as cause:  # JSON's and Unicode's errors are ValueErrors
        if isinstance(cause, CorruptMessageError):
            raise
        raise CorruptMessageError(f"a message makes no sense: {str(cause)[:300]}") from cause


def decode_all(data: Frame, *, limit: int = FRAME_LIMIT) -> Iterator[Message]:
    """Yield the messages of consecutive frames; raises as `decode` does."""
    rest = memoryview(data).cast("B")
    while len(rest):
        size = frame_bytes(rest[:LEAD_BYTES], limit=limit)
        yield decode(rest[:size], limit=limit)
        rest = rest[size:]


class _Tensors:
    """Reads the tensors of a body one after the other, and checks that they fit into its bytes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        # A size of 0 counts as 1: torch computes strides of the other sizes all the same.
        if math.prod(max(one, 1) for one in shape) > _MOST_ELEMENTS:
            raise CorruptMessageError(f"a message makes no sense: a tensor of shape {list(shape)}")
        count = math.prod(shape)
        size = count * dtype.itemsize
        begin, self._at = self._at, self._at + size + -size % _ALIGNMENT
        if self._at > len(self._data):
            raise CorruptMessageError("a message makes no sense: its head describes more bytes than it has")
        if dtype is torch.bool and count:
            _check_between(torch.frombuffer(self._data, dtype=torch.uint8, count=count, offset=begin), 2)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=begin).view(shape)

    def ids(self, count: int) -> Tensor:
        return self.take(torch.int64, count)

    def rows(self, shape: _Shape) -> Rows:
        count = shape.count
        return Rows(
            self.ids(count),
            self.ids(count),
            self.take(torch.float32, count, shape.dim),
            self.take(torch.float32, count, shape.state_dim),
        )

    def buckets(self, count: int) -> Tensor:
        found = self.ids(count)
        _check_between(found, BUCKETS)
        if bool((found[1:] <= found[:-1]).any()):
            raise CorruptMessageError("a message makes no sense: its buckets are not ascending")
        return found

    def dense(self, weights: Mapping[str, _Weight] | None) -> dict[str, Tensor] | None:
        if weights is None:
            return None
        for name, weight in weights.items():
            if weight.dtype not in _DTYPES or len(weight.shape) > 16:
                raise CorruptMessageError(
                    f"weight {name[:60]!r} cannot be: {weight.dtype[:30]} {weight.shape[:17]}"
                )
        return {name: self.take(_DTYPES[weight.dtype], *weight.shape) for name, weight in weights.items()}

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptMessageError("a message makes no sense: it has more bytes than its head describes")


def _check_between(found: Tensor, limit: int) -> None:
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < limit:
        raise CorruptMessageError(f"a message makes no sense: a number in it is not from 0 to {limit - 1}")


def _message(head: Any, tensors: _Tensors) -> Message:
    # The order in which tensors are taken is the order in which `encode` added them.
    message: Message
    match head:
        case _DeltaHead():
            message = Delta(
                head.run,
                _checked_shard(head.share),
                _checked_position(head.place),
                head.learned,
                {table: tensors.rows(shape) for table, shape in head.rows.items()},
                {table: tensors.ids(count) for table, count in head.removed.items()},
                tensors.dense(head.dense),
                {table: Digests(tensors.buckets(n), tensors.ids(n)) for table, n in head.digests.items()},
                head.complete,
            )
        case _BeginHead():
            buckets = None if head.buckets is None else tensors.buckets(head.buckets)
            dense = tensors.dense(head.dense)
            about = (head.run, _checked_shard(head.share), _checked_position(head.place), head.learned)
            message = SnapshotBegin(*about, buckets, dense, head.snapshot)
        case _RowsHead():
            message = SnapshotRows(head.table, tensors.rows(head.rows), head.snapshot, head.number)
        case _EndHead():
            positions = _checked_position(head.place), _checked_position(head.whole_at)
            message = SnapshotEnd(*positions, head.snapshot, head.chunks)
        case _:
            assert isinstance(head, StateHead)
            message = head.state()
    tensors.end()
    return message


def _checked_shard(shard: IdShard) -> IdShard:
    if not shard[0] < shard[1]:
        raise CorruptMessageError(f"a message makes no sense: shard {shard[0]} of {shard[1]}")
    return shard


def _checked_position(position: LogPosition) -> LogPosition:
    if position.sequence < 0:
        raise CorruptMessageError(f"a message makes no sense: its sequence is {position.sequence}")
    return position


# The description of a log, which channels keep next to the messages


def log_to_plain(log: ShardLog) -> dict[str, Any]:
    """Return the description of a log as plain values."""
    return write_message(_LogHead(log.run, log.shard, log.newest, log.oldest, dict(log.tables)))


def log_from_plain(plain: object) -> ShardLog:
    """Return the description that `log_to_plain` made plain.

    Raises:
        CorruptMessageError: The values are not such a description.
    """
    try:
        head = read_message(_LogHead, plain)
    except RequestError as cause:
        raise CorruptMessageError(f"the description of a shard's log makes no sense: {cause}") from cause
    return ShardLog(
        head.run, _checked_shard(head.share), _checked_position(head.newest), head.oldest, head.tables
    )
