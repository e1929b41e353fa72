from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers import GroupInt, ffm
from monolith.nn.layers.interactions import FFM


def reference(left: Tensor, right: Tensor, dim: int, int_type: str) -> Tensor:
    rows = []
    for row in range(len(left)):
        out: list[float] = []
        for i in range(0, left.shape[1], dim):
            for j in range(0, right.shape[1], dim):
                products = [float(left[row, i + k] * right[row, j + k]) for k in range(dim)]
                out += products if int_type == "multiply" else [sum(products)]
        rows.append(out)
    return torch.tensor(rows)


@pytest.mark.parametrize("int_type", ["multiply", "dot"])
def test_every_left_embedding_meets_every_right_one(int_type: str) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 2 * 4), torch.randn(3, 5 * 4)
    torch.testing.assert_close(ffm(left, right, 4, int_type), reference(left, right, 4, int_type))


@pytest.mark.parametrize("int_type", ["multiply", "dot"])
def test_ffm_has_right_gradients(int_type: str) -> None:
    left = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    right = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ffm(a, b, 2, int_type), (left, right))
    assert torch.autograd.gradgradcheck(lambda a, b: ffm(a, b, 2, int_type), (left, right))


def test_ffm_takes_strided_and_empty_batches() -> None:
    wide = torch.randn(3, 10)
    torch.testing.assert_close(
        ffm(wide[:, :4], wide[:, 4:], 2), ffm(wide[:, :4].clone(), wide[:, 4:].clone(), 2)
    )
    assert ffm(torch.empty(0, 4), torch.empty(0, 6), 2).shape == (0, 12)


def test_ffm_refuses_what_it_does_not_know() -> None:
    with pytest.raises(LayerArgumentError, match="int_type must be one of multiply, dot"):
        ffm(torch.ones(1, 2), torch.ones(1, 2), 2, "add")
    with pytest.raises(LayerArgumentError, match="width of right must be a multiple of dim_size, 2, got 3"):
        ffm(torch.ones(1, 2), torch.ones(1, 3), 2)
    with pytest.raises(LayerArgumentError, match=r"right must have shape \(1, any\)"):
        ffm(torch.ones(1, 2), torch.ones(2, 2), 2)


def test_group_int_crosses_two_lists() -> None:
    torch.manual_seed(0)
    left, right = [torch.randn(3, 4) for _ in range(2)], [torch.randn(3, 4) for _ in range(5)]
    for kind in ("multiply", "dot"):
        crossed = GroupInt(4, interaction=kind)(left, right)
        assert torch.equal(crossed, ffm(torch.cat(left, 1), torch.cat(right, 1), 4, kind))
    assert FFM is GroupInt


def test_attention_weighs_each_pair_by_its_products() -> None:
    torch.manual_seed(0)
    left, right = [torch.randn(3, 4) for _ in range(2)], [torch.randn(3, 4) for _ in range(5)]
    layer = GroupInt(4, attention_units=(8, 1))
    assert layer.attention is not None
    out = layer(left, right).view(3, 2, 5, 4)
    for i in range(2):
        for j in range(5):
            pair = left[i] * right[j]
            torch.testing.assert_close(out[:, i, j], pair * layer.attention(pair))


def test_attention_is_one_number_per_pair_and_for_products() -> None:
    with pytest.raises(LayerArgumentError, match="1 as the last"):
        GroupInt(4, attention_units=(8, 2))
    with pytest.raises(LayerArgumentError, match="'multiply'"):
        GroupInt(4, interaction="dot", attention_units=(8, 1))


def test_group_int_checks_its_lists() -> None:
    with pytest.raises(LayerArgumentError, match="interaction"):
        GroupInt(4, interaction="sum")
    with pytest.raises(LayerArgumentError, match="right must be a non-empty list"):
        GroupInt(4)([torch.ones(1, 4)], [])
    with pytest.raises(LayerArgumentError, match=r"left must have shape \(any, 4\)"):
        GroupInt(4)([torch.ones(1, 3)], [torch.ones(1, 4)])
