"""The publisher's end of the delta channel through Kafka: a topic with a partition for each shard.

`kafka_reader` draws a partition. Frames are split into messages that the broker accepts. Snapshots are
written into the same partition, between the deltas, whenever half of `log_bytes` is new. The order of writing
one:

    1. a mark, an empty message: its offset becomes the snapshot's. Every delta published after the snapshot's
       position comes after the mark, so a reader that starts there misses none.
    2. the rows of the snapshot, by a second producer: deltas do not wait for them.
    3. once the broker has all of them, a message whose envelope names the snapshot as the newest. Until then
       no reader looks for it, so a snapshot that breaks off is never seen.

Compaction: messages before the last but one snapshot are deleted, if the broker supports that; otherwise the
topic's own retention bounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from monolith import concurrency
from monolith.data.kafka.config import ClientLog, check_settings, import_kafka
from monolith.errors import ConfigError, UnavailableError
from monolith.sync.channel import LOG_BYTES, ShardLog, SnapshotMaker, TakeSnapshot, Unfinished
from monolith.sync.kafka_reader import (
    Envelope,
    KafkaDeltaReader,
    Settings,
    SnapshotAt,
    seal,
    split_frame,
)
from monolith.sync.messages import Delta, LogPosition, Message, PublishState, SnapshotBegin
from monolith.sync.wire_format import encode

MESSAGE_BYTES = 512 << 10
"""The most bytes of a frame in one message: brokers accept a million bytes by default."""
_PAUSE_S = 0.1
_LATER_S = 0.001
_PRODUCER_ONLY = ("enable.idempotence", "acks", "linger.ms", "message.timeout.ms", "compression.type")

_log = logging.getLogger(__name__)


class KafkaDeltaWriter:
    """A publisher's end of one shard in a topic.

    Args:
        servers: host:port of some brokers.
        log_bytes: A snapshot is written after half as many bytes of deltas.
        message_bytes: The most bytes of a frame in one message.
        delivery_timeout: How long the broker may take to accept a delta.
        answer_within: Seconds to wait for a broker's metadata, and for a new topic.
        settings: Further settings of librdkafka, security included.
        clock: Unix seconds.

    Raises:
        ConfigError: The client does not take the settings.
        MissingExtraError: confluent-kafka is not installed.
    """

    def __init__(
        self,
        servers: Sequence[str],
        topic: str,
        *,
        log_bytes: int = LOG_BYTES,
        message_bytes: int = MESSAGE_BYTES,
        delivery_timeout: timedelta = timedelta(seconds=30),
        answer_within: float = 30.0,
        settings: Settings | None = None,
        clock: Callable[[], float] = concurrency.time,
    ) -> None:
        if min(log_bytes, message_bytes) < 1:
            raise ConfigError("delta topic: log_bytes and message_bytes must be at least 1")
        check_settings(settings or {}, ())
        self._kafka = import_kafka()
        self._servers, self._topic = ",".join(servers), topic
        self._settings = dict(settings or {})
        self._limit, self._piece_bytes = log_bytes, message_bytes
        self._timeout = delivery_timeout.total_seconds()
        self._answer_s = answer_within
        self._clock = clock
        self._deltas = _Producer(self._kafka, self._producer_settings(), topic)
        self._rows = _Producer(self._kafka, self._producer_settings(), topic)
        """Snapshots have a producer of their own: a delta does not wait until they are delivered."""
        self._maker = SnapshotMaker(self._write_snapshot)
        # Held while a delta, a state or a mark is sent, until the broker has it; guards everything below. The
        # publisher's thread and that of the maker send, and each message has the state of the whole
        # partition.
        self._sending = concurrency.Lock()
        self._envelope: Envelope | None = None
        """The envelope of the next message."""
        self._fresh = 0
        self._deletes = True
        """Whether the broker may be able to delete messages; some are too old."""
        self._closed = False

    address = None

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        self._ensure_topic(log.shard[1])
        began_at = self._begins_at(log.shard[1])
        with self._sending:
            state = None if self._envelope is None else self._envelope.state
            self._envelope = Envelope(log, began_at, concurrency.token_hex(8), 0, 0, 0, state=state)
            self._fresh = 0
            begin = SnapshotAt("begin", self._send(None), log.newest.sequence)
            self._envelope = replace(self._opened(), before=begin)
        self._maker.begin(snapshot)

    def append(self, delta: Delta) -> None:
        frame = encode(delta)
        with self._sending:
            envelope = self._opened()
            newest, position = envelope.log.newest, delta.position
            if position.epoch != newest.epoch or position.sequence > newest.sequence + 1:
                raise UnavailableError(f"the log is at {newest}: {position} cannot follow. Begin an epoch.")
            if position.sequence <= newest.sequence:
                return
            # The envelope must name this delta as the newest, so it changes first, and back if sending fails.
            self._envelope = replace(envelope, log=replace(envelope.log, newest=position))
            try:
                self._send(frame)
            except UnavailableError:
                self._envelope = replace(self._opened(), log=envelope.log)
                raise
            self._fresh += len(frame)
            due = 2 * self._fresh >= self._limit
            if due:
                self._fresh = 0
        if due:
            self._maker.want()

    def set_state(self, state: PublishState) -> None:
        with self._sending:
            self._envelope = replace(self._opened(), state=state)
            self._send(encode(state))

    def unfinished(self) -> Unfinished | None:
        return self._maker.unfinished()

    def close(self) -> None:
        """Stop making snapshots. The messages stay. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._maker.close()

    def _opened(self) -> Envelope:
        if self._envelope is None:
            raise ConfigError("delta topic: open the log before publishing")
        return self._envelope

    def _send(self, frame: bytes | None) -> int:
        """Send a frame, or only an envelope; return the offset of its first message. The lock is held."""
        envelope = self._opened()
        self._envelope = envelope = replace(envelope, frame=envelope.frame + 1)
        pieces = [(0, 0, memoryview(b""))] if frame is None else list(split_frame(frame, self._piece_bytes))
        for number, count, piece in pieces:
            self._deltas.send(
                seal(replace(envelope, piece=number, pieces=count), piece), envelope.log.shard[0]
            )
        return self._deltas.deliver(self._timeout)

    def _write_snapshot(self, messages: Iterator[Message]) -> None:
        with self._sending:
            # Step 1 (see above): before the first row is read.
            offset, envelope, stream = self._send(None), self._opened(), concurrency.token_hex(8)
        position: LogPosition | None = None
        marked = envelope.log.newest
        for number, message in enumerate(messages):
            if isinstance(message, SnapshotBegin):
                position = message.position
                # The publisher notes a delta shortly after the broker has it. A delta that came before the
                # mark is in the rows, and readers of this snapshot would wait for it in vain.
                if position.epoch == marked.epoch and position.sequence < marked.sequence:
                    position = marked
                    message = replace(message, position=marked)  # noqa: PLW2901
            about = replace(envelope, session=stream, stream=stream, frame=number)
            for piece, count, data in split_frame(encode(message), self._piece_bytes):
                self._rows.send(seal(replace(about, piece=piece, pieces=count), data), envelope.log.shard[0])
        assert position is not None
        self._rows.deliver(max(self._timeout, 60.0))
        with self._sending:
            now = self._opened()
            if now.log.newest.epoch != position.epoch:
                return  # an epoch started meanwhile, whose readers must not take this snapshot
            # A reader at the oldest sequence, or later, finds its deltas after the older snapshot.
            before = now.newest or now.before
            assert before is not None
            newest = SnapshotAt(stream, offset, position.sequence)
            log = replace(now.log, oldest=before.sequence + 1)
            self._envelope = replace(now, newest=newest, before=before, log=log)
            self._send(None)
        self._delete_before(before.offset)

    def _delete_before(self, offset: int) -> None:
        """Ask the broker to delete messages that no reader needs, without waiting for it."""
        if not self._deletes:
            return
        admin = self._admin()
        where = self._kafka.TopicPartition(self._topic, self._opened().log.shard[0], offset)
        kinds = self._kafka.KafkaError

        def done(
            future: Any, keep: Any = admin
        ) -> None:  # without a reference to the client the answer would not come
            del keep
            try:
                future.result()
            except self._kafka.KafkaException as error:
                if error.args[0].code() in (kinds._UNSUPPORTED_FEATURE, kinds.UNSUPPORTED_VERSION):
                    self._deletes = False
                    _log.info("delta topic %s: only its own retention bounds it: %s", self._topic, error)
                    return
                # Any other error may pass, and the next snapshot asks for these messages as well.
                _log.warning(
                    "delta topic %s: cannot delete the messages before offset %d, retrying after the next "
                    "snapshot: %s",
                    self._topic,
                    offset,
                    error,
                )

        for future in admin.delete_records([where]).values():
            future.add_done_callback(done)

    def _begins_at(self, shards: int) -> float:
        """Return the time; or a later one if an epoch in the topic started later by another machine's
        clock."""
        reader = KafkaDeltaReader(
            self._servers.split(","),
            self._topic,
            settings={key: value for key, value in self._settings.items() if key not in _PRODUCER_ONLY},
            answer_within=self._answer_s,
        )
        try:
            return max(self._clock(), reader.latest_begin(shards) + _LATER_S)
        finally:
            reader.close()

    def _ensure_topic(self, partitions: int) -> None:
        try:
            found = self._admin().list_topics(self._topic, timeout=self._answer_s).topics.get(self._topic)
            if found is None or found.error is not None or not found.partitions:
                self._create_topic(partitions)
                return
        except self._kafka.KafkaException as cause:
            raise UnavailableError(f"kafka: cannot inspect topic {self._topic!r}: {cause}") from cause
        if len(found.partitions) < partitions:
            raise ConfigError(
                f"kafka: topic {self._topic!r} has {len(found.partitions)} partitions, and {partitions} "
                "shards are published. Add partitions, or publish to another topic."
            )

    def _create_topic(self, partitions: int) -> None:
        topic = self._kafka.admin.NewTopic(self._topic, num_partitions=partitions)
        try:
            for future in self._admin().create_topics([topic]).values():
                future.result(self._answer_s)
        except self._kafka.KafkaException as cause:
            if (
                cause.args[0].code() != self._kafka.KafkaError.TOPIC_ALREADY_EXISTS
            ):  # by another shard's writer
                raise UnavailableError(
                    f"kafka: cannot create topic {self._topic!r}: {cause}. "
                    f"Create it with {partitions} partitions."
                ) from cause

    def _admin(self) -> Any:
        mine = {key: value for key, value in self._settings.items() if key not in _PRODUCER_ONLY}
        return self._kafka.admin.AdminClient(
            {**mine, "bootstrap.servers": self._servers}, logger=ClientLog(_log)
        )

    def _producer_settings(self) -> dict[str, Any]:
        return {
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "message.timeout.ms": round(self._timeout * 1000),
            **self._settings,
            "bootstrap.servers": self._servers,
        }


