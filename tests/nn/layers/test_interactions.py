from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.layers import CAN, CIN, AllInt, AutoInt, CDot


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def features(n: int = 4, dim: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, n, dim)


def test_all_int_compresses_all_pairs() -> None:
    layer, x = AllInt(4, 2), features()
    assert layer.bias is not None
    layer.bias.data = torch.tensor([0.5, -1.0])
    out = layer(x)
    assert out.shape == (2, 4, 2)
    for row in range(2):
        expected = x[row] @ (x[row].t() @ layer.kernel + layer.bias)
        torch.testing.assert_close(out[row], expected)
    assert AllInt(4, 2, use_bias=False).bias is None


def test_cdot_returns_crosses_and_what_they_were_made_with() -> None:
    layer, x = CDot(4, 3, 2, (8,)), features()
    out = layer(x)
    assert out.shape == (2, layer.out_features) == (2, 4 * 2 + 3 * 2)
    for row in range(2):
        compressed = layer.compress((x[row].t() @ layer.project).reshape(1, 6))[0]
        crossed = x[row] @ compressed.view(3, 2)
        torch.testing.assert_close(out[row], torch.cat([crossed.flatten(), compressed]))


def test_can_sends_the_user_through_the_item() -> None:
    layer = CAN(2, layer_num=1)
    assert layer.item_dim == 6
    user = torch.tensor([[1.0, 2.0]])
    item = torch.tensor([[1.0, 2.0, 3.0, 4.0, 10.0, -100.0]])  # [[1, 2], [3, 4]] and the biases
    assert layer(user, item).tolist() == [[1.0 + 6.0 + 10.0, 0.0]]


def test_can_stacks_layers_and_takes_many_user_features() -> None:
    layer = CAN(2, layer_num=2)
    user, item = torch.randn(3, 5, 2), torch.randn(3, 12)
    out = layer(user, item)
    assert out.shape == (3, 5, 2)
    for row in range(3):
        for n in range(5):
            x = user[row, n]
            for weights in (item[row, :6], item[row, 6:]):
                x = (x @ weights[:4].view(2, 2) + weights[4:]).clamp(min=0)
            torch.testing.assert_close(out[row, n], x)
    torch.testing.assert_close(layer(user[:, 0], item), out[:, 0])


def test_cin_crosses_fields_layer_by_layer() -> None:
    layer, x = CIN(3, (4, 2)), features(n=3)
    for bias in layer.biases:
        bias.data.normal_()
    out = layer(x)
    assert out.shape == (2, 6)
    for row in range(2):
        maps, sums = x[row], []
        for depth, (kernel, bias) in enumerate(zip(layer.kernels, layer.biases, strict=True)):
            fresh = []
            for o in range(kernel.shape[1]):
                total = torch.zeros(3)
                for h in range(len(maps)):
                    for m in range(3):
                        total = total + kernel[h * 3 + m, o] * maps[h] * x[row, m]
                total = total + bias[o]
                fresh.append(total.clamp(min=0) if depth == 0 else total)
            maps = torch.stack(fresh)
            sums.append(maps.sum(1))
        torch.testing.assert_close(out[row], torch.cat(sums))


def test_auto_int_attends_without_weights() -> None:
    layer, x = AutoInt(2), features()
    expected = x
    for _ in range(2):
        expected = (expected @ expected.transpose(1, 2)).softmax(-1) @ expected
    torch.testing.assert_close(layer(x), expected)
    assert not list(layer.parameters())


def test_wrong_shapes_are_refused_by_name() -> None:
    x = torch.ones(2, 5, 3)
    for layer in (AllInt(4, 2), CDot(4, 3, 2, (8,)), CIN(4, (2,))):
        with pytest.raises(LayerArgumentError, match=type(layer).__name__):
            layer(x)
    with pytest.raises(LayerArgumentError, match="AutoInt"):
        AutoInt()(torch.ones(2, 3))
    with pytest.raises(LayerArgumentError, match=r"CAN: item must have shape \(2, 24\), got \(2, 23\)"):
        CAN(3)(torch.ones(2, 3), torch.ones(2, 23))
    with pytest.raises(LayerArgumentError, match="CAN: user"):
        CAN(3)(torch.ones(2, 4), torch.ones(2, 24))
