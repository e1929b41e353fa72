"""A trainer that publishes the rows and weights of an exported version, changed as a test says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from monolith.checkpoint.saved_tables import WHOLE, IdShard
from monolith.serve import Predictor
from monolith.serve.manifest import Servable, read_servable
from monolith.sync.channel import MemoryChannel
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publisher import Publisher, PublisherConfig
from monolith.table import FrozenTable, NativeTable, Segment, TableConfig

PATIENCE = 120
STAMPS = LearnedUpTo(
    step=70, watermark=1_700_000_000, event_at=100.0, read_at=100.5, trained_at=101.0, published_at=101.5
)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class FakeTrainer:
    """Has the rows and weights of a version, changes them, and publishes what a test tells it to."""

    def __init__(
        self, version: Path, channel: MemoryChannel, share: IdShard = WHOLE, run: str | None = None
    ) -> None:
        self.servable: Servable = read_servable(str(version))
        self.tables: dict[str, NativeTable] = {}
        for name, about in self.servable.tables.items():
            table = NativeTable(TableConfig(name=name, segments=(Segment(dim=about.dim),)))
            ids, values = FrozenTable(f"{version}/{about.file}").core.scan(0, (1 << 64) - 1)
            table.assign(torch.from_numpy(ids), torch.from_numpy(values).reshape(-1, about.dim))
            self.tables[name] = table
        with Predictor(str(version), show=False) as predictor:
            self.dense: Mapping[str, torch.Tensor] = predictor._runner._graph.weights  # type: ignore[attr-defined]
        self.learned = STAMPS
        self.publisher = Publisher(
            self.tables,
            channel.writer(),
            PublisherConfig(run=self.servable.run if run is None else run, shard=share, dense_interval=0.0),
            dense=lambda: dict(self.dense),
            learned=lambda: self.learned,
        )

    def change(self, name: str = "item", by: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to all rows of a table; return ids and values."""
        rows = self.tables[name].scan(limit=1 << 20).rows
        values = rows.values + by
        self.tables[name].assign(rows.ids, values)
        return rows.ids, values
