"""A small task for tests: a DeepFM on a stretch of the drifting stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monolith.data import DriftConfig, DriftingStream, Pipeline, Stream
from monolith.data.synthetic.drift import SPEC
from monolith.feature import Batch
from monolith.model import DeepFM, Feature
from monolith.nn.optimizers import EagerAdam
from monolith.table import AdmissionConfig
from monolith.train import Mode, Task


@dataclass(frozen=True)
class Clicks(Task):
    """Learns clicks; evaluated on what comes after what it was trained on."""

    batches: int = 20
    batch_size: int = 64
    dim: int = 4
    threshold: int = 0
    dropout: float = 0.0
    seed: int = 0

    def dataset(self, mode: Mode) -> Stream[Batch]:
        examples = self.batches * self.batch_size
        stream = DriftingStream(
            DriftConfig(
                examples=examples if mode is Mode.TRAIN else examples + 1000,
                batch_size=self.batch_size,
                new_users=20,
                new_items=5,
                seed=self.seed,
            )
        )
        if mode is not Mode.TRAIN:
            stream.restore({"source": "drift", "seed": self.seed, "next": examples})
        return Pipeline(stream).to_batches(SPEC)

    def model(self) -> nn.Module:
        features = [
            Feature(name=name, occurrence_threshold=self.threshold, admission=AdmissionConfig(capacity=1000))
            for name in ("user", "item", "context")
        ]
        return DeepFM(features, dim=self.dim, hidden=(8,), dropout=self.dropout, threads=1)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return EagerAdam(model.parameters(), lr=0.01)


def rows_of(module: nn.Module) -> dict[str, Any]:
    """Return every row of a model's tables, with its state and time."""
    from monolith.table import iterate

    store: Any = module.embeddings.store
    return {
        name: {
            key: tuple(row)
            for chunk in iterate(store.table(name))
            for key, *row in zip(
                *(c.tolist() for c in (chunk.ids, chunk.event_times, chunk.values, chunk.state)), strict=True
            )
        }
        for name in store.tables
    }