class _Producer:
    """A Kafka producer that knows whether all messages were delivered. For one thread at a time."""

    def __init__(self, kafka: Any, settings: dict[str, Any], topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._waiting = 0
        self._first: int | None = None
        self._failure = ""
        try:
            self._producer = kafka.Producer(settings, logger=ClientLog(_log))
        except kafka.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause

    def send(self, data: bytes, partition: int) -> None:
        while True:
            try:
                self._producer.produce(self._topic, data, partition=partition, on_delivery=self._on_delivery)
                self._waiting += 1
                break
            except BufferError:
                self._producer.poll(_PAUSE_S)  # full: wait for some to be delivered
            except self._kafka.KafkaException as cause:
                raise UnavailableError(f"kafka: cannot publish to topic {self._topic!r}: {cause}") from cause
        self._producer.poll(0)

    def deliver(self, timeout: float) -> int:
        """Wait until all messages are delivered; return the offset of the first.

        Raises:
            UnavailableError: Some were not delivered.
        """
        self._producer.flush(timeout)
        left, failure, first = self._waiting, self._failure, self._first
        self._waiting, self._failure, self._first = 0, "", None
        if left or failure or first is None:
            self._producer.purge()
            self._producer.flush(_PAUSE_S)
            self._waiting, self._failure, self._first = 0, "", None
            raise UnavailableError(
                f"kafka: topic {self._topic!r} did not accept the messages: "
                f"{failure or f'no answer in {timeout:g} s'}"
            )
        return first

    def _on_delivery(self, error: Any, message: Any) -> None:
        self._waiting -= 1
        if error is not None:
            self._failure = self._failure or str(error.str())
        elif self._first is None:
            self._first = int(message.offset())
