"""Labels made of actions, moved, capped and normalized."""

from __future__ import annotations

import math

import pytest
from data.transforms.record_lists import cuts, floats, on_slices, per_record, records_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import BatchSpec, make_batch
from monolith.data.transforms import (
    INVALID_LABEL,
    AddLabel,
    BlankInvalidLabels,
    LabelNormalization,
    LabelUpperBound,
    NormStep,
    ScatterLabel,
    UseFieldAsLabel,
    is_valid,
    label_matrix,
)
from monolith.errors import ConfigError

ACTIONS, CHANNEL, RATE = "line_id.actions", "line_id.chnid", "line_id.sample_rate"
NO = INVALID_LABEL


def labels(transform, rows):
    return transform(records_of(rows), first=0)["label"].to_list()


# AddLabel


def test_a_positive_action_gives_1_and_wins_over_negative_ones():
    assert labels(AddLabel(tasks="1,2:3:1"), [{ACTIONS: [1]}, {ACTIONS: [3, 2]}]) == [[1.0], [1.0]]


def test_where_negative_actions_are_listed_a_record_with_none_of_them_is_invalid():
    assert labels(AddLabel(tasks="1:3:1"), [{ACTIONS: [3]}, {ACTIONS: [4]}, {}]) == [[0.0], [NO], [NO]]


def test_where_none_are_listed_every_other_record_is_negative():
    assert labels(AddLabel(tasks="1::1"), [{ACTIONS: [4]}, {}]) == [[0.0], [0.0]]


def test_one_label_is_appended_per_task():
    added = labels(AddLabel(tasks="1::1;2:1:1;3:4:1"), [{"label": [1.0], ACTIONS: [1]}])
    assert added == [[1.0, 1.0, 0.0, NO]]


def test_a_first_label_that_was_there_and_is_not_above_0_becomes_invalid():
    rows = [{"label": [0.0, 0.0]}, {"label": [-1.0]}, {"label": [0.5]}]
    assert labels(AddLabel(tasks="1::1"), rows) == [[NO, 0.0, 0.0], [NO, 0.0], [0.5, 0.0]]


def test_the_sample_rate_becomes_the_new_one():
    added = AddLabel(tasks="1::1", new_sample_rate=0.25)(records_of([{RATE: [0.5]}, {}]), first=0)
    assert added[RATE].to_list() == [[0.25], [0.25]]


def test_negatives_may_have_another_value():
    assert labels(AddLabel(tasks="1::1", negative_value=-1.0), [{ACTIONS: [2]}]) == [[-1.0]]


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_a_fraction_of_the_negatives_is_kept_and_the_rest_become_invalid(rate):
    found = label_matrix(AddLabel(tasks=f"1::{rate}")(records_of([{}] * 4000), first=0), 1)
    assert is_valid(found).float().mean().item() == pytest.approx(rate, abs=0.03)


def test_tasks_draw_for_themselves():
    found = label_matrix(AddLabel(tasks="1::0.5;2::0.5")(records_of([{}] * 400), first=0), 2)
    assert not bool((found[:, 0] == found[:, 1]).all())


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("", "at least one"),
        ("1:2", "expected positives:negatives:rate"),
        (":2:1", "at least one positive action"),
        ("1,2:2:1", r"\[2\] are both positive and negative"),
        ("1:2:1.5", "from 0 to 1, got 1.5"),
        ("1:2:often", "expected a number, got 'often'"),
        ("a:2:1", "Invalid integer string: a"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(tasks, message):
    with pytest.raises(ConfigError, match=message):
        AddLabel(tasks=tasks)


some_actions = st.lists(st.integers(1, 5), max_size=3)
some_labels = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, NO]), max_size=3)
a_row = st.fixed_dictionaries({ACTIONS: some_actions, "label": some_labels})


@settings(deadline=None)
@given(st.lists(a_row, max_size=8), st.sets(st.integers(1, 3), min_size=1), st.sets(st.integers(4, 6)), cuts)
def test_add_label_agrees_with_what_it_says(rows, positive, negative, cuts):
    def reference(row):
        actions = set(row[ACTIONS])
        if row["label"] and row["label"][0] <= 0:
            row["label"][0] = NO
        value = 0.0
        if actions & positive:
            value = 1.0
        elif negative and not actions & negative:
            value = NO
        return {**row, "label": [*row["label"], value], RATE: [1.0]}

    tasks = f"{','.join(map(str, positive))}:{','.join(map(str, negative))}:1"
    records = records_of(rows)
    expected = per_record(rows, reference)
    assert rows_of(AddLabel(tasks=tasks)(records, first=0)) == expected
    assert on_slices(AddLabel(tasks=tasks), records, cuts) == expected


# Moved


def test_the_first_label_goes_to_the_position_of_its_channel():
    scatter = ScatterLabel(positions="7:0,9:2")
    rows = [{CHANNEL: [9], "label": [1.0]}, {CHANNEL: [7], "label": [0.5, 3.0]}]
    assert labels(scatter, rows) == [[NO, NO, 1.0], [0.5, NO, NO]]


