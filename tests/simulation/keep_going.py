"""A fleet that continues after a loss: nothing is lost or trained twice beyond what the report says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from simulation.counting import Counted, Counting
from simulation.fleet import FleetShape, play_fleet
from torch import nn

from monolith import concurrency
from monolith.feature import Batch
from monolith.runtime import TrainReport
from monolith.testing.cluster import Faults, SimCluster
from monolith.testing.scheduler import SimMachine
from monolith.train import Outputs

ENDS_WITHIN = 5.0
"""Virtual seconds after which a worker that was replaced trains no more, once it reaches all machines."""


class Replaced:
    """Checks that a process that was replaced, and is alive after all, ends: another one trains its data."""

    def __init__(self) -> None:
        self._trained: set[SimMachine] = set()
        """Machines whose processes have trained before another one replaced them."""
        self._since: dict[SimMachine, float] = {}
        """Machine of a replaced process -> since when it could know that it was replaced."""

    def note_step(self, cluster: SimCluster) -> None:
        here = concurrency.machine()
        assert isinstance(here, SimMachine)
        now, process = cluster.simulation.now, cluster.processes[here.name.removesuffix(" (replaced)")]
        if process.machine is here:
            self._trained.add(here)
        # One that had not trained may have joined after its successor, which is then the replaced one.
        if process.machine is here or here not in self._trained or not here.alive:
            return
        others = [one.machine for one in cluster.processes.values() if one.machine is not None]
        if process.machine not in self._trained or any(cluster.network.is_cut(here, one) for one in others):
            self._since.pop(here, None)
        since = self._since.setdefault(here, now)
        assert now - since <= ENDS_WITHIN, f"{here.name} still trains, {now - since:.1f} s after it could end"


@dataclass(frozen=True)
class CountingSteps(Counting):
    """Also counts how often each record was trained by any process, whatever became of its update."""

    steps: Counter[int] = field(default_factory=Counter)
    """Record -> how often a step of any process had it."""
    stepped: Callable[[], object] = lambda: None

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        self.steps.update(batch.ids.ids.tolist())
        self.stepped()
        return super().outputs(model, batch)


def keep_going(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed, and return the cluster for its figures."""
    shape = FleetShape.drawn(seed, keep_going=True)
    draw = random.Random(f"keep_going, lost together {seed}")
    lost_at = draw.choice([None, draw.randint(1, shape.batches)]) if shape.num_workers > 1 else None
    """The step of the fleet at which a worker is lost with server 0, which knew what that one had trained."""
    clusters: list[SimCluster] = []

    def lose() -> None:
        both = ["ps-0", f"worker-{draw.randrange(1, shape.num_workers)}"]
        draw.shuffle(both)
        for name in both:
            concurrency.sleep(draw.choice([0.0, draw.uniform(0, 2)]))
            clusters[0].processes[name].kill()

    replaced = Replaced()

    def stepped() -> None:
        replaced.note_step(clusters[0])
        if lost_at is not None and task.steps.total() == lost_at * task.batch_size:
            clusters[0].simulation.machine("supervisor").spawn(lose)

    # A worker says every second how much it has trained: some runs are slow enough for the chief to learn it.
    slow = [] if lost_at is None else [0.7]
    task = CountingSteps(
        batches=shape.batches,
        read_seconds=draw.choice([shape.read_seconds, *slow]),
        stepped=stepped,
    )
    faults = Faults.drawn(seed)
    other = random.Random(f"keep_going, replaced while it runs {seed}")
    if replacements := other.choice([0, 0, 1, 2]) if shape.num_workers > 1 else 0:
        # Long runs and short pauses, after the first steps: an earlier process is to be back while its
        # successor trains.
        task = replace(task, batches=other.randint(10, 20), read_seconds=other.choice([1.0, 2.0]))
        faults = replace(faults, replacements=replacements, longest=3.0, every=(0.5, 4.0))

    def around(cluster: SimCluster) -> Callable[[], object]:
        clusters.append(cluster)
        # Not the chief: a replacement would find the model_dir locked while the old one runs.
        cluster.replaceable = tuple(f"worker-{index}" for index in range(1, shape.num_workers))
        return lambda: None

    def worker_of(record: int) -> int:
        return (record - 1) // task.batch_size % shape.num_workers

    def check(counted: Counted, report: TrainReport | None) -> None:
        if report is None:
            return
        lost = report.lost
        if not lost.servers and not lost.workers:
            counted.check_exactly_once(task)
            return
        records = range(1, task.records + 1)
        missing = [record for record in records if counted.times.get(record, 0) < 1]
        repeated = [record for record in records if counted.times.get(record, 0) > 1]
        # A lost update is a push of the rows of one batch to one server.
        known = all(one.uncounted == () for one in lost.servers)
        most = sum(one.updates for one in lost.servers) * task.batch_size
        assert not missing or not known or len(missing) <= most, (
            f"{len(missing)} records are missing, and the report admits {most} at most: {lost}"
        )
        named = {one.worker for one in lost.workers}
        # What a chief had trained is known to server 0 only: if both are lost, the report says so by `rows`.
        if any(one.rows is None for one in lost.servers):
            named.add(0)
        unnamed = {record: worker_of(record) for record in repeated if worker_of(record) not in named}
        assert not unnamed, f"records were trained twice by workers that are not reported: {unnamed}, {lost}"
        # What the report says of a worker is what that one had said before it was lost, so never too much.
        for worker in named:
            again = sum(task.steps[record] - 1 for record in records if worker_of(record) == worker)
            said = sum(one.records or 0 for one in lost.workers if one.worker == worker)
            assert said <= again, f"worker {worker} trained {again} records again, the report says {said}"

    return play_fleet(seed, shape, task, check, traced=traced, around=around, faults=faults)
