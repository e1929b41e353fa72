from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from monolith.errors import LayerArgumentError
from monolith.nn.layers import ACTIVATIONS, MLP, MonitoredReLU, PReLU, make_activation

X = [-3.0, -0.5, 0.0, 0.5, 3.0]

FORMULAS: dict[str, Callable[[float], float]] = {
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "exponential": math.exp,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "hardsigmoid": lambda x: min(max(0.2 * x + 0.5, 0), 1),
    "leakyrelu": lambda x: x if x > 0 else 0.3 * x,
    "linear": lambda x: x,
    "prelu": lambda x: max(x, 0),
    "relu": lambda x: max(x, 0),
    "selu": lambda x: 1.05070098 * (x if x > 0 else 1.67326324 * (math.exp(x) - 1)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sigmoid2": lambda x: 2 / (1 + math.exp(-x)),
    "softmax": lambda x: math.exp(x) / sum(map(math.exp, X)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "softsign": lambda x: x / (1 + abs(x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "thresholdedrelu": lambda x: x if x > 1 else 0,
}


def test_every_activation_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name: str) -> None:
    found = make_activation(name, len(X))(torch.tensor([X]))[0].tolist()
    assert found == pytest.approx([FORMULAS[name](x) for x in X], abs=1e-6)


def test_names_may_be_in_any_case_and_none_is_linear() -> None:
    assert isinstance(make_activation("ReLU", 1), nn.ReLU)
    assert isinstance(make_activation(None, 1), nn.Identity)


def test_a_function_or_a_module_is_an_activation_too() -> None:
    module = nn.Hardtanh()
    assert make_activation(module, 1) is module
    assert make_activation(torch.square, 1)(torch.tensor(3.0)) == 9.0


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(LayerArgumentError, match="Did you mean 'leakyrelu'"):
        make_activation("leaky_relu", 1)
    with pytest.raises(LayerArgumentError, match="a name, a function or None"):
        make_activation(3, 1)  # type: ignore[arg-type]


def test_prelu_has_a_slope_per_feature() -> None:
    prelu = PReLU(2)
    prelu.slope.data = torch.tensor([0.5, 2.0])
    assert prelu(torch.tensor([[-1.0, -1.0], [1.0, 1.0]])).tolist() == [[-0.5, -2.0], [1.0, 1.0]]


def test_a_monitored_relu_remembers_silence_in_training_only() -> None:
    relu = MonitoredReLU(2, decay=0.5)
    x = torch.tensor([[-1.0, 1.0], [-1.0, -1.0]])
    assert relu(x).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert relu.silent_share.tolist() == [0.5, 0.25]
    relu(x)
    assert relu.silent_share.tolist() == [0.75, 0.375]
    relu.eval()(x)
    assert relu.silent_share.tolist() == [0.75, 0.375]
    assert relu.dead_units(at_least=0.7).tolist() == [0]


def test_a_stack_shares_no_slopes() -> None:
    mlp = MLP(2, (3, 4, 1), activations="prelu")
    slopes = [parameter.shape for name, parameter in mlp.named_parameters() if "slope" in name]
    assert slopes == [(3,), (4,)]
