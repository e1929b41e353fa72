"""Following a run within its own process: what a subscriber holds, beside what was trained."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from monolith.observe import Metrics
from monolith.runtime.publish_shard import PublishPlan
from monolith.sync import Delta, MemoryChannel, PublishState, ShardLog, Subscriber, TableTarget, TakeSnapshot
from monolith.sync.channel import Unfinished
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.table import NativeTable, iterate
from monolith.train import Mode, Task
from monolith.train.model import Model

OFTEN = PublishConfig(
    to="memory",
    interval=timedelta(milliseconds=20),
    dense_interval=timedelta(milliseconds=50),
    guard=GuardConfig(auc_fall=None, calibration_rise=None),
)

Values = dict[str, dict[int, tuple[float, ...]]]
"""Table to id to what its row holds, state left out."""


def values_of(tables: Mapping[str, Any]) -> Values:
    return {
        name: {
            int(key): tuple(row)
            for chunk in iterate(table)
            for key, row in zip(chunk.ids.tolist(), chunk.values.tolist(), strict=True)
        }
        for name, table in tables.items()
    }


def same_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Following:
    """A subscriber of all shares of a run, over tables like those of its model.

    It reads when told to, and when a publisher closes, which is after the last that it published.
    """

    def __init__(self, task: Task, config: PublishConfig = OFTEN) -> None:
        with closing(Model(task, Mode.TRAIN, seed=0)) as model:
            configs = {name: table.config for name, table in model.tables.items()}
        self.tables = {name: NativeTable(one) for name, one in configs.items()}
        self.target = TableTarget(self.tables)
        self.channel = MemoryChannel()
        self.metrics = Metrics()
        self.config = config
        self.deltas: list[Delta] = []
        self._lock = threading.Lock()
        self.subscriber = Subscriber(self.channel.reader, self.target)

    @property
    def plan(self) -> PublishPlan:
        """How the run is to publish."""
        return PublishPlan(
            config=self.config, run="run", open_writer=lambda _: _Watched(self), metrics=self.metrics
        )

    def catch_up(self) -> None:
        """Read all that is published by now."""
        with self._lock:
            self.subscriber.catch_up()

    @property
    def values(self) -> Values:
        return values_of(self.tables)

    @property
    def dense(self) -> dict[str, Tensor]:
        return dict(self.target.dense or {})


class _Watched:
    """A writer whose log stays, and which is read once more when it closes."""

    address = None

    def __init__(self, following: Following) -> None:
        self._following = following
        self._inner = following.channel.writer()

    def open(self, log: ShardLog, snapshot: TakeSnapshot) -> None:
        self._inner.open(log, snapshot)

    def append(self, delta: Delta) -> None:
        self._inner.append(delta)
        self._following.deltas.append(delta)

    def set_state(self, state: PublishState) -> None:
        self._inner.set_state(state)

    def unfinished(self) -> Unfinished | None:
        return self._inner.unfinished()

    def close(self) -> None:
        self._following.catch_up()


def without_state(rows: Any) -> Any:
    return replace(rows, state=rows.state[:, :0])
