"""What is special to the delta channel through Kafka: topics, messages of others, a broker that is away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from services.servers import free_port
from sync.delta_channels import Copy, KafkaChannel, SmallPublisher, until

from monolith.data.kafka import KafkaSink
from monolith.errors import ConfigError, UnavailableError
from monolith.sync import LogPosition, ShardLog
from monolith.sync.kafka_reader import Envelope, KafkaDeltaReader, seal
from monolith.sync.kafka_writer import KafkaDeltaWriter


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_topic_with_fewer_partitions_than_shares_is_refused(stack: ExitStack, kafka: Kafka) -> None:
    writer = KafkaChannel(stack, kafka).writer()
    with pytest.raises(ConfigError, match="3 partitions, and 4 shards"):
        SmallPublisher(writer, shard=(0, 4))


def test_foreign_messages_are_skipped_and_reported(
    stack: ExitStack, kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    channel = KafkaChannel(stack, kafka)
    publisher, copy = SmallPublisher(channel.writer()), Copy()
    sink = KafkaSink([kafka.address], channel.topic, settings=PRODUCER_SETTINGS)
    reader = channel.reader()
    for number in range(3):
        publisher.publish([number])
        sink.send([b"hello"], partition=0)
        sink.flush()
        until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=0.1))
    assert "ignored the message" in caplog.text
    copy = Copy()
    fresh = channel.reader()
    until(lambda: copy.equals(publisher), lambda: copy.follow(fresh, wait=0.1))


def test_rows_that_arrive_after_their_epoch_do_not_hide_the_one_after_it(
    stack: ExitStack, kafka: Kafka
) -> None:
    channel = KafkaChannel(stack, kafka)
    publisher = SmallPublisher(channel.writer(clock=lambda: 2e9), epoch="ahead")
    copy, reader = Copy(), channel.reader()
    publisher.publish([1])
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=0.1))
    publisher.writer.close()
    log = ShardLog("run", (0, 1), LogPosition("before", 3), 1, {"item": 2})
    late = Envelope(log, 1e9, "session", 0, 0, 1, stream="abandoned")
    with KafkaSink([kafka.address], channel.topic, settings=PRODUCER_SETTINGS) as sink:
        sink.send([seal(late, b"rows")], partition=0)
    behind = SmallPublisher(channel.writer(clock=lambda: 1.5e9), epoch="behind")
    behind.publish([2])
    until(lambda: copy.equals(behind), lambda: copy.follow(reader, wait=0.1))


def test_a_snapshot_contains_the_deltas_before_its_mark(stack: ExitStack, kafka: Kafka) -> None:
    """Although its publisher does not know yet that the broker has the newest of them."""
    channel = KafkaChannel(stack, kafka)
    publisher = SmallPublisher(channel.writer())
    for number in range(3):
        publisher.publish([number])
    known, publisher.position = publisher.position, LogPosition("e1", 2)
    writer = publisher.writer
    assert isinstance(writer, KafkaDeltaWriter)
    until(lambda: publisher.snapshots > 1, lambda: (writer._maker.want(), time.sleep(0.1)))
    writer.close()
    publisher.position = known
    copy, reader = Copy(), channel.reader()
    until(lambda: copy.equals(publisher), lambda: copy.follow(reader, wait=0.1))


def test_a_broker_that_is_away_makes_both_ends_unavailable(stack: ExitStack) -> None:
    nowhere = [f"127.0.0.1:{free_port()}"]
    writer = KafkaDeltaWriter(
        nowhere, "topic", delivery_timeout=timedelta(seconds=1), settings=PRODUCER_SETTINGS, answer_within=1.0
    )
    with pytest.raises(UnavailableError, match="topic"):
        SmallPublisher(writer)
    writer.close()
    reader = KafkaDeltaReader(nowhere, "topic", settings=CONSUMER_SETTINGS, answer_within=1.0)
    stack.callback(reader.close)
    with pytest.raises(UnavailableError, match="topic"):
        reader.logs()
