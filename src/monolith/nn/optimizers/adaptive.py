"""AdaMom and RMSProp: gradients scaled by an average of their squares, with momentum."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.nn.optimizers.dense_optimizer import DenseOptimizer, Group, Rate, State, rest_of


class AdamomSettings(TypedDict, total=False):
    """The settings of `Adamom`, for all parameters or for a group of them."""

    ada_decay: float
    """How much of `v` stays per step, by default 0.9999; 1 forgets nothing."""
    mom_decay: float
    """How much of `m` stays per step, by default 0.99."""
    epsilon: float
    """Keeps the denominator above 0; by default 1e-6."""
    weight_decay: float
    """Pull towards 0, as part of the gradient; by default 0."""
    update_slots: bool
    """False moves the parameter by its state and ignores the gradient; by default True."""
    use_v2: bool
    """Whether `epsilon` is added after the root, `sqrt(v / c) + epsilon`; by default False."""


class Adamom(DenseOptimizer):
    """One step, with `g = grad + weight_decay * param`:

        m = mom_decay * m + (1 - mom_decay) * g
        v = ada_decay * v + g^2
        c = ada_decay * c + 1
        param -= lr * m / sqrt(v / c + epsilon)

    `c` counts the gradients in `v`, so `v / c` is a true average from the first step on. It is the same for
    all elements of a parameter and is stored once, as a number.

    Shapes: `m` and `v` have the shape of the parameter.

    Example: `Adamom([w], lr=0.1)` with w = 1 and grad = 2 gives m = 0.02, v = 4, c = 1 after one step, and
    w = 1 - 0.1 * 0.02 / 2 = 0.999.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: A number, a tensor of one element, or a function of the step.
        foreach: Whether to use fused operations; None uses them on a GPU.
        settings: See `AdamomSettings`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 5e-6,
        *,
        foreach: bool | None = None,
        **settings: Unpack[AdamomSettings],
    ) -> None:
        defaults = AdamomSettings(
            ada_decay=0.9999, mom_decay=0.99, epsilon=1e-6, weight_decay=0.0, update_slots=True, use_v2=False
        )
        super().__init__(params, lr, foreach, defaults, settings)

    def _check_settings(self, group: Group) -> None:
        self._check_range("ada_decay", group["ada_decay"], at_most=1)
        self._check_range("mom_decay", group["mom_decay"], at_most=1)
        self._check_range("epsilon", group["epsilon"])
        self._check_range("weight_decay", group["weight_decay"])

    def _new_state(self, param: Tensor) -> State:
        return {"m": torch.zeros_like(param), "v": torch.zeros_like(param), "c": 0.0}

    def _update(self, param: Tensor, grad: Tensor, state: State, group: Group, rate: float) -> None:
        m, v = state["m"], state["v"]
        if group["update_slots"]:
            if group["weight_decay"]:
                grad = grad.add(param, alpha=group["weight_decay"])
            m.lerp_(grad, rest_of(group["mom_decay"], m.dtype))
            v.mul_(group["ada_decay"]).addcmul_(grad, grad)
            state["c"] = group["ada_decay"] * state["c"] + 1
        average = v / _count(state)
        if group["use_v2"]:
            denominator = average.sqrt_().add_(group["epsilon"])
        else:
            denominator = average.add_(group["epsilon"]).sqrt_()
        param.addcdiv_(m, denominator, value=-rate)

    def _update_together(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, rate: float
    ) -> None:
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        if group["update_slots"]:
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            torch._foreach_lerp_(m, grads, rest_of(group["mom_decay"], m[0].dtype))
            torch._foreach_mul_(v, group["ada_decay"])
            torch._foreach_addcmul_(v, grads, grads)
            for state in states:
                state["c"] = group["ada_decay"] * state["c"] + 1
        denominators = torch._foreach_div(v, [_count(state) for state in states])
        if group["use_v2"]:
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["epsilon"])
        else:
            torch._foreach_add_(denominators, group["epsilon"])
            torch._foreach_sqrt_(denominators)
        torch._foreach_addcdiv_(params, m, denominators, value=-rate)


