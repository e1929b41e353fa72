"""DeepFM: biases, all pairs, and an MLP."""

from __future__ import annotations

import itertools

import torch

from monolith.model import DeepFM
from monolith.model.deepfm import factorization_machine
from monolith.nn import Dense


def test_pairs_by_the_shortcut_are_the_dot_products_of_all_pairs() -> None:
    vectors = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    expected = sum((vectors[:, i] * vectors[:, j]).sum(1) for i, j in itertools.combinations(range(4), 2))
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(factorization_machine(vectors.flatten(1), 4), expected)
    assert torch.autograd.gradcheck(lambda v: factorization_machine(v.flatten(1), 4), vectors)


def test_one_feature_has_no_pairs() -> None:
    assert factorization_machine(torch.randn(3, 8), 1).abs().max() < 1e-6


def test_the_logit_is_biases_plus_pairs_plus_mlp() -> None:
    model = DeepFM(["user", "item"], dim=2, hidden=(3,), floats={"age": 1})
    table = model.embeddings.store.table
    table("user").assign(torch.tensor([1]), torch.tensor([[0.5, 1.0, 2.0]]))  # bias, then vector
    table("item").assign(torch.tensor([7]), torch.tensor([[-0.25, 3.0, 4.0]]))
    age = torch.tensor([[0.75]])
    first, last = model.dense.mlp
    assert isinstance(first, Dense)
    assert isinstance(last, Dense)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.75]])
    deep = (x @ first.kernel() + first.bias).relu() @ last.kernel() + last.bias
    logit = model({"user": torch.tensor([1]), "item": torch.tensor([7])}, {"age": age})
    torch.testing.assert_close(logit, 0.5 - 0.25 + (1 * 3 + 2 * 4) + deep.squeeze(1))


def test_without_hidden_layers_the_mlp_is_linear() -> None:
    model = DeepFM(["user"], dim=2, hidden=())
    assert [tuple(weight.shape) for weight in model.parameters()] == [(1,), (2, 1)]
