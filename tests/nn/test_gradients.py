from __future__ import annotations

import pytest
import torch

from monolith.errors import GradientError
from monolith.nn.gradients import propagate_back_dict_gradients, propagate_back_gradients


def test_gradients_are_carried_back_and_grouped_by_key() -> None:
    x = torch.tensor(8.0, requires_grad=True)
    y = 2 * x
    grouped = propagate_back_dict_gradients(zip([3 * y], [y], strict=True), {x: "group1"}, {y})
    ((dx, source),) = grouped["group1"]
    assert dx is not None
    assert dx.item() == 96.0
    assert source is x


def test_keys_and_their_members_keep_the_order_of_the_mapping() -> None:
    a, b, c = (torch.tensor(float(n), requires_grad=True) for n in (1, 2, 3))
    y = a + 10 * b + 100 * c
    grouped = propagate_back_dict_gradients([(torch.tensor(1.0), y)], {b: "late", a: "early", c: "late"})
    assert list(grouped) == ["late", "early"]
    assert [x for _, x in grouped["late"]] == [b, c]
    assert [float(dx) for dx, _ in grouped["late"] if dx is not None] == [10.0, 100.0]


def test_gradients_of_several_variables_are_summed() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    pairs = [(torch.tensor([1.0, 1.0]), 2 * x), (torch.tensor(1.0), (x * x).sum())]
    (dx,) = propagate_back_gradients(pairs, [x])
    assert dx is not None
    assert dx.tolist() == [4.0, 6.0]


def test_what_is_not_connected_has_none() -> None:
    x, other, constant = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), torch.ones(1)
    found = propagate_back_gradients(
        [(torch.ones(1), 2 * x), (torch.ones(1), constant)], [other, x, constant]
    )
    assert [None if dx is None else dx.tolist() for dx in found] == [None, [2.0], None]
    assert propagate_back_gradients([(torch.ones(1), constant)], [x]) == [None]
    assert propagate_back_gradients([], []) == []


def test_a_variable_without_gradient_adds_nothing() -> None:
    x = torch.ones(1, requires_grad=True)
    assert propagate_back_gradients([(None, 2 * x)], [x]) == [None]


def test_a_variable_that_is_not_allowed_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    y, z = 2 * x, 3 * x
    with pytest.raises(GradientError, match="Invalid variables in the input") as caught:
        propagate_back_gradients([(torch.ones(3), z)], [x], [y])
    assert isinstance(caught.value, RuntimeError)
    (dx,) = propagate_back_gradients([(torch.ones(3), z)], [x], set())
    assert dx is not None


def test_the_graph_is_kept_where_asked() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * x
    for _ in range(2):
        (dx,) = propagate_back_gradients([(torch.ones(1), y)], [x], retain_graph=True)
        assert dx is not None
        assert dx.tolist() == [2.0]
    assert x.grad is None
