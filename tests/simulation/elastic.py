"""The world of an elastic fleet: workers that come and go take files from a queue, and train each record
exactly once. Spare servers replace lost ones, and the fastest of extra servers are chosen.

The queue is a real `SharedFileQueue` in a folder of this machine, since it needs the locks of a real
filesystem. Everything that it does under its lock happens at one moment of virtual time.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import numpy as np
from simulation.counting import LABEL, RECORD, SPEC, Counting, read_counts

from monolith import concurrency
from monolith.cluster import Discovery
from monolith.data import Pipeline, Stream
from monolith.data.files.shared_queue import SharedFileQueue
from monolith.data.files.source import FileSource
from monolith.data.files.work_queue import LEASE
from monolith.data.format import Chunk, Format, RecordWriter
from monolith.data.formats.memory import to_records
from monolith.errors import RetryableError, UnavailableError
from monolith.feature import Batch
from monolith.observe import Metrics
from monolith.runtime import Coordinator, Trainer, TrainReport, serve_parameters
from monolith.runtime.attempts import Retries, SharedTraining
from monolith.runtime.cluster_config import ClusterConfig, FailoverConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.context import Output
from monolith.runtime.process import StoppedWhileWaitingError, Stopper
from monolith.testing.cluster import Faults, SimCluster, SimProcess
from monolith.train import Mode, SaveConfig, TrainConfig

FOLDER = "sim://run"
CHIEF = "worker-0"
LONG_LEASE = timedelta(days=1)
"""Longer than a run may take: a worker that is alone never waits for a lease, and none for that of a process
that was replaced."""


class NumberFiles(Format):
    """Files that need no disk: the file "4-6" has the records 4, 5 and 6, each in a chunk of its own."""

    name = "numbers"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def chunks(self, path: str, *, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[Chunk]:  # noqa: ARG002
        first, last = map(int, path.split("-"))
        for place in range(start, last - first + 1):
            concurrency.sleep(self._seconds)
            records = {RECORD: np.array([first + place]), LABEL: np.ones(1, np.float32)}
            yield Chunk(to_records(records), next=place + 1)

    def writer(self, path: str) -> AbstractContextManager[RecordWriter]:
        raise NotImplementedError(path)


@dataclass(frozen=True)
class CountingFiles(Counting):
    """Counts records of files that workers take from a queue."""

    queue: str = ""
    file_records: int = 3
    lease: timedelta = LEASE

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        queue = SharedFileQueue(self.queue, lease=self.lease)
        starts = range(1, self.records + 1, self.file_records)
        queue.add([f"{first}-{min(first + self.file_records - 1, self.records)}" for first in starts])
        source = FileSource(queue, NumberFiles(self.read_seconds), batch_size=self.batch_size, threads=0)
        return Pipeline(source).to_batches(SPEC)


@dataclass(frozen=True)
class Guest:
    """A worker that joins after a while, and is told to leave after another while, or stays."""

    joins_after: float
    leaves_after: float | None

    @classmethod
    def drawn(cls, draw: random.Random) -> Guest:
        return cls(draw.uniform(0, 5), draw.choice([None, draw.uniform(0, 5)]))


def elastic(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as queue:
        return _elastic(seed, queue, traced=traced)


def _elastic(seed: int, queue: str, *, traced: bool) -> SimCluster:
    draw = random.Random(f"elastic {seed}")
    num_ps, num_workers = draw.choice([1, 2]), draw.choice([1, 2])
    redundant, extra = draw.choice([(0, 0), (1, 0), (0, 1)])
    guests = [Guest.drawn(draw) for _ in range(draw.choice([0, 1, 2]))]
    task = CountingFiles(
        batches=draw.randint(2, 8),
        read_seconds=draw.choice([0.01, 0.05, 0.3]),
        queue=queue,
        file_records=draw.choice([1, 3, 4]),
        lease=LEASE if num_workers + len(guests) > 1 else LONG_LEASE,
    )
    train = TrainConfig(
        model_dir=FOLDER,
        save=SaveConfig(steps=draw.choice([1, 2, 3, 5]), asynchronous=draw.choice([True, False])),
        summary_every_steps=None,
        idle_after=timedelta(milliseconds=50),
    )
    failover = FailoverConfig(max_retries=draw.choice([0, 1, 6]))
    # A queue of files is for machines whose clocks agree to within a small part of a lease.
    faults = replace(Faults.drawn(seed), clock_jumps=0)
    draw = random.Random(f"elastic, replaced while it runs {seed}")
    if replaced := draw.choice([0, 0, 1, 2]) if num_workers + len(guests) > 1 else 0:
        # Long runs, short pauses and retries: an earlier process is to be back while its successor reads.
        task = replace(
            task, batches=draw.randint(10, 20), read_seconds=draw.choice([0.1, 0.3]), lease=LONG_LEASE
        )
        failover = replace(failover, wait=timedelta(seconds=draw.choice([0, 1])))
        faults = replace(faults, replacements=replaced, longest=draw.choice([3.0, 8.0]))

    def config(role: Literal["ps", "worker"], index: int) -> RunConfig:
        return RunConfig(
            train=train,
            cluster=ClusterConfig(
                role=role,
                index=index,
                num_ps=num_ps,
                num_workers=num_workers,
                max_workers=num_workers + len(guests),
                num_redundant_ps=redundant,
                num_extra_ps=extra,
                measure_ps=timedelta(0),  # each once: a measurement is large, and virtual time small
            ),
            failover=failover,
            timeouts=TimeoutsConfig(start=timedelta(seconds=60), finish=timedelta(seconds=60)),
        )

    def on_exit(process: SimProcess) -> None:
        # Status 0 tells an operator that all is done and saved, so it has to be, at this very moment.
        if process.name == CHIEF:
            report = process.result
            assert isinstance(report, TrainReport)
            assert report.finished, f"the chief exited with status 0 though: {report.stop_reason}"
            counted = read_counts(replace(task, queue=f"{queue}/unused"), FOLDER)
            assert counted is not None, "the run finished without a checkpoint"
            counted.check_exactly_once(task)

    def play(cluster: SimCluster) -> None:
        cluster.on_exit.append(on_exit)
        for index in range(num_ps + redundant + extra):
            server = config("ps", index)
            cluster.start(
                f"ps-{index}", lambda server=server: serve_parameters(task, server, cluster.discovery())
            )
        for index in range(num_workers):
            worker = config("worker", index)
            cluster.start(f"worker-{index}", lambda worker=worker: work(task, worker, cluster.discovery()))
        for index, guest in enumerate(guests, num_workers):
            worker = config("worker", index)
            cluster.start(
                f"worker-{index}",
                lambda worker=worker, guest=guest: work(task, worker, cluster.discovery(), guest),
            )
        # Not the chief: a replacement would find the model_dir locked while the old one runs.
        cluster.replaceable = tuple(name for name in cluster.processes if name.startswith("worker-"))[1:]
        cluster.wait(chief=CHIEF)

    cluster = SimCluster(seed, faults, traced=traced)
    cluster.run(play)
    return cluster


def work(
    task: Counting, config: RunConfig, discovery: Discovery, guest: Guest | None = None
) -> TrainReport | None:
    """A worker as `monolith train` runs it; a guest comes later and may be told to leave."""
    metrics, output = Metrics(), Output()
    stopper = Stopper(output)

    def leave(after: float) -> None:
        concurrency.sleep(after)
        stopper("SIGTERM")

    def attempt(coordinator: Coordinator) -> TrainReport:
        trainer = Trainer(task, config.train, metrics=metrics, coordinator=coordinator)
        stopper.use(trainer)
        return trainer.train()

    if guest is not None:
        concurrency.sleep(guest.joins_after)
        if guest.leaves_after is not None:
            concurrency.Thread(target=leave, args=(guest.leaves_after,), name="leave", daemon=True).start()
    shared = SharedTraining(
        config=config,
        environ={},
        metrics=metrics,
        output=output,
        retries=Retries(config.failover, metrics, say=output.say, pause=stopper.asked.wait),
        on_waiting=stopper.check,
        on_lost=lambda: None,
    )
    try:
        report = shared.train_on_servers(attempt, discovery)
        # monolith train exits with status 75 then, and is started again. Workers may have to wait for leases
        # of files for longer than the chief waits for them.
        if not report.finished and not stopper.asked.is_set():
            raise UnavailableError(f"stopped before the end: {report.stop_reason}")
        return report
    except (RetryableError, StoppedWhileWaitingError):
        if stopper.asked.is_set():
            return None  # whoever told it to leave does not start it again
        raise
