"""How often a record is trained on, and with which label, by its actions: a line of the table each."""

from __future__ import annotations

import math

import pytest
from data.transforms.record_lists import cuts, on_slices, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data.transforms import InstanceReweight
from monolith.errors import ConfigError

NOW, BEFORE = "line_id.actions", "line_id.pre_actions"

BUY, CLICK, SHOW, SHARE, OTHER = 1, 2, 3, 4, 5
"""In order of priority; SHARE has a weight but no priority, OTHER neither."""
REWEIGHT = InstanceReweight(action_priority=(BUY, CLICK, SHOW), rules="1:5:1,2:2:1,3:1:0,4:3:1")


def emitted(now, before=(), label=0.0):
    """Return the labels of the copies of one record."""
    row = {NOW: list(now), BEFORE: list(before), "label": [label]}
    return [one[0] for one in REWEIGHT(records_of([row]), first=0)["label"].to_list()]


def test_the_action_of_highest_priority_decides_label_and_copies():
    assert emitted([SHOW]) == [0.0]
    assert emitted([SHOW, CLICK]) == [1.0, 1.0]
    assert emitted([CLICK, BUY, SHOW]) == [1.0] * 5


def test_a_weight_of_0_drops_the_record():
    none = InstanceReweight(action_priority=(SHOW,), rules="3:0:0")
    assert len(none(records_of([{NOW: [SHOW], "label": [0.0]}]), first=0)) == 0


def test_unlisted_actions_with_a_weight_multiply_the_copies():
    assert emitted([CLICK, SHARE]) == [1.0] * 6
    assert emitted([CLICK, OTHER]) == [1.0] * 2


def test_without_actions_or_with_unlisted_ones_only_there_is_one_unchanged_copy():
    assert emitted([], label=0.5) == [0.5]
    assert emitted([OTHER], label=0.5) == [0.5]
    assert emitted([SHARE], label=0.5) == [0.5]


def test_without_a_label_a_record_is_dropped():
    assert len(REWEIGHT(records_of([{NOW: [BUY]}, {BEFORE: [SHOW]}, {}]), first=0)) == 0


def test_another_label_than_before_takes_the_copies_of_both():
    assert emitted([SHOW, CLICK], before=[SHOW]) == [1.0] * 3


def test_the_same_label_takes_only_what_is_missing():
    assert emitted([CLICK, BUY], before=[CLICK]) == [1.0] * 3


def test_the_same_label_with_fewer_copies_than_before_is_reversed():
    assert emitted([BUY], before=[CLICK, SHARE]) == [0.0]  # 5 now, 6 then


def test_nothing_new_is_dropped():
    assert emitted([SHOW], before=[CLICK]) == []
    assert emitted([CLICK], before=[CLICK]) == []
    assert emitted([], before=[SHOW]) == []
    assert emitted([OTHER], before=[SHOW]) == []
    assert emitted([OTHER], before=[SHARE]) == []


def test_unlisted_earlier_actions_count_as_the_one_unchanged_copy_they_were():
    assert emitted([CLICK], before=[OTHER], label=0.0) == [1.0] * 3
    assert emitted([CLICK], before=[OTHER], label=1.0) == [1.0]


def test_everything_else_of_a_record_is_copied():
    rows = [{NOW: [CLICK], "label": [0.0, 7.0], "item": [11, 12]}, {NOW: [SHOW], "label": [1.0]}]
    copy = {"item": [11, 12], "label": [1.0, 7.0], NOW: [CLICK]}
    assert rows_of(REWEIGHT(records_of(rows), first=0)) == [copy, copy, {"label": [0.0], NOW: [SHOW]}]


def test_another_label_may_be_meant():
    second = InstanceReweight(action_priority=(CLICK,), rules="2:1:1", label_index=1)
    rows = [{NOW: [CLICK], "label": [0.0, 0.0]}, {NOW: [CLICK], "label": [0.0]}]
    assert second(records_of(rows), first=0)["label"].to_list() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("priority", "rules", "message"),
    [
        ((), "1:1:1", "must list actions"),
        ((1, 1), "1:1:1", "each once"),
        ((1, 2), "1:1:1", r"actions \[2\] have a priority but no rule"),
        ((1,), "1:1", "expected action:weight:label"),
        ((1,), "1:-1:1", "0 or more"),
        ((1,), "1:0.5:1", "Invalid integer string: 0.5"),
        ((1,), "1:1:1,1:2:1", "two rules"),
        ((1, 2), "1:1:1,2:1:2", "not clear what the others are reversed to"),
    ],
)
def test_rules_that_make_no_sense_are_refused(priority, rules, message):
    with pytest.raises(ConfigError, match=message):
        InstanceReweight(action_priority=priority, rules=rules)


def plain_reweight(row, priority, rules):
    """The labels of a record's copies, told one record at a time."""
    if not row["label"]:
        return []
    own = row["label"][0]

    def rank(actions):
        if not actions:
            return len(priority) + 1
        return min(priority.index(one) if one in priority else len(priority) for one in actions)

    def worth(actions):
        if rank(actions) >= len(priority):
            return 1, own
        deciding = priority[rank(actions)]
        unlisted = [rules[one][0] for one in set(actions) if one in rules and one not in priority]
        return rules[deciding][0] * math.prod(unlisted), rules[deciding][1]

    now, before = row[NOW], row[BEFORE]
    copies, label = worth(now)
    if not before:
        return [label] * copies
    if rank(now) >= rank(before):
        return []
    old_copies, old_label = worth(before)
    if label != old_label:
        return [label] * (copies + old_copies)
    if old_copies > copies:
        return [0.0 if label > 0 else 1.0] * (old_copies - copies)
    return [label] * (copies - old_copies)


actions = st.lists(st.integers(1, 6), max_size=3)
a_row = st.fixed_dictionaries(
    {NOW: actions, BEFORE: actions, "label": st.lists(st.sampled_from([0.0, 1.0]), max_size=1)}
)
a_rule = st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0]))


@settings(deadline=None)
@given(
    st.lists(a_row, max_size=8),
    st.permutations([1, 2, 3]),
    st.fixed_dictionaries(dict.fromkeys((1, 2, 3, 4, 5), a_rule)),
    cuts,
)
def test_reweighting_agrees_with_the_plain_telling(rows, priority, rules, cuts):
    text = ",".join(f"{action}:{weight}:{label}" for action, (weight, label) in rules.items())
    reweight = InstanceReweight(action_priority=tuple(priority), rules=text)
    rows = [{**row, "number": [i]} for i, row in enumerate(rows)]
    expected = [
        (i, label) for i, row in enumerate(rows) for label in plain_reweight(row, list(priority), rules)
    ]
    records = records_of(rows)
    result = reweight(records, first=0)
    found = [(row["number"][0], row["label"][0]) for row in rows_of(result)]
    assert found == expected
    assert on_slices(reweight, records, cuts) == rows_of(result)
