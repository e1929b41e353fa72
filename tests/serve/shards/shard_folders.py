"""Sharded exports for tests: rows whose values say which id, table and version they are of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from monolith.serve.manifest import Servable, ServableTable, write_servable
from monolith.serve.shards import shard_part
from monolith.serve.versions import NewVersion
from monolith.store import TableIds
from monolith.table import FrozenSegment, write_frozen_table

TABLES = {"item": 2, "user": 3}
IDS = 500
MODEL = "clicks"


def values_of(ids: torch.Tensor, dim: int, version: str) -> torch.Tensor:
    """Return the rows of ids that there are: 1 to IDS - 1 and their negatives."""
    known = (ids > -IDS) & (ids < IDS) & (ids != 0)
    columns = ids[:, None].float() * 10 + torch.arange(dim) + 10000 * int(version)
    return columns * known[:, None]


def all_ids() -> torch.Tensor:
    return torch.tensor([number for number in range(-IDS + 1, IDS) if number], dtype=torch.int64)


def write_shards(folder: Path, *, shards: int, version: str = "1", digest: str = "d") -> Servable:
    """Write DIR/ps_<i>/<version> for all shards; return what the entry's manifest would say."""
    for shard in range(shards):
        with NewVersion(str(folder / shard_part(shard)), version, digest) as new:
            (Path(new.folder) / "tables").mkdir()
            mine = all_ids()
            mine = mine[torch.from_numpy((mine.numpy().view(np.uint64) % shards == shard).copy())]
            tables = {}
            for name, dim in TABLES.items():
                info = write_frozen_table(
                    f"{new.folder}/tables/{name}.rows",
                    [FrozenSegment(dim)],
                    [(mine.numpy(), values_of(mine, dim, version).numpy())],
                    rows=len(mine),
                )
                tables[name] = _table(name, info.rows, dim)
            write_servable(new.folder, _servable(version, digest, shards, shard_part(shard), tables))
            new.commit()
    everything = {name: _table(name, 2 * IDS - 2, dim) for name, dim in TABLES.items()}
    return _servable(version, digest, shards, "entry", everything)


def _table(name: str, rows: int, dim: int) -> ServableTable:
    return ServableTable(
        file=f"tables/{name}.rows", rows=rows, dim=dim, coding="fp32", largest_error=0.0, mean_error=0.0
    )


def _servable(
    version: str, digest: str, shards: int, part: str, tables: Mapping[str, ServableTable]
) -> Servable:
    return Servable(
        model=MODEL,
        version=version,
        run="runs/1",
        checkpoint="model.ckpt-1",
        step=1,
        watermark=None,
        created=1.0,
        digest=digest,
        part=part,
        shards=shards,
        tables=tables,
    )


def table_ids(item: torch.Tensor, user: torch.Tensor) -> TableIds:
    return TableIds(torch.cat([item, user]), torch.tensor([len(item), len(user)]))


def wanted(item: torch.Tensor, user: torch.Tensor, version: str = "1") -> torch.Tensor:
    return torch.cat([values_of(item, 2, version).flatten(), values_of(user, 3, version).flatten()])
