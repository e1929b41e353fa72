"""Everything together: a data service feeds a fleet, whose servers publish their rows to subscribers.

Each record is trained exactly once, and in the end every subscriber has the rows of the last checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
from simulation.counting import COUNTS, LABEL, RECORD, SPEC, Counted, Counting, read_counts
from simulation.fleet import CHIEF, FOLDER, FleetShape, play_fleet

from monolith import concurrency
from monolith.data import Pipeline, Position, Records, Source, Stream
from monolith.data.formats.memory import to_records
from monolith.data.service import DataJobConfig, DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.feature import Batch
from monolith.runtime import TrainReport
from monolith.runtime.publish_shard import PublishPlan
from monolith.sync import Subscriber, TableTarget
from monolith.sync.folder_channel import FolderDeltaReader, FolderDeltaWriter
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.table import NativeTable, Segment, Sgd, TableConfig, iterate
from monolith.testing.cluster import SimCluster
from monolith.testing.scheduler import SimMachine
from monolith.train import Hook, Mode, TrainingRun

CHANNEL = "sim://channel"
DISPATCHER = "dispatcher:7000"
EQUAL_WITHIN = 120.0
"""Virtual seconds that subscribers have after the end of the run."""


class Split(Source):
    """The split "first:end": these numbers, one by one."""

    live = False

    def __init__(self, split: str) -> None:
        first, end = split.split(":")
        self._next, self._end = int(first), int(end)

    def __iter__(self) -> Iterator[Records]:
        while self._next < self._end:
            self._next += 1
            yield to_records({RECORD: np.array([self._next - 1]), LABEL: np.ones(1, np.float32)})

    def position(self) -> Position:
        return {"next": self._next}

    def restore(self, position: Position) -> None:
        self._next = position["next"]


@dataclass(frozen=True)
class Served(Counting):
    """Counts records that a data service reads."""

    saved: Callable[[], None] = lambda: None
    """Called by the chief between its last save and the last delta of its servers."""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(f"{first + 1}:{min(first + 3, self.records) + 1}" for first in range(0, self.records, 3))

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(DataServiceSource(DISPATCHER, "fleet", prefetch=2)).to_batches(SPEC)

    def hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        return [Saved(self.saved)]


class Saved(Hook):
    def __init__(self, saved: Callable[[], None]) -> None:
        self._saved = saved

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        here = concurrency.machine()
        if isinstance(here, SimMachine) and here.name == CHIEF:
            self._saved()


def together(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"together {seed}")
    shape = replace(FleetShape.drawn(seed, keep_going=False), redundant=0)
    clusters: list[SimCluster] = []
    losses = random.Random(f"together, lost at the end {seed}").choice([0, 1, 2])

    def saved() -> None:
        nonlocal losses
        if losses:
            losses -= 1
            cluster = clusters[0]
            cluster.processes[f"ps-{cluster.random.randrange(shape.num_ps)}"].kill()

    task = Served(batches=shape.batches, saved=saved)
    subscribers: dict[int, NativeTable] = {}
    plan = PublishPlan(
        config=PublishConfig(
            to="here",
            interval=timedelta(seconds=draw.choice([0.05, 0.25])),
            guard=GuardConfig(largest_value=None, times_usual=None),
        ),
        run="run",
        open_writer=lambda _: FolderDeltaWriter(CHANNEL, check_every=0.5),
    )

    def dispatch() -> None:
        config = DataJobConfig(splits=task.splits, lease=timedelta(seconds=2), attempts=1_000)
        host, port = DISPATCHER.split(":")
        with Dispatcher(config, folder="sim://job", host=host, port=int(port)):
            concurrency.Event().wait()

    def read(name: str) -> None:
        config = DataWorkerConfig(readers=1, buffer_chunks=4, chunk_records=task.batch_size)
        with DataWorker(DISPATCHER, Split, config, host=name, port=0):
            concurrency.Event().wait()

    def subscribe(number: int) -> None:
        table = subscribers[number] = NativeTable(
            TableConfig(name=COUNTS, segments=(Segment(dim=1, optimizer=Sgd(learning_rate=1.0)),))
        )
        subscriber = Subscriber(
            lambda: FolderDeltaReader(CHANNEL, poll_every=1.0, patience=10.0), TableTarget({COUNTS: table})
        )
        subscriber.start()
        concurrency.Event().wait()

    def around(cluster: SimCluster) -> Callable[[], None]:
        clusters.append(cluster)
        cluster.start("dispatcher", dispatch)
        for number in range(draw.choice([1, 2])):
            cluster.start(f"reader-{number}", lambda name=f"reader-{number}": read(name))
        for number in range(draw.choice([1, 2])):
            cluster.start(f"subscriber-{number}", lambda number=number: subscribe(number))

        def equal() -> bool:
            counted = read_counts(task, FOLDER)
            assert counted is not None
            return all(rows_of(table) == counted.times for table in subscribers.values())

        def afterwards() -> None:
            # A subscriber that is killed now starts again, so faults may still happen.
            limit = cluster.simulation.now + EQUAL_WITHIN
            cluster.wait(done=lambda: equal() or cluster.simulation.now > limit)
            assert equal(), {number: rows_of(table) for number, table in subscribers.items()}

        return afterwards

    def check(counted: Counted, _: TrainReport | None) -> None:
        counted.check_exactly_once(task)

    return play_fleet(seed, shape, task, check, traced=traced, publish=plan, around=around)


def rows_of(table: NativeTable) -> dict[int, int]:
    return {
        record: int(value[0])
        for chunk in iterate(table)
        for record, value in zip(chunk.ids.tolist(), chunk.values.tolist(), strict=True)
    }
