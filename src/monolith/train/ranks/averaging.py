"""Averaging: one gradient of the dense weights for all ranks, added up while backward still computes.

A rank's loss is a mean over its own batch. So its gradient counts as often as it has examples:

    (n_0 g_0 + n_1 g_1 + ...) / (n_0 + n_1 + ...)

is the gradient of the mean over all batches laid end to end. Weights are put into buckets, the last ones
first, since backward reaches them first; a bucket is sent when it is full and all before it have been. At the
end goes a word of each rank: how many examples, whether its batch may be trained on, which weights it used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from monolith.store.rank_groups import Collective
from monolith.train.ranks.config import RanksConfig


@dataclass(slots=True, eq=False)
class _Bucket:
    """Weights whose gradients go together."""

    weights: list[nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    """Places of weights that have no gradient yet, in this step."""
    finish: Callable[[], Tensor] | None = None
    """Waits for the sum, once the bucket was sent."""


class AveragedGradients:
    """Those of one model's dense weights: `Together`, as ranks are. Used by the training thread.

    Args:
        weights: In the same order on every rank.
        collective: Nobody else's.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], collective: Collective, config: RanksConfig | None = None
    ) -> None:
        self._weights = list(weights)
        self._collective = collective
        self._config = config or RanksConfig()
        self._buckets = _in_buckets(self._weights, self._config.bucket_bytes)
        self._bucket_of = {id(w): bucket for bucket in self._buckets for w in bucket.weights}
        self._examples = 0
        self._weight = 1.0
        """What gradients are multiplied by on their way."""
        self._next = len(self._buckets)
        """The bucket to be sent next; outside of a step, none."""
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin(self, examples: int) -> None:
        self._examples = examples
        self._weight = float(examples)
        if self._config.half_gradients:  # whose range is small: weighted by the share of all examples
            self._weight /= max(float(self._collective.sum(torch.tensor(float(examples)))), 1.0)
        self._next = 0
        for bucket in self._buckets:
            bucket.waits_for = {id(weight) for weight in bucket.weights}
            bucket.finish = None

    @torch.no_grad()
    def finish(self, trouble: str | None) -> str | None:
        used = [float(weight.grad is not None) for weight in self._weights]
        self._send_ready(all_of_them=True)
        word = torch.tensor([float(self._examples), float(trouble is not None), *used], dtype=torch.float64)
        summed = self._collective.sum(word)
        examples, troubled, *users = summed.tolist()
        total = 1.0 if self._config.half_gradients else max(examples, 1.0)
        self._take(total, {id(w): many for w, many in zip(self._weights, users, strict=True)})
        if not troubled:
            return None
        return trouble or "the loss or a gradient of another rank's batch is NaN or infinite"

    def add_up(self, squares: Tensor) -> Tensor:
        return self._collective.sum(squares.clone())

    def _note(self, weight: Tensor) -> None:
        """Hear from backward that a gradient is there."""
        bucket = self._bucket_of[id(weight)]
        bucket.waits_for.discard(id(weight))
        if self._next < len(self._buckets):
            self._send_ready()

    def _send_ready(self, *, all_of_them: bool = False) -> None:
        """Send what is complete, in the order of buckets; at the end, whatever is left."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waits_for and not all_of_them:
                return
            self._next += 1
            if not self._config.skip_allreduce:
                bucket.finish = self._collective.begin_sum(self._packed(bucket))

    @torch.no_grad()
    def _packed(self, bucket: _Bucket) -> Tensor:
        """Return the gradients of a bucket, weighted."""
        parts = [w.new_zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in bucket.weights]
        flat = torch.cat(parts).mul_(self._weight)
        return flat.half() if self._config.half_gradients else flat

    def _take(self, total: float, users: dict[int, float]) -> None:
        """Make every gradient the mean over all examples; None where no rank has one."""
        for bucket in self._buckets:
            if bucket.finish is None:
                continue
            flat = bucket.finish().to(bucket.weights[0].dtype).div_(total)
            parts = torch.split(flat, [weight.numel() for weight in bucket.weights])
            for weight, part in zip(bucket.weights, parts, strict=True):
                weight.grad = part.view_as(weight) if users[id(weight)] else None


def _in_buckets(weights: Sequence[nn.Parameter], most_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    room = 0
    for weight in reversed(weights):
        size = weight.numel() * weight.element_size()
        like = buckets and (buckets[-1].weights[0].dtype, buckets[-1].weights[0].device)
        if not buckets or size > room or like != (weight.dtype, weight.device):
            buckets.append(_Bucket([]))
            room = most_bytes
        buckets[-1].weights.append(weight)
        room -= size
    return buckets
