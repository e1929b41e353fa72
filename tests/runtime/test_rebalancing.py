"""Workers come and go on the partitions of a topic: whoever is there has all of them, every record is trained
once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import PATIENT, TALLIED, Tallied, numbered, read_model
from runtime.losing import LosingFleet, wait_for
from runtime.test_elastic_workers import (
    Held,
    Killed,
    Steps,
    Vanish,
    check_at_least_once,
    check_once,
    come_and_go_at_random,
    elastic,
)
from services.kafka import CONSUMER_SETTINGS, PRODUCER_SETTINGS, Kafka

from monolith.data import Pipeline, Records, Stream
from monolith.data.format import BadRecord
from monolith.data.kafka import KafkaConfig, KafkaSink, KafkaSource
from monolith.feature import Batch
from monolith.train import Hook, Mode, SaveConfig
from monolith.train.hook import DATA_ENDED

PARTITIONS = 4
_groups = itertools.count()


@dataclass(frozen=True)
class TalliedTopic(Tallied):
    """The same records, one a message, in the partitions of a topic."""

    address: str = ""
    topic: str = ""
    group: str = ""
    ahead: int = 0

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        config = KafkaConfig(
            servers=(self.address,),
            topics=(self.topic,),
            group=self.group,
            poll_batch=8,
            batch_wait=timedelta(milliseconds=20),
            poll_timeout=timedelta(milliseconds=300),
            stream_timeout=timedelta(seconds=0.5),
            settings=self.settings(),
        )
        return Pipeline(KafkaSource(config, self.decode)).to_batches(TALLIED).prefetch(self.ahead)

    def settings(self) -> dict[str, Any]:
        """Return what the client is told besides."""
        return CONSUMER_SETTINGS

    def decode(self, payloads: list[bytes]) -> tuple[Records, list[BadRecord]]:
        rows = torch.tensor([int(payload) for payload in payloads])
        return numbered(self.stream().records(0, self.records)).take(rows), []

    def send(self) -> None:
        """Write the messages, those of each partition one after the other."""
        with KafkaSink((self.address,), self.topic, settings=PRODUCER_SETTINGS) as sink:
            for partition in range(PARTITIONS):
                numbers = range(partition, self.records, PARTITIONS)
                sink.send([str(number).encode() for number in numbers], partition=partition)
            sink.flush(timedelta(seconds=30))

    def committed(self) -> list[int]:
        """Return the offset of each partition that the broker was told of."""
        from confluent_kafka import TopicPartition

        with closing(self._client()) as client:
            asked = [TopicPartition(self.topic, one) for one in range(PARTITIONS)]
            return [one.offset for one in client.committed(asked, timeout=PATIENT)]

    def commit(self, offset: int) -> None:
        """Tell the broker of an offset in all partitions, as somebody might who is not of the run."""
        from confluent_kafka import TopicPartition

        with closing(self._client()) as client:
            places = [TopicPartition(self.topic, one, offset) for one in range(PARTITIONS)]
            client.commit(offsets=places, asynchronous=False)

    def _client(self) -> Any:
        from confluent_kafka import Consumer

        return Consumer({**CONSUMER_SETTINGS, "bootstrap.servers": self.address, "group.id": self.group})


@pytest.fixture
def make_task(kafka: Kafka) -> Callable[..., TalliedTopic]:
    def make(batches: int = 24, **more: Any) -> TalliedTopic:
        topic = kafka.create_topic(partitions=PARTITIONS)
        group = f"dealt-{next(_groups)}"
        task = TalliedTopic(batches=batches, address=kafka.address, topic=topic, group=group, **more)
        task.send()
        return task

    return make


class Waiting(Hook):
    """Holds a worker before one of its steps until it may go on; it takes part in whatever others do."""

    def __init__(self, before: int, may: Callable[[], object]) -> None:
        self._before, self._may = before, may
        self._taken = 0

    def before_step(self, run: Any) -> None:
        self._taken += 1
        if self._taken != self._before:
            return

        def may() -> bool:
            run.session.at_step(run)
            return bool(self._may()) or run.stop_reason is not None

        wait_for(may, "what a worker waits for")


class AtFirst(Hook):
    """Does something before a worker takes its first step."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._begun = False

    def before_step(self, run: Any) -> None:  # noqa: ARG002
        if not self._begun:
            self._begun = True
            self._act()


