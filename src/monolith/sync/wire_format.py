"""Messages of a delta channel as bytes: one frame each, which says what it is and how long.

    magic "MDLT" | version u8 | kind u8 | 0 u16 | head bytes u32 | body bytes u64 | CRC-32C u32
    head: JSON, padded with blanks to a multiple of 8
    body: the tensors that the head counts, one after the other, little-endian, each padded to 8 bytes

The CRC is of all that comes before and after it. Whoever reads compares sizes with what is there and with a
limit before anything is allocated, and all that the head says with the bytes of the body; tensors are views
of the bytes they were read from. Rows are never Python objects: a frame is a few copies of memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from monolith import native
from monolith.checkpoint.shares import IdShare
from monolith.errors import CorruptMessageError, RequestError
from monolith.sync.channel import ShareLog
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPlace,
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
"""The most bytes of a frame, head and body together, that is read where nobody says otherwise."""
PART_BYTES = 4 << 20
"""About how many bytes of rows a publisher puts into one delta, and a snapshot into one message."""

_MAGIC = b"MDLT"
_LEAD = struct.Struct("<4sBBHIQ")
_CRC = struct.Struct("<I")
LEAD_BYTES = _LEAD.size + _CRC.size
"""From so many bytes on, `frame_bytes` knows how long a frame is."""
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


# What heads say


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of rows."""

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
    place: LogPlace
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
    place: LogPlace
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
class _LogHead:
    run: str
    share: tuple[Count, Count]
    newest: LogPlace
    oldest: Count
    tables: dict[str, Count]


_KINDS: Mapping[int, type] = {
    1: _DeltaHead,
    2: _BeginHead,
    3: _RowsHead,
    4: SnapshotEnd,
    5: PublishState,
}


# Writing


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _Body()
    head: object = message
    kind = 4 if isinstance(message, SnapshotEnd) else 5
    if isinstance(message, Delta):
        kind, head = 1, _delta_head(message, body)
    elif isinstance(message, SnapshotBegin):
        buckets = None if message.buckets is None else body.add(message.buckets, torch.int64)
        dense = _dense_head(message.dense, body)
        about = (message.run, message.share, message.place, message.learned)
        kind, head = 2, _BeginHead(*about, buckets, dense, message.snapshot)
    elif isinstance(message, SnapshotRows):
        kind, head = (
            3,
            _RowsHead(message.table, _rows_head(message.rows, body), message.snapshot, message.number),
        )
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
        """Put a tensor at the end; return how many elements it has."""
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
        delta.run, delta.share, delta.place, delta.learned, rows, removed, dense, digests, delta.complete
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
        CorruptMessageError: No frame begins so, or it is larger than `limit`.
    """
    if len(lead) < LEAD_BYTES:
        raise CorruptMessageError(
            f"a message is torn: {len(lead)} bytes, and {LEAD_BYTES} say how long it is"
        )
    magic, version, kind, _, head, body = _LEAD.unpack_from(lead)
    if magic != _MAGIC:
        raise CorruptMessageError("bytes of a delta channel are no message: they begin otherwise")
    if version != VERSION or kind not in _KINDS:
        raise CorruptMessageError(
            f"a message of kind {kind}, version {version} came over a delta channel; this process reads "
            f"version {VERSION}. Publisher and subscriber must be of one release."
        )
    if head > _HEAD_LIMIT or LEAD_BYTES + head + body > limit:
        raise CorruptMessageError(
            f"a message says that it has {head:,} and {body:,} bytes; {limit:,} are allowed, and "
            f"{_HEAD_LIMIT:,} of its head"
        )
    return int(LEAD_BYTES + head + body)


def decode(frame: Frame, *, limit: int = FRAME_LIMIT) -> Message:
    """Return the message of exactly one frame.

    Its tensors are views of the frame where that may be written to, else of a copy.

    Raises:
        CorruptMessageError: It is none: torn, altered, of another version, or what it says makes no sense.
    """
    size = frame_bytes(frame, limit=limit)
    if size != len(frame):
        raise CorruptMessageError(f"a message is torn: it says {size:,} bytes, there are {len(frame):,}")
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
    """Yield the messages of frames that lie one after the other; raises as `decode` does."""
    rest = memoryview(data).cast("B")
    while len(rest):
        size = frame_bytes(rest[:LEAD_BYTES], limit=limit)
        yield decode(rest[:size], limit=limit)
        rest = rest[size:]


class _Tensors:
    """Takes tensors from the bytes of a body, in order."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if math.prod(max(one, 1) for one in shape) > _MOST_ELEMENTS:  # also where one is 0: torch has strides
            raise CorruptMessageError(f"a message makes no sense: a tensor of shape {list(shape)}")
        count = math.prod(shape)
        size = count * dtype.itemsize
        begin, self._at = self._at, self._at + size + -size % _ALIGNMENT
        if self._at > len(self._data):
            raise CorruptMessageError("a message makes no sense: it says more than it has bytes for")
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
            raise CorruptMessageError("a message makes no sense: it has more bytes than it says")