def test_a_channel_that_is_not_listed_leaves_all_labels_invalid():
    scatter = ScatterLabel(positions="0:0")
    rows = [{CHANNEL: [5], "label": [1.0]}, {"label": [1.0]}, {CHANNEL: [0], "label": [1.0]}]
    assert labels(scatter, rows) == [[NO], [NO], [1.0]]


@pytest.mark.parametrize("positions", ["", "7", "7:-1", "7:0,7:1", "a:1"])
def test_positions_that_make_no_sense_are_refused(positions):
    with pytest.raises(ConfigError):
        ScatterLabel(positions=positions)


def test_a_field_becomes_a_label():
    use = UseFieldAsLabel(column="line_id.rank", index=1)
    rows = [{"line_id.rank": [3], "label": [1.0, 1.0]}, {"line_id.rank": [4]}, {"label": [1.0]}]
    assert labels(use, rows) == [[1.0, 3.0], [NO, 4.0], [1.0]]
    assert labels(UseFieldAsLabel(column="x"), [{"x": [0.5], "label": [1.0, 2.0]}]) == [[0.5, 2.0]]


# Capped and normalized


def test_labels_are_capped_position_by_position():
    bound = LabelUpperBound(bounds=(1.0, 10.0))
    rows = [{"label": [5.0, 5.0, 50.0]}, {"label": [0.5, 50.0]}, {"label": [NO, 3.0]}]
    assert labels(bound, rows) == [[1.0, 5.0, 50.0], [0.5, 10.0], [NO, 3.0]]


def test_a_record_with_fewer_labels_than_bounds_stays_as_it_is():
    assert labels(LabelUpperBound(bounds=(1.0, 10.0)), [{"label": [5.0]}, {}]) == [[5.0], []]


@pytest.mark.parametrize(
    ("method", "value", "label", "result"),
    [
        ("log", 1.0, math.e - 1, 1.0),
        ("scale", 0.5, 3.0, 1.5),
        ("scale2int", 0.5, 3.0, 1.0),
        ("pow", 2.0, 3.0, 9.0),
        ("repow", 2.0, 3.0, 8.0),
        ("scalelog", 2.0, (math.e - 1) / 2, 1.0),
    ],
)
def test_each_method(method, value, label, result):
    step = LabelNormalization(steps=(NormStep(method=method, value=value),))
    assert labels(step, [{"label": [label]}])[0][0] == pytest.approx(result)


def test_steps_follow_each_other():
    steps = (NormStep(method="scale", value=0.5), NormStep(method="pow", value=2.0))
    assert labels(LabelNormalization(steps=steps), [{"label": [4.0, 6.0]}]) == [[4.0, 9.0]]
    assert labels(LabelNormalization(steps=steps, index=1), [{"label": [4.0, 6.0]}]) == [[4.0, 9.0]]
    assert labels(LabelNormalization(steps=steps, index=1), [{"label": [1.0, 6.0]}]) == [[1.0, 9.0]]


def test_invalid_labels_stay_and_those_without_a_result_become_so():
    log = LabelNormalization(steps=(NormStep(method="log", value=0.0),))
    assert labels(log, [{"label": [NO, 1.0, -1.0, 0.0]}]) == [[NO, 0.0, NO, NO]]


def test_a_normalization_without_steps_is_refused():
    with pytest.raises(ConfigError, match="at least one step"):
        LabelNormalization(steps=())
    with pytest.raises(ConfigError, match="repow"):
        NormStep(method="repow", value=-1.0)


# What a model sees


def test_blank_labels_are_nan_in_a_batch_as_missing_ones_are():
    records = BlankInvalidLabels()(records_of([{"label": [NO, 1.0]}, {"label": [0.5]}]), first=0)
    spec = BatchSpec(ids=(), labels={"a": ("label", 0), "b": ("label", 1)})
    batch = make_batch(records, spec)
    assert batch.labels["a"].isnan().tolist() == [True, False]
    assert batch.labels["b"].isnan().tolist() == [False, True]


def test_a_matrix_of_labels_is_filled_with_invalid_ones():
    found = label_matrix(records_of([{"label": [1.0]}, {"label": [1.0, 2.0, 3.0]}]), 2)
    assert found.tolist() == [[1.0, NO], [1.0, 2.0]]
    assert is_valid(found).tolist() == [[True, False], [True, True]]


@settings(deadline=None)
@given(st.lists(a_row, max_size=8), st.lists(st.sampled_from(floats(0.1, 0.5, 2.0)), max_size=3), cuts)
def test_bounds_agree_with_what_they_say_and_cuts_do_not_matter(rows, bounds, cuts):
    def reference(row):
        if len(row["label"]) >= len(bounds):
            row["label"][: len(bounds)] = [min(*both) for both in zip(row["label"], bounds, strict=False)]
        return row

    bound, records = LabelUpperBound(bounds=tuple(bounds)), records_of(rows)
    assert on_slices(bound, records, cuts) == rows_of(bound(records, first=0)) == per_record(rows, reference)
