from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers import AvgPooling, MaxPooling, SumPooling

TENSORS = [torch.tensor([[1.0, 9.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[6.0, 3.0]])]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [(SumPooling(), [[9.0, 12.0]]), (AvgPooling(), [[3.0, 4.0]]), (MaxPooling(), [[6.0, 9.0]])],
    ids=["sum", "avg", "max"],
)
def test_many_tensors_become_one(pooling: nn.Module, expected: list[list[float]]) -> None:
    assert pooling(TENSORS).tolist() == expected
    assert pooling(TENSORS[:1]).tolist() == TENSORS[0].tolist()
    assert TENSORS[0].tolist() == [[1.0, 9.0]]


@pytest.mark.parametrize("pooling", [SumPooling(), AvgPooling(), MaxPooling()])
def test_there_must_be_some_of_one_shape(pooling: nn.Module) -> None:
    for wrong in (list[Tensor](), torch.ones(2, 2)):
        with pytest.raises(LayerArgumentError, match="non-empty list"):
            pooling(wrong)
    with pytest.raises(LayerArgumentError, match="one shape"):
        pooling([torch.ones(2), torch.ones(3)])
