"""Gradients in stages: from variables in the middle of a graph back to their inputs.

A step may be cut in two: gradients of the loss by what a lookup returned come
first, perhaps from elsewhere, and are then carried on to what the lookup read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from monolith.errors import GradientError

Key = TypeVar("Key", bound=Hashable)


def propagate_back_gradients(
    grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
    xs: Iterable[Tensor],
    valid_var_set: Iterable[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """Carry gradients of some variables back to `xs`.

    Args:
        grads_and_vars: A gradient of each variable's shape. None adds nothing.
        xs: What to differentiate by.
        valid_var_set: The variables that may appear; None or none at all allows any.
        retain_graph: Whether to keep the graph for another call.

    Returns:
        One gradient per x, summed over the variables; None for an x that none of
        them depends on.

    Raises:
        GradientError: A variable is not one of `valid_var_set`.
    """
    allowed = {id(var) for var in valid_var_set or ()}
    outputs, grads = [], []
    for grad, var in grads_and_vars:
        if allowed and id(var) not in allowed:
            raise GradientError(
                f"Invalid variables in the input: one of shape {tuple(var.shape)} is not among "
                f"the {len(allowed)} whose gradients may be propagated back"
            )
        if grad is not None and var.requires_grad:
            outputs.append(var)
            grads.append(grad)
    sources = list(xs)
    reachable = [i for i, x in enumerate(sources) if x.requires_grad]
    result: list[Tensor | None] = [None] * len(sources)
    if outputs and reachable:
        found = torch.autograd.grad(
            outputs,
            [sources[i] for i in reachable],
            grads,
            retain_graph=retain_graph,
            allow_unused=True,
        )
        for i, grad in zip(reachable, found, strict=True):
            result[i] = grad
    return result


def propagate_back_dict_gradients(
    grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
    x_to_key: Mapping[Tensor, Key],
    valid_var_set: Iterable[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> dict[Key, list[tuple[Tensor | None, Tensor]]]:
    """Carry gradients back as `propagate_back_gradients` does; return `(gradient, x)` by key, in order."""
    dxs = propagate_back_gradients(grads_and_vars, x_to_key, valid_var_set, retain_graph=retain_graph)
    grouped: dict[Key, list[tuple[Tensor | None, Tensor]]] = {}
    for dx, (x, key) in zip(dxs, x_to_key.items(), strict=True):
        grouped.setdefault(key, []).append((dx, x))
    return grouped
