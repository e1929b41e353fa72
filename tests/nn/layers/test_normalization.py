from __future__ import annotations

import pytest
import torch
from torch import nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers import BatchNorm, LayerNorm

X = torch.tensor([[0.0, 10.0], [2.0, 30.0]])  # means 1 and 20, variances 1 and 100


def test_in_training_a_batch_is_normalised_by_itself() -> None:
    torch.testing.assert_close(BatchNorm(2)(X), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), atol=1e-5, rtol=0)


def test_moving_statistics_keep_momentum_of_the_old() -> None:
    norm = BatchNorm(2, momentum=0.9)
    norm(X)
    torch.testing.assert_close(norm.moving_mean, torch.tensor([0.1, 2.0]))
    torch.testing.assert_close(norm.moving_variance, torch.tensor([0.9 + 0.1, 0.9 + 10.0]))
    assert BatchNorm(2).momentum == 0.99


def test_afterwards_the_moving_statistics_are_used_and_left_alone() -> None:
    norm = BatchNorm(1).eval()
    norm.moving_mean.fill_(2.0)
    norm.moving_variance.fill_(4.0)
    torch.testing.assert_close(norm(torch.tensor([[6.0]])), torch.tensor([[2.0]]))
    assert (norm.moving_mean.item(), norm.moving_variance.item()) == (2.0, 4.0)


def test_global_statistics_may_be_used_in_training_and_still_move() -> None:
    norm = BatchNorm(1, momentum=0.5, use_global_stats=True)
    x = torch.tensor([[4.0], [4.0]], requires_grad=True)
    out = norm(x)
    torch.testing.assert_close(out, torch.tensor([[4.0], [4.0]]), atol=1e-4, rtol=0)
    assert norm.moving_mean.item() == 2.0
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(2, 1))


def test_scale_and_center_are_trained_or_absent() -> None:
    norm = BatchNorm(2)
    assert norm.gamma is not None
    assert norm.beta is not None
    norm.gamma.data.fill_(3.0)
    norm.beta.data.fill_(1.0)
    torch.testing.assert_close(norm(X), torch.tensor([[-2.0, -2.0], [4.0, 4.0]]), atol=1e-4, rtol=0)
    assert not list(BatchNorm(2, scale=False, center=False).parameters())


def test_all_axes_but_the_last_are_batch() -> None:
    norm = BatchNorm(2)
    torch.testing.assert_close(norm(X.view(2, 1, 2)).view(2, 2), BatchNorm(2)(X))


def test_a_single_row_comes_out_as_beta() -> None:
    assert BatchNorm(2)(torch.tensor([[5.0, 7.0]])).tolist() == [[0.0, 0.0]]


def test_the_gradient_goes_through_the_statistics() -> None:
    norm = BatchNorm(2).double()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)


def test_moving_statistics_travel_with_the_state() -> None:
    first, second = BatchNorm(2), BatchNorm(2)
    first(X)
    assert set(first.state_dict()) == {"gamma", "beta", "moving_mean", "moving_variance"}
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.eval()(X), first.eval()(X))


def test_batch_norm_checks_its_arguments() -> None:
    for wrong in ({"momentum": 1.0}, {"momentum": -0.1}, {"epsilon": 0.0}):
        with pytest.raises(LayerArgumentError, match=next(iter(wrong))):
            BatchNorm(2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(LayerArgumentError, match="BatchNorm: x"):
        BatchNorm(2)(torch.ones(1, 3))


def test_layer_norm_normalises_each_row() -> None:
    norm = LayerNorm(2, nn.init.ones_)
    torch.testing.assert_close(norm(X), torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), atol=1e-5, rtol=0)


def test_layer_norm_starts_with_the_gamma_one_says() -> None:
    assert LayerNorm(2, nn.init.zeros_)(X).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(TypeError, match="gamma_init"):
        LayerNorm(2)  # type: ignore[call-arg]
    with pytest.raises(LayerArgumentError, match="LayerNorm: x"):
        LayerNorm(2, nn.init.ones_)(torch.ones(1, 3))
