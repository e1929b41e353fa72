"""torch's Adam and the base of our optimizers, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from monolith.nn.optimizers import Adamom, EagerAdam, EagerOptimizer, rule_of


def trained(optimizer: type[torch.optim.Optimizer], steps: int = 5, **settings: Any) -> Any:
    torch.manual_seed(3)
    layer = nn.Linear(4, 2)
    adam = optimizer(layer.parameters(), **settings)
    for _ in range(steps):
        adam.zero_grad()
        layer(torch.randn(8, 4)).square().sum().backward()
        adam.step()
    return layer, adam


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"foreach": True}])
def test_it_is_torchs_adam_bit_for_bit(settings: dict[str, Any]) -> None:
    (ours, adam), (theirs, other) = trained(EagerAdam, **settings), trained(torch.optim.Adam, **settings)
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.tolist() == wanted.tolist()
    assert str(adam.state_dict()) == str(other.state_dict())


def test_the_state_of_either_loads_into_the_other() -> None:
    (_, adam), (_, other) = trained(EagerAdam, steps=3), trained(torch.optim.Adam, steps=4)
    state = str(other.state_dict())
    adam.load_state_dict(other.state_dict())
    assert str(adam.state_dict()) == state
    other.load_state_dict(trained(EagerAdam, steps=3)[1].state_dict())
    assert other.state_dict()["state"][0]["step"] == 3


def test_a_step_takes_a_closure_with_gradients_and_runs_without() -> None:
    weight = nn.Parameter(torch.ones(1))
    adam = EagerAdam([weight], lr=0.5)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        adam.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert adam.step(closure).item() == 2.0
    assert seen == [True]
    assert weight.item() == pytest.approx(0.5)


def test_its_rule_is_torchs_and_that_of_others_their_own() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    assert rule_of(EagerAdam(weights)) is torch.optim.Adam
    assert rule_of(torch.optim.SGD(weights)) is torch.optim.SGD
    assert rule_of(Adamom(weights, lr=0.1)) is Adamom


def test_a_group_that_torch_refuses_is_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    adam = EagerAdam([weight])
    with pytest.raises(ValueError, match="more than one parameter group"):
        adam.add_param_group({"params": [weight]})
    assert issubclass(EagerAdam, EagerOptimizer)


def test_no_optimizer_of_ours_imports_the_compiler() -> None:
    program = """
import sys, torch
from torch import nn
from monolith.model import DeepFM, EmbeddingOptimizer
from monolith.nn.optimizers import Adamom, EagerAdam, RMSprop, Shampoo

for kind in (Adamom, EagerAdam, RMSprop, Shampoo):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight], lr=0.1)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
EmbeddingOptimizer(DeepFM(["user"], dim=2, hidden=(2,), threads=1)).step()
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
