"""What the demo trains: clicks on a stream that does not stay as it was, and publishes while it learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from monolith.data import DriftingStream, Pipeline, Stream
from monolith.data.synthetic.drift import FEATURES, SPEC
from monolith.feature import Batch
from monolith.model import DeepFM
from monolith.runtime.config import MetricsConfig, RunConfig
from monolith.sync import PublishConfig
from monolith.sync.publish_config import GuardConfig
from monolith.table import Adagrad
from monolith.train import KeepConfig, Mode, SaveConfig, Task, TrainConfig
from monolith_bench.examples.demo.live_stream import CueSheet, LiveClicks, LiveScript

HEAD = "click"
LEARNING_RATE = 0.15
"""The learning rate of rows. They must learn fast: a user or item is gone a minute after it appears."""
GUARD_WINDOWS = 4
"""Windows of the guard that it only watches, after each start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoJob:
    """One demo, settled: what all of its processes must agree on."""

    model_dir: str
    script: LiveScript
    publish_to: str
    """Where it publishes: a channel as `monolith train` takes it."""
    dim: int = 8
    window: int = 6_000
    """Examples that an AUC is measured on: about; it is whole batches."""
    guard_window: int = 2_000
    """The number of latest examples that decide whether publishing continues or pauses."""
    save_steps: int = 100

    @property
    def cues(self) -> CueSheet:
        """The cues of the demo, in a file next to the model directory."""
        return CueSheet(Path(self.model_dir).parent / "cues.json")

    @property
    def guard_warm_up(self) -> int:
        return GUARD_WINDOWS * self.guard_window

    def train_config(self) -> TrainConfig:
        batch = self.script.batch
        return TrainConfig(
            model_dir=self.model_dir,
            seed=self.script.seed,
            metric_window=max(1, round(self.window / batch)) * batch,
            # By steps, not by the clock: a process that repeats a step saves at the same steps as before.
            save=SaveConfig(steps=self.save_steps, asynchronous=True),
            # An export of the first ones may take long on a machine that is busy.
            keep=KeepConfig(max_to_keep=500, every=None),
            idle_after=timedelta(hours=1),
            summary_every_steps=None,
        )

    def run_config(self) -> RunConfig:
        """Return the run as `monolith train` would have it, with metrics at any port."""
        guard = GuardConfig(
            window=self.guard_window, warm_up=self.guard_warm_up, auc_fall=0.1, resume="when_recovered"
        )
        return RunConfig(
            train=self.train_config(),
            publish=PublishConfig(
                to=self.publish_to,
                interval=timedelta(milliseconds=100),
                dense_interval=timedelta(milliseconds=500),
                guard=guard,
            ),
            metrics=MetricsConfig(port=0),
        )


class LiveTask(Task):
    """Learns what happens, as it happens. What it evaluates on is a few records of the beginning."""

    def __init__(self, job: DemoJob) -> None:
        self._job = job

    @property
    def name(self) -> str:
        return "clicks"

    def dataset(self, mode: Mode) -> Stream[Batch]:
        script = self._job.script
        if mode is Mode.TRAIN:
            return Pipeline(LiveClicks(script, self._job.cues.read)).to_batches(SPEC)
        few = replace(script.drift(), examples=script.batch)
        return Pipeline(DriftingStream(few)).to_batches(SPEC)

    def model(self) -> nn.Module:
        rows = Adagrad(learning_rate=LEARNING_RATE)
        return DeepFM(
            FEATURES,
            dim=self._job.dim,
            hidden=(64, 32),
            optimizer=rows,
            bias_optimizer=rows,
            seed=self._job.script.seed,
            threads=1,
        )

    def metrics(self, mode: Mode) -> tuple[str, ...]:  # noqa: ARG002
        return ("auc",)

    def describe(self) -> dict[str, Any]:
        return {"batch": self._job.script.batch, "dim": self._job.dim, "rate": self._job.script.rate}
