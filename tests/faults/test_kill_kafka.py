"""A consumer of Kafka that is killed again and again reads every message exactly once."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from services import warm
from services.kafka import PRODUCER_SETTINGS, Kafka

from monolith.data.kafka import KafkaSink

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
