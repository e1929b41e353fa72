from __future__ import annotations

import hashlib
from dataclasses import replace

from monolith.table import Adagrad, Segment, TableConfig, legacy_names, merge, merged_name

PLAIN = TableConfig(name="any", segments=(Segment(dim=2),))
OTHER = replace(PLAIN, segments=(Segment(dim=2, optimizer=Adagrad()),))


def test_a_name_follows_from_the_slots_in_any_order() -> None:
    assert merged_name(["slot1", "slot0"]) == merged_name(["slot0", "slot1"])
    assert merged_name(["slot0", "slot1"]) == "e21904dd414d1780e5fc904866dc69c2"


def test_slots_that_were_renamed_leave_a_legacy_name() -> None:
    assert legacy_names(["fc_slot_0"]) == ("cde3ba88ba62b682f84241b273f8100c",)
    assert legacy_names(["slot_0", "fc_slot_0_copy"]) == ()


def test_a_legacy_name_keeps_the_order_of_todays_names() -> None:
    expected = hashlib.md5(b"fc_slot_x,slot_7,gid").hexdigest()
    assert legacy_names(["gid", "fc_slot_7", "fc_slot_x"]) != (expected,)
    assert legacy_names(["gid", "fc_slot_7"]) == (hashlib.md5(b"slot_7,gid").hexdigest(),)


def test_slots_configured_alike_share_a_table() -> None:
    tables = merge({"c": PLAIN, "b": OTHER, "a": PLAIN})
    assert [table.slots for table in tables] == [("a", "c"), ("b",)]
    assert [table.config.name for table in tables] == [merged_name(["a", "c"]), merged_name(["b"])]
    assert tables[0].config.segments == PLAIN.segments


def test_old_names_of_all_slots_are_kept_once_and_the_legacy_name_comes_last() -> None:
    slots = {
        "fc_slot_1": replace(PLAIN, extra_restore_names=("x", "y")),
        "fc_slot_2": replace(PLAIN, extra_restore_names=("y", "z")),
    }
    (table,) = merge(slots)
    assert table.config.extra_restore_names == ("x", "y", "z", *legacy_names(slots))


def test_the_configs_given_are_left_alone() -> None:
    shared = replace(PLAIN, extra_restore_names=("x",))
    merge({"fc_slot_1": shared, "fc_slot_2": shared})
    assert shared == replace(PLAIN, extra_restore_names=("x",))


def test_nothing_merges_to_nothing() -> None:
    assert merge({}) == []
