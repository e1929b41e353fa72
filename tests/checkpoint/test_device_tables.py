"""Checkpoints move between tables in host memory, on a device, and in files: whoever wrote, whoever reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_runs import chain, rows_of
from contracts.tables import (
    LinkingTieredTable,
    cuda_table_classes,
    linking_three_tier_table_classes,
    spilling_table_classes,
)

from monolith.checkpoint import TablesPart
from monolith.checkpoint.part import RestoreOptions, SavedPart
from monolith.table import Adam, NativeTable, OneBit, Segment, Table, TableConfig

KINDS = [NativeTable, *cuda_table_classes(), *spilling_table_classes(), *linking_three_tier_table_classes()]
PAIRS = [(one, other) for one in KINDS for other in KINDS if one is not other]
PAIRS += [
    pair
    for cls in linking_three_tier_table_classes()
    for pair in ((cls, LinkingTieredTable), (LinkingTieredTable, cls), (cls, cls))
]
STEEP = TableConfig(
    name="item",
    segments=(
        Segment(dim=2, optimizer=Adam(), compressor=OneBit(step_size=2), learning_rate=0.5),
        Segment(dim=3, learning_rate=0.25),
    ),
)


@pytest.mark.parametrize("writer, reader", PAIRS, ids=lambda cls: cls.__name__)
def test_a_chain_of_increments_is_the_same_run_to_tables_of_any_kind(
    tmp_path: Path, writer: Any, reader: Any
) -> None:
    """Rows, state, times, what the filter counted: of a full checkpoint and of each increment."""
    run, prefixes, states = chain(tmp_path / "run", kind=writer)
    for prefix, state in zip(prefixes, states, strict=True):
        assert run.restored(prefix, reader) == state


@pytest.mark.parametrize("writer, reader", PAIRS, ids=lambda cls: cls.__name__)
def test_a_table_that_moved_continues_as_the_one_that_stayed(
    tmp_path: Path, writer: Any, reader: Any
) -> None:
    """How steep one_bit segments are and what time it is move along, so that both learn the same."""
    source, target = writer(STEEP), reader(STEEP)
    _train(source, range(4))
    prefix = str(tmp_path / "model.ckpt-4")
    cut = TablesPart({"item": source}).snapshot(4)
    saved = SavedPart(prefix, cut.write(prefix, full=True))
    cut.close(saved=True)
    TablesPart({"item": target}).restore([saved], RestoreOptions())
    assert target.scales == source.scales != [1.0, 1.0]
    assert target.stats().max_event_time == source.stats().max_event_time == 3
    assert rows_of(target) == rows_of(source)
    plain = NativeTable(STEEP)
    TablesPart({"item": plain}).restore([saved], RestoreOptions())
    _train(plain, range(4, 8))
    _train(target, range(4, 8))
    everything = torch.arange(60)
    # A tanh has no bits that all processors agree on.
    torch.testing.assert_close(target.lookup(everything), plain.lookup(everything), rtol=1e-5, atol=1e-6)


def _train(table: Table, steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 60, (40,), generator=random)
        gradients = torch.randn(40, table.dim, generator=random)
        table.apply_gradients(batch, gradients, step=step, event_time=step, dedup=True)
