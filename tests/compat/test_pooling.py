from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from monolith.errors import TensorArgumentError
from monolith_compat import (
    fused_reduce_and_split,
    fused_reduce_sum_and_split,
    fused_sorted_segment_sum,
    reduce_mean,
    reduce_sqrtn,
    reduce_sum,
)

ROWS = torch.tensor([0, 0, 2])
VALUES = torch.tensor([[3.0, 0.0], [4.0, 0.0], [-2.0, 1.0]])


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (reduce_sum, [[7, 0], [0, 0], [-2, 1]]),
        (reduce_mean, [[3.5, 0], [0, 0], [-2, 1]]),
        (reduce_sqrtn, [[5, 0], [0, 0], [2, 1]]),
    ],
)
def test_rows_are_pooled_and_empty_ones_are_zero(reduce: Callable[..., Tensor], expected: Any) -> None:
    assert reduce(ROWS, VALUES, 3).tolist() == expected
    assert reduce(ROWS.flip(0), VALUES.flip(0), 3).tolist() == expected
    assert reduce(ROWS[:0], VALUES[:0], 0).shape == (0, 2)


@pytest.mark.parametrize("reduce", [reduce_sum, reduce_mean, reduce_sqrtn])
def test_gradients_are_those_of_the_formula(reduce: Callable[..., Tensor]) -> None:
    values = (torch.rand(3, 2, dtype=torch.float64) + 0.5).requires_grad_()
    assert gradcheck(lambda values: reduce(ROWS, values, 4), (values,))


def test_a_length_of_zero_has_no_gradient() -> None:
    values = torch.zeros(2, 1, requires_grad=True)
    reduce_sqrtn(ROWS[:2], values, 1).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("rows", [[0, 0, 3], [-1, 0, 0], [0, 0]])
def test_each_value_needs_a_row_in_range(rows: list[int]) -> None:
    with pytest.raises(TensorArgumentError):
        reduce_sum(torch.tensor(rows), VALUES, 3)


def test_sums_are_split_into_columns() -> None:
    left, right = fused_reduce_sum_and_split(ROWS, VALUES, 3, [1, 1])
    assert (left.tolist(), right.tolist()) == ([[7], [0], [-2]], [[0], [0], [1]])
    with pytest.raises(TensorArgumentError, match="columns"):
        fused_reduce_sum_and_split(ROWS, VALUES, 3, [1, 2])


def test_many_segment_sums_have_the_shapes_given() -> None:
    outputs = fused_sorted_segment_sum([ROWS, ROWS], [VALUES, VALUES[:, 0]], [(3, 2), (4,)])
    assert [output.tolist() for output in outputs] == [[[7, 0], [0, 0], [-2, 1]], [7, 0, -2, 0]]
    with pytest.raises(TensorArgumentError, match="shape"):
        fused_sorted_segment_sum([ROWS], [VALUES], [(3, 5)])
    with pytest.raises(TensorArgumentError, match="1, 1 and 0"):
        fused_sorted_segment_sum([ROWS], [VALUES], [])


def test_many_features_are_pooled_by_their_splits() -> None:
    splits = [torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1])]
    pooled = fused_reduce_and_split(splits, [VALUES, torch.ones(1, 3)], [[1, 1], [3]])
    assert [[part.tolist() for part in feature] for feature in pooled] == [
        [[[7], [0], [-2]], [[0], [0], [1]]],
        [[[1, 1, 1]]],
    ]
    values = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda values: fused_reduce_and_split(splits[:1], [values], [[1, 1]])[0], (values,))
