"""Sizes of tables in the log."""

from __future__ import annotations

import logging

from train.runs import FakeClock, train

from monolith.table import TableStats
from monolith.train.hooks import TableInfoHook


def stats(rows: int) -> TableStats:
    return TableStats(rows, rows * 64, rows * 60, rows * 4, 0.5, rows, 0, 0, 0, 0, 0)


def test_each_table_is_logged_at_most_every_ten_minutes(caplog):
    clock = FakeClock()
    asked = []

    def ask() -> dict[str, TableStats]:
        asked.append(clock.now)
        return {"item": stats(100), "user": stats(3)}

    with caplog.at_level(logging.INFO):
        train([TableInfoHook(ask, clock=clock)], 1500, on_step=lambda _: clock.sleep(1))
    assert [now - asked[0] for now in asked] == [0, 600, 1200]
    assert "step 601: table item: 100 rows, 6400 bytes" in caplog.text
    assert "step 1: table user: 3 rows, 192 bytes" in caplog.text
