"""Tables with little room on their device, and in host memory, so that rows come and go in small tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from services.emulated_cuda import EmulatedDevice

from monolith.table import CudaTable, SpillingTable, Table, TableConfig, TieredTable
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import EXTRA_PLACES, RECENCY_BYTES
from monolith.table.cuda.snapshots import JoinedSnapshot
from monolith.table.cuda.spilling_table import halves


def bytes_of(config: TableConfig, places: int) -> int:
    """Return the bytes of a device table with so many places, three quarters of which have rows at most."""
    return (places + EXTRA_PLACES) * (row_layout(config).bytes_per_place + RECENCY_BYTES)


def spilling_table(config: TableConfig, *, device: Any, places: int = 16, **others: Any) -> SpillingTable:
    """Make a table that has room for few rows on a device."""
    return SpillingTable.within(config, device_bytes=bytes_of(config, places), device=device, **others)


def three_tier_table(config: TableConfig, *, hot: int = 6, places: int = 16, **how: Any) -> SpillingTable:
    """Make a table that has room for few rows on a device, and for few in host memory; the rest is in files.

    Args:
        hot: Rows in host memory.
    """
    near, _ = halves(config, device_bytes=bytes_of(config, places), **how)
    tiered = replace(config, storage="tiered", memory_bytes=4 << 20)
    far = TieredTable(tiered, admission=how.get("admission"), most_hot_rows=hot)
    return SpillingTable(tiered, near, far)


class SpillingCudaTable(SpillingTable):
    """A table with the smallest budget there is on a device, or half of its capacity."""

    places = 16

    def __init__(
        self, config: TableConfig, *, admission: Any = None, touched: Any = None, device: Any = None
    ) -> None:
        budget = max(bytes_of(config, self.places), (config.capacity_bytes or 0) // 2)
        near, far = self.halves(config, device_bytes=budget, admission=admission, device=device)
        super().__init__(config, near, far, touched=touched)

    def halves(self, config: TableConfig, **how: Any) -> tuple[CudaTable, Table]:
        return halves(config, **how)


class SpillingEmulatedTable(SpillingCudaTable):
    """The same on a device that is emulated."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"device": EmulatedDevice(), **others})


class ThreeTierCudaTable(SpillingCudaTable):
    """A table with room for twelve rows on a device and for six in host memory; all others are in files."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        if config.capacity_bytes is not None:
            pytest.skip("a tiered table has no capacity_bytes")
        super().__init__(replace(config, storage="tiered", memory_bytes=4 << 20), **others)

    def halves(self, config: TableConfig, **how: Any) -> tuple[CudaTable, Table]:
        in_memory = replace(config, storage="memory", memory_bytes=None)
        near, _ = halves(in_memory, **how)
        return near, TieredTable(config, admission=how["admission"], most_hot_rows=6)


class LinkingThreeTierTable(ThreeTierCudaTable):
    """The same with all cold rows in files when a snapshot is opened, so that dumps link to them."""

    def snapshot(self) -> JoinedSnapshot:
        assert isinstance(self.far, TieredTable)
        self.far.flush()
        return super().snapshot()


class ThreeTierEmulatedTable(ThreeTierCudaTable):
    """The same on a device that is emulated."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"device": EmulatedDevice(), **others})


class LinkingThreeTierEmulatedTable(LinkingThreeTierTable):
    """The same on a device that is emulated."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"device": EmulatedDevice(), **others})


class RoomyCudaTable(SpillingCudaTable):
    """A spilling table with room for as many rows as small tests have, so that none moves."""

    places = 1024


class RoomyEmulatedTable(SpillingEmulatedTable):
    """The same on a device that is emulated."""

    places = 1024
