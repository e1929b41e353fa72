"""The subscriber's end of the delta channel through Kafka, and the format of its messages.

Each shard is one partition. A message is a piece of a frame with an envelope:

    magic "MDLK" | JSON bytes u32 | CRC-32C of the JSON u32 | JSON | piece of a frame

Every envelope has the whole state of the partition: its epoch, the newest sequence number, the offsets of the
newest two snapshots, the publish state. So a reader that arrives reads one message, the last, and knows where
to continue:

    offset   100         120 ... 180      181     182 ...   240            last
             mark        snapshot A       delta   delta     mark+snapshot B ...
             ^ `before`  (sequence 7)     8       9         ^ `newest` (sequence 30)

    reader at sequence 35 -> read from offset 240, skip deltas up to 35
    reader at sequence 10 -> read from offset 100, skip deltas up to 10
    reader at sequence 3, or of another epoch -> take snapshot B, then the deltas after 30
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from monolith import concurrency, native
from monolith.data.kafka.config import OURS, ClientLog, check_settings, import_kafka
from monolith.errors import ConfigError, CorruptMessageError, RequestError, UnavailableError
from monolith.sync.channel import ShardLog
from monolith.sync.messages import Delta, LogPosition, Message, PublishState, SnapshotEnd
from monolith.sync.wire_format import FRAME_LIMIT, StateHead, decode, log_from_plain, log_to_plain
from monolith.wire.flight import Clock
from monolith.wire.messages import Count, Json, Name, Text, read_message, write_message

Settings = Mapping[str, str | int | float | bool]

_MAGIC = b"MDLK"
_LEAD = struct.Struct("<4sII")
_JSON_LIMIT = 8 << 20
_POLL_S = 0.2
_FOREIGN = 20
"""The most messages of other programs at the end of a partition before it counts as not ours."""

_log = logging.getLogger(__name__)


# Messages


@dataclass(frozen=True, slots=True)
class SnapshotAt:
    """Where a complete snapshot is in its partition, or where an epoch starts."""

    stream: Name
    offset: Count
    """Its messages, and all deltas after its sequence, are from here on."""
    sequence: Count
    """Deltas after it complete the snapshot."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The JSON of a message, which comes with a piece of a frame."""

    log: ShardLog
    began_at: float
    """When the epoch started, in Unix seconds."""
    session: str
    """Names the writer: frames of two writers are never mixed up."""
    frame: int
    """Number of the frame, counted by its writer."""
    piece: int
    pieces: int
    """0: the message has no frame, only its envelope."""
    stream: str = ""
    """Names the snapshot that the frame is of; empty for deltas and states."""
    newest: SnapshotAt | None = None
    before: SnapshotAt | None = None
    """The snapshot before the newest, else the start of the epoch: a reader at or after it needs no
    snapshot."""
    state: PublishState | None = None


@dataclass(frozen=True, slots=True)
class _EnvelopeHead:
    log: Json
    began_at: float
    session: Name
    frame: Count
    piece: Count
    pieces: Count
    stream: Text
    newest: SnapshotAt | None
    before: SnapshotAt | None
    state: StateHead | None


def seal(envelope: Envelope, piece: bytes | memoryview) -> bytes:
    """Return a message: an envelope and its piece."""
    state = None if envelope.state is None else StateHead.of(envelope.state)
    head = _EnvelopeHead(
        log_to_plain(envelope.log),
        *(envelope.began_at, envelope.session, envelope.frame, envelope.piece, envelope.pieces),
        *(envelope.stream, envelope.newest, envelope.before, state),
    )
    text = json.dumps(write_message(head), separators=(",", ":")).encode()
    return b"".join([_LEAD.pack(_MAGIC, len(text), native.crc32c(text)), text, piece])


def unseal(data: bytes) -> tuple[Envelope, memoryview]:
    """Return the envelope and the piece of a message.

    Raises:
        CorruptMessageError: The bytes are not such a message.
    """
    if len(data) < _LEAD.size:
        raise CorruptMessageError("a message is too short to be of a delta channel")
    magic, size, crc = _LEAD.unpack_from(data)
    text = data[_LEAD.size : _LEAD.size + size]
    if magic != _MAGIC or size > _JSON_LIMIT or len(text) != size or native.crc32c(text) != crc:
        raise CorruptMessageError("a message is not of a delta channel, or damaged")
    try:
        head = read_message(_EnvelopeHead, json.loads(text))
    except (RequestError, ValueError, RecursionError) as cause:
        raise CorruptMessageError(f"a message makes no sense: {str(cause)[:300]}") from cause
    envelope = Envelope(
        log_from_plain(head.log),
        *(head.began_at, head.session, head.frame, head.piece, head.pieces),
        *(head.stream, head.newest, head.before, None if head.state is None else head.state.state()),
    )
    return envelope, memoryview(data)[_LEAD.size + size :]


