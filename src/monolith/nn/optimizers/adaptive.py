"""AdaMom and RMSProp: gradients scaled by an average of their squares, with momentum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.nn.optimizers.dense_optimizer import DenseOptimizer, Group, Rate, State, rest_of


class Adamom(DenseOptimizer):
    """One step, with `g = grad + weight_decay * param`:

        m = mom_decay * m + (1 - mom_decay) * g
        v = ada_decay * v + g^2
        c = ada_decay * c + 1
        param -= lr * m / sqrt(v / c + epsilon)

    `c` counts what `v` has summed, so `v / c` is a true average from the first step
    on. It is the same for all elements of a parameter, and kept once: a number.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: A number, a tensor of one element, or a function of the step.
        ada_decay: How much of `v` stays per step; 1 forgets nothing.
        mom_decay: How much of `m` stays per step.
        epsilon: Keeps the denominator above 0.
        weight_decay: Pull towards 0, as part of the gradient.
        update_slots: False moves the parameter by the state as it is, and leaves the
            gradient out of account.
        use_v2: Adds `epsilon` after the root: `sqrt(v / c) + epsilon`.
        foreach: Fused operations: yes, no, or None for where they pay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 5e-6,
        *,
        ada_decay: float = 0.9999,
        mom_decay: float = 0.99,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        update_slots: bool = True,
        use_v2: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            foreach,
            ada_decay=ada_decay,
            mom_decay=mom_decay,
            epsilon=epsilon,
            weight_decay=weight_decay,
            update_slots=update_slots,
            use_v2=use_v2,
        )

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


class RMSprop(DenseOptimizer):
    """One step, with `g = grad + weight_decay * param`:

        v = beta2 * v + (1 - beta2) * g^2
        m = beta1 * m + lr * g / sqrt(v + epsilon)
        param -= m

    The rate is inside `m`: lowering it slows what is added, not what is under way.
    A table's `Rmsprop` is another rule, without `m`.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: A number, a tensor of one element, or a function of the step.
        beta1: How much of `m` stays per step.
        beta2: How much of `v` stays per step.
        epsilon: Keeps the denominator above 0.
        weight_decay: Pull towards 0, as part of the gradient.
        update_slots: False does the last line alone: the parameter glides on by the
            `m` it has, whatever the gradient and the rate. Upstream then changes
            nothing at all, which nobody needs an optimizer for; this is what the
            same switch does in `Adamom`.
        use_v2: Sums squares, `v = beta2 * v + g^2`, and adds `epsilon` after the
            root: `sqrt(v) + epsilon`.
        foreach: Fused operations: yes, no, or None for where they pay.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 5e-6,
        *,
        beta1: float = 0.99,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        update_slots: bool = True,
        use_v2: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            foreach,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            update_slots=update_slots,
            use_v2=use_v2,
        )

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
