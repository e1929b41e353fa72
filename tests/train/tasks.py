"""A small task for tests: a DeepFM on a stretch of the drifting stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from monolith.data import BatchSpec, DriftConfig, DriftingStream, Pipeline, Stream
from monolith.data.records import LABEL
from monolith.data.synthetic.drift import SPEC, TIME
from monolith.feature import Batch
from monolith.model import DeepFM, Feature
from monolith.nn.optimizers import EagerAdam
from monolith.table import AdmissionConfig
from monolith.train import Mode, Outputs, Task


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
        return self.records(mode).to_batches(SPEC)

    def records(self, mode: Mode) -> Pipeline:
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
        return Pipeline(stream)

    def model(self) -> nn.Module:
        features = [
            Feature(name=name, occurrence_threshold=self.threshold, admission=AdmissionConfig(capacity=1000))
            for name in ("user", "item", "context")
        ]
        return DeepFM(features, dim=self.dim, hidden=(8,), dropout=self.dropout, threads=1)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return EagerAdam(model.parameters(), lr=0.01)


class OneNumber(nn.Module):
    """A weight for the one number of an example, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.linear(batch.floats[LABEL]).squeeze(1)
        return logits


@dataclass(frozen=True)
class Numbers(Clicks):
    """Reads a number and no ids, so its model has no embeddings. The number is the label."""

    def dataset(self, mode: Mode) -> Stream[Batch]:
        spec = BatchSpec(ids=(), floats={LABEL: 1}, labels={"click": (LABEL, 0)}, event_time=TIME)
        return self.records(mode).to_batches(spec)

    def model(self) -> nn.Module:
        return OneNumber()


class Nothing(nn.Module):
    """Has no weights."""

    def forward(self, batch: Batch) -> Tensor:
        return batch.floats[LABEL].squeeze(1)


@dataclass(frozen=True)
class NothingToLearn(Numbers):
    """Has neither embeddings nor weights, and a constant loss, as the original's NonFeatureTask."""

    def model(self) -> nn.Module:
        return Nothing()

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:  # noqa: ARG002
        return None

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return Outputs(torch.tensor(1.0), {"click": model(batch)})


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
