"""Selection: how much each feature counts, and how often each ID occurs.

`feature_insight` splits the first layer's product at the borders of the features, so that summaries show
how much each feature contributes. `ItemFrequency` estimates from the stream how many copies of an ID a
batch is expected to hold, which a sampled softmax needs: it counts the steps between two appearances of an
ID in several hashed rows and takes the least frequent bucket, because a collision can only make an ID look
more frequent. `LogitCorrection` adds `-log(rate)` to the logit of a downsampled negative for the loss
alone, so that the uncorrected logit learns the true odds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import (
    MLP,
    Activation,
    Dense,
    WeightInit,
    check_positive,
    check_shape,
    check_widths,
    glorot_uniform,
    make_activation,
)


class SeNet(nn.Module):
    """Squeeze and excite: a row's features, each seen as its mean, decide how much each counts.

    Args:
        num_features: The n features of a row.
        cmp_dim: Width of the hidden layer (relu) between the n means and the n weights (sigmoid).
    """

    def __init__(self, num_features: int, cmp_dim: int, *, kernel_init: WeightInit = glorot_uniform) -> None:
        super().__init__()
        check_positive("SeNet", num_features=num_features, cmp_dim=cmp_dim)
        self.num_features = num_features
        self.excite = MLP(
            num_features, (cmp_dim, num_features), activations=("relu", "sigmoid"), kernel_init=kernel_init
        )

    @overload
    def forward(self, features: Tensor) -> Tensor: ...

    @overload
    def forward(self, features: Sequence[Tensor]) -> list[Tensor]: ...

    def forward(self, features: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Weight features, stacked as (batch, n, dim) or as a list of n tensors (batch, dim of its own).

        Returns:
            The same features, weighted, in the form they came in.
        """
        if isinstance(features, Tensor):
            check_shape("SeNet", "features", features, None, self.num_features, None)
            weights: Tensor = self.excite(features.mean(-1))
            return features * weights.unsqueeze(-1)
        if len(features) != self.num_features:
            raise LayerArgumentError(
                f"SeNet: features must be {self.num_features} tensors, got {len(features)}"
            )
        for feature in features:
            check_shape("SeNet", "each feature", feature, None, None)
        weights = self.excite(torch.stack([feature.mean(-1) for feature in features], 1))
        return [feature * weights[:, i : i + 1] for i, feature in enumerate(features)]


class IRazor(nn.Module):
    """Learns how wide each feature's embedding needs to be.

    Each feature has one logit per width of `nas_space`. Their softmax, sharp at a low
    temperature, says how likely the feature keeps only its first so many floats, and
    every float is scaled by the probability that it is kept. After the search, the
    likeliest width is the one to use.

    Args:
        nas_space: The widths to choose from, rising; 0 drops the feature, the last is the full width.
        feature_weights: What one float of each feature costs, in `auxiliary_loss`: one
            number for all features, or one each. None makes width free.
    """

    keeps: Tensor
    widths: Tensor
    prices: Tensor | None

    def __init__(
        self,
        num_features: int,
        nas_space: Sequence[int],
        *,
        temperature: float = 0.05,
        feature_weights: float | Sequence[float] | None = None,
        logit_init: WeightInit = nn.init.zeros_,
    ) -> None:
        super().__init__()
        check_positive("IRazor", num_features=num_features)
        space = tuple(nas_space)
        if len(space) < 2 or space[0] < 0 or any(a >= b for a, b in pairwise(space)):
            raise LayerArgumentError(
                f"IRazor: nas_space must be two or more rising widths from 0 on, got {list(space)}"
            )
        if temperature <= 0:
            raise LayerArgumentError(f"IRazor: temperature must be above 0, got {temperature}")
        self.nas_space = space
        self.temperature = temperature
        self.logits = nn.Parameter(torch.empty(num_features, len(space)))
        logit_init(self.logits)
        widths = torch.tensor(space, dtype=torch.float32)
        self.register_buffer("widths", widths, persistent=False)
        self.register_buffer(
            "keeps", (torch.arange(space[-1]) < widths.unsqueeze(1)).to(torch.float32), persistent=False
        )
        prices = None
        if feature_weights is not None:
            prices = torch.as_tensor(feature_weights, dtype=torch.float32)
            if prices.shape not in {(), (num_features,)}:
                raise LayerArgumentError(
                    f"IRazor: feature_weights must be one number or {num_features}, got {prices.numel()}"
                )
        self.register_buffer("prices", prices, persistent=False)

    def choice_weights(self) -> Tensor:
        """Return how likely each width is for each feature: float of shape (n, widths), rows sum to 1."""
        return (self.logits / self.temperature).softmax(-1)

    def auxiliary_loss(self) -> Tensor:
        """Return the expected width of each feature times its weight, summed: add it to the loss."""
        if self.prices is None:
            return self.logits.new_zeros(())
        return (self.prices * (self.choice_weights() @ self.widths)).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Scale (batch, n, full width) by the probability of each float to be kept."""
        check_shape("IRazor", "x", x, None, self.logits.shape[0], self.nas_space[-1])
        return x * (self.choice_weights() @ self.keeps)


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


_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161, -8796714831421723037)
"""Multipliers of the rows' hashes: odd, with bits all over."""


