"""A billion rows come and go in a tiered table: its memory and its files stay as they are."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from monolith.table import Expiry, Segment, TableConfig, TieredTable
from monolith_bench.table import resident_bytes

ROWS = int(os.environ.get("MONOLITH_SOAK_ROWS", "1_000_000_000"))
"""Rows that are inserted in all. Each takes 1.6 us of processor time, so these take half an hour to an hour
on two cores."""
BATCH = 250_000
ALIVE = 20
"""Batches that have not expired."""
EVICT_EVERY = 4
MEMORY = 96 << 20

_log = logging.getLogger(__name__)


def ids_of(batch: int) -> torch.Tensor:
    """Return ids that no other batch has, in no order."""
    return torch.arange(batch * BATCH, (batch + 1) * BATCH) * 0x1E3779B97F4A7C15


@pytest.mark.soak
def test_rows_come_expire_and_are_compacted_and_memory_and_files_stay_flat(tmp_path: Path) -> None:
    batches = ROWS // BATCH
    assert batches >= 8 * ALIVE, "too few rows for memory to be compared"
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
    began = time.monotonic()
    for batch in range(batches):
        table.assign(ids_of(batch), torch.full((BATCH, 1), float(batch)), event_time=batch)
        if batch % EVICT_EVERY == 0:
            table.evict(batch)
        if batch % ALIVE or batch < 2 * ALIVE:
            continue
        stats = table.stats()
        assert stats.bytes_total <= MEMORY
        assert ALIVE - 1 <= stats.rows / BATCH <= ALIVE + EVICT_EVERY + 1
        resident.append(resident_bytes())
        files.append(sum(file.stat().st_size for file in table.folder.iterdir()))
        for old in (batch, batch - ALIVE // 2):
            assert bool((table.lookup(ids_of(old)[:1000]) == old).all())
        assert not bool(table.contains(ids_of(batch - ALIVE - EVICT_EVERY - 1)[:1000]).any())
        _log.info(
            "%s rows, %.0f s, %s compactions, %s MB resident, %s MB of files",
            *(f"{(batch + 1) * BATCH:,}", time.monotonic() - began, stats.compactions),
            *(resident[-1] >> 20, files[-1] >> 20),
        )
    assert table.stats().compactions > 0
    quarter = len(files) // 4
    for sizes in (resident, files):  # the first quarter has seen every size that there is
        assert max(sizes[quarter:]) < 1.2 * max(sizes[:quarter]), sizes
    table.close()
    assert not list(tmp_path.glob("*.cold"))
