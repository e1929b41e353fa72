"""A subscriber's end of the delta channel through Kafka, see `kafka_channel`."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from monolith.data.kafka.config import OURS, ClientLog, check_settings, import_kafka
from monolith.errors import ConfigError, CorruptMessageError, UnavailableError
from monolith.sync.channel import ShareLog
from monolith.sync.kafka_channel import Settings
from monolith.sync.kafka_envelope import Assembling, Envelope, SnapshotAt, unseal
from monolith.sync.messages import Delta, LogPlace, Message, PublishState, SnapshotEnd
from monolith.sync.wire_format import FRAME_LIMIT, decode
from monolith.wire.flight import Clock

_POLL_S = 0.2
_FOREIGN = 20
"""Messages of others that may lie at the end of a partition before it counts as not ours."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Left:
    """Where reading of a share stopped."""

    place: LogPlace
    offset: int
    """Of the first message that was not read."""
    about: Envelope
    state: PublishState | None


class KafkaDeltaReader:
    """A subscriber's end of all shares in a topic. For one thread.

    Args:
        patience: Seconds that a message is waited for that the broker has.
        answer_within: Seconds in which a broker says what there is.
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
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_settings(settings or {}, OURS)
        self._kafka = import_kafka()
        self._topic = topic
        self._patience = patience
        self._answer_s = answer_within
        self._limit = limit
        self._clock, self._sleep = clock, sleep
        self._left: dict[int, _Left] = {}
        self._at: tuple[int, int] | None = None
        """Partition and offset of what the client hands out next."""
        self._repair_from: dict[int, LogPlace] = {}
        """Share -> how far its log was when a difference was found."""
        self._closed = False
        chosen = {
            **(settings or {}),
            "bootstrap.servers": ",".join(servers),
            "group.id": f"monolith-{secrets.token_hex(8)}",  # which nobody joins: partitions are assigned
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
        }
        try:
            self._consumer = self._kafka.Consumer(chosen, logger=ClientLog(_log))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause

    def shares(self) -> Sequence[ShareLog]:
        """Return what is published; of several numbers of shares, those that were begun last."""
        with self._errors():
            found = self._consumer.list_topics(self._topic, timeout=self._answer_s).topics.get(self._topic)
        if found is None or found.error is not None:
            return []
        last = [
            one for one in (self._last(number)[0] for number in sorted(found.partitions)) if one is not None
        ]
        newest = max(last, key=lambda one: one.began_at, default=None)
        return [] if newest is None else [one.log for one in last if one.log.share[1] == newest.log.share[1]]

    def latest_begin(self, partitions: int) -> float:
        """Return when the newest epoch in so many partitions began, by its writer's clock; else 0.

        Raises:
            UnavailableError: The broker does not answer.
        """
        found = [self._last(number)[0] for number in range(partitions)]
        return max((one.began_at for one in found if one is not None), default=0.0)

    def read(self, share: int, after: LogPlace | None, *, wait: float) -> Iterator[Message]:
        """Yield what comes after a place; see `DeltaReader`."""
        left = self._left.get(share)
        if left is not None and left.place == after:  # go on where it stopped, without looking around
            if left.state is not None:
                yield left.state
            place = yield from self._follow(share, left, 0, wait)
            if place is None:
                return
            yield from self._read_anew(share, None, wait, lost=place)
        else:
            yield from self._read_anew(share, after, wait)

    def _read_anew(
        self, share: int, place: LogPlace | None, wait: float, *, lost: LogPlace | None = None
    ) -> Iterator[Message]:
        """Find a place, or a snapshot, and yield all that follows.

        Args:
            lost: What comes after it cannot be read: a snapshot must be later.
        """
        state: PublishState | None = None
        give_up = self._clock() + wait
        while True:
            about, end = self._last(share)
            if about is None:
                raise UnavailableError(f"nobody publishes share {share} in topic {self._topic!r} yet")
            if about.state is not None and about.state != state:
                state = about.state
                yield state
            offset = _offset_of(about, place)
            if offset is None and about.newest is not None and not _is_after(lost, about):
                yield from self._snapshot(share, about.newest)
                place = LogPlace(about.log.newest.epoch, about.newest.sequence)
                offset = about.newest.offset
            if offset is None:  # there is no snapshot yet
                if self._clock() >= give_up:
                    return
                self._sleep(min(_POLL_S, max(give_up - self._clock(), 0.0)))
                continue
            assert place is not None
            lost = yield from self._follow(share, _Left(place, offset, about, state), end, wait)
            if lost is None:
                return
            place, give_up = None, self._clock() + wait

    def read_buckets(self, share: int, buckets: Tensor) -> Iterator[Message]:  # noqa: ARG002
        """Yield a snapshot that is newer than this call, or its first one: of all buckets, for all readers.

        Raises:
            UnavailableError: There is none yet. Ask again later.
        """
        about, _ = self._last(share)
        if about is None or about.newest is None:
            raise UnavailableError(f"share {share} in topic {self._topic!r} has no snapshot yet")
        since = self._repair_from.setdefault(share, about.log.newest)
        if since.epoch == about.log.newest.epoch and about.newest.sequence < since.sequence:
            raise UnavailableError(
                f"share {share} in topic {self._topic!r} has no snapshot after {since} yet"
            )
        del self._repair_from[share]
        yield from self._snapshot(share, about.newest)

    def close(self) -> None:
        """Let go of the connection. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def _last(self, partition: int) -> tuple[Envelope | None, int]:
        """Return what the last message of a partition says, None if there is none; and the offset after."""
        with self._errors():
            where = self._kafka.TopicPartition(self._topic, partition)
            low, high = self._consumer.get_watermark_offsets(where, timeout=self._answer_s)
        for offset in range(high - 1, max(low, high - _FOREIGN) - 1, -1):
            self._assign(partition, offset)
            data = self._poll_known()[1]
            try:
                return unseal(data)[0], high
            except CorruptMessageError as error:
                self._report(offset, error)
        return None, high

    def _assign(self, partition: int, offset: int) -> None:
        if self._at != (partition, offset):
            with self._errors():
                self._consumer.assign([self._kafka.TopicPartition(self._topic, partition, offset)])
            self._at = (partition, offset)

    def _poll_known(self) -> tuple[int, bytes]:
        """Return the next message, which the broker has; gone or late, it is unavailable."""
        try:
            found = self._poll(self._patience)
        except _GoneError:
            found = None
        if found is None:
            raise UnavailableError(f"topic {self._topic!r}: no answer for partition and offset {self._at}")
        return found

    def _poll(self, timeout: float) -> tuple[int, bytes] | None:
        """Return offset and bytes of the next message, None where none comes in time."""
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

    def _snapshot(self, share: int, at: SnapshotAt) -> Iterator[Message]:
        """Yield the messages of a snapshot that is whole."""
        self._assign(share, at.offset)
        whole = Assembling(self._limit)
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
        self, share: int, left: _Left, end: int, wait: float
    ) -> Generator[Message, None, LogPlace | None]:
        """Yield deltas after a place, and states, until none comes for so long.

        Args:
            end: The broker has all messages before this offset: they are waited for with more patience.

        Returns:
            None, or the place after which something is lost: it takes a snapshot to go on.
        """
        self._left[share] = left
        self._assign(share, left.offset)
        whole, began_at = Assembling(self._limit), left.about.began_at
        give_up = self._clock() + wait
        while True:
            known = self._at is not None and self._at[1] < end
            try:
                found = self._poll(self._patience if known else max(give_up - self._clock(), 0.0))
            except _GoneError:
                break
            if found is None:
                if known:
                    raise UnavailableError(f"topic {self._topic!r}: no answer for what is at {self._at}")
                if self._clock() >= give_up:
                    return None
                continue
            frame, envelope = self._frame(
                found, whole, lambda one: not one.stream and one.began_at >= began_at
            )
            if envelope is not None and envelope.began_at > began_at:
                break  # another epoch
            message = None if frame is None else self._decoded(found[0], frame)
            if isinstance(message, Delta):
                if message.place.sequence > left.place.sequence + 1:
                    break
                if message.place.sequence <= left.place.sequence:
                    message = None
            place = message.place if isinstance(message, Delta) else left.place
            state = message if isinstance(message, PublishState) else left.state
            offset = left.offset if whole.unfinished else found[0] + 1
            left = self._left[share] = _Left(place, offset, left.about, state)
            if message is not None:
                give_up = self._clock() + wait
                yield message
        self._left.pop(share, None)
        return left.place

    def _decoded(self, offset: int, frame: bytearray) -> Message | None:
        try:
            return decode(frame, limit=self._limit)
        except CorruptMessageError as error:
            self._report(offset, error)
            return None

    def _frame(
        self, found: tuple[int, bytes], whole: Assembling, wanted: Callable[[Envelope], bool]
    ) -> tuple[bytearray | None, Envelope | None]:
        """Return the frame that a message makes whole, and what it says; None where it is not wanted."""
        try:
            envelope, piece = unseal(found[1])
        except CorruptMessageError as error:
            self._report(found[0], error)
            return None, None
        if not wanted(envelope):
            return None, None
        return whole.add(envelope, piece) if envelope.pieces else None, envelope

    def _report(self, offset: int, error: CorruptMessageError) -> None:
        _log.warning("delta topic %s: passed over what is at offset %d: %s", self._topic, offset, error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._kafka.KafkaException as cause:
            raise UnavailableError(f"kafka: topic {self._topic!r} cannot be read: {cause}") from cause


def _offset_of(about: Envelope, place: LogPlace | None) -> int | None:
    """Return where to read from to find what comes after a place; None where that takes a snapshot."""
    if place is None or place.epoch != about.log.newest.epoch:
        return None
    usable = [one for one in (about.newest, about.before) if one and one.sequence <= place.sequence]
    return usable[0].offset if usable else None


def _is_after(lost: LogPlace | None, about: Envelope) -> bool:
    """Whether the newest snapshot is of a moment before something that cannot be read."""
    assert about.newest is not None
    return (
        lost is not None and lost.epoch == about.log.newest.epoch and about.newest.sequence <= lost.sequence
    )


class _GoneError(Exception):
    """An offset is no longer kept."""
