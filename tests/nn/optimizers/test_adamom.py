from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monolith.errors import LayerArgumentError
from monolith.nn.optimizers import Adamom

GRADIENTS = st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=6)


def reference(
    var: Any, grads: Any, *, lr: float, ada: float, mom: float, eps: float, wd: float, v2: bool
) -> Any:
    var, m, v, c = np.array(var), np.zeros(len(var)), np.zeros(len(var)), np.zeros(len(var))
    for grad in np.array(grads):
        g = wd * var + grad
        m = mom * m + (1 - mom) * g
        v = ada * v + g**2
        c = ada * c + 1
        var = var - lr * m / (np.sqrt(v / c) + eps if v2 else np.sqrt(v / c + eps))
    return {"var": var, "m": m, "v": v, "c": c}


def one_step(**settings: Any) -> tuple[nn.Parameter, Adamom]:
    param = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    optimizer = Adamom(
        [param], **{"lr": 0.1, "weight_decay": 0.01, "ada_decay": 0.99, "mom_decay": 0.9, **settings}
    )
    (0.12 * param).sum().backward()
    optimizer.step()
    return param, optimizer


def test_one_step_is_upstreams() -> None:
    param, optimizer = one_step()
    state = optimizer.state[param]
    assert param.item() == pytest.approx(0.090000336, abs=1e-8)
    assert (state["m"].item(), state["v"].item(), state["c"]) == pytest.approx(
        (0.0121, 0.014641, 1.0), abs=1e-8
    )


def test_defaults_are_upstreams() -> None:
    group = Adamom([nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert {name: group[name] for name in ("lr", "ada_decay", "mom_decay", "epsilon", "weight_decay")} == {
        "lr": 5e-6,
        "ada_decay": 0.9999,
        "mom_decay": 0.99,
        "epsilon": 1e-6,
        "weight_decay": 0.0,
    }


def test_the_second_version_adds_epsilon_after_the_root() -> None:
    first, _ = one_step(epsilon=0.5)
    second, _ = one_step(epsilon=0.5, use_v2=True)
    assert first.item() == pytest.approx(0.1 - 0.1 * 0.0121 / np.sqrt(0.014641 + 0.5))
    assert second.item() == pytest.approx(0.1 - 0.1 * 0.0121 / (np.sqrt(0.014641) + 0.5))


@pytest.mark.parametrize("foreach", [False, True])
@given(grads=GRADIENTS, v2=st.booleans(), wd=st.sampled_from([0.0, 0.3]))
def test_any_gradients_give_the_numbers_of_the_formula(
    foreach: bool, grads: Any, v2: bool, wd: float
) -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = Adamom(
        [param],
        lr=0.1,
        ada_decay=0.95,
        mom_decay=0.8,
        epsilon=1e-3,
        weight_decay=wd,
        use_v2=v2,
        foreach=foreach,
    )
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    want = reference([1.0, -2.0, 0.5], grads, lr=0.1, ada=0.95, mom=0.8, eps=1e-3, wd=wd, v2=v2)
    state = optimizer.state[param]
    np.testing.assert_allclose(param.detach().numpy(), want["var"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state["m"].numpy(), want["m"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state["v"].numpy(), want["v"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state["c"], want["c"])


@pytest.mark.parametrize("foreach", [False, True])
def test_without_updating_slots_the_parameter_moves_by_the_state_it_has(foreach: bool) -> None:
    param, optimizer = one_step(foreach=foreach)
    before, state = param.item(), dict(optimizer.state[param])
    m, v = state["m"].item(), state["v"].item()
    optimizer.param_groups[0]["update_slots"] = False
    param.grad = torch.tensor([99.0], dtype=torch.float64)
    optimizer.step()
    assert param.item() == pytest.approx(before - 0.1 * m / np.sqrt(v + 1e-6))
    after = optimizer.state[param]
    assert (after["m"].item(), after["v"].item(), after["c"]) == (m, v, 1.0)


@pytest.mark.parametrize("foreach", [False, True])
def test_without_any_state_yet_it_does_not_move(foreach: bool) -> None:
    param, _ = one_step(update_slots=False, foreach=foreach)
    assert param.item() == 0.1


@pytest.mark.parametrize(
    "settings", [{"ada_decay": 1.1}, {"mom_decay": -0.1}, {"epsilon": -1.0}, {"weight_decay": -1.0}]
)
def test_what_cannot_be_is_refused(settings: Any) -> None:
    with pytest.raises(LayerArgumentError, match=next(iter(settings))):
        Adamom([nn.Parameter(torch.zeros(1))], **settings)
