"""AUC of a stream: exact at first, within a known bound afterwards."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.emulated_cuda import device_named, device_names

from monolith.errors import ConfigError, MetricError, RestoreError
from monolith.nn import auc
from monolith.train.metrics.auc import GroupedAuc, StreamingAuc

SMALL = 24


def draw(seed: int, n: int, *, distinct: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator, dtype=torch.float64) * 2 - 3
    labels = (torch.rand(n, generator=generator) < logits.sigmoid()).float()
    if distinct:
        logits = (logits * distinct / 10).round()
    return logits.sigmoid(), labels


# StreamingAuc


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=60),
    st.integers(1, 20),
)
def test_few_scores_are_ranked_exactly_however_they_are_cut_into_batches(
    examples: list[tuple[int, bool]], batch: int
) -> None:
    scores = torch.tensor([score / 7 for score, _ in examples])
    labels = torch.tensor([float(label) for _, label in examples])
    metric = StreamingAuc(12)
    for start in range(0, len(examples), batch):
        metric.update(scores[start : start + batch], labels[start : start + batch])
    assert metric.error_bound() == 0
    assert metric.value() == pytest.approx(auc(scores, labels), abs=1e-12, nan_ok=True)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(50, 3000), st.integers(0, 200), st.integers(12, 200))
def test_many_scores_stay_within_the_bound(seed: int, n: int, distinct: int, most: int) -> None:
    scores, labels = draw(seed, n, distinct=distinct)
    metric = StreamingAuc(most)
    for piece in torch.arange(n).split(97):
        metric.update(scores[piece], labels[piece])
        assert len(metric.state()["low"]) <= most
    exact = auc(scores, labels)
    if not math.isnan(exact):
        assert abs(metric.value() - exact) <= metric.error_bound() + 1e-9


def test_joining_once_costs_no_more_than_was_promised() -> None:
    scores, labels = draw(0, 20_000)
    metric = StreamingAuc(600)
    metric.update(scores, labels)
    assert 0 < metric.error_bound() <= 6 / 600
    assert abs(metric.value() - auc(scores, labels)) < 1e-4


def test_a_long_stream_of_like_scores_keeps_a_small_bound() -> None:
    metric = StreamingAuc()
    for seed in range(40):
        metric.update(*draw(seed, 5000))
    assert metric.error_bound() < 1e-3
    scores, labels = (
        torch.cat(parts) for parts in zip(*(draw(seed, 5000) for seed in range(40)), strict=True)
    )
    assert metric.value() == pytest.approx(auc(scores, labels), abs=1e-5)


@pytest.mark.parametrize("name", device_names())
def test_predictions_of_a_device_count_like_those_in_host_memory(name: str) -> None:
    here, there = StreamingAuc(120), StreamingAuc(120)
    scores, labels = draw(0, 2000)
    here.update(scores, labels)
    there.update(scores.to(device_named(name).torch_device), labels)
    assert there.value() == here.value()


def test_a_score_that_most_examples_share_stays_alone_when_neighbours_are_joined() -> None:
    scores, labels = draw(0, 4000)
    scores[::2] = 0.25
    metric = StreamingAuc(60)
    metric.update(scores, labels)
    state = metric.state()
    at = int((state["low"] <= 0.25).sum()) - 1
    assert float(state["low"][at]) == float(state["high"][at]) == 0.25


def test_a_weight_of_two_is_an_example_given_twice() -> None:
    scores, labels = draw(1, 50)
    weights = torch.ones(50)
    weights[:10] = 2
    metric = StreamingAuc()
    metric.update(scores, labels, weights)
    twice = auc(torch.cat([scores, scores[:10]]), torch.cat([labels, labels[:10]]))
    assert metric.value() == pytest.approx(twice)


def test_one_class_alone_ranks_nothing() -> None:
    metric = StreamingAuc()
    assert math.isnan(metric.value())
    metric.update(torch.tensor([0.1, 0.2]), torch.tensor([1.0, 1.0]))
    assert math.isnan(metric.value())


def test_reset_forgets() -> None:
    metric = StreamingAuc()
    metric.update(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]))
    metric.reset()
    metric.update(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
    assert metric.value() == 1.0


@pytest.mark.parametrize("metric", [StreamingAuc(), GroupedAuc()])
@pytest.mark.parametrize(
    ("predictions", "labels", "weights", "message"),
    [
        ([0.1, math.nan], [0.0, 1.0], None, "1 of 2 predictions are NaN.*diverge"),
        ([0.1, 0.2], [0.0, math.nan], None, "labels are NaN"),
        ([0.1, 0.2], [0.0, 0.5], None, "labels must be 0 or 1, and 1 are not: one is 0.5"),
        ([0.1, 0.2], [0.0], None, r"labels must have shape \(2,\)"),
        ([0.1, 0.2], [0.0, 1.0], [1.0, -1.0], "not negative"),
    ],
)
def test_what_cannot_be_ranked_is_refused_and_leaves_no_trace(
    metric: Any, predictions: list[float], labels: list[float], weights: Any, message: str
) -> None:
    before = metric.state()
    groups = torch.zeros(len(predictions), dtype=torch.int64)
    with pytest.raises(MetricError, match=message):
        metric.update(
            torch.tensor(predictions),
            torch.tensor(labels),
            None if weights is None else torch.tensor(weights),
            groups,
        )
    assert str(metric.state()) == str(before)


def test_an_example_of_weight_0_is_not_there_whatever_it_holds() -> None:
    metric = StreamingAuc()
    metric.update(
        torch.tensor([0.1, 0.9, math.nan]), torch.tensor([0.0, 1.0, math.nan]), torch.tensor([1.0, 1.0, 0.0])
    )
    assert metric.value() == 1.0


def test_too_few_intervals_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 12"):
        StreamingAuc(3)


# GroupedAuc


def by_group(scores: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> float:
    total = weight = 0.0
    for group in groups.unique():
        mine = groups == group
        value = auc(scores[mine], labels[mine])
        if not math.isnan(value):
            total += value * int(mine.sum())
            weight += int(mine.sum())
    return total / weight if weight else math.nan


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(-3, 3)), max_size=60),
    st.integers(1, 20),
)
def test_it_is_the_mean_over_groups_by_their_examples(
    examples: list[tuple[int, bool, int]], batch: int
) -> None:
    scores = torch.tensor([score / 7 for score, _, _ in examples])
    labels = torch.tensor([float(label) for _, label, _ in examples])
    groups = torch.tensor([group for _, _, group in examples], dtype=torch.int64)
    metric = GroupedAuc()
    for start in range(0, len(examples), batch):
        piece = slice(start, start + batch)
        metric.update(scores[piece], labels[piece], None, groups[piece])
    assert metric.value() == pytest.approx(by_group(scores, labels, groups), abs=1e-12, nan_ok=True)


def test_a_group_of_one_class_is_left_out() -> None:
    metric = GroupedAuc()
    metric.update(
        torch.tensor([0.1, 0.2, 0.9, 0.8]),
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        None,
        torch.tensor([7, 7, 8, 8]),
    )
    assert metric.value() == 1.0


def test_a_user_who_clicks_a_lot_does_not_help_the_order_within_users() -> None:
    """One user clicks everything but little is asked of the model; within users it is all wrong."""
    scores = torch.tensor([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([1, 1, 1, 2, 2, 2])
    overall, grouped = StreamingAuc(), GroupedAuc()
    overall.update(scores, labels)
    grouped.update(scores, labels, None, groups)
    assert overall.value() > 0.4
    assert grouped.value() == 0.0


def test_memory_is_bounded_and_the_groups_that_stay_are_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    metric = GroupedAuc(max_examples=1000, max_per_group=100)
    n, users = 20_000, 2_000
    groups = torch.randint(0, users, (n,), generator=generator)
    labels = torch.randint(0, 2, (n,), generator=generator).float()
    scores = torch.rand(n, generator=generator) + 0.3 * labels
    for piece in torch.arange(n).split(333):
        metric.update(scores[piece], labels[piece], None, groups[piece])
    state = metric.state()
    assert len(state["groups"]) <= 1000
    assert 0.01 < metric.drawn() < 0.2
    for group in state["groups"].unique():
        assert int((state["groups"] == group).sum()) == int((groups == group).sum())
    assert metric.value() == pytest.approx(by_group(scores, labels, groups), abs=0.1)


def test_of_one_group_only_so_many_examples_count() -> None:
    metric = GroupedAuc(max_examples=8, max_per_group=4)
    for _ in range(50):
        metric.update(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]), None, torch.tensor([5, 5]))
    metric.update(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]), None, torch.tensor([5, 5]))
    assert metric.value() == 1.0
    assert len(metric.state()["groups"]) == 4
    assert metric.drawn() == 1.0


def test_groups_must_be_given_and_be_whole_numbers() -> None:
    with pytest.raises(MetricError, match="pass groups"):
        GroupedAuc().update(torch.tensor([0.1]), torch.tensor([1.0]))
    with pytest.raises(MetricError, match="whole numbers"):
        GroupedAuc().update(torch.tensor([0.1]), torch.tensor([1.0]), None, torch.tensor([0.5]))


def test_a_group_must_fit_into_half_the_room() -> None:
    with pytest.raises(ConfigError, match="half of max_examples"):
        GroupedAuc(max_examples=100, max_per_group=51)


# States


@pytest.mark.parametrize(
    ("make", "through_json"),
    [
        (lambda: StreamingAuc(SMALL), False),
        (lambda: StreamingAuc(SMALL), True),
        (lambda: GroupedAuc(200, 20), False),
        (lambda: GroupedAuc(200, 20), True),
    ],
)
def test_a_restored_metric_resumes_as_if_nothing_had_happened(make: Any, through_json: bool) -> None:
    scores, labels = draw(3, 900)
    groups = torch.arange(900) % 70
    whole, first, second = make(), make(), make()
    whole.update(scores[:500], labels[:500], None, groups[:500])
    whole.update(scores[500:], labels[500:], None, groups[500:])
    first.update(scores[:500], labels[:500], None, groups[:500])
    state = first.state()
    if through_json:
        state = json.loads(json.dumps(state, default=lambda tensor: tensor.tolist()))
    second.restore(state)
    second.update(scores[500:], labels[500:], None, groups[500:])
    assert second.value() == pytest.approx(whole.value(), abs=1e-12)


def test_a_state_is_a_copy() -> None:
    metric = StreamingAuc()
    metric.update(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
    state = metric.state()
    state["positive"].zero_()
    assert metric.value() == 1.0


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(RestoreError, match="has no high"):
        StreamingAuc().restore({"low": [], "positive": [], "negative": []})
    with pytest.raises(RestoreError, match="shapes"):
        StreamingAuc().restore({"low": np.zeros(2), "high": [0.0], "positive": [], "negative": []})
