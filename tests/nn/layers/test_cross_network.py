from __future__ import annotations

import pytest
import torch

from monolith.errors import LayerArgumentError
from monolith.nn.layers import DCN


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randomized(network: DCN) -> DCN:
    for parameter in network.parameters():
        parameter.data.normal_()
    return network


def test_a_vector_layer_weighs_the_first_input_by_one_number() -> None:
    network, x = randomized(DCN(3, 2, dcn_type="vector")), torch.randn(4, 3)
    expected = x
    for layer in network.layers:
        expected = x * (expected @ layer.kernel()) + layer.bias + expected  # type: ignore[operator]
    torch.testing.assert_close(network(x), expected)


def test_a_matrix_layer_weighs_it_feature_by_feature() -> None:
    network, x = randomized(DCN(3, 2)), torch.randn(4, 3)
    expected = x
    for layer in network.layers:
        expected = x * (expected @ layer.kernel() + layer.bias) + expected  # type: ignore[operator]
    torch.testing.assert_close(network(x), expected)


def test_a_mixed_layer_gates_over_its_experts() -> None:
    network = randomized(DCN(3, 2, dcn_type="mixed", num_experts=4, low_rank=2))
    x = torch.randn(5, 3)
    expected = x
    for layer in network.layers:
        gates = (expected @ layer.gate).softmax(1)  # type: ignore[operator]
        torch.testing.assert_close(gates.sum(1), torch.ones(5))
        mixed = torch.zeros(5, 3)
        for e in range(4):
            inner = torch.tanh(expected @ layer.down.weight[e])  # type: ignore[union-attr, index]
            inner = torch.tanh(inner @ layer.middle.weight[e])  # type: ignore[union-attr, index]
            outer = x * (inner @ layer.up.weight[e] + layer.bias)  # type: ignore[union-attr, index, operator]
            mixed = mixed + gates[:, e : e + 1] * outer
        expected = mixed + expected
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("dcn_type", ["vector", "matrix", "mixed"])
def test_kernels_may_be_normalised(dcn_type: str) -> None:
    network, x = DCN(3, 2, dcn_type=dcn_type, low_rank=2, kernel_norm=True), torch.randn(4, 3)
    before = network(x)
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            parameter.data *= 5
    torch.testing.assert_close(network(x), before)


def test_dropout_acts_in_training_only_and_keeps_most() -> None:
    network, x = DCN(100, use_dropout=True), torch.ones(50, 100)
    dropped = (network(x) == 0).float().mean()
    assert 0.03 < dropped < 0.07
    assert torch.equal(network.eval()(x), network.eval()(x))
    assert (DCN(100)(x) != 0).all()


def test_dcn_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="dcn_type must be one of vector, matrix, mixed"):
        DCN(3, dcn_type="tensor")
    with pytest.raises(LayerArgumentError, match="keep_prob"):
        DCN(3, keep_prob=0)
    with pytest.raises(LayerArgumentError, match="low_rank"):
        DCN(3, dcn_type="mixed", low_rank=0)
    with pytest.raises(LayerArgumentError, match=r"DCN: x must have shape \(any, 3\)"):
        DCN(3)(torch.ones(2, 4))