class ItemFrequency(nn.Module):
    """Estimates how many copies of an id a batch has.

    What it knows is in buffers, and so in checkpoints. They are numbers throughout: where several workers
    count, a checkpoint has their mean.

    Args:
        buckets: Of each row, a power of two; 16 bytes each.
        rows: Hashes of each id, 1 to 4.
        rate: The share of the newest sighting in an estimate, above 0 and at most 1.
    """

    step: Tensor
    seen: Tensor
    gap: Tensor
    copies: Tensor

    def __init__(self, buckets: int = 1 << 16, rows: int = 2, rate: float = 0.05) -> None:
        super().__init__()
        if buckets < 2 or buckets & (buckets - 1):
            raise LayerArgumentError(f"item frequency: buckets must be a power of two, got {buckets}")
        if not 1 <= rows <= len(_ODD):
            raise LayerArgumentError(f"item frequency: rows must be 1 to {len(_ODD)}, got {rows}")
        if not 0 < rate <= 1:
            raise LayerArgumentError(f"item frequency: rate must be above 0 and at most 1, got {rate}")
        self._bits = buckets.bit_length() - 1
        self._rate = rate
        self.register_buffer("step", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(rows, buckets, dtype=torch.float64))
        self.register_buffer("gap", torch.zeros(rows, buckets))
        self.register_buffer("copies", torch.ones(rows, buckets))

    @torch.no_grad()
    def observe(self, ids: Tensor, counted: Tensor | None = None) -> None:
        """Take in the ids of one batch, with as many copies as it has of each.

        Args:
            ids: int64 of shape (n,).
            counted: bool of shape (n,): which of them are copies; by default all. The rest change nothing.
        """
        self.step += 1
        ids = ids.to(self.seen.device)
        ones = torch.ones_like(ids) if counted is None else counted.long()
        for row in range(len(self.seen)):
            # Sizes do not depend on values, so that a step can be captured. Copies of an id, and ids that
            # share a bucket, write the same number to it.
            there = self._buckets(ids, row)
            seen, gap, copies = self.seen[row], self.gap[row], self.copies[row]
            counts = torch.zeros(seen.shape, dtype=torch.int64, device=seen.device).scatter_add_(
                0, there, ones
            )
            known, came = seen[there] > 0, counts[there] > 0
            since, now = (self.step - seen[there]).float(), counts[there].float()
            moved = torch.where(known, torch.lerp(gap[there], since, self._rate), since)
            gap[there] = torch.where(came, moved, gap[there])
            moved = torch.where(known, torch.lerp(copies[there], now, self._rate), now)
            copies[there] = torch.where(came, moved, copies[there])
            seen[there] = torch.where(came, self.step, seen[there])

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the log of how many copies of each id a batch is expected to have: float of shape (n,).

        An id that was never seen counts as if the next batch had it first.
        """
        found = []
        ids = ids.to(self.seen.device)
        for row in range(len(self.seen)):
            at = self._buckets(ids, row)
            gap = torch.where(self.seen[row][at] > 0, self.gap[row][at], (self.step + 1).float())
            found.append(self.copies[row][at].log() - gap.log())
        return torch.stack(found).amin(0)

    def _buckets(self, ids: Tensor, row: int) -> Tensor:
        """Return the bucket of each id: the high bits of a product, which every bit of the id reaches."""
        mixed = (ids ^ (ids >> 32)) * _ODD[row]
        return (mixed >> (64 - self._bits)) & ((1 << self._bits) - 1)

    def extra_repr(self) -> str:
        return f"buckets={1 << self._bits}, rows={len(self.seen)}, rate={self._rate}"


def correct_logits(
    logits: Tensor, sample_rate: Tensor | float | None = None, sample_bias: bool = False
) -> Tensor:
    """Return the logits that the loss should see.

    Args:
        logits: float of any shape.
        sample_rate: How likely each row was to be kept, above 0: one number, or a tensor that
            broadcasts to the logits. Adds `-log(rate)`.
        sample_bias: Replace the logit by `log sigmoid(logit)`, for rows that were drawn by
            the model's own prediction.
    """
    corrected = functional.logsigmoid(logits) if sample_bias else logits
    if sample_rate is None:
        return corrected
    if isinstance(sample_rate, Tensor):
        return corrected - torch.log(sample_rate)
    if not sample_rate > 0:
        raise LayerArgumentError(f"logit correction: sample_rate must be above 0, got {sample_rate}")
    return corrected - math.log(sample_rate)


class LogitCorrection(nn.Module):
    """`correct_logits` as a layer, with an activation after it if wanted."""

    def __init__(self, *, sample_bias: bool = False, activation: Activation = None) -> None:
        super().__init__()
        self.sample_bias = sample_bias
        self.activation = make_activation(activation, 1)

    def forward(self, logits: Tensor, sample_rate: Tensor | float | None = None) -> Tensor:
        corrected: Tensor = self.activation(correct_logits(logits, sample_rate, self.sample_bias))
        return corrected
