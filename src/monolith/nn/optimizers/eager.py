"""torch's optimizers without torch's compiler, which takes longer to import than a small run takes.

An optimizer of torch imports `torch._dynamo` when it is first used, only to tell the compiler which methods
to leave alone. That takes 1.5 s and a thousand modules, also where nobody compiles anything. Each of these
methods is a wrapper that says so and then calls what it wraps; here what it wraps is called at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, Optimizer


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
        inspect.unwrap(Optimizer.zero_grad)(self, set_to_none)


class EagerAdam(EagerOptimizer, Adam):
    """torch's Adam, bit for bit. A checkpoint of either restores into the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return inspect.unwrap(Adam.step)(self, closure)


def rule_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose rule and state an optimizer has: torch's Adam for an EagerAdam, else its own."""
    return Adam if type(optimizer) is EagerAdam else type(optimizer)