def test_partitions_are_dealt_again_when_a_third_worker_joins(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    """Partitions move in the middle of training between workers who have read ahead and not saved."""
    task = make_task(batches=36, ahead=2)
    config = elastic(tmp_path, save=SaveConfig(), prefetch=1, async_push=True)
    with LosingFleet(config, num_workers=2, max_workers=3, task=task, keeps_going=False) as fleet:
        one, two = Steps(), Steps()
        other = fleet.train(1, [one, Held(3, lambda: two.taken >= 2)])
        chief = fleet.train(0, [Waiting(2, lambda: one.taken >= 2), Waiting(5, lambda: two.taken >= 2)])
        wait_for(lambda: one.taken >= 2, "worker 1 to have partitions")
        third = fleet.train(2, [two])
        report = chief.report()
        assert other.report().finished
        assert third.report().finished
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    assert report.examples == task.records
    check_once(task, tmp_path)
    assert task.committed() == [task.records // PARTITIONS] * PARTITIONS


def test_a_worker_that_is_told_to_stop_leaves_its_partitions_to_other_workers(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    task = make_task()
    config = elastic(tmp_path, save=SaveConfig())
    with LosingFleet(config, num_workers=2, task=task, keeps_going=False) as fleet:
        other = fleet.train(1, [Steps(3, lambda: other.trainer.stop("SIGTERM"))])
        chief = fleet.train(0, [Waiting(2, lambda: not other.is_alive())])
        left, report = other.report(), chief.report()
    assert (left.departed, left.stop_reason, left.finished) == (True, "SIGTERM", False)
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    assert report.examples == task.records
    check_once(task, tmp_path)


def test_the_partitions_of_a_worker_that_is_lost_are_read_by_others_from_what_is_known_of_it(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    task = make_task()
    with LosingFleet(elastic(tmp_path), num_workers=2, task=task) as fleet:
        other = fleet.train(1, [Vanish(fleet, 1, 3)])
        chief = fleet.train(0, [Waiting(2, lambda: other.found)])
        report = chief.report()
    assert isinstance(other.found, Killed)
    assert (report.finished, report.stop_reason) == (True, DATA_ENDED)
    (lost,) = report.lost.workers
    assert (lost.worker, lost.by_others) == (1, True)
    check_at_least_once(task, tmp_path, again=8 * 3)


def test_with_exactly_once_all_roll_back_and_the_remaining_workers_have_all_partitions(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    task = make_task()
    with LosingFleet(elastic(tmp_path), num_workers=2, task=task, keeps_going=False) as fleet:
        other = fleet.train(1, [Vanish(fleet, 1, 4)])
        chief = fleet.train(0, [Waiting(3, lambda: other.found)])
        chief.join(PATIENT)
        assert "worker 1 was lost" in str(chief.found)
        assert fleet.train(0).report().finished
    check_once(task, tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_checkpoint_of_any_members_is_resumed_by_any_number(
    tmp_path: Path, make_task: Callable[..., TalliedTopic], workers: int
) -> None:
    task = make_task()
    first = elastic(tmp_path, max_steps=10)
    with LosingFleet(first, num_workers=2, max_workers=3, task=task, keeps_going=False) as fleet:
        two = Steps()
        other = fleet.train(1, [Steps(3, lambda: other.trainer.stop("SIGTERM"))])
        # Nobody comes to the last of the steps before that one has left.
        third = fleet.train(2, [two, Waiting(2, lambda: not other.is_alive())])
        chief = fleet.train(0, [Waiting(2, lambda: not other.is_alive() and two.taken >= 2)])
        assert other.report().departed
        trained = chief.report().examples
        third.report()
    task.commit(1)  # it is the checkpoint that decides, not the broker
    begun: list[list[int]] = []
    with LosingFleet(elastic(tmp_path), num_workers=workers, task=task, keeps_going=False) as fleet:
        look = AtFirst(lambda: begun.append(task.committed()))
        everybody = [fleet.train(index, [] if index else [look]) for index in reversed(range(workers))]
        assert all(worker.report().finished for worker in everybody)
    assert trained < task.records
    if workers > 1:  # one alone is a member of its group, who commits what it is assigned
        assert sum(begun[0]) == trained, "what the broker was told before anybody read"
    check_once(task, tmp_path)


def test_a_chief_that_is_lost_comes_back_to_the_partitions_it_had(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    task = make_task()
    with LosingFleet(elastic(tmp_path, save=SaveConfig()), num_workers=2, task=task) as fleet:
        steps = Steps()
        first = fleet.train(0, [Waiting(2, lambda: steps.taken >= 2), Vanish(fleet, 0, 4)])
        other = fleet.train(1, [steps, Waiting(3, lambda: first.found)])
        first.join(PATIENT)
        assert isinstance(first.found, Killed)
        assert fleet.train(0).report().finished
        assert other.report().finished
    check_at_least_once(task, tmp_path, again=8 * 4)


@pytest.mark.soak
def test_the_deal_of_every_worker_is_known_at_the_current_server_0(
    tmp_path: Path, make_task: Callable[..., TalliedTopic]
) -> None:
    task = make_task(batches=36)
    config = elastic(tmp_path)
    with LosingFleet(config, num_workers=2, max_workers=3, task=task, loses_servers=True) as fleet:
        stays = Steps()
        left = fleet.train(1, [Steps(2, lambda: left.trainer.stop("SIGTERM"))])
        other = fleet.train(2, [stays])

        def lose() -> None:
            left.join(PATIENT)
            fleet.replace_server(0)

        report = fleet.train(
            0, [Waiting(2, lambda: stays.taken and not left.is_alive()), Steps(3, lose)]
        ).report()
        assert (left.report().departed, other.report().finished) == (True, True)
    assert report.finished
    tally = read_model(task, tmp_path).tally
    assert {record for record in tally if record % 2} == set(range(1, task.records, 2)), "what server 1 knows"
    assert set(tally.values()) == {1.0}


@pytest.mark.soak
@pytest.mark.parametrize("loses", [False, True])
def test_workers_come_leave_and_are_lost_at_random_moments(
    tmp_path: Path, make_task: Callable[..., TalliedTopic], loses: bool
) -> None:
    chance = random.Random(3)
    task = make_task(batches=48)
    config = elastic(tmp_path, save=SaveConfig(steps=4, retry_secs=0.01, asynchronous=True))
    with LosingFleet(config, num_workers=2, max_workers=4, task=task, keeps_going=loses) as fleet:
        lost = come_and_go_at_random(fleet, chance, loses=loses, steps=16)
    tally = read_model(task, tmp_path).tally
    assert tally.keys() == set(range(task.records)), "nothing is left out"
    assert max(tally.values()) <= 1 + lost
