"""AUC: how often a positive outranks a negative."""

from __future__ import annotations

import math

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn import auc


def by_pairs(scores: torch.Tensor, labels: torch.Tensor) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    return float(wins.mean())


def test_a_perfect_order_is_1_and_the_reverse_is_0() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert auc(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels) == 1.0
    assert auc(torch.tensor([0.4, 0.3, 0.2, 0.1]), labels) == 0.0


def test_a_tie_counts_half() -> None:
    assert auc(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])) == 0.5
    assert auc(torch.tensor([0.1, 0.5, 0.5]), torch.tensor([0, 0, 1])) == 0.75


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_share_of_pairs_in_order_ties_included(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 12, (200,), generator=generator) / 7
    labels = torch.randint(0, 2, (200,), generator=generator).float()
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), abs=1e-12)


def test_only_the_order_matters_so_logits_serve_as_well_as_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=generator, dtype=torch.float64)
    labels = torch.rand(1000, generator=generator) < 0.3
    assert auc(logits, labels) == auc(logits.sigmoid(), labels)


def test_scores_with_a_gradient_are_taken_as_numbers() -> None:
    assert auc(torch.tensor([0.1, 0.2], requires_grad=True), torch.tensor([False, True])) == 1.0


def test_many_scores_are_counted_without_rounding() -> None:
    n = 1 << 20
    scores = torch.arange(n)
    assert auc(scores, scores % 2) == (n / 2 + 1) / n


@pytest.mark.parametrize("labels", [[0.0, 0.0], [1.0, 1.0], []])
def test_labels_that_are_all_alike_rank_nothing(labels: list[float]) -> None:
    assert math.isnan(auc(torch.zeros(len(labels)), torch.tensor(labels)))


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(LayerArgumentError, match="NaN"):
        auc(torch.tensor([0.1, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(LayerArgumentError, match="0 or 1"):
        auc(torch.tensor([0.1, 0.2]), torch.tensor([0.0, 0.5]))
    with pytest.raises(LayerArgumentError, match="labels must have shape"):
        auc(torch.tensor([0.1, 0.2]), torch.tensor([0]))
