"""Retrieval losses: the other rows of a batch, or sampled negatives, are what a row is compared with.

A sample drawn from the batch favours popular items, which would be pushed down for that alone. So the
sampled softmax subtracts from each score the log of how often its candidate is expected in the sample (logQ
correction); its gradient is then, on average, that of a softmax over all items.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.dense import check_shape
from monolith.nn.losses.classification import Reduction, reduced

NO_LABEL = -10000.0
"""Rows with this label or less take no part in `inbatch_auc_loss`."""

_PAIRS_AT_ONCE = 1 << 22
"""Pairs compared in one go: 16 MiB of float32, whatever the batch."""

_NORM_FLOOR = 1e-12


def batch_softmax_loss(
    query: Tensor,
    item: Tensor,
    item_step_interval: Tensor,
    r: Tensor,
    *,
    normalize: bool = True,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Softmax loss of two-tower retrieval: each query should pick its own item from the batch.

    Popular items turn up as negatives more often than they should; each score is
    corrected by the log of its item's frequency, of which the step interval is the inverse.

    Args:
        query: float of shape (batch, dim).
        item: float of shape (batch, dim); row i belongs to query i.
        item_step_interval: float of shape (batch,): steps between two sightings of the item;
            less than 1 counts as 1.
        r: float of shape (batch,): the weight of each row, such as a reward.
        normalize: Scale the rows of query and item to length 1 first.

    Returns:
        Scalar: `-sum_i r_i log softmax(S_i)_i` with `S_ij = q_i . k_j / temperature + log(interval_j)`,
        divided by the rows unless `reduction` is "sum".

    Raises:
        LayerArgumentError: The temperature is not above 0, or shapes do not fit.
    """
    if not temperature > 0:
        raise LayerArgumentError(f"batch_softmax_loss: temperature must be above 0, got {temperature}")
    check_shape("batch_softmax_loss", "query", query, None, None)
    batch, dim = query.shape
    check_shape("batch_softmax_loss", "item", item, batch, dim)
    check_shape("batch_softmax_loss", "item_step_interval", item_step_interval, batch)
    check_shape("batch_softmax_loss", "r", r, batch)
    if normalize:
        query, item = _unit_rows(query), _unit_rows(item)
    log_interval = item_step_interval.to(query.dtype).clamp(min=1).log()
    scores = torch.addmm(log_interval, query, item.t(), alpha=1 / temperature)
    own = torch.arange(batch, device=scores.device)
    total = (r * functional.cross_entropy(scores, own, reduction="none")).sum()
    return reduced("batch_softmax_loss", total, batch, reduction)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows * rows.square().sum(1, keepdim=True).clamp(min=_NORM_FLOOR).rsqrt()


def inbatch_auc_loss(
    label: Tensor, logit: Tensor, neg_weight: float = 1.0, *, reduction: Reduction = "mean"
) -> Tensor:
    """Return minus `inbatch_auc_log_likelihood`, by default for each pair: a loss, to be minimised."""
    total = -inbatch_auc_log_likelihood(label, logit, neg_weight)
    positives, negatives = (int(some.sum()) for some in _classes(label))
    return reduced("inbatch_auc_loss", total, positives * negatives, reduction)


def inbatch_auc_log_likelihood(label: Tensor, logit: Tensor, neg_weight: float = 1.0) -> Tensor:
    """How likely it is that every positive of a batch ranks above every negative.

    To be maximised: it is 0 at best and falls without end. What other systems return
    as their "in-batch AUC loss" is this value; its negative is `inbatch_auc_loss`.

    Memory does not grow with the number of pairs, nor does backward look at them again.

    Args:
        label: float of shape (batch,): above 0 is a positive, above `NO_LABEL` a negative,
            the rest is left out.
        logit: float of shape (batch,).
        neg_weight: How much of its gradient a negative gets, above 0 and at most 1: less
            than 1 trains negatives more gently. The value does not depend on it.

    Returns:
        Scalar: the sum of `log sigmoid(positive - negative)` over all pairs.
    """
    if not 0 < neg_weight <= 1:
        raise LayerArgumentError(
            f"inbatch_auc_loss: neg_weight must be above 0 and at most 1, got {neg_weight}"
        )
    check_shape("inbatch_auc_loss", "label", label, None)
    check_shape("inbatch_auc_loss", "logit", logit, len(label))
    value: Tensor = _InBatchAuc.apply(label, logit, float(neg_weight))  # type: ignore[no-untyped-call]
    return value


