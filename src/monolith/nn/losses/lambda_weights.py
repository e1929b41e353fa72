"""Lambda weights: what swapping two items of a list would change in the metric one cares about.

A pairwise loss treats all mistakes alike. Weighted so, it minds those at the top.
Labels below 0 are padding and weigh nothing; ranks count from 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monolith.errors import LayerArgumentError


def exponential_gain(labels: Tensor) -> Tensor:
    """`2^label - 1`."""
    return torch.exp2(labels) - 1


def log_discount(ranks: Tensor) -> Tensor:
    """`1 / log(1 + rank)`."""
    return 1 / torch.log1p(ranks)


def reciprocal_discount(ranks: Tensor) -> Tensor:
    """`1 / rank`."""
    return 1 / ranks


class LambdaWeight:
    """Weights for the pairs or for the items of lists; a kind that has not both refuses the other.

    Both methods take labels and ranks, float of shape (batch, n).
    """

    def pair_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:  # noqa: ARG002
        """Return a weight for each pair, 0 or more, of shape (batch, n, n), symmetric."""
        raise LayerArgumentError(f"{type(self).__name__} has no weights for pairs, which this loss needs")

    def item_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:  # noqa: ARG002
        """Return a weight for each item, of shape (batch, n)."""
        raise LayerArgumentError(f"{type(self).__name__} has no weights for items, which this loss needs")


class DCGLambdaWeight(LambdaWeight):
    """What a swap changes in DCG: difference of gains times difference of discounts.

    The discount of a pair mixes two views: of how far apart the items are,
    `|D(|i - j|) - D(|i - j| + 1)|`, and of where they stand, `|D(i) - D(j)|`.

    Args:
        topn: Positions that count; a pair weighs nothing when both items are below. None for all.
        normalized: Divide the gains by the greatest DCG of the list, which makes it NDCG.
        smooth_fraction: Share of the second view, from 0 to 1.
    """

    def __init__(
        self,
        *,
        topn: int | None = None,
        gain: Callable[[Tensor], Tensor] = exponential_gain,
        discount: Callable[[Tensor], Tensor] = log_discount,
        normalized: bool = True,
        smooth_fraction: float = 0.0,
    ) -> None:
        _check_topn(topn)
        if not 0 <= smooth_fraction <= 1:
            raise LayerArgumentError(f"smooth_fraction must be from 0 to 1, got {smooth_fraction}")
        self.topn = topn
        self.gain = gain
        self.discount = discount
        self.normalized = normalized
        self.smooth_fraction = smooth_fraction

    def pair_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:
        gains = self._gains(labels)
        discounts = _pair_discounts(ranks, self.discount, self.topn, self.smooth_fraction)
        return _differences(gains).abs() * discounts * _both_valid(labels)

    def item_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:
        return self._gains(labels) * self.discount(ranks)

    def _gains(self, labels: Tensor) -> Tensor:
        gains = self.gain(labels.clamp(min=0)).masked_fill(labels < 0, 0)
        if not self.normalized:
            return gains
        return gains * inverse_max_dcg(labels, self.gain, self.discount, self.topn)


class ReciprocalRankLambdaWeight(LambdaWeight):
    """What a swap changes in the reciprocal rank: labels of 1 or more are relevant.

    Args:
        topn, smooth_fraction: As for `DCGLambdaWeight`.
    """

    def __init__(self, *, topn: int | None = None, smooth_fraction: float = 0.0) -> None:
        _check_topn(topn)
        if not 0 <= smooth_fraction <= 1:
            raise LayerArgumentError(f"smooth_fraction must be from 0 to 1, got {smooth_fraction}")
        self.topn = topn
        self.smooth_fraction = smooth_fraction

    def pair_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:
        relevant = (labels >= 1).to(ranks.dtype)
        discounts = _pair_discounts(ranks, reciprocal_discount, self.topn, self.smooth_fraction)
        return _differences(relevant).abs() * discounts * _both_valid(labels)


class PrecisionLambdaWeight(LambdaWeight):
    """What a swap changes in precision at `topn`: 1 if just one item is relevant and just one is inside."""

    def __init__(self, topn: int) -> None:
        _check_topn(topn)
        self.topn = topn

    def pair_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:
        relevant, inside = labels >= 1, ranks <= self.topn
        unlike = relevant.unsqueeze(2) != relevant.unsqueeze(1)
        across = inside.unsqueeze(2) != inside.unsqueeze(1)
        return (unlike & across).to(ranks.dtype) * _both_valid(labels)


class PositionListMLEWeight(LambdaWeight):
    """Position-aware ListMLE: `2^(n - rank) - 1`, so that the head of the list matters most."""

    def item_weights(self, labels: Tensor, ranks: Tensor) -> Tensor:
        return torch.exp2(labels.shape[1] - ranks) - 1


def inverse_max_dcg(
    labels: Tensor,
    gain: Callable[[Tensor], Tensor] = exponential_gain,
    discount: Callable[[Tensor], Tensor] = log_discount,
    topn: int | None = None,
) -> Tensor:
    """Return 1 over the DCG of the best order of each list, shape (batch, 1); 0 where that DCG is 0."""
    best = labels.clamp(min=0).sort(1, descending=True).values[:, :topn]
    ranks = torch.arange(1, best.shape[1] + 1, dtype=best.dtype, device=best.device)
    dcg = (gain(best) * discount(ranks)).sum(1, keepdim=True)
    return torch.where(dcg > 0, 1 / dcg, 0)


def _pair_discounts(
    ranks: Tensor, discount: Callable[[Tensor], Tensor], topn: int | None, smooth_fraction: float
) -> Tensor:
    apart = _differences(ranks).abs()
    counts = torch.ones_like(ranks, dtype=torch.bool) if topn is None else ranks <= topn
    either = counts.unsqueeze(2) | counts.unsqueeze(1)
    step = apart.clamp(min=1)  # an item and itself: D(0) is not finite, and the pair weighs nothing
    relative = (discount(step) - discount(step + 1)).abs() * ((apart > 0) & either)
    absolute = _differences(discount(ranks) * counts).abs()
    return (1 - smooth_fraction) * relative + smooth_fraction * absolute


def _differences(values: Tensor) -> Tensor:
    return values.unsqueeze(2) - values.unsqueeze(1)


def _both_valid(labels: Tensor) -> Tensor:
    valid = labels >= 0
    return valid.unsqueeze(2) & valid.unsqueeze(1)


def _check_topn(topn: int | None) -> None:
    if topn is not None and topn < 1:
        raise LayerArgumentError(f"topn must be at least 1, got {topn}")
