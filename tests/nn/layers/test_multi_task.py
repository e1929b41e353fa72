from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers import SNR, GradNorm, LHUCTower, MMoELayer


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# MMoELayer


def test_every_task_mixes_the_experts_by_its_own_gate() -> None:
    layer, x = MMoELayer(3, 2, 4, (8, 5), gate_init=nn.init.normal_), torch.randn(6, 3)
    outputs, _ = layer(x)
    assert [out.shape for out in outputs] == [(6, 5), (6, 5)]
    for task, out in enumerate(outputs):
        gate = (x @ layer.gate[:, task * 4 : task * 4 + 4]).softmax(1)
        expected = sum(gate[:, e : e + 1] * expert(x) for e, expert in enumerate(layer.experts))
        torch.testing.assert_close(out, expected)


def test_gates_start_as_a_plain_average() -> None:
    layer, x = MMoELayer(3, 2, 4, (5,)), torch.randn(6, 3)
    average = torch.stack([expert(x) for expert in layer.experts]).mean(0)
    outputs, load_loss = layer(x)
    for out in outputs:
        torch.testing.assert_close(out, average)
    assert load_loss.item() == pytest.approx(0, abs=1e-6)


def test_topk_keeps_the_largest_and_renormalizes_them_to_one() -> None:
    layer = MMoELayer(1, 1, 4, (5,), gate_type="topk", top_k=2)
    layer.gate.data = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])
    torch.testing.assert_close(layer.gates(torch.ones(1, 1))[0, 0], expected)


