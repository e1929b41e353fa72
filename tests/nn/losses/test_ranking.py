from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.losses import (
    RANKING_LOSSES,
    REDUCTIONS,
    DCGLambdaWeight,
    PositionListMLEWeight,
    PrecisionLambdaWeight,
    approx_ndcg_loss,
    approx_ranks,
    list_mle_loss,
    make_loss_fn,
    mean_squared_loss,
    pairwise_hinge_loss,
    pairwise_logistic_loss,
    sigmoid_cross_entropy_loss,
    softmax_loss,
)

LABELS = torch.tensor([[2.0, 0.0, 1.0], [1.0, 0.0, -1.0]])
LOGITS = torch.tensor([[1.0, 3.0, 2.0], [0.5, -0.5, 9.0]])

PAIRWISE: dict[str, Callable[[float], float]] = {
    "pairwise_hinge_loss": lambda d: max(1 - d, 0),
    "pairwise_logistic_loss": lambda d: math.log(1 + math.exp(-d)),
    "pairwise_soft_zero_one_loss": lambda d: 1 / (1 + math.exp(d)),
}


def pairs(labels: Tensor) -> list[tuple[int, int, int]]:
    """Return (list, better, worse), padding left out."""
    return [
        (row, i, j)
        for row in range(len(labels))
        for i in range(labels.shape[1])
        for j in range(labels.shape[1])
        if labels[row, i] > labels[row, j] >= 0
    ]


# All of them


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_padding_changes_nothing_and_gets_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    labels, logits = torch.tensor([[2.0, 0.0, 1.0]]), torch.randn(1, 3)
    padded_labels = torch.tensor([[2.0, -1.0, 0.0, 1.0, -1.0]])
    padded = torch.tensor([[0.0, 50.0, 0.0, 0.0, -50.0]])
    padded[:, [0, 2, 3]] = logits
    padded.requires_grad_()
    loss = RANKING_LOSSES[name](padded_labels, padded)
    loss.backward()
    torch.testing.assert_close(loss, RANKING_LOSSES[name](labels, logits))
    assert padded.grad is not None
    assert padded.grad[0, [1, 4]].tolist() == [0.0, 0.0]
    assert padded.grad[0, [0, 2, 3]].isfinite().all()
    assert padded.grad[0, [0, 2, 3]].any()


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_a_batch_of_padding_costs_nothing(name: str) -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = RANKING_LOSSES[name](torch.full((2, 3), -1.0), logits)
    assert loss.item() == 0.0
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_gradients_are_right(name: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 1.0, 0.0, 1.0]])
    assert torch.autograd.gradcheck(lambda x: RANKING_LOSSES[name](labels, x), logits)


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_large_scores_are_fine(name: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = RANKING_LOSSES[name](torch.tensor([[0.0, 2.0, 1.0]]), logits)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_bad_arguments_are_refused(name: str) -> None:
    with pytest.raises(LayerArgumentError, match="reduction must be one of"):
        RANKING_LOSSES[name](LABELS, LOGITS, reduction="none")
    with pytest.raises(LayerArgumentError, match="labels must have shape"):
        RANKING_LOSSES[name](LABELS[:1], LOGITS)
    with pytest.raises(LayerArgumentError, match="weight"):
        RANKING_LOSSES[name](LABELS, LOGITS, torch.ones(3, 7))


# Pairwise


@pytest.mark.parametrize("name", PAIRWISE)
def test_pairs_weigh_by_their_labels_and_divide_by_their_count(name: str) -> None:
    total = 0.0
    for row, i, j in pairs(LABELS):
        apart = (LABELS[row, i] - LABELS[row, j]).item()
        total += apart * PAIRWISE[name]((LOGITS[row, i] - LOGITS[row, j]).item())
    found = RANKING_LOSSES[name](LABELS, LOGITS).item()
    assert found == pytest.approx(total / len(pairs(LABELS)), rel=1e-5)


def test_a_pair_has_the_weight_of_its_better_item() -> None:
    weights = torch.tensor([[2.0, 5.0, 0.0], [3.0, 7.0, 1.0]])
    # Better items: 0 twice and 2, which weighs nothing; then 0 of the second list.
    hinge = [2 * (2.0 * 3.0 + 1.0 * 2.0), 3 * 0.0]
    assert pairwise_hinge_loss(LABELS, LOGITS, weights, reduction="sum").item() == pytest.approx(sum(hinge))
    assert pairwise_hinge_loss(LABELS, LOGITS, weights).item() == pytest.approx(sum(hinge) / 3)
    per_list = torch.tensor([[2.0], [3.0]])
    assert pairwise_hinge_loss(LABELS, LOGITS, per_list, reduction="sum").item() == pytest.approx(2 * 10.0)


def test_a_lambda_weight_replaces_label_differences_and_grows_with_the_list() -> None:
    ranks = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    weights = DCGLambdaWeight().pair_weights(LABELS, ranks) * 3
    total = 0.0
    for row, i, j in pairs(LABELS):
        d = (LOGITS[row, i] - LOGITS[row, j]).item()
        total += weights[row, i, j].item() * math.log(1 + math.exp(-d))
    found = pairwise_logistic_loss(LABELS, LOGITS, lambda_weight=DCGLambdaWeight(), reduction="sum")
    assert found.item() == pytest.approx(total, rel=1e-5)


def test_no_gradient_flows_through_a_lambda_weight() -> None:
    logits = LOGITS.clone().requires_grad_()
    pairwise_hinge_loss(LABELS, logits, lambda_weight=PrecisionLambdaWeight(1), reduction="sum").backward()
    assert logits.grad is not None
    # First list, top 1 is item 1: pairs (0, 1) and (2, 1) cross, each weighing 3.
    # Second list, item 0 is on top: the pair (0, 1) has a margin of 1, where the hinge is flat.
    assert logits.grad[0].tolist() == [-3.0, 6.0, -3.0]


# Reductions


def test_reductions_divide_by_what_their_names_say() -> None:
    losses, weights = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 1.0])
    found = {name: reduce(losses, weights).item() for name, reduce in REDUCTIONS.items()}
    assert found == pytest.approx(
        {"sum": 5.0, "mean": 5 / 3, "sum_over_batch_size": 5 / 3, "sum_by_nonzero_weights": 5 / 2}
    )


