"""Metrics over the latest examples: what somebody who looks on sees."""

from __future__ import annotations

import gc
import math
from datetime import timedelta

import pytest
import torch
from train.tasks import Clicks

from monolith.feature import Batch, FeatureIds
from monolith.train import Mode
from monolith.train.metrics import heads
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.metrics.metric_set import make_metric
from monolith.train.metrics.sliding import SlidingMetrics


def batch_of(seed: int, size: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(size, generator=draws), (torch.rand(size, generator=draws) < 0.5).float()


def auc_of(*seeds: int) -> float:
    metric = make_metric("auc")
    for seed in seeds:
        metric.update(*batch_of(seed))
    return metric.value()


def test_there_is_a_value_from_the_first_batch_on_and_old_examples_leave() -> None:
    sliding = SlidingMetrics(("auc",), 30)
    assert math.isnan(sliding.values()["auc"])
    for seed in range(7):
        sliding.update(*batch_of(seed))
        latest = range(max(seed - 2, 0), seed + 1)
        assert sliding.values()["auc"] == pytest.approx(auc_of(*latest))


def test_a_window_of_time_has_what_happened_within_it_before_the_newest() -> None:
    sliding = SlidingMetrics(("auc",), timedelta(seconds=60))
    for seed, time in ((0, 100), (1, 130), (2, 165)):
        sliding.update(*batch_of(seed), event_time=time)
    assert sliding.values()["auc"] == pytest.approx(auc_of(1, 2))


def test_weights_and_groups_reach_the_metrics() -> None:
    sliding = SlidingMetrics(("calibration", "gauc"), 30)
    predictions = torch.tensor([0.5, 0.5, 0.9, 0.1])
    sliding.update(
        predictions,
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        torch.tensor([2.0, 0.0, 1.0, 1.0]),
        torch.tensor([1, 1, 2, 2]),
    )
    assert sliding.values()["calibration"] == pytest.approx((2 * 0.5 + 0.9 + 0.1) / 3)
    assert sliding.values()["gauc"] == 1.0


def test_what_a_run_shows_is_over_the_latest_examples_though_no_window_has_ended() -> None:
    metrics = HeadMetrics(Clicks(), Mode.TRAIN, window=25)
    seen = []
    for seed in range(4):
        predictions, labels = batch_of(seed)
        ids = FeatureIds.pack({"user": torch.arange(10)[:, None]})
        metrics.update({"click": predictions}, Batch(ids, {}, {"click": labels}))
        seen.append(metrics.values()["click/auc"])
    assert seen == pytest.approx([auc_of(0), auc_of(0, 1), auc_of(0, 1, 2), auc_of(1, 2, 3)])


def live_tensors() -> int:
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def test_a_window_of_tiny_batches_is_a_few_tensors() -> None:
    window, before = 6_400, live_tensors()
    sliding = SlidingMetrics(("auc", "calibration"), window)
    for number in range(2 * window):
        sliding.update(torch.tensor([0.5]), torch.tensor([float(number >= window)]))
    assert live_tensors() - before < 600  # each takes a kilobyte, and a batch has two
    assert window <= len(sliding) < window * 1.05
    assert sliding.values()["calibration"] == pytest.approx(0.5, rel=0.05)


def test_a_window_of_time_has_what_happened_within_it_also_of_tiny_batches() -> None:
    sliding = SlidingMetrics(("auc", "calibration"), timedelta(seconds=640))
    for time in range(2_000):
        sliding.update(torch.tensor([0.5]), torch.tensor([1.0]), event_time=time)
    assert 640 <= len(sliding) < 670
    sliding.update(torch.tensor([0.5]), torch.tensor([0.0]), event_time=10_000)
    assert len(sliding) == 1


def test_batches_that_have_weights_and_those_without_stay_in_order() -> None:
    sliding = SlidingMetrics(("calibration",), 6_400)
    for number in range(300):
        weights = torch.tensor([2.0]) if 100 <= number < 200 else None
        sliding.update(torch.tensor([0.5]), torch.tensor([1.0]), weights)
    assert len(sliding) == 300


def test_batches_that_are_not_measured_yet_are_bounded_also_if_they_are_tiny() -> None:
    metrics = HeadMetrics(Clicks(), Mode.TRAIN)
    ids = FeatureIds.pack({"user": torch.arange(1)[:, None]})
    before = live_tensors()
    for _ in range(2_000):
        metrics.update({"click": torch.tensor([0.5])}, Batch(ids, {}, {"click": torch.tensor([1.0])}))
    assert live_tensors() - before < 2 * heads.BATCHES_AT_ONCE + 100
