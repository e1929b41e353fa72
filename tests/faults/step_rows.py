"""A task whose rows say which step wrote them last, to compare with what an answer claims of them.

Every batch has every id once, and every row grows by 1 with every step: by gradient descent, at a rate of
1, on a loss that falls by 1 as a row grows by 1. The model answers with the row, so the answer is the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.feature import ADDN, Batch, FeatureSpec, IdFeature, Label, Layout
from monolith.model import EmbeddingCollection, Feature, UpdateConfig
from monolith.model.features import FeatureSet
from monolith.table import Sgd, Zeros
from monolith.train import Hook, Mode, Outputs, StepResult, Task, TrainingRun

SPEC = FeatureSpec(features={"item": IdFeature()}, labels={"step": Label()})
IDS = 512
STEPS = 100_000
STEP_S = 0.004
"""A step takes no less, so that requests see many of them."""


class StepModel(nn.Module):
    """Answers with the row of the only feature."""

    spec = SPEC

    def __init__(self) -> None:
        super().__init__()
        features = FeatureSet([Feature(name="item")], optimizer=Sgd(learning_rate=1.0), initializer=Zeros())
        self.rows = EmbeddingCollection(
            [Layout("steps", ADDN, features.slices(["item"], "steps", 1))], threads=1
        )

    def forward(self, batch: Batch) -> Tensor:
        steps: Tensor = self.rows(batch)["steps"].reshape(-1)
        return steps


class Paced(Hook):
    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        time.sleep(STEP_S)


@dataclass(frozen=True)
class StepRows(Task):
    def dataset(self, mode: Mode) -> Stream[Batch]:
        rows: dict[str, Any] = {"item": list(range(1, IDS + 1)), "step": [0.0] * IDS}
        source = MemorySource(rows, batch_size=IDS, epochs=STEPS if mode is Mode.TRAIN else 1)
        return Pipeline(source).to_batches(SPEC)

    def model(self) -> nn.Module:
        return StepModel()

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        steps = model(batch)
        return Outputs(-steps.sum(), {"step": steps})

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1)

    def metrics(self, mode: Mode) -> Mapping[str, Sequence[str]] | Sequence[str]:  # noqa: ARG002
        return ()

    def hooks(self, mode: Mode) -> list[Hook]:
        return [Paced()] if mode is Mode.TRAIN else []
