"""Copies of a model that goes on learning: what each serves, by when it was synced last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from monolith.table import Adagrad
from monolith_bench.learner import Learner, Recipe
from monolith_bench.served_copies import FollowingCopies, ServedCopy
from monolith_bench.timed_events import OnlinePlan, TimedEvents

EVENTS, ONLINE = 60, 30
RECIPE = Recipe.of_rows(Adagrad(learning_rate=0.5), batch=8).but(dim=4, hidden=(4,))


def plan(seconds_between: int = 1) -> OnlinePlan:
    """Return events of few users and items, one at a time."""
    random = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randint(5, (EVENTS,), generator=random) for _ in range(2)], 1)
    likes = torch.randint(2, (EVENTS,), generator=random).float()
    times = 1_000 + seconds_between * torch.arange(EVENTS)
    return OnlinePlan(events=TimedEvents(("user", "item"), ids, times, likes), online=ONLINE, recipe=RECIPE)


def served(events: OnlinePlan, intervals: Sequence[timedelta | None]) -> list[ServedCopy]:
    """Train one model online, and return its copies."""
    learner = batch_trained(events)
    with FollowingCopies(events, learner, intervals, seed=3) as following:
        following.learn(lambda _: None)
        return following.copies


def batch_trained(events: OnlinePlan) -> Learner:
    learner = Learner(events.recipe, events.events, seed=3)
    learner.train(torch.arange(events.online))
    return learner


def said_by_trainer(events: OnlinePlan, syncs_at: Sequence[int]) -> Tensor:
    """Return what the trainer itself says, asked at each sync for all events until the next."""
    learner, found = batch_trained(events), []
    for first, end in zip(syncs_at, [*syncs_at[1:], EVENTS], strict=True):
        found.append(learner.scores(torch.arange(first, end)))
        for one in range(first, end):
            learner.train(torch.tensor([one]))
    return torch.cat(found)


def test_a_copy_that_is_synced_before_every_event_serves_what_the_trainer_knows() -> None:
    (copy,) = served(plan(), [timedelta(seconds=1)])
    assert copy.syncs == EVENTS - ONLINE - 1
    assert torch.equal(copy.logits, said_by_trainer(plan(), range(ONLINE, EVENTS)))


def test_a_copy_that_is_never_synced_again_serves_what_the_batch_stage_knew() -> None:
    (copy,) = served(plan(), [None])
    assert copy.syncs == 0
    assert torch.equal(copy.logits, batch_trained(plan()).scores(torch.arange(ONLINE, EVENTS)))


@pytest.mark.parametrize("every", [2, 7, 29])
def test_between_two_syncs_a_copy_stays_as_it_was(every: int) -> None:
    (copy,) = served(plan(), [timedelta(seconds=every)])
    assert torch.equal(copy.logits, said_by_trainer(plan(), range(ONLINE, EVENTS, every)))


def test_copies_that_run_at_once_do_not_disturb_each_other() -> None:
    intervals = [timedelta(seconds=1), timedelta(seconds=7), None]
    together = served(plan(), intervals)
    for copy, every in zip(together, intervals, strict=True):
        (alone,) = served(plan(), [every])
        assert torch.equal(copy.logits, alone.logits)


def test_an_interval_is_event_time_whatever_passes_without_events() -> None:
    (copy,) = served(plan(seconds_between=10), [timedelta(seconds=20)])
    assert torch.equal(copy.logits, said_by_trainer(plan(seconds_between=10), range(ONLINE, EVENTS, 2)))
