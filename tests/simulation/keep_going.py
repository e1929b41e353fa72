"""A fleet that continues after a loss: nothing is lost beyond what the report says."""

from __future__ import annotations

from simulation.counting import Counted
from simulation.fleet import FleetShape, play_fleet

from monolith.runtime import TrainReport
from monolith.testing.cluster import SimCluster


def keep_going(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed, and return the cluster for its figures."""
    shape = FleetShape.drawn(seed, keep_going=True)
    task = shape.task()

    def check(counted: Counted, report: TrainReport | None) -> None:
        if report is None:
            return
        lost = report.lost
        if not lost.servers and not lost.workers:
            counted.check_exactly_once(task)
            return
        records = range(1, task.records + 1)
        missing = [record for record in records if counted.times.get(record, 0) < 1]
        repeated = sum(max(0, counted.times.get(record, 0) - 1) for record in records)
        # A lost update is a push of the rows of one batch to one server.
        known = all(one.uncounted == () for one in lost.servers)
        most = sum(one.updates for one in lost.servers) * task.batch_size
        assert not missing or not known or len(missing) <= most, (
            f"{len(missing)} records are missing, and the report admits {most} at most: {lost}"
        )
        # What a chief had trained is known to server 0 only: if both are lost, the report says so by `rows`.
        unknown = any(one.rows is None for one in lost.servers)
        assert not repeated or lost.workers or unknown, (
            f"{repeated} records were trained twice, and the report names no lost worker: {lost}"
        )

    return play_fleet(seed, shape, task, check, traced=traced)
