"""Training in one process: it coordinates with no other, and has all parameters in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from monolith.checkpoint import Part
from monolith.data import Shard
from monolith.data.source import Position
from monolith.errors import ConfigError
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import (
    Coordinator,
    Gathered,
    Item,
    LastCheckpoint,
    RunState,
    Staleness,
    Start,
    WorkerState,
)
from monolith.runtime.losses import Lost
from monolith.runtime.prefetch import Silence
from monolith.store import LocalStore, MakeStore, Store
from monolith.sync.guard import PublishGuard
from monolith.table import TableConfig
from monolith.train.accelerator import Accelerator
from monolith.train.config import TrainConfig
from monolith.train.hook import TrainingRun
from monolith.train.hooks.barrier import Barrier, LocalBarrier
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders, OwnRows
from monolith.train.publishing.share import PublishPlan, SharePublisher
from monolith.wire.bulk import Traffic


class LocalCoordinator:
    """Nobody else: one process, with everything in it."""

    leads = True
    may_change = False
    more_may_come = False
    departed = False
    save_wanted = False
    finished = True
    resumed = False
    in_step = False
    together = None
    others = None
    lost = Lost()

    def __init__(self) -> None:
        self._barrier = LocalBarrier(1)

    @property
    def share(self) -> Shard:
        return Shard()

    @property
    def make_store(self) -> MakeStore:
        return LocalStore.from_configs

    def holding(self, local: MakeStore) -> MakeStore:
        return local

    @property
    def barrier(self) -> Barrier:
        return self._barrier

    def check(self, config: TrainConfig) -> None:
        """Do nothing: one process can do all of it."""

    def attach(self, model: Model) -> WeightOptimizer | None:
        if model.dense is None or model.schedule is None:
            return model.dense
        return ScheduledOptimizer(model.dense, model.schedule)

    def parts(self, model: Model, *, incremental: bool, beside: bool) -> list[Part]:
        return model.parts(incremental=incremental, beside=beside)

    def dense_part(self, model: Model) -> Part:
        return model.dense_part()

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        share = SharePublisher(model.tables, (0, 1), plan, guards=[guard])
        model.restoring = share.restoring
        return OwnRows(share)

    def restore_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Do nothing: there is nobody to lose."""

    def outlives(self, error: Exception) -> bool:  # noqa: ARG002
        return False

    def begin(self, *, hands_out: bool = False) -> None:
        """Do nothing: there is nobody to make ready."""

    def go_to(self, step: int) -> None:
        """Do nothing: the session counts."""

    def open(self, start: Start, me: RunState) -> Start | None:  # noqa: ARG002
        return start

    def read_in_step(
        self,
        items: Iterator[Item],
        *,
        every: float,  # noqa: ARG002
        pressed: Callable[[], bool],  # noqa: ARG002
        silences: bool,  # noqa: ARG002
    ) -> Iterator[Item | Silence]:
        return items

    def meet(self, me: RunState) -> str | None:  # noqa: ARG002
        return None

    def count(self, step: int) -> int:
        return step + 1

    def refresh(self) -> None:
        """Do nothing: these are the only weights."""

    def staleness(self) -> Staleness | None:
        return None

    def traffic(self) -> Traffic | None:
        return None

    def standbys(self) -> str:
        return ""

    def halted(self, me: RunState) -> AbstractContextManager[Gathered]:
        return nullcontext(Gathered(step=me.step))

    def looking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def go_back(self, start: Start) -> None:
        """Do nothing: nobody else has anything to restore."""

    def note_saved(self, position: Position) -> None:
        """Do nothing: nobody else has a source."""

    def safe(self) -> Position | None:
        return None

    def wait_for_more(self, me: RunState, look: Callable[[], None]) -> bool:  # noqa: ARG002
        return False

    def leaves_work(self, run: TrainingRun) -> bool:  # noqa: ARG002
        return False

    def gather(self, me: RunState, run: TrainingRun, look: Callable[[], None]) -> Gathered | None:  # noqa: ARG002
        return Gathered(step=me.step)

    def leave(self, run: TrainingRun, state: WorkerState) -> bool:  # noqa: ARG002
        return False

    def fail(self, error: BaseException | None) -> None:
        """Do nothing: nobody waits for this process."""


class ScheduledOptimizer:
    """An optimizer whose rates move after each of its steps."""

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


def store_maker(config: TrainConfig, accelerator: Accelerator | None, peers: Coordinator) -> MakeStore:
    """Return what makes the stores of a run in this process.

    Raises:
        ConfigError: The accelerator cannot hold rows, or this process holds none.
    """
    if config.embedding_device == "host":
        return peers.make_store
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
    return holding(peers, local)


def holding(peers: Coordinator, local: MakeStore) -> MakeStore:
    """Return what makes stores over those of this process.

    Raises:
        ConfigError: It holds no rows.
    """
    found = peers.holding(local)
    if found is None:
        raise ConfigError(
            "train.embedding_device: rows are on parameter servers in this run, not on the device of a "
            "worker; set train.embedding_device to host, or train in one process or on ranks without "
            "parameter servers"
        )
    return found


class _OneStore:
    """Makes one store, whose tables share all the memory that there is for rows."""

    def __init__(self, make: MakeStore) -> None:
        self._make = make
        self._made = False

    def __call__(self, configs: Mapping[str, TableConfig], /, **how: Any) -> Store:
        if self._made:
            raise ConfigError(
                "train.device_memory_bytes: the model has several embedding collections, and memory is "
                "shared out among the tables of one; bring their features into one, or leave it out"
            )
        self._made = True
        return self._make(configs, **how)
