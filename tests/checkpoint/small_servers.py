"""Parameter servers small enough to see the answer: each holds its share of two tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint.small_runs import ITEM, USER, rows_of
from contracts.tables import ids

from monolith.checkpoint import (
    Checkpointer,
    RestoreOptions,
    RestoreReport,
    SavedPart,
    Saver,
    TablesPart,
    merge_entries,
)
from monolith.checkpoint.part import Entry
from monolith.checkpoint.tables import TablesSnapshot
from monolith.table import NativeTable, SlidingFilter, SlotThresholds

Content = dict[str, dict[int, tuple[Any, ...]]]
"""Table -> id -> event time, values and the bits of the state."""


def server_of(key: int, servers: int) -> int:
    return key % (1 << 64) % servers


class ServersPart:
    """What a chief does: every server writes its share, and one entry of all goes into the manifest."""

    name = "tables"

    def __init__(self, parts: Sequence[TablesPart]) -> None:
        self._parts = parts

    def snapshot(self, step: int) -> ServersSnapshot:
        return ServersSnapshot([part.snapshot(step) for part in self._parts])

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        return RestoreReport().merge(*(part.restore(chain, options) for part in self._parts))


class ServersSnapshot:
    def __init__(self, cuts: Sequence[TablesSnapshot]) -> None:
        self._cuts = cuts

    def write(self, prefix: str, *, full: bool) -> Entry:
        # The last server is done first: no order may be relied on.
        return merge_entries([cut.write(prefix, full=full) for cut in reversed(self._cuts)])

    def close(self, *, saved: bool) -> None:
        for cut in self._cuts:
            cut.close(saved=saved)


class Servers:
    """So many servers, which train when told to."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        *,
        filters: bool = False,
        max_to_keep: int = 100,
        capacity: int = 1000,
    ) -> None:
        self.count = servers
        self.filters = (
            [SlidingFilter(capacity, 7, SlotThresholds(2)) for _ in range(servers)] if filters else []
        )
        self.tables = [
            {
                "item": NativeTable(ITEM, admission=self.filters[k] if filters else None),
                "user": NativeTable(USER),
            }
            for k in range(servers)
        ]
        self.parts = [
            TablesPart(
                tables,
                {"item": self.filters[k]} if filters else {},
                shard=(k, servers),
                num_shards=2,
                incremental=True,
            )
            for k, tables in enumerate(self.tables)
        ]
        saver = Saver(str(folder), max_to_keep=max_to_keep, clock=lambda: 1.0)
        saver.recover()
        self.checkpointer = Checkpointer(
            saver, [ServersPart(self.parts)], full_every=100, clock=lambda: 1000.0
        )

    def train(self, *keys: int, time: int = 1) -> None:
        for k, tables in enumerate(self.tables):
            mine = [key for key in keys if server_of(key, self.count) == k]
            for table in tables.values():
                gradients = torch.ones(len(mine), table.dim)
                table.apply_gradients(ids(*mine), gradients, event_time=time, step=time, dedup=True)

    def remove(self, name: str, *keys: int) -> None:
        for k, tables in enumerate(self.tables):
            tables[name].remove(ids(*(key for key in keys if server_of(key, self.count) == k)))

    def clear(self, name: str, server: int) -> None:
        self.tables[server][name].clear()

    def save(self, step: int) -> str:
        return self.checkpointer.save(step)

    def restore(self, prefix: str) -> RestoreReport:
        return self.checkpointer.restore(prefix).report

    def content(self) -> Content:
        """Return all rows of all servers; each must be of the server's share."""
        found: Content = {"item": {}, "user": {}}
        for k, tables in enumerate(self.tables):
            for name, table in tables.items():
                rows = rows_of(table)
                assert {server_of(key, self.count) for key in rows} <= {k}
                found[name] |= rows
        return found


def local(folder: Path, *, filters: bool = False) -> Servers:
    """Return one process that holds everything."""
    return Servers(folder, 1, filters=filters)


def restored(prefix: str, servers: int) -> Content:
    """Return what so many servers, which know nothing, find in a checkpoint."""
    others = Servers(Path(prefix).parent.with_name("elsewhere"), servers)
    others.restore(prefix)
    return others.content()


def chain(folder: Path, *layouts: int, filters: bool = False) -> tuple[Servers, list[str], list[Content]]:
    """Save four checkpoints, a full one and three increments, by so many servers each.

    Rows change, come and go; in the third `user` is cleared on the last server alone.
    """
    assert len(layouts) == 4
    prefixes: list[str] = []
    contents: list[Content] = []
    run = Servers(folder, layouts[0], filters=filters)

    def save(step: int) -> None:
        prefixes.append(run.save(step))
        contents.append(run.content())

    def go_on(servers: int) -> Servers:
        if servers == run.count:
            return run
        other = Servers(folder, servers, filters=filters)
        other.restore(prefixes[-1])
        return other

    for time in (1, 2, 3):
        run.train(*range(-20, 30), time=time)
    save(1)
    run = go_on(layouts[1])
    run.train(*range(5), 40, time=4)
    run.remove("item", 7, -8)
    run.remove("user", 7, 8, -9)
    save(2)
    run = go_on(layouts[2])
    run.clear("user", run.count - 1)
    for time in (5, 6, 7):
        run.train(8, 41, time=time)
    save(3)
    run = go_on(layouts[3])
    for time in (8, 9, 10):
        run.train(7, 9, time=time)
    run.remove("item", 0)
    save(4)
    return run, prefixes, contents