def _count(state: State) -> float:
    # Nothing summed yet leaves `v` at 0, whatever it is divided by.
    return float(state["c"]) or 1.0


class RMSpropSettings(TypedDict, total=False):
    """The settings of `RMSprop`, for all parameters or for a group of them."""

    beta1: float
    """How much of `m` stays per step, by default 0.99."""
    beta2: float
    """How much of `v` stays per step, by default 0.999."""
    epsilon: float
    """Keeps the denominator above 0; by default 1e-8."""
    weight_decay: float
    """Pull towards 0, as part of the gradient; by default 0."""
    update_slots: bool
    """False applies only the last line: the parameter moves by its `m`, whatever the gradient and the rate.
    The original then changes nothing at all; the same switch of `Adamom` works like this one."""
    use_v2: bool
    """Whether squares are summed, `v = beta2 * v + g^2`, and `epsilon` is added after the root,
    `sqrt(v) + epsilon`; by default False."""


class RMSprop(DenseOptimizer):
    """One step, with `g = grad + weight_decay * param`:

        v = beta2 * v + (1 - beta2) * g^2
        m = beta1 * m + lr * g / sqrt(v + epsilon)
        param -= m

    The rate is part of `m`: a lower rate affects later gradients, not the momentum that was gathered before.
    A table's `Rmsprop` is another rule, without `m`.

    Shapes: `m` and `v` have the shape of the parameter.

    Example: `RMSprop([w], lr=0.1, beta2=0.75)` with w = 1 and grad = 2 gives v = 1, m = 0.2 after one step,
    and w = 0.8.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: A number, a tensor of one element, or a function of the step.
        foreach: Whether to use fused operations; None uses them on a GPU.
        settings: See `RMSpropSettings`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 5e-6,
        *,
        foreach: bool | None = None,
        **settings: Unpack[RMSpropSettings],
    ) -> None:
        defaults = RMSpropSettings(
            beta1=0.99, beta2=0.999, epsilon=1e-8, weight_decay=0.0, update_slots=True, use_v2=False
        )
        super().__init__(params, lr, foreach, defaults, settings)

    def _check_settings(self, group: Group) -> None:
        self._check_range("beta1", group["beta1"], at_most=1)
        self._check_range("beta2", group["beta2"], at_most=1)
        self._check_range("epsilon", group["epsilon"])
        self._check_range("weight_decay", group["weight_decay"])

    def _new_state(self, param: Tensor) -> State:
        return {"m": torch.zeros_like(param), "v": torch.zeros_like(param)}

    def _update(self, param: Tensor, grad: Tensor, state: State, group: Group, rate: float) -> None:
        m, v = state["m"], state["v"]
        if group["update_slots"]:
            if group["weight_decay"]:
                grad = grad.add(param, alpha=group["weight_decay"])
            v.mul_(group["beta2"]).addcmul_(grad, grad, value=_weight_of_square(group, v.dtype))
            if group["use_v2"]:
                denominator = v.sqrt().add_(group["epsilon"])
            else:
                denominator = v.add(group["epsilon"]).sqrt_()
            m.mul_(group["beta1"]).addcdiv_(grad, denominator, value=rate)
        param.sub_(m)

    def _update_together(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, rate: float
    ) -> None:
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        if group["update_slots"]:
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            torch._foreach_mul_(v, group["beta2"])
            torch._foreach_addcmul_(v, grads, grads, value=_weight_of_square(group, v[0].dtype))
            if group["use_v2"]:
                denominators = torch._foreach_sqrt(v)
                torch._foreach_add_(denominators, group["epsilon"])
            else:
                denominators = torch._foreach_add(v, group["epsilon"])
                torch._foreach_sqrt_(denominators)
            torch._foreach_mul_(m, group["beta1"])
            torch._foreach_addcdiv_(m, grads, denominators, value=rate)
        torch._foreach_sub_(params, m)


def _weight_of_square(group: Group, dtype: torch.dtype) -> float:
    return 1.0 if group["use_v2"] else rest_of(group["beta2"], dtype)
