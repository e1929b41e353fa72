"""Name maps: the original's names and ours, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.checkpoint.original.names import NameMap, NameRule, Slot, plain_name, split_slot
from monolith.errors import ConfigError

TOML = """
[tables]
"MonolithHashTable_item_*" = "item"
MonolithHashTable_item_7 = "other"
fc_slot_2 = false

[variables]
"tower/dense_*/kernel" = { name = "tower.*.weight", transpose = true }
"tower/dense_*/bias" = "tower.*.bias"
"old/**" = false
"**/deep" = "top.**"
"""


@pytest.fixture
def names(tmp_path: Path) -> NameMap:
    path = tmp_path / "names.toml"
    path.write_text(TOML)
    return NameMap.read(str(path))


def test_stars_carry_over_and_a_rule_without_them_wins(names: NameMap) -> None:
    assert names.ours("tables", "MonolithHashTable_item_0") == ("item", None)
    assert names.ours("tables", "MonolithHashTable_item_7") == ("other", None)
    assert names.ours("tables", "fc_slot_2") == (None, None)
    assert names.ours("tables", "fc_slot_3") is None
    assert names.ours("variables", "tower/dense_12/kernel") == ("tower.12.weight", True)
    assert names.ours("variables", "tower/a/dense_1/kernel") is None, "a star stands for one part"
    assert names.ours("variables", "old/a/b") == (None, None)
    assert names.ours("variables", "a/b/deep") == ("top.a/b", None)


def test_a_map_is_read_from_right_to_left_where_that_is_one_name(names: NameMap) -> None:
    assert names.original("variables", "tower.12.weight") == ("tower/dense_12/kernel", True)
    assert names.original("variables", "else") is None
    assert names.original("tables", "other") == ("MonolithHashTable_item_7", None)
    with pytest.raises(ConfigError, match=r"does not say what 'item' is called in an export; add a line"):
        names.original("tables", "item")


def test_a_map_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('{"tables": {"a": "b"}, "variables": {"x": {"name": "y", "transpose": false}}}')
    assert NameMap.read(str(path)) == NameMap((NameRule("a", "b"),), (NameRule("x", "y", False),))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[table]\na = 'b'", r"unknown section \[table\]; the nearest known one is \[tables\]"),
        ("[tables]\na = 3", "expected a name, false, or"),
        (
            "[variables]\na = { name = 'b', transposed = true }",
            "unknown key 'transposed'; the nearest .* 'transpose'",
        ),
        ("[variables]\na = { name = 'b', transpose = 1 }", "transpose must be true or false"),
        ("[variables]\na = 'b.*'", "the stars on the right must be on the left"),
        ("[variables", "name map"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "names.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        NameMap.read(str(path))


def test_a_rule_for_something_that_the_model_does_not_have_names_the_nearest(names: NameMap) -> None:
    with pytest.raises(
        ConfigError, match=r"the model has no table 'other'; the nearest known one is 'others'"
    ):
        names.unknown_targets("tables", ["item", "others"])


def test_slots_are_told_from_variables() -> None:
    assert split_slot("a/b/Adam") == Slot("a/b", "Adam", 0)
    assert split_slot("a/Adam_1") == Slot("a", "Adam", 1)
    assert split_slot("a/Ftrl_1") == Slot("a", "Ftrl", 1)
    assert split_slot("tower/Adamant") is None
    assert split_slot("Adam") is None
    named = plain_name("a/.OPTIMIZER_SLOT/optimizer/v/.ATTRIBUTES/VARIABLE_VALUE")
    assert split_slot(named) == Slot("a", "Adam", 1)
