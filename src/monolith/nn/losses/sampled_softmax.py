"""Sampled softmax: a query should pick what it wanted from a sample of all there is.

The sample is whatever the batch brings: the items of other queries, negatives that were drawn, or both. It is
not a fair one. Popular items are in it more often than others and would be pushed down for that alone, so
each score is lessened by the log of how often its candidate is expected in the sample; then the gradient is,
on the average, that of a softmax over everything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from monolith.errors import LayerArgumentError
from monolith.nn.layers.arguments import check_shape
from monolith.nn.losses.reduction import Reduction, reduced


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