def _check_between(found: Tensor, limit: int) -> None:
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < limit:
        raise CorruptMessageError(f"a message makes no sense: a number in it is not from 0 to {limit - 1}")


def _message(head: Any, tensors: _Tensors) -> Message:
    message: Message
    if isinstance(head, _DeltaHead):
        message = Delta(
            head.run,
            _share(head.share),
            _place(head.place),
            head.learned,
            {table: tensors.rows(shape) for table, shape in head.rows.items()},
            {table: tensors.ids(count) for table, count in head.removed.items()},
            tensors.dense(head.dense),
            {table: Digests(tensors.buckets(n), tensors.ids(n)) for table, n in head.digests.items()},
            head.complete,
        )
    elif isinstance(head, _BeginHead):
        buckets = None if head.buckets is None else tensors.buckets(head.buckets)
        dense = tensors.dense(head.dense)
        about = (head.run, _share(head.share), _place(head.place), head.learned)
        message = SnapshotBegin(*about, buckets, dense, head.snapshot)
    elif isinstance(head, _RowsHead):
        message = SnapshotRows(head.table, tensors.rows(head.rows), head.snapshot, head.number)
    elif isinstance(head, SnapshotEnd):
        _place(head.place), _place(head.whole_at)
        message = head
    else:
        assert isinstance(head, PublishState)
        message = head
    tensors.end()
    return message


def _share(share: IdShare) -> IdShare:
    if not share[0] < share[1]:
        raise CorruptMessageError(f"a message makes no sense: share {share[0]} of {share[1]}")
    return share


def _place(place: LogPlace) -> LogPlace:
    if place.sequence < 0:
        raise CorruptMessageError(f"a message makes no sense: its sequence is {place.sequence}")
    return place


# What a channel knows of a log, beside its messages


def log_to_plain(log: ShareLog) -> dict[str, Any]:
    """Return what a channel knows of a share as plain values."""
    return write_message(_LogHead(log.run, log.share, log.newest, log.oldest, dict(log.tables)))


def log_from_plain(plain: object) -> ShareLog:
    """Return what `log_to_plain` made plain.

    Raises:
        CorruptMessageError: It is none.
    """
    try:
        head = read_message(_LogHead, plain)
    except RequestError as cause:
        raise CorruptMessageError(f"what a channel says of a share makes no sense: {cause}") from cause
    return ShareLog(head.run, _share(head.share), _place(head.newest), head.oldest, head.tables)


# Large deltas


def split_delta(delta: Delta, limit_bytes: int = PART_BYTES) -> list[Delta]:
    """Return a delta as several, none with much more than so many bytes of rows and removed ids.

    They are numbered on from the delta's own sequence: whoever publishes them goes on after the last. Dense
    weights, which are swapped all at once, and digests, which are of all rows together, are in the last; so
    is the promise that all changes up to its step have come.
    """
    groups: list[_Group] = [_Group(limit_bytes)]
    for table, rows in delta.rows.items():
        for begin, end in _pieces(len(rows), _row_bytes(rows), limit_bytes):
            piece = rows.slice(begin, end)
            _fitting(groups, len(piece) * _row_bytes(rows), limit_bytes).rows[table] = piece
    for table, ids in delta.removed.items():
        for begin, end in _pieces(len(ids), 8, limit_bytes):
            _fitting(groups, 8 * (end - begin), limit_bytes).removed[table] = ids[begin:end]
    parts = [
        replace(
            delta,
            place=LogPlace(delta.place.epoch, delta.place.sequence + number),
            rows=group.rows,
            removed=group.removed,
            dense=None,
            digests={},
            complete=False,
        )
        for number, group in enumerate(groups)
    ]
    parts[-1] = replace(parts[-1], dense=delta.dense, digests=delta.digests, complete=delta.complete)
    return parts


@dataclass(slots=True)
class _Group:
    """What becomes one of the deltas."""

    left: int
    """Bytes that it has room for."""
    rows: dict[str, Rows] = field(default_factory=dict)
    removed: dict[str, Tensor] = field(default_factory=dict)


def _fitting(groups: list[_Group], size: int, limit: int) -> _Group:
    """Return the last group if so many bytes fit into it, else a new one; two pieces of a table never fit."""
    if size > groups[-1].left and groups[-1].left < limit:
        groups.append(_Group(limit))
    groups[-1].left -= size
    return groups[-1]


def _row_bytes(rows: Rows) -> int:
    return 16 + 4 * (int(rows.values.shape[1]) + int(rows.state.shape[1]))


def _pieces(count: int, each: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of at most `limit` bytes; an empty whole is one piece."""
    step = max(limit // each, 1)
    for begin in range(0, max(count, 1), step):
        yield begin, min(begin + step, count)
