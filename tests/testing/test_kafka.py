"""The simulated broker passes the tests of the real one, but those that look at a real clock or process."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from contracts import test_delta_channel
from data import test_kafka
from data.test_kafka import payload
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from sync.delta_channels import KafkaChannel

from monolith import concurrency
from monolith.data import Shard
from monolith.data.kafka import KafkaSink, KafkaSource
from monolith.data.kafka.config import import_kafka
from monolith.testing.kafka import SimConsumer, SimKafka
from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import Simulation


class Broker:
    """A simulated broker, as tests know the real one."""

    address = "kafka:9092"

    def __init__(self, kafka: SimKafka) -> None:
        self.kafka = kafka
        self._numbers = itertools.count()

    def create_topic(self, name: str | None = None, partitions: int = 1) -> str:
        return self.kafka.create_topic(name or f"topic-{next(self._numbers)}", partitions)

    def send(self, topic: str, numbers: range | list[int], partition: int | None = None) -> None:
        with KafkaSink((self.address,), topic) as sink:
            sink.send([payload(number) for number in numbers], partition=partition)


def simulate(play: Callable[[Broker], object], seed: int = 0) -> None:
    """Run a function on a machine that uses a simulated broker."""
    simulation = Simulation(seed)
    broker = SimKafka(SimNetwork(simulation))

    def client() -> None:
        broker.attach()
        play(Broker(broker))

    def stage() -> None:
        simulation.machine("kafka").spawn(broker.serve)
        concurrency.sleep(0.1)
        simulation.machine("client").spawn(client).join()

    simulation.run(stage)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "test",
    [
        test_kafka.test_messages_of_a_partition_come_in_order_and_each_once,
        test_kafka.test_a_batch_has_as_many_messages_as_were_asked_for_and_waits_a_moment_only,
        test_kafka.test_the_time_the_caller_takes_is_no_silence,
        test_kafka.test_it_begins_with_the_earliest_message_or_with_the_next_one,
        test_kafka.test_several_topics_are_read_by_workers_with_different_partitions,
        test_kafka.test_a_worker_without_partitions_just_waits,
        test_kafka.test_plain_strings_are_yielded_as_they_are,
        test_kafka.test_a_position_names_the_first_message_that_was_not_yielded,
        test_kafka.test_a_restored_source_yields_exactly_what_was_left,
        test_kafka.test_it_can_be_restored_between_iterations,
        test_kafka.test_positions_of_all_workers_restore_into_another_number_of_workers,
        test_kafka.test_workers_read_only_the_partitions_that_the_chief_assigns,
        test_kafka.test_a_worker_that_was_dealt_nothing_yet_waits_until_it_is_or_is_interrupted,
        test_kafka.test_malformed_messages_are_counted_passed_on_and_dropped,
        test_kafka.test_a_batch_of_malformed_messages_only_is_skipped,
        test_kafka.test_lag_is_shown_for_each_partition,
        test_kafka.test_a_group_is_restored_to_a_position_and_not_to_what_it_had_committed,
        test_kafka.test_what_a_member_of_a_group_read_and_did_not_commit_comes_again,
        test_kafka.test_an_offset_committed_by_the_same_run_wins_over_the_restored_position,
        test_kafka.test_a_closed_source_cannot_be_read,
    ],
    ids=lambda test: getattr(test, "__name__", str(test)).removeprefix("test_"),
)
def test_as_with_the_real_broker(test: Callable[..., None], seed: int) -> None:
    def play(broker: Broker) -> None:
        given = {"kafka": broker, "send": broker.send}
        wanted = inspect.signature(test).parameters
        if "topic" in wanted:
            given["topic"] = broker.create_topic()
        test(**{name: given[name] for name in wanted})

    simulate(play, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "test",
    [one for name, one in vars(test_delta_channel).items() if name.startswith("test_")],
    ids=lambda test: getattr(test, "__name__", str(test)).removeprefix("test_"),
)
def test_a_delta_channel_as_with_the_real_broker(test: Callable[..., None], seed: int) -> None:
    def play(broker: Broker) -> None:
        with ExitStack() as stack:
            test(KafkaChannel(stack, broker))  # type: ignore[arg-type]

    simulate(play, seed)


# Of the client alone. Each of these is true of the real broker, too.


def deliver(library: Any, broker: Kafka | Broker) -> None:
    """A delivery report has the offset of its message, and comes inside of a poll or a flush."""
    topic = broker.create_topic(partitions=2)
    producer = library.Producer({**PRODUCER_SETTINGS, "bootstrap.servers": broker.address})
    reports: list[tuple[Any, int, int]] = []

    def report(error: Any, message: Any) -> None:
        reports.append((error, message.partition(), message.offset()))

    for number in range(6):
        producer.produce(topic, b"x", partition=number % 2, on_delivery=report)
    concurrency.sleep(0.5)
    assert not reports, "before a poll"
    assert producer.flush(30.0) == 0
    assert sorted(reports) == [(None, partition, offset) for partition in range(2) for offset in range(3)]


def purge(library: Any, broker: Kafka | Broker) -> None:
    """Messages that cannot be delivered are given up by a purge, each with a report of an error."""
    topic = broker.create_topic()
    nowhere = {**PRODUCER_SETTINGS, "bootstrap.servers": "127.0.0.1:9", "log_level": 0}
    producer = library.Producer(nowhere)
    errors: list[int] = []
    for _ in range(3):
        producer.produce(topic, b"x", partition=0, on_delivery=lambda error, _: errors.append(error.code()))
    assert producer.flush(0.3) == 3
    producer.purge()
    assert producer.flush(10.0) == 0
    assert set(errors) <= {library.KafkaError._PURGE_QUEUE, library.KafkaError._PURGE_INFLIGHT}
    assert len(errors) == 3


def expire(library: Any, broker: Kafka | Broker) -> None:
    """A message that is not delivered within its time is given up."""
    topic = broker.create_topic()
    settings = {**PRODUCER_SETTINGS, "bootstrap.servers": "127.0.0.1:9", "log_level": 0}
    producer = library.Producer({**settings, "message.timeout.ms": 300})
    errors: list[int] = []
    producer.produce(topic, b"x", partition=0, on_delivery=lambda error, _: errors.append(error.code()))
    assert producer.flush(30.0) == 0
    assert errors == [library.KafkaError._MSG_TIMED_OUT]


def describe(library: Any, broker: Kafka | Broker) -> None:
    """Metadata tell the partitions of a topic, and that one does not exist."""
    topic = broker.create_topic(partitions=3)
    settings = {**CONSUMER_SETTINGS, "bootstrap.servers": broker.address}
    for client in (
        library.Consumer({**settings, "group.id": "describe"}),
        library.admin.AdminClient({**settings, "log_level": 0}),
    ):
        assert sorted(client.list_topics(topic, timeout=10.0).topics[topic].partitions) == [0, 1, 2]
        error = (
            client.list_topics("a-topic-of-a-name-that-nobody-uses", timeout=10.0).topics.popitem()[1].error
        )
        assert error.code() == library.KafkaError.UNKNOWN_TOPIC_OR_PART


CLIENT = [deliver, purge, expire, describe]


@pytest.mark.parametrize("case", CLIENT)
def test_a_client_of_the_real_broker(case: Callable[..., None], kafka: Kafka) -> None:
    case(import_kafka(), kafka)


@pytest.mark.parametrize("case", CLIENT)
def test_a_client_of_the_simulated_broker(case: Callable[..., None]) -> None:
    def play(broker: Broker) -> None:
        if case in (purge, expire):
            broker.kafka.machine = None  # a client of this broker cannot be given another address
        case(import_kafka(), broker)

    simulate(play)


def test_a_client_creates_topics_and_deletes_messages() -> None:
    """The real broker of these tests is too old for both requests."""

    def play(broker: Broker) -> None:
        library = import_kafka()
        admin = library.admin.AdminClient({})
        create = [library.admin.NewTopic("deltas", num_partitions=2)]
        assert admin.create_topics(create)["deltas"].result(10.0) is None
        with pytest.raises(library.KafkaException) as refused:
            admin.create_topics(create)["deltas"].result(10.0)
        assert refused.value.args[0].code() == library.KafkaError.TOPIC_ALREADY_EXISTS
        broker.send("deltas", range(5), partition=1)
        place = library.TopicPartition("deltas", 1, 3)
        for future in admin.delete_records([place]).values():
            future.result(10.0)
        assert library.Consumer({"group.id": "g"}).get_watermark_offsets(place) == (3, 5)
        broker.kafka.deletes_records = False
        with pytest.raises(library.KafkaException):
            admin.delete_records([place]).popitem()[1].result(10.0)

    simulate(play)


def test_an_offset_that_was_deleted_is_an_error_and_not_a_jump() -> None:
    def play(broker: Broker) -> None:
        topic = broker.create_topic()
        broker.send(topic, range(5))
        log = broker.kafka.logs[topic, 0]
        with test_kafka.KafkaSource(
            test_kafka.config(broker, topic, poll_batch=1), test_kafka.decode
        ) as source:
            next(iter(source))
            position = source.position()
            log.values, log.low = log.values[3:], 3
            with pytest.raises(test_kafka.RestoreError, match="they were deleted since"):
                source.restore(position)

    simulate(play)


def test_a_commit_of_an_old_generation_is_refused() -> None:
    def play(broker: Broker) -> None:
        topic = broker.create_topic()
        kafka = broker.kafka
        first = kafka.join("g", "", [topic], 6.0)
        generation, partitions = kafka.sync("g", first)
        assert partitions == [(topic, 0)]
        kafka.join("g", "", [topic], 6.0)
        assert kafka.heartbeat("g", first, generation) == "rebalance"
        assert kafka.commit("g", first, generation, {(topic, 0): (1, "")}) == 0, "before it has rejoined"
        kafka.join("g", first, [topic], 6.0)
        assert kafka.sync("g", first)[0] == generation + 1
        assert kafka.commit("g", first, generation, {(topic, 0): (2, "")}) != 0
        assert kafka.commit("g", None, -1, {(topic, 0): (2, "")}) != 0, "not of the group"
        assert kafka.committed["g", (topic, 0)][0] == 1
        concurrency.sleep(10)
        assert kafka.heartbeat("g", first, generation + 1) == "unknown", "it was silent for too long"

    simulate(play)


def test_partitions_that_are_added_to_a_topic_are_read_by_a_run_within_a_minute() -> None:
    seen: list[int] = []

    def read(broker: Broker) -> None:
        topic = broker.create_topic(partitions=1)
        broker.send(topic, [1], partition=0)
        config = test_kafka.config(
            broker,  # type: ignore[arg-type]
            topic,
            start="latest",
            poll_timeout=timedelta(seconds=1),
            stream_timeout=timedelta(seconds=90),
        )
        with KafkaSource(config, test_kafka.decode) as source:
            source.read_shard(Shard(0, 1))
            source.position()  # connects, and notes what is there
            broker.create_topic(topic, partitions=3)
            broker.send(topic, [2], partition=2)
            for records in source:
                seen.extend(test_kafka.ids(records))

    simulate(read)
    assert seen == [2], "all of an added partition is new, and not only what comes after it was noticed"


def test_a_stream_does_not_end_because_its_broker_was_away_for_longer_than_the_stream_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(0)
    kafka = SimKafka(SimNetwork(simulation))
    seen: list[int] = []
    away = range(-9, -9)
    fetch = SimConsumer._fetch

    def fetch_late(consumer: SimConsumer) -> None:
        if not away.start <= simulation.now < away.stop + 3:
            fetch(consumer)  # a client needs some seconds to find a broker again

    def read() -> None:
        nonlocal away
        kafka.attach()
        broker = Broker(kafka)
        topic = broker.create_topic()
        broker.send(topic, range(3))
        config = test_kafka.config(
            broker,  # type: ignore[arg-type]
            topic,
            poll_timeout=timedelta(seconds=0.2),
            stream_timeout=timedelta(seconds=1),
        )
        with KafkaSource(config, test_kafka.decode) as source:
            source.read_shard(Shard(0, 1))
            for records in source:
                seen.extend(test_kafka.ids(records))
                if len(seen) == 3:
                    broker.send(topic, range(3, 6))
                    simulation.machines[1].kill()
                    away = range(int(simulation.now), int(simulation.now) + 30)
                    simulation.machine("kafka").spawn(lambda: (concurrency.sleep(30), kafka.serve()))

    def stage() -> None:
        simulation.machine("kafka").spawn(kafka.serve)
        concurrency.sleep(0.1)
        simulation.machine("client").spawn(read).join()

    monkeypatch.setattr(SimConsumer, "_fetch", fetch_late)
    simulation.run(stage)
    assert seen == [*range(6)]
