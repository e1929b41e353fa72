"""The processes of `monolith bench fleet`: servers that hold a model, and workers that train it on demand.

A worker takes steps as a run does, by the same classes: rows are looked up ahead and updated behind by a
`PrefetchPipeline`, and gradients of weights go to the servers. Reading, coordination and saving are left
out. It can also do either half alone: compute, on rows that were looked up before and with gradients that
are not sent; or the wire, looking up and pushing the same bytes with nothing computed.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from monolith import native
from monolith.data import Stream
from monolith.feature import Batch, FeatureIds
from monolith.model import DeepFM, apply_gradients
from monolith.runtime.fleet_placement import ServedOptimizer
from monolith.runtime.prefetch import PrefetchPipeline
from monolith.store import (
    DenseShard,
    LocalStore,
    ParameterServer,
    ParameterServerStore,
    ServerGroup,
    Store,
)
from monolith.store.dense_config import DenseConfig
from monolith.table import Adagrad, SlotThresholds, TableConfig
from monolith.train import Mode, Task
from monolith.train.model import LookedUp, Model
from monolith_bench.ids import DISTRIBUTIONS
from monolith_bench.rivals import LEARNING_RATE
from monolith_bench.trainers import ACCUMULATOR, dense_adagrad

BATCHES = 16
Work = Literal["step", "compute", "wire"]
"""Whole steps, or one half of them alone."""
DenseKind = Literal["default", "behind"]
"""How weights are fetched and pushed: as a run does by default, or in the background, during the steps."""
_Update = Callable[[], None]


@dataclass(frozen=True)
class FleetTask(Task):
    """A DeepFM with one id of each feature in every example."""

    features: int = 26
    rows: int = 40_000
    """Of each feature."""
    dim: int = 16
    hidden: tuple[int, ...] = (128, 64)
    threads: int = 1
    """That a table in the process has."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        raise NotImplementedError("batches are made before the clock starts")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"f{number:03d}" for number in range(self.features))

    def model(self) -> nn.Module:
        adagrad = Adagrad(learning_rate=LEARNING_RATE, initial_accumulator_value=ACCUMULATOR)
        return DeepFM(
            self.names,
            dim=self.dim,
            hidden=self.hidden,
            optimizer=adagrad,
            bias_optimizer=adagrad,
            threads=self.threads,
        )

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return dense_adagrad(model)

    def batches(self, examples: int, seed: int) -> list[Batch]:
        """Return the batches that one worker trains on, again and again."""
        random = np.random.default_rng(seed)
        drawn = DISTRIBUTIONS["zipf"](self.rows, BATCHES * examples * self.features, random).astype(np.int64)
        labels = torch.from_numpy(random.integers(0, 2, (BATCHES, examples))).float()
        return [
            Batch(ids=FeatureIds.one_each(self.names, ids, event_time=1), labels={"click": label})
            for ids, label in zip(
                torch.from_numpy(drawn).view(BATCHES, examples, self.features), labels, strict=True
            )
        ]


class Done(NamedTuple):
    """What a worker did in a while."""

    steps: int
    seconds: float
    processor: float
    """Seconds, of all its threads."""


class FleetWorker:
    """Trains a model: on servers, or, where there are none, with rows and weights of its own.

    Args:
        examples: In a batch.
        dense: When weights are fetched and pushed.
    """

    def __init__(
        self,
        task: FleetTask,
        addresses: Sequence[str],
        examples: int,
        seed: int,
        dense: DenseConfig | None = None,
    ) -> None:
        self._group = ServerGroup(addresses) if addresses else None
        make_store = LocalStore.from_configs if self._group is None else self._make_store
        self._model = Model(task, Mode.TRAIN, seed=0, make_store=make_store)
        assert self._model.sparse is not None
        assert self._model.dense is not None
        self._sparse, self._optimizer = self._model.sparse, self._model.dense
        store = self._model.stores[0]
        self._dense: torch.optim.Optimizer | ServedOptimizer = self._optimizer
        if isinstance(store, ParameterServerStore):
            store.attach_dense(self._model.weights(), self._optimizer, config=dense)
            self._dense = ServedOptimizer(store, self._optimizer)
        self._batches = task.batches(examples, seed)
        self._lane: PrefetchPipeline[Batch, LookedUp] = PrefetchPipeline(
            itertools.cycle(self._batches), self._model.prepare
        )
        self._ready: list[LookedUp] = []
        self._updates: list[_Update] = []
        self._at = 0

    def warm_up(self) -> None:
        """Train on every batch once, so that all rows are there, and keep what the halves alone need."""
        for _ in self._batches:
            self.step()
        self._lane.drain()
        self._ready = [self._model.prepare(batch) for batch in self._batches]
        for _ in self._batches:
            self.compute(keep=self._updates.append)

    def work(self, what: Work, seconds: float) -> Done:
        """Do one thing for a while, at least once."""
        run: Callable[[], object] = {"step": self.step, "compute": self.compute, "wire": self.wire}[what]
        steps, began, used = 0, time.perf_counter(), time.process_time()
        while True:
            run()
            steps += 1
            elapsed = time.perf_counter() - began
            if elapsed >= seconds:
                return Done(steps, elapsed, time.process_time() - used)

    def step(self) -> None:
        found = self._lane.next()
        assert found is not None
        self._train(*found, self._dense, self._lane.push)

    def compute(self, keep: Callable[[_Update], None] = lambda _: None) -> None:
        number = self._next()
        self._train(self._batches[number], self._ready[number], _Still(self._optimizer), keep)

    def wire(self) -> None:
        number = self._next()
        self._model.prepare(self._batches[number])
        self._updates[number]()
        for weight in self._model.weights().values():
            weight.grad = torch.zeros_like(weight)
        self._dense.step()
        self._dense.zero_grad()

    def close(self) -> None:
        self._lane.drain()
        self._lane.close()
        self._model.close()
        if self._group is not None:
            self._group.close()

    def _train(self, batch: Batch, rows: LookedUp, dense: Any, push: Callable[[_Update], None]) -> None:
        outputs = self._model.outputs(batch, rows)
        apply_gradients(outputs.loss, self._sparse, dense, self._model.task.updates(), push=push)

    def _next(self) -> int:
        self._at = (self._at + 1) % BATCHES
        return self._at

    def _make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,  # noqa: ARG002  the servers know them
        threads: int | None,  # noqa: ARG002
    ) -> Store:
        assert self._group is not None
        return ParameterServerStore(self._group, 0, configs)


