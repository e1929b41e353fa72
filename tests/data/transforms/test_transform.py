"""Transforms in a row, and what a record's number is good for."""

from __future__ import annotations

from typing import Any

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import Records
from monolith.data.transforms import (
    NUMBER,
    AddLabel,
    Compose,
    FilterByAction,
    InstanceReweight,
    NegativeDownsample,
)
from monolith.errors import ConfigError, RestoreError

ACTIONS = "line_id.actions"


def a_stream(size: int) -> Records:
    return records_of([{ACTIONS: [i % 3], "label": [float(i % 2)], "item": [i]} for i in range(size)])


def test_compose_applies_one_after_the_other():
    keep_even = FilterByAction(has_actions=(0, 2))
    keep_two = FilterByAction(has_actions=(2,))
    assert rows_of(Compose([keep_even, keep_two])(a_stream(6), first=0)) == [
        {"item": [2], "label": [0.0], ACTIONS: [2]},
        {"item": [5], "label": [1.0], ACTIONS: [2]},
    ]


def test_compose_of_nothing_changes_nothing():
    records = a_stream(3)
    assert rows_of(Compose([])(records, first=7)) == rows_of(records)


def test_the_number_of_a_record_does_not_leave_compose_unless_it_came_with_it():
    records = a_stream(3)
    assert NUMBER not in Compose([FilterByAction(has_actions=(1,))])(records, first=0).columns


SEVERAL = Compose(
    [
        FilterByAction(has_actions=(0, 1)),
        InstanceReweight(action_priority=(1, 0), rules="0:2:0,1:3:1"),
        NegativeDownsample(drop_rate=0.5),
        AddLabel(tasks="1::0.5"),
        NegativeDownsample(drop_rate=0.5, seed=1),
    ]
)


@settings(deadline=None)
@given(st.integers(0, 30), cuts, st.integers(0, 1 << 40))
def test_random_choices_do_not_depend_on_how_the_stream_is_cut(size, cuts, first):
    records = a_stream(size)
    assert on_slices(SEVERAL, records, cuts, first) == rows_of(SEVERAL(records, first=first))


def test_copies_of_one_record_are_drawn_for_one_by_one():
    many = Compose(
        [InstanceReweight(action_priority=(0,), rules="0:64:0"), NegativeDownsample(drop_rate=0.5)]
    )
    one = records_of([{ACTIONS: [0], "label": [0.0]}])
    assert 16 < len(many(one, first=3)) < 48


class Counting:
    """Remembers how many records it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, records: Records, *, first: int) -> Records:  # noqa: ARG002
        self.seen += len(records)
        return records

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_the_state_of_compose_is_that_of_those_that_have_one():
    row = Compose([FilterByAction(has_actions=(1,)), Counting()])
    row(a_stream(6), first=0)
    assert row.state() == {"1": {"seen": 2}}
    again = Compose([FilterByAction(has_actions=(1,)), Counting()])
    again.restore(row.state())
    assert again.state() == row.state()


def test_a_state_of_other_transforms_is_refused():
    with pytest.raises(RestoreError, match="Restore into the list it was saved from"):
        Compose([FilterByAction(has_actions=(1,))]).restore({"0": {"seen": 2}})


def test_what_cannot_be_called_is_no_transform():
    with pytest.raises(ConfigError, match="number 1 is not a transform"):
        Compose([FilterByAction(has_actions=(1,)), "filter"])  # type: ignore[list-item]
