"""Runs of ranks as threads of one process: each with its own task, trainer and peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from runtime.fleets import SOON, serving
from store.ranks import all_at_once, connected

from monolith.runtime import LocalRun, Trainer, TrainReport
from monolith.runtime.ranks import RankCoordinator
from monolith.store import RankGroups, ServerGroup
from monolith.train import Hook, Task, TrainConfig
from monolith.train.accelerator import Accelerator
from monolith.train.config import RanksConfig
from monolith.train.publishing.share import PublishPlan

Hooks = Callable[[int, LocalRun], Sequence[Hook]]


def train_ranks(
    tasks: Sequence[Task],
    config: TrainConfig,
    *,
    hooks: Hooks = lambda *_: (),
    ranks: RanksConfig | None = None,
    clock: Callable[[], float] = time.time,
    num_ps: int = 0,
    servers: Sequence[str] = (),
    publish: PublishPlan | None = None,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> list[TrainReport]:
    """Train one task on each rank, together; return their reports.

    Args:
        hooks: Makes those of a rank.
        clock: Of all ranks.
        num_ps: Servers to start for the rows, which have the first task; ranks hold them otherwise.
        servers: Addresses of servers that are there already.
        publish: How all of them publish.
        accelerator: Stands for the one of the settings.
        options: Of `RankGroups`.
    """

    def train(rank: int, task: Task, groups: RankGroups, addresses: Sequence[str]) -> TrainReport:
        with ExitStack() as stack:
            stack.callback(groups.close)
            group = ServerGroup(addresses, patience=SOON) if addresses else None
            if group is not None:
                stack.callback(group.close)
            coordinator = RankCoordinator(groups, ranks, servers=group)
            return Trainer(
                task,
                config,
                hooks=partial(hooks, rank),
                coordinator=coordinator,
                publish=publish,
                clock=clock,
                accelerator=accelerator,
            ).train()

    size = len(tasks)
    with ExitStack() as stack:
        groups = stack.enter_context(connected(size, **options))
        if num_ps:
            servers = stack.enter_context(
                serving(
                    tasks[0],
                    num_ps=num_ps,
                    num_workers=size,
                    config=config,
                    holds_weights=False,
                    publish=publish,
                )
            )
        return all_at_once(
            *(partial(train, rank, task, groups[rank], servers) for rank, task in enumerate(tasks))
        )


def quiet(config: TrainConfig, **options: Any) -> TrainConfig:
    """Return settings without what costs time and shows nothing."""
    return replace(config, summary_every_steps=None, **options)
