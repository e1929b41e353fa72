"""The worlds of a fleet: parameter servers and workers, with the retries of `monolith train`.

`fleet` demands that every record is trained exactly once. `keep_going` lets a run continue after a loss, with
or without standbys, and demands that nothing is lost beyond what the report says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

from simulation.counting import Counted, Counting, read_counts

from monolith import concurrency
from monolith.cluster import Discovery
from monolith.errors import UnavailableError
from monolith.observe import Metrics
from monolith.runtime import Coordinator, Trainer, TrainReport, serve_parameters
from monolith.runtime.attempts import Retries, SharedTraining
from monolith.runtime.cluster_config import ClusterConfig, FailoverConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.context import Output
from monolith.runtime.publish_shard import PublishPlan
from monolith.store.dense import DenseShard
from monolith.store.dense_config import DenseConfig
from monolith.store.local import LocalStore
from monolith.testing.cluster import Faults, SimCluster, SimProcess
from monolith.testing.scheduler import SimMachine
from monolith.train import SaveConfig, TrainConfig

Around = Callable[[SimCluster], Callable[[], object]]

FOLDER = "sim://run"
CHIEF = "worker-0"
LARGE_EVERY, LARGE = 10, 6
"""One seed of ten has a large fleet: those whose last digit is 6. It takes longer, and most bugs need few
processes."""
SLOW_PUSHES = 0.25
"""Part of the seeds with servers that are slow now and then."""


@dataclass(frozen=True)
class FleetShape:
    """What a seed decides about a fleet, besides its faults."""

    num_ps: int
    num_workers: int
    batches: int
    save_steps: int
    read_seconds: float = 0.0
    redundant: int = 0
    standbys: int = 0
    keep_going: bool = False
    max_retries: int = 6
    dense: DenseConfig | None = None
    saves_in_background: bool = False

    @classmethod
    def drawn(cls, seed: int, *, keep_going: bool) -> FleetShape:
        draw = random.Random(f"fleet {seed}")
        num_ps = draw.choice([1, 2, 2, 3] if not keep_going else [2, 2, 3])
        num_workers = draw.choice([1, 2, 2, 3])
        if seed % LARGE_EVERY == LARGE:
            size = random.Random(f"large fleet {seed}")
            num_ps, num_workers = size.choice([4, 5]), size.choice([1, 2, 3, 4])
        return cls(
            num_ps=num_ps,
            num_workers=num_workers,
            batches=draw.randint(2, 8),
            save_steps=draw.choice([1, 2, 3, 5]),
            read_seconds=draw.choice([0.0, 0.05, 0.5]),
            redundant=draw.choice([0, 0, 1]),
            standbys=draw.choice([0, 1]) if keep_going else 0,
            keep_going=keep_going,
            max_retries=draw.choice([0, 1, 6]),
            dense=draw.choice([None, DenseConfig(prefetch=True, postpush=True)]),
            saves_in_background=draw.choice([True, False]),
        )

    def task(self) -> Counting:
        return Counting(batches=self.batches, read_seconds=self.read_seconds)

    def config(self, role: str, index: int) -> RunConfig:
        """The config of one process."""
        return RunConfig(
            train=TrainConfig(
                model_dir=FOLDER,
                save=SaveConfig(steps=self.save_steps, asynchronous=self.saves_in_background),
                summary_every_steps=None,
                idle_after=timedelta(milliseconds=50),
            ),
            cluster=ClusterConfig(
                role="ps" if role == "ps" else "worker",
                index=index,
                num_ps=self.num_ps,
                num_workers=self.num_workers,
                num_redundant_ps=self.redundant,
                standbys=self.standbys,
            ),
            failover=FailoverConfig(
                max_retries=self.max_retries, recovery="keep_going" if self.keep_going else "exact"
            ),
            timeouts=TimeoutsConfig(start=timedelta(seconds=60), finish=timedelta(seconds=60)),
            dense=self.dense or DenseConfig(),
        )


def fleet(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world in which nothing may be lost, and return the cluster for its figures."""
    shape = FleetShape.drawn(seed, keep_going=False)
    task = shape.task()

    def check(counted: Counted, _: TrainReport | None) -> None:
        counted.check_exactly_once(task)

    return play_fleet(seed, shape, task, check, traced=traced)


