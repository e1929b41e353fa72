"""The tables there are, and small ways to talk to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from services.emulated_cuda import EmulatedDevice, device_named, device_names
from services.spilling_tables import (
    LinkingThreeTierEmulatedTable,
    LinkingThreeTierTable,
    RoomyCudaTable,
    RoomyEmulatedTable,
    SpillingCudaTable,
    SpillingEmulatedTable,
    ThreeTierCudaTable,
    ThreeTierEmulatedTable,
)
from torch import Tensor

from monolith.table import CudaTable, DictTable, NativeTable, Rows, Scan, TableConfig, TieredTable
from monolith.table.config import EmbeddingDtype
from monolith.table.tiered_table import TieredTableSnapshot


class EmulatedCudaTable(CudaTable):
    """A `CudaTable` whose kernels run on the CPU."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"device": EmulatedDevice(), **others})


class SmallTieredTable(TieredTable):
    """A `TieredTable` with room for twelve hot rows, so that most rows of small tests are cold."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        if config.capacity_bytes is not None:
            pytest.skip("a tiered table has no capacity_bytes: tests/table/test_tiered_table.py")
        config = replace(config, storage="tiered", memory_bytes=4 << 20)
        super().__init__(config, **{"most_hot_rows": 12, **others})


class LinkingTieredTable(SmallTieredTable):
    """The same with all cold rows in files when a snapshot is opened, so that dumps link to them."""

    def snapshot(self) -> TieredTableSnapshot:
        self.flush()
        return super().snapshot()


class FilesTieredTable(SmallTieredTable):
    """The same with every row in a file after each write, so that all that is read comes from files."""

    def __init__(self, config: TableConfig, **others: Any) -> None:
        super().__init__(config, **{"most_hot_rows": 1, **others})

    @contextmanager
    def _writing(self, ids: Tensor, **how: Any) -> Iterator[int]:
        with super()._writing(ids, **how) as absent:
            yield absent
        with self._open() as core:
            self._make_room(core, 1)  # for a row more than there are: the last hot one leaves
            core.flush()
            while core.stats().bytes_buffers and not self._snapshots:  # rows of a compacted file
                core.flush()
            assert len(self._hot) == 0


def narrow(cls: Any, dtype: EmbeddingDtype) -> Any:
    """Return the same table with embeddings that training tables store as `dtype`."""

    def make(self: Any, config: TableConfig, **others: Any) -> None:
        if not any(segment.optimizer.stochastic_rounding for segment in config.segments):  # which is refused
            config = replace(config, embedding_dtype=dtype)
        cls.__init__(self, config, **others)

    reads = {name: _to_quarters(getattr(cls, name)) for name in ("lookup", "lookup_rows", "scan", "snapshot")}
    return type(
        f"{dtype.capitalize()}{cls.__name__}",
        (cls,),
        {"__init__": make, "embedding_dtype": dtype, **(reads if dtype == "int8" else {})},
    )


def _to_quarters(read: Callable[..., Any]) -> Callable[..., Any]:
    """Read values to the nearest quarter: int8 holds neither [1, 2] nor [38, 38], but comes near enough to
    tell which of the numbers of a test a row has."""

    def round_in_place(found: Any) -> None:
        if isinstance(found, Tensor) and found.is_floating_point():
            found.mul_(4).round_().div_(4)
        elif isinstance(found, tuple):
            for one in found:
                round_in_place(one)
        elif isinstance(found, Scan):
            round_in_place(found.rows)
        elif isinstance(found, Rows):
            round_in_place(found.values)
        elif hasattr(found, "scan"):  # a snapshot
            found.scan = functools.partial(_to_quarters(type(found).scan), found)

    def read_quarters(self: Any, *arguments: Any, **options: Any) -> Any:
        found = read(self, *arguments, **options)
        if self.config.stores_narrow:
            round_in_place(found)
        return found

    return read_quarters


def narrow_table_classes() -> list[Any]:
    """Return all implementations with narrow embeddings. They are layouts of their own, so
    that on an emulated device they are a soak. Tests marked float32_rows are not run with them, and those
    marked exact_rows not with int8."""
    dtypes: tuple[EmbeddingDtype, ...] = ("bfloat16", "float16", "int8")
    return [
        pytest.param(narrow(cls, dtype), marks=pytest.mark.soak if is_emulated(cls) else ())
        for dtype in dtypes
        for cls in [*host_table_classes(), *tiered_table_classes(), *device_table_classes()]
    ]


def table_classes() -> list[Any]:
    """Return every implementation of the table seam that works on this machine, the plain one first."""
    return [*host_table_classes(), *cuda_table_classes()]


def host_table_classes() -> list[Any]:
    """Return those in the memory of the host."""
    return [DictTable, NativeTable]


def device_table_classes() -> list[Any]:
    """Return those with rows on a device."""
    return [*cuda_table_classes(), *spilling_table_classes(), *three_tier_table_classes()]


def cuda_table_classes() -> list[Any]:
    """Return tables on the device there is, and on an emulated one wherever it can be compiled."""
    return [{"gpu": CudaTable, "emulated": EmulatedCudaTable}[name] for name in device_names()]


def spilling_table_classes() -> list[Any]:
    """Return tables with room for twelve rows on the same devices, which keep the others in host memory."""
    return [{"gpu": SpillingCudaTable, "emulated": SpillingEmulatedTable}[name] for name in device_names()]


def three_tier_table_classes() -> list[Any]:
    """Return tables with room for twelve rows on the same devices, six in host memory, and the rest in
    files."""
    return [{"gpu": ThreeTierCudaTable, "emulated": ThreeTierEmulatedTable}[name] for name in device_names()]


def linking_three_tier_table_classes() -> list[Any]:
    """Return the same with all cold rows in files when a snapshot is opened."""
    found = {"gpu": LinkingThreeTierTable, "emulated": LinkingThreeTierEmulatedTable}
    return [found[name] for name in device_names()]


def tiered_table_classes() -> list[Any]:
    """Return tables that keep some rows in files, or all."""
    return [SmallTieredTable, FilesTieredTable]


def crowded_table_classes() -> list[Any]:
    """Return device tables that have no room for a copy of themselves: snapshots copy rows that change."""
    return [_crowded(name) for name in device_names()]


def _crowded(name: str) -> Any:
    device: Any = device_named(name)

    class CrowdedDevice(type(device)):  # type: ignore[misc]
        free_bytes = 0

    crowded = CrowdedDevice(**{one.name: getattr(device, one.name) for one in fields(device)})

    def make(self: Any, config: TableConfig, **others: Any) -> None:
        CudaTable.__init__(self, config, **{"device": crowded, **others})

    return type(f"Crowded{name.capitalize()}Table", (CudaTable,), {"__init__": make})


def roomy_table_classes() -> list[Any]:
    """Return tables that could keep rows in host memory and, in small tests, do not."""
    return [{"gpu": RoomyCudaTable, "emulated": RoomyEmulatedTable}[name] for name in device_names()]


def is_emulated(cls: object) -> bool:
    """Whether this is a table whose kernels are compiled for each layout, by g++."""
    return cls in (
        EmulatedCudaTable,
        SpillingEmulatedTable,
        ThreeTierEmulatedTable,
        LinkingThreeTierEmulatedTable,
        RoomyEmulatedTable,
    )


def quick_table_classes() -> list[Any]:
    """Return the same for tests of many layouts: compiling each for the emulated device makes them a soak."""
    return [pytest.param(cls, marks=pytest.mark.soak) if is_emulated(cls) else cls for cls in table_classes()]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