def split_frame(frame: bytes, piece_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
    """Yield number, count and bytes of the pieces of a frame."""
    whole = memoryview(frame)
    pieces = max(-(-len(whole) // piece_bytes), 1)
    for number in range(pieces):
        yield number, pieces, whole[number * piece_bytes : (number + 1) * piece_bytes]


class FrameAssembler:
    """Joins the pieces of frames, which arrive in order; repeated pieces are ignored.

    Args:
        limit: The most bytes of a frame; a larger one is progress out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: tuple[str, int] | None = None
        self._data = bytearray()
        self._next = 0

    @property
    def unfinished(self) -> bool:
        """Whether some pieces of a frame have arrived, and not all."""
        return bool(self._data)

    def add(self, envelope: Envelope, piece: memoryview) -> bytearray | None:
        """Add a piece; return the frame if this was its last piece, else None."""
        of = (envelope.session, envelope.frame)
        if of != self._of:
            self._of, self._data, self._next = of, bytearray(), 0
        if envelope.piece != self._next or len(self._data) + len(piece) > self._limit:
            return None  # repeated, or after a lost piece: then its frame never becomes complete
        self._data += piece
        self._next += 1
        if self._next < envelope.pieces:
            return None
        frame, self._data = self._data, bytearray()
        return frame


# Reading


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far the reader is in a partition."""

    position: LogPosition
    offset: int
    """Offset of the first message that was not read."""
    about: Envelope
    state: PublishState | None


class KafkaDeltaReader:
    """A subscriber's end of all shards in a topic. For one thread.

    Args:
        patience: Seconds to wait for a message that the broker is known to have.
        answer_within: Seconds to wait for a broker's metadata.
        limit: The most bytes of one frame.

    Raises:
        ConfigError: The client does not take the settings.
        MissingExtraError: confluent-kafka is not installed.
    """

    def __init__(
        self,
        servers: Sequence[str],
        topic: str,
        *,
        settings: Settings | None = None,
        patience: float = 30.0,
        answer_within: float = 10.0,
        limit: int = FRAME_LIMIT,
        clock: Clock = concurrency.monotonic,
        sleep: Callable[[float], None] = concurrency.sleep,
    ) -> None:
        check_settings(settings or {}, OURS)
        self._kafka = import_kafka()
        self._topic = topic
        self._patience = patience
        self._answer_s = answer_within
        self._limit = limit
        self._clock, self._sleep = clock, sleep
        self._progress: dict[int, _Progress] = {}
        self._at: tuple[int, int] | None = None
        """Partition and offset of the message that the client returns next."""
        self._repair_from: dict[int, LogPosition] = {}
        """Shard -> newest position of its log when a difference was found."""
        self._closed = False
        chosen = {
            **(settings or {}),
            "bootstrap.servers": ",".join(servers),
            "group.id": f"monolith-{concurrency.token_hex(8)}",  # a group of its own: partitions are assigned
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
        }
        try:
            self._consumer = self._kafka.Consumer(chosen, logger=ClientLog(_log))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause

    def logs(self) -> Sequence[ShardLog]:
        """Return the published logs. If there are several numbers of shards, the latest start counts."""
        with self._errors():
            found = self._consumer.list_topics(self._topic, timeout=self._answer_s).topics.get(self._topic)
        if found is None or found.error is not None:
            return []
        last = [
            one for one in (self._last(number)[0] for number in sorted(found.partitions)) if one is not None
        ]
        newest = max(last, key=lambda one: one.began_at, default=None)
        return [] if newest is None else [one.log for one in last if one.log.shard[1] == newest.log.shard[1]]

    def latest_begin(self, partitions: int) -> float:
        """Return the start of the newest epoch in so many partitions, by its writer's clock; else 0.

        Raises:
            UnavailableError: The broker does not answer.
        """
        # Rows of a snapshot do not count: those of an epoch that has ended may still arrive in the next one.
        found = [self._last(number, rows=False)[0] for number in range(partitions)]
        return max((one.began_at for one in found if one is not None), default=0.0)

    def read(self, shard: int, after: LogPosition | None, *, wait: float) -> Iterator[Message]:
        """Yield the messages after a position; see `DeltaReader`."""
        progress = self._progress.get(shard)
        if (
            progress is not None and progress.position == after
        ):  # continue from the last read: no need to ask the broker
            if progress.state is not None:
                yield progress.state
            position = yield from self._follow(shard, progress, 0, wait)
            if position is None:
                return
            yield from self._read_anew(shard, None, wait, lost=position)
        else:
            yield from self._read_anew(shard, after, wait)

    def _read_anew(
        self, shard: int, position: LogPosition | None, wait: float, *, lost: LogPosition | None = None
    ) -> Iterator[Message]:
        """Find a position, or a snapshot, and yield everything after it.

        Args:
            lost: The messages after it cannot be read: only a later snapshot helps.
        """
        state: PublishState | None = None
        give_up = self._clock() + wait
        while True:
            about, end = self._last(shard)
            if about is None:
                raise UnavailableError(f"shard {shard} has no publisher in topic {self._topic!r} yet")
            if about.state is not None and about.state != state:
                state = about.state
                yield state
            offset = _offset_of(about, position)
            if offset is None and about.newest is not None and not _is_too_old(lost, about):
                yield from self._snapshot(shard, about.newest)
                position = LogPosition(about.log.newest.epoch, about.newest.sequence)
                offset = about.newest.offset
            if offset is None:  # there is no snapshot yet
                if self._clock() >= give_up:
                    return
                self._sleep(min(_POLL_S, max(give_up - self._clock(), 0.0)))
                continue
            assert position is not None
            lost = yield from self._follow(shard, _Progress(position, offset, about, state), end, wait)
            if lost is None:
                return
            position, give_up = None, self._clock() + wait

    def read_buckets(self, shard: int, buckets: Tensor) -> Iterator[Message]:  # noqa: ARG002
        """Yield a snapshot newer than the first such call, of all buckets: readers of a topic share
        snapshots.

        Raises:
            UnavailableError: There is none yet. Retry later.
        """
        about, _ = self._last(shard)
        if about is None or about.newest is None:
            raise UnavailableError(f"shard {shard} in topic {self._topic!r} has no snapshot yet")
        since = self._repair_from.setdefault(shard, about.log.newest)
        if since.epoch == about.log.newest.epoch and about.newest.sequence < since.sequence:
            raise UnavailableError(
                f"shard {shard} in topic {self._topic!r} has no snapshot after {since} yet"
            )
        del self._repair_from[shard]
        yield from self._snapshot(shard, about.newest)

    def close(self) -> None:
        """Disconnect. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def _last(self, partition: int, *, rows: bool = True) -> tuple[Envelope | None, int]:
        """Return the envelope of a partition's last message, None if there is none; and the offset after
        it.

        Args:
            rows: Whether a message with rows of a snapshot counts. Without them the search may be long.
        """
        with self._errors():
            where = self._kafka.TopicPartition(self._topic, partition)
            low, high = self._consumer.get_watermark_offsets(where, timeout=self._answer_s)
        foreign = 0
        for offset in range(high - 1, low - 1, -1):
            self._assign(partition, offset)
            data = self._poll_known()[1]
            try:
                envelope = unseal(data)[0]
            except CorruptMessageError as error:
                self._report(offset, error)
                foreign += 1
                if foreign == _FOREIGN:
                    break
                continue
            if rows or not envelope.stream:
                return envelope, high
        return None, high

    def _assign(self, partition: int, offset: int) -> None:
        if self._at != (partition, offset):
            with self._errors():
                self._consumer.assign([self._kafka.TopicPartition(self._topic, partition, offset)])
            self._at = (partition, offset)

    def _poll_known(self) -> tuple[int, bytes]:
        """Return the next message, which the broker should have; raise UnavailableError if it does not
        come."""
        try:
            found = self._poll(self._patience)
        except _GoneError:
            found = None
        if found is None:
            raise UnavailableError(f"topic {self._topic!r}: no answer for partition and offset {self._at}")
        return found

    def _poll(self, timeout: float) -> tuple[int, bytes] | None:
        """Return offset and bytes of the next message; None if none comes in time."""
        with self._errors():
            message = self._consumer.poll(timeout)
        if message is None:
            return None
        if message.error() is not None:
            self._at = None
            if message.error().code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
                raise _GoneError
            raise UnavailableError(f"topic {self._topic!r} cannot be read: {message.error().str()}")
        self._at = (int(message.partition()), int(message.offset()) + 1)
        return int(message.offset()), message.value() or b""

    def _snapshot(self, shard: int, at: SnapshotAt) -> Iterator[Message]:
        """Yield the messages of a complete snapshot."""
        self._assign(shard, at.offset)
        whole = FrameAssembler(self._limit)
        while True:
            found = self._poll_known()
            frame, _ = self._frame(found, whole, lambda envelope: envelope.stream == at.stream)
            if frame is None:
                continue
            message = decode(frame, limit=self._limit)
            yield message
            if isinstance(message, SnapshotEnd):
                return

    def _follow(
        self, shard: int, progress: _Progress, end: int, wait: float
    ) -> Generator[Message, None, LogPosition | None]:
        """Yield deltas after a position, and states, until none comes for `wait` seconds.

        Args:
            end: The broker has all messages before this offset: the reader waits for them with more patience.

        Returns:
            None; or the position after which deltas are missing, so that only a snapshot helps.
        """
        self._progress[shard] = progress
        self._assign(shard, progress.offset)
        whole, began_at = FrameAssembler(self._limit), progress.about.began_at
        give_up = self._clock() + wait
        while True:
            known = self._at is not None and self._at[1] < end
            try:
                found = self._poll(self._patience if known else max(give_up - self._clock(), 0.0))
            except _GoneError:
                break
            if found is None:
                if known:
                    raise UnavailableError(
                        f"topic {self._topic!r}: no answer for partition and offset {self._at}"
                    )
                if self._clock() >= give_up:
                    return None
                continue
            frame, envelope = self._frame(
                found, whole, lambda one: not one.stream and one.began_at >= began_at
            )
            # Partitions outlive epochs: messages of older ones are ignored, a newer one needs a snapshot.
            if envelope is not None and envelope.began_at > began_at:
                break
            message = None if frame is None else self._decoded(found[0], frame)
            if isinstance(message, Delta):
                if message.position.sequence > progress.position.sequence + 1:
                    break
                if message.position.sequence <= progress.position.sequence:
                    message = None
            position = message.position if isinstance(message, Delta) else progress.position
            state = message if isinstance(message, PublishState) else progress.state
            # A frame of which only some pieces were read is read again from its first piece.
            offset = progress.offset if whole.unfinished else found[0] + 1
            progress = self._progress[shard] = _Progress(position, offset, progress.about, state)
            if message is not None:
                give_up = self._clock() + wait
                yield message
        self._progress.pop(shard, None)
        return progress.position

    def _decoded(self, offset: int, frame: bytearray) -> Message | None:
        try:
            return decode(frame, limit=self._limit)
        except CorruptMessageError as error:
            self._report(offset, error)
            return None

    def _frame(
        self, found: tuple[int, bytes], whole: FrameAssembler, wanted: Callable[[Envelope], bool]
    ) -> tuple[bytearray | None, Envelope | None]:
        """Return the frame that a message completes, and its envelope; None for each that there is not."""
        try:
            envelope, piece = unseal(found[1])
        except CorruptMessageError as error:
            self._report(found[0], error)
            return None, None
        if not wanted(envelope):
            return None, None
        return whole.add(envelope, piece) if envelope.pieces else None, envelope

    def _report(self, offset: int, error: CorruptMessageError) -> None:
        _log.warning("delta topic %s: ignored the message at offset %d: %s", self._topic, offset, error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._kafka.KafkaException as cause:
            raise UnavailableError(f"kafka: topic {self._topic!r} cannot be read: {cause}") from cause


def _offset_of(about: Envelope, position: LogPosition | None) -> int | None:
    """Return an offset from which all deltas after a position can be read; None if only a snapshot helps."""
    if position is None or position.epoch != about.log.newest.epoch:
        return None
    usable = [one for one in (about.newest, about.before) if one and one.sequence <= position.sequence]
    return usable[0].offset if usable else None


def _is_too_old(lost: LogPosition | None, about: Envelope) -> bool:
    """Whether the newest snapshot is not after the position whose successors cannot be read."""
    assert about.newest is not None
    return (
        lost is not None and lost.epoch == about.log.newest.epoch and about.newest.sequence <= lost.sequence
    )


class _GoneError(Exception):
    """The broker no longer has an offset."""
