from __future__ import annotations

import math

import torch
from torch import nn

from monolith.nn.layers import Kernel, glorot_uniform, normalize_columns


def test_columns_become_unit_long() -> None:
    weight = torch.tensor([[3.0, 0.0], [4.0, 2.0]])
    torch.testing.assert_close(normalize_columns(weight), torch.tensor([[0.6, 0.0], [0.8, 1.0]]))


def test_a_column_of_zeros_stays_zero_with_a_finite_gradient() -> None:
    weight = torch.zeros(2, 1, requires_grad=True)
    normalize_columns(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_plain_kernel_is_its_weight() -> None:
    kernel = Kernel(3, 2)
    assert kernel() is kernel.weight
    assert kernel.norm is None


def test_with_a_trainable_norm_nothing_changes_at_first() -> None:
    kernel = Kernel(3, 2, norm=True)
    torch.testing.assert_close(kernel(), kernel.weight)


def test_without_one_columns_are_unit_long() -> None:
    kernel = Kernel(3, 2, norm=True, norm_trainable=False)
    torch.testing.assert_close(kernel().norm(dim=0), torch.ones(2))
    assert [name for name, _ in kernel.named_parameters()] == ["weight"]


def test_the_length_of_a_weight_does_not_matter_once_normalised() -> None:
    kernel = Kernel(3, 2, norm=True)
    before = kernel().detach().clone()
    kernel.weight.data *= 7
    torch.testing.assert_close(kernel(), before)


def test_a_stack_is_normalised_matrix_by_matrix() -> None:
    kernel = Kernel(3, 2, count=4, norm=True)
    assert kernel().shape == (4, 3, 2)
    torch.testing.assert_close(kernel(), kernel.weight)


def test_glorot_uniform_has_its_bound_whatever_the_stack() -> None:
    torch.manual_seed(0)
    bound = math.sqrt(6 / (30 + 20))
    for weight in (torch.empty(30, 20), torch.empty(8, 30, 20)):
        glorot_uniform(weight)
        assert bound * 0.95 < weight.abs().max() <= bound


def test_an_initializer_of_torch_fills_a_kernel() -> None:
    assert Kernel(2, 2, init=nn.init.ones_).weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
