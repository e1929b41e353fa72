"""Masks of filters are computed by the core: the same as a loop in Python over the values of each record."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.properties import tries

from monolith.data import Records, concat
from monolith.data.config import DataSplit
from monolith.data.splitting import part_filter
from monolith.data.transforms import (
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterBySlot,
    FilterByValue,
    LogicalOr,
)
from monolith.tensors import RaggedTensor

IDS = [0, 1, -1, 7 << 48, (7 << 48) + 1, (9 << 48) + 1, 5 << 54, -(1 << 63), (1 << 53) + 1, 1 << 53]
UNSIGNED = [*IDS, (1 << 64) - 1, (1 << 63) + 5]
NUMBERS = [0.0, -0.0, 0.5, -1.5, 0.1, float("nan"), float("inf"), 3.0]
TEXTS = [b"", b"a", b"ab", b"ab\0", b"b", b"\xff"]
Rows = list[list[Any]]


def column(rows: Rows, dtype: torch.dtype) -> RaggedTensor:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = [value for row in rows for value in row]
    if dtype is not torch.uint8:
        return RaggedTensor.from_row_lengths(torch.tensor(flat, dtype=dtype), lengths)
    sizes = torch.tensor([len(text) for text in flat], dtype=torch.int64)
    data = torch.from_numpy(np.frombuffer(bytearray().join(flat), np.uint8).copy())
    return RaggedTensor.from_row_lengths(RaggedTensor.from_row_lengths(data, sizes), lengths)


@st.composite
def some_records(draw: st.DrawFn) -> tuple[Records, dict[str, Rows]]:
    """Return records and the values of each: of one block or several, moved or not, some columns shared."""
    size, many = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    kinds = {
        "ids": (IDS, torch.int64, many),
        "more": (IDS, torch.int64, many),
        "one": (IDS, torch.int64, 1),
        "number": (NUMBERS, torch.float32, 1),
        "numbers": (NUMBERS, torch.float32, many),
        "label": (NUMBERS, torch.float32, many),
        "text": (TEXTS, torch.uint8, 1),
        "texts": (TEXTS, torch.uint8, many),
        "line_id.actions": ([1, 2, 3, -1], torch.int64, many),
    }
    shared = draw(st.sets(st.sampled_from(sorted(kinds)), max_size=2)) if draw(st.booleans()) else set()
    rows, columns = {}, {}
    for name, (values, dtype, most) in kinds.items():
        count = 1 if name in shared else size
        found = draw(
            st.lists(st.lists(st.sampled_from(values), max_size=most), min_size=count, max_size=count)
        )
        columns[name] = column(found, dtype)
        rows[name] = found * (size if name in shared else 1)
    made = Records(size, columns, frozenset(shared))
    if not shared and draw(st.booleans()):
        order = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=15))
        cut = draw(st.integers(0, len(order)))
        taken = torch.tensor(order, dtype=torch.int64)
        made = concat([made.take(taken[:cut]), Records(size, columns).take(taken[cut:])])
        rows = {name: [each[place] for place in order] for name, each in rows.items()}
        if draw(st.booleans()):
            made["one"]  # moves all columns
    return made, rows


def int64(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def few(values: list[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), max_size=most).map(tuple)


@given(some_records(), few(UNSIGNED), few(UNSIGNED), few(UNSIGNED, 70), st.booleans())
@settings(max_examples=tries(80), deadline=None)
def test_by_fid(
    made: tuple[Records, dict[str, Rows]], has: Any, without: Any, every: Any, named: bool
) -> None:
    records, rows = made
    without = tuple(set(without) - set(every))
    names = ("ids", "absent") if named else None
    looked = ["ids"] if named else ["ids", "more", "one"]
    found = [set().union(*(rows[name][n] for name in looked)) for n in range(len(records))]
    expected = [
        (not has or not here.isdisjoint(map(int64, has)))
        and here.isdisjoint(map(int64, without))
        and here.issuperset(map(int64, every))
        for here in found
    ]
    made_filter = FilterByFid(has_fids=has, filter_fids=without, select_fids=every, columns=names)
    assert made_filter.mask(records).tolist() == expected


@given(some_records(), st.sampled_from([1, 2]), few([0, 5, 7, 9, 448, 512, 32767 & 1023]))
@settings(max_examples=tries(60), deadline=None)
def test_by_slot(made: tuple[Records, dict[str, Rows]], version: int, slots: Any) -> None:
    records, rows = made
    shift, most = {1: (54, 1 << 10), 2: (48, 1 << 15)}[version]
    found = [
        {
            (value % (1 << 64)) >> shift & (most - 1)
            for name in ("ids", "more", "one")
            for value in rows[name][n]
        }
        for n in range(len(records))
    ]
    made_filter = FilterBySlot(select_slots=slots, version=version)
    assert made_filter.mask(records).tolist() == [here.issuperset(slots) for here in found]


@given(some_records(), few([1, 2, 3, (1 << 64) - 1]), few(NUMBERS).filter(bool))
@settings(max_examples=tries(60), deadline=None)
def test_by_action_and_by_label(made: tuple[Records, dict[str, Rows]], actions: Any, thresholds: Any) -> None:
    records, rows = made
    acted = [not actions or not {*map(int64, actions)}.isdisjoint(row) for row in rows["line_id.actions"]]
    reached = [
        len(row) >= len(thresholds)
        and any(np.float32(value) >= np.float32(least) for value, least in zip(row, thresholds, strict=False))
        for row in rows["label"]
    ]
    by_action, by_label = FilterByAction(has_actions=actions), FilterByLabel(thresholds=thresholds)
    assert by_action.mask(records).tolist() == acted
    assert by_label.mask(records).tolist() == reached
    either = LogicalOr(left=by_action, right=by_label).mask(records)
    assert either.tolist() == [one or other for one, other in zip(acted, reached, strict=True)]


COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "lt": operator.lt, "le": operator.le,
    "neq": operator.ne,
}  # fmt: skip


def judged(op: str, row: list[Any], operands: list[Any]) -> bool:
    """Whether a row with a value passes; values and operands are of one type."""
    if op in COMPARED:
        return bool(COMPARED[op](row[0], operands[0]))
    if op == "between":
        return bool(operands[0] <= row[0] < operands[1])
    if op in ("startswith", "endswith"):
        return any(getattr(row[0], op)(one) for one in operands)
    same = [[bool(value == one) for value in row] for one in operands]
    if op == "all":
        return all(map(any, same))
    return any(map(any, same)) is (op in ("in", "any"))


@given(some_records(), st.data(), st.booleans())
@settings(max_examples=tries(200), deadline=None)
def test_by_value(made: tuple[Records, dict[str, Rows]], data: st.DataObject, keep_empty: bool) -> None:
    records, rows = made
    lists = ["all", "any", "diff"]
    name, ops, operands = data.draw(
        st.sampled_from(
            [
                ("one", [*COMPARED, "between", "in", "not-in", *lists], [*IDS, 0.5, float(1 << 53)]),
                ("ids", lists, [*IDS, 0.5, float(1 << 53)]),
                ("number", [*COMPARED, "between", "in", "not-in", *lists], [*NUMBERS, 0, 3]),
                ("numbers", lists, [*NUMBERS, 0, 3]),
                ("text", ["eq", "neq", "in", "not-in", "startswith", "endswith", *lists], TEXTS[:5]),
                ("texts", lists, TEXTS[:5]),
            ]
        )
    )
    op = data.draw(st.sampled_from(ops))
    count = 1 if op in COMPARED else 2 if op == "between" else data.draw(st.integers(1, 4))
    chosen = data.draw(st.lists(st.sampled_from(operands), min_size=count, max_size=count))
    kind: Any = np.float32
    if name in ("text", "texts"):
        given_operands, kind = [one.decode() for one in chosen], bytes
    else:
        given_operands = chosen
    if name in ("one", "ids"):
        # Whole numbers are compared as such; with a fraction among the operands, as float64. Of `all`, each
        # operand is compared for itself.
        kind = int if all(isinstance(one, int) for one in chosen) else float
    as_one = [[kind(value) for value in row] for row in rows[name]]
    wanted = [kind(one) for one in chosen]
    if op == "all" and kind is float:
        as_one = rows[name]
        expected = [
            keep_empty if not row else all(any(type(one)(value) == one for value in row) for one in chosen)
            for row in as_one
        ]
    else:
        expected = [judged(op, row, wanted) if row else keep_empty for row in as_one]
    made_filter = FilterByValue(column=name, op=op, operand=tuple(given_operands), keep_empty=keep_empty)
    assert made_filter.mask(records).tolist() == expected
    assert made_filter.mask(records).tolist() == expected  # what it keeps for the next batch


@given(some_records(), st.sampled_from(["one", "number"]), st.sampled_from([0, 0.5, -1.5, 1 << 53]))
@settings(max_examples=tries(60), deadline=None)
def test_splits_by_time(made: tuple[Records, dict[str, Rows]], name: str, at: float) -> None:
    records, rows = made
    split = DataSplit(time=name, evaluate_from=at)
    train, evaluate = (part_filter(part, split)(records).tolist() for part in ("train", "evaluate"))
    assert train == [float(np.float64(row[0])) < at if row else True for row in rows[name]]
    assert evaluate == [
        float(np.float64(row[0])) >= at and row[0] != float("inf") if row else False for row in rows[name]
    ]


def test_a_filter_that_was_used_can_be_copied_and_sent_to_another_process() -> None:
    records = Records(
        2, {"text": column([[b"a"], [b"b\0"]], torch.uint8), "id": column([[1], [2]], torch.int64)}
    )
    for one in (FilterByValue(column="text", op="endswith", operand="\0"), FilterByFid(has_fids=(2,))):
        assert one.mask(records).tolist() == [False, True]
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert other == one
            assert other.mask(records).tolist() == [False, True]


def test_nothing_is_moved_for_a_mask() -> None:
    whole = Records(
        3, {"id": column([[1], [2], [3]], torch.int64), "text": column([[b"a"]] * 3, torch.uint8)}
    )
    records = whole.take(torch.tensor([2, 0]))
    assert FilterByFid(has_fids=(3,)).mask(records).tolist() == [True, False]
    assert FilterByValue(column="text", op="in", operand=("a",)).mask(records).tolist() == [True, True]
    assert records.unmoved is not None


def test_columns_that_are_not_plain_memory_are_copied() -> None:
    wide = torch.arange(8).reshape(4, 2)
    strided = RaggedTensor(wide[:, 1], torch.arange(5), validate=False)
    assert not strided.flat_values.is_contiguous()
    records = Records(4, {"id": strided})
    assert FilterByFid(has_fids=(3, 7)).mask(records).tolist() == [False, True, False, True]


@pytest.mark.parametrize("size", [0, 1])
def test_few_records(size: int) -> None:
    records = Records(size, {"id": column([[5]] * size, torch.int64)})
    assert FilterByFid(has_fids=(5,)).mask(records).tolist() == [True] * size
    assert FilterByValue(column="id", op="gt", operand=7).mask(records).tolist() == [False] * size
