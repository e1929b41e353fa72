"""Sampled softmax: what was wanted, picked out of a sample."""

from __future__ import annotations

import math

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn import accidental_hits, sampled_softmax_loss


def test_without_correction_it_is_the_cross_entropy_of_the_own_column() -> None:
    scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    own = torch.tensor([0, 1])
    expected = torch.nn.functional.cross_entropy(scores, own)
    torch.testing.assert_close(sampled_softmax_loss(scores, own), expected)


def test_a_frequent_candidate_is_penalized_less() -> None:
    scores = torch.zeros(1, 2)
    log_q = torch.tensor([0.0, math.log(3)])
    loss = sampled_softmax_loss(scores, torch.tensor([0]), log_q=log_q)
    assert loss.item() == pytest.approx(-math.log(1 / (1 + 1 / 3)))


def test_a_hit_is_left_out_and_ones_own_is_not() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    loss = sampled_softmax_loss(scores, torch.tensor([0]), hits=torch.tensor([[True, True, False]]))
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(math.e / (math.e + 1)))
    assert scores.grad is not None
    assert scores.grad[0, 1] == 0


def test_a_batch_without_queries_costs_nothing_and_can_be_trained_on() -> None:
    scores = torch.zeros(0, 4, requires_grad=True)
    loss = sampled_softmax_loss(scores, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0


def test_queries_have_weights() -> None:
    scores, own = torch.zeros(2, 2), torch.tensor([0, 1])
    loss = sampled_softmax_loss(scores, own, weights=torch.tensor([2.0, 0.0]))
    assert loss.item() == pytest.approx(math.log(2))


def test_with_the_correction_a_sample_teaches_what_everything_would() -> None:
    """The mean gradient over samples drawn by popularity is near that of the full softmax; without, not."""
    torch.manual_seed(0)
    popularity = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0, 0.1, -0.4])
    full = logits.softmax(0)
    drawn = torch.multinomial(popularity.expand(40, -1), 400, replacement=True)

    def error(log_q: torch.Tensor | None) -> float:
        found = torch.zeros(6)
        for sample in drawn:
            candidates = torch.cat([torch.tensor([2]), sample[sample != 2]])
            x = logits[candidates].requires_grad_()
            q = None if log_q is None else log_q[candidates]
            sampled_softmax_loss(x[None], torch.tensor([0]), log_q=q).backward()
            assert x.grad is not None
            found.index_add_(0, candidates, x.grad / len(drawn))
        others = torch.tensor([0, 1, 3, 4, 5])  # compared as shares, since the own one stands apart
        return float((found[others] / found[others].sum() - full[others] / full[others].sum()).abs().max())

    assert error(popularity.log()) < 0.03
    assert error(None) > 0.2


def test_the_same_item_elsewhere_is_a_hit() -> None:
    hits = accidental_hits(torch.tensor([7, 8]), torch.tensor([7, 8, 7, 9]))
    assert hits.tolist() == [[True, False, True, False], [False, True, False, False]]


def test_what_the_same_user_wanted_elsewhere_is_a_hit_too() -> None:
    wanted, users = torch.tensor([7, 8, 9]), torch.tensor([1, 1, 2])
    hits = accidental_hits(wanted, torch.tensor([7, 8, 9, 8]), users)
    assert hits.tolist() == [
        [True, True, False, True],
        [True, True, False, True],
        [False, False, True, False],
    ]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayerArgumentError, match="own"):
        sampled_softmax_loss(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(LayerArgumentError, match="hits must be bool"):
        sampled_softmax_loss(torch.zeros(1, 1), torch.tensor([0]), hits=torch.zeros(1, 1))
