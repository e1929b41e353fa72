"""What the demo trains: clicks on a stream that does not stay as it was."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn

from monolith.data import DriftConfig, DriftingStream, Pipeline, Stream
from monolith.data.synthetic.drift import FEATURES, SPEC, fast_drift
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.table import Adagrad
from monolith.train import KeepConfig, Mode, SaveConfig, Task, TrainConfig

HEAD = "click"
LEARNING_RATE = 0.15
"""Of rows. They have little time: whoever appears is gone a day later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoJob:
    """One demo, settled: what both of its processes must agree on."""

    model_dir: str
    dim: int
    batch: int
    seed: int
    window: int
    """Examples that an AUC is measured on: whole batches."""
    save_steps: int
    small: bool = False
    """A world of few users that turns faster: one can see it in seconds, on any machine."""

    def drift(self) -> DriftConfig:
        return fast_drift(small=self.small, batch_size=self.batch, seed=self.seed)

    def train_config(self) -> TrainConfig:
        return TrainConfig(
            model_dir=self.model_dir,
            seed=self.seed,
            metric_window=self.window,
            # By steps, not by the clock: whoever takes a step again does the same before and after it.
            save=SaveConfig(steps=self.save_steps, asynchronous=True),
            keep=KeepConfig(max_to_keep=3, every=None),
            idle_after=timedelta(hours=1),
            summary_every_steps=None,
        )


class DriftingClicks(Task):
    """Learns the stream from its beginning on, or predicts it from some example on.

    Args:
        predict_from: The number of the first example to predict.
    """

    def __init__(self, job: DemoJob, *, predict_from: int = 0) -> None:
        self._job = job
        self._predict_from = predict_from

    def dataset(self, mode: Mode) -> Stream[Batch]:
        stream = DriftingStream(self._job.drift())
        if mode is not Mode.TRAIN:
            stream.restore({**stream.position(), "next": self._predict_from})
        return Pipeline(stream).to_batches(SPEC)

    def model(self) -> nn.Module:
        rows = Adagrad(learning_rate=LEARNING_RATE)
        return DeepFM(
            FEATURES,
            dim=self._job.dim,
            hidden=(64, 32),
            optimizer=rows,
            bias_optimizer=rows,
            seed=self._job.seed,
            threads=1,
        )

    def metrics(self, mode: Mode) -> tuple[str, ...]:  # noqa: ARG002
        return ("auc",)

    def describe(self) -> dict[str, Any]:
        return {"batch": self._job.batch, "dim": self._job.dim, "small": self._job.small}
