"""DLRM: the numbers' vector and the features' vectors meet in dot products."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError
from monolith.model import DLRM


def test_the_top_reads_the_numbers_vector_and_each_pair_once() -> None:
    model = DLRM(["user", "item"], dim=2, bottom=(4,), top=(3,), floats={"age": 1})
    table = model.embeddings.store.table
    table("user").assign(torch.tensor([1]), torch.tensor([[1.0, 2.0]]))
    table("item").assign(torch.tensor([7]), torch.tensor([[3.0, 4.0]]))
    age = torch.tensor([[0.75]])
    numbers = model.dense.bottom(age)
    user, item = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    pairs = torch.stack([user @ numbers[0], item @ numbers[0], item @ user])
    expected = model.dense.top(torch.cat([numbers, pairs[None]], 1))
    logit = model({"user": torch.tensor([1]), "item": torch.tensor([7])}, {"age": age})
    torch.testing.assert_close(logit, expected.squeeze(1))
    assert numbers.shape == (1, 2)


def test_it_needs_numbers() -> None:
    with pytest.raises(ConfigError, match="use DeepFM"):
        DLRM(["user"], floats={})
