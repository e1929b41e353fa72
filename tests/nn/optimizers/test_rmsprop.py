from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monolith.errors import LayerArgumentError
from monolith.nn.optimizers import RMSprop

GRADIENTS = st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=6)


def reference(
    var: Any, grads: Any, *, lr: float, b1: float, b2: float, eps: float, wd: float, v2: bool
) -> Any:
    var, m, v = np.array(var), np.zeros(len(var)), np.zeros(len(var))
    for grad in np.array(grads):
        g = wd * var + grad
        v = b2 * v + g**2 if v2 else v + (g**2 - v) * (1 - b2)
        m = b1 * m + lr * g / (np.sqrt(v) + eps if v2 else np.sqrt(v + eps))
        var = var - m
    return {"var": var, "m": m, "v": v}


def one_step(**settings: Any) -> tuple[nn.Parameter, RMSprop]:
    param = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    chosen = {"lr": 0.1, "weight_decay": 1.0, "beta1": 0.9, "beta2": 0.9, "epsilon": 0.1, **settings}
    optimizer = RMSprop([param], **chosen)
    (0.12 * param).sum().backward()
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize(
    ("use_v2", "m", "v", "var"),
    [(False, 0.06794526153774846, 0.00484, 0.03205473846225154), (True, 0.06875, 0.0484, 0.03125)],
)
def test_one_step_is_upstreams(use_v2: bool, m: float, v: float, var: float) -> None:
    param, optimizer = one_step(use_v2=use_v2)
    state = optimizer.state[param]
    found = (state["m"].item(), state["v"].item(), param.item())
    assert found == pytest.approx((m, v, var), abs=1e-8)


def test_defaults_are_upstreams() -> None:
    group = RMSprop([nn.Parameter(torch.zeros(1))]).param_groups[0]
    names = ("lr", "beta1", "beta2", "epsilon", "weight_decay", "use_v2")
    assert [group[name] for name in names] == [5e-6, 0.99, 0.999, 1e-8, 0.0, False]


@pytest.mark.parametrize("foreach", [False, True])
@given(grads=GRADIENTS, v2=st.booleans(), wd=st.sampled_from([0.0, 0.3]))
def test_any_gradients_give_the_numbers_of_the_formula(
    foreach: bool, grads: Any, v2: bool, wd: float
) -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = RMSprop(
        [param], lr=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=wd, use_v2=v2, foreach=foreach
    )
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    want = reference([1.0, -2.0, 0.5], grads, lr=0.1, b1=0.8, b2=0.95, eps=1e-3, wd=wd, v2=v2)
    np.testing.assert_allclose(param.detach().numpy(), want["var"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[param]["m"].numpy(), want["m"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[param]["v"].numpy(), want["v"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
def test_without_updating_slots_the_parameter_glides_on_by_the_momentum_it_has(foreach: bool) -> None:
    param, optimizer = one_step(foreach=foreach)
    before, m, v = param.item(), optimizer.state[param]["m"].item(), optimizer.state[param]["v"].item()
    optimizer.param_groups[0]["update_slots"] = False
    param.grad = torch.tensor([99.0], dtype=torch.float64)
    optimizer.step()
    assert param.item() == before - m
    assert (optimizer.state[param]["m"].item(), optimizer.state[param]["v"].item()) == (m, v)


def test_the_rate_is_inside_the_momentum() -> None:
    param, optimizer = one_step(beta1=1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    before, m = param.item(), optimizer.state[param]["m"].item()
    optimizer.step()
    assert param.item() == pytest.approx(before - m)


@pytest.mark.parametrize(
    "settings", [{"beta1": 1.1}, {"beta2": -0.1}, {"epsilon": -1.0}, {"weight_decay": -1.0}]
)
def test_what_cannot_be_is_refused(settings: Any) -> None:
    with pytest.raises(LayerArgumentError, match=next(iter(settings))):
        RMSprop([nn.Parameter(torch.zeros(1))], **settings)
