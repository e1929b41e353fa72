"""The world of a data service: a dispatcher, data workers and trainers that count each record exactly once.

A trainer is as small as one can be: it counts the records that it reads, and saves the counts with its
position in one file, then commits the position. So the counts of the last files say what was trained.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import numpy as np

from monolith import concurrency, filesystem
from monolith.data import Position, Records, Source
from monolith.data.formats.memory import to_records
from monolith.data.service import (
    DataJobConfig,
    DataServiceSource,
    DataWorker,
    DataWorkerConfig,
    Dispatcher,
)
from monolith.errors import UnavailableError
from monolith.testing.cluster import Faults, SimCluster

PORT = 7000
RECORD = "record"


class Numbers(Source):
    """The split "first:end": these numbers, in batches."""

    live = False

    def __init__(self, split: str, batch_size: int) -> None:
        first, end = split.split(":")
        self._next, self._end, self._size = int(first), int(end), batch_size

    def __iter__(self) -> Iterator[Records]:
        while (first := self._next) < self._end:
            self._next = min(first + self._size, self._end)
            yield to_records({RECORD: np.arange(first, self._next, dtype=np.int64)})

    def position(self) -> Position:
        return {"next": self._next}

    def restore(self, position: Position) -> None:
        self._next = position["next"]


def save(
    file: str, source: DataServiceSource, counts: Counter[int], replaced: Callable[[], bool] = lambda: False
) -> None:
    """Write a checkpoint, then commit the position in it: the order that trainers have to keep. One that was
    replaced writes none: a run locks its model_dir."""
    position = source.position()
    if replaced():
        raise UnavailableError("another process is this trainer now")
    with filesystem.atomic_write(file) as out:
        out.write(json.dumps({"position": position, "counts": counts}).encode())
    source.commit(position)


def data_service(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"data_service {seed}")
    num_workers, num_trainers = draw.choice([1, 2, 2, 3]), draw.choice([1, 2, 2, 3])
    splits, first = [], 0
    for _ in range(draw.randint(1, 4)):
        end = first + draw.choice([0, 1, 3, 6, 9])
        splits.append(f"{first}:{end}")
        first = end + 1  # a record between two splits belongs to neither: one that is read by mistake shows
    splits = list(dict.fromkeys(splits))
    batch_size, chunk_records = draw.randint(1, 4), draw.randint(1, 3)
    buffer_chunks = draw.choice([1, 2, 16])
    save_every = draw.choice([1, 2, 3, 100])
    prefetch = draw.choice([1, 2, 4])
    unreadable = draw.choice([0.0, 0.0, 0.1])
    fixed_ports = draw.random() < 0.5
    config = DataJobConfig(
        splits=tuple(splits),
        epochs=draw.choice([1, 1, 2]),
        lease=timedelta(seconds=draw.choice([1, 10])),
        attempts=1_000,
        keep_acknowledged=draw.choice([0, 1, 100_000]),
    )
    expected = Counter({
        record: config.epochs
        for split in splits
        for record in range(*map(int, split.split(":")))
    })  # fmt: skip
    trainers = [f"trainer-{one}" for one in range(num_trainers)]
    workers = [f"worker-{one}" for one in range(num_workers)]
    at_work: dict[str, DataWorker] = {}

    def play(cluster: SimCluster) -> None:
        def open_split(split: str) -> Source:
            if unreadable and cluster.random.random() < unreadable:
                raise OSError("the split cannot be read now")
            concurrency.sleep(cluster.random.uniform(0, 0.01))
            return Numbers(split, batch_size)

        def finished(names: list[str]) -> bool:
            known = cluster.processes
            return all(name in known and known[name].finished for name in names)

        def dispatch() -> None:
            with Dispatcher(config, folder="sim://job", host="dispatcher", port=PORT):
                while not finished(trainers + workers):
                    concurrency.sleep(0.5)

        def read(name: str) -> None:
            port = PORT if fixed_ports else 0
            worker = DataWorker(
                f"dispatcher:{PORT}",
                open_split,
                DataWorkerConfig(readers=2, buffer_chunks=buffer_chunks, chunk_records=chunk_records),
                host=name,
                port=port,
            )
            at_work[name] = worker
            with worker:
                while not finished(trainers):
                    worker.wait(0.5)

        def train(name: str) -> None:
            file = f"sim://{name}"
            counts: Counter[int] = Counter()
            here = concurrency.machine()

            def replaced() -> bool:
                return cluster.processes[name].machine is not here

            source = DataServiceSource(f"dispatcher:{PORT}", name, prefetch=prefetch)
            if filesystem.exists(file):
                saved = json.loads(filesystem.read_bytes(file))
                source.restore(saved["position"])
                counts.update({int(record): times for record, times in saved["counts"].items()})

            with closing(iter(source)) as batches:
                for step, records in enumerate(batches, 1):
                    counts.update(records.columns[RECORD].values.tolist())
                    concurrency.sleep(cluster.random.uniform(0, 0.05))
                    if step % save_every == 0:
                        save(file, source, counts, replaced)
            save(file, source, counts, replaced)

        def check_buffers() -> None:
            for name, worker in at_work.items():
                held = worker._buffer
                assert len(held.free) <= buffer_chunks, f"{name} buffers {len(held.free)} chunks"
                assert len(held.given) <= 2 * buffer_chunks, f"{name} keeps {len(held.given)} chunks"

        cluster.simulation.invariants.append(check_buffers)
        cluster.start("dispatcher", dispatch)
        for name in workers:
            cluster.start(name, lambda name=name: read(name))
        for name in trainers:
            cluster.start(name, lambda name=name: train(name))
        cluster.replaceable = tuple(trainers + ([] if fixed_ports else workers))
        cluster.wait()
        total: Counter[int] = Counter()
        for name in trainers:
            saved = json.loads(filesystem.read_bytes(f"sim://{name}"))
            total.update({int(record): times for record, times in saved["counts"].items()})
        wrong = {
            record: (total[record], expected[record])
            for record in sorted({*total, *expected})
            if total[record] != expected[record]
        }
        assert not wrong, f"records with (times trained, times expected): {wrong}"

    replacements = random.Random(f"data_service, replaced while it runs {seed}").choice([0, 0, 1, 3])
    cluster = SimCluster(seed, replace(Faults.drawn(seed), replacements=replacements), traced=traced)
    cluster.run(play)
    return cluster
