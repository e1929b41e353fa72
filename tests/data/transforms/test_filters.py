"""Filters by fids, slots, actions and labels."""

from __future__ import annotations

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.transforms import (
    Compose,
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterBySlot,
    instance_filters,
    parse_integer_list,
)
from monolith.errors import ConfigError
from monolith.feature import make_fid

ACTIONS = "line_id.actions"


def kept(filter_, rows):
    return filter_.mask(records_of(rows)).tolist()


def test_has_fids_asks_for_one_of_them_in_any_column():
    rows = [{"a": [1, 2]}, {"b": [3]}, {"a": [4], "b": [5]}, {}]
    assert kept(FilterByFid(has_fids=(2, 3)), rows) == [True, True, False, False]


def test_filter_fids_may_not_be_there():
    rows = [{"a": [1, 2]}, {"b": [3]}, {"a": [4], "b": [5]}, {}]
    assert kept(FilterByFid(filter_fids=(2, 5)), rows) == [False, True, False, True]


def test_select_fids_must_all_be_there():
    rows = [{"a": [1], "b": [5]}, {"a": [1]}, {"b": [5, 1]}]
    assert kept(FilterByFid(select_fids=(1, 5)), rows) == [True, False, True]


def test_only_named_columns_are_looked_at():
    assert kept(FilterByFid(has_fids=(1,), columns=("b",)), [{"a": [1]}, {"b": [1]}]) == [False, True]


def test_what_identifies_the_event_is_no_fid():
    assert kept(FilterByFid(has_fids=(1,)), [{"line_id.uid": [1]}, {"a": [1]}]) == [False, True]


def test_fids_of_the_upper_half_may_be_written_signed_or_unsigned():
    rows = [{"a": [-5]}, {"a": [5]}]
    assert kept(FilterByFid(has_fids=(2**64 - 5,)), rows) == [True, False]
    assert kept(FilterByFid(has_fids=(-5,)), rows) == [True, False]


def test_a_filter_that_asks_for_nothing_keeps_everything():
    assert kept(FilterByFid(), [{"a": [1]}, {}]) == [True, True]
    assert kept(FilterByAction(has_actions=()), [{}]) == [True]


def test_a_fid_cannot_be_required_and_refused():
    with pytest.raises(ConfigError, match=r"\[7\] may not be there and must be"):
        FilterByFid(filter_fids=(7,), select_fids=(7,))


def test_select_slots_must_all_be_there():
    rows = [{"a": [make_fid(1, 9)], "b": [make_fid(2, 9)]}, {"a": [make_fid(1, 9)]}, {}]
    assert kept(FilterBySlot(select_slots=(1, 2)), rows) == [True, False, False]


def test_slots_of_version_1_are_in_other_bits():
    rows = [{"a": [make_fid(600, 9, 1)]}, {"a": [make_fid(600, 9, 2)]}]
    assert kept(FilterBySlot(select_slots=(600,), version=1), rows) == [True, False]


def test_a_slot_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="slot should be less than 1024, while got 1024"):
        FilterBySlot(select_slots=(1024,), version=1)


def test_one_of_the_actions_is_enough():
    rows = [{ACTIONS: [1, 2]}, {ACTIONS: [3]}, {}]
    assert kept(FilterByAction(has_actions=(2, 9)), rows) == [True, False, False]


def test_a_label_must_reach_the_threshold_at_its_position():
    by_label = FilterByLabel(thresholds=(1.0, 0.5))
    rows = [{"label": [1.0, 0.0]}, {"label": [0.9, 0.5]}, {"label": [0.9, 0.4]}, {"label": [0.0, 0.0, 9.0]}]
    assert kept(by_label, rows) == [True, True, False, False]


def test_a_record_with_too_few_labels_is_dropped():
    assert kept(FilterByLabel(thresholds=(1.0, 0.5)), [{"label": [5.0]}, {}]) == [False, False]
    assert kept(FilterByLabel(thresholds=(1.0,)), [{}, {"a": [1]}]) == [False, False]


def test_thresholds_are_needed():
    with pytest.raises(ConfigError, match="thresholds"):
        FilterByLabel(thresholds=())


# Lists between commas


@pytest.mark.parametrize(
    ("text", "numbers"), [("1,2,3", (1, 2, 3)), ("", ()), (" 4 ,,-5,4", (4, -5)), (",", ())]
)
def test_integers_between_commas(text, numbers):
    assert parse_integer_list(text) == numbers


@pytest.mark.parametrize("item", ["x", "1.5", "1_000", "--1", "0x10"])
def test_what_is_no_integer_is_named(item):
    with pytest.raises(ConfigError, match=f"^Invalid integer string: {item}$"):
        parse_integer_list(f"1,{item},2")


values = st.integers(0, 5)
a_row = st.fixed_dictionaries(
    {},
    optional={
        "a": st.lists(st.builds(make_fid, values, values), max_size=3),
        "b": st.lists(st.builds(make_fid, values, values), max_size=3),
        ACTIONS: st.lists(values, max_size=3),
        "line_id.req_time": st.lists(st.integers(0, 9), min_size=1, max_size=1),
    },
)
some = st.sets(values, max_size=2)
some_fids = st.sets(st.builds(make_fid, values, values), max_size=3)


@settings(deadline=None)
@given(
    rows=st.lists(a_row, max_size=12),
    earliest=st.integers(0, 9),
    unwanted=some_fids,
    has=some_fids,
    select=some_fids,
    slots=some,
    actions=some,
    cuts=cuts,
)
def test_the_usual_filters_agree_with_what_they_say(
    *, rows, earliest, unwanted, has, select, slots, actions, cuts
):
    select -= unwanted

    def listed(numbers):
        return ",".join(map(str, numbers))

    filters = Compose(
        instance_filters(
            req_time_min=earliest,
            filter_fids=listed(unwanted),
            has_fids=listed(has),
            select_fids=listed(select),
            select_slots=listed(slots),
            has_actions=listed(actions),
        )
    )

    def wanted(row):
        fids = {*row.get("a", ()), *row.get("b", ())}
        return (
            "line_id.req_time" in row
            and row["line_id.req_time"][0] >= earliest
            and not fids & unwanted
            and (not has or fids & has)
            and select <= fids
            and slots <= {fid >> 48 for fid in fids}
            and (not actions or actions & set(row.get(ACTIONS, ())))
        )

    records = records_of(rows)
    expected = rows_of(records_of([row for row in rows if wanted(row)]))
    assert rows_of(filters(records, first=0)) == expected
    assert on_slices(filters, records, cuts) == expected
