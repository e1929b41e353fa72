"""What `tier_sizes` reckons of a table agrees with a table that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.table import Segment, TableConfig, TieredTable
from monolith.table.tiered_table import tier_sizes


def filled(rows: int, memory: int, folder: Path, dim: int) -> TieredTable:
    config = TableConfig(
        name="item",
        segments=(Segment(dim=dim),),
        storage="tiered",
        memory_bytes=memory,
        storage_dir=str(folder),
    )
    table = TieredTable(config)
    ids = torch.randperm(rows * 7, generator=torch.Generator().manual_seed(1))[:rows]
    for some in torch.split(ids, 25_000):
        table.assign(some, torch.ones(len(some), dim))
    table.flush()
    return table


@pytest.mark.parametrize("rows, memory, dim", [(400_000, 12 << 20, 4), (250_000, 16 << 20, 32)])
def test_rows_index_and_files_are_as_reckoned(rows: int, memory: int, dim: int, tmp_path: Path) -> None:
    table = filled(rows, memory, tmp_path, dim)
    stats = table.stats()
    sizes = tier_sizes(dim * 4, memory, rows)
    # Reckoned with an index that has just grown. It may be fuller, or have lost rows since: next to short
    # rows that is up to an eighth of the memory.
    assert 0.85 * sizes.hot_rows < table.core.hot_rows_allowed < 1.25 * sizes.hot_rows
    assert table.core.stats().bytes_index == pytest.approx(sizes.index_bytes, rel=0.15)
    assert stats.cold_bytes / stats.cold_rows == pytest.approx(sizes.file_bytes, rel=0.05)
    assert sizes.record_bytes < sizes.file_bytes < sizes.block_bytes
    assert stats.bytes_total <= memory
    table.close()


def test_rows_that_fit_have_no_cold_index() -> None:
    sizes = tier_sizes(128, 1 << 30, 1_000_000)
    assert sizes.hot_rows == 1_000_000
    assert sizes.index_bytes == tier_sizes(128, 1 << 30, 0).index_bytes


def test_a_large_cold_index_has_ten_bytes_for_a_row() -> None:
    sizes = tier_sizes(128, 64 << 30, 2_000_000_000)
    assert 8 < sizes.index_bytes / (2_000_000_000 - sizes.hot_rows) < 10


def test_long_rows_are_read_in_longer_blocks() -> None:
    assert tier_sizes(128, 1 << 30, 1).block_bytes == 4096
    assert tier_sizes(2048, 1 << 30, 1).block_bytes > 4096
