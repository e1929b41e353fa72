"""Messages of a training run to a Kafka topic, from a thread of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from monolith.data.kafka.client_log import ClientLog
from monolith.data.kafka.config import check_settings, import_kafka
from monolith.errors import ConfigError
from monolith.train.hook import Hook, Run
from monolith.train.hooks.reports.metric_sinks import MessageCounts, MessageQueue

_log = logging.getLogger(__name__)

_PAUSE_S = 0.2


class Producer(Protocol):
    """Sends messages to one topic; used by one thread at a time."""

    def send(self, payload: bytes, done: Callable[[bool], None]) -> None:
        """Take a message; `done` hears later, from any call, whether it was delivered."""

    def flush(self, timeout: timedelta) -> int:
        """Wait for what is on its way; return how many messages nothing was heard of."""


class KafkaProducer:
    """A producer of confluent-kafka, from which each message's own end can be heard.

    Args:
        delivery_timeout: How long a message may wait for a broker to take it.
        settings: Anything else librdkafka knows.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
        ConfigError: The client does not take the settings.
    """

    def __init__(
        self,
        brokers: Sequence[str],
        topic: str,
        *,
        delivery_timeout: timedelta = timedelta(seconds=30),
        settings: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._kafka = import_kafka()
        self._topic = topic
        check_settings(settings or {}, ())
        chosen: dict[str, Any] = {
            "linger.ms": 50,
            "message.timeout.ms": round(delivery_timeout.total_seconds() * 1000),
            **(settings or {}),
            "bootstrap.servers": ",".join(brokers),
        }
        try:
            self._producer = self._kafka.Producer(chosen, logger=ClientLog(_log))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka metrics: the client rejects the settings: {cause}") from cause

    def send(self, payload: bytes, done: Callable[[bool], None]) -> None:
        while True:
            try:
                self._producer.produce(
                    self._topic, payload, on_delivery=lambda error, _message: done(error is None)
                )
                break
            except BufferError:  # full: what is in it is delivered or given up within delivery_timeout
                self._producer.poll(_PAUSE_S)
        self._producer.poll(0)

    def flush(self, timeout: timedelta) -> int:
        left: int = self._producer.flush(timeout.total_seconds())
        return left


class KafkaMetricHook(Hook):
    """Forwards messages to Kafka while a run lasts.

    `put` never waits. When the run ends, however it does, what is queued is sent and waited for, at
    most `flush_timeout`; what was not delivered by then counts as failed.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        capacity: int = 100_000,
        flush_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self._producer = producer
        self._open = True
        self._timeout = flush_timeout
        self._queue = MessageQueue("kafka-metrics", self._send, capacity=capacity, clock=time.monotonic)

    @property
    def counts(self) -> MessageCounts:
        return self._queue.counts

    def put(self, messages: Sequence[str]) -> None:
        if self._open:
            self._queue.put(messages)

    def begin(self, run: Run) -> None:  # noqa: ARG002
        self._queue.start()

    def end(self, run: Run) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._queue.finish()
            self._queue.settle(failed=self._producer.flush(self._timeout))

    def _send(self, message: str) -> bool:
        self._producer.send(message.encode(), self._heard)
        return False

    def _heard(self, delivered: bool) -> None:
        self._queue.settle(success=int(delivered), failed=int(not delivered))
