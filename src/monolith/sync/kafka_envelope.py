"""What a message of a Kafka topic of deltas is: a piece of a frame, and what a reader must know beside it.

    magic "MDLK" | JSON bytes u32 | CRC-32C of the JSON u32 | JSON | piece of a frame

Every message says the same things: which epoch it is of, how far its log is, where the newest snapshots
begin, what the publish state is. So whoever comes reads one message, the last, and knows where to go.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from monolith import native
from monolith.errors import CorruptMessageError, RequestError
from monolith.sync.channel import ShareLog
from monolith.sync.messages import PublishState
from monolith.sync.wire_format import log_from_plain, log_to_plain
from monolith.wire.messages import Count, Json, Name, Text, read_message, write_message

_MAGIC = b"MDLK"
_LEAD = struct.Struct("<4sII")
_JSON_LIMIT = 8 << 20


@dataclass(frozen=True, slots=True)
class SnapshotAt:
    """Where a whole snapshot is in its partition, or an epoch begins."""

    stream: Name
    offset: Count
    """From here on come its messages, and all deltas after its sequence."""
    sequence: Count
    """Deltas after it complete the snapshot."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is said beside a piece of a frame."""

    log: ShareLog
    began_at: float
    """When the epoch began, in Unix seconds."""
    session: str
    """Names the writer: frames of two are never mixed up."""
    frame: int
    """Counts the frames of a writer."""
    piece: int
    pieces: int
    """0: there is no frame, only this to say."""
    stream: str = ""
    """Names the snapshot that the frame is of; empty for deltas and states."""
    newest: SnapshotAt | None = None
    before: SnapshotAt | None = None
    """The snapshot before the newest, else where the epoch begins: who was there needs no snapshot."""
    state: PublishState | None = None


@dataclass(frozen=True, slots=True)
class _EnvelopeBody:
    log: Json
    began_at: float
    session: Name
    frame: Count
    piece: Count
    pieces: Count
    stream: Text
    newest: SnapshotAt | None
    before: SnapshotAt | None
    state: PublishState | None


def seal(envelope: Envelope, piece: bytes | memoryview) -> bytes:
    """Return a message: an envelope and its piece."""
    plain = {**write_message(envelope), "log": log_to_plain(envelope.log)}
    text = json.dumps(plain, separators=(",", ":")).encode()
    return b"".join([_LEAD.pack(_MAGIC, len(text), native.crc32c(text)), text, piece])


def unseal(data: bytes) -> tuple[Envelope, memoryview]:
    """Return the envelope and the piece of a message.

    Raises:
        CorruptMessageError: It is something else.
    """
    if len(data) < _LEAD.size:
        raise CorruptMessageError("a message is too short to be of a delta channel")
    magic, size, crc = _LEAD.unpack_from(data)
    text = data[_LEAD.size : _LEAD.size + size]
    if magic != _MAGIC or size > _JSON_LIMIT or len(text) != size or native.crc32c(text) != crc:
        raise CorruptMessageError("a message is not of a delta channel, or damaged")
    try:
        body = read_message(_EnvelopeBody, json.loads(text))
    except (RequestError, ValueError, RecursionError) as cause:
        raise CorruptMessageError(f"a message makes no sense: {str(cause)[:300]}") from cause
    envelope = Envelope(
        log_from_plain(body.log),
        *(body.began_at, body.session, body.frame, body.piece, body.pieces),
        *(body.stream, body.newest, body.before, body.state),
    )
    return envelope, memoryview(data)[_LEAD.size + size :]


def cut(frame: bytes, piece_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
    """Yield number, count and bytes of the pieces of a frame."""
    whole = memoryview(frame)
    pieces = max(-(-len(whole) // piece_bytes), 1)
    for number in range(pieces):
        yield number, pieces, whole[number * piece_bytes : (number + 1) * piece_bytes]


class Assembling:
    """Puts the pieces of frames together, as they come in order; repeated ones are passed over.

    Args:
        limit: The most bytes of a frame; a larger one is left out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: tuple[str, int] | None = None
        self._data = bytearray()
        self._next = 0

    @property
    def unfinished(self) -> bool:
        """Whether some pieces of a frame are there, and not all."""
        return bool(self._data)

    def add(self, envelope: Envelope, piece: memoryview) -> bytearray | None:
        """Take a piece; return the frame that it makes whole, None where it makes none."""
        of = (envelope.session, envelope.frame)
        if of != self._of:
            self._of, self._data, self._next = of, bytearray(), 0
        if envelope.piece != self._next or len(self._data) + len(piece) > self._limit:
            return None  # a repeated one, or one after a piece that was lost: its frame never becomes whole
        self._data += piece
        self._next += 1
        if self._next < envelope.pieces:
            return None
        frame, self._data = self._data, bytearray()
        return frame
