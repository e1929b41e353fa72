"""A fleet that continues after a loss: nothing is lost or trained twice beyond what the report says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.counting import Counted, Counting
from simulation.fleet import FleetShape, play_fleet
from torch import nn

from monolith import concurrency
from monolith.feature import Batch
from monolith.runtime import TrainReport
from monolith.testing.cluster import SimCluster
from monolith.train import Outputs


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

    def stepped() -> None:
        if lost_at is not None and task.steps.total() == lost_at * task.batch_size:
            clusters[0].simulation.machine("supervisor").spawn(lose)

    # A worker says every second how much it has trained: some runs are slow enough for the chief to learn it.
    slow = [] if lost_at is None else [0.7]
    task = CountingSteps(
        batches=shape.batches,
        read_seconds=draw.choice([shape.read_seconds, *slow]),
        stepped=stepped,
    )

    def around(cluster: SimCluster) -> Callable[[], object]:
        clusters.append(cluster)
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

    return play_fleet(seed, shape, task, check, traced=traced, around=around)
