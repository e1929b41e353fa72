"""The world of ranks: processes that take every step together and train each record exactly once, however
unequal their shards of the data are.

Half of the runs publish their rows. Then ranks and servers are also lost between the last save and the last
delta, or the channel cannot be reached. In the end every subscriber has the rows of the last checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from simulation.counting import LABEL, Counting, read_counts
from simulation.following import Followers, cut_channel, folder_plan
from torch import nn

from monolith import concurrency
from monolith.cluster import Discovery
from monolith.cluster.security import SecurityConfig
from monolith.config import Secret
from monolith.feature import Batch
from monolith.observe import Metrics
from monolith.runtime import Coordinator, Trainer, TrainReport, serve_parameters
from monolith.runtime.attempts import Retries, SharedTraining
from monolith.runtime.cluster_config import ClusterConfig, FailoverConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.context import Output
from monolith.testing.cluster import Faults, SimCluster, SimProcess
from monolith.train import Hook, Outputs, SaveConfig, TrainConfig
from monolith.train.hook import StepResult, TrainingRun

FOLDER = "sim://run"
CHIEF = "rank-0"
LOOPBACK = "127.0.0.1"


class FirstTime(Counting):
    """Counts records. None in a batch may have been trained: not in this attempt, and not in the checkpoint
    that it began with."""

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        found = super().outputs(model, batch)
        assert not found.predictions[LABEL].any(), f"trained again: {found.predictions[LABEL].tolist()}"
        return found


class SameWeight(Hook):
    """Checks that a rank has the dense weight that all ranks have at its step."""

    def __init__(self, task: Counting) -> None:
        self._size = task.batch_size

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        weight = int(run.model.get_parameter("trained").item())
        assert weight == result.step * self._size, f"step {result.step} has the weight {weight}"


class Saved(Hook):
    """Calls something on rank 0 between the last save and the last delta; other ranks are late by then."""

    def __init__(self, rank: int, late: float, saved: Callable[[], None]) -> None:
        self._rank, self._late, self._saved = rank, late, saved

    def end(self, run: TrainingRun) -> None:  # noqa: ARG002
        if self._rank == 0:
            self._saved()
        else:
            concurrency.sleep(self._late)


def ranks(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"ranks {seed}")
    num_ps, num_ranks = draw.choice([0, 0, 0, 1, 2]), draw.choice([1, 2, 2, 3])
    steps = draw.randint(1, 5)
    # In half of the runs, the other ranks have less data than rank 0, or none, or one has a batch more.
    uneven = random.Random(f"ranks, uneven {seed}")
    ahead = uneven.choice([0, 0, 1, steps]) if num_ranks > 1 else 0
    others = uneven.randint(0, steps * num_ranks - 1) if ahead else steps * num_ranks
    task = FirstTime(batches=ahead + others, ahead=ahead, read_seconds=draw.choice([0.0, 0.05, 0.5]))
    steps = ahead + -(-others // num_ranks)
    train = TrainConfig(
        model_dir=FOLDER,
        save=SaveConfig(steps=draw.choice([1, 2, 3, 5]), asynchronous=draw.choice([True, False])),
        summary_every_steps=None,
        idle_after=timedelta(milliseconds=50),
    )
    wait = timedelta(seconds=draw.choice([0, 1, 5]))
    # Short and long, so that a cut or a pause is noticed by the heartbeat in some runs and not in others.
    silence = timedelta(seconds=draw.choice([3, 10, 60]))
    # Rank 0 writes into the model_dir, whose lock a replacement would find taken while the old one runs.
    replaced = draw.choice([0, 0, 1, 2]) if num_ranks > 1 else 0
    ends = random.Random(f"ranks, at the end {seed}")
    plan = ends.choice([None, folder_plan(ends.choice([0.25, 30.0, 30.0]))])
    losses, late = 0 if plan is None else ends.choice([0, 1, 2]), ends.choice([0.0, 2.0, 2.0])
    cuts = 0 if plan is None else ends.choice([0, 1])

    def saved() -> None:
        nonlocal losses, cuts
        if cuts:
            cuts -= 1
            cut_channel(cluster)
        if losses:
            losses -= 1
            others = [
                name for name in cluster.processes if name.startswith(("ps-", "rank-")) and name != CHIEF
            ]
            if others:
                cluster.processes[ends.choice(others)].kill()

    def config(role: Literal["ps", "worker"], index: int) -> RunConfig:
        return RunConfig(
            train=train,
            cluster=ClusterConfig(
                role=role, index=index, num_ps=num_ps, num_workers=num_ranks, mode="sync", listen=LOOPBACK
            ),
            failover=FailoverConfig(wait=wait),
            security=SecurityConfig(token=Secret("of-the-simulation")),
            timeouts=TimeoutsConfig(
                start=timedelta(seconds=60), finish=timedelta(seconds=60), silence=silence
            ),
        )

    def train_as(index: int, discovery: Discovery) -> TrainReport:
        def attempt(coordinator: Coordinator) -> TrainReport:
            hooks = [SameWeight(task), Saved(index, late, saved)]
            return Trainer(task, train, coordinator=coordinator, hooks=hooks, publish=plan).train()

        run, metrics, output = config("worker", index), Metrics(), Output()
        shared = SharedTraining(
            config=run,
            environ={},
            metrics=metrics,
            output=output,
            retries=Retries(run.failover, metrics, say=output.warn, pause=_pause),
            on_waiting=lambda _: None,
            on_lost=lambda: None,
        )
        return shared.train_as_rank(attempt, discovery)

    def check_finished(process: SimProcess) -> None:
        report = process.result
        if not isinstance(report, TrainReport):
            return
        # Status 0 tells an operator that all is done and saved, so it has to be, at this very moment.
        ended = (report.finished, report.step)
        assert ended == (True, steps), f"{process.name} ended early: {report}"
        counted = read_counts(task, FOLDER)
        assert counted is not None, "the run finished without a checkpoint"
        counted.check_exactly_once(task, steps=steps)
        assert counted.step == steps, f"the checkpoint is of step {counted.step}, not {steps}"

    def play(cluster: SimCluster) -> None:
        cluster.on_exit.append(check_finished)
        followers = Followers(cluster)
        if plan is not None:
            followers.start(1)
        for index in range(num_ps):
            server = config("ps", index)
            cluster.start(
                f"ps-{index}",
                lambda server=server: serve_parameters(task, server, cluster.discovery(), publish=plan),
            )
        for index in range(num_ranks):
            cluster.start(f"rank-{index}", lambda index=index: train_as(index, cluster.discovery()))
        cluster.replaceable = tuple(f"rank-{index}" for index in range(1, num_ranks))
        cluster.wait(chief=CHIEF)
        counted = read_counts(task, FOLDER)
        assert counted is not None
        followers.check_equal(counted)

    faults = replace(Faults.drawn(seed), replacements=replaced)
    # A connection of ranks that breaks costs a whole attempt, and an attempt is hundreds of messages.
    chance = min(faults.network.break_chance, 0.002)
    cluster = SimCluster(
        seed, replace(faults, network=replace(faults.network, break_chance=chance)), traced=traced
    )
    cluster.run(play)
    return cluster


def _pause(seconds: float) -> bool:
    concurrency.sleep(seconds)
    return False
