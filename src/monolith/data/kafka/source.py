"""The Kafka source: messages of topics, in order, from any offset on.

Partitions reach a source in one of three ways:

    fixed     `assignment`, or a shard of the run: partition p of topic t belongs to worker (p + t) mod n
    by chief  `defer_to_chief`: the source reads the partitions of its position; the chief reassigns them
              while all workers are quiesced, so each record is read by exactly one worker
    by group  outside of a run: the brokers assign and revoke them inside of a poll (`_on_assign`,
              `_on_revoke`, `_on_lost`)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, repeat
from operator import is_not, methodcaller
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from monolith import concurrency
from monolith.data.bad_values import BadTally
from monolith.data.files.reading_ahead import default_threads
from monolith.data.format import BadRecord
from monolith.data.kafka.client import ANSWER_S, CLOSE_S, KafkaClient, OffsetCommits, partition_name
from monolith.data.kafka.config import ByWorker, Decode, KafkaConfig
from monolith.data.kafka.messages import plain_strings
from monolith.data.kafka.positions import (
    Offsets,
    Partition,
    adopt_position,
    divide_position,
    empty_position,
    make_position,
    merge_positions,
    read_adopted,
    read_position,
    split_position,
    waits_for_partitions,
)
from monolith.data.records import Records
from monolith.data.source import Position, Shard, ShardChoice, Source, WorkQueueSource
from monolith.errors import DataError, RestoreError, StoppedWhileWaitingError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

    from monolith.observe import Metrics

_POLL_INTERRUPTIBLE_S = 0.2
"""How long one poll may take if it may be interrupted."""
_REPORT_EVERY_S = 1.0
_LOOK_FOR_PARTITIONS_EVERY_S = 60.0
_REJOIN_S = 30.0
"""How long to wait, at least, for a client that lost its partitions, before another one replaces it."""

logger = logging.getLogger(__name__)


class KafkaSource(Source, WorkQueueSource):
    """Yields the messages of topics as records, `poll_batch` messages at a time, each partition in order.

    Connects on first use, and waits for a broker that is away. A message that the decoder cannot read is
    counted, passed to `on_bad` and dropped. Partitions that are added to a topic are noticed by a group
    within minutes, and by `ByWorker` when a new source is made; all their messages are new then.

    A position is a dict such as {"source": "kafka", "offsets": {"clicks": {"0": 17}}, ...}.

    Each record counts exactly once because positions are offsets of messages *yielded*, never of messages
    fetched, and the checkpoint decides where reading resumes. Offsets committed to the broker only serve
    dashboards and partitions that move within a group: the next member starts with the first message that
    the caller has not committed. Messages that were yielded since then come again. The offsets of a partition
    move through these:

        _restored ──assign──► _next ──yield──► _next + 1 ──revoke or loss──► _left ──assign again──► _next
                                └──commit(position)──► OffsetCommits

    Examples:
        >>> import torch
        >>> from monolith import KafkaConfig, KafkaSource
        >>> from monolith.data import JsonMessages
        >>> config = KafkaConfig(servers=("kafka:9092",), topics=("clicks",), group="train")
        >>> source = KafkaSource(config, JsonMessages({"user": torch.int64}))  # connects on first use
        >>> source.live
        True
    """

    live = True
    sharded_by_key = True
    chief_assigns = True

    def __init__(
        self,
        config: KafkaConfig,
        decode: Decode,
        *,
        on_bad: Callable[[BadRecord], None] | None = None,
        on_revoke: Callable[[Position], None] | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
        threads: int | None = None,
    ) -> None:
        """
        Args:
            on_bad: Is given each malformed message, with the offset as its place, by one thread at a time.
                What it raises ends the iteration, and the position stays before the batch.
            on_revoke: Is given the position of partitions that the group takes away. One that saves its state
                and calls `commit` with this position has no message come again. If the group has taken them
                away already, because this process was silent for too long, that commit has no effect.
            metrics: Where to show lag per partition and count messages.
            clock: Seconds that only grow.
            threads: How many make batches ahead if `to_batches` does not say; see `batch_threads`. None takes
                three of four cores of the machine, up to 16, as `data.threads` of a config does.

        Raises:
            MissingExtraError: confluent-kafka is not installed.
        """
        self.config = config
        given = config.assignment
        self._choice = (
            ShardChoice("kafka") if given is None else ShardChoice("kafka", given.worker, given.num_workers)
        )
        self._shard_is_chosen = False
        """Whether a run says which shard to read, so that its checkpoints decide and not the group."""
        self._commits = OffsetCommits(config, self._described, clock)
        self._client = KafkaClient(config, self._described, self._on_commit, clock, stopped=self._is_stopped)
        self._decode = decode
        self._on_bad = on_bad
        self._on_revoke_hook = on_revoke
        self._clock = clock
        self._threads = default_threads() if threads is None else threads
        self._stop = concurrency.Event()
        """Set to read no more in place of waiting."""
        self._polling = concurrency.RLock()
        """Held during a poll: a client must not be closed by another thread meanwhile."""
        self._telling = concurrency.Lock()
        """Held while `on_bad` is called: by the thread that reads, and by the one that makes batches."""
        self._closed = False
        strategy = str(config.settings.get("partition.assignment.strategy", ""))
        self._incremental = "cooperative" in strategy or config.settings.get("group.protocol") == "consumer"

        # Offsets, by partition. A partition is in at most one of the first three.
        self._next: Offsets = {}
        """Of assigned partitions: the first message that was not yielded."""
        self._restored: Offsets = {}
        """Of partitions that are not assigned yet: where a restored position starts."""
        self._left: Offsets = {}
        """Of partitions that the group revoked: the first message that was not yielded."""
        self._adopted: Offsets | None = None
        """Of partitions of a former worker: where they end; None if the partitions are this worker's own."""

        self._by_chief = self._unassigned = False
        """Whether only the partitions of a position are read; and whether the chief has assigned none yet."""
        self._interrupted = False
        self._back_at = -math.inf
        """When the broker answered again after the last outage; infinity while it does not answer."""
        self._looked_at = clock()
        """When new partitions were last looked for."""
        self._known: dict[str, int] = {}
        """How many partitions each topic had when the position was saved."""
        self._disturbed: set[Partition] = set()
        """Partitions revoked during the current poll, which may still return messages of them."""
        self._ahead = False
        """Whether the client may have returned messages that were not yielded."""
        self._joined = self._assigned = False
        """Whether the source has asked for partitions, and whether it got an answer, even if there are
        none."""
        self._lost_at: float | None = None
        """When the group continued without this member, until it assigns partitions again."""
        self._failure: Exception | None = None
        """An error of a callback. It is raised after the poll, since the client would swallow it."""
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

    def read_until(self, stop: concurrency.Event) -> None:
        self._stop = stop

    def _is_stopped(self) -> bool:
        return self._stop.is_set()

    def read_shard(self, shard: Shard) -> None:
        """Read the partitions that are fixed for one worker; those that `assignment` names, if it does."""
        self._choice.choose(shard)
        self._shard_is_chosen = True

    def __iter__(self) -> Iterator[Records]:
        """Yield records until the stream timeout, or for ever.

        Raises:
            DataError: No broker answers, a topic is not there, or messages that were not read yet are gone.
            RestoreError: The position names messages that are not there.
        """
        with suppress(StoppedWhileWaitingError):
            yield from self._until_stopped()

    def _until_stopped(self) -> Iterator[Records]:
        self._start()
        quiet_since = self._clock()
        while not self._interrupted and not self._stop.is_set():
            records = self._read(self._patience_s(quiet_since))
            self._report()
            self._commits.send(self._client, self._client.consumer)  # if the last attempt failed
            self._take_added_partitions()
            if records is not None:
                if records.size:
                    yield records
                quiet_since = self._clock()  # the time that the consumer took does not count as silence
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
        if self.config.assignment is not None and not self._closed and not self._by_chief:
            self._start()
        found = make_position(self._client.partitions or self._known, {**self._restored, **self._next})
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
            self._client.check_exists(partition, offset)
        # Nothing has changed so far: a refused position leaves the source as it was.
        self._known, self._left = known, {}
        self._adopted = read_adopted(position)
        self._unassigned, self._interrupted = waits_for_partitions(position), False
        if self.config.assignment is not None:
            self._restored, self._next, self._joined = offsets, {}, False  # `_start` assigns again
        else:
            # A group may assign a partition of the position later, or never to this member.
            self._next.update({one: offset for one, offset in offsets.items() if one in self._next})
            self._restored = {one: offset for one, offset in offsets.items() if one not in self._next}
            self._ahead = True

    @property
    def work_queue(self) -> WorkQueueSource | None:
        """This source, whose partitions the chief assigns to workers; None if `assignment` fixes them."""
        return None if self._choice.is_fixed else self

    @property
    def batch_threads(self) -> int:
        """As many as `threads` says, if a run or `assignment` says which partitions to read; 0 in a group.

        A group revokes partitions inside of a poll. `on_revoke` is then told how far was read, and what it
        saves must be as far.
        """
        return self._threads if self._shard_is_chosen or self.config.assignment is not None else 0

    def defer_to_chief(self) -> None:
        self._by_chief = True

    def give_back(self, position: Position) -> Position:
        """Return the position of a worker without partitions: the chief reassigns them."""
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
        there = ((topic, one) for topic, count in self._client.partitions.items() for one in range(count))
        new = {one: self._first(one) for one in there if one not in offsets}
        return make_position(self._client.partitions, {**offsets, **new})

    def reassign(self, positions: Sequence[Position], workers: int) -> list[Position]:
        return divide_position(merge_positions(positions), workers)

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
        return split_position(merged, [partial(self._is_read, by) for by in each])

    def _is_read(self, assignment: ByWorker, partition: Partition) -> bool:
        topic, number = partition
        known = topic in self.config.topics  # restoring refuses one that is not
        return assignment.reads(self.config.topics.index(topic) if known else 0, number)

    def adopt(self, position: Position, end: Position | None = None) -> Position:
        """Return a position with which the partitions of another worker are read.

        Raises:
            RestoreError: It is of another kind; or a group assigns partitions.
        """
        self._settle()
        if self.config.assignment is None:
            raise RestoreError(
                "the records that a stage on top of a consumer group buffers cannot be read by another "
                "worker; give the KafkaSource an assignment"
            )
        return adopt_position(position, end)

    def commit(self, position: Position) -> None:
        """Commit the offsets of a position whose messages are done, such as one that is in a checkpoint.

        Only a group in which a partition moves to another member resumes from there; nothing but this commits
        messages that were yielded. Dashboards show how far the group has read. So this does not wait
        for the broker: while it is away the newest offsets are retried, and training continues.
        If the broker does not take them for `outage_timeout`, or refuses them for good, reading fails.

        Raises:
            DataError: No broker ever answered.
        """
        _, offsets = read_position(position)
        mine = {one: offset for one, offset in offsets.items() if one in self._next}
        chosen = offsets if self.config.assignment is not None else mine
        if not chosen:
            return
        consumer = self._connect()
        self._commits.add(chosen)
        self._commits.send(self._client, consumer)

    def lag(self) -> dict[Partition, int]:
        """Return how many messages each assigned partition has left, as of the last fetch."""
        consumer = self._client.consumer
        if consumer is None:
            return {}
        lags = {}
        for partition, offset in self._next.items():
            _, high = consumer.get_watermark_offsets(self._client.at(partition), cached=True)
            if high >= 0:
                lags[partition] = max(high - offset, 0)
        return lags

    def reject(self, bad: Sequence[BadRecord]) -> None:
        """Count messages that could be read and are bad all the same, and pass them to `on_bad`."""
        if self._count_bad is not None:
            self._count_bad.inc(len(bad), topic=",".join(self.config.topics))
        for record in bad:
            self._tell_bad(record)

    def _tell_bad(self, record: BadRecord) -> None:
        if self._on_bad is not None:
            with self._telling:
                self._on_bad(record)

    def bad_records(self) -> dict[str, int]:
        return self._dropped.described()

    def close(self) -> None:
        """Leave the group; the next owner of its partitions resumes from the committed offsets. The position
        remains.

        Records that were yielded since the last `commit` may not be trained, or not be saved: they come
        again. Only offsets that a checkpoint contains are committed, if the broker takes them now.
        """
        self._closed = True
        with self._polling:
            consumer = self._client.detach()
        if consumer is not None:
            self._commits.flush(self._client, consumer)
            self._close_client(consumer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Connecting

    def _settle(self) -> None:
        """Fix the partitions of this worker, if it belongs to a run."""
        shard = self._choice.settle()
        if self._shard_is_chosen and self.config.assignment is None:
            assignment = ByWorker(worker=shard.worker, num_workers=shard.workers)
            self.config = replace(self.config, assignment=assignment)

    def _connect(self) -> Consumer:
        """Return the consumer, once a broker has answered and all topics are known."""
        if self._closed and self._client.consumer is None:
            raise DataError(f"kafka: the source of {self._described()} was closed")
        self._settle()
        return self._client.connect()

    def _start(self) -> None:
        """Ask for partitions, on first use and after a restore."""
        consumer = self._connect()
        if self._joined:
            return
        if self.config.assignment is not None:
            self._assign(self._own())
            self._joined, self._assigned = True, not self._unassigned
            return
        self._joined = True
        consumer.subscribe(
            list(self.config.topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def _rejoin(self) -> None:
        """Replace a client that got no partitions since it lost those it had.

        After an outage a client sometimes never asks its group again, though the broker is back.
        """
        if self._lost_at is None:
            return
        waited_s = self._clock() - self._lost_at
        session_s = float(self.config.settings.get("session.timeout.ms", 45_000)) / 1000
        if waited_s < max(_REJOIN_S, 3 * session_s) or not self._client.answers():
            return
        logger.warning(
            "kafka: %s was given no partitions for %.0f s and rejoins the group", self._described(), waited_s
        )
        stuck = self._client.detach()
        self._joined = self._ahead = False
        self._lost_at = self._clock()
        if stuck is not None:
            self._close_client(stuck, wait_s=0.0)
        self._start()

    def _own(self) -> list[Partition]:
        """Return the partitions of this worker."""
        assignment = self.config.assignment
        assert assignment is not None
        if self._adopted is not None or self._by_chief:
            return sorted({*self._restored, *self._next, *self._left})
        return [
            (topic, partition)
            for number, topic in enumerate(self.config.topics)
            for partition in range(self._client.partitions[topic])
            if assignment.reads(number, partition)
        ]

    def _take_added_partitions(self) -> None:
        """Read the partitions too that were added to the topics: a group does that by itself, and a chief
        when it assigns."""
        consumer = self._client.consumer
        fixed = self.config.assignment is not None and not self._by_chief and self._adopted is None
        if not fixed or consumer is None or self._clock() - self._looked_at < _LOOK_FOR_PARTITIONS_EVERY_S:
            return
        self._looked_at = self._clock()
        known = self._client.partitions
        try:
            now = self._client.count_partitions(consumer)
        except self._client.library.KafkaException as cause:
            self._client.note_error(cause.args[0])
            return
        if all(now[topic] <= known[topic] for topic in now):
            return
        self._known = dict(known)  # so that all messages of added partitions are new, whatever `start` says
        known.update({topic: max(count, known[topic]) for topic, count in now.items()})
        added = {one: self._first(one) for one in self._own() if one not in self._next}
        if added:
            names = ", ".join(partition_name(one) for one in added)
            logger.info("kafka: %s reads %s too, which were added", self._described(), names)
        self._next.update(added)
        self._ahead = True  # the client is told before the next poll

    def _assign(self, partitions: Sequence[Partition]) -> None:
        """Read these partitions, each from its next offset."""
        known = self._client.partitions
        for topic, number in partitions:  # one may have been added since the source connected
            known[topic] = max(known[topic], number + 1)
        begin = self._begin(partitions)
        # An older committed offset would mislead the next owner, and so would a newer one: messages of a
        # partition that comes back were yielded here, and are committed when the caller says so.
        told = {one: offset for one, offset in begin.items() if one not in self._left}
        self._next.update(begin)
        for partition in begin:
            self._restored.pop(partition, None)
            self._left.pop(partition, None)
        consumer = self._connect()
        places = [self._client.at(*item) for item in begin.items()]
        if self._incremental and self.config.assignment is None:
            consumer.incremental_assign(places)
        else:
            consumer.assign(places)
        if self.config.assignment is None and told:
            self._commits.send_and_wait(self._client, consumer, told)

    def _begin(self, partitions: Sequence[Partition]) -> Offsets:
        """Return the offset to start from, for each partition."""
        committed = self._client.committed(partitions) if self.config.assignment is None else {}
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
            self._client.check_exists(one, begin[one])
        return begin

    def _first(self, partition: Partition) -> int:
        """Return the offset to start from in a partition that no position contains."""
        topic, number = partition
        low, high = self._client.ends(partition)
        if topic not in self._known:
            return low if self.config.start == "earliest" else high
        if number < self._known[topic] and self.config.assignment is not None:
            raise RestoreError(
                f"kafka: the position has no offset for {partition_name(partition)}, which "
                f"{self._described()} reads. If there were other workers when it was saved, restore from the "
                "positions of all of them, merged by merge_positions"
            )
        return low  # the partition was added since: all of it is new

    # Reading

    def _read(self, timeout_s: float) -> Records | None:
        """Return the records of the next messages, which now count as yielded; None without a message."""
        with self._polling:
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
            except self._client.library.KafkaException as cause:
                raise DataError(f"kafka: the client of {self._described()} failed: {cause}") from cause
        if (failure := self._failure or self._commits.failure) is not None:
            raise self._give_up(failure)
        # A poll may run callbacks that revoke partitions and, in the same call, return messages of them.
        # Those are dropped: their next owner yields them. If the partition was assigned again within the
        # poll, its messages are ours after all, and `torn` makes the client seek back to the first that was
        # not yielded.
        disturbed, self._disturbed = self._disturbed, set()
        ahead, torn = dict(self._next), False
        runs: list[_Run] = []
        for run in self._runs(messages):
            if run.partition in disturbed:
                torn = torn or run.partition in ahead
                continue
            kept = run.within(ahead.get(run.partition, math.inf), self._ends_at(run.partition))
            if kept.messages:
                ahead[run.partition] = kept.offsets[-1] + 1
                runs.append(kept)
        # Decode first: if it raises, the position stays before the batch and nothing is lost.
        records = self._open(runs) if runs else None
        self._next = ahead
        self._ahead = torn
        return records

    def _runs(self, messages: list[Message]) -> Iterator[_Run]:
        """Yield the messages that follow each other in one partition; of errors, those that are none.

        A poll returns what it fetched partition by partition, so there are few runs, and what is done for
        each message is done by `map`, without a step of Python in between.
        """
        errors = list(map(_error, messages))
        if any(map(is_not, errors, repeat(None))):  # an error cannot be compared by ==
            for message, error in zip(messages, errors, strict=True):
                if error is not None:
                    self._judge(error, message)
            messages = [one for one, error in zip(messages, errors, strict=True) if error is None]
        places = zip(map(_topic, messages), map(_number, messages), strict=True)
        begin = 0
        for partition, same in groupby(places):
            end = begin + len(list(same))
            yield _Run(partition, messages[begin:end], list(map(_offset, messages[begin:end])))
            begin = end

    def _ends_at(self, partition: Partition) -> float:
        """Return the first offset that is not to be read."""
        return math.inf if self._adopted is None else self._adopted.get(partition, math.inf)

    def _open(self, runs: list[_Run]) -> Records:
        """Decode messages."""
        self._client.trouble_since = None
        messages = list(chain.from_iterable(run.messages for run in runs))
        full = messages
        bad: list[tuple[Message, str]] = []
        payloads = list(map(_value, messages))
        if None in payloads:
            full = [message for message in messages if message.value() is not None]
            bad = [(message, "it has no payload") for message in messages if message.value() is None]
            payloads = list(map(_value, full))
        try:
            records, unread = self._decode(payloads)
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
            place, payload = f"{_place(message)}: {reason}", message.value() or b""
            self._tell_bad(BadRecord(message.offset() or 0, place, payload))
        if self._count is not None:
            for run in runs:
                self._count.inc(len(run.messages), topic=run.partition[0])
        return records

    def _rewind(self, consumer: Consumer) -> None:
        """Make the client continue with the first message that was not yielded."""
        places = [self._client.at(*item) for item in self._next.items()]
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
        if self._by_chief or self.config.assignment is not None:
            poll_s = min(poll_s, _POLL_INTERRUPTIBLE_S)
        left_s = self._silence_s() - (self._clock() - quiet_since)
        return min(poll_s, left_s) if left_s > 0 else poll_s

    def _silence_s(self) -> float:
        """Return how long a silence must last to end the source."""
        if self.config.stream_timeout is None:
            return math.inf
        return max(self.config.stream_timeout, self.config.poll_timeout).total_seconds()

    def _ended(self, quiet_since: float) -> bool:
        """Return whether a silence is the end, and not an unreachable broker or a group that is
        rebalancing."""
        client = self._client
        # The time of an outage is no silence: the first fetch after it may take a while.
        quiet_s = self._clock() - max(quiet_since, self._back_at)
        over = quiet_s >= self._silence_s()
        if (over or client.trouble_since is not None) and not client.answers():
            self._back_at = math.inf
            if client.trouble_since is None:
                client.trouble_since = self._clock()
            out_s = self._clock() - client.trouble_since
            if out_s > self.config.outage_timeout.total_seconds():
                raise client.unreachable(out_s)
            return False
        if self._back_at == math.inf:
            self._back_at = self._clock()
            return False
        if over and not self._assigned:
            if self._left and not self._unread_of_lost():
                return True  # other members of the group have the partitions, and have read them
            if quiet_s > self._silence_s() + self.config.outage_timeout.total_seconds():
                raise DataError(f"kafka: {self._described()} was given no partitions within {quiet_s:.0f} s")
            return False
        # A fetch may be slower than a short timeout; but not every offset has a message, so do not insist.
        return over and (quiet_s > self._silence_s() + ANSWER_S or not self._behind())

    def _unread_of_lost(self) -> bool:
        """Ask the broker whether revoked partitions have messages that no member of the group has read."""
        committed = self._client.committed(list(self._left))
        return any(
            self._client.ends(one)[1] > max(offset, committed.get(one, (-1, ""))[0])
            for one, offset in self._left.items()
        )

    def _behind(self) -> bool:
        """Ask the broker whether there is more."""
        return any(self._client.ends(partition)[1] > offset for partition, offset in self._next.items())

    def _report(self, *, now: bool = False) -> None:
        """Show the lag, every second."""
        if self._lag is None or not (now or self._clock() - self._reported >= _REPORT_EVERY_S):
            return
        self._reported = self._clock()
        for (topic, partition), lag in self.lag().items():
            self._lag.set(lag, topic=topic, partition=str(partition))

    # Rebalances of the group. The client calls these inside of a poll or of `close`; a callback of a client
    # that was replaced is ignored.

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._client.consumer:
            return
        try:
            self._assign([(one.topic, one.partition) for one in partitions])
            # A broker that has just restarted may show topics without partitions for a moment, and the group
            # then assigns none. After a loss that is no answer: the remaining records would be mistaken for
            # the end of the data.
            if partitions or self._lost_at is None:
                self._assigned, self._lost_at = True, None
        except Exception as error:
            self._failure = error

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._client.consumer:
            return
        # While they are still assigned: the hook may save what it has and commit these offsets.
        mine = {_partition_of(one) for one in partitions}
        if not self._closed:
            self._notify_revoked({one: offset for one, offset in self._next.items() if one in mine})
        # Only what the caller has committed: messages that were yielded since are in no checkpoint, and would
        # be lost with this process. The next owner yields them again. Before the callback returns, because
        # the group gives the partitions to their next owner then.
        done = self._commits.unconfirmed(mine)
        self._leave(partitions)
        if done and not self._closed:
            self._commits.send_and_wait(self._client, consumer, done)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Note partitions that another member has already, without knowing how far this one had read."""
        if consumer is not self._client.consumer:
            return
        left = self._leave(partitions)
        self._assigned, self._lost_at = False, self._clock()
        if left:
            names = ", ".join(partition_name(one) for one in left)
            logger.warning("kafka: %s lost %s before it could commit its offsets", self._described(), names)
        self._notify_revoked(left)

    def _leave(self, partitions: list[TopicPartition]) -> Offsets:
        """Drop partitions, with messages that were fetched and not yielded; return their next offsets."""
        if self._closed:
            return {}  # the position of a closed source can still be asked for
        left = {one: self._next.pop(one) for one in map(_partition_of, partitions) if one in self._next}
        self._disturbed |= left.keys()
        self._commits.forget(list(left))
        self._left.update(left)
        if self._lag is not None:
            for topic, partition in left:
                self._lag.set(math.nan, topic=topic, partition=str(partition))
        return left

    def _notify_revoked(self, left: Offsets) -> None:
        if left and self._on_revoke_hook is not None:
            try:
                self._on_revoke_hook(make_position(self._client.partitions, left))
            except Exception as error:
                self._failure = error

    def _give_up(self, failure: Exception) -> Exception:
        """Drop the client, whose assignment may be wrong; the next iteration makes a new one.

        Commits nothing: the records since the last checkpoint are trained only if the caller continues.
        """
        self._failure = self._commits.failure = None
        consumer = self._client.detach()
        self._left.update(self._next)
        self._next, self._joined, self._assigned, self._ahead = {}, False, False, False
        self._lost_at = None
        if consumer is not None:
            self._close_client(consumer)
        return failure

    # The client and its errors

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._commits.answered(self._client, error, partitions)

    def _close_client(self, consumer: Consumer, wait_s: float = CLOSE_S) -> None:
        """Close a client, and do not wait for long if its broker is away.

        It waits for commits that are on their way, and has been seen to wait for ever without a broker.
        """
        troubled = self._commits.is_unsettled
        closing = concurrency.Thread(target=consumer.close, name="kafka-close", daemon=True)
        closing.start()
        # A group may move partitions meanwhile, which takes as long as it takes.
        alone = self.config.assignment is not None
        closing.join(wait_s if troubled or alone or not wait_s else None)

    def _judge(self, error: KafkaError, message: Message) -> None:
        """Raise an error that came in place of a message, unless the client recovers from it."""
        kinds = self._client.library.KafkaError
        if self._client.is_transient(error):
            self._client.note_error(error)
        elif error.code() in (kinds.UNKNOWN_TOPIC_OR_PART, kinds._UNKNOWN_TOPIC, kinds._UNKNOWN_PARTITION):
            self._client.find_topics(self._connect())  # raises if the topic is gone
        elif error.code() in (kinds._AUTO_OFFSET_RESET, kinds.OFFSET_OUT_OF_RANGE):
            raise DataError(
                f"kafka: messages of {partition_name(_partition(message))} that {self._described()} has not "
                f"read are gone from the broker: {error.str()}. It read too slowly for the retention of the "
                "topic, or the topic was recreated; to continue with what is left, start without a position"
            )
        else:
            raise DataError(
                f"kafka: cannot read {message.topic() or 'the topics'} as {self._described()}: {error.str()}"
            )

    def _described(self) -> str:
        """Return the group, worker and topics, for messages."""
        name = f"group {self.config.group!r}"
        if self.config.assignment is not None:
            name += f" (worker {self.config.assignment.worker} of {self.config.assignment.num_workers})"
        return f"{name} on {', '.join(self.config.topics)}"


class _Run(NamedTuple):
    """Messages that follow each other in one partition."""

    partition: Partition
    messages: list[Message]
    offsets: list[int]

    def within(self, begin: float, end: float) -> _Run:
        """Return the messages of offsets from `begin` to before `end`, each of them once."""
        first, last = self.offsets[0], self.offsets[-1]
        # Offsets that rise by one are the rule; a compacted topic leaves some out.
        if begin <= first and last < end and self.offsets == list(range(first, last + 1)):
            return self
        kept = []
        for place, offset in enumerate(self.offsets):
            if begin <= offset < end:
                begin = offset + 1
                kept.append(place)
        return _Run(self.partition, [self.messages[one] for one in kept], [self.offsets[one] for one in kept])


# In C, so that a batch of messages costs no step of Python each.
_error, _topic, _number = methodcaller("error"), methodcaller("topic"), methodcaller("partition")
_offset, _value = methodcaller("offset"), methodcaller("value")


def _partition(message: Message) -> Partition:
    """Return the partition of a message. Only an error may have none."""
    return message.topic() or "", message.partition() or 0


def _partition_of(place: TopicPartition) -> Partition:
    return place.topic, place.partition


def _place(message: Message) -> str:
    return f"{partition_name(_partition(message))} at offset {message.offset()}"


def create_plain_kafka_dataset(config: KafkaConfig, *, metrics: Metrics | None = None) -> KafkaSource:
    """Return a source of raw strings: one record per message, its bytes in the column `value`."""
    return KafkaSource(config, plain_strings, metrics=metrics)
