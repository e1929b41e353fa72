"""Throughput: steps and their time, every half minute."""

from __future__ import annotations

import torch

from monolith.feature import Batch, FeatureIds
from monolith.observe import Metrics
from monolith.train import StepResult
from monolith.train.hooks.reports.metric_sinks import MetricClient
from monolith.train.hooks.reports.throughput import ThroughputHook

TAGS = '{cluster_type="yarn",model_name="feed"}'


class Stub:
    def __init__(self, step: int) -> None:
        self.step = step


def test_the_start_then_steps_time_and_loss() -> None:
    metrics, now = Metrics("monolith.training"), [100.0]
    hook = ThroughputHook(
        MetricClient(metrics),
        model_name="feed",
        cluster_type="yarn",
        started_at=88.0,
        clock=lambda: now[0],
        timer=lambda: now[0],
    )

    def lines() -> list[str]:
        return metrics.render().decode().splitlines()

    def step(number: int, at: float, loss: float) -> None:
        now[0] = at
        batch = Batch(FeatureIds.pack({"user": torch.arange(2)}))
        hook.after_step(Stub(number), StepResult(number, batch, torch.tensor(loss)))  # type: ignore[arg-type]

    hook.after_create(Stub(1000))  # type: ignore[arg-type]
    assert f"monolith_training_run_start_elapsed_time_all_sum{TAGS} 12.0" in lines()
    step(1001, 129.9, 9.0)
    assert f"monolith_training_run_steps_all_total{TAGS} 1.0" not in lines()
    step(1002, 130.0, 0.5)
    assert f"monolith_training_run_steps_all_total{TAGS} 2.0" in lines()
    assert f"monolith_training_run_steps_elapsed_time_all_sum{TAGS} 30.0" in lines()
    assert f"monolith_training_step_loss{TAGS} 0.5" in lines()
    step(1010, 165.0, 0.25)
    assert f"monolith_training_run_steps_all_total{TAGS} 10.0" in lines()
    hook.after_create(Stub(1005))  # type: ignore[arg-type]
    assert f"monolith_training_run_start_elapsed_time_all_count{TAGS} 1.0" in lines()
