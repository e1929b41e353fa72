"""The world of a fleet: parameter servers and workers that train each record exactly once."""

from __future__ import annotations

import random
from datetime import timedelta

from simulation.counting import Counting, read_counts

from monolith import concurrency
from monolith.runtime import Trainer, TrainReport, join_fleet, serve_parameters
from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.fleet_coordinator import FleetCoordinator
from monolith.runtime.parameter_server import ServerEnd
from monolith.testing.cluster import Faults, SimCluster
from monolith.train import SaveConfig, TrainConfig

FOLDER = "sim://run"


def fleet(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"fleet {seed}")
    num_ps, num_workers = draw.choice([1, 2, 2, 3]), draw.choice([1, 2, 2, 3])
    task = Counting(batches=draw.randint(2, 8))
    train = TrainConfig(
        model_dir=FOLDER,
        save=SaveConfig(steps=draw.choice([1, 2, 3, 5])),
        summary_every_steps=None,
        idle_after=timedelta(milliseconds=50),
    )

    def config(role: str, index: int) -> RunConfig:
        return RunConfig(
            train=train,
            cluster=ClusterConfig(role=role, index=index, num_ps=num_ps, num_workers=num_workers),
            timeouts=TimeoutsConfig(start=timedelta(seconds=60), finish=timedelta(seconds=60)),
        )

    def play(cluster: SimCluster) -> None:
        def serve(index: int) -> ServerEnd:
            return serve_parameters(task, config("ps", index), cluster.discovery(), stop=concurrency.Event())

        def work(index: int) -> TrainReport:
            with join_fleet(cluster.discovery(), config("worker", index)) as joined:
                return Trainer(task, train, coordinator=FleetCoordinator(joined, None)).train()

        for index in range(num_ps):
            cluster.start(f"ps-{index}", lambda index=index: serve(index))
        for index in range(num_workers):
            cluster.start(f"worker-{index}", lambda index=index: work(index))
        cluster.wait(chief="worker-0")
        counted = read_counts(task, FOLDER)
        assert counted is not None, "the run finished without a checkpoint"
        counted.check_exactly_once(task)

    cluster = SimCluster(seed, Faults.drawn(seed), traced=traced)
    cluster.run(play)
    return cluster
