"""A consumer that is killed, and a broker that is: every message is read, and trained on, exactly once."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import read_model
from runtime.test_rebalancing import TalliedTopic
from services import warm
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.data.kafka import KafkaSink
from monolith.runtime import Trainer
from monolith.train import Hook, SaveConfig, TrainConfig

TESTS = Path(__file__).resolve().parents[1]
MESSAGES = 6000
PARTITIONS = 3
KILLS = 10
MANY_KILLS = 50


class Consumers:
    """Consumers, one after the other, forked from a process that has imported everything."""

    def __init__(self, address: str, topic: str, state: Path) -> None:
        self._server = warm.Popen(
            ["-m", "faults.kafka_consumer", address, topic, str(state)],
            cwd=TESTS,
            stdin=warm.PIPE,
            stdout=warm.PIPE,
            stderr=warm.DEVNULL,
        )

    def say(self, word: str) -> int:
        """Say start, kill or wait; return the exit code of the consumer where it ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{word}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def consumers(kafka: Kafka, state: Path) -> Iterator[Consumers]:
    topic = kafka.create_topic(partitions=PARTITIONS)
    with KafkaSink((kafka.address,), topic, settings=PRODUCER_SETTINGS) as sink:
        for partition in range(PARTITIONS):
            sink.send(
                [b"%d" % number for number in range(partition, MESSAGES, PARTITIONS)], partition=partition
            )
        sink.flush(timedelta(seconds=30))
    consumers = Consumers(kafka.address, topic, state)
    yield consumers
    consumers.close()


def read(state: Path) -> list[int]:
    return json.loads(state.read_text())["ids"] if state.exists() else []


@pytest.mark.parametrize("kills", [KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.soak)])
def test_after_many_kills_every_message_was_read_exactly_once(
    kills: int, consumers: Consumers, state: Path
) -> None:
    chance = random.Random(17)
    cut_short = 0
    for _ in range(kills):
        before = len(read(state))
        consumers.say("start")
        if chance.random() < 0.8:  # among its messages; else wherever it is, connecting for the most part
            wait_for_progress(state, before)
        time.sleep(chance.uniform(0, 0.1))
        assert consumers.say("kill") == -signal.SIGKILL
        cut_short += before < len(read(state)) < MESSAGES
    consumers.say("start")
    assert consumers.say("wait") == 0
    assert sorted(read(state)) == list(range(MESSAGES))
    for partition in range(PARTITIONS):
        mine = [number for number in read(state) if number % PARTITIONS == partition]
        assert mine == sorted(mine)
    assert cut_short >= kills // 2  # or the kills have shown little


def wait_for_progress(state: Path, before: int) -> None:
    deadline = time.monotonic() + 30
    while len(read(state)) == before < MESSAGES and time.monotonic() < deadline:
        time.sleep(0.005)


@dataclass(frozen=True)
class SmallBuffer(TalliedTopic):
    """The client fetches little ahead, so that most records are still with the broker when it is killed."""

    def settings(self) -> dict[str, Any]:
        return {**CONSUMER_SETTINGS, "queued.min.messages": 32, "fetch.message.max.bytes": 2048}


class Steps(Hook):
    """Counts steps, and says when there were some."""

    def __init__(self) -> None:
        self.taken = 0
        self.begun = threading.Event()

    def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
        self.taken += 1
        if self.taken == 5:
            self.begun.set()
            time.sleep(0.5)  # the broker is killed meanwhile


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_a_run_that_saves_while_its_broker_restarts_trains_every_record_once(
    seconds: float, kafka: Kafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = kafka.create_topic(partitions=4)
    task = SmallBuffer(batches=40, address=kafka.address, topic=topic, group=f"away-{seconds}")
    task.send()
    steps = Steps()
    config = TrainConfig(model_dir=str(tmp_path), save=SaveConfig(steps=1))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(Trainer(task, config, hooks=[steps]).train)
        try:
            assert steps.begun.wait(60)
            kafka.kill()
            time.sleep(seconds)
            before = steps.taken
        finally:
            kafka.restart()  # on this thread: the broker ends with the thread that started it
        report = training.result(300)
    assert report.finished
    assert 5 < before < report.steps, "training continued with the records that it had"
    assert read_model(task, tmp_path).tally == dict.fromkeys(range(task.records), 1.0)
    assert task.committed() == [task.records // 4] * 4, "and what was not committed meanwhile is by now"
    assert "did not take the offsets" in caplog.text
