"""Filtering by the values of a column."""

from __future__ import annotations

import pytest
from data.transforms.record_lists import records_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from monolith.data.transforms import FilterByValue
from monolith.errors import ConfigError, DataError, FileMissingError

TIME, USER = "line_id.req_time", "line_id.user_id"


def kept(rows, **config):
    return FilterByValue(**config).mask(records_of(rows)).tolist()


@pytest.mark.parametrize(
    ("op", "answers"),
    [
        ("gt", [False, False, True]),
        ("ge", [False, True, True]),
        ("eq", [False, True, False]),
        ("lt", [True, False, False]),
        ("le", [True, True, False]),
        ("neq", [True, False, True]),
    ],
)
def test_a_value_is_compared_with_one_operand(op, answers):
    assert kept([{TIME: [1]}, {TIME: [2]}, {TIME: [3]}], column=TIME, op=op, operand=2) == answers
    assert kept([{"x": [1.5]}, {"x": [2.5]}, {"x": [3.5]}], column="x", op=op, operand=2.5) == answers


def test_between_has_its_lower_end_and_not_its_upper():
    rows = [{TIME: [one]} for one in (1, 2, 3, 4)]
    assert kept(rows, column=TIME, op="between", operand=(2, 4)) == [False, True, True, False]


def test_in_and_not_in():
    rows = [{TIME: [1]}, {TIME: [2]}, {TIME: [3]}]
    assert kept(rows, column=TIME, op="in", operand=(1, 3)) == [True, False, True]
    assert kept(rows, column=TIME, op="not-in", operand=(1, 3)) == [False, True, False]


def test_lists_have_all_any_or_none_of_the_operands():
    rows = [{"tags": [1, 2, 3]}, {"tags": [2]}, {"tags": [4]}]
    assert kept(rows, column="tags", op="all", operand=(1, 2)) == [True, False, False]
    assert kept(rows, column="tags", op="any", operand=(1, 2)) == [True, True, False]
    assert kept(rows, column="tags", op="diff", operand=(1, 2)) == [False, False, True]


def test_strings_are_compared_whole_or_by_their_ends():
    rows = [{USER: [b"anna"]}, {USER: [b"bert"]}, {USER: [b""]}, {USER: [b"ann"]}]
    assert kept(rows, column=USER, op="eq", operand="anna") == [True, False, False, False]
    assert kept(rows, column=USER, op="neq", operand="anna") == [False, True, True, True]
    assert kept(rows, column=USER, op="in", operand=("ann", "bert")) == [False, True, False, True]
    assert kept(rows, column=USER, op="startswith", operand="ann") == [True, False, False, True]
    assert kept(rows, column=USER, op="endswith", operand=("a", "t")) == [True, True, False, False]
    assert kept(rows, column=USER, op="eq", operand="") == [False, False, True, False]


def test_zeros_at_the_end_of_a_string_count():
    rows = [{USER: [b"a"]}, {USER: [b"a\0"]}]
    assert kept(rows, column=USER, op="in", operand=("a",)) == [True, False]
    assert kept(rows, column=USER, op="in", operand=("a\0",)) == [False, True]


def test_a_record_without_a_value_is_dropped_unless_it_is_to_be_kept():
    rows = [{TIME: [1]}, {}]
    assert kept(rows, column=TIME, op="le", operand=1) == [True, False]
    assert kept(rows, column=TIME, op="le", operand=1, keep_empty=True) == [True, True]
    assert kept(rows, column="absent", op="diff", operand=1, keep_empty=True) == [True, True]
    assert kept(rows, column="absent", op="diff", operand=1) == [False, False]


def test_whole_numbers_are_compared_exactly_and_with_fractions():
    big = (1 << 53) + 1
    assert kept([{TIME: [big]}, {TIME: [big - 1]}], column=TIME, op="eq", operand=big) == [True, False]
    assert kept([{TIME: [1]}, {TIME: [2]}], column=TIME, op="gt", operand=1.5) == [False, True]


