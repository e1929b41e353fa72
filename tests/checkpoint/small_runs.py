"""A run small enough to see the answer: two tables, a filter, a layer with its optimizer, a position."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contracts.tables import ids
from torch import nn

from monolith.checkpoint import Checkpointer, DensePart, FeaturesPart, Saver, StatePart, TablesPart
from monolith.feature import FeatureSpec
from monolith.table import (
    Adagrad,
    DynamicWdAdagrad,
    NativeTable,
    Segment,
    SlidingFilter,
    SlotThresholds,
    TableConfig,
    iterate,
)

ITEM = TableConfig(
    name="item",
    segments=(
        Segment(dim=1, optimizer=DynamicWdAdagrad(), learning_rate=0.5),
        Segment(dim=2, optimizer=Adagrad(), learning_rate=0.5),
    ),
)
USER = TableConfig(name="user", segments=(Segment(dim=2, optimizer=Adagrad(), learning_rate=0.5),))


@dataclass
class SmallRun:
    """Trains when told to, and says all that a restore must bring back."""

    folder: Path
    full_every: int = 1
    max_to_keep: int = 10
    seed: int = 0
    kind: Any = NativeTable
    spec: FeatureSpec | None = None
    position: dict[str, int] = field(default_factory=lambda: {"next": 0})

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.filter = SlidingFilter(1000, 7, SlotThresholds(1))
        self.tables = {"item": self.kind(ITEM, admission=self.filter), "user": self.kind(USER)}
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        parts: list[Any] = [
            TablesPart(self.tables, {"item": self.filter}, incremental=self.full_every > 1),
            DensePart(self.model, [self.optimizer]),
            StatePart("position", lambda: self.position, self.position.update),
        ]
        if self.spec is not None:
            parts.append(FeaturesPart(self.spec))
        saver = Saver(str(self.folder), max_to_keep=self.max_to_keep, clock=lambda: 1.0)
        saver.recover()
        self.checkpointer = Checkpointer(saver, parts, full_every=self.full_every, clock=lambda: 1000.0)

    def train(self, *keys: int, time: int = 1) -> None:
        for table in self.tables.values():
            gradients = torch.ones(len(keys), table.dim)
            table.apply_gradients(ids(*keys), gradients, event_time=time, step=time, dedup=True)
        self.model(torch.randn(4, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position["next"] += len(keys)

    def save(self, step: int) -> str:
        return self.checkpointer.save(step)

    def restored(self, prefix: str, kind: Any = NativeTable) -> dict[str, Any]:
        """Return what a run that knows nothing, with tables of this kind, finds in a checkpoint."""
        other = SmallRun(self.folder.with_name("elsewhere"), seed=99, kind=kind)
        other.checkpointer.restore(prefix)
        return other.state()

    def state(self) -> dict[str, Any]:
        return {
            "rows": {name: rows_of(table) for name, table in self.tables.items()},
            "seen": self.filter.get(torch.arange(50)).tolist(),
            "weights": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "adam": [s["exp_avg"].tolist() for s in self.optimizer.state.values()],
            "position": dict(self.position),
            "random": torch.random.get_rng_state().tolist(),
        }


def rows_of(table: Any) -> dict[int, tuple[Any, ...]]:
    """Return id -> event time, values and the bits of the state."""
    return {
        key: (time, values, state)
        for chunk in iterate(table)
        for key, time, values, state in zip(
            chunk.ids.tolist(),
            chunk.event_times.tolist(),
            chunk.values.tolist(),
            chunk.state.view(torch.int32).tolist(),
            strict=True,
        )
    }


def chain(folder: Path, **how: Any) -> tuple[SmallRun, list[str], list[dict[str, Any]]]:
    """Return a run with a full checkpoint and three increments: rows change, come, go; `user` is cleared."""
    run = SmallRun(folder, full_every=10, **how)
    prefixes, states = [], []

    def save(step: int) -> None:
        prefixes.append(run.save(step))
        states.append(run.state())

    run.train(*range(-20, 30))
    run.train(*range(-20, 30), time=2)
    save(1)
    run.train(*range(5), 40, time=3)
    run.tables["item"].remove(ids(7, -8))
    run.tables["user"].remove(ids(7, 8, -9))
    save(2)
    run.tables["user"].clear()
    run.train(8, 41, time=4)
    run.train(8, 41, time=5)
    save(3)
    run.train(7, 9, time=6)
    run.train(7, 9, time=7)
    run.tables["item"].remove(ids(0))
    save(4)
    return run, prefixes, states


def flip(path: Path, at: int | None = None) -> None:
    """Change one bit of a file, in its middle by default."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)
