"""Ranking metrics: by hand, against a plain definition, in a stream, and by name."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.errors import ConfigError, MetricError
from monolith.tensors import RaggedTensor
from monolith.train.metrics import MetricSet, RankingMetric, Windowed, make_metric, ranking_scores


def plain(scores: list[float], gains: list[float], k: int) -> dict[str, float]:
    """The definition, as the mean over every order of candidates that tie."""
    sums = dict.fromkeys((f"recall@{k}", f"ndcg@{k}", f"hit_rate@{k}", f"mrr@{k}", "mrr"), 0.0)
    ideal = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(sorted(gains, reverse=True)[:k]))
    orders = 0
    for order in itertools.permutations(range(len(scores))):
        ranked = [scores[one] for one in order]
        if ranked != sorted(scores, reverse=True):
            continue
        orders += 1
        wanted = [gains[one] for one in order]
        sums[f"recall@{k}"] += float(np.count_nonzero(wanted[:k])) / np.count_nonzero(gains)
        dcg = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(wanted[:k]))
        sums[f"ndcg@{k}"] += dcg / ideal
        sums[f"hit_rate@{k}"] += float(any(wanted[:k]))
        first = 1 + next(rank for rank, gain in enumerate(wanted) if gain)
        sums[f"mrr@{k}"] += 1 / first if first <= k else 0
        sums["mrr"] += 1 / first
    return {name: total / orders for name, total in sums.items()}


queries = st.lists(
    st.tuples(st.integers(0, 3).map(float), st.sampled_from([0.0, 0.0, 1.0, 2.5])), min_size=0, max_size=6
)


@settings(max_examples=tries(25), deadline=None)
@given(st.lists(queries, min_size=1, max_size=4), st.integers(1, 8))
def test_they_are_as_defined_with_ties_and_a_k_beyond_the_candidates(
    given_: list[list[tuple[float, float]]], k: int
) -> None:
    lengths = torch.tensor([len(one) for one in given_])
    flat = torch.tensor([pair for one in given_ for pair in one], dtype=torch.float32).reshape(-1, 2)
    scores = RaggedTensor.from_row_lengths(flat[:, 0].contiguous(), lengths)
    gains = RaggedTensor.from_row_lengths(flat[:, 1].contiguous(), lengths)
    found = ranking_scores(scores, gains, ks=[k])
    for number, one in enumerate(given_):
        mine = {name: float(values[number]) for name, values in found.items()}
        if any(gain for _, gain in one):
            wanted = plain([score for score, _ in one], [gain for _, gain in one], k)
            assert mine == pytest.approx(wanted, abs=1e-9)
        else:
            assert all(map(math.isnan, mine.values()))


def test_a_table_of_scores_is_ranked_row_by_row() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.1, 0.2, 0.3]])
    found = ranking_scores(scores, torch.tensor([[0, 1, 0], [1, 0, 0]]), ks=[1, 2])
    assert found["recall@1"].tolist() == [0, 0]
    assert found["hit_rate@2"].tolist() == [1, 0]
    assert found["mrr"].tolist() == pytest.approx([1 / 2, 1 / 3])
    assert found["mrr@2"].tolist() == [1 / 2, 0]
    kinds = ("recall", "ndcg", "hit_rate", "mrr")
    assert list(found) == [*(f"{kind}@{k}" for kind in kinds for k in (1, 2)), "mrr"]


@pytest.mark.parametrize(
    ("scores", "gains", "ks", "words"),
    [
        ([[1.0, math.nan]], [[1.0, 0.0]], [1], "NaN"),
        ([[1.0]], [[-1.0]], [1], "not below 0"),
        ([[1.0]], [[1.0, 0.0]], [1], "same candidates"),
        ([[1.0]], [[1.0]], [0], "at least 1"),
        ([1.0], [1.0], [1], "queries, candidates"),
    ],
)
def test_what_makes_no_sense_is_refused(scores: Any, gains: Any, ks: list[int], words: str) -> None:
    with pytest.raises(MetricError, match=words):
        ranking_scores(torch.tensor(scores), torch.tensor(gains), ks=ks)


def test_a_query_may_come_in_several_batches() -> None:
    metric = RankingMetric("recall", 1)
    metric.update(torch.tensor([0.2, 0.9]), torch.tensor([1, 1]), groups=torch.tensor([7, 8]))
    metric.update(torch.tensor([0.5, 0.1]), torch.tensor([0, 0]), groups=torch.tensor([7, 9]))
    assert metric.value() == 0.5  # of 7 and 8; of 9 nothing was wanted


def test_queries_weigh_what_their_examples_do() -> None:
    metric = RankingMetric("hit_rate", 1)
    metric.update(
        torch.tensor([0.9, 0.1, 0.9, 0.1]),
        torch.tensor([1, 0, 0, 1]),
        torch.tensor([3.0, 3.0, 1.0, 1.0]),
        torch.tensor([1, 1, 2, 2]),
    )
    assert metric.value() == 0.75


def test_its_state_resumes_and_it_begins_without_a_value() -> None:
    metric, other = RankingMetric("ndcg", 5), RankingMetric("ndcg", 5)
    assert math.isnan(metric.value())
    metric.update(torch.rand(20), (torch.arange(20) % 3 == 0).long(), groups=torch.arange(20) % 4)
    other.restore(metric.state())
    assert other.value() == metric.value()
    metric.reset()
    assert math.isnan(metric.value())


def test_they_are_requested_by_name_next_to_others() -> None:
    metrics = MetricSet.named({"click": ("auc", "recall@2", "mrr")}, window=4)
    groups = torch.tensor([1, 1, 1, 1])
    labels = {"click": torch.tensor([0.0, 1.0, 0.0, 0.0])}
    metrics.update({"click": torch.tensor([0.4, 0.3, 0.2, 0.1])}, labels, groups=groups)
    assert metrics.values() == pytest.approx({"click/auc": 2 / 3, "click/recall@2": 1, "click/mrr": 0.5})
    assert isinstance(metrics.heads["click"]["recall@2"], Windowed)
    assert isinstance(make_metric("mrr"), RankingMetric)
    assert make_metric("mrr@5").name == "mrr@5"


@pytest.mark.parametrize("name", ["recall", "recall@0", "mrr@0", "recall@x", "precision@5"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="recall@10"):
        make_metric(name)


def test_it_needs_groups_and_labels_that_are_not_negative() -> None:
    with pytest.raises(MetricError, match="needs the group"):
        RankingMetric("mrr").update(torch.rand(2), torch.ones(2))
    with pytest.raises(MetricError, match="negative"):
        RankingMetric("mrr").update(torch.rand(2), -torch.ones(2), groups=torch.ones(2).long())