# Pointwise


def test_pointwise_losses_look_at_each_item() -> None:
    squares = [1.0, 9.0, 1.0, 0.25, 0.25]
    assert mean_squared_loss(LABELS, LOGITS).item() == pytest.approx(sum(squares) / 5)
    entropy = [
        -label * x + math.log(1 + math.exp(x)) for label, x in ((2, 1), (0, 3), (1, 2), (1, 0.5), (0, -0.5))
    ]
    assert sigmoid_cross_entropy_loss(LABELS, LOGITS).item() == pytest.approx(sum(entropy) / 5)
    weights = torch.tensor([[1.0], [0.0]])
    assert mean_squared_loss(LABELS, LOGITS, weights).item() == pytest.approx(11 / 3)


# Listwise


def softmax_entropy(share: list[float], logits: list[float]) -> float:
    total = math.log(sum(map(math.exp, logits)))
    return -sum(s * (x - total) for s, x in zip(share, logits, strict=True))


def test_softmax_loss_weighs_lists_by_their_labels() -> None:
    expected = 3 * softmax_entropy([2 / 3, 0, 1 / 3], [1, 3, 2]) + 1 * softmax_entropy([1, 0], [0.5, -0.5])
    assert softmax_loss(LABELS, LOGITS, reduction="sum").item() == pytest.approx(expected, rel=1e-5)
    assert softmax_loss(LABELS, LOGITS).item() == pytest.approx(expected / 2, rel=1e-5)


def test_softmax_loss_drops_lists_without_relevance() -> None:
    both = softmax_loss(torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, -1.0]]), LOGITS)
    torch.testing.assert_close(both, softmax_loss(LABELS[:1], LOGITS[:1]))


def test_softmax_loss_takes_weights_into_its_labels() -> None:
    weights = torch.tensor([[0.0, 1.0, 4.0]])
    expected = 4 * softmax_entropy([0, 0, 1], [1, 3, 2])
    assert softmax_loss(LABELS[:1], LOGITS[:1], weights).item() == pytest.approx(expected, rel=1e-5)
    lambda_weight = DCGLambdaWeight(normalized=False)
    relevance = lambda_weight.item_weights(LABELS[:1], torch.tensor([[3.0, 1.0, 2.0]]))
    torch.testing.assert_close(
        softmax_loss(LABELS[:1], LOGITS[:1], lambda_weight=lambda_weight), softmax_loss(relevance, LOGITS[:1])
    )


