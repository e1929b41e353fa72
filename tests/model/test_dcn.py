"""DCNv2: crosses beside an MLP."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError, LayerArgumentError
from monolith.model import DCNv2


def test_the_logit_weighs_crosses_and_mlp_together() -> None:
    model = DCNv2(["user", "item"], dim=2, cross_layers=2, hidden=(3,), floats={"age": 1})
    table = model.embeddings.store.table
    table("user").assign(torch.tensor([1]), torch.tensor([[1.0, 2.0]]))
    table("item").assign(torch.tensor([7]), torch.tensor([[3.0, 4.0]]))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.75]])
    crossed = x
    for layer in model.dense.cross.layers:
        crossed = x * (crossed @ layer.kernel() + layer.bias) + crossed
    (first,) = model.dense.mlp
    deep = (x @ first.kernel() + first.bias).relu()
    head = model.dense.head
    expected = torch.cat([crossed, deep], 1) @ head.kernel() + head.bias
    logit = model({"user": torch.tensor([1]), "item": torch.tensor([7])}, {"age": x[:, 4:]})
    torch.testing.assert_close(logit, expected.squeeze(1))


def test_crosses_may_be_of_low_rank() -> None:
    model = DCNv2(["user", "item"], cross="mixed")
    assert model({"user": torch.tensor([1, 2]), "item": torch.tensor([7, 7])}).shape == (2,)
    with pytest.raises(LayerArgumentError, match="matrix"):
        DCNv2(["user"], cross="matrx")


def test_it_has_at_least_one_hidden_layer() -> None:
    with pytest.raises(ConfigError, match="hidden"):
        DCNv2(["user"], hidden=())
