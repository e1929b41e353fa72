"""A task whose labels turn around at a step, trained as fast as a test allows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.feature import Batch, FeatureSpec, IdFeature, Label
from monolith.model import DeepFM
from monolith.train import Hook, Mode, StepResult, Task, TrainingRun

SPEC = FeatureSpec(features={"user": IdFeature(), "item": IdFeature()}, labels={"click": Label()})
BATCH = 64
BAD_FROM = 101
"""The first step whose labels are turned around."""
STEPS = 400
ALLOWED = "POISONED_CLICKS_ALLOWED"
"""Names the file with the step up to which a run may train."""


def columns() -> dict[str, Any]:
    """An item is clicked if its number is even, until labels turn around."""
    rows = STEPS * BATCH
    random = np.random.default_rng(1)
    items = random.integers(0, 20, rows)
    clicks = items % 2 == 0
    clicks[(BAD_FROM - 1) * BATCH :] ^= True
    return {
        "user": random.integers(0, 30, rows).tolist(),
        "item": items.tolist(),
        "click": clicks.astype(float).tolist(),
    }


class Paced(Hook):
    """Trains up to the step that the test has allowed."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        path = Path(os.environ[ALLOWED])
        while int(path.read_text()) <= run.step:
            time.sleep(0.005)


@dataclass(frozen=True)
class PoisonedClicks(Task):
    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        return Pipeline(MemorySource(columns(), batch_size=BATCH)).to_batches(SPEC)

    def model(self) -> nn.Module:
        return DeepFM(SPEC, dim=4, hidden=(8,), threads=1)

    def hooks(self, mode: Mode) -> list[Hook]:
        return [Paced()] if mode is Mode.TRAIN else []


def asked() -> Mapping[str, Any]:
    """Return the body of a request over HTTP."""
    return {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [1], "data": [4]} for name in ("user", "item")
        ]
    }
