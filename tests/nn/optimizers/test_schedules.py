from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from monolith.errors import LayerArgumentError
from monolith.nn.optimizers import Adamom
from monolith.nn.optimizers.dense_optimizer import RateSchedule
from monolith.table import ConstantRate, PolynomialDecay, Sgd, warmup

DECAY = PolynomialDecay(initial_learning_rate=1.0, decay_steps=4, end_learning_rate=0.0)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def rates(optimizer: Any, schedule: Any, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_the_rate_is_the_functions_at_every_step() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=99.0)
    assert rates(optimizer, RateSchedule(optimizer, DECAY), 6) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_dense_weights_warm_up_with_a_tables_segment() -> None:
    rate = warmup(Sgd(learning_rate=0.5, warmup_steps=2))
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    assert rates(optimizer, RateSchedule(optimizer, rate), 4) == [rate(step) for step in range(4)]


def test_groups_may_have_functions_of_their_own() -> None:
    optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=1.0)
    schedule = RateSchedule(optimizer, [DECAY, ConstantRate(0.5)])
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.75, 0.5]
    with pytest.raises(LayerArgumentError, match="3 rates for 2 groups"):
        RateSchedule(optimizer, [DECAY] * 3)


def test_a_schedule_and_a_function_as_rate_are_the_same() -> None:
    scheduled, by_function = parameter(), parameter()
    optimizer = Adamom([scheduled])
    schedule = RateSchedule(optimizer, DECAY)
    other = Adamom([by_function], lr=DECAY)
    for step in range(6):
        scheduled.grad = by_function.grad = torch.tensor([1.0, -0.5]) * step
        optimizer.step()
        schedule.step()
        other.step()
    assert scheduled.tolist() == by_function.tolist()


def test_a_saved_schedule_resumes_where_it_was_and_contains_no_code() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    schedule = RateSchedule(optimizer, DECAY)
    rates(optimizer, schedule, 2)
    saved, saved_optimizer = schedule.state_dict(), optimizer.state_dict()
    assert DECAY not in saved.values()
    assert [DECAY] not in saved.values()
    resumed = torch.optim.SGD([parameter()], lr=1.0)
    again = RateSchedule(resumed, DECAY)
    resumed.load_state_dict(saved_optimizer)
    again.load_state_dict(saved)
    assert rates(resumed, again, 3) == [0.5, 0.25, 0.0]


def test_torchs_adagrad_follows_it_with_upstreams_numbers() -> None:
    # Upstream's dense Adagrad has no epsilon; torch's takes 0.
    params = [nn.Parameter(torch.tensor(value)) for value in ([1.0, 2.0], [3.0, 4.0])]
    optimizer = torch.optim.Adagrad(params, lr=1.0, initial_accumulator_value=0.1, eps=0.0)
    RateSchedule(
        optimizer, PolynomialDecay(initial_learning_rate=3.0, decay_steps=10, end_learning_rate=11.0)
    )
    for _ in range(3):
        for param, grad in zip(params, (0.1, 0.01), strict=True):
            param.grad = torch.full((2,), grad)
        optimizer.step()
    assert params[0].tolist() == pytest.approx([-1.60260987, -0.602609873], abs=2e-6)
    assert params[1].tolist() == pytest.approx([2.71567917, 3.71567917], abs=2e-6)
