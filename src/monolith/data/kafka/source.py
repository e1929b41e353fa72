"""The source: messages of topics, in order, from any offset on."""

from __future__ import annotations

import difflib
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from monolith.data.bad_values import BadTally
from monolith.data.format import BadRecord
from monolith.data.kafka.config import ByWorker, ClientLog, Decode, KafkaConfig, import_kafka
from monolith.data.kafka.messages import plain_strings
from monolith.data.kafka.positions import (
    Offsets,
    Partition,
    adopt_position,
    deal_position,
    empty_position,
    make_position,
    merge_positions,
    read_adopted,
    read_position,
    share_positions,
    waits_for_partitions,
)
from monolith.data.records import Records
from monolith.data.source import Position, Shard, ShardChoice, Source, WorkQueueSource
from monolith.errors import ConfigError, DataError, RestoreError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

    from monolith.observe import Metrics

PASSING = """
    _TRANSPORT _ALL_BROKERS_DOWN _TIMED_OUT _RESOLVE _WAIT_COORD _MAX_POLL_EXCEEDED _ASSIGNMENT_LOST
    LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION REPLICA_NOT_AVAILABLE BROKER_NOT_AVAILABLE
    COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS NOT_COORDINATOR REBALANCE_IN_PROGRESS
    ILLEGAL_GENERATION UNKNOWN_MEMBER_ID REQUEST_TIMED_OUT NETWORK_EXCEPTION OFFSET_NOT_AVAILABLE
    UNKNOWN_LEADER_EPOCH FENCED_LEADER_EPOCH KAFKA_STORAGE_ERROR
"""
"""Errors that brokers and groups recover from; the client keeps trying."""

_PATIENCE_WITH_TOPICS_S = 5.0
"""A broker that has just started may not know its topics for a moment."""
_ANSWER_S = 5.0
_PAUSE_S = 0.2
_LOOK_EVERY_S = 0.2
"""How long one poll may take if it may be interrupted."""
_REPORT_EVERY_S = 1.0
_COMMIT_ANSWER_S = 10.0
"""How long a commit is waited for before it is sent again. The client itself has been seen to hold one for
minutes after its broker was killed, and longer than the broker was away."""
_COMMIT_AGAIN_S = 1.0
"""How long to wait after a commit that failed."""
_REJOIN_S = 30.0
"""How long a client that lost its partitions is waited for at least, before another takes its place."""


T = TypeVar("T")

logger = logging.getLogger(__name__)

_TIMES = re.compile(r" \(after \d+ms in state [^()]*(?:\(s\)[^()]*)?\)")
"""What makes the same complaint look like another each time."""


