"""Training in one process, which coordinates with no other and has all parameters in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint import Part
from monolith.data import WorkQueueSource
from monolith.data.source import Position
from monolith.errors import ConfigError
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import (
    Continue,
    CoordinatorStatus,
    Decision,
    Item,
    LastCheckpoint,
    Membership,
    Outcome,
    Placement,
    Quiesced,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.prefetch import Silence
from monolith.runtime.publish_shard import PublishPlan, ShardPublisher
from monolith.runtime.publishers import LocalPublisher, Publishers
from monolith.store import LocalStore, MakeStore, Store
from monolith.sync.guard import PublishGuard
from monolith.table import TableConfig
from monolith.train.accelerator import Accelerator
from monolith.train.config import TrainConfig
from monolith.train.hook import DATA_ENDED
from monolith.train.hooks.barrier import Barrier, LocalBarrier
from monolith.train.model import Model


class LocalCoordinator:
    """A run of one process: every verb of the seam has a trivial answer."""

    membership = Membership()

    def __init__(self) -> None:
        self._barrier = LocalBarrier(1)
        self._placement = LocalPlacement()

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    def status(self) -> CoordinatorStatus:
        return CoordinatorStatus()

    def join(
        self,
        restore: Callable[[bool], Start],
        *,
        work_queue: WorkQueueSource | None = None,  # noqa: ARG002
        interrupted: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> Start | None:
        return restore(False)

    def at_step(self, progress: WorkerProgress) -> Decision:
        return Stop(reason=DATA_ENDED) if progress.data_ended else Continue()

    def quiesce(
        self,
        progress: WorkerProgress,
        drain: Callable[[], None],  # noqa: ARG002
    ) -> AbstractContextManager[Quiesced | None]:
        return nullcontext(Quiesced(step=progress.step))

    def committed(self, position: Position) -> None:
        """Do nothing: no other process has a source."""

    def finish(self, outcome: Outcome, progress: WorkerProgress, idle: Callable[[], None]) -> Quiesced | None:  # noqa: ARG002
        return Quiesced(step=progress.step)

    def leave(self, outcome: Outcome, state: WorkerState | None = None) -> bool:  # noqa: ARG002
        return False


class LocalPlacement:
    """All parameters are in the memory of this process."""

    averaging = None
    others = None

    @property
    def make_store(self) -> MakeStore:
        return LocalStore.from_configs

    def over(self, local: MakeStore) -> MakeStore:
        return local

    def check(self, config: TrainConfig) -> None:
        """Do nothing: one process can do all of it."""

    def attach(self, model: Model) -> WeightOptimizer | None:
        return scheduled(model)

    def parts(self, model: Model, *, incremental: bool, background: bool) -> list[Part]:
        return model.parts(incremental=incremental, background=background)

    def dense_part(self, model: Model) -> Part:
        return model.dense_part()

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:
        share = ShardPublisher(model.tables, (0, 1), plan, guards=[guard])
        model.restoring = share.restoring
        return LocalPublisher(share)

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Do nothing: no shard can be lost without this process."""

    def survives(self, error: Exception) -> bool:  # noqa: ARG002
        return False

    def align(
        self,
        items: Iterator[Item],
        *,
        empty: Callable[[], Item],  # noqa: ARG002
        every: float,  # noqa: ARG002
        pressed: Callable[[], bool],  # noqa: ARG002
        silences: bool,  # noqa: ARG002
        shares_work: bool,  # noqa: ARG002
    ) -> Iterator[Item | Silence]:
        return items

    def count_step(self, step: int) -> int:
        return step + 1

    def refresh(self) -> None:
        """Do nothing: these are the only weights."""

    def readable(self) -> AbstractContextManager[None]:
        return nullcontext()


def scheduled(model: Model) -> WeightOptimizer | None:
    """Return the dense optimizer of a model that is updated in this process, with its schedule if any."""
    if model.dense is None or model.schedule is None:
        return model.dense
    return ScheduledOptimizer(model.dense, model.schedule)


class ScheduledOptimizer:
    """An optimizer whose learning rates follow a schedule, one move after each of its steps."""

    def __init__(self, inner: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        self._inner = inner
        self._schedule = schedule

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def step(self) -> None:
        self._inner.step()
        self._schedule.step()

    def zero_grad(self) -> None:
        self._inner.zero_grad()


def store_maker(config: TrainConfig, accelerator: Accelerator | None, placement: Placement) -> MakeStore:
    """Return the function that makes the stores of a run in this process.

    Raises:
        ConfigError: The accelerator cannot hold rows, or this process holds none.
    """
    if not config.asks_for_device_rows:
        return placement.make_store
    device = None if accelerator is None else accelerator.rows_device()
    if device is None:
        raise ConfigError(
            "train.embedding_device: rows can only be on a CUDA device; set train.accelerator to cuda, or "
            "train.embedding_device to host"
        )
    local: MakeStore = partial(LocalStore.from_configs, device=device)
    if config.device_memory_bytes is not None:
        local = _OneStore(
            partial(LocalStore.from_configs, device=device, device_bytes=config.device_memory_bytes)
        )
    return stores_over(placement, local)


def stores_over(placement: Placement, local: MakeStore) -> MakeStore:
    """Return a maker of stores on top of stores in this process.

    Raises:
        ConfigError: This process holds no rows.
    """
    found = placement.over(local)
    if found is None:
        raise ConfigError(
            "train.embedding_device: rows are on parameter servers in this run, not on the device of a "
            "worker; set train.embedding_device to host, or train in one process or on ranks without "
            "parameter servers"
        )
    return found


class _OneStore:
    """Makes a single store, whose tables divide all memory for rows among them."""

    def __init__(self, make: MakeStore) -> None:
        self._make = make
        self._made = False

    def __call__(self, configs: Mapping[str, TableConfig], /, **how: Any) -> Store:
        if self._made:
            raise ConfigError(
                "train.device_memory_bytes: the model has several embedding collections, and memory is "
                "divided among the tables of one; put their features into one collection, or remove the "
                "setting"
            )
        self._made = True
        return self._make(configs, **how)
