"""The world of a fleet that reads Kafka: the chief assigns partitions, and checkpoints contain offsets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from simulation.counting import LABEL, RECORD, SPEC, Counting, read_counts
from simulation.fleet import CHIEF, FOLDER, FleetShape, work

from monolith.data import Pipeline, Records, Stream
from monolith.data.format import BadRecord
from monolith.data.formats.memory import to_records
from monolith.data.kafka import KafkaConfig, KafkaSource
from monolith.feature import Batch
from monolith.runtime import serve_parameters
from monolith.testing.cluster import Faults, SimCluster, SimProcess
from monolith.testing.kafka import SimKafka
from monolith.train import Mode

TOPIC = "events"


def decode(payloads: list[bytes]) -> tuple[Records, list[BadRecord]]:
    numbers = np.array([int(one) for one in payloads], dtype=np.int64)
    return to_records({RECORD: numbers, LABEL: np.ones(len(numbers), np.float32)}), []


@dataclass(frozen=True)
class CountingKafka(Counting):
    """Counts the messages of a topic."""

    broker: SimKafka | None = None
    threads: int = 0

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        assert self.broker is not None
        self.broker.attach()
        config = KafkaConfig(
            servers=("kafka:9092",),
            topics=(TOPIC,),
            group="train",
            poll_batch=self.batch_size,
            poll_timeout=timedelta(seconds=0.4),
            stream_timeout=timedelta(seconds=0.5),
            connect_timeout=timedelta(minutes=5),
            settings={"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
        )
        return Pipeline(KafkaSource(config, decode, threads=self.threads)).to_batches(SPEC)


def fleet_kafka(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    shape = FleetShape.drawn(seed, keep_going=False)
    cluster = SimCluster(seed, Faults.drawn(seed), traced=traced)
    broker = SimKafka(cluster.network)
    task = CountingKafka(batches=shape.batches, broker=broker, threads=seed % 4)
    partitions = 1 + seed % 4
    broker.create_topic(TOPIC, partitions)
    for number in range(task.records):
        broker.logs[TOPIC, number % partitions].values.append(str(number + 1).encode())

    def on_exit(process: SimProcess) -> None:
        if process.name == CHIEF:
            counted = read_counts(task, FOLDER)
            assert counted is not None, "the run finished without a checkpoint"
            counted.check_exactly_once(task)

    def play(cluster: SimCluster) -> None:
        broker.machine = cluster.machine("kafka")  # not a process: the world `kafka` has brokers that die
        for index in range(shape.num_ps + shape.redundant):
            config = shape.config("ps", index)
            cluster.start(
                f"ps-{index}", lambda config=config: serve_parameters(task, config, cluster.discovery())
            )
        for index in range(shape.num_workers):
            config = shape.config("worker", index)
            cluster.start(f"worker-{index}", lambda config=config: work(task, config, cluster.discovery()))
        cluster.on_exit.append(on_exit)
        cluster.wait(chief=CHIEF)

    cluster.run(play)
    return cluster