class KafkaSource(Source, WorkQueueSource):
    """Yields the messages of topics as records, `poll_batch` messages at a time, each partition in order.

        source = KafkaSource(KafkaConfig(servers=("kafka:9092",), topics=("clicks",), group="train"), decode)
        for records in source: ...
        source.position()       # {"source": "kafka", "offsets": {"clicks": {"0": 17}}, ...}

    Connects on first use, and waits for a broker that is away. A message that the decoder cannot read is
    counted, passed to `on_bad` and dropped. Partitions that are added to a topic are noticed by a group
    within minutes, and by `ByWorker` when a new source is made; all their messages are new then.

    Each record counts exactly once because positions are offsets of messages *yielded*, never of messages
    fetched, and the checkpoint decides where reading resumes. Offsets committed to the broker only serve
    dashboards and partitions that move within a group. The offsets of a partition move through these:

        _restored ──assign──► _next ──yield──► _next + 1 ──revoke or loss──► _left ──assign again──► _next
                                └──commit(position)──► _saved ──sent──► _sent ──confirmed──► dropped
    """

    live = True
    chief_assigns = True

    def __init__(
        self,
        config: KafkaConfig,
        decode: Decode,
        *,
        on_bad: Callable[[BadRecord], None] | None = None,
        on_revoke: Callable[[Position], None] | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_bad: Is given each malformed message, with the offset as its place. What it raises ends the
                iteration, and the position stays before the batch.
            on_revoke: Is given the position of partitions that the group took away.
            metrics: Where to show lag per partition and count messages.
            clock: Seconds that only grow.

        Raises:
            MissingExtraError: confluent-kafka is not installed.
        """
        self.config = config
        given = config.assignment
        self._share = (
            ShardChoice("kafka") if given is None else ShardChoice("kafka", given.worker, given.num_workers)
        )
        self._kafka = import_kafka()
        self._decode = decode
        self._on_bad = on_bad
        self._on_revoke_hook = on_revoke
        self._clock = clock
        self._consumer: Consumer | None = None
        self._closed = False
        strategy = str(config.settings.get("partition.assignment.strategy", ""))
        self._incremental = "cooperative" in strategy or config.settings.get("group.protocol") == "consumer"

        self._partitions: dict[str, int] = {}
        """How many partitions each topic has."""
        self._next: Offsets = {}
        """Of the partitions that are ours: the first message that was not yielded."""
        self._restored: Offsets = {}
        """Where to begin with partitions that are not ours yet, by a position we were restored to."""
        self._adopted: Offsets | None = None
        """Where partitions end that were another worker's, where those are read; None for our own."""
        self._dealt = self._waits = False
        """Whether we read only what a position names; and whether we were dealt nothing yet."""
        self._interrupted = False
        self._left: Offsets = {}
        """Where we left partitions that the group took away."""
        self._known: dict[str, int] = {}
        """How many partitions each topic had when the position was saved."""
        self._disturbed: set[Partition] = set()
        """Partitions taken away during the current poll, which may still bring messages of them."""
        self._ahead = False
        """Whether the client may have returned messages that were not yielded."""
        self._joined = self._assigned = False
        """Whether we asked for partitions, and whether we have an answer, be it that there are none."""
        self._lost_at: float | None = None
        """When the group went on without us, until it gives us partitions again."""
        self._failure: Exception | None = None
        """What a callback raised. It is raised again when the client's own code is not in between."""
        self._commits = threading.Lock()  # guards _saved, _sent, _try_at, _refused_since: any thread commits
        self._saved: Offsets = {}
        """Offsets that a checkpoint holds and the broker has not confirmed."""
        self._sent: Offsets | None = None
        """Those of them that are on their way."""
        self._try_at = -math.inf
        """Before then nothing more is sent."""
        self._refused_since: float | None = None
        """When the first of the commits in a row failed that all did."""
        self._trouble_since: float | None = None
        self._reasons: dict[str, None] = {}
        """What the client has complained about, each complaint once."""

        self._dropped = BadTally()
        self._lag = self._count = self._count_bad = None
        self._reported = -math.inf
        if metrics is not None:
            labels = ("topic", "partition")
            self._lag = metrics.gauge("kafka_lag_messages", "Messages that were not yielded yet.", labels)
            self._count = metrics.counter("kafka_messages", "Messages that were yielded, or bad.", ("topic",))
            self._count_bad = metrics.counter(
                "kafka_bad_messages", "Messages that could not be read.", ("topic",)
            )

    def read_shard(self, share: Shard) -> None:
        """Read the partitions that are fixed for one worker; those that `assignment` names, if it does."""
        self._share.choose(share)

    def __iter__(self) -> Iterator[Records]:
        """Yield records until the stream timeout, or for ever.

        Raises:
            DataError: No broker answers, a topic is not there, or messages that were not read yet are gone.
            RestoreError: The position names messages that are not there.
        """
        self._start()
        quiet_since = self._clock()
        while not self._interrupted:
            records = self._read(self._patience_s(quiet_since))
            self._report()
            self._commit_saved()  # if the last attempt failed
            if records is not None:
                if records.size:
                    yield records
                quiet_since = self._clock()  # what the caller did meanwhile was not silence
            elif self._ended(quiet_since):
                self._report(now=True)
                return
            else:
                self._rejoin()

    def position(self) -> Position:
        """Return, by topic and partition, the offset of the first message that was not yielded.

        Connects if need be: "latest" must mean the same message now and after a restart.
        """
        self._settle()
        if self.config.assignment is not None and not self._closed and not self._dealt:
            self._start()
        found = make_position(self._partitions or self._known, {**self._restored, **self._next})
        if self._adopted is not None:
            found["adopted"] = make_position({}, self._adopted)["offsets"]
        return found

    def restore(self, position: Position) -> None:
        """Go to a position, which may be that of several workers merged.

        Raises:
            RestoreError: It is of another kind of source or of other topics, or names a message that is not
                there. That it misses a partition which this worker reads shows when reading begins.
            DataError: No broker answers.
        """
        known, offsets = read_position(position)
        if strangers := {topic for topic, _ in offsets} - set(self.config.topics):
            raise RestoreError(
                f"kafka: the position is of topics {', '.join(sorted(strangers))}, which are not read here; "
                f"this source reads {', '.join(self.config.topics)}"
            )
        self._connect()
        for partition, offset in offsets.items():
            self._check_there(partition, offset)
        self._known, self._left = known, {}
        self._adopted = read_adopted(position)
        self._waits, self._interrupted = waits_for_partitions(position), False
        if self.config.assignment is not None:
            self._restored, self._next, self._joined = offsets, {}, False
        else:
            self._next.update({one: offset for one, offset in offsets.items() if one in self._next})
            self._restored = {one: offset for one, offset in offsets.items() if one not in self._next}
            self._ahead = True

    @property
    def work_queue(self) -> WorkQueueSource | None:
        """This source, whose partitions the chief assigns to workers; None if `assignment` fixes them."""
        return None if self._share.is_fixed else self

    def defer_to_chief(self) -> None:
        self._dealt = True

    def give_back(self, position: Position) -> Position:
        """Return the position of a worker without partitions: the chief reassigns those it had."""
        return empty_position(position)

    def interrupt(self) -> None:
        self._interrupted = True

    def collect(self, positions: Sequence[Position]) -> Position:
        """Return all partitions there are now, those that no position knows from their start on.

        Raises:
            RestoreError: A position is of another kind, or none has a partition that was there before.
            DataError: No broker answers.
        """
        self._known, offsets = read_position(merge_positions(positions))
        self._connect()
        there = ((topic, one) for topic, count in self._partitions.items() for one in range(count))
        new = {one: self._first(one) for one in there if one not in offsets}
        return make_position(self._partitions, {**offsets, **new})

    def reassign(self, positions: Sequence[Position], workers: int) -> list[Position]:
        return deal_position(merge_positions(positions), workers)

    def redistribute(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Return the offsets of all partitions as positions of another number of workers.

        Raises:
            RestoreError: One is of another kind; or `assignment` counts otherwise.
        """
        merged = merge_positions(positions)
        if workers == 1:
            return [merged]
        self._settle()
        assignment = self.config.assignment
        if assignment is None or assignment.num_workers != workers:
            raise RestoreError(f"kafka: {self._described()} counts workers otherwise; this run has {workers}")
        each = [ByWorker(worker=worker, num_workers=workers) for worker in range(workers)]
        return share_positions(merged, [partial(self._is_read, by) for by in each])

    def _is_read(self, assignment: ByWorker, partition: Partition) -> bool:
        topic, number = partition
        known = topic in self.config.topics  # restoring refuses one that is not
        return assignment.reads(self.config.topics.index(topic) if known else 0, number)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        """Return a position with which the partitions of another worker are read.

        Raises:
            RestoreError: It is of another kind; or a group shares out partitions.
        """
        self._settle()
        if self.config.assignment is None:
            raise RestoreError(
                "what a stage on top of a group of Kafka held back cannot be read by others; give the "
                "KafkaSource an assignment"
            )
        return adopt_position(position, end)

    def commit(self, position: Position) -> None:
        """Tell the broker of a position, so that dashboards show how far the group has come.

        Nothing is read from there but by a group in which a partition changes hands. So it does not wait for
        the broker: while that is away the newest offsets are sent again and again, and training continues.
        If the broker does not take them for `outage_timeout`, or refuses them for good, reading fails.

        Raises:
            DataError: No broker ever answered.
        """
        _, offsets = read_position(position)
        mine = {one: offset for one, offset in offsets.items() if one in self._next}
        chosen = offsets if self.config.assignment is not None else mine
        if not chosen:
            return
        self._connect()
        with self._commits:
            self._saved.update(chosen)
        self._commit_saved()

    def lag(self) -> dict[Partition, int]:
        """Return, of each partition that is ours, how many messages wait in it, as of the last fetch."""
        if self._consumer is None:
            return {}
        lags = {}
        for partition, offset in self._next.items():
            _, high = self._consumer.get_watermark_offsets(self._at(partition), cached=True)
            if high >= 0:
                lags[partition] = max(high - offset, 0)
        return lags

    def reject(self, bad: Sequence[BadRecord]) -> None:
        """Count messages that could be read and are bad all the same, and hand them to `on_bad`."""
        if self._count_bad is not None:
            self._count_bad.inc(len(bad), topic=",".join(self.config.topics))
        if self._on_bad is not None:
            for record in bad:
                self._on_bad(record)

    def bad_records(self) -> dict[str, int]:
        return self._dropped.described()

    def close(self) -> None:
        """Leave the group; the next owner of its partitions resumes from the committed offsets. The position
        remains.

        What was yielded since the last `commit` may not have been trained, or not been saved: it comes again.
        Only offsets that a checkpoint holds are committed, if the broker takes them now.
        """
        self._closed = True
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._flush(consumer)
            self._close_client(consumer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Connecting

    def _settle(self) -> None:
        """See to it that this worker has fixed partitions, where there are others."""
        share = self._share.settle()
        if share.workers > 1 and self.config.assignment is None:
            assignment = ByWorker(worker=share.worker, num_workers=share.workers)
            self.config = replace(self.config, assignment=assignment)

    def _connect(self) -> Consumer:
        """Return the client, once a broker has answered and all topics are known."""
        if self._consumer is not None:
            return self._consumer
        if self._closed:
            raise DataError(f"kafka: the source of {self._described()} was closed")
        self._settle()
        settings: dict[str, Any] = {
            **self.config.client_settings,
            "bootstrap.servers": ",".join(self.config.servers),
            "group.id": self.config.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": False,
            "error_cb": self._complain,
            "on_commit": self._on_commit,
        }
        try:
            consumer = self._kafka.Consumer(settings, logger=ClientLog(logger))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause
        try:
            self._partitions = self._find_topics(consumer)
        except BaseException:
            consumer.close()
            raise
        self._consumer = consumer
        return self._consumer

    def _find_topics(self, consumer: Consumer) -> dict[str, int]:
        """Return how many partitions each topic has."""
        begin, answered = self._clock(), math.inf
        patience_s = self.config.connect_timeout.total_seconds()
        # Before anything is assigned a poll brings no message, but lets the client complain.
        pause = consumer.poll if self._consumer is None else time.sleep
        while True:
            found: dict[str, int] = {}
            try:
                for topic in self.config.topics:
                    timeout_s = min(_ANSWER_S, max(patience_s, _PAUSE_S))
                    found[topic] = len(
                        consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions
                    )
            except self._kafka.KafkaException as cause:
                self._complain(cause.args[0])
                pause(_PAUSE_S)
                if self._clock() - begin > patience_s:
                    raise self._unreachable(patience_s) from cause
                continue
            missing = [topic for topic, partitions in found.items() if not partitions]
            if not missing:
                return found
            answered = min(answered, self._clock())
            if self._clock() - answered > min(_PATIENCE_WITH_TOPICS_S, patience_s):
                raise self._unknown(missing[0], consumer)
            pause(_PAUSE_S)

    def _unknown(self, topic: str, consumer: Consumer) -> DataError:
        """Return the error for a topic that is not there, with the one that may be meant."""
        try:
            similar = difflib.get_close_matches(topic, consumer.list_topics(timeout=_ANSWER_S).topics, 1)
        except self._kafka.KafkaException:
            similar = []
        return DataError(
            f"kafka: {self._servers()} has no topic {topic!r}, or hides it from this client; "
            + (f"did you mean {similar[0]!r}?" if similar else "create it first")
        )

    def _start(self) -> None:
        """Begin to read, where that has not happened."""
        consumer = self._connect()
        if self._joined:
            return
        if self.config.assignment is not None:
            self._assign(self._own())
            self._joined, self._assigned = True, not self._waits
            return
        self._joined = True
        consumer.subscribe(
            list(self.config.topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def _rejoin(self) -> None:
        """Take a new client where the old one has been given nothing since it lost what it had.

        After an outage a client sometimes never asks its group again, though the broker is back.
        """
        if self._lost_at is None:
            return
        waited_s = self._clock() - self._lost_at
        session_s = float(self.config.settings.get("session.timeout.ms", 45_000)) / 1000
        if waited_s < max(_REJOIN_S, 3 * session_s) or not self._answers():
            return
        logger.warning(
            "kafka: %s was given no partitions for %.0f s and rejoins the group", self._described(), waited_s
        )
        stuck, self._consumer = self._consumer, None
        self._joined = self._ahead = False
        self._lost_at = self._clock()
        if stuck is not None:
            self._close_client(stuck, wait_s=0.0)
        self._start()

    def _own(self) -> list[Partition]:
        """Return the partitions of this worker."""
        assignment = self.config.assignment
        assert assignment is not None
        if self._adopted is not None or self._dealt:
            return sorted({*self._restored, *self._next, *self._left})
        return [
            (topic, partition)
            for number, topic in enumerate(self.config.topics)
            for partition in range(self._partitions[topic])
            if assignment.reads(number, partition)
        ]

    def _assign(self, partitions: Sequence[Partition]) -> None:
        """Read these from where they were left."""
        for topic, number in partitions:  # one may have been added since we asked
            self._partitions[topic] = max(self._partitions[topic], number + 1)
        begin = self._begin(partitions)
        self._next.update(begin)
        for partition in begin:
            self._restored.pop(partition, None)
            self._left.pop(partition, None)
        consumer = self._connect()
        places = [self._at(*item) for item in begin.items()]
        if self._incremental and self.config.assignment is None:
            consumer.incremental_assign(places)
        else:
            consumer.assign(places)
        if self.config.assignment is None and begin:
            self._commit_or_warn(consumer, begin)  # an older offset there would mislead the next owner

    def _begin(self, partitions: Sequence[Partition]) -> Offsets:
        """Return where to begin to read each partition."""
        committed = self._committed(partitions) if self.config.assignment is None else {}
        begin: Offsets = {}
        for one in partitions:
            offset, run = committed.get(one, (-1, ""))
            # In order of trust: what this process yielded itself; the restored checkpoint, unless a member of
            # the same run has committed since; the group's committed offset; the configured start.
            if one in self._left:
                begin[one] = max(self._left[one], offset)
            elif one in self._restored and not (offset >= 0 and run and run == self.config.run):
                begin[one] = self._restored[one]
            elif offset >= 0:
                begin[one] = offset
            else:
                begin[one] = self._first(one)
                continue
            self._check_there(one, begin[one])
        return begin

    def _first(self, partition: Partition) -> int:
        """Return where to begin with a partition that no position knows."""
        topic, number = partition
        low, high = self._ends(partition)
        if topic not in self._known:
            return low if self.config.start == "earliest" else high
        if number < self._known[topic] and self.config.assignment is not None:
            raise RestoreError(
                f"kafka: the position has no offset for {_name(partition)}, which {self._described()} reads. "
                "If there were other workers when it was saved, restore from the positions of all of them, "
                "merged by merge_positions"
            )
        return low  # the partition was added since: all of it is new

    def _check_there(self, partition: Partition, offset: int) -> None:
        low, high = self._ends(partition)
        if not low <= offset <= high:
            happened = (
                "they were deleted since" if offset < low else "the topic was recreated or lost its newest"
            )
            raise RestoreError(
                f"kafka: cannot go to offset {offset} of {_name(partition)}: the broker has messages "
                f"{low} to {high - 1}; {happened}. Restore another position, or start without one"
            )

    def _ends(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset of a partition and the one after its last."""
        topic, number = partition
        if number >= self._partitions.get(topic, 0):
            raise RestoreError(
                f"kafka: there is no {_name(partition)}; it has {self._partitions.get(topic, 0)} partitions"
            )
        consumer = self._connect()
        ends = self._insist(
            f"the offsets of {_name(partition)}",
            lambda: consumer.get_watermark_offsets(self._at(partition), timeout=_ANSWER_S, cached=False),
        )
        return int(ends[0]), int(ends[1])

    def _committed(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, str]]:
        """Return what the group has committed: offsets, and the run that did."""
        consumer = self._connect()
        found = self._insist(
            f"the committed offsets of group {self.config.group!r}",
            lambda: consumer.committed([self._at(one) for one in partitions], timeout=_ANSWER_S),
        )
        return {
            (one.topic, one.partition): (one.offset, one.metadata or "") for one in found if one.offset >= 0
        }

    def _insist(self, what: str, ask: Callable[[], T | None]) -> T:
        """Ask the broker until it answers; give up after `connect_timeout`."""
        begin = self._clock()
        while True:
            try:
                answer = ask()
                if answer is not None:
                    return answer
                reason: object = "no answer"
            except self._kafka.KafkaException as cause:
                reason = cause
            if self._clock() - begin > self.config.connect_timeout.total_seconds():
                raise DataError(
                    f"kafka: asked {self._servers()} for {what} for "
                    f"{self.config.connect_timeout.total_seconds():g} s, without success: {reason}"
                )
            time.sleep(_PAUSE_S)

    # Reading

    def _read(self, timeout_s: float) -> Records | None:
        """Return the records of the next messages, which now count as yielded; None without a message."""
        consumer = self._connect()
        if self._ahead:
            self._rewind(consumer)
        self._ahead = True  # until every message of the client is accounted for
        try:
            messages = consumer.consume(1, timeout_s)
            if messages and self.config.poll_batch > 1:
                messages += consumer.consume(
                    self.config.poll_batch - 1, self.config.batch_wait.total_seconds()
                )
        except self._kafka.KafkaException as cause:
            raise DataError(f"kafka: the client of {self._described()} failed: {cause}") from cause
        if self._failure is not None:
            raise self._give_up(self._failure)
        # A poll may run callbacks that take partitions away and, in the same call, return messages of them.
        # Those are dropped: their next owner yields them. If the partition came back within the poll, it is
        # ours again, and `torn` makes the client seek back to the first message that was not yielded.
        disturbed, self._disturbed = self._disturbed, set()
        good: list[Message] = []
        ahead, torn = dict(self._next), False
        for message in messages:
            if (error := message.error()) is not None:
                self._judge(error, message)
                continue
            partition, offset = _partition(message), message.offset() or 0
            if partition in disturbed:
                torn = torn or partition in ahead
            elif ahead.get(partition, math.inf) <= offset < self._ends_at(partition):
                ahead[partition] = offset + 1
                good.append(message)
        # Decode first: if it raises, the position stays before the batch and nothing is lost.
        records = self._open(good) if good else None
        self._next = ahead
        self._ahead = torn  # dropped messages are still ours: the client must seek back to them
        return records

    def _ends_at(self, partition: Partition) -> float:
        """Return the first offset that is not to be read."""
        return math.inf if self._adopted is None else self._adopted.get(partition, math.inf)

    def _open(self, messages: list[Message]) -> Records:
        """Decode messages."""
        self._trouble_since = None
        full = messages
        bad: list[tuple[Message, str]] = []
        payloads = [message.value() for message in messages]
        if None in payloads:
            full = [message for message in messages if message.value() is not None]
            bad = [(message, "it has no payload") for message in messages if message.value() is None]
        try:
            records, unread = self._decode([payload for payload in payloads if payload is not None])
        except Exception as error:
            error.add_note(
                f"while decoding messages of Kafka, {_place(messages[0])} to {_place(messages[-1])}"
            )
            raise
        bad += [(full[one.place], one.reason) for one in unread]
        for message, reason in bad:
            self._dropped.add(reason)
            if self._count_bad is not None:
                self._count_bad.inc(topic=str(message.topic()))
            if self._on_bad is not None:
                place, payload = f"{_place(message)}: {reason}", message.value() or b""
                self._on_bad(BadRecord(message.offset() or 0, place, payload))
        if self._count is not None:
            for topic, many in Counter(message.topic() for message in messages).items():
                self._count.inc(many, topic=str(topic))
        return records

    def _rewind(self, consumer: Consumer) -> None:
        """Make the client go on with the first message that was not yielded."""
        places = [self._at(*item) for item in self._next.items()]
        if not places:
            return
        if self._incremental and self.config.assignment is None:
            consumer.incremental_unassign(places)
            consumer.incremental_assign(places)
        else:
            consumer.assign(places)

    def _patience_s(self, quiet_since: float) -> float:
        """Return how long the next poll may take."""
        poll_s = self.config.poll_timeout.total_seconds()
        if self._dealt:
            poll_s = min(poll_s, _LOOK_EVERY_S)
        left_s = self._silence_s() - (self._clock() - quiet_since)
        return min(poll_s, left_s) if left_s > 0 else poll_s

    def _silence_s(self) -> float:
        """Return how long a silence ends the source."""
        if self.config.stream_timeout is None:
            return math.inf
        return max(self.config.stream_timeout, self.config.poll_timeout).total_seconds()

    def _ended(self, quiet_since: float) -> bool:
        """Say whether a silence is the end, and not a broker out of reach or a group still sharing out."""
        quiet_s = self._clock() - quiet_since
        over = quiet_s >= self._silence_s()
        if (over or self._trouble_since is not None) and not self._answers():
            if self._trouble_since is None:
                self._trouble_since = self._clock()
            out_s = self._clock() - self._trouble_since
            if out_s > self.config.outage_timeout.total_seconds():
                raise self._unreachable(out_s)
            return False
        if over and not self._assigned:
            if self._left and not self._unread_of_lost():
                return True  # other members of the group have it, and have read it
            if quiet_s > self._silence_s() + self.config.outage_timeout.total_seconds():
                raise DataError(f"kafka: {self._described()} was given no partitions within {quiet_s:.0f} s")
            return False
        # A fetch may be slower than a short timeout; but not every offset has a message, so do not insist.
        return over and (quiet_s > self._silence_s() + _ANSWER_S or not self._behind())

    def _unread_of_lost(self) -> bool:
        """Ask the broker whether partitions that the group took away have messages that no member read."""
        committed = self._committed(list(self._left))
        return any(
            self._ends(one)[1] > max(offset, committed.get(one, (-1, ""))[0])
            for one, offset in self._left.items()
        )

    def _behind(self) -> bool:
        """Ask the broker whether there is more."""
        return any(self._ends(partition)[1] > offset for partition, offset in self._next.items())

    def _answers(self) -> bool:
        """Ask a broker for a sign of life."""
        try:
            self._connect().list_topics(self.config.topics[0], timeout=_ANSWER_S)
        except self._kafka.KafkaException as cause:
            self._complain(cause.args[0])
            return False
        self._trouble_since = None
        self._reasons.clear()
        return True

    def _report(self, *, now: bool = False) -> None:
        """Show the lag, every second."""
        if self._lag is None or not (now or self._clock() - self._reported >= _REPORT_EVERY_S):
            return
        self._reported = self._clock()
        for (topic, partition), lag in self.lag().items():
            self._lag.set(lag, topic=topic, partition=str(partition))

    # The group gives and takes. These are called by the client, inside of a poll or of `close`.

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return
        try:
            self._assign([(one.topic, one.partition) for one in partitions])
            # A broker that has just restarted may show topics without partitions for a moment, and the group
            # then deals out none. After a loss that is no answer: the records that were left would be taken
            # for the end of the data.
            if partitions or self._lost_at is None:
                self._assigned, self._lost_at = True, None
        except Exception as error:
            self._failure = error

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return
        left = self._leave(partitions)
        if left and not self._closed:
            self._commit_or_warn(consumer, left)
        self._hand_back(left)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Note partitions that another member has already, without having learnt how far we were."""
        if consumer is not self._consumer:
            return
        left = self._leave(partitions)
        self._assigned, self._lost_at = False, self._clock()
        if left:
            names = ", ".join(_name(one) for one in left)
            logger.warning("kafka: %s lost %s without a chance to say where it was", self._described(), names)
        self._hand_back(left)

    def _leave(self, partitions: list[TopicPartition]) -> Offsets:
        """Drop partitions, with whatever was fetched of them and not yielded; return where they were left."""
        if self._closed:
            return {}  # the position of a closed source can still be asked for
        left = {
            (one.topic, one.partition): self._next.pop((one.topic, one.partition))
            for one in partitions
            if (one.topic, one.partition) in self._next
        }
        self._disturbed |= left.keys()
        with self._commits:  # their next owner commits for itself
            for one in left:
                self._saved.pop(one, None)
        self._left.update(left)
        if self._lag is not None:
            for topic, partition in left:
                self._lag.set(math.nan, topic=topic, partition=str(partition))
        return left

    def _hand_back(self, left: Offsets) -> None:
        if left and self._on_revoke_hook is not None:
            try:
                self._on_revoke_hook(make_position(self._partitions, left))
            except Exception as error:
                self._failure = error

    def _give_up(self, failure: Exception) -> Exception:
        """Drop the client, whose assignment is not what it should be; another iteration makes a new one.

        Commits nothing: the records since the last checkpoint are trained only if the caller continues.
        """
        self._failure = None
        consumer, self._consumer = self._consumer, None
        self._left.update(self._next)
        self._next, self._joined, self._assigned, self._ahead = {}, False, False, False
        self._lost_at = None
        if consumer is not None:
            self._close_client(consumer)
        return failure

    # Talking to the client

    def _at(self, partition: Partition, offset: int | None = None) -> TopicPartition:
        """Return a partition, or a place in it, as the client names it."""
        place = partition if offset is None else (*partition, offset)
        at: TopicPartition = self._kafka.TopicPartition(*place)
        return at

    def _commit_saved(self, consumer: Consumer | None = None) -> None:
        """Send what a checkpoint holds and the broker has not confirmed, unless that is on its way."""
        consumer = consumer or self._consumer
        now = self._clock()
        with self._commits:
            late = self._sent is not None and now >= self._try_at
        if late:
            self._note_commit(self._kafka.KafkaError(self._kafka.KafkaError._TIMED_OUT))
        with self._commits:
            if consumer is None or not self._saved or now < self._try_at:
                return
            self._sent = offsets = dict(self._saved)
            self._try_at = now + _COMMIT_ANSWER_S
        try:
            consumer.commit(offsets=self._places(offsets), asynchronous=True)
        except self._kafka.KafkaException as cause:
            self._note_commit(cause.args[0])

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Hear of a commit. The client calls it inside of a poll."""
        errors = [error, *(one.error for one in partitions)]
        self._note_commit(
            next((one for one in errors if one is not None), None),
            {(one.topic, one.partition): one.offset for one in partitions},
        )

    def _note_commit(self, error: KafkaError | None, taken: Offsets | None = None) -> None:
        """Note the outcome of a commit; the next read raises a permanent failure."""
        now = self._clock()
        with self._commits:
            self._sent, since = None, self._refused_since
            if error is None:
                for one, offset in (taken or {}).items():
                    if self._saved.get(one) == offset:
                        del self._saved[one]
                self._try_at, self._refused_since = -math.inf, None
            else:
                self._try_at = now + _COMMIT_AGAIN_S
                self._refused_since = now if since is None else since
        if error is None:
            if since is not None:
                logger.info("kafka: the broker takes the offsets of %s again", self._described())
            return
        out_s, patience_s = now - (since or now), self.config.outage_timeout.total_seconds()
        said = f"kafka: the broker did not take the offsets of {self._described()}"
        if not self._passes(error):
            self._failure = DataError(f"{said}: {error.str()}")
        elif out_s > patience_s:
            self._failure = DataError(
                f"{said} for {out_s:.0f} s (outage_timeout): {error.str()}. The last checkpoint holds them: "
                "start the run again when the broker is back"
            )
        elif since is None:
            logger.warning(
                "%s: %s. The checkpoint holds them; the commit is retried for up to %.0f s",
                said,
                error.str(),
                patience_s,
            )

    def _close_client(self, consumer: Consumer, wait_s: float = _ANSWER_S) -> None:
        """Close a client, and do not wait for long if its broker is away.

        It waits for commits that are on their way, and has been seen to wait for ever without a broker.
        """
        with self._commits:
            troubled = self._sent is not None or self._refused_since is not None
        closing = threading.Thread(target=consumer.close, name="kafka-close", daemon=True)
        closing.start()
        closing.join(wait_s if troubled or not wait_s else None)

    def _flush(self, consumer: Consumer) -> None:
        """Give the broker a moment to take what a checkpoint holds. Messages that come meanwhile are dropped:
        they were not yielded."""
        give_up = time.monotonic() + _COMMIT_ANSWER_S
        self._commit_saved(consumer)
        while self._saved and time.monotonic() < give_up:
            consumer.poll(_PAUSE_S / 4)
            self._commit_saved(consumer)  # those saved while others were on their way, and those that failed
        if self._saved:
            logger.warning(
                "kafka: %s ends while offsets that a checkpoint holds are not committed: %s. A restart goes "
                "on from the checkpoint; dashboards show the last offsets that the broker took",
                self._described(),
                ", ".join(f"{offset} of {_name(one)}" for one, offset in self._saved.items()),
            )

    def _places(self, offsets: Offsets) -> list[TopicPartition]:
        return [
            self._kafka.TopicPartition(*partition, offset, metadata=self.config.run)
            for partition, offset in offsets.items()
        ]

    def _commit(self, consumer: Consumer, offsets: Offsets) -> None:
        for place in consumer.commit(offsets=self._places(offsets), asynchronous=False) or ():
            if place.error is not None:
                raise self._kafka.KafkaException(place.error)

    def _commit_or_warn(self, consumer: Consumer, offsets: Offsets) -> None:
        """Note offsets for the next owner. Without them it repeats some messages; it does not miss any."""
        try:
            self._commit(consumer, offsets)
        except self._kafka.KafkaException as cause:
            logger.warning("kafka: the broker did not take the offsets of %s: %s", self._described(), cause)

    def _complain(self, error: KafkaError) -> None:
        """Remember what the client said went wrong. It keeps trying by itself."""
        self._reasons.setdefault(_TIMES.sub("", str(error.str())))
        if self._trouble_since is None:
            self._trouble_since = self._clock()

    def _passes(self, error: KafkaError) -> bool:
        """Return whether brokers and groups recover from an error."""
        kinds = self._kafka.KafkaError
        return error.code() in {getattr(kinds, name) for name in PASSING.split() if hasattr(kinds, name)}

    def _judge(self, error: KafkaError, message: Message) -> None:
        """Decide on an error that came in place of a message: does it pass, or is it the end?"""
        kinds = self._kafka.KafkaError
        if self._passes(error):
            self._complain(error)
        elif error.code() in (kinds.UNKNOWN_TOPIC_OR_PART, kinds._UNKNOWN_TOPIC, kinds._UNKNOWN_PARTITION):
            self._find_topics(self._connect())
        elif error.code() in (kinds._AUTO_OFFSET_RESET, kinds.OFFSET_OUT_OF_RANGE):
            raise DataError(
                f"kafka: messages of {_name(_partition(message))} that {self._described()} has not read are "
                f"gone from the broker: {error.str()}. It read too slowly for the retention of the topic, or "
                "the topic was recreated; to continue with what is left, start without a position"
            )
        else:
            raise DataError(
                f"kafka: cannot read {message.topic() or 'the topics'} as {self._described()}: {error.str()}"
            )

    def _unreachable(self, tried_s: float) -> DataError:
        reasons = "; ".join(self._reasons) or "nothing"
        return DataError(
            f"kafka: no broker of {self._servers()} has answered {self._described()} for {tried_s:.0f} s; "
            f"the client said: {reasons}. Check the addresses, the network and the security settings"
        )

    def _servers(self) -> str:
        return ", ".join(self.config.servers)

    def _described(self) -> str:
        """Return the group, worker and topics, for messages."""
        who = f"group {self.config.group!r}"
        if self.config.assignment is not None:
            who += f" (worker {self.config.assignment.worker} of {self.config.assignment.num_workers})"
        return f"{who} on {', '.join(self.config.topics)}"


def _partition(message: Message) -> Partition:
    """Return where a message came from. Only an error may come from nowhere."""
    return message.topic() or "", message.partition() or 0


def _place(message: Message) -> str:
    return f"{_name(_partition(message))} at offset {message.offset()}"


def _name(partition: Partition) -> str:
    return f"partition {partition[1]} of topic {partition[0]!r}"


def create_plain_kafka_dataset(config: KafkaConfig, *, metrics: Metrics | None = None) -> KafkaSource:
    """Return a source of raw strings: one record per message, its bytes in the column `value`."""
    return KafkaSource(config, plain_strings, metrics=metrics)
