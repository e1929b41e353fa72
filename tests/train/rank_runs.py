"""Runs of ranks as threads of one process: each with its own task, trainer and peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from store.ranks import all_at_once, connected

from monolith.store import RankGroups
from monolith.train import Hook, LocalRun, Task, TrainConfig, Trainer, TrainReport
from monolith.train.ranks.config import RanksConfig
from monolith.train.ranks.peers import RankPeers

Hooks = Callable[[int, LocalRun], Sequence[Hook]]


def train_ranks(
    tasks: Sequence[Task],
    config: TrainConfig,
    *,
    hooks: Hooks = lambda *_: (),
    ranks: RanksConfig | None = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> list[TrainReport]:
    """Train one task on each rank, together; return their reports.

    Args:
        hooks: Makes those of a rank.
        clock: Of all ranks.
        options: Of `RankGroups`.
    """

    def train(rank: int, task: Task, groups: RankGroups) -> TrainReport:
        peers = RankPeers(groups, ranks)
        try:
            return Trainer(task, config, hooks=partial(hooks, rank), peers=peers, clock=clock).train()
        finally:
            groups.close()

    with connected(len(tasks), **options) as groups:
        return all_at_once(*(partial(train, rank, task, groups[rank]) for rank, task in enumerate(tasks)))


def quiet(config: TrainConfig, **options: Any) -> TrainConfig:
    """Return settings without what costs time and shows nothing."""
    return replace(config, summary_every_steps=None, **options)