def _classes(label: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows are positives, and which are negatives."""
    return label > 0, (label > NO_LABEL) & (label <= 0)


class _InBatchAuc(torch.autograd.Function):
    """Computes the gradient beside the value, since both need all pairs and it is only (batch,) large."""

    @staticmethod
    def forward(ctx: Any, label: Tensor, logit: Tensor, neg_weight: float) -> Tensor:
        positive, negative = _classes(label)
        above, below = logit[positive], logit[negative]
        wants_gradient = ctx.needs_input_grad[1]
        value = logit.new_zeros(())
        pull, push = torch.zeros_like(above), torch.zeros_like(below)
        rows = max(1, _PAIRS_AT_ONCE // max(1, len(below)))
        for begin in range(0, len(above), rows):
            margins = above[begin : begin + rows, None] - below
            value += functional.logsigmoid(margins).sum()
            if wants_gradient:
                missing = torch.sigmoid(-margins)  # 1 - sigmoid(margin) would round to 0 too soon
                pull[begin : begin + rows] = missing.sum(1)
                push += missing.sum(0)
        if wants_gradient:
            gradient = torch.zeros_like(logit)
            gradient[positive] = pull
            gradient[negative] = -neg_weight * push
            ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, upstream * gradient, None


def sampled_softmax_loss(
    scores: Tensor,
    own: Tensor,
    *,
    log_q: Tensor | None = None,
    hits: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return minus the log of the probability that each query picks its own candidate.

    Args:
        scores: float of shape (queries, candidates).
        own: int64 of shape (queries,): the column of what each query wanted.
        log_q: float of shape (candidates,): the log of how often each is expected in the sample, up to a
            constant that all have. None corrects nothing.
        hits: bool of shape (queries, candidates): candidates that are no negatives of a query, since it
            wants them too; see `accidental_hits`. They are left out. Its own is never left out.
        weights: float of shape (queries,); the mean is still over the number of queries.

    Returns:
        Scalar; 0 without queries.

    Raises:
        LayerArgumentError: Shapes do not fit.
    """
    check_shape("sampled_softmax_loss", "scores", scores, None, None)
    queries, candidates = scores.shape
    check_shape("sampled_softmax_loss", "own", own, queries)
    if log_q is not None:
        check_shape("sampled_softmax_loss", "log_q", log_q, candidates)
        scores = scores - log_q.to(scores)
    if hits is not None:
        check_shape("sampled_softmax_loss", "hits", hits, queries, candidates)
        if hits.dtype is not torch.bool:
            raise LayerArgumentError(f"sampled_softmax_loss: hits must be bool, got {hits.dtype}")
        others = torch.arange(candidates, device=scores.device) != own[:, None]
        scores = scores.masked_fill(hits & others, -torch.inf)
    losses = functional.cross_entropy(scores, own, reduction="none")
    if weights is not None:
        check_shape("sampled_softmax_loss", "weights", weights, queries)
        losses = losses * weights
    return reduced("sampled_softmax_loss", losses.sum(), queries, reduction)


def accidental_hits(wanted: Tensor, candidates: Tensor, users: Tensor | None = None) -> Tensor:
    """Return which candidates a query wants, so that they are no negatives of it.

    Args:
        wanted: int64 of shape (queries,): the item of each query.
        candidates: int64 of shape (candidates,): their items.
        users: int64 of shape (queries,): whose query each is. What the same user wanted in another query is
            then a hit, too.

    Returns:
        bool of shape (queries, candidates).
    """
    if users is None:
        return wanted[:, None] == candidates
    items, places = torch.unique(torch.cat([wanted, candidates]), return_inverse=True)
    whose, row = torch.unique(users, return_inverse=True)
    wants = torch.zeros(len(whose), len(items), dtype=torch.bool, device=wanted.device)
    wants[row, places[: len(wanted)]] = True
    return wants[row][:, places[len(wanted) :]]