def draws(logits: list[float]) -> list[float]:
    """Minus the log chances of drawing scores in this order."""
    return [math.log(sum(map(math.exp, logits[i:]))) - logits[i] for i in range(len(logits))]


def test_list_mle_is_the_chance_to_draw_items_in_order() -> None:
    first, second = draws([1, 2, 3]), draws([0.5, -0.5])
    assert list_mle_loss(LABELS, LOGITS).item() == pytest.approx((sum(first) + sum(second)) / 2, rel=1e-5)
    weights = torch.tensor([[2.0], [0.0]])
    assert list_mle_loss(LABELS, LOGITS, weights).item() == pytest.approx(2 * sum(first), rel=1e-5)


def test_list_mle_may_mind_the_head_more() -> None:
    found = list_mle_loss(LABELS[:1], LOGITS[:1], lambda_weight=PositionListMLEWeight()).item()
    assert found == pytest.approx(
        sum(w * d for w, d in zip([3, 1, 0], draws([1, 2, 3]), strict=True)), rel=1e-5
    )


def test_approx_ranks_are_close_to_the_ranks() -> None:
    ranks = approx_ranks(torch.tensor([[1.0, 3.0, 2.0]]), alpha=100.0)
    torch.testing.assert_close(ranks, torch.tensor([[3.0, 1.0, 2.0]]))


def test_approx_ndcg_is_minus_one_for_a_perfect_order() -> None:
    labels = torch.tensor([[2.0, 0.0, 1.0]])
    assert approx_ndcg_loss(labels, torch.tensor([[9.0, 1.0, 5.0]])).item() == pytest.approx(-1, abs=1e-5)
    worst = (3 / math.log(4) + 1 / math.log(3)) / (3 / math.log(2) + 1 / math.log(3))
    assert approx_ndcg_loss(labels, torch.tensor([[1.0, 9.0, 5.0]])).item() == pytest.approx(-worst, abs=1e-5)


def test_approx_ndcg_adds_lists_up_and_skips_those_without_relevance() -> None:
    labels, logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([[5.0, 1.0]] * 3)
    assert approx_ndcg_loss(labels, logits).item() == pytest.approx(-2, abs=1e-5)
    weights = torch.tensor([3.0, 0.0, 1.0])
    assert approx_ndcg_loss(labels, logits, weights).item() == pytest.approx(-3, abs=1e-5)


# By name


def test_losses_add_up_by_their_weights() -> None:
    loss_fn = make_loss_fn(["pairwise_hinge_loss", "approx_ndcg_loss"], [2.0, 0.5])
    expected = 2 * pairwise_hinge_loss(LABELS, LOGITS) + 0.5 * approx_ndcg_loss(LABELS, LOGITS)
    torch.testing.assert_close(loss_fn(LABELS, LOGITS), expected)


def test_one_name_will_do_and_options_reach_it() -> None:
    weights = torch.tensor([[2.0], [1.0]])
    torch.testing.assert_close(
        make_loss_fn("softmax_loss", reduction="mean", lambda_weight=DCGLambdaWeight())(
            LABELS, LOGITS, weights
        ),
        softmax_loss(LABELS, LOGITS, weights, reduction="mean", lambda_weight=DCGLambdaWeight()),
    )
    torch.testing.assert_close(
        make_loss_fn("approx_ndcg_loss", alpha=2.0)(LABELS, LOGITS),
        approx_ndcg_loss(LABELS, LOGITS, alpha=2.0),
    )


def test_make_loss_fn_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="at least one loss"):
        make_loss_fn([])
    with pytest.raises(LayerArgumentError, match="Did you mean 'softmax_loss'"):
        make_loss_fn("sofmax_loss")
    with pytest.raises(LayerArgumentError, match="one per key, 1, got 2"):
        make_loss_fn(["softmax_loss"], [1.0, 2.0])
    with pytest.raises(LayerArgumentError, match="reduction"):
        make_loss_fn("softmax_loss", reduction="none")
    with pytest.raises(LayerArgumentError, match="none of mean_squared_loss takes a lambda_weight"):
        make_loss_fn("mean_squared_loss", lambda_weight=DCGLambdaWeight())
