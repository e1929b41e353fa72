"""A source that waits, of every kind that can: it ends its reading once it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.data import (
    JoinedSource,
    JoinerConfig,
    JsonMessages,
    KafkaConfig,
    KafkaSource,
    Pipeline,
    Source,
    Stream,
)
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LocalFileQueue
from monolith.data.formats.csv import CsvFormat
from monolith.data.service import DataServiceSource
from monolith.data.transforms import MergeFlow
from monolith.errors import StoppedWhileWaitingError
from monolith.feature import FeatureSpec, IdFeature

PATIENT = 60.0
LONG = timedelta(hours=10)
NOWHERE = "127.0.0.1:1"
"""An address at which no process listens."""


class Looked(threading.Event):
    """An event that says when it is first waited for, or looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()

    def is_set(self) -> bool:
        self.looked.set()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.looked.set()
        return super().wait(timeout)


def watched(folder: Path, **options: Any) -> FileSource:
    watch = Watch(str(folder / "*.csv"), every=LONG, **options)
    return FileSource(watch, CsvFormat(types={"id": torch.int64}), batch_size=2, threads=0)


def leased(folder: Path) -> Source:
    queue = LocalFileQueue([str(folder / "a.csv")], lease=LONG)
    assert queue.take("another worker") is not None
    return FileSource(queue, CsvFormat(types={"id": torch.int64}), batch_size=2, threads=0)


def topic(_: Path) -> Source:
    pytest.importorskip("confluent_kafka")
    config = KafkaConfig(servers=(NOWHERE,), topics=("clicks",), group="train", connect_timeout=LONG)
    return KafkaSource(config, JsonMessages({"id": torch.int64}))


def joined(folder: Path) -> Source:
    window = timedelta(seconds=40)
    config = JoinerConfig(key="id", positives=(frozenset({1}),), window=window, folder=str(folder / "joiner"))
    return JoinedSource(watched(folder), watched(folder), config)


def flows(folder: Path) -> Source:
    return MergeFlow({"a": watched(folder), "b": watched(folder)})


SOURCES: dict[str, Callable[[Path], Source]] = {
    "watched files": watched,
    "growing files": lambda folder: watched(folder, grows=True),
    "a work queue whose last file another worker reads": leased,
    "a topic of a broker that does not answer": topic,
    "joined sources": joined,
    "merged flows": flows,
    "a data service whose dispatcher does not answer": lambda _: DataServiceSource(
        NOWHERE, "trainer", patience=LONG
    ),
}
SPEC = FeatureSpec(features={"id": IdFeature()}, labels={})


def ends_once_told(stream: Stream[Any]) -> None:
    stop = Looked()
    stream.read_until(stop)
    reading = threading.Thread(target=lambda: list(stream), daemon=True)
    reading.start()
    assert stop.looked.wait(PATIENT)
    stop.set()
    reading.join(PATIENT)
    assert not reading.is_alive()


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made = SOURCES[request.param](tmp_path)
    yield made
    made.close()


def test_a_source_that_waits_ends_its_reading_once_it_is_told_to(source: Source) -> None:
    ends_once_told(source)


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_of_a_source_that_waits_end_once_they_are_told_to(source: Source, threads: int) -> None:
    batches = Pipeline(source).to_batches(SPEC, threads=threads).prefetch(1)
    ends_once_told(batches)
    batches.close()


def test_a_source_whose_reading_was_stopped_is_read_on_from_there(tmp_path: Path) -> None:
    source = watched(tmp_path)
    batches = Pipeline(source).to_batches(SPEC, threads=2)
    ends_once_told(batches)
    (tmp_path / "a.csv").write_text("id\n1\n2\n")
    batches.restore(batches.position())
    batches.read_until(threading.Event())
    assert [one.ids.ids.tolist() for one in [next(iter(batches))]] == [[1, 2]]
    batches.close()


def test_joined_sources_that_are_stopped_close_no_window(tmp_path: Path) -> None:
    source = joined(tmp_path)
    assert isinstance(source, JoinedSource)
    before = source.position()
    ends_once_told(source)
    assert source.position() == before
    source.close()


def test_a_topic_that_is_asked_for_its_position_waits_for_no_broker_once_it_is_stopped() -> None:
    pytest.importorskip("confluent_kafka")
    config = KafkaConfig(servers=(NOWHERE,), topics=("clicks",), group="train", connect_timeout=LONG)
    source = KafkaSource(config, JsonMessages({"id": torch.int64}))
    stop = threading.Event()
    stop.set()
    source.read_until(stop)
    with pytest.raises(StoppedWhileWaitingError):
        source.restore({"source": "kafka", "partitions": {"clicks": 1}, "offsets": {"clicks": {"0": 0}}})


def test_a_trainer_of_the_data_service_that_is_stopped_does_not_insist_on_being_heard() -> None:
    source = DataServiceSource(NOWHERE, "trainer", patience=LONG)
    stop = threading.Event()
    stop.set()
    source.read_until(stop)
    source.commit({"kind": "data_service", "job": "j", "trainer": "trainer", "turn": 0})
    with pytest.raises(StoppedWhileWaitingError):
        source.give_back({"kind": "data_service", "job": "j", "trainer": "trainer", "turn": 0})
