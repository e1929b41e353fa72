"""What of a delta is let out, and what holds publishing back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from monolith.sync.guard import AllGuards, RowGuard
from monolith.sync.messages import Delta, LearnedUpTo, LogPosition
from monolith.sync.publish_config import GuardConfig
from monolith.table import Rows


def rows(*values: Sequence[float]) -> Rows:
    """Rows of ids 10, 11, ..."""
    found = torch.tensor(values, dtype=torch.float32)
    ids = torch.arange(10, 10 + len(values))
    return Rows(ids, torch.zeros_like(ids), found, torch.empty(len(values), 0))


def delta(*values: Sequence[float], dense: dict[str, Tensor] | None = None) -> Delta:
    return Delta(
        run="r",
        shard=(0, 1),
        position=LogPosition("e", 1),
        learned=LearnedUpTo(),
        rows={"item": rows(*values)} if values else {},
        dense=dense,
    )


def test_rows_within_bounds_are_published() -> None:
    assert RowGuard(GuardConfig()).check(delta([0.1, -3.0], [5.0, 0.0])) is None


def test_a_delta_without_rows_is_published() -> None:
    assert RowGuard(GuardConfig()).check(delta()) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_rejected_even_without_bounds(bad: float) -> None:
    guard = RowGuard(GuardConfig(largest_value=None, times_usual=None))
    why = guard.check(delta([0.1, 0.2], [bad, 0.0]))
    assert why == "table 'item': the row of id 11 is NaN or infinite; 1 of 2 rows of the delta do"


def test_a_value_above_the_bound_is_rejected() -> None:
    guard = RowGuard(GuardConfig(largest_value=10.0, times_usual=None))
    assert guard.check(delta([10.0, -10.0])) is None
    assert "a value of 11, above publish.guard.largest_value of 10" in str(guard.check(delta([0.0, -11.0])))


def test_a_value_of_many_times_the_earlier_ones_is_rejected() -> None:
    guard = RowGuard(GuardConfig(times_usual=10.0))
    assert guard.check(delta([0.5])) is None
    assert guard.check(delta([4.0])) is None
    why = str(guard.check(delta([41.0])))
    assert "41, and the largest published before was 4: more than 10 times" in why
    assert guard.check(delta([39.0])) is None, "what was held back is not usual"


def test_small_values_are_no_explosion_whatever_was_usual() -> None:
    guard = RowGuard(GuardConfig(times_usual=10.0))
    assert guard.check(delta([1e-4])) is None
    assert guard.check(delta([0.9])) is None


def test_weights_are_looked_at_as_rows_are() -> None:
    guard = RowGuard(GuardConfig(largest_value=10.0))
    fine = {"a": torch.ones(2), "steps": torch.tensor(10**9), "none": torch.empty(0)}
    assert guard.check(delta(dense=fine)) is None
    assert guard.check(delta(dense={"b": torch.tensor([1.0, math.nan])})) == (
        "the weight 'b' is NaN or infinite"
    )


def test_it_has_recovered_when_the_rows_that_were_bad_are_within_bounds_again() -> None:
    guard = RowGuard(GuardConfig(largest_value=10.0))
    assert guard.check(delta([1.0], [99.0])) is not None
    asked: list[list[int]] = []

    def now(value: float) -> bool:
        def look_up(table: str, ids: Tensor) -> Tensor:
            assert table == "item"
            asked.append(ids.tolist())
            return torch.full((len(ids), 1), value)

        return guard.recovered(look_up)

    assert not now(99.0)
    assert now(0.0)
    assert asked == [[11], [11]]


def test_of_several_guards_the_first_that_has_a_reason_gives_it() -> None:
    guards = AllGuards([RowGuard(GuardConfig(largest_value=100.0)), RowGuard(GuardConfig(largest_value=1.0))])
    assert "largest_value of 1" in str(guards.check(delta([50.0])))
    assert "largest_value of 100" in str(guards.check(delta([500.0])))
    assert not guards.recovered(lambda _, ids: torch.full((len(ids), 1), 50.0))
    guards.accept()
    assert guards.recovered(lambda _, ids: torch.full((len(ids), 1), 50.0))
