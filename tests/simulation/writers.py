"""The world of several trainers in one model_dir: each was started to train there, and one does at a time.

A process that is paused keeps its lock, so another one cannot take the folder over, and there is nothing to
fence when it resumes. One that was killed has no lock. A trainer that finds the folder locked ends with an
error, and is started again, as by a person who retries.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import BinaryIO

from simulation.counting import Counting, read_counts

from monolith import concurrency
from monolith.checkpoint.folder.lock import LOCK_FILE
from monolith.errors import ModelDirLockedError, UnavailableError
from monolith.runtime import Trainer, TrainReport
from monolith.testing.cluster import Faults, SimCluster, SimProcess
from monolith.testing.disk import SimDisk
from monolith.train import SaveConfig, TrainConfig

FOLDER = "sim://run"


class GuardedDisk(SimDisk):
    """A disk on which only the process that has locked the folder may change its files."""

    def create(self, path: str, *, private: bool = False) -> BinaryIO:
        self._check(path)
        return super().create(path, private=private)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._check(target)

    def remove_file(self, path: str) -> None:
        self._check(path)
        super().remove_file(path)

    def _check(self, path: str) -> None:
        here, holder = self._simulation.current.machine, self.locks.get(f"run/{LOCK_FILE}")
        if path.startswith("run/") and here.alive and here is not holder:
            error = AssertionError(f"{here.name} changes {path}, which {holder and holder.name} has locked")
            self._simulation.fail(error)  # a save in the background survives any error
            raise error


def writers(seed: int, *, traced: bool = False) -> SimCluster:
    """Run one seed of the world, and return the cluster for its figures."""
    draw = random.Random(f"writers {seed}")
    task = Counting(batches=draw.randint(2, 10), read_seconds=draw.choice([0.0, 0.05, 0.5]))
    config = TrainConfig(
        model_dir=FOLDER,
        save=SaveConfig(steps=draw.choice([1, 2, 3]), asynchronous=draw.choice([True, False])),
        summary_every_steps=None,
        idle_after=timedelta(milliseconds=50),
    )
    trainers = draw.choice([2, 2, 3])
    starts_after = [draw.uniform(0, 3) for _ in range(trainers)]

    def train(number: int) -> TrainReport:
        concurrency.sleep(starts_after[number])
        try:
            return Trainer(task, config).train()
        except ModelDirLockedError as error:
            raise UnavailableError("another trainer is at work") from error

    def check_finished(process: SimProcess) -> None:
        report = process.result
        assert isinstance(report, TrainReport)
        assert report.finished, f"{process.name} exited with status 0 though: {report.stop_reason}"
        counted = read_counts(task, FOLDER)
        assert counted is not None, "the run finished without a checkpoint"
        counted.check_exactly_once(task)

    def play(cluster: SimCluster) -> None:
        cluster.on_exit.append(check_finished)
        for number in range(trainers):
            cluster.start(f"trainer-{number}", lambda number=number: train(number))
        cluster.wait()

    cluster = SimCluster(seed, Faults.drawn(seed), traced=traced)
    cluster.disk = GuardedDisk(cluster.simulation, cluster.faults.disk)
    cluster.run(play)
    return cluster