def test_ids_of_the_upper_half_may_be_written_unsigned():
    assert kept([{"line_id.uid": [-1]}], column="line_id.uid", op="eq", operand=2**64 - 1) == [True]
    with pytest.raises(ConfigError, match="beyond the int64"):
        FilterByValue(column="line_id.uid", op="gt", operand=2**64 - 1)


def test_float32_is_compared_as_float32():
    assert kept([{"x": [0.1]}], column="x", op="eq", operand=0.1) == [True]


@pytest.mark.parametrize(
    ("rows", "column", "text", "answers"),
    [
        ([{TIME: [1]}, {TIME: [2]}], TIME, "1\n\n 3 \n", [True, False]),
        ([{"x": [0.5]}, {"x": [1.0]}], "x", "1\n", [False, True]),
        ([{USER: [b"b"]}, {USER: [b"c"]}], USER, "a\nb\n", [True, False]),
    ],
)
def test_operands_may_be_in_a_file_one_per_line(tmp_path, rows, column, text, answers):
    path = tmp_path / "operands"
    path.write_text(text)
    assert kept(rows, column=column, op="in", operand_file=str(path)) == answers


def test_a_file_is_read_when_records_come_and_not_before(tmp_path):
    by_file = FilterByValue(column=TIME, op="in", operand_file=str(tmp_path / "absent"))
    with pytest.raises(FileMissingError):
        by_file.mask(records_of([{TIME: [1]}]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"op": "eq", "operand": (1, 2)}, "eq takes one operand, got 2"),
        ({"op": "between", "operand": 1}, "between takes two operands, got 1"),
        ({"op": "in"}, "in takes at least one operand, got 0"),
        ({"op": "gt", "operand": "a"}, "strings have no order"),
        ({"op": "startswith", "operand": 1}, "operands must be text"),
        ({"op": "in", "operand": (1, "a")}, "all text or all numbers"),
        ({"op": "eq", "operand": 1, "operand_file": "x"}, "not both"),
    ],
)
def test_operands_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        FilterByValue(column="x", **config)


def test_a_list_where_one_value_is_expected_is_an_error_that_says_what_to_use():
    with pytest.raises(
        DataError, match=r"record 1 of the batch has 2\. For lists there are all, any and diff"
    ):
        kept([{TIME: [1]}, {TIME: [1, 2]}], column=TIME, op="gt", operand=0)


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ({"x": [b"a"]}, {"op": "in", "operand": 1}),
        ({"x": [1]}, {"op": "in", "operand": "a"}),
        ({"x": [1.0]}, {"op": "startswith", "operand": "a"}),
    ],
)
def test_a_column_of_another_type_is_an_error(row, config):
    with pytest.raises(DataError, match="the column holds"):
        kept([row], column="x", **config)


REFERENCE = {
    "in": lambda mine, theirs: mine[0] in theirs,
    "not-in": lambda mine, theirs: mine[0] not in theirs,
    "all": lambda mine, theirs: set(theirs) <= set(mine),
    "any": lambda mine, theirs: bool(set(theirs) & set(mine)),
    "diff": lambda mine, theirs: not set(theirs) & set(mine),
    "startswith": lambda mine, theirs: mine[0].startswith(tuple(theirs)),
    "endswith": lambda mine, theirs: mine[0].endswith(tuple(theirs)),
}
texts = st.text("ab\0", max_size=3)
numbers = st.integers(-2, 2)


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(REFERENCE)), st.booleans(), st.booleans())
def test_each_question_agrees_with_plain_python(data, op, is_text, keep_empty):
    is_text = is_text or op in ("startswith", "endswith")
    longest = 3 if op in ("all", "any", "diff") else 1
    kind = texts if is_text else numbers
    rows = data.draw(st.lists(st.lists(kind, max_size=longest), min_size=1, max_size=8))
    assume(any(rows))  # otherwise nothing says of what type the column is
    operands = data.draw(st.lists(kind, min_size=1, max_size=3))
    records = records_of([{"x": [one.encode() if is_text else one for one in row]} for row in rows])
    answers = FilterByValue(column="x", op=op, operand=tuple(operands), keep_empty=keep_empty).mask(records)
    assert answers.tolist() == [REFERENCE[op](row, operands) if row else keep_empty for row in rows]
