"""Kafka, against a real broker: what was read is known to the message, whatever happens in between."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from math import inf
from types import FrameType
from typing import Any

import pytest
import torch
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from services.servers import free_port, wait_until

from monolith import native
from monolith.config import Secret
from monolith.data import BatchSpec, HistoryConfig, Pipeline, Records, Shard, ShuffleConfig
from monolith.data.format import BadRecord
from monolith.data.formats.memory import ColumnType
from monolith.data.kafka import (
    ByWorker,
    CsvMessages,
    JsonMessages,
    KafkaConfig,
    KafkaSink,
    KafkaSource,
    create_plain_kafka_dataset,
    merge_positions,
    read_settings,
    string_column,
)
from monolith.data.kafka import source as kafka_source
from monolith.errors import ConfigError, DataError, MissingExtraError, RestoreError
from monolith.feature import Batch
from monolith.observe import Metrics
from monolith.tensors import RaggedTensor

ALL = ByWorker(worker=0, num_workers=1)
SOON = timedelta(milliseconds=300)
_groups = itertools.count()


def decode(payloads: list[bytes]) -> tuple[Records, list[BadRecord]]:
    """Read {"id": 7}; anything else is bad."""
    ids: list[int] = []
    bad: list[BadRecord] = []
    for place, payload in enumerate(payloads):
        try:
            ids.append(int(json.loads(payload)["id"]))
        except (ValueError, KeyError, TypeError) as error:
            bad.append(BadRecord(place, repr(error), payload))
    column = RaggedTensor(torch.tensor(ids, dtype=torch.int64), torch.arange(len(ids) + 1))
    return Records(len(ids), {"id": column}), bad


def payload(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def config(kafka: Kafka, topic: str, **options: Any) -> KafkaConfig:
    chosen: dict[str, Any] = {
        "servers": (kafka.address,),
        "topics": (topic,),
        "group": f"group-{next(_groups)}",
        "assignment": ALL,
        "poll_timeout": SOON,
        "stream_timeout": SOON,
        "batch_wait": timedelta(milliseconds=20),
        "settings": CONSUMER_SETTINGS,
    }
    return KafkaConfig(**{**chosen, **options})


def ids(records: Records) -> list[int]:
    return records["id"].flat_values.tolist()


@pytest.fixture
def send(kafka: Kafka) -> Iterator[Callable[..., None]]:
    """Send messages of these ids, to one partition or to any, and wait until the broker has them."""
    sinks: dict[str, KafkaSink] = {}

    def send_now(topic: str, numbers: range | list[int], partition: int | None = None) -> None:
        sink = sinks.setdefault(topic, KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS))
        sink.send([payload(number) for number in numbers], partition=partition)
        sink.flush(timedelta(seconds=30))

    yield send_now
    for sink in sinks.values():
        sink.close()


@pytest.fixture
def topic(kafka: Kafka) -> str:
    return kafka.create_topic()


# Reading


def test_messages_of_a_partition_come_in_order_and_each_once(kafka: Kafka, send: Callable[..., None]) -> None:
    topic = kafka.create_topic(partitions=3)
    for partition in range(3):
        send(topic, range(partition * 1000, partition * 1000 + 300), partition)
    with KafkaSource(config(kafka, topic), decode) as source:
        found = [number for records in source for number in ids(records)]
    assert len(found) == 900
    for partition in range(3):
        mine = [number for number in found if number // 1000 == partition]
        assert mine == list(range(partition * 1000, partition * 1000 + 300))


def test_a_batch_has_as_many_messages_as_were_asked_for_and_waits_a_moment_only(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(70))
    with KafkaSource(config(kafka, topic, poll_batch=32, batch_wait=SOON), decode) as source:
        assert [records.size for records in source] == [32, 32, 6]
        send(topic, [70])
        assert ids(next(iter(source))) == [70]  # though 31 more messages never come


def test_it_ends_after_a_silence_but_not_before_one_poll_and_continues_when_iterated_again(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    settings = config(kafka, topic, stream_timeout=timedelta(0), poll_timeout=timedelta(seconds=0.5))
    with KafkaSource(settings, decode) as source:
        begin = time.monotonic()
        assert list(source) == []
        assert time.monotonic() - begin >= 0.5
        send(topic, range(3))
        assert [ids(records) for records in source] == [[0, 1, 2]]
        assert list(source) == []


def test_a_silence_shorter_than_the_stream_timeout_is_waited_out(kafka: Kafka, topic: str) -> None:
    settings = config(kafka, topic, stream_timeout=timedelta(seconds=1), poll_timeout=timedelta(seconds=0.1))
    with KafkaSource(settings, decode) as source:
        begin = time.monotonic()
        assert list(source) == []
        assert time.monotonic() - begin >= 1


def test_the_time_the_caller_takes_is_no_silence(kafka: Kafka, topic: str, send: Callable[..., None]) -> None:
    send(topic, range(4))
    now = [0.0]
    with KafkaSource(config(kafka, topic, poll_batch=1), decode, clock=lambda: now[0]) as source:
        for expected, records in enumerate(itertools.islice(source, 4)):
            assert ids(records) == [expected]
            now[0] += 3600


def test_it_begins_with_the_earliest_message_or_with_the_next_one(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(5))
    with (
        KafkaSource(config(kafka, topic), decode) as all_of_it,
        KafkaSource(config(kafka, topic, start="latest"), decode) as the_rest,
    ):
        saved = the_rest.position()
        send(topic, [5, 6])
        assert [ids(records) for records in all_of_it] == [list(range(7))]
        assert [ids(records) for records in the_rest] == [[5, 6]]
    # "latest" was settled when the position was asked for.
    with KafkaSource(config(kafka, topic, start="latest"), decode) as later:
        later.restore(saved)
        assert [ids(records) for records in later] == [[5, 6]]


def test_several_topics_are_read_by_workers_with_different_partitions(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topics = (kafka.create_topic(partitions=2), kafka.create_topic(partitions=3))
    for number, (topic, partition) in enumerate((one, two) for one in topics for two in range(3)):
        if (topic, partition) != (topics[0], 2):
            send(topic, range(10 * number, 10 * number + 10), partition)
    found = []
    for worker in range(3):
        assignment = ByWorker(worker=worker, num_workers=3)
        settings = config(kafka, "", topics=topics, assignment=assignment)
        with KafkaSource(settings, decode) as source:
            found += [number for records in source for number in ids(records)]
    assert sorted(found) == [*range(20), *range(30, 60)]


def test_a_worker_without_partitions_just_waits(kafka: Kafka, topic: str, send: Callable[..., None]) -> None:
    send(topic, range(3))
    with KafkaSource(config(kafka, topic, assignment=ByWorker(worker=1, num_workers=2)), decode) as source:
        assert list(source) == []
        assert source.position()["offsets"] == {}


def test_plain_strings_are_yielded_as_they_are(kafka: Kafka, topic: str) -> None:
    texts = [b"a", b"", "h\u00e9".encode(), b"\x00\xff"]
    with KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS) as sink:
        sink.write(Records(4, {"value": string_column(texts)}))
    with create_plain_kafka_dataset(config(kafka, topic)) as source:
        assert [records.strings("value") for records in source] == [[[text] for text in texts]]


# Positions


def test_a_position_names_the_first_message_that_was_not_yielded(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic(partitions=2)
    send(topic, range(10), 0)
    send(topic, range(10, 14), 1)
    with KafkaSource(config(kafka, topic, poll_batch=4), decode) as source:
        assert source.position()["offsets"] == {topic: {"0": 0, "1": 0}}
        taken: dict[str, int] = {"0": 0, "1": 0}
        for records in source:
            for number in ids(records):
                taken["0" if number < 10 else "1"] += 1
            position = source.position()
            assert position == json.loads(json.dumps(position))
            assert position["offsets"] == {topic: taken}
        assert taken == {"0": 10, "1": 4}
    assert source.position() == position  # also after it was closed


def test_a_restored_source_yields_exactly_what_was_left(kafka: Kafka, send: Callable[..., None]) -> None:
    topic = kafka.create_topic(partitions=2)
    send(topic, range(50), 0)
    send(topic, range(50, 100), 1)
    settings = config(kafka, topic, poll_batch=7)
    found, position = [], None
    while True:
        with KafkaSource(settings, decode) as source:
            if position is not None:
                source.restore(position)
            some = [number for records in itertools.islice(source, 4) for number in ids(records)]
            position = source.position()
        if not some:
            break
        found += some
    assert sorted(found) == list(range(100))


def test_it_can_be_restored_between_iterations(kafka: Kafka, topic: str, send: Callable[..., None]) -> None:
    send(topic, range(20))
    with KafkaSource(config(kafka, topic, poll_batch=5), decode) as source:
        assert ids(next(iter(source))) == [0, 1, 2, 3, 4]
        position = source.position()
        for _ in range(2):
            rest = [number for records in source for number in ids(records)]
            assert rest == list(range(5, 20))
            source.restore(position)
            assert source.position() == position


def test_positions_of_all_workers_restore_into_another_number_of_workers(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic(partitions=4)
    for partition in range(4):
        send(topic, range(10 * partition, 10 * partition + 10), partition)
    found, positions = [], []
    for worker in range(2):
        settings = config(kafka, topic, assignment=ByWorker(worker=worker, num_workers=2), poll_batch=3)
        with KafkaSource(settings, decode) as source:
            found += [number for records in itertools.islice(source, 3) for number in ids(records)]
            positions.append(source.position())
    for worker in range(3):
        settings = config(kafka, topic, assignment=ByWorker(worker=worker, num_workers=3))
        with KafkaSource(settings, decode) as source:
            if worker == 1:
                source.restore(positions[0])
                with pytest.raises(RestoreError, match=r"no offset for partition 1 .* merge_positions"):
                    list(source)
            source.restore(merge_positions(positions))
            found += [number for records in source for number in ids(records)]
    assert sorted(found) == list(range(40))


def test_workers_read_only_the_partitions_that_the_chief_assigns(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic(partitions=4)
    for partition in range(4):
        send(topic, range(10 * partition, 10 * partition + 10), partition)
    found = []
    with ExitStack() as stack:
        settings = config(kafka, topic, assignment=None, group="dealt", poll_batch=4)
        sources = [stack.enter_context(KafkaSource(settings, decode)) for _ in range(3)]
        for worker, source in enumerate(sources):
            Pipeline(source).read_shard(Shard(worker, 3))
            source.defer_to_chief()
        leads = Pipeline(sources[0]).work_queue
        assert leads is sources[0]
        position = sources[0].collect([])
        sources[0].restore(position)
        reading = iter(sources[0])
        found += ids(next(reading))
        positions = [sources[0].position()]
        assert len(ids(next(reading))) == 4, "read ahead, and dropped"
        for workers in (3, 2):
            positions = leads.reassign(positions, workers)
            offsets = [one["offsets"].get(topic, {}) for one in positions]
            assert sorted(itertools.chain(*offsets)) == ["0", "1", "2", "3"]
            for worker in range(workers):
                sources[worker].restore(positions[worker])
                found += ids(next(iter(sources[worker])))
                positions[worker] = sources[worker].position()
        blank = leads.give_back(positions[1])
        sources[2].restore(leads.reassign([*positions, blank], 1)[0])
        found += [number for records in sources[2] for number in ids(records)]
    assert sorted(found) == list(range(40))


def test_a_worker_that_was_dealt_nothing_yet_waits_until_it_is_or_is_interrupted(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    settings = config(kafka, topic, assignment=None, start="latest", outage_timeout=timedelta(seconds=0.5))
    with KafkaSource(settings, decode) as source:
        source.read_shard(Shard(1, 2))
        source.defer_to_chief()
        everything = source.collect([])
        assert everything["offsets"] == {topic: {"0": 0}}
        send(topic, range(3))
        source.restore(source.give_back(everything))
        with pytest.raises(DataError, match="was given no partitions"):
            list(source)
        source.interrupt()
        assert list(source) == []
        (mine,) = source.reassign([everything], 1)
        source.restore(mine)
        assert [ids(records) for records in source] == [[0, 1, 2]]
        missing = {**everything, "offsets": {}}
        with pytest.raises(RestoreError, match="no offset for partition 0"):
            source.collect([missing])


def test_a_worker_with_a_fixed_assignment_gets_none_from_the_chief() -> None:
    settings = KafkaConfig(servers=("nowhere:1",), topics=("t",), group="g")
    for assignment in (None, ALL):
        with KafkaSource(replace(settings, assignment=assignment), decode) as source:
            assert (source.work_queue is None) == (assignment is not None)
            assert Pipeline(source).rebatch(2).work_queue is None


@pytest.mark.parametrize("workers", [(1, 3), (3, 2)])
def test_remaining_and_buffered_records_are_redistributed(
    kafka: Kafka, send: Callable[..., None], workers: tuple[int, int]
) -> None:
    before, after = workers
    topic = kafka.create_topic(partitions=before)
    for partition in range(before):
        send(topic, range(10 * partition, 10 * partition + 10), partition)

    def made(worker: int, num_workers: int) -> Pipeline:
        settings = config(
            kafka, topic, assignment=ByWorker(worker=worker, num_workers=num_workers), poll_batch=3
        )
        return Pipeline(KafkaSource(settings, decode)).shuffle(ShuffleConfig(buffer=5)).rebatch(2)

    found, positions = [], []
    for worker in range(before):
        with closing(made(worker, before)) as stream:
            read = itertools.islice(iter(stream), 2 + worker)
            found += [number for records in read for number in ids(records)]
            positions.append(stream.position())
    with closing(made(0, after)) as chief:
        positions = json.loads(json.dumps(chief.redistribute(positions, after)))
    for worker in range(after):
        with closing(made(worker, after)) as stream:
            stream.restore(positions[worker])
            found += [number for records in stream for number in ids(records)]
    assert sorted(found) == list(range(10 * before))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "files"}, "of another kind"),
        ({"offsets": {"other": {"0": 0}}}, "of topics other, which are not read here"),
        (
            {"offsets": {"TOPIC": {"0": 99}}},
            r"offset 99 of partition 0 .* has messages 0 to 2; .* lost its newest",
        ),
        ({"offsets": {"TOPIC": {"5": 0}}}, "there is no partition 5"),
        ({"offsets": [1]}, "cannot restore a Kafka source"),
        ({"offsets": {"TOPIC": {"0": 1.5}}}, "1.5 is not a whole number"),
    ],
)
def test_a_position_that_cannot_be_gone_to_is_refused(
    kafka: Kafka, topic: str, send: Callable[..., None], change: dict[str, Any], message: str
) -> None:
    send(topic, range(3))
    with KafkaSource(config(kafka, topic), decode) as source:
        position = {**source.position(), **json.loads(json.dumps(change).replace("TOPIC", topic))}
        with pytest.raises(RestoreError, match=message):
            source.restore(position)
        assert [ids(records) for records in source] == [[0, 1, 2]]


def test_nothing_is_committed_but_what_one_commits(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    send(topic, range(9))
    settings = config(kafka, topic, poll_batch=4)
    with KafkaSource(settings, decode) as source:
        next(iter(source))
        position = source.position()
        list(source)
    group = {"bootstrap.servers": kafka.address, "group.id": settings.group, **CONSUMER_SETTINGS}
    dashboard = Consumer(group)
    assert dashboard.committed([TopicPartition(topic, 0)], timeout=10)[0].offset < 0
    with KafkaSource(settings, decode) as source:
        source.commit(position)
        # Nobody reads it back.
        assert [number for records in source for number in ids(records)] == list(range(9))
    assert dashboard.committed([TopicPartition(topic, 0)], timeout=10)[0].offset == 4
    dashboard.close()


# What cannot be read


def test_malformed_messages_are_counted_passed_on_and_dropped(kafka: Kafka, topic: str) -> None:
    with KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS) as sink:
        sink.send([payload(0), b"{", payload(1), b"[]", payload(2)])
    bad: list[BadRecord] = []
    metrics = Metrics("test")
    with KafkaSource(config(kafka, topic), decode, on_bad=bad.append, metrics=metrics) as source:
        assert [ids(records) for records in source] == [[0, 1, 2]]
        assert source.position()["offsets"] == {topic: {"0": 5}}
    assert [(one.place, one.payload) for one in bad] == [(1, b"{"), (3, b"[]")]
    assert bad[0].reason.startswith(f"partition 0 of topic {topic!r} at offset 1: JSONDecodeError")
    shown = metrics.render().decode()
    assert f'test_kafka_bad_messages_total{{topic="{topic}"}} 2.0' in shown
    assert f'test_kafka_messages_total{{topic="{topic}"}} 5.0' in shown


def test_a_batch_of_malformed_messages_only_is_skipped(kafka: Kafka, topic: str) -> None:
    with KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS) as sink:
        sink.send([b"x"] * 5 + [payload(7)])
    with KafkaSource(config(kafka, topic, poll_batch=5), decode) as source:
        assert [ids(records) for records in source] == [[7]]


def test_what_a_decoder_or_a_handler_raises_leaves_the_position_before_the_batch(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(6))
    broken = [True]

    def moody(payloads: list[bytes]) -> tuple[Records, list[BadRecord]]:
        if broken[0]:
            raise ZeroDivisionError("moody")
        return decode(payloads)

    with KafkaSource(config(kafka, topic, poll_batch=3), moody) as source:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="moody") as raised:
                next(iter(source))
            assert f"partition 0 of topic {topic!r} at offset 0" in raised.value.__notes__[0]
            assert source.position()["offsets"] == {topic: {"0": 0}}
        broken[0] = False
        assert [ids(records) for records in source] == [[0, 1, 2], [3, 4, 5]]


def test_lag_is_shown_for_each_partition(kafka: Kafka, send: Callable[..., None]) -> None:
    topic = kafka.create_topic(partitions=2)
    send(topic, range(10), 0)
    metrics = Metrics("test")
    with KafkaSource(config(kafka, topic, poll_batch=4), decode, metrics=metrics) as source:
        for number, _ in enumerate(source, 1):
            assert source.lag()[topic, 0] == max(10 - 4 * number, 0)
        assert source.lag() == {(topic, 0): 0, (topic, 1): 0}
    assert f'test_kafka_lag_messages{{partition="1",topic="{topic}"}} 0.0' in metrics.render().decode()


def test_a_topic_that_is_not_there_is_named_and_so_is_the_one_that_was_meant(
    kafka: Kafka, topic: str
) -> None:
    meant, given = "clicks-of-users-by-the-minute", "clikcs-of-users-by-the-minute"
    kafka.create_topic(meant)
    settings = config(kafka, topic, topics=(topic, given), connect_timeout=timedelta(seconds=1))
    with (
        KafkaSource(settings, decode) as source,
        pytest.raises(DataError, match=f"{kafka.address} has no topic '{given}', .* did you mean '{meant}'?"),
    ):
        list(source)


@pytest.mark.parametrize("assignment", [ALL, None])
def test_a_broker_that_is_not_there_is_named_after_a_deadline(
    kafka: Kafka, assignment: ByWorker | None
) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = config(
        kafka, "t", servers=(address,), assignment=assignment, connect_timeout=timedelta(seconds=1)
    )
    begin = time.monotonic()
    with (
        KafkaSource(settings, decode) as source,
        pytest.raises(
            DataError, match=f"no broker of {address} has answered .*Connection refused.* Check the addresses"
        ),
    ):
        list(source)
    assert time.monotonic() - begin < 25  # the default is 30 s


def test_without_a_broker_there_is_one_line_and_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """The client says it some hundred times meanwhile."""
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = KafkaConfig(servers=addresses, topics=("t",), group="g", connect_timeout=timedelta(seconds=2))
    with KafkaSource(settings, decode) as source, pytest.raises(DataError) as raised:
        list(source)
    said = str(raised.value)
    assert f"no broker of {', '.join(addresses)} has answered group 'g' on t for 2 s" in said
    assert said.count("Connection refused") == 2  # of each broker once
    (line,) = [one for one in caplog.messages if "kafka" in one]
    assert "Connection refused" in line
    assert "more of this is not shown for 60 s" in line


# A group


class Reader(threading.Thread):
    """Reads a source as another process would, with a little work on each batch, until it is told to stop."""

    def __init__(self, source: KafkaSource) -> None:
        super().__init__(daemon=True)
        self.source = source
        self.found: list[int] = []
        self._stop_now = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_now.is_set():
            for records in self.source:
                self.found += ids(records)
                if self._stop_now.wait(0.01):
                    break

    def wait_for(self, many: int) -> None:
        # A group whose broker was away meets again when its sessions have run out, on a busy machine late.
        wait_until(lambda: len(self.found) >= many, f"{many} messages are read", 240)

    def stop(self) -> list[int]:
        self._stop_now.set()
        self.join(60)
        return self.found


@pytest.mark.parametrize("strategy", ["range,roundrobin", "cooperative-sticky"])
def test_a_group_assigns_partitions_and_the_remaining_member_resumes_where_the_other_stopped(
    kafka: Kafka, send: Callable[..., None], strategy: str
) -> None:
    topic = kafka.create_topic(partitions=4)
    sent: list[int] = []

    def send_more() -> None:
        many = len(sent) // 4
        for partition in range(4):
            numbers = [1_000_000 * partition + many + number for number in range(25)]
            send(topic, numbers, partition)
            sent.extend(numbers)

    send_more()
    settings = config(
        kafka,
        topic,
        assignment=None,
        poll_batch=5,
        poll_timeout=timedelta(milliseconds=100),
        stream_timeout=timedelta(milliseconds=100),
        settings={**CONSUMER_SETTINGS, "partition.assignment.strategy": strategy},
    )
    handed_back: list[dict[str, Any]] = []

    def hand_back(position: dict[str, Any]) -> None:
        handed_back.append(position)
        first.source.commit(position)  # what it has read is done, and comes no more

    first = Reader(KafkaSource(settings, decode, on_revoke=hand_back))
    # Alone at first, then the other comes and takes half of the partitions from it.
    first.wait_for(20)
    second = Reader(KafkaSource(settings, decode))
    while len(second.found) < 40:
        assert len(sent) < 100_000
        send_more()
        time.sleep(0.05)
    given = merge_positions(handed_back)["offsets"][topic]
    assert len(given) == (4 if strategy == "range,roundrobin" else 2)  # all at first, or only what must go
    assert [len(reader.source.position()["offsets"][topic]) for reader in (first, second)] == [2, 2]
    second.stop()
    before = second.source.position()
    second.source.commit(before)
    second.source.close()
    assert second.source.position() == before
    send_more()
    first.wait_for(len(sent) - len(second.found))
    first.stop()
    first.source.close()
    assert sorted(first.found + second.found) == sorted(sent)


@pytest.mark.parametrize("strategy", ["range,roundrobin", "cooperative-sticky"])
def test_what_a_member_read_and_did_not_commit_comes_again_when_its_partitions_move(
    kafka: Kafka, send: Callable[..., None], strategy: str
) -> None:
    topic = kafka.create_topic(partitions=4)
    for partition in range(4):
        send(topic, range(100 * partition, 100 * partition + 25), partition)
    settings = config(
        kafka,
        topic,
        assignment=None,
        poll_batch=5,
        poll_timeout=timedelta(milliseconds=100),
        stream_timeout=timedelta(milliseconds=100),
        settings={**CONSUMER_SETTINGS, "partition.assignment.strategy": strategy},
    )
    first = Reader(KafkaSource(settings, decode))
    first.wait_for(100)  # and it saves nothing: were it killed after the others came, all would be lost
    second = Reader(KafkaSource(settings, decode))
    second.wait_for(50)
    second.stop()
    moved = second.source.position()["offsets"][topic]
    assert sorted(second.found) == sorted(
        number for one in moved for number in range(100 * int(one), 100 * int(one) + 25)
    )
    first.stop()
    assert sorted(first.found) == sorted(100 * one + number for one in range(4) for number in range(25)), (
        "partitions that came back to it, or stayed, are read on where it stopped"
    )
    first.source.close()
    second.source.close()


def test_a_group_is_restored_to_a_position_and_not_to_what_it_had_committed(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(30))
    settings = config(kafka, topic, assignment=None, poll_batch=10)
    with KafkaSource(settings, decode) as source:
        reading = iter(source)
        next(reading)
        position = source.position()
        next(reading)
        source.commit(source.position())
    # Without a position a member goes on with what the last one has not committed.
    with KafkaSource(settings, decode) as source:
        assert ids(next(iter(source))) == list(range(20, 30))
    with KafkaSource(settings, decode) as source:
        source.restore(position)
        assert source.position() == position
        assert [ids(records) for records in source] == [list(range(10, 20)), list(range(20, 30))]


def test_what_a_member_of_a_group_read_and_did_not_commit_comes_again(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(30))
    settings = config(kafka, topic, assignment=None, poll_batch=10)
    with KafkaSource(settings, decode) as source:
        reading = iter(source)
        next(reading)
        source.commit(source.position())
        next(reading)  # read, and not trained when its process ended
    with KafkaSource(settings, decode) as source:
        assert [number for records in source for number in ids(records)] == list(range(10, 30))


def test_an_offset_committed_by_the_same_run_wins_over_the_restored_position(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(30))
    settings = config(kafka, topic, assignment=None, poll_batch=10, run="monday")
    with KafkaSource(settings, decode) as early:
        early.restore({"source": "kafka", "partitions": {topic: 1}, "offsets": {topic: {"0": 5}}})
        position = early.position()
        assert ids(next(iter(early))) == list(range(5, 15))
        early.commit(early.position())
    with KafkaSource(settings, decode) as late:
        late.restore(position)
        assert ids(next(iter(late))) == list(range(15, 25))
    with KafkaSource(
        config(kafka, topic, assignment=None, group=settings.group, run="tuesday"), decode
    ) as other:
        other.restore(position)
        assert ids(next(iter(other))) == list(range(5, 30))


# A broker that dies


@pytest.mark.parametrize("assignment", [ALL, None], ids=["by_worker", "group"])
def test_a_broker_that_is_killed_and_started_again_loses_and_repeats_nothing(
    kafka: Kafka, send: Callable[..., None], assignment: ByWorker | None
) -> None:
    topic = kafka.create_topic(partitions=2)
    send(topic, range(100), 0)
    send(topic, range(100, 200), 1)
    settings = config(kafka, topic, assignment=assignment, poll_batch=16, stream_timeout=timedelta(seconds=1))
    reader = Reader(KafkaSource(settings, decode))
    reader.wait_for(32)
    kafka.kill()
    try:
        time.sleep(2)  # longer than the stream timeout, which must not end it now
        assert reader.is_alive()
    finally:
        kafka.restart()
    send(topic, range(200, 250), 0)
    reader.wait_for(250)
    assert sorted(reader.stop()) == list(range(250))
    assert reader.source.position()["offsets"] == {topic: {"0": 150, "1": 100}}
    reader.source.close()


def test_a_client_that_is_never_given_its_partitions_back_is_replaced(
    kafka: Kafka, send: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka.create_topic(partitions=2)
    send(topic, range(20), 0)
    settings = config(kafka, topic, assignment=None, poll_batch=5, stream_timeout=None)
    with KafkaSource(settings, decode, clock=map(float, itertools.count()).__next__) as source:
        reading = iter(source)
        found = ids(next(reading))
        stuck = source._client.consumer
        assert stuck is not None
        lost = stuck.assignment()
        stuck.unassign()  # as an outage does it, except that this client takes no further step
        source._on_lost(stuck, lost)
        while len(found) < 20:
            found += ids(next(reading))
        assert source._client.consumer is not stuck
    assert found == list(range(20))
    assert "and rejoins the group" in caplog.text


def test_a_commit_that_the_broker_does_not_take_is_retried_and_ends_reading_after_a_deadline(
    kafka: Kafka, send: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka.create_topic()
    send(topic, range(600))

    def made(speed: float, **options: Any) -> KafkaSource:
        each = {"poll_batch": 1, "batch_wait": timedelta(0), **options}
        return KafkaSource(config(kafka, topic, **each), decode, clock=lambda: speed * time.monotonic())

    rest: list[int] = []
    with made(1) as patient, made(20, outage_timeout=timedelta(seconds=15)) as short:
        for source in (patient, short):
            reading = iter(source)
            assert [ids(next(reading)) for _ in range(5)] == [[number] for number in range(5)]
        kafka.kill()
        # What follows needs no record that the client has fetched before: that may be one, or all.
        reader = threading.Thread(target=lambda: rest.extend(one for each in patient for one in ids(each)))
        try:
            patient.commit(patient.position())
            reader.start()
            for _ in range(150):  # three seconds; a minute by the clock of the source
                short.commit(short.position())
                time.sleep(0.02)
            with pytest.raises(
                DataError, match=r"did not take the offsets of .* for \d+ s \(outage_timeout\): .*checkpoint"
            ):
                next(iter(short))
            assert caplog.text.count("the commit is retried for up to 15 s") == 1, "said once for each outage"
            wait_until(lambda: "the commit is retried for up to 600 s" in caplog.text, "a word of it", 30)
            assert reader.is_alive(), "a run outlives an outage that is shorter"
        finally:
            kafka.restart()
            reader.join(60)
        assert rest == list(range(5, 600)), "it read on"
        patient.commit(position := patient.position())
    assert position["offsets"] == {topic: {"0": 600}}
    assert committed(kafka, patient.config.group, topic) == 600


def test_what_a_member_read_ahead_of_a_checkpoint_goes_to_the_next_member_when_it_closes(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    send(topic, range(50))
    settings = config(kafka, topic, assignment=None, poll_batch=10)
    with KafkaSource(settings, decode) as first:
        reading = iter(first)
        seen = ids(next(reading))
        first.commit(first.position())  # a checkpoint holds these
        seen += ids(next(reading))  # and not these
    assert seen == list(range(20))
    assert committed(kafka, settings.group, topic) == 10
    with KafkaSource(settings, decode) as second:
        assert [number for records in second for number in ids(records)] == list(range(10, 50))
    assert committed(kafka, settings.group, topic) == 10, "it saved no checkpoint"


def committed(kafka: Kafka, group: str, topic: str) -> int:
    """Return the offset of partition 0 that the broker was told of."""
    from confluent_kafka import Consumer, TopicPartition

    dashboard = Consumer({"bootstrap.servers": kafka.address, "group.id": group, **CONSUMER_SETTINGS})
    try:
        return int(dashboard.committed([TopicPartition(topic, 0)], timeout=20)[0].offset)
    finally:
        dashboard.close()


def test_an_outage_is_named_after_a_deadline_and_so_are_messages_that_are_gone(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic()
    send(topic, range(100))
    settings = config(
        kafka,
        topic,
        outage_timeout=timedelta(seconds=1),
        connect_timeout=timedelta(seconds=20),
        stream_timeout=None,
    )
    with KafkaSource(settings, decode) as source:
        reading = iter(source)
        assert ids(next(reading)) == list(range(100))
        kafka.kill()
        try:
            with pytest.raises(DataError, match=r"no broker of .* has answered .* Check the addresses"):
                next(reading)
            for path in (kafka.folder / "data" / f"{topic}-0").iterdir():
                path.unlink()  # a disk that did not survive
        finally:
            kafka.restart()
        send(topic, range(3))
        with pytest.raises(DataError, match=r"messages of partition 0 .* are gone from the broker"):
            next(iter(source))
        position = source.position()
        assert position["offsets"] == {topic: {"0": 100}}
        with pytest.raises(RestoreError, match="the broker has messages 0 to 2; the topic was recreated"):
            source.restore(position)


# Batches made ahead

BATCHES = BatchSpec(ids=("id",), labels={})


def batch_ids(batch: Batch) -> list[int]:
    return batch.ids["id"].flat_values.tolist()


def test_batches_are_made_ahead_where_a_run_says_which_partitions_to_read_and_not_in_a_group() -> None:
    settings = KafkaConfig(servers=("nowhere:1",), topics=("clicks",), group="us")
    group = KafkaSource(settings, decode, threads=3)
    assert group.batch_threads == 0
    batches = Pipeline(group).to_batches(BATCHES)
    batches.read_shard(Shard(0, 2))  # a run does this after the batches were made
    assert batches.batch_threads == 3
    assert KafkaSource(replace(settings, assignment=ALL), decode, threads=3).batch_threads == 3
    assert KafkaSource(replace(settings, assignment=ALL), decode).batch_threads >= 1


def test_batches_made_ahead_hold_each_message_once_however_often_reading_stops(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic(partitions=3)
    for partition in range(3):
        send(topic, range(partition * 1000, partition * 1000 + 100), partition)
    settings = config(kafka, topic, poll_batch=16)
    position, found = None, list[int]()
    for stop in (2, 1, 5, None):
        batches = Pipeline(KafkaSource(settings, decode, threads=3)).to_batches(BATCHES)
        with closing(batches):
            if position is not None:
                batches.restore(position)
            for batch in itertools.islice(batches, stop):
                found += batch_ids(batch)
                position = batches.position()  # as a checkpoint after each step; a kill may follow
    assert len(found) == 300
    for partition in range(3):
        first = partition * 1000
        assert [number for number in found if number // 1000 == partition] == list(range(first, first + 100))


def test_a_message_gets_its_batch_before_the_next_is_sent_and_a_poll_ends_when_it_has_to(
    kafka: Kafka, topic: str, send: Callable[..., None]
) -> None:
    long = timedelta(seconds=60)
    settings = config(kafka, topic, stream_timeout=None, poll_timeout=long)
    begin = time.monotonic()
    with KafkaSource(settings, decode, threads=2) as source:
        batches = Pipeline(source).to_batches(BATCHES)
        reading = iter(batches)
        for number in range(3):
            send(topic, [number])
            assert batch_ids(next(reading)) == [number]
            assert batches.position()["offsets"] == {topic: {"0": number + 1}}
        position = batches.position()
        position["offsets"][topic]["0"] = 1
        batches.restore(position)  # while the source is polled
        reading = iter(batches)
        assert batch_ids(next(reading)) == [1, 2]
    assert time.monotonic() - begin < long.total_seconds()  # and closed


def test_on_bad_is_called_by_one_thread_at_a_time() -> None:
    places: list[int] = []
    bad = BadRecord(1, "of a thread that makes batches", b"")

    def on_bad(record: BadRecord) -> None:
        if not places:
            places.append(record.place)
            other.start()
            other.join(0.1)
            places.append(record.place)
        else:
            places.append(record.place)

    source = KafkaSource(
        KafkaConfig(servers=("nowhere:1",), topics=("clicks",), group="us"), decode, on_bad=on_bad
    )
    other = threading.Thread(target=source.reject, args=([bad],))
    source.reject([BadRecord(0, "of another", b"")])
    other.join()
    assert places == [0, 0, 1]


# The sink


def test_messages_of_one_key_go_to_one_partition(kafka: Kafka) -> None:
    topic = kafka.create_topic(partitions=3)
    keys = [b"a", b"b", b"c", b"d"] * 5
    texts = [key + b"%d" % number for number, key in enumerate(keys)]
    with KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS) as sink:
        sink.write(Records(20, {"value": string_column(texts), "key": string_column(keys)}))
    partition_of: dict[bytes, set[int]] = {}
    for worker in range(3):
        settings = config(kafka, topic, assignment=ByWorker(worker=worker, num_workers=3))
        with create_plain_kafka_dataset(settings) as source:
            for records in source:
                for (text,) in records.strings("value"):
                    partition_of.setdefault(text[:1], set()).add(worker)
    assert {key: len(found) for key, found in partition_of.items()} == {b"a": 1, b"b": 1, b"c": 1, b"d": 1}
    assert len(set.union(*partition_of.values())) > 1


def test_what_could_not_be_delivered_is_raised() -> None:
    address = f"127.0.0.1:{free_port()}"
    sink = KafkaSink((address,), "t", delivery_timeout=timedelta(seconds=1), settings=PRODUCER_SETTINGS)
    sink.send([b"1", b"2"])
    with pytest.raises(
        DataError, match=f"2 messages to topic 't' were not delivered to {address} within 0:00:00"
    ):
        sink.flush(timedelta(milliseconds=10))
    with pytest.raises(DataError, match=f"2 messages to topic 't' were not delivered to {address}: "):
        sink.flush()
    sink.flush()  # said once


def test_a_record_to_send_has_one_payload() -> None:
    sink = KafkaSink(("127.0.0.1:1",), "t", settings=PRODUCER_SETTINGS)
    with pytest.raises(DataError, match="must have one string in column 'value'"):
        sink.write(Records(1, {"value": RaggedTensor.from_list([[[1], [2]]], torch.uint8)}))


# What makes no sense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "kafka:9092"}, "servers must be a tuple"),
        ({"topics": ()}, "topics must be a tuple of at least one"),
        ({"topics": ("a", "a")}, "names one twice"),
        ({"group": ""}, "group must not be empty"),
        ({"poll_batch": 0}, "poll_batch must be at least 1"),
        ({"start": "now"}, "start must be one of earliest, latest, got 'now'"),
        ({"poll_timeout": timedelta(-1)}, "poll_timeout must not be negative"),
        ({"settings": {"group.id": "x"}}, "give 'group.id' as group"),
        ({"settings": {"enable.auto.commit": True}}, "'enable.auto.commit' cannot be set"),
    ],
)
def test_a_config_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KafkaConfig(**{"servers": ("kafka:9092",), "topics": ("a",), "group": "g", **options})


def test_a_worker_is_one_of_the_workers() -> None:
    with pytest.raises(ConfigError, match="worker must be from 0 to num_workers - 1 = 1, got 2"):
        ByWorker(worker=2, num_workers=2)


def test_a_setting_the_client_does_not_know_is_named() -> None:
    settings = KafkaConfig(servers=("kafka:9092",), topics=("a",), group="g", settings={"no.such": 1})
    with pytest.raises(ConfigError, match="does not take the settings"):
        next(iter(KafkaSource(settings, decode)))
    with pytest.raises(ConfigError, match="does not take the settings"):
        KafkaSink(("kafka:9092",), "a", settings={"no.such": 1})


def test_settings_are_read_as_command_lines_have_them() -> None:
    assert read_settings(["a.b=c", "d=e=f"]) == {"a.b": "c", "d": "e=f"}
    with pytest.raises(ConfigError, match="must be key=value, got 'a'"):
        read_settings(["a"])


def test_a_closed_source_cannot_be_read(kafka: Kafka, topic: str) -> None:
    source = KafkaSource(config(kafka, topic), decode)
    source.close()
    source.close()
    with pytest.raises(DataError, match="was closed"):
        list(source)


def test_without_the_client_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtraError, match=r"confluent-kafka.*monolith-recsys\[kafka\]"):
        KafkaSink(("kafka:9092",), "t")


def test_the_login_reaches_the_client_and_is_not_printed() -> None:
    config = KafkaConfig(
        servers=("kafka:9092",),
        topics=("a",),
        group="g",
        username="me",
        password=Secret("hunter2"),
        settings={"security.protocol": "SASL_SSL"},
    )
    assert config.client_settings == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "me",
        "sasl.password": "hunter2",
    }
    assert "hunter2" not in repr(config)


# Messages in JSON


def test_json_messages_are_read_by_declared_columns() -> None:
    read = JsonMessages({"user": int, "price": float, "title": str, "tags": "int64"})
    records, bad = read(
        [
            b'{"user": 7, "price": 2, "title": "hi", "tags": [1, null, 2], "other": {"deep": 1}}',
            b'{"price": null, "tags": []}',
            b'{"user": 18446744073709551615}',
        ]
    )
    assert not bad
    assert records["user"].to_list() == [[7], [], [-1]]  # an unsigned id keeps its bits
    assert records["price"].to_list() == [[2.0], [], []]
    assert records.strings("title") == [[b"hi"], [], []]
    assert records["tags"].to_list() == [[1, 2], [], []]


@pytest.mark.parametrize(
    "message, reason",
    [
        (b"nonsense", "Expecting value"),
        (b"[1]", "expected an object, got a list"),
        (b'{"user": "seven"}', "key 'user': 'seven' is not a whole number"),
        (b'{"user": 7.5}', "not a whole number"),
        (b'{"user": {"id": 7}}', "not a whole number"),
        (b'{"user": 99999999999999999999}', "does not fit into 64 bits"),
        (b'{"title": 7}', "not a text"),
        (b'{"title": "\xff"}', "codec can't decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_message_of_another_form_is_bad_and_those_around_it_are_read(message: bytes, reason: str) -> None:
    records, (bad,) = JsonMessages({"user": int, "title": str})([b'{"user": 1}', message, b'{"user": 2}'])
    assert records["user"].to_list() == [[1], [2]]
    assert (bad.place, bad.payload) == (1, message)
    assert reason in bad.reason


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_that_decode_a_poll_change_neither_records_nor_what_is_bad(threads: int) -> None:
    payloads = [b'{"user": %d, "tags": [%d, 2]}' % (n, n) for n in range(1500)]
    payloads[700:703] = [b"nonsense", b'{"user": 5, "user": 6}', b'{"user": 1.5}']
    columns: dict[str, ColumnType] = {"user": int, "tags": int}
    records, bad = JsonMessages(columns, workers=native.Workers(threads))(payloads)
    users = [[n] for n in range(700)] + [[6]] + [[n] for n in range(703, 1500)]
    assert records["user"].to_list() == users  # a key that comes twice has its last value, as in Python
    assert records["tags"].to_list()[699:702] == [[699, 2], [], [703, 2]]
    assert [(one.place, one.payload) for one in bad] == [(700, b"nonsense"), (702, b'{"user": 1.5}')]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_that_decode_csv_change_neither_records_nor_what_is_bad(threads: int) -> None:
    payloads = [b'%d,"a, b",%d' % (n, n) for n in range(1500)]
    payloads[700:703] = [b"1,2,3\n4,5,6", b"x,,7\r\n", b'8,"a,8']
    read = CsvMessages(("user", "words", "tag"), {"user": int, "words": str}, workers=native.Workers(threads))
    records, bad = read(payloads)
    assert records["user"].to_list() == [[n] for n in range(1500) if not 700 <= n < 703]
    assert records.strings("words") == [[b"a, b"]] * 1497
    assert [(one.place, one.payload) for one in bad] == [(n, payloads[n]) for n in (700, 701, 702)]
    empty, none = read([])
    assert (len(empty), list(empty.columns), list(none)) == (0, ["user", "words"], [])


def test_json_messages_need_columns_of_known_types() -> None:
    with pytest.raises(ConfigError, match="at least one column"):
        JsonMessages({})
    with pytest.raises(ConfigError, match="column 'a' must be int, float or str"):
        JsonMessages({"a": list})  # type: ignore[dict-item]


# Runs of messages


def test_messages_of_a_poll_cost_no_line_of_python_each(kafka: Kafka, send: Callable[..., None]) -> None:
    topic = kafka.create_topic(partitions=2)
    for partition in range(2):
        send(topic, range(partition * 1000, partition * 1000 + 500), partition)
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != kafka_source.__file__:
            return None
        lines += event == "line"
        return count

    many = config(kafka, topic, poll_batch=1000, batch_wait=timedelta(seconds=5))
    with KafkaSource(many, JsonMessages({"id": int}), metrics=Metrics()) as source:
        batches = iter(source)
        source.position()  # connects, which is not counted
        before = sys.gettrace()
        sys.settrace(count)
        try:
            found = ids(next(batches))
        finally:
            sys.settrace(before)
        assert len(found) > 100
        assert 0 < lines < 150, f"{lines} lines for {len(found)} messages"


@pytest.mark.parametrize(
    ("offsets", "begin", "end", "kept"),
    [
        ([5, 6, 7], 5, inf, [5, 6, 7]),
        ([5, 6, 7], 6, inf, [6, 7]),
        ([5, 6, 7], 5, 7, [5, 6]),
        ([5, 8, 9], 5, inf, [5, 8, 9]),  # a compacted topic
        ([5, 6, 5, 6, 7], 5, inf, [5, 6, 7]),  # assigned again within the poll
        ([1, 1, 3], 0, inf, [1, 3]),
        ([5, 6], inf, inf, []),  # not assigned
    ],
)
def test_a_run_gives_each_message_that_is_to_be_read_once(
    offsets: list[int], begin: float, end: float, kept: list[int]
) -> None:
    messages: list[Any] = [f"message {offset}" for offset in offsets]
    run = kafka_source._Run(("clicks", 0), messages, offsets).within(begin, end)
    assert run.offsets == kept
    assert run.messages == [f"message {offset}" for offset in kept]


# Histories


def test_workers_on_partitions_by_user_build_the_same_histories_after_a_restart_with_any_number_of_them(
    kafka: Kafka, send: Callable[..., None]
) -> None:
    topic = kafka.create_topic(partitions=2)
    for user in range(2):
        send(topic, range(user * 1000, user * 1000 + 100), user)
    found: dict[int, list[int]] = {}

    def pipeline(worker: int, workers: int) -> Pipeline:
        def with_user(records: Records) -> Records:
            return records.with_columns({"user": _each(records, lambda number: number // 1000)})

        source = KafkaSource(config(kafka, topic, assignment=None, poll_batch=8), decode)
        made = Pipeline(source).map(with_user).history(HistoryConfig(by="user", of="id", max=3, time="id"))
        made.read_shard(Shard(worker, workers))
        return made

    def read(stream: Pipeline, batches: int | None = None) -> None:
        for records in itertools.islice(stream, batches):
            found.update(zip(ids(records), records["history"].to_list(), strict=True))

    with ExitStack() as stack:
        first = [stack.enter_context(closing(pipeline(worker, 2))) for worker in range(2)]
        positions = [one.position() for one in first]
        for number, one in enumerate(first):
            read(one, 2 + number)
            positions[number] = json.loads(json.dumps(one.position()))
    with closing(pipeline(0, 2)) as again:
        again.restore(positions[0])
        read(again, 2)
        positions[0] = again.position()
    with closing(pipeline(0, 1)) as alone:
        [position] = alone.redistribute(positions, 1)
        alone.restore(position)
        read(alone)
    expected = {
        user * 1000 + number: [user * 1000 + one for one in range(max(number - 3, 0), number)]
        for user in range(2)
        for number in range(100)
    }
    assert found == expected


def _each(records: Records, function: Callable[[int], int]) -> RaggedTensor:
    return records["id"].with_flat_values(torch.tensor([function(number) for number in ids(records)]))