def test_the_load_loss_is_variance_over_squared_mean_of_what_experts_are_used() -> None:
    layer = MMoELayer(1, 2, 4, (5,), gate_type="topk", top_k=1)
    layer.gate.data = torch.tensor([[9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    # Each task sends all of 3 rows to one expert: importance (3, 0, 0, 0), mean 3/4, variance 27/16.
    assert layer(torch.ones(3, 1)).load_loss.item() == pytest.approx(2 * (27 / 16) / (9 / 16))


def test_noise_spreads_rows_over_experts_in_training_only() -> None:
    layer, x = MMoELayer(3, 1, 4, (5,), gate_type="noise_topk", top_k=1), torch.randn(64, 3)
    used = (layer.gates(x) > 0).any(0)[0]
    assert used.all()
    layer.eval()
    assert torch.equal(layer.gates(x), layer.gates(x))
    assert (layer.gates(x) > 0).any(0).sum() == 1


def test_gates_may_look_at_something_else() -> None:
    layer = MMoELayer(3, 2, 4, (5,), gate_features=7, gate_init=nn.init.normal_)
    x, other = torch.randn(6, 3), torch.randn(6, 7)
    assert layer(x, other).outputs[0].shape == (6, 5)
    with pytest.raises(LayerArgumentError, match="gate input"):
        layer(x)


def test_mmoe_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="gate_type must be one of softmax, topk, noise_topk"):
        MMoELayer(3, 2, 4, (5,), gate_type="hard")
    with pytest.raises(LayerArgumentError, match="top_k must be at most num_experts, 4, got 5"):
        MMoELayer(3, 2, 4, (5,), top_k=5)
    with pytest.raises(LayerArgumentError, match="MMoELayer: x"):
        MMoELayer(3, 2, 4, (5,))(torch.ones(6, 4))


# SNR


def test_afterwards_gates_are_a_stretched_sigmoid_cut_to_zero_and_one() -> None:
    layer = SNR(1, 2, 3, 2).eval()
    layer.log_alpha.data = torch.tensor([[0.0, 10.0, -10.0]])
    torch.testing.assert_close(layer.gates(), torch.tensor([[0.5, 1.0, 0.0]]))


def test_in_training_gates_are_random_and_often_just_open_or_closed() -> None:
    layer = SNR(50, 1, 50, 1)
    gates = layer.gates()
    assert ((gates >= 0) & (gates <= 1)).all()
    assert 0.05 < (gates == 0).float().mean() < 0.25
    # Closed with probability sigmoid(beta * log(-gamma / zeta)), the rest of the l0 loss.
    closed = 1 / (1 + math.exp(-0.5 * math.log(0.1 / 1.1)))
    assert (gates == 0).float().mean().item() == pytest.approx(closed, abs=0.03)
    assert layer.l0_loss().item() == pytest.approx(2500 * (1 - closed), rel=1e-5)


def test_trans_sends_each_connection_through_its_matrix() -> None:
    layer = SNR(3, 2, 2, 4).eval()
    layer.log_alpha.data.normal_()
    subnets, gates = [torch.randn(5, 2) for _ in range(3)], layer.gates()
    out = layer(subnets)
    assert [tensor.shape for tensor in out] == [(5, 4), (5, 4)]
    assert layer.kernel is not None
    for o in range(2):
        expected = torch.zeros(5, 4)
        for i in range(3):
            block = layer.kernel[2 * i : 2 * i + 2, 4 * o : 4 * o + 4]
            expected = expected + gates[i, o] * subnets[i] @ block
        torch.testing.assert_close(out[o], expected)


def test_aver_adds_what_comes_in() -> None:
    layer = SNR(3, 2, 2, 2, snr_type="aver").eval()
    layer.log_alpha.data.normal_()
    subnets, gates = [torch.randn(5, 2) for _ in range(3)], layer.gates()
    for o, out in enumerate(layer(subnets)):
        torch.testing.assert_close(out, sum(gates[i, o] * subnets[i] for i in range(3)))


def test_snr_checks_its_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="use 'trans' to change the width"):
        SNR(3, 2, 2, 4, snr_type="aver")
    with pytest.raises(LayerArgumentError, match="zeta > 1"):
        SNR(3, 2, 2, 4, zeta=1.0)
    with pytest.raises(LayerArgumentError, match="snr_type"):
        SNR(3, 2, 2, 4, snr_type="sum")
    with pytest.raises(LayerArgumentError, match="3 tensors, got 2"):
        SNR(3, 2, 2, 4)([torch.ones(1, 2)] * 2)


# LHUCTower


def test_every_layer_is_multiplied_by_its_gate() -> None:
    layer = LHUCTower(3, (8, 2), lhuc_features=5, lhuc_output_dims=(6,))
    x, user = torch.randn(4, 3), torch.randn(4, 5)
    expected = x
    for block, gate in zip(layer.tower.blocks, layer.gates, strict=True):
        scale = gate(user)
        assert ((scale > 0) & (scale < 2)).all()
        expected = block(expected) * scale
    torch.testing.assert_close(layer(x, user), expected)


def test_gates_at_one_leave_the_tower_as_it_is() -> None:
    layer, x = LHUCTower(3, (8, 2), batch_norm=True), torch.randn(4, 3)
    for name, parameter in layer.gates.named_parameters():
        if name.endswith(("norm", "bias")):
            parameter.data.zero_()
    torch.testing.assert_close(layer.eval()(x), layer.tower(x))


def test_gates_look_at_the_input_unless_given_something_else() -> None:
    layer, x = LHUCTower(3, (8, 2)), torch.randn(4, 3)
    assert torch.equal(layer(x), layer(x, x))
    with pytest.raises(LayerArgumentError, match="LHUCTower: lhuc"):
        LHUCTower(3, (8, 2), lhuc_features=5)(x)


# GradNorm


def two_tasks() -> tuple[Tensor, list[Tensor]]:
    """Return something shared and two losses whose gradients on it have norms 5 and 1."""
    shared = torch.tensor([1.0, 2.0], requires_grad=True)
    return shared, [(shared * torch.tensor([3.0, 4.0])).sum(), shared[0] * 1.0]


def test_losses_are_weighed_by_a_softmax() -> None:
    layer = GradNorm(2)
    shared, losses = two_tasks()
    assert layer(losses, [shared]).weighted_loss.item() == pytest.approx(0.5 * 11 + 0.5 * 1)


def test_balance_is_how_far_the_pulls_are_from_their_mean() -> None:
    shared, losses = two_tasks()
    # Pulls 2.5 and 0.5, mean 1.5: both are 1 apart.
    assert GradNorm(2, scale=3.0)(losses, [shared]).balance_loss.item() == pytest.approx(3 * (1 + 1))
    relative = GradNorm(2, relative=True)(losses, [shared]).balance_loss.item()
    assert relative == pytest.approx(2 * (1 / 1.5) ** 2)
    assert GradNorm(2, power=1.0)(losses, [shared]).balance_loss.item() == pytest.approx(2)


def test_each_part_trains_its_own() -> None:
    layer = GradNorm(2)
    shared, losses = two_tasks()
    weighted, balance = layer(losses, [shared])
    weighted.backward(retain_graph=True)
    assert layer.logits.grad is None
    assert shared.grad is not None
    assert shared.grad.tolist() == [2.0, 2.0]
    shared.grad = None
    balance.backward()
    assert shared.grad is None
    assert layer.logits.grad is not None
    assert layer.logits.grad[0] > 0 > layer.logits.grad[1]  # the strong pull is let go


def test_training_the_weights_balances_the_pulls() -> None:
    layer = GradNorm(2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        shared, losses = two_tasks()
        layer(losses, [shared]).balance_loss.backward()
        optimizer.step()
    torch.testing.assert_close(layer.weights().detach(), torch.tensor([1 / 6, 5 / 6]), atol=1e-2, rtol=0)


def test_a_task_that_does_not_reach_what_is_shared_pulls_nothing() -> None:
    shared, losses = two_tasks()
    elsewhere = torch.ones(1, requires_grad=True)
    layer = GradNorm(2)
    out = layer([losses[0], elsewhere.sum()], [shared])
    assert out.balance_loss.item() == pytest.approx(2 * 1.25**2)


def test_grad_norm_checks_its_arguments() -> None:
    shared, losses = two_tasks()
    with pytest.raises(LayerArgumentError, match="3 scalars"):
        GradNorm(3)(losses, [shared])
    with pytest.raises(LayerArgumentError, match="at least one tensor"):
        GradNorm(2)(losses, [])
    with pytest.raises(LayerArgumentError, match="power"):
        GradNorm(2, power=0.5)
