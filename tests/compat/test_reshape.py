from __future__ import annotations

from typing import Any

import pytest
import torch

from monolith.errors import TensorArgumentError
from monolith_compat import StaticReshapeNBuilder, static_reshape


def test_each_input_takes_its_shape() -> None:
    inputs = [torch.arange(5), torch.zeros(4, 10), torch.zeros(2, 2, 3, dtype=torch.float64)]
    outputs, sizes = static_reshape(inputs, [(1, 5), (5, 8), (None, 2)])
    assert [tuple(output.shape) for output in outputs] == [(1, 5), (5, 8), (6, 2)]
    assert [output.dtype for output in outputs] == [torch.int64, torch.float32, torch.float64]
    assert (sizes.tolist(), sizes.dtype) == ([5, 40, 12], torch.int64)


def test_an_unknown_dimension_next_to_a_zero_is_zero() -> None:
    outputs, sizes = static_reshape([torch.zeros(0, 3)], [(0, None)])
    assert outputs[0].shape == (0, 0)
    assert sizes.tolist() == [0]


@pytest.mark.parametrize("shape", [(), None, (None, None), (None, 4), (5,), (0, None), (-1,), (2.0, 3)])
def test_a_shape_that_does_not_hold_the_elements_is_refused(shape: Any) -> None:
    with pytest.raises(TensorArgumentError, match="shape"):
        static_reshape([torch.zeros(6)], [shape])


def test_each_input_needs_a_shape() -> None:
    with pytest.raises(TensorArgumentError, match="1 and 0"):
        static_reshape([torch.zeros(6)], [])


def test_a_builder_tells_the_position_of_each_output() -> None:
    builder = StaticReshapeNBuilder()
    positions = {
        name: builder.add(torch.full((2, 2), value), (None,)) for name, value in [("a", 1), ("b", 2)]
    }
    outputs, sizes = builder.build()
    assert outputs[positions["b"]].tolist() == [2, 2, 2, 2]
    assert sizes.tolist() == [4, 4]


def test_gradients_flow_through() -> None:
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: static_reshape([x, x * x], [(None,), (3, 2)])[0], (x,))
