"""Ops of dense optimizers and clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vectors.case import Case, floats

from monolith.nn.gradients import clip_by_global_norm
from monolith.nn.optimizers import Adamom, RMSprop, Shampoo
from monolith.nn.optimizers.dense_optimizer import RateSchedule
from monolith.table import ConstantRate, PolynomialDecay
from monolith.table.config import LearningRate


def adagrad(params: list[Tensor], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, eps=0.0, **settings)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": adagrad,
    "adamom": Adamom,
    "rmsprop": RMSprop,
    "sgd": torch.optim.SGD,
    "shampoo": Shampoo,
}


def rate_of(spec: Any) -> LearningRate:
    """Read `0.1` or `{"polynomial_decay": {...}}`."""
    return PolynomialDecay(**spec["polynomial_decay"]) if isinstance(spec, Mapping) else ConstantRate(spec)


def optimizer_of(params: list[Tensor], spec: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Read `{"type": .., "learning_rate" or "lr": .., ...}`; what is absent is the optimizer's default."""
    settings = {"lr" if name == "learning_rate" else name: value for name, value in spec.items()}
    return OPTIMIZERS[settings.pop("type")](params, **settings)


def dense_optimizer(case: Case) -> Any:
    params: list[Tensor] = [nn.Parameter(floats(value)) for value in case.inputs["vars"]]
    optimizer = optimizer_of(params, {**case.params, "lr": 1.0})
    schedule = RateSchedule(optimizer, rate_of(case.params["lr"]))
    fixed = case.inputs.get("global_step_fixed_at")
    for _ in range(fixed or 0):
        schedule.step()
    for _ in range(case.inputs["num_steps"]):
        for param, grad in zip(params, case.inputs["grads"], strict=True):
            param.grad = floats(grad)
        optimizer.step()
        if fixed is None:
            schedule.step()
    return {"vars": [param.tolist() for param in params]}


def dense_optimizer_steps(case: Case) -> Any:
    param = nn.Parameter(floats(case.inputs["var"]))
    optimizer = optimizer_of([param], case.params)
    values, slots = [], []
    for grad in case.inputs["grads"]:
        param.grad = floats(grad)
        optimizer.step()
        values.append(param.tolist())
        # A slot that is one number stands for a tensor of it.
        slots.append(
            {name: (torch.zeros_like(param) + slot).tolist() for name, slot in optimizer.state[param].items()}
        )
    return {"vars": values, "slots": slots}


def shampoo(case: Case) -> Any:
    param = nn.Parameter(floats(case.inputs["var"]))
    optimizer = optimizer_of([param], {"type": "shampoo", **case.params})
    values = []
    for grad, step in zip(case.inputs["grads"], case.inputs["global_steps"], strict=True):
        optimizer.state[param]["step"] = step
        param.grad = floats(grad)
        optimizer.step()
        values.append(param.tolist())
    return {"vars": values}


def clip(case: Case) -> Any:
    tensors = [torch.from_numpy(np.array(value, dtype=np.float32)) for value in case.inputs["tensors"]]
    clipped, norm = clip_by_global_norm(tensors, case.params["clip_norm"], case.inputs.get("use_norm"))
    return {"clipped": [tensor.tolist() for tensor in clipped], "norm": norm}


OPS: dict[str, Callable[[Case], Any]] = {
    "clip_by_global_norm": clip,
    "dense_optimizer": dense_optimizer,
    "dense_optimizer_steps": dense_optimizer_steps,
    "shampoo": shampoo,
}
