"""The base of the dense optimizers: learning rates, checks, fused updates of many small parameters.

torch's optimizers import `torch._dynamo` on first use, which takes 1.5 s and a thousand modules even if
nothing is compiled. Each of their methods wraps a plain function to tell the compiler to skip it;
`EagerOptimizer` calls the plain function directly.

A model has hundreds of small parameters, and launching a kernel on a GPU takes longer than running it on
one of them. `fusable_runs` groups tensors of one device and dtype, which one `_foreach_` operation can
update.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from monolith.errors import LayerArgumentError, SparseGradientError
from monolith.table import LearningRate


def fusable_runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return positions of `tensors` by device and dtype, each run in the order given."""
    runs: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        runs.setdefault((tensor.device, tensor.dtype), []).append(position)
    return list(runs.values())


class EagerOptimizer(Optimizer):
    """The base of our optimizers: torch's, but it does not import torch's compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.load_state_dict)(self, state_dict)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = inspect.unwrap(Optimizer.state_dict)(self)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            inspect.unwrap(Optimizer.zero_grad)(self, False)
            return
        # torch notes this in a profile, which takes longer than doing it.
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class EagerAdam(EagerOptimizer, Adam):
    """torch's Adam, bit for bit. A checkpoint of either restores into the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return inspect.unwrap(Adam.step)(self, closure)


def rule_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose rule and state an optimizer has: torch's Adam for an EagerAdam, else its own."""
    return Adam if type(optimizer) is EagerAdam else type(optimizer)


Rate: TypeAlias = float | Tensor | Callable[[int], float]
"""A learning rate: a number, a tensor of one element, or a function of the step."""

Group: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]


def rest_of(decay: float, dtype: torch.dtype) -> float:
    """Return `1 - decay` for the decay that is really applied.

    In single precision that is not 0.999 but 0.99900001: with 0.001 next to it the
    weights of an average would not sum to 1, and v would settle 13 millionths off.
    """
    return 1 - (decay if dtype is torch.float64 else float(np.float32(decay)))


