"""Rows as the benchmarks of stores and of scale ask for them: one table, full, and batches of its ids."""

from __future__ import annotations

import numpy as np
import torch

from monolith.store import Store, TableIds
from monolith.table import Adagrad, Segment, TableConfig
from monolith_bench.ids import id_of

FILL = 50_000
"""Rows that are made at a time."""


def table_configs(dim: int) -> dict[str, TableConfig]:
    return {"item": TableConfig(name="item", segments=(Segment(dim=dim, optimizer=Adagrad()),))}


def batches_of(size: int, *, rows: int, count: int, seed: int) -> list[TableIds]:
    """Return so many batches of distinct ids, each of `size`."""
    random = np.random.default_rng(seed)
    positions = [random.choice(rows, size, replace=False) for _ in range(count)]
    return [TableIds(id_of(some), torch.tensor([size])) for some in positions]


def fill(store: Store, *, rows: int, dim: int) -> None:
    """Give every id its row."""
    for first in range(0, rows, FILL):
        ids = id_of(np.arange(first, min(first + FILL, rows)))
        store.apply_gradients(TableIds(ids, torch.tensor([len(ids)])), torch.ones(len(ids) * dim))
