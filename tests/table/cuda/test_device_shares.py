"""How the memory of a device is shared out among tables."""

from __future__ import annotations

import pytest

from monolith.errors import ConfigError
from monolith.table import Adagrad, Segment, TableConfig
from monolith.table.cuda.growth import device_budgets

GB = 1 << 30


def table(name: str, dim: int = 8, **options: int) -> TableConfig:
    return TableConfig(name=name, segments=(Segment(dim=dim, optimizer=Adagrad()),), **options)


def shares(*tables: TableConfig, total: int = GB) -> dict[str, float]:
    found = device_budgets({one.name: one for one in tables}, total)
    assert total - 2 * len(tables) <= sum(found.values()) <= total or any(
        one.capacity_bytes is not None for one in tables
    )
    return {name: share / total for name, share in found.items()}


def test_tables_alike_have_equal_shares() -> None:
    assert shares(table("a"), table("b")) == pytest.approx({"a": 0.5, "b": 0.5})


def test_wider_rows_have_more() -> None:
    found = shares(table("a", 8), table("b", 16))
    assert found["b"] / found["a"] == pytest.approx((8 + 4 + 4 + 128) / (8 + 4 + 4 + 64))


def test_a_table_that_expects_more_rows_gets_more_and_one_without_a_number_the_usual() -> None:
    found = shares(table("a", initial_rows=1000), table("b", initial_rows=3000), table("c"))
    assert found == pytest.approx({"a": 1 / 6, "b": 3 / 6, "c": 2 / 6})


def test_no_table_gets_more_than_its_capacity_and_the_rest_is_shared() -> None:
    found = shares(table("a", capacity_bytes=GB // 8), table("b"), table("c", capacity_bytes=GB // 2))
    assert found == pytest.approx({"a": 1 / 8, "b": 7 / 16, "c": 7 / 16})
    small = device_budgets({"a": table("a", capacity_bytes=5000)}, GB)
    assert small == {"a": 5000}


def test_too_little_for_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' has 700, and the smallest table of such rows needs 1,440"):
        shares(table("a"), table("b"), total=1400)
