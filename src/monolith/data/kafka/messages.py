"""Messages of Kafka: decoders that make records of them, and the sink that sends them.

decode = JsonMessages({"user": int, "price": float})       # for a KafkaSource
with KafkaSink(["kafka:9092"], "clicks") as sink: sink.send([b"..."])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from monolith import native
from monolith.data.format import BadRecord
from monolith.data.formats.csv import csv_parser, csv_records
from monolith.data.formats.json_lines import JsonRows, Row
from monolith.data.formats.memory import ColumnType, column_types
from monolith.data.kafka.config import ClientLog, check_settings, import_kafka
from monolith.data.records import Records, concat, text_rows
from monolith.errors import ConfigError, DataError
from monolith.feature.spec.problems import BadReason
from monolith.tensors import RaggedTensor

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

_PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class JsonMessages:
    """Decodes messages that are JSON objects: {"user": 17, "tags": [3, 9], "price": 0.5, "title": "hi"}.

    A key that is missing, null and [] are no values, and other keys than the columns are ignored. What is
    not an object in JSON, or has a value of another type than its column, is a bad message.

    Args:
        columns: Name to its type: int, float or str. Lists of these are columns as well.
        workers: Threads that decode the messages of one poll; the result is the same without.

    Raises:
        ConfigError: There is no column, or no such type.
    """

    def __init__(self, columns: Mapping[str, ColumnType], *, workers: native.Workers | None = None) -> None:
        if not columns:
            raise ConfigError("json messages: need at least one column")
        self._rows = JsonRows(column_types(columns, "json messages"))
        self._workers = workers

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        bad: list[BadRecord] = []

        def judge(place: int, _: int, read: Callable[[bytes], Row]) -> Row | None:
            try:
                return read(payloads[place])
            except (ValueError, RecursionError) as cause:  # malformed JSON and UTF-8, too
                reason = BadReason("not JSON as declared: …", str(cause))
                bad.append(BadRecord(place, reason, payloads[place]))
                return None

        parsed = self._rows.native.parse_texts(payloads, self._workers)
        return concat([self._rows.records(part, judge) for part in parsed]), bad


class CsvMessages:
    """Decodes messages that are one line of CSV each, without a header: b"u17,3,0.5".

    An empty field is no value. A message of several lines, with another number of fields, or with a value of
    another type than its column, is a bad one.

    Args:
        fields: The names of all fields, in their order.
        columns: The fields to read, and the type of each, as of `JsonMessages`.
        workers: Threads that decode the messages of one poll; the result is the same without.

    Raises:
        ConfigError: A column is none of the fields, or there is no such type.
    """

    def __init__(
        self,
        fields: Sequence[str],
        columns: Mapping[str, ColumnType],
        *,
        delimiter: str = ",",
        workers: native.Workers | None = None,
    ) -> None:
        if strange := [name for name in columns if name not in fields]:
            raise ConfigError(
                f"csv messages: there is no field {strange[0]!r}; the fields of a message are "
                f"{', '.join(fields) or 'not named: set columns'}"
            )
        types = column_types(columns, "csv messages")
        self._names = [name for name in fields if name in types]
        self._parser = csv_parser(fields, {name: types[name] for name in self._names}, delimiter)
        self._workers = workers

    def __call__(self, payloads: list[bytes], /) -> tuple[Records, Sequence[BadRecord]]:
        """Return the records in order, and what could not be read: `place` is the position in `payloads`."""
        bad: list[BadRecord] = []
        parts = self._parser.parse_texts(payloads, self._workers)
        for part in parts:
            for place, _, reason, column, value in part.bad:
                where = "" if column is None else f"{self._names[column]!r}: {value!r} "
                bad.append(
                    BadRecord(place, BadReason("not CSV as declared: …", where + reason), payloads[place])
                )
        return concat([csv_records(part, self._names) for part in parts]), bad


VALUE = "value"
"""The column of strings that `plain_strings` fills and `KafkaSink.write` sends."""
KEY = "key"
"""The column of strings by which `KafkaSink.write` chooses the partition, where a record has one."""


def plain_strings(payloads: list[bytes]) -> tuple[Records, Sequence[BadRecord]]:
    """Decode nothing: one record per message, its bytes in the column `value`."""
    return Records(len(payloads), {VALUE: string_column(payloads)}), ()


def string_column(strings: Sequence[bytes]) -> RaggedTensor:
    """Return a column with one string per record."""
    return RaggedTensor(text_rows(strings), torch.arange(len(strings) + 1), validate=False)


class KafkaSink:
    """Sends messages to a topic. One thread writes at a time. Failed deliveries raise an error."""

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
        """Send messages; they are delivered after `flush`.

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
                    # The client's buffer is full: wait until some messages are delivered.
                    self._producer.poll(_PAUSE_S)
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
        """Deliver all messages that were sent."""
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