class DenseOptimizer(EagerOptimizer, ABC):
    """A torch optimizer whose rate may also be a function of the step.

    The function gets the number of steps taken before this one, 0 at first: every group counts them as
    `group["step"]`. So a schedule of a table's segment, such as `PolynomialDecay`, can drive dense and sparse
    weights. If the rate is a number, torch's schedulers change `group["lr"]` as usual. A tensor is read once
    per step, so keep it on the CPU: reading from a GPU waits for it.

    Parameters without a gradient do not change. A step checks all gradients before it changes anything.

    Args:
        defaults: The settings of the rule, with their defaults; none by default.
        settings: The settings that the user passed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Rate,
        foreach: bool | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        for name in settings:
            if name not in defaults:
                raise TypeError(f"{self._name}: unknown setting {name!r}; it has {', '.join(defaults)}")
        super().__init__(params, {"lr": lr, "foreach": foreach, "step": 0, **defaults, **settings})

    @abstractmethod
    def _check_settings(self, group: Group) -> None:
        """Refuse settings the rule cannot work with."""

    @abstractmethod
    def _new_state(self, param: Tensor) -> State:
        """Return the state of a parameter that has seen no gradient."""

    @abstractmethod
    def _update(self, param: Tensor, grad: Tensor, state: State, group: Group, rate: float) -> None:
        """Take one step with one parameter."""

    @abstractmethod
    def _update_together(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group, rate: float
    ) -> None:
        """Take one step with many parameters of one device and dtype."""

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with settings of their own; their step count starts at that of the existing ones."""
        if self.param_groups:
            param_group.setdefault("step", self.param_groups[0]["step"])
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except LayerArgumentError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: If given, it is evaluated first, with gradients enabled.

        Returns:
            The value of `closure`.

        Raises:
            SparseGradientError: A gradient is sparse. No parameter has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        movable = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for params in movable:
            self._check_gradients(params)
        for group, params in zip(self.param_groups, movable, strict=True):
            self._step_group(group, params)
            group["step"] += 1
        return loss

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        rate = self._rate_of(group)
        grads = [p.grad for p in params if p.grad is not None]
        states = [self._state_of(p) for p in params]
        fused = group["foreach"]
        if fused is None:
            fused = all(p.is_cuda for p in params)
        if not fused:
            for param, grad, state in zip(params, grads, states, strict=True):
                self._update(param, grad, state, group, rate)
            return
        for run in fusable_runs(params):
            self._update_together(
                [params[i] for i in run], [grads[i] for i in run], [states[i] for i in run], group, rate
            )

    def state_dict(self) -> dict[str, Any]:
        """Return state and settings. A rate that is a function is given by its value: code is not state."""
        saved = super().state_dict()
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            packed["lr"] = self._rate_of(group) if callable(group["lr"]) else group["lr"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken. A rate that is a function here stays that function."""
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            if callable(rate):
                group["lr"] = rate

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _rate_of(self, group: Group) -> float:
        rate = group["lr"]
        return float(rate(group["step"]) if callable(rate) else rate)

    def _state_of(self, param: Tensor) -> State:
        state: State = self.state[param]
        if "m" not in state:  # which every rule here has; a `step` set before the first stays
            state.update({**self._new_state(param), **state})
        return state

    def _check_group(self, group: Group) -> None:
        for param in group["params"]:
            if not param.is_floating_point():
                raise LayerArgumentError(
                    f"{self._name}: parameters must be real floating-point numbers, got one of "
                    f"{str(param.dtype).removeprefix('torch.')} and shape {tuple(param.shape)}"
                )
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.numel() != 1:
            raise LayerArgumentError(
                f"{self._name}: a learning rate that is a tensor must have one element, "
                f"got shape {tuple(rate.shape)}"
            )
        if not callable(rate):
            self._check_range("lr", float(rate))
        self._check_settings(group)

    def _check_range(self, name: str, value: float, at_most: float = math.inf) -> None:
        if not 0 <= value <= at_most or value == math.inf:
            bound = "finite" if at_most == math.inf else f"at most {at_most:g}"
            raise LayerArgumentError(f"{self._name}: {name} must be at least 0 and {bound}, got {value!r}")

    def _check_gradients(self, params: Sequence[Tensor]) -> None:
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise SparseGradientError(
                    f"{self._name}: a parameter of shape {tuple(param.shape)} has a gradient of layout "
                    f"{str(param.grad.layout).removeprefix('torch.')}, and only dense ones are taken. "
                    "Use sparse=False in the layer it comes from, or keep those weights in a table."
                )


class RateSchedule(LRScheduler):
    """Sets each group's `lr` to `rate(step)`; call `step()` after the optimizer's.

    The rate is the whole rate, not a factor of the initial one. A table's segment takes the same functions,
    so that dense and sparse weights warm up and decay together. Optimizers of this package also take such a
    function as `lr`, and then need no scheduler.

    Args:
        optimizer: Any torch optimizer whose `lr` is a number.
        rates: One function of the step for all groups, or one per group. For example those
            of `monolith.table`: `PolynomialDecay`, `ConstantRate`, `warmup(...)`.
        last_epoch: The last step taken, when a run is resumed; -1 starts at step 0.
    """

    def __init__(
        self, optimizer: Optimizer, rates: LearningRate | Sequence[LearningRate], last_epoch: int = -1
    ) -> None:
        groups = len(optimizer.param_groups)
        self._rates = list(rates) if isinstance(rates, Sequence) else [rates] * groups
        if len(self._rates) != groups:
            raise LayerArgumentError(
                f"rate schedule: got {len(self._rates)} rates for {groups} groups of parameters; "
                "give one for all, or one per group"
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group at this step."""
        return [rate(self.last_epoch) for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule without the functions: code is not state."""
        return {name: value for name, value in super().state_dict().items() if name != "_rates"}
