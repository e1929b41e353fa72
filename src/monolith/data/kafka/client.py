"""The client of a Kafka source: connecting, asking the brokers, and committing offsets.

librdkafka retries almost everything by itself and reports errors as they pass by. So the two classes here
decide two things: whether an error is transient, and how long an outage may last before it ends the run.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monolith import concurrency
from monolith.data.kafka.config import ClientLog, KafkaConfig, import_kafka
from monolith.data.kafka.positions import Offsets, Partition
from monolith.errors import ConfigError, DataError, RestoreError, StoppedWhileWaitingError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = """
    _TRANSPORT _ALL_BROKERS_DOWN _TIMED_OUT _RESOLVE _WAIT_COORD _MAX_POLL_EXCEEDED _ASSIGNMENT_LOST
    LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION REPLICA_NOT_AVAILABLE BROKER_NOT_AVAILABLE
    COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS NOT_COORDINATOR REBALANCE_IN_PROGRESS
    ILLEGAL_GENERATION UNKNOWN_MEMBER_ID REQUEST_TIMED_OUT NETWORK_EXCEPTION OFFSET_NOT_AVAILABLE
    UNKNOWN_LEADER_EPOCH FENCED_LEADER_EPOCH KAFKA_STORAGE_ERROR
"""
"""Errors that brokers and groups recover from; the client retries."""

TOPICS_APPEAR_S = 5.0
"""A broker that has just started may not know its topics for a moment."""
ANSWER_S = 5.0
ASK_S = 2.0
"""How long one question to the broker may take before it is asked again. Nothing interrupts it, so it is
short: a source that is told to stop waits for no longer."""
PAUSE_S = 0.2
COMMIT_ANSWER_S = 10.0
"""How long to wait for the answer to a commit before it is sent again. The client itself has been seen to
delay one for minutes after its broker was killed, and longer than the broker was away."""
CLOSE_S = 2.0
"""How long a source that is closed waits for the broker to take its offsets, and then to let it go."""
COMMIT_RETRY_S = 1.0
"""How long to wait after a commit that failed."""

_TIMES = re.compile(r" \(after \d+ms in state [^()]*(?:\(s\)[^()]*)?\)")
"""The part of an error text that differs each time the same error occurs."""


def partition_name(partition: Partition) -> str:
    return f"partition {partition[1]} of topic {partition[0]!r}"


class KafkaClient:
    """A consumer of one source, and what is known about the brokers and topics. One thread uses it.

    Args:
        describe: Returns the name of the source in messages.
        on_commit: Called by the client, inside of a poll, with the outcome of each asynchronous commit.
        stopped: Whether the source is told to wait no more: then a question is asked once.
    """

    def __init__(
        self,
        config: KafkaConfig,
        describe: Callable[[], str],
        on_commit: Callable[[KafkaError | None, list[TopicPartition]], None],
        clock: Callable[[], float],
        stopped: Callable[[], bool],
    ) -> None:
        self.library = import_kafka()
        self._stopped = stopped
        self._config = config
        self._describe = describe
        self._on_commit = on_commit
        self._clock = clock
        self.consumer: Consumer | None = None
        """None before the first connection, and after `detach`."""
        self.partitions: dict[str, int] = {}
        """How many partitions each topic has."""
        self.trouble_since: float | None = None
        """When the client first reported an error that it has not recovered from."""
        self._reasons: dict[str, None] = {}  # the errors that it reported since, each once

    def connect(self) -> Consumer:
        """Return the consumer, once a broker has answered and all topics are known."""
        if self.consumer is not None:
            return self.consumer
        settings: dict[str, Any] = {
            **self._config.client_settings,
            "bootstrap.servers": ",".join(self._config.servers),
            "group.id": self._config.group,
            # The checkpoint decides where reading resumes: the client neither commits nor resets by itself.
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": False,
            "error_cb": self.note_error,
            "on_commit": self._on_commit,
        }
        try:
            consumer: Consumer = self.library.Consumer(settings, logger=ClientLog(logger))
        except self.library.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause
        try:
            self.partitions = self.find_topics(consumer)
        except BaseException:
            consumer.close()
            raise
        self.consumer = consumer
        return consumer

    def detach(self) -> Consumer | None:
        """Return the consumer, which the caller closes; the next `connect` makes a new one."""
        consumer, self.consumer = self.consumer, None
        return consumer

    def find_topics(self, consumer: Consumer) -> dict[str, int]:
        """Return how many partitions each topic has.

        Raises:
            DataError: No broker answers within `connect_timeout`, or a topic does not exist.
            StoppedWhileWaitingError: The source was told to stop before a broker answered.
        """
        begin, answered = self._clock(), math.inf
        patience_s = self._config.connect_timeout.total_seconds()
        # Before anything is assigned a poll returns no message, but lets the client report errors.
        pause = consumer.poll if self.consumer is None else concurrency.sleep
        while True:
            try:
                found = self.count_partitions(consumer, min(ASK_S, max(patience_s, PAUSE_S)))
            except self.library.KafkaException as cause:
                self.note_error(cause.args[0])
                self._check_stopped(cause)
                pause(PAUSE_S)
                if self._clock() - begin > patience_s:
                    raise self.unreachable(patience_s) from cause
                continue
            missing = [topic for topic, partitions in found.items() if not partitions]
            if not missing:
                return found
            answered = min(answered, self._clock())
            if self._clock() - answered > min(TOPICS_APPEAR_S, patience_s):
                raise self._unknown_topic(missing[0], consumer)
            self._check_stopped()
            pause(PAUSE_S)

    def _check_stopped(self, cause: Exception | None = None) -> None:
        if self._stopped():
            raise StoppedWhileWaitingError(f"kafka: no answer of {self._servers} by then") from cause

    def count_partitions(self, consumer: Consumer, timeout_s: float = ASK_S) -> dict[str, int]:
        """Ask once how many partitions each topic has; what the client raises is the caller's to judge."""
        found = {}
        for topic in self._config.topics:
            metadata = consumer.list_topics(topic, timeout=timeout_s)
            found[topic] = len(metadata.topics[topic].partitions)
        return found

    def _unknown_topic(self, topic: str, consumer: Consumer) -> DataError:
        """Return the error for a topic that does not exist, with the one that may be meant."""
        try:
            similar = difflib.get_close_matches(topic, consumer.list_topics(timeout=ASK_S).topics, 1)
        except self.library.KafkaException:
            similar = []
        return DataError(
            f"kafka: {self._servers} has no topic {topic!r}, or hides it from this client; "
            + (f"did you mean {similar[0]!r}?" if similar else "create it first")
        )

    # Questions to the brokers, asked again until they answer

    def ends(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset of a partition and the one after its last."""
        topic, number = partition
        consumer = self.connect()
        if number >= self.partitions.get(topic, 0):
            raise RestoreError(
                f"kafka: there is no {partition_name(partition)}; it has {self.partitions.get(topic, 0)} "
                "partitions"
            )
        ends = self._insist(
            f"the offsets of {partition_name(partition)}",
            lambda: consumer.get_watermark_offsets(self.at(partition), timeout=ASK_S, cached=False),
        )
        return int(ends[0]), int(ends[1])

    def check_exists(self, partition: Partition, offset: int) -> None:
        """Refuse an offset whose message the broker does not have, or will not have next.

        Raises:
            RestoreError: It was deleted, or lies beyond the end.
        """
        low, high = self.ends(partition)
        if not low <= offset <= high:
            happened = (
                "they were deleted since" if offset < low else "the topic was recreated or lost its newest"
            )
            raise RestoreError(
                f"kafka: cannot go to offset {offset} of {partition_name(partition)}: the broker has "
                f"messages {low} to {high - 1}; {happened}. Restore another position, or start without one"
            )

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, str]]:
        """Return what the group has committed: offsets, and the name of the run that did."""
        consumer = self.connect()
        found = self._insist(
            f"the committed offsets of group {self._config.group!r}",
            lambda: consumer.committed([self.at(one) for one in partitions], timeout=ASK_S),
        )
        return {
            (one.topic, one.partition): (one.offset, one.metadata or "") for one in found if one.offset >= 0
        }

    def _insist(self, what: str, ask: Callable[[], T | None]) -> T:
        """Ask the broker until it answers; give up after `connect_timeout`."""
        begin, patience_s = self._clock(), self._config.connect_timeout.total_seconds()
        while True:
            try:
                answer = ask()
                if answer is not None:
                    return answer
                reason: object = "no answer"
            except self.library.KafkaException as cause:
                reason = cause
            self._check_stopped()
            if self._clock() - begin > patience_s:
                raise DataError(
                    f"kafka: asked {self._servers} for {what} for {patience_s:g} s, without success: {reason}"
                )
            concurrency.sleep(PAUSE_S)

    def answers(self) -> bool:
        """Return whether a broker answers now."""
        try:
            self.connect().list_topics(self._config.topics[0], timeout=ASK_S)
        except self.library.KafkaException as cause:
            self.note_error(cause.args[0])
            return False
        self.trouble_since = None
        self._reasons.clear()
        return True

    # Errors

    def note_error(self, error: KafkaError) -> None:
        """Remember an error that the client reported. It retries by itself."""
        self._reasons.setdefault(_TIMES.sub("", str(error.str())))
        if self.trouble_since is None:
            self.trouble_since = self._clock()

    def is_transient(self, error: KafkaError) -> bool:
        """Return whether brokers and groups recover from an error."""
        kinds = self.library.KafkaError
        return error.code() in {getattr(kinds, name) for name in TRANSIENT.split() if hasattr(kinds, name)}

    def unreachable(self, tried_s: float) -> DataError:
        reasons = "; ".join(self._reasons) or "nothing"
        return DataError(
            f"kafka: no broker of {self._servers} has answered {self._describe()} for {tried_s:.0f} s; "
            f"the client said: {reasons}. Check the addresses, the network and the security settings"
        )

    @property
    def _servers(self) -> str:
        return ", ".join(self._config.servers)

    def at(self, partition: Partition, offset: int | None = None, run: str | None = None) -> TopicPartition:
        """Return a partition, an offset in it, or an offset committed by a run, as the client's type."""
        if offset is None:
            found: TopicPartition = self.library.TopicPartition(*partition)
        elif run is None:
            found = self.library.TopicPartition(*partition, offset)
        else:
            found = self.library.TopicPartition(*partition, offset, metadata=run)
        return found


class OffsetCommits:
    """Commits the offsets of checkpoints to the broker, without making the trainer wait for it.

        add ──► saved ──send──► sent ──confirmed──► dropped
                  ▲               └── failed, or no answer in 10 s ──► (1 s later) back to saved

    Only the newest offset of each partition is kept. A failure that is permanent, or lasts longer than
    `outage_timeout`, is in `failure`, and the source raises it with its next read.
    """

    def __init__(self, config: KafkaConfig, describe: Callable[[], str], clock: Callable[[], float]) -> None:
        self._config = config
        self._describe = describe
        self._clock = clock
        self._lock = concurrency.Lock()  # guards the four below: any thread commits
        self._saved: Offsets = {}
        """Offsets that a checkpoint contains and the broker has not confirmed."""
        self._sent: Offsets | None = None
        """Those of them whose commit was not answered yet."""
        self._next_try = -math.inf
        """Before this time nothing more is sent."""
        self._failing_since: float | None = None
        """When the first of the commits failed, if all since have failed as well."""
        self.failure: Exception | None = None

    def add(self, offsets: Offsets) -> None:
        with self._lock:
            self._saved.update(offsets)

    def forget(self, partitions: Sequence[Partition]) -> None:
        """Commit no more of these partitions: their next owner does."""
        with self._lock:
            for one in partitions:
                self._saved.pop(one, None)

    def unconfirmed(self, partitions: Collection[Partition]) -> Offsets:
        """Return the offsets of partitions that a checkpoint contains and the broker has not confirmed."""
        with self._lock:
            return {one: offset for one, offset in self._saved.items() if one in partitions}

    @property
    def is_unsettled(self) -> bool:
        """Whether a commit is on its way or failed, so that closing the consumer may take long."""
        with self._lock:
            return self._sent is not None or self._failing_since is not None

    def send(self, client: KafkaClient, consumer: Consumer | None) -> None:
        """Send the unconfirmed offsets, unless a commit is on its way or failed just now."""
        now = self._clock()
        with self._lock:
            late = self._sent is not None and now >= self._next_try
        if late:
            self._note(client, client.library.KafkaError(client.library.KafkaError._TIMED_OUT))
        with self._lock:
            if consumer is None or not self._saved or now < self._next_try:
                return
            self._sent = offsets = dict(self._saved)
            self._next_try = now + COMMIT_ANSWER_S
        try:
            consumer.commit(offsets=self._places(client, offsets), asynchronous=True)
        except client.library.KafkaException as cause:
            self._note(client, cause.args[0])

    def answered(
        self, client: KafkaClient, error: KafkaError | None, partitions: list[TopicPartition]
    ) -> None:
        """Note the answer to a commit. The client calls it inside of a poll."""
        errors = [error, *(one.error for one in partitions)]
        self._note(
            client,
            next((one for one in errors if one is not None), None),
            {(one.topic, one.partition): one.offset for one in partitions},
        )

    def _note(self, client: KafkaClient, error: KafkaError | None, taken: Offsets | None = None) -> None:
        now = self._clock()
        with self._lock:
            self._sent, since = None, self._failing_since
            if error is None:
                for one, offset in (taken or {}).items():
                    if self._saved.get(one) == offset:  # a newer one may have been added meanwhile
                        del self._saved[one]
                self._next_try, self._failing_since = -math.inf, None
            else:
                self._next_try = now + COMMIT_RETRY_S
                self._failing_since = now if since is None else since
        if error is None:
            if since is not None:
                logger.info("kafka: the broker takes the offsets of %s again", self._describe())
            return
        out_s, patience_s = now - (since or now), self._config.outage_timeout.total_seconds()
        said = f"kafka: the broker did not take the offsets of {self._describe()}"
        if not client.is_transient(error):
            self.failure = DataError(f"{said}: {error.str()}")
        elif out_s > patience_s:
            self.failure = DataError(
                f"{said} for {out_s:.0f} s (outage_timeout): {error.str()}. The last checkpoint has them: "
                "start the run again when the broker is back"
            )
        elif since is None:
            logger.warning(
                "%s: %s. The checkpoint has them; the commit is retried for up to %.0f s",
                said,
                error.str(),
                patience_s,
            )

    def flush(self, client: KafkaClient, consumer: Consumer) -> None:
        """Give the broker a moment to confirm all offsets, before the consumer is closed.

        Messages that arrive meanwhile are dropped: they were not yielded.
        """
        give_up = concurrency.monotonic() + CLOSE_S
        self.send(client, consumer)
        while self._saved and concurrency.monotonic() < give_up:
            consumer.poll(PAUSE_S / 4)
            self.send(client, consumer)  # those added while others were on their way, and those that failed
        if self._saved:
            logger.warning(
                "kafka: %s ends while offsets that a checkpoint contains are not committed: %s. A restart "
                "resumes from the checkpoint; dashboards show the last offsets that the broker took",
                self._describe(),
                ", ".join(f"{offset} of {partition_name(one)}" for one, offset in self._saved.items()),
            )

    def send_and_wait(self, client: KafkaClient, consumer: Consumer, offsets: Offsets) -> None:
        """Commit offsets for the next owner of their partitions, and only warn if that fails.

        Without them the next owner repeats some messages; it does not miss any.
        """
        try:
            places = self._places(client, offsets)
            for place in consumer.commit(offsets=places, asynchronous=False) or ():
                if place.error is not None:
                    raise client.library.KafkaException(place.error)
        except client.library.KafkaException as cause:
            logger.warning("kafka: the broker did not take the offsets of %s: %s", self._describe(), cause)

    def _places(self, client: KafkaClient, offsets: Offsets) -> list[TopicPartition]:
        return [client.at(partition, offset, self._config.run) for partition, offset in offsets.items()]
