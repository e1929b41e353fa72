"""Metrics while training: predicted first, learned from afterwards."""

from __future__ import annotations

import torch

from monolith.feature import Batch, FeatureIds
from monolith.train import StepResult, drive
from monolith.train.hooks.reports.streaming_metrics import MetricsHook
from monolith.train.metrics.metric_set import MetricSet, WindowRow


class Training:
    model_dir = ""

    def __init__(self, event_times: list[int]) -> None:
        self.step = 0
        self.stop_reason: str | None = None
        self._times = iter(event_times)

    def request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def take_step(self) -> StepResult | None:
        at = next(self._times, None)
        if at is None:
            return None
        self.step += 1
        ids = FeatureIds.pack({"user": torch.tensor([7, 7])}, event_time=at)
        batch = Batch(ids, labels={"click": torch.tensor([0.0, 1.0])})
        return StepResult(self.step, batch, torch.tensor(0.0), {"click": torch.tensor([0.2, 0.6])})


def run(hook: MetricsHook, event_times: list[int]) -> None:
    training = Training(event_times)
    drive(training, [hook], step=training.take_step)


def test_each_batch_is_measured_as_it_was_predicted() -> None:
    hook = MetricsHook(
        MetricSet.named({"click": ("calibration", "gauc")}), groups=lambda b: b.ids["user"].flat_values
    )
    run(hook, [1, 2])
    assert hook.metrics.values()["click/gauc"] == 1.0
    assert abs(hook.metrics.values()["click/calibration"] - 0.8) < 1e-6


def test_windows_are_reported_as_they_end_and_the_open_one_at_the_end() -> None:
    rows: list[tuple[str, WindowRow]] = []
    metrics = MetricSet.named({"click": ("auc",)}, window=4)
    run(MetricsHook(metrics, report=lambda name, row: rows.append((name, row))), [10, 20, 30])
    assert rows == [("click/auc", WindowRow(10, 20, 4, 1.0)), ("click/auc", WindowRow(30, 30, 2, 1.0))]


def test_weights_come_from_the_batch() -> None:
    metrics = MetricSet.named({"click": ("calibration",)})
    run(MetricsHook(metrics, weights=lambda _: {"click": torch.tensor([0.0, 1.0])}), [1])
    assert abs(metrics.values()["click/calibration"] - 0.6) < 1e-6
