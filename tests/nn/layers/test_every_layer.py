"""What holds for every layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.layers import LAYERS, LayerCase, as_leaves, moved, tensors_in
from torch import Tensor, nn

from monolith.nn import layers

NOT_A_LAYER_OF_ITS_OWN = {"Kernel", "GradNorm", "ItemFrequency"}
"""A kernel is part of layers, GradNorm takes graphs, a frequency is counted; they have tests of their own."""


@pytest.fixture(params=LAYERS)
def case(request: pytest.FixtureRequest) -> LayerCase:
    torch.manual_seed(0)
    return LAYERS[request.param]


def total(answer: Any) -> Tensor:
    """Add up an answer, unevenly, so that no symmetry makes a gradient vanish."""
    parts = list(tensors_in(answer))
    return torch.stack(
        [
            (part * torch.linspace(0.5, 2, part.numel(), dtype=part.dtype).view_as(part)).sum()
            for part in parts
        ]
    ).sum()


def test_every_public_layer_is_tested_here() -> None:
    public = {
        name
        for name in layers.__all__
        if isinstance(getattr(layers, name), type) and issubclass(getattr(layers, name), nn.Module)
    }
    tested = {type(case.build()).__name__ for case in LAYERS.values()}
    assert public == tested | NOT_A_LAYER_OF_ITS_OWN


def test_gradients_reach_every_parameter_and_every_input(case: LayerCase) -> None:
    layer, inputs = case.build(), as_leaves(case.inputs())
    total(layer(*inputs)).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point():
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()


def test_gradients_are_right(case: LayerCase) -> None:
    layer = case.build().double().eval()
    inputs = moved(case.inputs(), dtype=torch.float64)
    flat = [tensor for tensor in tensors_in(as_leaves(inputs)) if tensor.is_floating_point()]

    def rebuilt(source: Any, leaves: list[Tensor]) -> Any:
        if isinstance(source, Tensor):
            return leaves.pop(0) if source.is_floating_point() else source
        return type(source)(rebuilt(part, leaves) for part in source)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(layer(*rebuilt(inputs, list(leaves)))))

    assert torch.autograd.gradcheck(function, flat)


def test_a_state_dict_carries_a_layer_over(case: LayerCase) -> None:
    first, second, inputs = case.build(), case.build(), case.inputs()
    for _ in range(2):
        first(*inputs)  # moving statistics are state too
    second.load_state_dict(first.state_dict())
    outs = [list(tensors_in(layer.eval()(*inputs))) for layer in (first, second)]
    for left, right in zip(*outs, strict=True):
        assert torch.equal(left, right)


def test_a_layer_leaves_its_inputs_alone(case: LayerCase) -> None:
    inputs = case.inputs()
    before = [tensor.clone() for tensor in tensors_in(inputs)]
    case.build()(*inputs)
    assert all(torch.equal(was, now) for was, now in zip(before, tensors_in(inputs), strict=True))
