"""Joined scans: two tables that hold one table's rows between them, read as one.

Both go through their rows in the order of hashes, so that a range of hashes is read in both at once: a row
that moved from one to the other meanwhile is met once, wherever it is by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from monolith.errors import TableArgumentError
from monolith.table.config import TableConfig
from monolith.table.cuts import DumpableTable, TableCut
from monolith.table.hashing import mix
from monolith.table.table import Rows, Scan


def joined(scans: Sequence[Scan], limit: int) -> Scan:
    """Return the first rows of several scans that began at one hash, `limit` at most, and where to go on."""
    rows = Rows.concat([scan.rows for scan in scans])
    hashes = mix(rows.ids.numpy())
    order = np.argsort(hashes)
    end = min((scan.cursor for scan in scans if scan.cursor is not None), default=None)
    known = len(order) if end is None else int(np.searchsorted(hashes[order], np.uint64(end)))
    if known > limit:
        known, end = limit, int(hashes[order[limit - 1]]) + 1
    return Scan(rows.take(torch.from_numpy(order[:known])), end)


class JoinedCut:
    """A `TableCut` of tables that hold one table's rows between them, cut at one moment.

    A row that moves from one to the other afterwards stays where it was, in the cuts. Of what changed since
    the cut before it tells more than it must: a row that moved in between counts as changed.

    Args:
        tables: At which nobody writes until this is made.
    """

    def __init__(self, config: TableConfig, tables: Sequence[DumpableTable]) -> None:
        self._config = config
        self._cuts: list[TableCut] = []
        try:
            for table in tables:
                self._cuts.append(table.cut())
        except BaseException:
            self.close(saved=False)
            raise

    @property
    def config(self) -> TableConfig:
        return self._config

    @property
    def scales(self) -> list[float]:
        return self._cuts[0].scales

    @property
    def max_event_time(self) -> int:
        return max(cut.max_event_time for cut in self._cuts)

    @property
    def captured_bytes(self) -> int:
        return sum(cut.captured_bytes for cut in self._cuts)

    @property
    def tracked(self) -> bool:
        return all(cut.tracked for cut in self._cuts)

    @property
    def cleared(self) -> bool:
        return all(cut.cleared for cut in self._cuts)

    def __len__(self) -> int:
        return sum(map(len, self._cuts))

    def removed(self) -> Tensor:
        return torch.cat([cut.removed() for cut in self._cuts])

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        how = {"limit": limit, "shard": shard, "num_shards": num_shards}
        if limit < 1:
            raise TableArgumentError(f"scan: limit must be at least 1, got {limit}")
        return joined([cut.scan(cursor, **how, changed_only=changed_only) for cut in self._cuts], limit)

    def close(self, *, saved: bool) -> None:
        for cut in self._cuts:
            cut.close(saved=saved)
