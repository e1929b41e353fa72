"""Spilling tables with little room on their device, so that rows come and go in small tests."""

from __future__ import annotations

from typing import Any

from services.emulated_cuda import EmulatedDevice

from monolith.table import SpillingTable, TableConfig
from monolith.table.cuda.layout import row_layout
from monolith.table.cuda.memory import EXTRA_PLACES, RECENCY_BYTES
from monolith.table.cuda.spilling_table import halves


def bytes_of(config: TableConfig, places: int) -> int:
    """Return the bytes of a device table with so many places, three quarters of which have rows at most."""
    return (places + EXTRA_PLACES) * (row_layout(config).bytes_per_place + RECENCY_BYTES)


def spilling_table(config: TableConfig, *, device: Any, places: int = 16, **others: Any) -> SpillingTable:
    """Make a table that has room for few rows on a device."""
    return SpillingTable.within(config, device_bytes=bytes_of(config, places), device=device, **others)


class SpillingCudaTable(SpillingTable):
    """A table with the smallest budget there is on a device, or half of its capacity."""

    places = 16

    def __init__(
        self, config: TableConfig, *, admission: Any = None, touched: Any = None, device: Any = None
    ) -> None:
        budget = max(bytes_of(config, self.places), (config.capacity_bytes or 0) // 2)
        near, far = halves(config, device_bytes=budget, admission=admission, device=device)
        super().__init__(config, near, far, touched=touched)


class SpillingEmulatedTable(SpillingCudaTable):
    """The same on a device that is emulated."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"device": EmulatedDevice(), **others})


class RoomyCudaTable(SpillingCudaTable):
    """A spilling table with room for as many rows as small tests have, so that none moves."""

    places = 1024


class RoomyEmulatedTable(SpillingEmulatedTable):
    """The same on a device that is emulated."""

    places = 1024
