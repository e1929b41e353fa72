"""Metrics of retrieval: the ranks of the relevant items among the candidates of each query.

    recall@k     the fraction of the relevant items that are among the best k
    hit_rate@k   whether any of them is
    ndcg@k       the gain of the best k, each discounted by its rank, over the most that it could be
    mrr@k        1 over the rank of the first that was wanted, 0 if that is behind k
    mrr          1 over the rank of the first that was wanted

A query is a group of examples: a user, a session, a request. Candidates of equal score have no order, so each
metric is its mean over all orders of them; see `native/src/ranking.h`, which computes it. A k beyond the
candidates means all of them. A query of which nothing was wanted has nothing to say and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.errors import ConfigError, MetricError
from monolith.tensors import RaggedTensor
from monolith.train.metrics.auc import GroupedExamples
from monolith.train.metrics.scored import Scored

MRR = "mrr"
KINDS = ("recall", "ndcg", "hit_rate", MRR)
"""Those that ask for a k, in the order in which the core writes them; mrr may do without."""


def ranking_scores(
    scores: Tensor | RaggedTensor, relevance: Tensor | RaggedTensor, ks: Sequence[int] = (10,)
) -> dict[str, Tensor]:
    """Return recall@k, ndcg@k, hit_rate@k and mrr@k for each k, and mrr, of each query.

    Args:
        scores: Of the candidates of each query: (queries, candidates), or ragged.
        relevance: In the same shape: 0 for what is not wanted, and the gain of what is, mostly 1.

    Returns:
        float64 of shape (queries,) by name; NaN for a query of which nothing is wanted.

    Raises:
        MetricError: Shapes do not fit, a score is NaN, or a relevance is negative or not finite.
    """
    flat, splits = _flat(scores)
    gains, others = _flat(relevance)
    if not np.array_equal(splits, others):
        raise MetricError("ranking: scores and relevance must have the same candidates for each query")
    found = _computed(flat, gains, splits, ks)
    return {name: torch.from_numpy(values) for name, values in found.items()}


class RankingMetric(GroupedExamples):
    """The mean of one ranking metric over queries, which are the groups of examples.

    Labels are the relevance: 0 for a candidate that was not wanted. A query weighs as much as its first
    example, and may come in several batches. Memory is bounded as that of `GroupedAuc`.

    Args:
        kind: recall, ndcg, hit_rate or mrr.
        k: How many of the best candidates count; None is for mrr alone: all of them.
    """

    def __init__(
        self,
        kind: str,
        k: int | None = None,
        max_examples: int = 1 << 20,
        max_per_group: int = 1 << 16,
    ) -> None:
        if kind not in KINDS or (k is None and kind != MRR) or (k is not None and k < 1):
            kinds = ", ".join(KINDS)
            raise ConfigError(f"a ranking metric is {MRR}, or one of {kinds} with a k, as in recall@10")
        self._kind = kind
        self._ks = [] if k is None else [k]
        super().__init__(kind if k is None else f"{kind}@{k}", max_examples, max_per_group)

    @classmethod
    def named(cls, name: str) -> RankingMetric | None:
        """Return the metric of a name such as ndcg@10; None if it is none of these."""
        kind, _, k = name.partition("@")
        if kind not in KINDS or (k and not k.isdecimal()):
            return None
        return cls(kind, int(k) if k else None)

    def _check(self, scored: Scored) -> None:
        if scored.least_label < 0:
            raise MetricError(f"{self.name}: labels must not be negative: they are how much each was wanted")

    def value(self) -> float:
        """From 0 to 1; NaN while nothing was wanted."""
        found = self._whole()
        if not len(found):
            return math.nan
        order = np.argsort(found.groups, kind="stable")
        _, starts = np.unique(found.groups[order], return_index=True)
        splits = np.append(starts, len(order)).astype(np.int64)
        scores = found.predictions[order].astype(np.float32)
        gains = found.labels[order].astype(np.float32)
        values = _computed(scores, gains, splits, self._ks)[self.name]
        weights = found.weights[order][starts]
        known = ~np.isnan(values)
        return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _computed(
    scores: NDArray[np.float32], gains: NDArray[np.float32], splits: NDArray[np.int64], ks: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    out = np.empty((len(splits) - 1, len(KINDS) * len(ks) + 1))
    try:
        native.ranking_metrics(scores, gains, splits, np.array(ks, np.int64), out)
    except ValueError as cause:
        raise MetricError(str(cause)) from cause
    names = [f"{kind}@{k}" for kind in KINDS for k in ks]
    return {name: out[:, number].copy() for number, name in enumerate([*names, MRR])}


def _flat(values: Tensor | RaggedTensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if isinstance(values, RaggedTensor):
        flat, splits = values.flat_values, values.row_splits
    elif values.ndim == 2:
        flat = values.reshape(-1)
        splits = torch.arange(len(values) + 1) * values.shape[1]
    else:
        raise MetricError(f"ranking: needs (queries, candidates), or ragged rows, got {tuple(values.shape)}")
    numbers = flat.detach().to("cpu", torch.float32).contiguous().numpy()
    return numbers, splits.detach().to("cpu", torch.int64).contiguous().numpy()