class _Still:
    """Stands for the optimizer of weights where nothing is to change or to be sent."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self.param_groups = inner.param_groups
        self.zero_grad = inner.zero_grad

    def step(self) -> None:
        """Do nothing."""


# Processes


class Ask(NamedTuple):
    """What a process is asked to do."""

    what: Work
    dense: DenseKind = "default"
    threads: int = 1
    """That torch has meanwhile."""
    seconds: float = 0.0


def dense_config(kind: DenseKind) -> DenseConfig:
    return DenseConfig(prefetch=kind == "behind", postpush=kind == "behind")


def serve(pipe: Connection, task: FleetTask, share: tuple[int, int]) -> None:
    """Be a server: say where, and whenever asked how many processor seconds were used."""
    torch.set_num_threads(1)
    model = Model(task, Mode.TRAIN, seed=0)
    stores = [store for store in model.stores if isinstance(store, LocalStore)]
    with ParameterServer(stores, DenseShard(model.weights(), model.dense, share), shard=share) as server:
        pipe.send(server.address)
        for _ in asked_of(pipe):
            pipe.send(time.process_time())


def train(pipe: Connection, task: FleetTask, addresses: Sequence[str], examples: int, seed: int) -> None:
    """Be a worker: say that it is ready, and then do what it is asked to."""
    torch.set_num_threads(1)
    kinds: tuple[DenseKind, ...] = ("default", "behind") if addresses else ("default",)
    workers = {kind: FleetWorker(task, addresses, examples, seed, dense_config(kind)) for kind in kinds}
    for worker in workers.values():
        worker.warm_up()
    pipe.send("ready")
    for ask in asked_of(pipe):
        torch.set_num_threads(ask.threads)
        pipe.send(workers[ask.dense].work(ask.what, ask.seconds))
    for worker in workers.values():
        worker.close()


def asked_of(pipe: Connection) -> Iterator[Any]:
    """Yield each request from the pipe, until the parent is gone, the pipe is closed, or None arrives."""
    parent = os.getppid()
    while os.getppid() == parent:
        if pipe.poll(1.0):
            try:
                asked = pipe.recv()
            except EOFError:
                return
            if asked is None:
                return
            yield asked


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, with a pipe to it first; it ends with the block.

    On Linux it is a fork of this one, so nothing may have been computed here before. It keeps freed memory,
    as every process of a run does.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_begin, args=(target, theirs, *arguments), daemon=True)  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        if child.is_alive():
            with suppress(OSError):
                ours.send(None)
            child.join(5)
        if child.is_alive():
            child.kill()
            child.join()
        ours.close()


def _begin(target: Callable[..., None], *arguments: Any) -> None:
    native.keep_freed_memory()
    target(*arguments)


class RunningFleet:
    """Servers and workers that are ready.

    Args:
        servers: None for workers that have rows and weights of their own.
    """

    def __init__(self, servers: Sequence[Connection], workers: Sequence[Connection], examples: int) -> None:
        self._servers = servers
        self._workers = workers
        self._examples = examples

    def wait(self) -> None:
        """Wait until all are ready."""
        for worker in self._workers:
            worker.recv()

    def work(self, ask: Ask) -> FleetRate:
        """Have all workers do something at the same time; return how fast it went."""
        before = self._served()
        for worker in self._workers:
            worker.send(ask)
        done: list[Done] = [worker.recv() for worker in self._workers]
        steps = sum(one.steps for one in done)
        return FleetRate(
            examples_per_s=sum(one.steps * self._examples / one.seconds for one in done),
            worker=sum(one.processor for one in done) / steps,
            server=(self._served() - before) / steps,
        )

    def _served(self) -> float:
        for server in self._servers:
            server.send("used")
        return float(sum(server.recv() for server in self._servers))


class FleetRate(NamedTuple):
    examples_per_s: float
    worker: float
    """Processor seconds of a step, in the worker."""
    server: float
    """And in all servers together."""


@contextmanager
def started(
    task: FleetTask, sizes: Sequence[int], examples: int, threads: int
) -> Iterator[dict[int, RunningFleet]]:
    """Start fleets of so many servers and as many workers each, and one process with everything as size 0."""
    importlib.import_module("torch._dynamo")  # or every process would, when it makes its optimizer
    with ExitStack() as stack:
        alone = FleetTask(task.features, task.rows, task.dim, task.hidden, threads)
        fleets: dict[int, RunningFleet] = {}
        listening = {
            size: [stack.enter_context(process(serve, task, (number, size))) for number in range(size)]
            for size in sizes
        }
        for size, servers in {0: [], **listening}.items():
            addresses = [server.recv() for server in servers]
            workers = [
                stack.enter_context(process(train, task if size else alone, addresses, examples, seed))
                for seed in range(max(size, 1))
            ]
            fleets[size] = RunningFleet(servers, workers, examples)
            fleets[size].wait()
        yield fleets
