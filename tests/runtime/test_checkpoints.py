"""Keeping a run: what is saved is what goes on, and the source hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from train.tasks import Clicks, rows_of

from monolith.data import Stream
from monolith.feature import Batch
from monolith.model import DeepFM, Feature
from monolith.runtime import Trainer
from monolith.train import ExpiryConfig, Hook, KeepConfig, Mode, SaveConfig, TrainConfig


class Heard:
    """A stream that remembers what it was told."""

    def __init__(self, batches: Stream[Batch]) -> None:
        self._batches = batches
        self.committed: list[Any] = []

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def commit(self, position: Any) -> None:
        self.committed.append(position)


@dataclass(frozen=True)
class Watched(Clicks):
    """Its rows expire so soon that some are gone when they are looked up again."""

    streams: list[Heard] = field(default_factory=list)

    def dataset(self, mode: Mode) -> Stream[Batch]:
        self.streams.append(Heard(super().dataset(mode)))
        return self.streams[-1]

    def model(self) -> nn.Module:
        soon = timedelta(seconds=4)
        features = [Feature(name=name, expire_after=soon) for name in ("user", "item", "context")]
        return DeepFM(features, dim=self.dim, hidden=(8,), threads=1)


class Rows(Hook):
    """Keeps the rows of the end."""

    rows: Any = None

    def end(self, run: Any) -> None:
        self.rows = rows_of(run.session.model.module)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_rows_that_a_save_drops_are_not_used_by_what_was_looked_up_ahead(
    tmp_path: Path, prefetch: int
) -> None:
    config = TrainConfig(
        model_dir=str(tmp_path / "whole"),
        deterministic=True,
        prefetch=prefetch,
        save=SaveConfig(steps=4),
        keep=KeepConfig(evict=True),
        expiry=ExpiryConfig(max_fraction=1),
    )
    whole = Rows()
    Trainer(Watched(), config, hooks=[whole]).train()
    for steps in (4, 8, 4, 4):
        last = Rows()
        Trainer(
            Watched(), replace(config, model_dir=str(tmp_path / "parts"), steps=steps), hooks=[last]
        ).train()
    assert last.rows == whole.rows


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_source_is_told_of_the_last_save_when_the_run_ends(tmp_path: Path, prefetch: int) -> None:
    task = Watched()
    config = TrainConfig(model_dir=str(tmp_path), prefetch=prefetch, save=SaveConfig(steps=8))
    Trainer(task, config).train()
    (stream,) = task.streams
    assert [position["next"] for position in stream.committed] == [8 * 64, 16 * 64, 20 * 64]
