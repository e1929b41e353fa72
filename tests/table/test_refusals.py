"""A full table says so: at its first refusal, then seldom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monolith.table import DictTable, MultiTable, NativeTable, Segment, TableConfig

CONFIG = TableConfig(name="item", segments=(Segment(dim=4),), capacity_bytes=1 << 20)


def fill(table: Any, count: int) -> None:
    """Bring more ids than there is room for, a few at a time."""
    for first in range(0, count, 1000):
        table.apply_gradients(torch.arange(first, first + 1000), torch.ones(1000, 4))


@pytest.fixture(params=[DictTable, NativeTable])
def table(request: pytest.FixtureRequest) -> Any:
    return request.param(CONFIG)


def test_a_table_with_room_is_silent(table: Any, caplog: pytest.LogCaptureFixture) -> None:
    fill(table, 1000)
    assert caplog.messages == []


def test_the_first_refusal_is_a_warning_that_says_what_to_do(
    table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(table, 60_000)
    first = caplog.records[0]
    assert first.levelname == "WARNING"
    for part in ("table 'item' is full", "refused", f"{len(table):,} rows", "1 MiB", "raise capacity_bytes"):
        assert part in first.getMessage()


def test_there_are_few_warnings_however_many_ids_are_refused(
    table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(table, 60_000)
    refused = table.stats().refused
    assert refused > 10_000
    assert 2 <= len(caplog.messages) <= refused.bit_length()


def test_a_call_to_many_tables_at_once_warns_too(caplog: pytest.LogCaptureFixture) -> None:
    tables = MultiTable({"item": NativeTable(CONFIG)})
    for first in range(0, 60_000, 1000):
        ids = torch.arange(first, first + 1000)
        tables.fused_apply_gradients(ids, torch.tensor([1000]), torch.ones(4000), num_batches=1)
    assert "table 'item' is full" in caplog.messages[0]
