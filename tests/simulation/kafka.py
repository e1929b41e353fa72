"""The world of Kafka: trainers that read numbered messages, by fixed partitions or as a consumer group.

With fixed partitions the checkpoint decides where reading resumes, so each message is trained exactly once
whatever happens. A group promises less: every message is in some checkpoint in the end, also if members are
killed; and exactly once if none is lost and each saves when its partitions are revoked.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta

import numpy as np

from monolith import concurrency, filesystem
from monolith.data import Position, Records
from monolith.data.format import BadRecord
from monolith.data.formats.memory import to_records
from monolith.data.kafka import ByWorker, KafkaConfig, KafkaSource
from monolith.data.kafka.positions import Partition, read_position
from monolith.testing.cluster import Faults, SimCluster
from monolith.testing.kafka import SimKafka
from monolith.testing.network import NetworkFaults

TOPIC = "events"
RECORD = "record"


def decode(payloads: list[bytes]) -> tuple[Records, list[BadRecord]]:
    return to_records({RECORD: np.array([int(one) for one in payloads], dtype=np.int64)}), []


@dataclass
class Saved:
    """What all checkpoints have together."""

    offsets: dict[Partition, int] = field(default_factory=dict)
    records: set[int] = field(default_factory=set)


def save(file: str, source: KafkaSource, counts: Counter[int], saved: Saved) -> None:
    """Write a checkpoint, then commit the position in it: the order that trainers have to keep."""
    position = source.position()
    with filesystem.atomic_write(file) as out:
        out.write(json.dumps({"position": position, "counts": counts}).encode())
    saved.offsets.update(read_position(position)[1])
    saved.records.update(counts)
    source.commit(position)


def kafka(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"kafka {seed}")
    fixed = draw.random() < 0.6
    partitions, each = draw.randint(1, 4), draw.randint(2, 12)
    trainers = [f"trainer-{one}" for one in range(draw.choice([1, 2, 2, 3]))]
    save_every = draw.choice([1, 2, 5])
    retains = fixed and draw.random() < 0.5
    leaver = draw.choice([None, *trainers]) if not fixed and len(trainers) > 1 else None
    config = KafkaConfig(
        servers=("kafka:9092",),
        topics=(TOPIC,),
        group="train",
        run=draw.choice(["", "monday"]),
        poll_batch=draw.choice([1, 2, 4]),
        batch_wait=timedelta(seconds=draw.choice([0.0, 0.05])),
        poll_timeout=timedelta(seconds=1),
        stream_timeout=timedelta(seconds=2),
        connect_timeout=timedelta(minutes=5),
        settings={"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
    )
    saves_when_revoked = not fixed and draw.random() < 0.5
    faults = Faults.drawn(seed)
    calm = not fixed and draw.random() < 0.5
    if calm:
        faults = replace(faults, kills=0, cuts=0, pauses=0, network=NetworkFaults(delay=faults.network.delay))
    numbers = range(partitions * each)
    yielded: Counter[int] = Counter()
    """How often each record was yielded by any trainer, killed ones included."""
    saved = Saved()

    def play(cluster: SimCluster) -> None:
        broker = SimKafka(cluster.network)
        broker.create_topic(TOPIC, partitions)

        def finished(names: list[str]) -> bool:
            known = cluster.processes
            return all(name in known and known[name].finished for name in names)

        def all_saved() -> bool:
            return saved.records.issuperset(numbers)

        def check_commit(_: str, partition: Partition, offset: int) -> None:
            if fixed:
                known = saved.offsets.get(partition, 0)
                assert offset <= known, f"committed {offset} of {partition}, the checkpoint has {known}"
                if retains:  # messages that a checkpoint covers are deleted
                    log = broker.logs[partition]
                    del log.values[: max(0, offset - log.low)]
                    log.low = max(log.low, offset)
            else:
                first = partition[1] * each
                ahead = [one for one in range(first, first + offset) if one not in saved.records]
                assert not ahead, f"committed {offset} of {partition}, but no checkpoint has {ahead}"

        broker.on_committed.append(check_commit)

        def produce() -> None:
            broker.attach()
            library = concurrency.machine().kafka  # type: ignore[union-attr]
            asking = library.Consumer({"group.id": "producer"})
            producer = library.Producer({})
            # A restarted producer continues after what the broker has: the number of a message is its offset.
            for offset in range(each):
                for partition in range(partitions):
                    place = library.TopicPartition(TOPIC, partition)
                    while True:
                        try:
                            _, high = asking.get_watermark_offsets(place)
                            break
                        except library.KafkaException:
                            concurrency.sleep(0.2)
                    if high <= offset:
                        producer.produce(TOPIC, str(partition * each + offset).encode(), partition=partition)
                        producer.flush()
                concurrency.sleep(cluster.random.uniform(0, 0.2))

        def train(name: str) -> None:
            broker.attach()
            file = f"sim://{name}"
            worker = trainers.index(name)
            chosen = config
            expected = partitions * each
            if fixed:
                by = ByWorker(worker=worker, num_workers=len(trainers))
                chosen = replace(config, assignment=by)
                expected = each * sum(by.reads(0, one) for one in range(partitions))
            counts: Counter[int] = Counter()

            def revoked(_: Position) -> None:
                if saves_when_revoked:
                    save(file, source, counts, saved)

            with closing(KafkaSource(chosen, decode, on_revoke=revoked)) as source:
                if filesystem.exists(file):
                    found = json.loads(filesystem.read_bytes(file))
                    source.restore(found["position"])
                    counts.update({int(record): times for record, times in found["counts"].items()})
                step = 0
                while not (sum(counts.values()) >= expected if fixed else all_saved()):
                    for records in source:
                        step += 1
                        numbers = records.columns[RECORD].values.tolist()
                        yielded.update(numbers)
                        counts.update(numbers)
                        concurrency.sleep(cluster.random.uniform(0, 0.05))
                        if step % save_every == 0:
                            save(file, source, counts, saved)
                        if name == leaver and step == 2:
                            save(file, source, counts, saved)
                            return
                    save(file, source, counts, saved)

        cluster.start("kafka", lambda: broker.serve(lambda: finished([*trainers, "producer"])))
        cluster.start("producer", produce)
        for name in trainers:
            cluster.start(name, lambda name=name: train(name))
        cluster.wait()
        trained: Counter[int] = Counter()
        for name in trainers:
            if filesystem.exists(f"sim://{name}"):
                found = json.loads(filesystem.read_bytes(f"sim://{name}"))
                trained.update({int(record): times for record, times in found["counts"].items()})
        missing = [one for one in numbers if not trained[one]]
        assert not missing, f"records that are in no checkpoint: {missing}"
        if fixed or (calm and saves_when_revoked):
            wrong = {one: trained[one] for one in sorted({*trained, *numbers}) if trained[one] != 1}
            assert not wrong, f"records that were not trained exactly once: {wrong}"
        if calm and saves_when_revoked:
            twice = [one for one in numbers if yielded[one] != 1]
            assert not twice, f"records that were yielded twice though no member was lost: {twice}"

    cluster = SimCluster(seed, faults, traced=traced)
    cluster.run(play)
    return cluster
