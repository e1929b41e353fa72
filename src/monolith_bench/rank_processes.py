"""The processes of `monolith bench sync`: ranks that train in step, on demand.

A rank takes steps as a run does, by the same classes: all ranks agree that each has a batch, look rows up
ahead and push gradients behind by a `PrefetchPipeline`, add up gradients of weights while backward computes,
and say a word before each step. Reading and saving are left out.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.feature import Batch
from monolith.model import apply_gradients
from monolith.runtime.coordinator import Start, WorkerProgress, WorkerState
from monolith.runtime.prefetch import PrefetchPipeline
from monolith.runtime.ranks import RankCoordinator
from monolith.store import RankGroups
from monolith.store.rank_calls import RankPort
from monolith.store.rank_keys import RankKeys, join_attempt, keep_keys, reach_keys
from monolith.train import Mode
from monolith.train.model import LookedUp, Model
from monolith_bench.fleet_processes import FleetTask, FleetWorker, asked_of, process

HOST = "127.0.0.1"
READY = "ready"


class StepsDone(NamedTuple):
    """What a process did when it was asked to."""

    seconds: float
    processor: float
    """Seconds, of all its threads."""


class RankWorker:
    """One rank whose data has no end.

    Args:
        examples: In a batch of this rank.
    """

    def __init__(self, task: FleetTask, groups: RankGroups, examples: int) -> None:
        self._coordinator = RankCoordinator(groups)
        self._placement = self._coordinator.placement
        self._model = Model(task, Mode.TRAIN, seed=0, make_store=self._placement.make_store)
        assert self._model.sparse is not None
        self._sparse = self._model.sparse
        self._dense = self._placement.attach(self._model)
        self._coordinator.join(lambda _: Start(step=0))
        batches = itertools.cycle(task.batches(examples, groups.rank))
        self._lane: PrefetchPipeline[Batch, LookedUp] = PrefetchPipeline(
            self._placement.align(
                batches,
                empty=Batch.of_none,
                every=60.0,
                pressed=lambda: False,
                silences=False,
                shares_work=False,
            ),
            self._model.prepare,
            lockstep=True,
        )

    def take_step(self) -> None:
        state = WorkerState(position={}, examples=0, skipped=0, event_time=None)
        self._coordinator.at_step(WorkerProgress(step=0, state=state))
        found = self._lane.next()
        assert found is not None
        batch, rows = found
        outputs = self._model.outputs(batch, rows)
        apply_gradients(
            outputs.loss,
            self._sparse,
            self._dense,
            self._model.task.updates(),
            together=self._placement.averaging,
            examples=len(batch),
            push=self._lane.push,
        )


def be_rank(pipe: Connection, task: FleetTask, place: tuple[int, int], examples: int) -> None:
    """Be a rank: rank 0 tells the other ranks its port, and all take the steps they are asked for."""
    torch.set_num_threads(1)
    rank, size = place
    keys, token = meet_by_pipe(pipe, rank)
    groups = RankGroups(keys, rank, size, port=RankPort(host=HOST, guard=Guard(token=token)))
    worker = RankWorker(task, groups, examples)
    answer_steps(pipe, worker.take_step)
    groups.expect_end()
    groups.close()


def meet_by_pipe(pipe: Connection, rank: int) -> tuple[RankKeys, Secret]:
    """Return the keys that all ranks share, and their token; rank 0 says where, through the bench."""
    if rank == 0:
        token = Secret(secrets.token_hex(16))
        keys = keep_keys(HOST, token)
        pipe.send((keys.port, token.reveal()))
        return keys, token
    port, text = pipe.recv()
    return join_attempt(reach_keys(HOST, port), Secret(text)), Secret(text)


def be_alone(pipe: Connection, task: FleetTask, examples: int) -> None:
    """Be the one process that trains on what all ranks have."""
    torch.set_num_threads(1)
    worker = FleetWorker(task, (), examples, 0)
    answer_steps(pipe, worker.step)
    worker.close()


def answer_steps(pipe: Connection, step: Callable[[], None]) -> None:
    """Say that this process is ready, and take the steps it is asked for."""
    pipe.send(READY)
    for steps in asked_of(pipe):
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        pipe.send(StepsDone(time.perf_counter() - began, time.process_time() - used))


class Stepping:
    """Processes that take steps at the same time; all have said that they are ready."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def take(self, steps: int) -> StepsDone:
        """Return how long the slowest took, and what all used of the processors."""
        for pipe in self._pipes:
            pipe.send(steps)
        done: list[StepsDone] = [pipe.recv() for pipe in self._pipes]
        return StepsDone(max(one.seconds for one in done), sum(one.processor for one in done))


@contextmanager
def stepping(task: FleetTask, sizes: Sequence[int], examples: int) -> Iterator[dict[int, Stepping]]:
    """Start one process with everything as size 0, and ranks of each size that share its batch."""
    with ExitStack() as stack:
        alone = stack.enter_context(process(be_alone, task, examples))
        pipes = {
            size: [
                stack.enter_context(process(be_rank, task, (rank, size), examples // size))
                for rank in range(size)
            ]
            for size in sizes
        }
        for ranks in pipes.values():
            met = ranks[0].recv()
            for pipe in ranks[1:]:
                pipe.send(met)
        for pipe in (alone, *itertools.chain(*pipes.values())):
            pipe.recv()
        yield {0: Stepping([alone]), **{size: Stepping(ranks) for size, ranks in pipes.items()}}
