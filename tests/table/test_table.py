"""Rows can be cut, picked and laid end to end; nobody does it column by column."""

from __future__ import annotations

import torch
from contracts.tables import ids

from monolith.table import Rows

FOUR = Rows(
    ids(5, 6, 7, 8),
    ids(1, 2, 3, 4),
    torch.tensor([[0.5], [0.6], [0.7], [0.8]]),
    torch.arange(8.0).reshape(4, 2),
)


def columns(rows: Rows) -> list[list[object]]:
    return [one.tolist() for one in (rows.ids, rows.event_times, rows.values, rows.state)]


def test_a_slice_shares_memory_with_the_rows_it_is_of() -> None:
    found = FOUR.slice(1, 3)
    assert columns(found) == [one[1:3] for one in columns(FOUR)]
    assert found.values.data_ptr() == FOUR.values[1:].data_ptr()
    assert FOUR.slice(0, 4) is FOUR
    assert len(FOUR.slice(2, 2)) == 0
    assert FOUR.slice(3, 99).ids.tolist() == [8]


def test_rows_are_taken_in_any_order_and_more_than_once() -> None:
    assert columns(FOUR.take(ids(3, 0, 3))) == [[one[3], one[0], one[3]] for one in columns(FOUR)]


def test_rows_under_a_mask_are_kept() -> None:
    mask = torch.tensor([True, False, False, True])
    assert columns(FOUR.keep(mask)) == columns(FOUR.take(ids(0, 3)))
    assert FOUR.keep(torch.ones(4, dtype=torch.bool)) is FOUR


def test_rows_are_laid_end_to_end() -> None:
    assert columns(Rows.concat([FOUR.slice(0, 1), FOUR.slice(1, 1), FOUR.slice(1, 4)])) == columns(FOUR)
    assert Rows.concat([FOUR]) is FOUR
