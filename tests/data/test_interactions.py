"""Interaction logs as sequences, and the splits of papers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries
from torch import Tensor

from monolith.data import SequenceSplit, UserSequences, leave_one_out, split_by_time
from monolith.errors import DataError

Event = tuple[int, int, int]
"""User, item and time."""


def log_of(*events: Event, min_length: int = 1) -> UserSequences:
    users, items, times = (torch.tensor([event[i] for event in events]).long() for i in range(3))
    return UserSequences.of(users, items, times, min_length=min_length)


def sequences(log: UserSequences) -> dict[int, list[int]]:
    pieces = torch.split(log.items, log.row_splits.diff().tolist())
    return dict(zip(log.users.tolist(), [piece.tolist() for piece in pieces], strict=True))


def trained_on(log: UserSequences, split: SequenceSplit) -> dict[int, list[int]]:
    starts = log.row_splits[:-1].tolist()
    ends = split.train.tolist()
    return {
        user: log.items[start:end].tolist()
        for user, start, end in zip(log.users.tolist(), starts, ends, strict=True)
    }


def histories(log: UserSequences, places: Tensor, most: int = 100) -> list[tuple[int, list[int]]]:
    """The item at each place, and those before it."""
    before, splits = log.windows(log.rows_of(places), places, most)
    pieces = torch.split(log.items[before], splits.diff().tolist())
    return [(int(log.items[at]), piece.tolist()) for at, piece in zip(places, pieces, strict=True)]


LOG = log_of((2, 20, 5), (1, 10, 1), (2, 21, 6), (1, 11, 2), (1, 12, 3), (2, 22, 7), (1, 13, 9), (3, 30, 4))


def test_each_user_has_a_sequence_in_the_order_of_time() -> None:
    assert sequences(LOG) == {1: [10, 11, 12, 13], 2: [20, 21, 22], 3: [30]}
    assert LOG.times.tolist() == [1, 2, 3, 9, 5, 6, 7, 4]


def test_events_of_the_same_time_stay_in_the_order_of_the_log() -> None:
    events = [(user, item, item % 2) for item in range(40) for user in (1, 2)]
    evens_first = [*range(0, 40, 2), *range(1, 40, 2)]
    assert sequences(log_of(*events)) == {1: evens_first, 2: evens_first}


def test_users_with_few_events_are_left_out() -> None:
    short = log_of((2, 20, 1), (1, 10, 1), (1, 11, 2), (5, 50, 1), min_length=2)
    assert sequences(short) == {1: [10, 11]}
    assert sequences(log_of((1, 10, 1), min_length=2)) == {}


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="2 users, 1 items and 2 times"):
        UserSequences.of(torch.zeros(2), torch.zeros(1), torch.zeros(2))


def test_leave_one_out_tests_the_last_and_validates_the_one_before() -> None:
    split = leave_one_out(LOG)
    assert histories(LOG, split.test) == [(13, [10, 11, 12]), (22, [20, 21])]
    assert histories(LOG, split.valid) == [(12, [10, 11]), (21, [20])]
    assert trained_on(LOG, split) == {1: [10, 11], 2: [20], 3: [30]}  # the third is too short to test
    assert split.protocol.startswith("leave-one-out")


def test_without_valid_all_before_the_last_is_trained_on() -> None:
    split = leave_one_out(LOG, valid=False)
    assert trained_on(LOG, split) == {1: [10, 11, 12], 2: [20, 21], 3: [30]}
    assert len(split.valid) == 0
    assert "all before it trained on" in split.protocol


def test_a_split_by_time_trains_on_the_past_and_tests_each_later_event() -> None:
    split = split_by_time(LOG, 6, valid_from=3)
    assert trained_on(LOG, split) == {1: [10, 11], 2: [], 3: []}
    assert histories(LOG, split.valid) == [(12, [10, 11])]  # 20 and 30 have no history
    assert histories(LOG, split.test) == [(13, [10, 11, 12]), (21, [20]), (22, [20, 21])]
    assert split.protocol == "by time: trained on events before 3, tested on those from 6 on"
    with pytest.raises(DataError, match="valid_from 7 is after test_from 6"):
        split_by_time(LOG, 6, valid_from=7)


def test_a_window_has_the_most_recent_steps_and_never_those_of_another_user() -> None:
    assert histories(LOG, torch.tensor([3, 4, 6]), most=2) == [(13, [11, 12]), (20, []), (22, [20, 21])]


events_of_some = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 5)), min_size=1)


@settings(max_examples=tries(50), deadline=None)
@given(events_of_some, st.integers(0, 6), st.integers(0, 6))
def test_splits_are_as_defined_whatever_the_log(events: list[Event], one: int, other: int) -> None:
    log, valid_from, test_from = log_of(*events), min(one, other), max(one, other)
    plain = {user: sorted((e for e in events if e[0] == user), key=lambda e: e[2]) for user, _, _ in events}
    by_time = split_by_time(log, test_from, valid_from=valid_from)
    for user, mine in trained_on(log, by_time).items():
        assert mine == [item for _, item, at in plain[user] if at < valid_from]
    wanted = [
        (own[i][1], [item for _, item, _ in own[:i]])
        for _, own in sorted(plain.items())
        for i in range(1, len(own))
        if own[i][2] >= test_from
    ]
    assert histories(log, by_time.test) == wanted
    last = [
        (own[-1][1], [item for _, item, _ in own[:-1]]) for _, own in sorted(plain.items()) if len(own) > 2
    ]
    assert histories(log, leave_one_out(log).test) == last
