"""What is special to the delta channel through Kafka: topics, messages of others, a broker that is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from services.servers import free_port
from sync.delta_channels import Copy, KafkaChannel, SmallPublisher, until

from monolith.data.kafka import KafkaSink
from monolith.errors import ConfigError, UnavailableError
from monolith.sync.kafka_reader import KafkaDeltaReader
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
