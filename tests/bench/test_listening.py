"""The synthetic log of listening: days in order, histories that end before their example, eleven tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from monolith.data import Pipeline
from monolith.data.records import Records
from monolith.errors import ConfigError, RestoreError
from monolith_bench.listening import (
    LABEL,
    STEPS,
    TABLES,
    ListeningConfig,
    ListeningDays,
    ListeningLog,
    feature_spec,
)

CONFIG = ListeningConfig(users=30, items=200, max_length=12, days=3, examples=100, seed=1)
LOG = ListeningLog(CONFIG)
EVERYTHING = LOG.records(0, len(LOG))


def single(records: Records, name: str) -> np.ndarray:
    return records[name].flat_values.numpy()


def equal(one: Records, other: Records) -> bool:
    return set(one.columns) == set(other.columns) and all(
        torch.equal(one[name].flat_values, other[name].flat_values)
        and torch.equal(one[name].row_splits, other[name].row_splits)
        for name in one.columns
    )


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    assert equal(EVERYTHING, ListeningLog(CONFIG).records(0, len(LOG)))
    assert not equal(EVERYTHING, ListeningLog(replace(CONFIG, seed=2)).records(0, len(LOG)))


def test_examples_are_in_the_order_of_time_and_each_day_has_as_many() -> None:
    times = single(EVERYTHING, "time")
    assert (np.diff(times) >= 0).all()
    days = (times - times.min() // 86_400 * 86_400) // 86_400
    assert np.bincount(days).tolist() == [CONFIG.examples] * CONFIG.days


def test_a_history_has_the_events_of_its_user_before_the_example_and_no_other() -> None:
    """Each example is compared with the examples before it, which its history must end with."""
    users, times, items = (single(EVERYTHING, name) for name in ("user", "time", "item"))
    listened = single(EVERYTHING, LABEL)
    histories, actions = EVERYTHING["history"].to_list(), EVERYTHING["history.action"].to_list()
    seen_at = EVERYTHING["history.time"].to_list()
    for row, (history, action, at) in enumerate(zip(histories, actions, seen_at, strict=True)):
        before = np.flatnonzero(users[:row] == users[row])[-CONFIG.max_length :]
        assert history[len(history) - len(before) :] == items[before].tolist()
        assert [one >= 2 for one in action[len(action) - len(before) :]] == (listened[before] == 1).tolist()
        assert at == sorted(at)
        assert all(one <= times[row] for one in at)
        assert 4 <= len(history) <= CONFIG.max_length


def test_a_history_is_the_same_when_it_is_read_with_other_examples() -> None:
    assert equal(LOG.records(150, 160), EVERYTHING.slice(150, 160))


def test_an_example_has_no_action_because_it_is_what_is_predicted() -> None:
    assert len(EVERYTHING["action"].flat_values) == 0
    assert set(single(EVERYTHING, "history.action")) <= {0, 1, 2, 3}


def test_there_are_eleven_tables_with_as_many_ids_as_their_sizes_say() -> None:
    assert len(TABLES) == len(CONFIG.sizes) == 11
    for name, size in CONFIG.sizes.items():
        found = single(EVERYTHING, name)
        assert ((found >= 0) & (found < size)).all()


def test_batches_share_rows_between_items_and_their_histories() -> None:
    spec = feature_spec(CONFIG.max_length)
    batch = next(iter(Pipeline(ListeningDays(LOG, 10, first=0, last=0)).to_batches(spec)))
    lists = ("history", *(f"history.{name}" for name in (*STEPS, "time")))
    assert batch.ids.names == (*TABLES, *lists)
    assert {len(batch.ids[name].flat_values) for name in lists} == {int(LOG.lengths(0, 10).sum())}


def test_days_resume_at_any_record() -> None:
    killed, resumed = (ListeningDays(LOG, 30, first=0, last=1) for _ in range(2))
    taken = [len(next(iter(killed))) for _ in range(4)]  # the fourth is what is left of the first day
    assert taken == [30, 30, 30, 10]
    resumed.restore(killed.position())
    rest = list(resumed)
    assert equal(rest[0], LOG.records(100, 130))
    assert sum(map(len, rest)) == 100


def test_another_position_is_refused() -> None:
    days = ListeningDays(LOG, 30, first=0, last=0)
    with pytest.raises(RestoreError, match="of another kind"):
        days.restore({"source": "drift", "next": 0})
    with pytest.raises(RestoreError, match="not the number of one of the 300 examples"):
        days.restore({"source": "listening", "next": 301})


def test_the_label_is_drawn_from_probabilities_that_popularity_does_not_know() -> None:
    log = ListeningLog(replace(CONFIG, users=200, items=300, examples=4000, days=1))
    assert log.probabilities.mean() == pytest.approx(single(log.records(0, 4000), LABEL).mean(), abs=0.03)
    assert log.best_auc(0) > log.popularity_auc(0) + 0.1


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="users must be at least 1, got 0"):
        replace(CONFIG, users=0)
