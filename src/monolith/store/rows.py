"""Rows on the wire: what a lookup or a push says of itself, and where its arrays lie.

A step asks every server for rows and pushes their gradients, so neither is JSON: a header of fixed size
stands beside the bytes of a message. Like every body that crosses a port it is checked at the border, and
what does not fit is a `RequestError` before anything has happened. Answers have a shorter one.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple, Self

import numpy as np

from monolith.errors import RequestError, TableArgumentError
from monolith.wire.bulk import Bytes

_MAGIC, _VERSION = b"MRow", 1
_HEADER = struct.Struct("<4sBBHIIQQqQ8s8sQ")
HEADER_BYTES = _HEADER.size
_ANSWER = struct.Struct("<4sBBHQ")
ANSWER_BYTES = _ANSWER.size
"""Of the header of an answer; serving servers append a claim to it."""
_ANYTHING = bytes(8)
_MOST_PADDING = 8
"""Bytes that may follow a header; fewer than these. See `BulkMessages.padded`."""
_MOST = 1 << 53
_MOST_BATCHES = 1 << 20


class RowCall(IntEnum):
    LOOKUP = 1
    PUSH = 2


class RowFlags(IntFlag):
    """Which arrays a message has beside ids and, in a push, gradients; how rows are written."""

    NONE = 0
    TIMES = 1
    COUNTS = 2
    LATEST = 4
    HALF = 8
    """Rows as half floats; of a request, that the answer may have them so."""
    REPEATED = 16
    """Of a push: ids of one table may be equal within a batch."""


def incarnation_bytes(name: str | None) -> bytes:
    """Return what stands for an incarnation in a header; zeros take a server as it is."""
    return _ANYTHING if name is None else hashlib.blake2b(name.encode(), digest_size=8).digest()


class RowHeader(NamedTuple):
    """What a message about rows says of itself."""

    call: RowCall
    store: int
    batches: int
    ids: int
    floats: int = 0
    flags: RowFlags = RowFlags.NONE
    step: int = 0
    event_time: int = 0
    incarnation: bytes = _ANYTHING
    sender: str = "00" * 8
    """8 bytes, as hexadecimal digits."""
    number: int = 0
    """From 1 on in a push; see `monolith.store.pushes`."""

    def packed(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
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
    def read(cls, data: bytes) -> Self:
        """Return the header of a message.

        Raises:
            RequestError: It is none, of another version, or a number in it is out of bounds.
        """
        if not _HEADER.size <= len(data) < _HEADER.size + _MOST_PADDING:
            raise RequestError(f"a header of rows has {_HEADER.size} bytes and padding, got {len(data)}")
        (
            magic,
            version,
            call,
            flags,
            store,
            batches,
            ids,
            floats,
            step,
            event_time,
            incarnation,
            sender,
            number,
        ) = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise RequestError(
                f"its header begins with {magic!r}, version {version}, not {_MAGIC!r}, version {_VERSION}. "
                "Both sides must run the same version"
            )
        if call not in _CALLS or flags not in _ALL_FLAGS:
            raise RequestError(f"its header has the call {call} and the flags {flags:#x}, which do not exist")
        if not 1 <= batches <= _MOST_BATCHES:
            raise RequestError(f"batches must be a whole number from 1 to {_MOST_BATCHES}, got {batches}")
        for name, value in (("ids", ids), ("floats", floats), ("event_time", event_time), ("number", number)):
            if value > _MOST:
                raise RequestError(f"{name} must be a whole number from 0 to {_MOST}, got {value}")
        if call == RowCall.PUSH and number < 1:
            raise RequestError("a push must have a number from 1 on, got 0")
        return cls(
            RowCall(call),
            store,
            batches,
            ids,
            floats,
            RowFlags(flags),
            step,
            event_time,
            incarnation,
            sender.hex(),
            number,
        )


_CALLS = frozenset(int(call) for call in RowCall)
_ALL_FLAGS = range(32)


def pack_answer(flags: RowFlags, floats: int) -> bytes:
    """Return the header of an answer."""
    return _ANSWER.pack(_MAGIC, _VERSION, 0, flags, floats)


def read_answer(data: bytes) -> tuple[RowFlags, int]:
    """Return flags and number of floats of an answer.

    Raises:
        RequestError: It is none, or of another version.
    """
    if not _ANSWER.size <= len(data) < _ANSWER.size + _MOST_PADDING or data[:5] != _MAGIC + bytes([_VERSION]):
        raise RequestError("what was answered is no header of rows. Both sides must run the same version")
    *_, flags, floats = _ANSWER.unpack_from(data)
    return RowFlags(flags & 15), floats


class RowRequest:
    """Where the arrays of a request lie in its buffer: those of 8 bytes first, so that all are aligned.

    sizes of the cells, ids, event times if each id has its own, counts if they matter,
    gradients, the rows these were computed on if they are asked for.

    Args:
        cells: Batches times tables.
        ids: How many.
        floats: Of all their rows; 0 for a lookup.
    """

    def __init__(
        self,
        data: Bytes | None = None,
        *,
        cells: int,
        ids: int,
        floats: int = 0,
        flags: RowFlags = RowFlags.NONE,
    ) -> None:
        lengths = _lengths(cells, ids, floats, flags)
        self.data: Bytes = np.empty(sum(lengths), np.uint8) if data is None else data
        if len(self.data) != sum(lengths):
            raise TableArgumentError(
                f"parameter server: {len(self.data)} bytes came for {ids} ids and {floats} floats, which "
                f"take {sum(lengths)}. Both sides must run the same version."
            )
        arrays, at = [], 0
        for length in lengths:
            arrays.append(self.data[at : at + length])
            at += length
        self.sizes, self.ids = arrays[0].view(np.int64), arrays[1].view(np.int64)
        self.times = arrays[2].view(np.int64) if flags & RowFlags.TIMES else None
        self.counts = arrays[3].view(np.int64) if flags & RowFlags.COUNTS else None
        self.gradients = arrays[4].view(np.float32)
        self.latest = arrays[5].view(np.float32) if flags & RowFlags.LATEST else None

    @staticmethod
    def size(*, cells: int, ids: int, floats: int = 0, flags: RowFlags = RowFlags.NONE) -> int:
        """Return how many bytes a request has."""
        return sum(_lengths(cells, ids, floats, flags))


def _lengths(cells: int, ids: int, floats: int, flags: RowFlags) -> tuple[int, ...]:
    """Return the bytes of each array of a request."""
    times, counts, latest = (bool(flags & one) for one in (RowFlags.TIMES, RowFlags.COUNTS, RowFlags.LATEST))
    return 8 * cells, 8 * ids, 8 * ids * times, 8 * ids * counts, 4 * floats, 4 * floats * latest
