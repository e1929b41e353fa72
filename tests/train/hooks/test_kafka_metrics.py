"""Messages to Kafka: forwarded from a thread, each one accounted for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka
from services.servers import free_port

from monolith.data.kafka import ByWorker, KafkaConfig, KafkaSource, plain_strings
from monolith.errors import MissingExtraError
from monolith.train.hooks.deep_insight import KafkaMetricHook, KafkaProducer
from monolith.train.hooks.metric_sinks import MessageCounts


class FakeProducer:
    """Delivers at once, or as its `outcomes` say: False is a failure, None is never heard of again."""

    def __init__(self, *outcomes: bool | None) -> None:
        self.payloads: list[bytes] = []
        self.flushed: list[timedelta] = []
        self._outcomes = iter(outcomes)
        self._silent = 0

    def send(self, payload: bytes, done: Callable[[bool], None]) -> None:
        self.payloads.append(payload)
        outcome = next(self._outcomes, True)
        if outcome is None:
            self._silent += 1
        else:
            done(outcome)

    def flush(self, timeout: timedelta) -> int:
        self.flushed.append(timeout)
        return self._silent


def run(hook: KafkaMetricHook, *messages: str) -> None:
    hook.begin(None)  # type: ignore[arg-type]
    hook.put(messages)
    hook.end(None)  # type: ignore[arg-type]
    hook.close()


def test_messages_are_forwarded_in_order_and_flushed_once_at_the_end() -> None:
    producer = FakeProducer()
    hook = KafkaMetricHook(producer, flush_timeout=timedelta(seconds=5))
    run(hook, "a", "ü")
    assert producer.payloads == [b"a", "ü".encode()]
    assert producer.flushed == [timedelta(seconds=5)]
    assert hook.counts == MessageCounts(total=2, success=2)


def test_each_message_ends_as_a_success_or_a_failure() -> None:
    hook = KafkaMetricHook(FakeProducer(True, False, None, True))
    run(hook, "a", "b", "c", "d")
    assert hook.counts == MessageCounts(total=4, success=2, failed=2)


def test_a_producer_that_raises_fails_that_message_only() -> None:
    class Picky(FakeProducer):
        def send(self, payload: bytes, done: Callable[[bool], None]) -> None:
            if payload == b"bad":
                raise RuntimeError("too large")
            super().send(payload, done)

    hook = KafkaMetricHook(Picky())
    run(hook, "good", "bad", "good")
    assert hook.counts == MessageCounts(total=3, success=2, failed=1)


def test_messages_after_the_end_are_dropped() -> None:
    producer = FakeProducer()
    hook = KafkaMetricHook(producer)
    run(hook)
    hook.put(["late"])
    assert producer.payloads == []


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtraError, match=r"monolith-recsys\[kafka\]"):
        KafkaProducer(["a:1"], "t")


def test_brokers_that_do_not_answer_make_failures_and_not_a_hang() -> None:
    producer = KafkaProducer(
        [f"127.0.0.1:{free_port()}"],
        "t",
        delivery_timeout=timedelta(milliseconds=300),
        settings={"linger.ms": 0},
    )
    hook = KafkaMetricHook(producer, flush_timeout=timedelta(seconds=20))
    run(hook, "a", "b")
    assert hook.counts == MessageCounts(total=2, failed=2)


def test_a_real_broker_has_what_was_forwarded(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    hook = KafkaMetricHook(KafkaProducer([kafka.address], topic, settings=PRODUCER_SETTINGS))
    run(hook, *(f"message {n}" for n in range(20)))
    assert hook.counts == MessageCounts(total=20, success=20)
    config = KafkaConfig(
        servers=(kafka.address,),
        topics=(topic,),
        group="readers",
        assignment=ByWorker(worker=0, num_workers=1),
        poll_timeout=timedelta(seconds=1),
        stream_timeout=timedelta(seconds=1),
        settings=CONSUMER_SETTINGS,
    )
    with KafkaSource(config, plain_strings) as source:
        found = [text for records in source for row in records.strings("value") for text in row]
    assert sorted(found) == sorted(f"message {n}".encode() for n in range(20))
