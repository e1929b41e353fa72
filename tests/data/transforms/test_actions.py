"""Actions added, and records kept by the strategy they came about by."""

from __future__ import annotations

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.transforms import AddAction, FilterByValue, SpecialStrategy
from monolith.errors import ConfigError

ACTIONS, TIME, STRATEGIES = "line_id.actions", "line_id.req_time", "line_id.special_strategies"


def test_an_action_is_added_where_a_value_says_so():
    late = AddAction(where=FilterByValue(column=TIME, op="gt", operand=5), action=9)
    rows = [{TIME: [6], ACTIONS: [1]}, {TIME: [5], ACTIONS: [1]}, {TIME: [7]}]
    assert late(records_of(rows), first=0)[ACTIONS].to_list() == [[1, 9], [1], [9]]


def test_an_action_that_is_there_is_not_added_again():
    late = AddAction(where=FilterByValue(column=TIME, op="gt", operand=5), action=9)
    assert late(records_of([{TIME: [6], ACTIONS: [9, 1]}]), first=0)[ACTIONS].to_list() == [[9, 1]]


def test_the_first_listed_strategy_decides_whether_a_record_stays_and_its_label():
    strategy = SpecialStrategy(rules="1:1.0:1, 2:0.0, 3:1")
    rows = [
        {STRATEGIES: [2, 1], "label": [0.0]},
        {STRATEGIES: [2], "label": [0.0]},
        {STRATEGIES: [3], "label": [0.0]},
        {STRATEGIES: [4], "label": [0.0]},
        {"label": [0.0]},
    ]
    assert rows_of(strategy(records_of(rows), first=0)) == [
        {"label": [1.0], STRATEGIES: [2, 1]},
        {"label": [0.0], STRATEGIES: [3]},
        {"label": [0.0]},
    ]


def test_records_without_a_strategy_may_be_dropped():
    strategy = SpecialStrategy(rules="1:1", keep_empty=False)
    assert len(strategy(records_of([{"a": [1]}, {STRATEGIES: [1]}]), first=0)) == 1


def test_a_strategy_keeps_its_fraction():
    strategy = SpecialStrategy(rules="1:0.25")
    kept = len(strategy(records_of([{STRATEGIES: [1]}] * 4000), first=0))
    assert kept == pytest.approx(1000, abs=100)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), cuts)
def test_strategies_do_not_depend_on_cuts(strategies, cuts):
    half = SpecialStrategy(rules="1:0.5:1,2:0.5")
    records = records_of([{STRATEGIES: [one] if one else [], "label": [0.0]} for one in strategies])
    assert on_slices(half, records, cuts) == rows_of(half(records, first=0))


@pytest.mark.parametrize(
    ("rules", "message"),
    [("", "at least one rule"), ("1", "expected strategy:rate"), ("1:2", "0 to 1"), ("1:1,1:0", "two rules")],
)
def test_rules_that_make_no_sense_are_refused(rules, message):
    with pytest.raises(ConfigError, match=message):
        SpecialStrategy(rules=rules)
