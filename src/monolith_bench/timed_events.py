"""Events with their times: what the experiment on freshness learns, first at rest and then as it happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor

from monolith.data import DriftingStream
from monolith.data.records import LABEL
from monolith.data.synthetic.drift import FEATURES, TIME, fast_drift
from monolith.feature import Batch, FeatureIds, FeatureSpec
from monolith.nn import auc
from monolith.table import Adagrad
from monolith_bench.learner import RECIPES, Recipe, one_id_each
from monolith_bench.movielens import rating_times, read_ratings

DRIFT_RECIPE = Recipe(
    settings={
        "dim": 8,
        "hidden": (64, 32),
        "optimizer": Adagrad(learning_rate=0.15),
        "bias_optimizer": Adagrad(learning_rate=0.15),
    },
    batch=256,
)
"""Rows must learn fast, since a user or item is gone a day after it appears."""
BURST = 10
"""Seconds from one burst of clicks to the next: a step for each second would take ten times as long."""
_AT_A_TIME = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class TimedEvents:
    """Clicks or ratings in the order of event time; see `Likes`."""

    names: Sequence[str]
    ids: Tensor
    """int64 of shape (events, features): one id of each feature."""
    times: Tensor
    """int64 of shape (events,): Unix seconds, never falling."""
    likes: Tensor

    def __len__(self) -> int:
        return len(self.likes)

    @property
    def features(self) -> FeatureSpec:
        return one_id_each(self.names)

    def batch(self, some: Tensor) -> Batch:
        ids = FeatureIds.one_each(self.names, self.ids[some], event_time=int(self.times[some[-1]]))
        return Batch(ids=ids, labels={"like": self.likes[some]})

    def seconds(self, first: int) -> Iterator[tuple[int, int, int]]:
        """Yield each second that has events, from event `first` on, and where these begin and end."""
        times, counts = torch.unique_consecutive(self.times[first:], return_counts=True)
        ends = (first + counts.cumsum(0)).tolist()
        yield from zip(times.tolist(), [first, *ends[:-1]], ends, strict=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OnlinePlan:
    """Events of which a model learns the first part at rest, and the online part as they happen."""

    events: TimedEvents
    online: int
    """The number of the first event of the online part."""
    recipe: Recipe
    best: float | None = None
    """The AUC over the online part of the probabilities that decided the labels, where they are known."""

    @property
    def online_hours(self) -> float:
        """Event time from the beginning of the online part to its end."""
        return float(self.events.times[-1] - self.events.times[self.online]) / 3600


def drift_plan(seed: int, batch: timedelta, online: timedelta, *, small: bool = False) -> OnlinePlan:
    """Return a stream that drifts fast: so much event time at rest, and so much online.

    Its clicks come in bursts: all those of one second, and then none until the next `BURST`. Fewer users and
    items make up for it, so that each is seen as often as without bursts.
    """
    config = fast_drift(small=small, seed=seed)
    if not small:
        config = replace(config, new_users=config.new_users // BURST, new_items=config.new_items // BURST)
    stream = DriftingStream(config)
    first, end = (int(span.total_seconds()) * config.examples_per_second for span in (batch, batch + online))
    pieces, decided = [], []
    for begin in range(0, end, _AT_A_TIME):
        size = min(_AT_A_TIME, end - begin)
        records = stream.records(begin, size)
        kept = records[TIME].flat_values % BURST == 0
        pieces.append([records[name].flat_values[kept] for name in (*FEATURES, TIME, LABEL)])
        decided.append(stream.probabilities(begin, size)[kept])
    *ids, times, labels = (torch.cat(column) for column in zip(*pieces, strict=True))
    at = int(torch.searchsorted(times, stream.time_of(first)))
    return OnlinePlan(
        events=TimedEvents(FEATURES, torch.stack(ids, 1), times, labels.float()),
        online=at,
        recipe=DRIFT_RECIPE.but(dim=4, hidden=(8,)) if small else DRIFT_RECIPE,
        best=auc(torch.cat(decided)[at:], labels[at:]),
    )


def movielens_plan(wheel: str, share: float) -> OnlinePlan:
    """Return MovieLens-100k in the order of time; the last share of its ratings is the online part."""
    ratings, times = read_ratings(wheel), rating_times(wheel)
    ids = torch.stack([ratings.users, ratings.items], 1)
    return OnlinePlan(
        events=TimedEvents(("user", "item"), ids, times, ratings.likes),
        online=len(ratings) - round(share * len(ratings)),
        recipe=RECIPES["stream"],
    )
