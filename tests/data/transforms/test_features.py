"""Ids moved to another slot, crossed, or left out."""

from __future__ import annotations

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.transforms import FeatureCombine, SlotFilter, SwitchSlot
from monolith.errors import ConfigError, DataError
from monolith.feature import make_fid, signature_of, slot_of


def test_the_slot_changes_and_the_signature_stays():
    records = records_of([{"a": [make_fid(1, 100), make_fid(2, 7)]}, {}])
    moved = SwitchSlot(column="a", slot=20)(records, first=0)
    assert moved["a"].to_list() == [[make_fid(20, 100), make_fid(20, 7)], []]
    beside = SwitchSlot(column="a", slot=20, into="b")(records, first=0)
    assert beside["b"].to_list() == moved["a"].to_list()
    assert beside["a"].to_list() == records["a"].to_list()


def test_features_are_crossed_pair_by_pair():
    cross = FeatureCombine(left="a", right="b", slot=5, into="ab")
    crossed = cross(records_of([{"a": [1, 2], "b": [3, 4]}, {"a": [1], "b": [4]}, {"a": [1]}]), first=0)["ab"]
    (one_three, one_four, two_three, two_four), again, none = crossed.to_list()
    assert len({one_three, one_four, two_three, two_four}) == 4
    assert again == [one_four]
    assert none == []
    assert slot_of(crossed.flat_values).unique().tolist() == [5]


def test_the_order_of_a_pair_matters():
    records = records_of([{"a": [1], "b": [2]}, {"a": [2], "b": [1]}])
    crossed = FeatureCombine(left="a", right="b", slot=5, into="ab")(records, first=0)["ab"]
    assert signature_of(crossed.flat_values[0]) != signature_of(crossed.flat_values[1])


def test_a_cross_stays_the_same_for_all_time():
    crossed = FeatureCombine(left="a", right="b", slot=1, into="ab")(
        records_of([{"a": [1], "b": [2]}]), first=0
    )
    assert crossed["ab"].to_list() == [[PINNED]]


PINNED = 463039080580586  # rows of tables are trained under this id


def test_ids_are_left_out_by_their_slot_and_records_stay():
    one, two, three = make_fid(1, 9), make_fid(2, 9), make_fid(3, 9)
    records = records_of([{"a": [one, two]}, {"a": [two], "b": [three]}])
    assert rows_of(SlotFilter(drop=(2,))(records, first=0)) == [{"a": [one]}, {"b": [three]}]
    assert rows_of(SlotFilter(keep=(2,))(records, first=0)) == [{"a": [two]}, {"a": [two]}]
    assert rows_of(SlotFilter(drop=(2,), columns=("b",))(records, first=0)) == rows_of(records)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="slot should be less than 32768, while got 32768"):
        SwitchSlot(column="a", slot=1 << 15)
    with pytest.raises(ConfigError, match=r"slots \[1\] are to be kept and dropped"):
        SlotFilter(keep=(1,), drop=(1,))
    with pytest.raises(ConfigError, match="into"):
        FeatureCombine(left="a", right="b", slot=1, into="")


def test_numbers_are_no_ids():
    with pytest.raises(DataError, match="column 'a' must be int64 for this, it is float32"):
        SwitchSlot(column="a", slot=1)(records_of([{"a": [1.0]}]), first=0)


ids = st.lists(st.builds(make_fid, st.integers(0, 3), st.integers(0, 3)), max_size=3)


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({"a": ids, "b": ids}), max_size=8), cuts)
def test_cuts_do_not_matter(rows, cuts):
    records = records_of(rows)
    for transform in (FeatureCombine(left="a", right="b", slot=7, into="ab"), SlotFilter(drop=(1,))):
        assert on_slices(transform, records, cuts) == rows_of(transform(records, first=0))
