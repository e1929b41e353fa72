"""Tables that are published and tables that follow them, in one process, for tests to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from monolith.sync import MemoryChannel, Publisher, PublisherConfig, Subscriber, TableTarget
from monolith.table import NativeTable, Segment, Sgd, Table, TableConfig, iterate


class Clock:
    """Unix seconds that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_table(dim: int = 2, *, cls: Callable[..., Table] = NativeTable, **options: Any) -> Table:
    segment = Segment(dim=dim, optimizer=Sgd(), learning_rate=1.0)
    return cls(TableConfig(name="item", segments=(segment,), **options))


def write(table: Table, values: dict[int, float]) -> None:
    """Set every float of some rows."""
    if values:
        numbers = torch.tensor(list(values.values()))[:, None].repeat(1, table.dim)
        table.assign(torch.tensor(list(values)), numbers)


def held(*tables: Table) -> dict[int, list[float]]:
    """Return what tables hold, together."""
    found: dict[int, list[float]] = {}
    for table in tables:
        for rows in iterate(table):
            found.update(zip(rows.ids.tolist(), rows.values.tolist(), strict=True))
    return found


def publish(channel: MemoryChannel, table: Table, **options: Any) -> Publisher:
    """Return a publisher of one table; options go to its config or to itself."""
    options.setdefault("clock", Clock())
    return Publisher({"item": table}, channel.writer(), config_of(options), **options)


def config_of(options: dict[str, Any]) -> PublisherConfig:
    """Take the options that are fields of a publisher's config out of a dict."""
    mine = {one.name: options.pop(one.name) for one in fields(PublisherConfig) if one.name in options}
    return PublisherConfig(**{"run": "run", **mine})


def subscribe(channel: MemoryChannel, table: Table, **options: Any) -> tuple[Subscriber, TableTarget]:
    target = TableTarget({"item": table})
    return Subscriber(channel.reader, target, **options), target


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
