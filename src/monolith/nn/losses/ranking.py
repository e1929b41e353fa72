"""Learning to rank: losses on lists of items that belong together, such as one page of results.

Labels and logits have shape (batch, n). A label below 0 marks padding, which takes no
part and gets no gradient. Equal scores and equal labels keep the order they came in, so
a loss is the same on every run.

    loss_fn = make_loss_fn(["pairwise_logistic_loss", "softmax_loss"], [1.0, 0.5])
    loss = loss_fn(labels, logits)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import check_choice, check_shape
from monolith.nn.losses.lambda_weights import LambdaWeight, exponential_gain, inverse_max_dcg, log_discount

BY_NONZERO_WEIGHTS = "sum_by_nonzero_weights"

REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda losses, weights: (losses * weights).sum(),
    "mean": lambda losses, weights: _ratio((losses * weights).sum(), weights.sum()),
    "sum_over_batch_size": lambda losses, weights: _ratio((losses * weights).sum(), _count(losses)),
    BY_NONZERO_WEIGHTS: lambda losses, weights: _ratio(
        (losses * weights).sum(), _count(weights[weights != 0])
    ),
}
"""How losses and weights of one shape become a scalar; a sum over nothing is 0."""


class LossFn(Protocol):
    def __call__(self, labels: Tensor, logits: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return a scalar."""


# Pairwise


def pairwise_hinge_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str = BY_NONZERO_WEIGHTS,
) -> Tensor:
    """`relu(1 - d)` over pairs with `l_i > l_j`, `d = s_i - s_j`.

    Args:
        weights: float of shape (batch, n) or (batch, 1); a pair has that of its better item.
        lambda_weight: Weighs pairs, times the list size, in place of `|l_i - l_j|`.
        reduction: A name of `REDUCTIONS`.
    """
    return _pairwise(_hinge, labels, logits, weights, lambda_weight=lambda_weight, reduction=reduction)


def pairwise_logistic_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str = BY_NONZERO_WEIGHTS,
) -> Tensor:
    """`log(1 + e^-d)` over pairs; arguments as for `pairwise_hinge_loss`."""
    return _pairwise(_logistic, labels, logits, weights, lambda_weight=lambda_weight, reduction=reduction)


def pairwise_soft_zero_one_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str = BY_NONZERO_WEIGHTS,
) -> Tensor:
    """`sigmoid(-d)` over pairs, a smooth count of wrong pairs; arguments as for `pairwise_hinge_loss`."""
    return _pairwise(
        _soft_zero_one, labels, logits, weights, lambda_weight=lambda_weight, reduction=reduction
    )


def _hinge(margins: Tensor) -> Tensor:
    return functional.relu(1 - margins)


def _logistic(margins: Tensor) -> Tensor:
    return functional.softplus(-margins)


def _soft_zero_one(margins: Tensor) -> Tensor:
    return torch.sigmoid(-margins)


def _pairwise(
    loss: Callable[[Tensor], Tensor],
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None,
    *,
    lambda_weight: LambdaWeight | None,
    reduction: str,
) -> Tensor:
    _check(labels, logits, reduction)
    labels = labels.to(logits.dtype)
    valid = labels >= 0
    better = (labels.unsqueeze(2) > labels.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)
    with torch.no_grad():
        if lambda_weight is None:
            pairs = (labels.unsqueeze(2) - labels.unsqueeze(1)).abs()
        else:
            pairs = lambda_weight.pair_weights(labels, _ranks(logits, valid)) * labels.shape[1]
        pairs = pairs * better
        if weights is not None:
            pairs = pairs * _item_weights(weights, labels).unsqueeze(2)
    # Padding may hold anything, even NaN, so it leaves before scores are compared.
    scores = logits.masked_fill(~valid, 0)
    return REDUCTIONS[reduction](loss(scores.unsqueeze(2) - scores.unsqueeze(1)), pairs)


# Pointwise


def sigmoid_cross_entropy_loss(
    labels: Tensor, logits: Tensor, weights: Tensor | None = None, *, reduction: str = BY_NONZERO_WEIGHTS
) -> Tensor:
    """Binary cross entropy of each item; weights of shape (batch, n) or (batch, 1)."""
    _check(labels, logits, reduction)
    labels, scores, pointwise = _pointwise(labels, logits, weights)
    losses = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return REDUCTIONS[reduction](losses, pointwise)


def mean_squared_loss(
    labels: Tensor, logits: Tensor, weights: Tensor | None = None, *, reduction: str = BY_NONZERO_WEIGHTS
) -> Tensor:
    """`(label - logit)^2` of each item; weights of shape (batch, n) or (batch, 1)."""
    _check(labels, logits, reduction)
    labels, scores, pointwise = _pointwise(labels, logits, weights)
    return REDUCTIONS[reduction]((labels - scores).square(), pointwise)


