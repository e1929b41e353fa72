"""Impressions and actions from two topics, joined, into a third, and from there into batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.data import (
    BatchSpec,
    ByWorker,
    JoinedSource,
    JoinerConfig,
    KafkaConfig,
    KafkaSink,
    KafkaSource,
    Pipeline,
    Records,
)
from monolith.data.formats import PayloadParser, PayloadWriter
from monolith.data.formats.memory import to_records

CLICK = 1
SHOWN = 40
CLICKED = {5, 8, 9, 30}


def send(kafka: Kafka, topic: str, records: Records) -> None:
    sink = KafkaSink([kafka.address], topic, settings=PRODUCER_SETTINGS)
    sink.send(PayloadWriter("example", ids=["item"])(records))
    sink.flush()
    sink.close()


def read(kafka: Kafka, topic: str) -> KafkaSource:
    config = KafkaConfig(
        servers=(kafka.address,),
        topics=(topic,),
        group="end-to-end",
        assignment=ByWorker(worker=0, num_workers=1),
        poll_batch=7,
        poll_timeout=timedelta(milliseconds=300),
        stream_timeout=timedelta(milliseconds=300),
        settings=CONSUMER_SETTINGS,
    )
    return KafkaSource(config, PayloadParser("example"))


def rows(numbers: Sequence[int], delay: int, **more: list[list[int]]) -> Records:
    times = [[1000 + 10 * number + delay] for number in numbers]
    return to_records({"request": [[number] for number in numbers], "line_id.req_time": times, **more})


def test_topics_in_and_a_topic_out(kafka: Kafka, tmp_path: Path) -> None:
    shown, done, joined = (kafka.create_topic() for _ in range(3))
    everyone = list(range(SHOWN))
    send(kafka, shown, rows(everyone, 0, item=[[100 + number] for number in everyone]))
    clicks = sorted(CLICKED)
    send(kafka, done, rows(clicks, 25, **{"line_id.actions": [[CLICK]] * len(clicks)}))

    config = JoinerConfig(
        key="request", positives=(frozenset({CLICK}),), window=timedelta(seconds=60), folder=str(tmp_path)
    )
    source = JoinedSource(read(kafka, shown), read(kafka, done), config)
    for examples in source:
        send(kafka, joined, examples)
    source.close()

    batches = Pipeline(read(kafka, joined)).to_batches(BatchSpec(ids=("item",)))
    found = {}
    for batch in batches:
        for item, label in zip(batch.ids.ids.tolist(), batch.label.tolist(), strict=True):
            assert item not in found
            found[item] = label
        assert torch.equal(batch.ids["item"].row_lengths(), torch.ones(len(batch), dtype=torch.int64))
    batches.close()
    assert found == {100 + number: float(number in CLICKED) for number in everyone}
