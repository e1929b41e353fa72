"""AUC of a stream: how often a positive outranks a negative, in bounded memory.

Over all examples: scores are kept in intervals that do not overlap, each with the weight
of its positives and of its negatives. Two examples of different intervals are ranked
exactly, two of the same interval count as a tie. At first every interval is a single
score, and the AUC is exact; when there are too many, neighbours are joined. What that
can have cost is known: half the share of the pairs that lie within one interval.

By group: the AUC of each user alone says whether the model orders what one person saw,
and not merely whether it knows who clicks a lot.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monolith.errors import ConfigError, MetricError, RestoreError
from monolith.table.hashing import mix
from monolith.train.metrics.scored import Floats, Scored, ScoredMetric

_NO_LIMIT = np.uint64(2**64 - 1)


class StreamingAuc(ScoredMetric):
    """The area under the ROC curve of everything since the last reset.

    Exact while there are at most `max_intervals` different scores, as far as doubles are. After that
    the joining of neighbours costs at most `6 / max_intervals` whenever it is done, and later examples
    that fall between joined scores add to it: little where scores stay what they were (2e-4 in all after
    400 thousand examples), more where they wander, as those of a model that only begins to learn (1e-2).
    Measure such a stream in windows. `error_bound` is the exact limit at any time; what is really
    missed is a small part of it. A state takes 32 bytes an interval.

    With weights that are whole numbers the value does not depend on the order of the examples: all sums are
    whole numbers, below 2**53 for up to 60 million examples of each class.
    """

    name = "auc"

    def __init__(self, max_intervals: int = 16384) -> None:
        if max_intervals < 12:
            raise ConfigError(f"auc: max_intervals must be at least 12, got {max_intervals}")
        self._most = max_intervals
        self.reset()

    def reset(self) -> None:
        none: Floats = np.empty(0)
        self._low = self._high = self._positive = self._negative = none

    def add(self, scored: Scored) -> None:
        """Take in examples whose labels are 0 or 1; predictions may be logits, since only order counts."""
        scored.require_classes(self.name)
        scores, labels, weights = scored.predictions, scored.labels, scored.weights
        if scored.weighed:
            counts = weights > 0
            scores, labels, weights = scores[counts], labels[counts], weights[counts]
        if not len(scores):
            return
        low, high, positive, negative = (
            np.concatenate([held, new])
            for held, new in (
                (self._low, scores),
                (self._high, scores),
                (self._positive, weights * labels),
                (self._negative, weights * (1 - labels)),
            )
        )
        # Sorted by their lower ends, intervals and new scores, whose ends are one, are in order: an entry
        # belongs to the one before it if it begins at or below the highest end so far.
        order = np.argsort(low)
        low, reached = low[order], np.maximum.accumulate(high[order])
        begins = np.ones(len(order), np.bool_)
        begins[1:] = low[1:] > reached[:-1]
        self._merge(low, reached, positive[order], negative[order], begins)
        if len(self._low) > self._most:
            self._join()

    def value(self) -> float:
        """From 0 to 1; NaN until both classes were seen."""
        positive, negative = self._positive, self._negative
        below = np.cumsum(negative) - negative
        won, positives, negatives = (positive * (below + negative / 2)).sum(), positive.sum(), negative.sum()
        return float(won / (positives * negatives)) if positives and negatives else math.nan

    def error_bound(self) -> float:
        """How far `value` can be from the exact AUC; 0 while no scores were joined."""
        pairs = float(self._positive.sum() * self._negative.sum())
        wide = self._high > self._low
        return float((self._positive * self._negative)[wide].sum()) / 2 / pairs if pairs else 0.0

    def state(self) -> dict[str, Any]:
        return {name: torch.from_numpy(array.copy()) for name, array in self._arrays().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        arrays = read_arrays("auc", state, dict.fromkeys(self._arrays(), np.float64))
        self._low, self._high = arrays["low"], arrays["high"]
        self._positive, self._negative = arrays["positive"], arrays["negative"]
        if len(self._low) > self._most:
            self._join()

    def _arrays(self) -> dict[str, Floats]:
        return {
            "low": self._low,
            "high": self._high,
            "positive": self._positive,
            "negative": self._negative,
        }

    def _join(self) -> None:
        """Make of all intervals at most half as many as there may be, of about the same weight."""
        target = self._most // 6
        positive, negative = self._positive, self._negative
        # Half of an interval's share is of the positives, half of the negatives; times the sums of both: so
        # whole weights stay whole, and no order of adding them up rounds.
        most = [total if total > 0 else 1.0 for total in (positive.sum(), negative.sum())]
        share = positive * most[1] + negative * most[0]
        each = share.sum() / target
        place = np.floor((np.cumsum(share) - share / 2) / each)
        # One score may have much of the weight, as a constant prediction does: its ties are real and
        # it stays alone. There are fewer than `target` of those, each with two more borders.
        heavy = share > each
        begins = np.ones_like(heavy)
        begins[1:] = (place[1:] != place[:-1]) | heavy[1:] | heavy[:-1]
        self._merge(self._low, self._high, positive, negative, begins)

    def _merge(
        self, low: Floats, high: Floats, positive: Floats, negative: Floats, begins: NDArray[np.bool_]
    ) -> None:
        """Keep the intervals that entries make, in order; each from where one `begins` up to the next."""
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(low))
        self._positive, self._negative = (np.add.reduceat(one, starts) for one in (positive, negative))
        self._low, self._high = low[starts], high[ends - 1]


@dataclass(frozen=True, slots=True, eq=False)
class _Examples:
    """Examples of weight above 0, in host memory; all arrays have shape (n,)."""

    predictions: Floats
    labels: Floats
    weights: Floats
    groups: NDArray[np.int64]

    @classmethod
    def of(cls, scored: Scored) -> _Examples:
        assert scored.groups is not None
        found = cls(scored.predictions, scored.labels, scored.weights, scored.groups)
        return found.select(found.weights > 0)  # a copy: what is held must not keep a batch in memory

    def __len__(self) -> int:
        return len(self.predictions)

    def select(self, mask: NDArray[np.bool_]) -> _Examples:
        return _Examples(self.predictions[mask], self.labels[mask], self.weights[mask], self.groups[mask])


class GroupedExamples(ScoredMetric):
    """A metric of examples within each group, such as a user. It keeps them in host memory until it is asked.

    Memory is bounded by `max_examples`, 32 bytes each: when they are exceeded, groups are drawn by the hash
    of their id until half the room is free, and the value is that of the drawn ones, every one of which is
    whole. Of one group only the first `max_per_group` examples count, so that a crawler is not the measure.
    """

    def __init__(self, name: str, max_examples: int, max_per_group: int) -> None:
        if not 2 <= max_per_group <= max_examples // 2:
            raise ConfigError(
                f"{name}: max_per_group must be from 2 to half of max_examples, "
                f"got {max_per_group} and {max_examples}"
            )
        self.name = name
        self._most = max_examples
        self._most_each = max_per_group
        self.reset()

    def reset(self) -> None:
        self._below = _NO_LIMIT  # groups of a greater hash were not drawn
        self._chunks: list[_Examples] = []
        self._held = 0

    def add(self, scored: Scored) -> None:
        """Take in examples, each with the id of its group."""
        if scored.groups is None:
            raise MetricError(f"{self.name}: needs the group of each example, such as its user; pass groups")
        self._check(scored)
        found = _Examples.of(scored)
        drawn = found.select(mix(found.groups) <= self._below)
        if len(drawn):
            self._chunks.append(drawn)
            self._held += len(drawn)
        if self._held > self._most:
            self._thin_out()

    @abstractmethod
    def value(self) -> float: ...

    @abstractmethod
    def _check(self, scored: Scored) -> None:
        """Refuse labels that make no sense."""

    def drawn(self) -> float:
        """The share of all groups that the value is about: 1.0 while every group fitted."""
        return (float(self._below) + 1) / 2**64

    def state(self) -> dict[str, Any]:
        found = self._whole()
        return {
            "below": str(int(self._below)),  # JSON's numbers do not reach 2**64
            "predictions": torch.from_numpy(found.predictions.copy()),
            "labels": torch.from_numpy(found.labels.copy()),
            "weights": torch.from_numpy(found.weights.copy()),
            "groups": torch.from_numpy(found.groups.copy()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        kinds: dict[str, type[np.float64 | np.int64]] = {
            "predictions": np.float64,
            "labels": np.float64,
            "weights": np.float64,
            "groups": np.int64,
        }
        arrays = read_arrays(self.name, state, kinds)
        self._below = np.uint64(int(state.get("below", _NO_LIMIT)))
        self._chunks = [_Examples(**arrays)]
        self._held = len(self._chunks[0])
        if self._held > self._most:
            self._thin_out()

    def _whole(self) -> _Examples:
        """Return all that is held, of each group no more than counts, in the order it came."""
        if not self._chunks:
            none = np.empty(0)
            return _Examples(none, none, none, np.empty(0, np.int64))
        parts = [[getattr(chunk, name) for chunk in self._chunks] for name in _Examples.__dataclass_fields__]
        whole = _Examples(*(np.concatenate(part) for part in parts))
        order = np.argsort(whole.groups, kind="stable")
        _, starts, sizes = np.unique(whole.groups[order], return_index=True, return_counts=True)
        rank = np.empty(len(whole), np.int64)
        rank[order] = np.arange(len(whole)) - np.repeat(starts, sizes)
        kept = whole.select(rank < self._most_each)
        self._chunks, self._held = [kept], len(kept)
        return kept

    def _thin_out(self) -> None:
        whole = self._whole()
        if self._held <= self._most // 2:
            return
        hashes = mix(whole.groups)
        drawn, sizes = np.unique(hashes, return_counts=True)
        fitting = int(np.searchsorted(np.cumsum(sizes), self._most // 2, side="right"))
        self._below = drawn[fitting - 1]
        kept = whole.select(hashes <= self._below)
        self._chunks, self._held = [kept], len(kept)


class GroupedAuc(GroupedExamples):
    """The AUC within each group, such as a user, averaged by the weight of the group's examples.

    A group whose examples are all of one class has nothing to rank and is left out.
    """

    def __init__(self, max_examples: int = 1 << 20, max_per_group: int = 1024) -> None:
        super().__init__("gauc", max_examples, max_per_group)

    def _check(self, scored: Scored) -> None:
        scored.require_classes(self.name)

    def value(self) -> float:
        """From 0 to 1; NaN while no group has both classes."""
        found = self._whole()
        if not len(found):
            return math.nan
        _, group = np.unique(found.groups, return_inverse=True)
        order = np.lexsort((found.predictions, group))
        group, scores = group[order], found.predictions[order]
        positive = (found.weights * found.labels)[order]
        negative = (found.weights * (1 - found.labels))[order]
        # Ties first: one entry for each score of each group, then sums within groups.
        new_group = np.concatenate([[True], np.diff(group) != 0])
        first = np.flatnonzero(new_group | np.concatenate([[True], np.diff(scores) != 0]))
        positive, negative = np.add.reduceat(positive, first), np.add.reduceat(negative, first)
        starts = np.flatnonzero(new_group[first])
        sizes = np.diff(np.append(starts, len(first)))
        below = np.cumsum(negative) - negative
        below -= np.repeat(below[starts], sizes)
        wins = np.add.reduceat(positive * (below + negative / 2), starts)
        positives, negatives = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
        both = (positives > 0) & (negatives > 0)
        if not both.any():
            return math.nan
        weight = (positives + negatives)[both]
        return float((wins[both] / (positives * negatives)[both] * weight).sum() / weight.sum())


def read_arrays(
    metric: str, state: Mapping[str, Any], kinds: Mapping[str, type[np.float64 | np.int64]]
) -> dict[str, NDArray[Any]]:
    """Return copies of the arrays of a state, which must all be there and of one length."""
    missing = sorted(kinds.keys() - state.keys())
    if missing:
        raise RestoreError(f"cannot restore metric {metric!r}: its state has no {', '.join(missing)}")
    arrays = {
        name: np.array(torch.as_tensor(state[name]).numpy(), dtype=kind) for name, kind in kinds.items()
    }
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise RestoreError(f"cannot restore metric {metric!r}: its arrays have shapes {shapes}")
    return arrays
