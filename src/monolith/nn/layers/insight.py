"""Insight: what a model makes of each of its features.

The first layer multiplies the features of a row, lying side by side, with one weight.
Cut at the borders of the features, the product falls apart into what each of them
contributed; summaries of it show which features a model lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_shape, check_widths
from monolith.nn.layers.dense import Dense


def feature_insight(
    inputs: Tensor, weight: Tensor, segment_sizes: Sequence[int], aggregate: bool = False
) -> Tensor:
    """Return the share of `inputs @ weight` that each segment of the inputs contributes.

    Differentiable in `inputs` and `weight`.

    Args:
        inputs: float of shape (batch, e): segments side by side.
        weight: float of shape (e, k).
        segment_sizes: Width of each of the s segments; they sum to e.

    Returns:
        float of shape (batch, s * k): column `i * k + j` is segment i's part of output j.
        With `aggregate`, (batch, s): the squares of these parts, summed over the k outputs.
    """
    sizes = check_widths("feature_insight", "segment_sizes", segment_sizes)
    check_shape("feature_insight", "inputs", inputs, None, None)
    check_shape("feature_insight", "weight", weight, inputs.shape[1], None)
    if sum(sizes) != inputs.shape[1]:
        raise LayerArgumentError(
            f"feature_insight: segment_sizes must sum to the width of the inputs, {inputs.shape[1]}, "
            f"got {sum(sizes)} from {list(sizes)}"
        )
    if len(set(sizes)) == 1:  # one batched product instead of s small ones
        segments = (len(sizes), sizes[0])
        parts = torch.einsum(
            "bse,sek->bsk", torch.unflatten(inputs, 1, segments), torch.unflatten(weight, 0, segments)
        )
        return parts.square().sum(-1) if aggregate else parts.flatten(1)
    pieces = [
        x @ w
        for x, w in zip(torch.split(inputs, list(sizes), 1), torch.split(weight, list(sizes), 0), strict=True)
    ]
    if aggregate:
        return torch.stack([piece.square().sum(-1) for piece in pieces], 1)
    return torch.cat(pieces, 1)


def watch_segments(
    dense: Dense,
    segment_sizes: Sequence[int],
    report: Callable[[Tensor], None],
    *,
    aggregate: bool = True,
) -> RemovableHandle:
    """Report the feature insight of a layer on each of its training steps.

    `report` gets what `feature_insight` returns, without gradient, after each forward
    pass in training mode. For an MLP, watch `mlp.first`.

    Returns:
        A handle whose `remove()` ends the watch.
    """
    sizes = check_widths("watch_segments", "segment_sizes", segment_sizes)
    if sum(sizes) != dense.in_features:
        raise LayerArgumentError(
            f"watch_segments: segment_sizes must sum to the layer's in_features, {dense.in_features}, "
            f"got {sum(sizes)} from {list(sizes)}"
        )

    def tell(module: nn.Module, arguments: tuple[Any, ...], _output: Tensor) -> None:
        if module.training:
            with torch.no_grad():
                rows = arguments[0].reshape(-1, dense.in_features)
                report(feature_insight(rows, dense.kernel(), sizes, aggregate))

    return dense.register_forward_hook(tell)


def fid_counter(counter: Tensor, counter_threshold: float, step: float = 1.0) -> Tensor:
    """Count how often a row was seen, in a slice of its own embedding.

    Returns `min(counter + step, counter_threshold)`, this sighting included. What
    counts is the gradient: it is `-step` whatever comes in, and 0 from the threshold
    on, so that SGD with learning rate 1 adds `step` to the stored slice. For this the
    slice must be stored in 32 bits (in 16, keep the threshold at 60000 or less), and no
    loss but this may reach it.

    Raises:
        LayerArgumentError: The step or the threshold is not above 0.
    """
    if step <= 0 or counter_threshold <= 0:
        raise LayerArgumentError(
            f"fid_counter: step and counter_threshold must be above 0, got {step} and {counter_threshold}"
        )
    counted: Tensor = _FidCounter.apply(counter, float(counter_threshold), float(step))  # type: ignore[no-untyped-call]
    return counted


class _FidCounter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: Tensor, threshold: float, step: float) -> Tensor:
        ctx.save_for_backward(counter)
        ctx.threshold, ctx.step = threshold, step
        return (counter + step).clamp(max=threshold)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (counter,) = ctx.saved_tensors
        constant = torch.full_like(gradient, -ctx.step)
        return constant.masked_fill_(counter >= ctx.threshold, 0), None, None
