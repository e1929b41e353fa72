"""A small task with strings, numbers, lists and a sequence, trained for a few steps and exported."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.feature import Batch, FeatureSpec, FloatFeature, IdFeature, Label, SequenceFeature
from monolith.model import DeepInterest
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.serve.exporter import ExportedServable, Exporter, ExportHow
from monolith.train import Mode, SaveConfig, Task, TrainConfig

SPEC = FeatureSpec(
    features={
        "user": IdFeature(column="user_id", kind="string"),
        "item": IdFeature(),
        "tags": IdFeature(kind="string", separator="|", combiner="mean"),
        "history": SequenceFeature(length=3, shares="item"),
        "price": FloatFeature(scale="log"),
        "where": FloatFeature(width=2),
    },
    labels={"click": Label()},
    event_time="time",
    optional=("tags",),
)
ROWS = 200
EXPORTERS: dict[str, Exporter] = {}
"""By what they export, and how."""


def columns(rows: int = ROWS, seed: int = 0) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    return {
        "user_id": [f"u{n}" for n in random.integers(0, 40, rows)],
        "item": random.integers(-5, 30, rows).tolist(),
        "tags": ["|".join(f"t{n}" for n in random.integers(0, 6, n)) for n in random.integers(0, 4, rows)],
        "history": [random.integers(-5, 30, n).tolist() for n in random.integers(0, 5, rows)],
        "price": random.random(rows).round(2).tolist(),
        "where": random.random((rows, 2)).round(3).tolist(),
        "time": (1_700_000_000 + np.arange(rows) * 60).tolist(),
        "click": random.integers(0, 2, rows).astype(float).tolist(),
    }


@dataclass(frozen=True)
class Served(Task):
    """Learns clicks from a table in memory."""

    batch_size: int = 16

    def dataset(self, mode: Mode) -> Stream[Batch]:
        size = self.batch_size if mode is Mode.TRAIN else 64
        return Pipeline(MemorySource(columns(), batch_size=size)).to_batches(SPEC)

    def model(self) -> nn.Module:
        return DeepInterest(SPEC, dim=4, attention=(4,), hidden=(8,), threads=1)


@dataclass(frozen=True)
class Predicted(Served):
    """The same, predicted without labels, so many rows at a time."""

    rows: int = 64

    def dataset(self, mode: Mode) -> Stream[Batch]:
        if mode is not Mode.PREDICT:
            return super().dataset(mode)
        raw = {name: values for name, values in columns(self.rows, seed=9).items() if name != "click"}
        return Pipeline(MemorySource(raw, batch_size=self.rows)).to_batches(SPEC.without_labels())


def trained(folder: Path, task: Task | None = None, **how: Any) -> TrainConfig:
    """Train a task in a folder; return how."""
    settings: dict[str, Any] = {"steps": 6, "summary_every_steps": None, "save": SaveConfig(steps=3), **how}
    config = TrainConfig(model_dir=str(folder), **settings)
    Trainer(Served() if task is None else task, config).train()
    return config


def exported(
    config: TrainConfig,
    root: Path,
    *,
    step: int = 6,
    task: Task | None = None,
    how: ExportHow | None = None,
    **export: Any,
) -> ExportedServable:
    """Export a checkpoint of a trained task."""
    how = how_to_export(ExportConfig(**export), config) if how is None else how
    task = Served() if task is None else task
    known = EXPORTERS.get(key := f"{config.model_dir} {task} {how}")
    if known is None:  # tracing takes longer than all the rest
        known = EXPORTERS[key] = ExitStack().enter_context(task_exporter(task, config, how))
    return known.export(f"{config.model_dir}/model.ckpt-{step}", str(root))


def predictions(config: TrainConfig, task: Task) -> list[Mapping[str, Tensor]]:
    """Return what the trainer says of all batches to predict."""
    return [found for _, found in Trainer(task, config).predict()]
