"""Messages of Kafka in JSON, read into batches: by a `KafkaSource`, and by the client and the `json` module.

Both read the same topic from its first message on, with a new consumer in each round, so connecting is part
of the time. It needs a broker: without `--kafka` the rows are left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from monolith.data import (
    BatchSpec,
    ByWorker,
    JsonMessages,
    KafkaConfig,
    KafkaSink,
    KafkaSource,
    Pipeline,
    Records,
    make_batch,
)
from monolith.data.kafka import read_settings
from monolith.data.kafka.config import import_kafka
from monolith.errors import MissingExtraError
from monolith.feature import Batch
from monolith.tensors import RaggedTensor
from monolith_bench.options import BenchDataOptions
from monolith_bench.report import Report
from monolith_bench.timing import Contender, Timing, race

_ANSWER_S = 5.0
"""Seconds in which a broker must answer."""
_CLIENT = "client and json module, kafka"


def measure_kafka(
    options: BenchDataOptions, spec: BatchSpec, batch: int, records: Records, report: Report, timing: Timing
) -> None:
    """Measure reading records as messages; or say in a line why not."""
    if options.kafka is None:
        report.say("kafka: left out, as there is no --kafka host:port")
        return
    settings = read_settings(options.kafka_settings)
    try:
        missing = _make_topic(options.kafka, options.kafka_topic, settings)
    except MissingExtraError as cause:
        missing = str(cause)
    if missing:
        report.say(f"kafka: left out: {missing}")
        return
    report.say("kafka")
    payloads = messages(records)
    # What a producer alone understands, as sending safely, is not for consumers.
    with KafkaSink([options.kafka], options.kafka_topic, settings=_of(settings, "producer.")) as sink:
        sink.send(payloads)
    config = KafkaConfig(
        servers=(options.kafka,),
        topics=(options.kafka_topic,),
        group="monolith-bench",
        assignment=ByWorker(worker=0, num_workers=1),
        poll_batch=batch,
        settings=_of(settings, "consumer."),
    )
    count = len(records)
    runs = {
        "kafka": _contender(count, lambda: with_source(config, spec, count)),
        _CLIENT: _contender(count, lambda: with_client(config, spec, count)),
    }
    rates = race(runs, **timing)
    report.add(_CLIENT, "records_per_s", rates[_CLIENT], "records/s")
    report.compare("kafka", "records_per_s", rates["kafka"], "records/s", {_CLIENT: rates[_CLIENT]})
    report.show(f"{count:,} messages in JSON, {sum(map(len, payloads)) // count:,} bytes each")


def messages(records: Records) -> list[bytes]:
    """Return each record as an object in JSON."""
    columns = {name: column.to_list() for name, column in records.columns.items()}
    rows = zip(*columns.values(), strict=True)
    return [json.dumps(dict(zip(columns, row, strict=True))).encode() for row in rows]


def with_source(config: KafkaConfig, spec: BatchSpec, count: int) -> Iterator[Batch]:
    with KafkaSource(config, JsonMessages(_types(spec))) as source:
        yield from Pipeline(source).take(count).to_batches(spec)


def with_client(config: KafkaConfig, spec: BatchSpec, count: int) -> Iterator[Batch]:
    """Read by the client alone, with an object of Python for each value."""
    kafka = import_kafka()
    consumer = kafka.Consumer(
        {
            **config.settings,
            "bootstrap.servers": ",".join(config.servers),
            "group.id": config.group,
            "enable.auto.commit": False,
        }
    )
    try:
        topics = consumer.list_topics(config.topics[0], _ANSWER_S).topics
        places = topics[config.topics[0]].partitions
        consumer.assign([kafka.TopicPartition(config.topics[0], one, 0) for one in places])
        types, left = _types(spec), count
        while left:
            read = consumer.consume(min(left, config.poll_batch), 1.0)
            rows = [json.loads(one.value()) for one in read if one.error() is None]
            left -= len(rows)
            if rows:
                columns = {name: _column([row[name] for row in rows], dtype) for name, dtype in types.items()}
                yield make_batch(Records(len(rows), columns), spec)
    finally:
        consumer.close()


def _types(spec: BatchSpec) -> dict[str, torch.dtype]:
    numbers = {column for column, _ in spec.labels.values()} | spec.floats.keys()
    return dict.fromkeys(spec.ids, torch.int64) | dict.fromkeys(sorted(numbers), torch.float32)


def _column(rows: list[list[Any]], dtype: torch.dtype) -> RaggedTensor:
    values = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
    return RaggedTensor.from_row_lengths(values, torch.tensor([len(row) for row in rows]), validate=False)


def _contender(count: int, read: Callable[[], Iterator[Batch]]) -> Contender:
    return Contender(count, lambda _: sum(len(batch) for batch in read()), itertools.repeat(0))


def _of(settings: Mapping[str, Any], which: str) -> dict[str, Any]:
    """Return the settings for any client, and those for one kind, which have its name before them."""
    kinds = ("producer.", "consumer.")
    plain = {name: value for name, value in settings.items() if not name.startswith(kinds)}
    return plain | {
        name.removeprefix(which): value for name, value in settings.items() if name.startswith(which)
    }


def _make_topic(address: str, topic: str, settings: Mapping[str, Any]) -> str:
    """Make a topic if it is not there; return why it cannot be, or nothing."""
    kafka = import_kafka()
    admin = kafka.admin.AdminClient(
        {"bootstrap.servers": address, "log_level": 0, **_of(settings, "consumer.")}
    )
    try:
        if topic not in admin.list_topics(timeout=_ANSWER_S).topics:
            made = admin.create_topics([kafka.admin.NewTopic(topic, num_partitions=2)])
            made[topic].result(timedelta(seconds=_ANSWER_S).total_seconds())
    except kafka.KafkaException as cause:
        return f"no topic {topic!r} at {address}: {cause}"
    return ""