def play_fleet(
    seed: int,
    shape: FleetShape,
    task: Counting,
    check: Callable[[Counted, TrainReport | None], None],
    *,
    traced: bool,
    publish: PublishPlan | None = None,
    around: Around | None = None,
    faults: Faults | None = None,
) -> SimCluster:
    """Run a fleet with the faults of a seed.

    Args:
        check: Called when the chief exits, with its report if that is of the whole run: if it restarted,
            earlier losses are in the log of its earlier lives.
        publish: How all processes publish.
        around: Starts other processes before those of the fleet; what it returns is called when the run is
            over.
        faults: Those of the seed by default.
    """
    faults = faults or Faults.drawn(seed)
    slow = random.Random(f"fleet, slow pushes {seed}").random() < SLOW_PUSHES

    def on_exit(process: SimProcess) -> None:
        # Status 0 tells an operator that all is done and saved, so it has to be, at this very moment.
        if process.name == CHIEF:
            report = process.result
            assert isinstance(report, TrainReport)
            counted = read_counts(task, FOLDER)
            assert counted is not None, "the run finished without a checkpoint"
            check(counted, None if process.starts > 1 else report)

    def play(cluster: SimCluster) -> None:
        afterwards = (lambda: None) if around is None else around(cluster)
        for index in range(shape.num_ps + shape.redundant):
            config = shape.config("ps", index)
            cluster.start(
                f"ps-{index}",
                lambda config=config: serve_parameters(task, config, cluster.discovery(), publish=publish),
            )
        for index in range(shape.num_workers):
            config = shape.config("worker", index)
            cluster.start(
                f"worker-{index}", lambda config=config: work(task, config, cluster.discovery(), publish)
            )
        cluster.on_exit.append(on_exit)
        cluster.wait(chief=CHIEF)
        afterwards()

    cluster = SimCluster(seed, faults, traced=traced)
    with slow_pushes(cluster) if slow else nullcontext():
        cluster.run(play)
    return cluster


@contextmanager
def slow_pushes(cluster: SimCluster) -> Iterator[None]:
    """Let servers take seconds to apply a push, now and then, while their connections break: so a push is
    sent again while the first one is under way. Until all faults have happened, like every other fault."""

    def slowed(apply: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not cluster.quiet and random.random() < 0.3:
                concurrency.sleep(random.uniform(0, 0.1))  # the next push may be here by then, too
                here = concurrency.machine()
                assert isinstance(here, SimMachine)
                cluster.network.break_connections(here)
                concurrency.sleep(random.uniform(0, 3))
            return apply(*args, **options)

        return call

    with (
        mock.patch.object(LocalStore, "apply_gradients", slowed(LocalStore.apply_gradients)),
        mock.patch.object(DenseShard, "push", slowed(DenseShard.push)),
    ):
        yield


def work(
    task: Counting, config: RunConfig, discovery: Discovery, publish: PublishPlan | None = None
) -> TrainReport:
    """A worker as `monolith train` runs it: with retries in the process."""
    metrics = Metrics()

    def pause(seconds: float) -> bool:
        concurrency.sleep(seconds)
        return False

    shared = SharedTraining(
        config=config,
        environ={},
        metrics=metrics,
        output=Output(),
        retries=Retries(config.failover, metrics, say=lambda _: None, pause=pause),
        on_waiting=lambda _: None,
        on_lost=lambda: None,
    )

    def attempt(coordinator: Coordinator) -> TrainReport:
        trainer = Trainer(task, config.train, metrics=metrics, coordinator=coordinator, publish=publish)
        return trainer.train()

    report = shared.train_on_servers(attempt, discovery)
    if not report.finished:  # monolith train exits with status 75 then
        raise UnavailableError(f"stopped before the end: {report.stop_reason}")
    return report
