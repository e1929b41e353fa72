"""A billion rows come and go in a tiered table: its memory and its files stay as they are."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from monolith.table import Expiry, Segment, TableConfig, TieredTable
from monolith_bench.table import resident_bytes

ROWS = int(os.environ.get("TIERED_SOAK_ROWS", "1000000000"))
BATCH = 500_000
ALIVE = 40
"""Batches that have not expired."""
MEMORY = 384 << 20


def ids_of(batch: int) -> torch.Tensor:
    """Return ids that no other batch has, in no order."""
    return torch.arange(batch * BATCH, (batch + 1) * BATCH) * 0x1E3779B97F4A7C15


@pytest.mark.soak
def test_a_billion_rows_come_expire_and_are_compacted_and_memory_stays_flat(tmp_path: Path) -> None:
    config = TableConfig(
        name="item",
        segments=(Segment(dim=1),),
        storage="tiered",
        memory_bytes=MEMORY,
        storage_dir=str(tmp_path),
        expiry=Expiry(default=timedelta(seconds=ALIVE)),
    )
    table = TieredTable(config)
    resident: list[int] = []
    files: list[int] = []
    batches = ROWS // BATCH
    assert batches >= 4 * ALIVE, "too few rows for any to expire"
    for batch in range(batches):
        table.assign(ids_of(batch), torch.full((BATCH, 1), float(batch)), event_time=batch)
        if batch % 8 == 0:
            table.evict(batch)
        if batch % ALIVE == 0 and batch >= 2 * ALIVE:
            stats = table.stats()
            assert stats.bytes_total <= MEMORY
            assert ALIVE - 1 <= stats.rows / BATCH <= ALIVE + 9
            resident.append(resident_bytes())
            files.append(stats.cold_bytes)
            for old in (batch, batch - ALIVE // 2):
                assert bool((table.lookup(ids_of(old)[:1000]) == old).all())
            assert not bool(table.contains(ids_of(batch - ALIVE - 9)[:1000]).any())
    assert table.stats().compactions > 0
    assert resident[-1] < 1.1 * resident[0]
    assert max(files[1:]) < 1.5 * files[0]
    table.close()