def _pointwise(labels: Tensor, logits: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels and scores with zeros for padding, and a weight per item, 0 for padding."""
    valid = labels >= 0
    pointwise = valid.to(logits.dtype)
    if weights is not None:
        pointwise = pointwise * _item_weights(weights, pointwise)
    return labels.to(logits.dtype).masked_fill(~valid, 0), logits.masked_fill(~valid, 0), pointwise


# Listwise


def softmax_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str = BY_NONZERO_WEIGHTS,
) -> Tensor:
    """Cross entropy between a list's labels, scaled to sum to 1, and the softmax of its scores.

    A list counts by the sum of its labels, and not at all where that is 0.

    Args:
        weights: float of shape (batch, n) or (batch, 1), multiplied into the labels.
        lambda_weight: Its item weights replace the labels.
    """
    _check(labels, logits, reduction)
    labels = labels.to(logits.dtype)
    valid = labels >= 0
    relevance = labels.masked_fill(~valid, 0)
    with torch.no_grad():
        if lambda_weight is not None:
            relevance = lambda_weight.item_weights(labels, _ranks(logits, valid)).masked_fill(~valid, 0)
        if weights is not None:
            relevance = relevance * _item_weights(weights, labels)
        total = relevance.sum(1)
        share = relevance / torch.where(total > 0, total, 1).unsqueeze(1)
        kept = total.clamp(min=0)
    log_chances = logits.masked_fill(~valid, _lowest(logits)).log_softmax(1).masked_fill(~valid, 0)
    losses = -(share * log_chances).sum(1)
    return REDUCTIONS[reduction](losses[kept > 0], kept[kept > 0])


def list_mle_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str = BY_NONZERO_WEIGHTS,
) -> Tensor:
    """Minus the log-likelihood that scores draw the items in the order of their labels.

    Args:
        weights: float of shape (batch,) or (batch, 1): one per list.
        lambda_weight: Its item weights count each draw, such as `PositionListMLEWeight`.
    """
    _check(labels, logits, reduction)
    order = labels.to(logits.dtype).sort(dim=1, descending=True, stable=True)
    valid = order.values >= 0
    scores = logits.gather(1, order.indices).masked_fill(~valid, _lowest(logits))
    scores = scores - scores.detach().amax(1, keepdim=True)  # small differences of large scores survive
    # The chance to draw an item is its share among those not drawn yet: a softmax over the tail.
    remaining = scores.flip(1).logcumsumexp(1).flip(1)
    draws = (remaining - scores).masked_fill(~valid, 0)
    if lambda_weight is not None:
        positions = torch.arange(1, draws.shape[1] + 1, dtype=draws.dtype, device=draws.device)
        draws = draws * lambda_weight.item_weights(order.values, positions.expand_as(draws))
    return REDUCTIONS[reduction](draws.sum(1), _list_weights(weights, logits))


def approx_ranks(logits: Tensor, alpha: float = 10.0) -> Tensor:
    """Return differentiable ranks: `0.5 + sum_j sigmoid(alpha (s_j - s_i))`, 1 for the best.

    Args:
        logits: float of shape (batch, n).
        alpha: Sharpness; the greater, the closer to the true ranks.
    """
    check_shape("approx_ranks", "logits", logits, None, None)
    return 0.5 + torch.sigmoid(alpha * (logits.unsqueeze(1) - logits.unsqueeze(2))).sum(2)


def approx_ndcg_loss(
    labels: Tensor,
    logits: Tensor,
    weights: Tensor | None = None,
    *,
    alpha: float = 10.0,
    reduction: str = "sum",
) -> Tensor:
    """Minus the NDCG of each list, with `approx_ranks` for ranks: -1 for a perfect order.

    Lists without a label above 0 do not count. `weights` as for `list_mle_loss`.
    """
    _check(labels, logits, reduction)
    labels = labels.to(logits.dtype)
    valid = labels >= 0
    # Far below the list's last item, so that padding moves no rank. Not infinitely: 0 * inf.
    real = logits.masked_fill(~valid, torch.inf).amin(1, keepdim=True).detach()
    floor = torch.where(real.isfinite(), real, 0) - 1e3
    ranks = approx_ranks(torch.where(valid, logits, floor), alpha)
    gains = exponential_gain(labels.clamp(min=0))
    losses = -(gains * log_discount(ranks)).sum(1) * inverse_max_dcg(labels).squeeze(1)
    relevant = (labels > 0).any(1)
    return REDUCTIONS[reduction](losses, _list_weights(weights, logits) * relevant)


# By name

RANKING_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "pairwise_hinge_loss": pairwise_hinge_loss,
    "pairwise_logistic_loss": pairwise_logistic_loss,
    "pairwise_soft_zero_one_loss": pairwise_soft_zero_one_loss,
    "softmax_loss": softmax_loss,
    "sigmoid_cross_entropy_loss": sigmoid_cross_entropy_loss,
    "mean_squared_loss": mean_squared_loss,
    "list_mle_loss": list_mle_loss,
    "approx_ndcg_loss": approx_ndcg_loss,
}

_WITHOUT_LAMBDA = frozenset({"sigmoid_cross_entropy_loss", "mean_squared_loss", "approx_ndcg_loss"})


def make_loss_fn(
    keys: str | Sequence[str],
    loss_weights: Sequence[float] | None = None,
    *,
    lambda_weight: LambdaWeight | None = None,
    reduction: str | None = None,
    alpha: float = 10.0,
) -> LossFn:
    """Return a loss that adds up others, each by its weight.

    Args:
        keys: Names of `RANKING_LOSSES`.
        loss_weights: One per key; 1 each by default.
        lambda_weight: For those of the losses that take one.
        reduction: A name of `REDUCTIONS`; by default each loss has its own.
        alpha: Sharpness of `approx_ndcg_loss`.

    Raises:
        LayerArgumentError: No key, an unknown one, another number of weights, or a lambda
            weight that none of the losses takes.
    """
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise LayerArgumentError("make_loss_fn: name at least one loss")
    for name in names:
        check_choice("make_loss_fn", "each key", name, RANKING_LOSSES)
    factors = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    if len(factors) != len(names):
        raise LayerArgumentError(
            f"make_loss_fn: loss_weights must be one per key, {len(names)}, got {len(factors)}"
        )
    if reduction is not None:
        check_choice("make_loss_fn", "reduction", reduction, REDUCTIONS)
    if lambda_weight is not None and _WITHOUT_LAMBDA.issuperset(names):
        raise LayerArgumentError(f"make_loss_fn: none of {', '.join(names)} takes a lambda_weight")

    def options(name: str) -> dict[str, object]:
        chosen: dict[str, object] = {} if reduction is None else {"reduction": reduction}
        if name not in _WITHOUT_LAMBDA:
            chosen["lambda_weight"] = lambda_weight
        if name == "approx_ndcg_loss":
            chosen["alpha"] = alpha
        return chosen

    parts = [
        (RANKING_LOSSES[name], factor, options(name)) for name, factor in zip(names, factors, strict=True)
    ]

    def loss_fn(labels: Tensor, logits: Tensor, weights: Tensor | None = None) -> Tensor:
        total = logits.new_zeros(())
        for loss, factor, chosen in parts:
            total = total + factor * loss(labels, logits, weights, **chosen)
        return total

    return loss_fn


# Shared


def _check(labels: Tensor, logits: Tensor, reduction: str) -> None:
    check_choice("ranking loss", "reduction", reduction, REDUCTIONS)
    check_shape("ranking loss", "logits", logits, None, None)
    check_shape("ranking loss", "labels", labels, *logits.shape)


def _item_weights(weights: Tensor, like: Tensor) -> Tensor:
    batch, n = like.shape
    if weights.shape not in {(batch, n), (batch, 1)}:
        raise LayerArgumentError(
            f"ranking loss: weights must have shape ({batch}, {n}) or ({batch}, 1), "
            f"got {tuple(weights.shape)}"
        )
    return weights.to(like.dtype).expand(batch, n)


def _list_weights(weights: Tensor | None, like: Tensor) -> Tensor:
    batch = like.shape[0]
    if weights is None:
        return like.new_ones(batch)
    if weights.shape not in {(batch,), (batch, 1)}:
        raise LayerArgumentError(
            f"ranking loss: this loss has one weight per list, of shape ({batch},) or ({batch}, 1), "
            f"got {tuple(weights.shape)}"
        )
    return weights.to(like.dtype).reshape(batch)


def _ranks(logits: Tensor, valid: Tensor) -> Tensor:
    """Return the rank of each item by score, from 1, padding last."""
    order = logits.detach().masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
    positions = torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype, device=logits.device)
    return torch.empty_like(logits).scatter_(1, order, positions.expand_as(logits))


def _lowest(logits: Tensor) -> float:
    """A score without a chance, but finite: differences of infinities are not numbers."""
    return torch.finfo(logits.dtype).min / 4


def _count(values: Tensor) -> Tensor:
    return torch.tensor(values.numel(), dtype=values.dtype, device=values.device)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """Return `total / count`, and 0 where there was nothing to count."""
    return torch.where(count == 0, 0, total / torch.where(count == 0, 1, count))
