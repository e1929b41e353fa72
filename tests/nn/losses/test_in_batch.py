from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.losses import batch_softmax_loss, inbatch_auc_log_likelihood, inbatch_auc_loss, retrieval

# Batch softmax


def reference(query: Tensor, item: Tensor, interval: Tensor, r: Tensor, temperature: float) -> float:
    loss = 0.0
    for i in range(len(query)):
        scores = [
            float(query[i] @ item[j]) / temperature + math.log(max(float(interval[j]), 1))
            for j in range(len(item))
        ]
        loss -= float(r[i]) * math.log(math.exp(scores[i]) / sum(map(math.exp, scores)))
    return loss


@pytest.mark.parametrize("normalize", [True, False])
def test_each_query_picks_its_item_from_the_batch(normalize: bool) -> None:
    torch.manual_seed(0)
    query, item = torch.randn(4, 3), torch.randn(4, 3)
    interval, r = torch.tensor([0.5, 1.0, 7.0, 20.0]), torch.tensor([1.0, 0.0, 2.0, 0.5])
    found = batch_softmax_loss(query, item, interval, r, normalize=normalize, temperature=0.5)
    if normalize:
        query, item = (rows / rows.norm(dim=1, keepdim=True) for rows in (query, item))
    assert found.item() == pytest.approx(reference(query, item, interval, r, 0.5) / 4, rel=1e-5)


def test_scores_of_any_size_are_fine() -> None:
    query = torch.tensor([[1e3], [-1e3]], requires_grad=True)
    item = torch.tensor([[1e3], [1e3]], requires_grad=True)
    loss = batch_softmax_loss(query, item, torch.ones(2), torch.ones(2), normalize=False)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_a_row_of_zeros_has_no_direction_but_a_loss() -> None:
    query = torch.zeros(2, 3, requires_grad=True)
    loss = batch_softmax_loss(query, torch.randn(2, 3), torch.ones(2), torch.ones(2))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_batch_softmax_has_right_gradients() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    item = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    interval, r = torch.tensor([1.0, 5.0, 2.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    assert torch.autograd.gradcheck(lambda q, k: batch_softmax_loss(q, k, interval, r), (query, item))


def test_batch_softmax_checks_its_arguments() -> None:
    rows, ones = torch.ones(2, 3), torch.ones(2)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(LayerArgumentError, match="temperature"):
            batch_softmax_loss(rows, rows, ones, ones, temperature=temperature)
    with pytest.raises(LayerArgumentError, match=r"item must have shape \(2, 3\)"):
        batch_softmax_loss(rows, torch.ones(3, 3), ones, ones)
    with pytest.raises(LayerArgumentError, match=r"r must have shape \(2\)"):
        batch_softmax_loss(rows, rows, ones, torch.ones(2, 1))


# In-batch AUC


def pairs(label: Tensor, logit: Tensor) -> list[tuple[int, int, float]]:
    return [
        (i, j, float(logit[i] - logit[j]))
        for i in range(len(label))
        for j in range(len(label))
        if label[i] > 0 and -10000 < label[j] <= 0
    ]


@pytest.mark.parametrize("neg_weight", [1.0, 0.25])
@pytest.mark.parametrize("at_once", [1 << 22, 3], ids=["whole", "in pieces"])
def test_every_positive_meets_every_negative(
    neg_weight: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_PAIRS_AT_ONCE", at_once)
    torch.manual_seed(0)
    label = torch.tensor([1.0, 0.0, -10000.0, 0.5, -1.0, 2.0, -20000.0, 0.0])
    logit = torch.randn(8, requires_grad=True)
    value = inbatch_auc_log_likelihood(label, logit, neg_weight)
    (value * 3).backward()
    expected, gradient = 0.0, torch.zeros(8)
    for i, j, margin in pairs(label, logit.detach()):
        expected += math.log(1 / (1 + math.exp(-margin)))
        missing = 1 - 1 / (1 + math.exp(-margin))
        gradient[i] += 3 * missing
        gradient[j] -= 3 * neg_weight * missing
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert logit.grad is not None
    torch.testing.assert_close(logit.grad, gradient)


def test_the_loss_is_minus_the_likelihood_and_falls_as_positives_rise() -> None:
    label = torch.tensor([1.0, 0.0])
    logit = torch.tensor([0.0, 0.0], requires_grad=True)
    loss = inbatch_auc_loss(label, logit)
    assert loss.item() == pytest.approx(math.log(2))
    assert loss.item() == -inbatch_auc_log_likelihood(label, logit).item()
    loss.backward()
    assert logit.grad is not None
    assert logit.grad.tolist() == [-0.5, 0.5]
    pairs = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), torch.randn(5)
    total = -inbatch_auc_log_likelihood(*pairs)
    assert inbatch_auc_loss(*pairs).item() == pytest.approx(total.item() / 6)
    assert inbatch_auc_loss(*pairs, reduction="sum").item() == total.item()


def test_far_apart_logits_are_exact() -> None:
    logit = torch.tensor([-500.0, 500.0], requires_grad=True)
    value = inbatch_auc_log_likelihood(torch.tensor([1.0, 0.0]), logit)
    value.backward()
    assert value.item() == -1000.0
    assert logit.grad is not None
    assert logit.grad.tolist() == [1.0, -1.0]
    assert inbatch_auc_log_likelihood(torch.tensor([0.0, 1.0]), logit).item() == 0.0


def test_auc_has_right_gradients() -> None:
    label = torch.tensor([1.0, 0.0, 1.0, -1.0, -10000.0])
    logit = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: inbatch_auc_log_likelihood(label, x), logit)


def test_a_batch_without_pairs_says_nothing() -> None:
    logit = torch.randn(3, requires_grad=True)
    value = inbatch_auc_loss(torch.ones(3), logit)
    value.backward()
    assert value.item() == 0.0
    assert logit.grad is not None
    assert logit.grad.tolist() == [0.0, 0.0, 0.0]


def test_auc_checks_its_arguments() -> None:
    for neg_weight in (0.0, 1.5, -1.0):
        with pytest.raises(LayerArgumentError, match="neg_weight"):
            inbatch_auc_loss(torch.ones(2), torch.ones(2), neg_weight)
    with pytest.raises(LayerArgumentError, match="logit must have shape"):
        inbatch_auc_loss(torch.ones(2), torch.ones(3))
