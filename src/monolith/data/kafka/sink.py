"""The sink: messages to a topic, with whatever was not delivered raised."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from monolith.data.kafka.config import ClientLog, check_settings, import_kafka
from monolith.data.kafka.messages import KEY, VALUE
from monolith.data.records import Records
from monolith.errors import ConfigError, DataError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message


_PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class KafkaSink:
    """Sends messages to a topic. One thread writes at a time. What could not be delivered is raised."""

    def __init__(
        self,
        servers: Sequence[str],
        topic: str,
        *,
        delivery_timeout: timedelta = timedelta(minutes=2),
        settings: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        """
        Args:
            delivery_timeout: How long a message may wait for a broker to take it.
            settings: Anything else librdkafka knows. Unless they say otherwise every replica must have a
                message, and sending it again leaves no second copy.

        Raises:
            MissingExtraError: confluent-kafka is not installed.
        """
        self._kafka = import_kafka()
        self.topic = topic
        self._servers = ",".join(servers)
        self._undelivered = 0
        self._reason = ""
        check_settings(settings or {}, ())
        chosen: dict[str, Any] = {
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            "message.timeout.ms": round(delivery_timeout.total_seconds() * 1000),
            **(settings or {}),
            "bootstrap.servers": self._servers,
        }
        try:
            self._producer = self._kafka.Producer(chosen, logger=ClientLog(logger))
        except self._kafka.KafkaException as cause:
            raise ConfigError(f"kafka: the client does not take the settings: {cause}") from cause

    def send(
        self,
        payloads: Iterable[bytes],
        keys: Iterable[bytes | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Hand over messages; they are on their way when this returns, and there after `flush`.

        Args:
            keys: One for each payload. Messages of one key go to one partition; None goes to any.
            partition: Where all go, whatever the keys.

        Raises:
            DataError: Messages that were sent before could not be delivered.
        """
        where = {} if partition is None else {"partition": partition}
        paired = (
            ((payload, None) for payload in payloads) if keys is None else zip(payloads, keys, strict=True)
        )
        for payload, key in paired:
            while True:
                try:
                    self._producer.produce(self.topic, payload, key, on_delivery=self._on_delivery, **where)
                    break
                except BufferError:
                    self._producer.poll(
                        _PAUSE_S
                    )  # the client's buffer is full: wait for some to be delivered
                    self._check()
                except self._kafka.KafkaException as cause:
                    raise DataError(f"kafka: cannot send to topic {self.topic!r}: {cause}") from cause
        self._producer.poll(0)
        self._check()

    def write(self, records: Records) -> None:
        """Send the strings of column `value`, one per record, by those of column `key` if there are any."""
        payloads = records.strings(VALUE)
        keys = records.strings(KEY) if KEY in records.columns else [[] for _ in payloads]
        if not all(len(payload) == 1 for payload in payloads):
            raise DataError(f"kafka: a record to send must have one string in column {VALUE!r}")
        self.send((payload[0] for payload in payloads), (key[0] if key else None for key in keys))

    def flush(self, timeout: timedelta | None = None) -> None:
        """Wait until every message was delivered.

        Raises:
            DataError: Some could not be, or were not within `timeout`.
        """
        left = self._producer.flush(-1 if timeout is None else timeout.total_seconds())
        self._check()
        if left:
            raise DataError(
                f"kafka: {left} messages to topic {self.topic!r} were not delivered to {self._servers} "
                f"within {timeout}"
            )

    def close(self) -> None:
        """Deliver what is on its way."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._undelivered += 1
            self._reason = self._reason or str(error.str())

    def _check(self) -> None:
        if self._undelivered:
            count, reason = self._undelivered, self._reason
            self._undelivered, self._reason = 0, ""
            raise DataError(
                f"kafka: {count} messages to topic {self.topic!r} were not delivered to {self._servers}: "
                f"{reason}"
            )
