"""Everything together: a data service feeds a fleet, whose servers publish their rows to subscribers.

Each record is trained exactly once, and in the end every subscriber has the rows of the last checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
from simulation.counting import LABEL, RECORD, SPEC, Counted, Counting, read_counts
from simulation.fleet import CHIEF, FOLDER, FleetShape, play_fleet
from simulation.following import Followers, cut_channel, folder_plan

from monolith import concurrency
from monolith.data import Pipeline, Position, Records, Source, Stream
from monolith.data.formats.memory import to_records
from monolith.data.service import DataJobConfig, DataServiceSource, DataWorker, DataWorkerConfig, Dispatcher
from monolith.feature import Batch
from monolith.runtime import TrainReport
from monolith.testing.cluster import SimCluster
from monolith.testing.scheduler import SimMachine
from monolith.train import Hook, Mode, TrainingRun

DISPATCHER = "dispatcher:7000"


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
    ends = random.Random(f"together, lost at the end {seed}")
    losses, cuts = ends.choice([0, 1, 2]), ends.choice([0, 1])

    def saved() -> None:
        nonlocal losses, cuts
        if cuts:
            cuts -= 1
            cut_channel(clusters[0])
        if losses:
            losses -= 1
            cluster = clusters[0]
            cluster.processes[f"ps-{cluster.random.randrange(shape.num_ps)}"].kill()

    task = Served(batches=shape.batches, saved=saved)
    plan = folder_plan(draw.choice([0.05, 0.25]))

    def dispatch() -> None:
        config = DataJobConfig(splits=task.splits, lease=timedelta(seconds=2), attempts=1_000)
        host, port = DISPATCHER.split(":")
        with Dispatcher(config, folder="sim://job", host=host, port=int(port)):
            concurrency.Event().wait()

    def read(name: str) -> None:
        config = DataWorkerConfig(readers=1, buffer_chunks=4, chunk_records=task.batch_size)
        with DataWorker(DISPATCHER, Split, config, host=name, port=0):
            concurrency.Event().wait()

    def around(cluster: SimCluster) -> Callable[[], None]:
        clusters.append(cluster)
        cluster.start("dispatcher", dispatch)
        for number in range(draw.choice([1, 2])):
            cluster.start(f"reader-{number}", lambda name=f"reader-{number}": read(name))
        followers = Followers(cluster)
        followers.start(draw.choice([1, 2]))

        def afterwards() -> None:
            counted = read_counts(task, FOLDER)
            assert counted is not None
            followers.check_equal(counted)

        return afterwards

    def check(counted: Counted, _: TrainReport | None) -> None:
        counted.check_exactly_once(task)

    return play_fleet(seed, shape, task, check, traced=traced, publish=plan, around=around)
