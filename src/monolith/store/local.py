"""LocalStore: rows and dense weights in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monolith import native
from monolith.cuda import Device, device_of
from monolith.errors import AcceleratorError, ConfigError, FeatureError
from monolith.observe import MemoryWatch
from monolith.observe.progress import describe_bytes
from monolith.store.dense import check_optimizer_covers
from monolith.store.store import TableIds
from monolith.table import (
    AdmissionFilter,
    CudaTable,
    MultiTable,
    NativeTable,
    SlotThresholds,
    SpillingTable,
    Table,
    TableConfig,
    TableStats,
    TieredTable,
    device_budgets,
    make_filter,
)
from monolith.table.cuda.fused import FusedTables
from monolith.table.cuda.hot_rows import HotRows, can_stage
from monolith.table.cuda.layout import compile_tables_ahead


class LocalStore:
    """A `Store` over tables in host memory of this process, or in the memory of its GPU.

    Args:
        tables: The tables by name. Only the store may close them.
        filters: The admission filter of each table, for checkpoints.
        workers: Threads that divide a batch among them; None uses the calling thread alone.
        counts_sightings: Whether a table has a filter that counts how often IDs were seen.
        memory: Checks, as rows are trained, whether host memory runs short.

    Examples:
        >>> import torch
        >>> from monolith import LocalStore, Segment, TableConfig
        >>> from monolith.store import TableIds
        >>> store = LocalStore.from_configs({"item": TableConfig(name="item", segments=(Segment(dim=4),))})
        >>> ids = TableIds(torch.tensor([7, 8]), sizes=torch.tensor([2]))
        >>> store.apply_gradients(ids, torch.ones(8), step=1)  # creates rows for new IDs
        >>> store.lookup(ids).shape, store.stats()["item"].rows
        (torch.Size([8]), 2)
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        filters: Mapping[str, AdmissionFilter] | None = None,
        workers: native.Workers | None = None,
        counts_sightings: bool = True,
        memory: MemoryWatch | None = None,
    ) -> None:
        self.filters = dict(filters or {})
        self._multi = MultiTable(tables, workers=workers, exclusive=True)
        self._workers = workers
        self._hot_rows: HotRows | None = None
        self._counts_sightings = counts_sightings
        self._memory = MemoryWatch() if memory is None else memory
        self._dims = {name: table.dim for name, table in self._multi.tables.items()}
        self._optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def from_configs(
        cls,
        configs: Mapping[str, TableConfig],
        *,
        thresholds: Mapping[str, SlotThresholds] | None = None,
        threads: int | None = None,
        make_table: Callable[..., Table] = NativeTable,
        device: torch.device | Device | None = None,
        device_bytes: int | None = None,
    ) -> LocalStore:
        """Make the tables of a model.

        Args:
            thresholds: By table: how often an ID must have been seen before it gets a row, and how
                that is counted.
            threads: Threads that work on a batch, including the caller; by default as many as torch uses.
            device: A GPU for the rows: tables are made there, whatever `make_table` is. None means host
                memory.
            device_bytes: Bytes of that GPU's memory for all tables, divided by `device_budgets`; rows that do
                not fit are in host memory, and those of tiered tables in files, see `SpillingTable`. None
                takes as much as rows need.

        Raises:
            AcceleratorError: There is no such device.
            ConfigError: The bytes are too few for the smallest tables, or a table on a device is tiered and
                there are no `device_bytes`: all of its rows would be there.
        """
        team = native.Workers(torch.get_num_threads() if threads is None else threads)
        filtered = any(threshold.largest for threshold in (thresholds or {}).values())
        shares = {} if device is None or device_bytes is None else device_budgets(configs, device_bytes)
        if device is not None:
            with suppress(AcceleratorError):  # which the first table raises, with its name
                compile_tables_ahead(configs.values(), device_of(device), fused=True, filtered=filtered)
        tables: dict[str, Table] = {}
        filters: dict[str, AdmissionFilter] = {}
        reader = native.BlockReader()  # starts no thread before a tiered table reads
        for name, config in configs.items():
            threshold = (thresholds or {}).get(name, SlotThresholds())
            counting = threshold.counting
            filters[name] = admission = make_filter(
                counting.kind,
                threshold,
                capacity=counting.capacity,
                split_num=counting.split_num,
                equal=counting.equal,
            )
            if config.storage == "tiered" and device is not None and device_bytes is None:
                raise ConfigError(
                    f"table {name!r}: storage='tiered' keeps rows in files that have no room on {device} and "
                    "in host memory, and all of that device's memory may be taken. Set "
                    "train.device_memory_bytes to the memory of rows there, or storage to memory"
                )
            if device is not None:
                tables[name] = _on_device(config, admission, device, shares.get(name), team, reader)
            elif make_table is NativeTable and config.storage == "tiered":
                tables[name] = TieredTable(config, admission=admission, workers=team, reader=reader)
            elif make_table is NativeTable:
                tables[name] = NativeTable(config, admission=admission, workers=team)
            else:
                tables[name] = make_table(config, admission=admission)
        return cls(tables, filters=filters, workers=team, counts_sightings=filtered)

    @property
    def tables(self) -> Mapping[str, int]:
        return self._dims

    @property
    def device(self) -> torch.device:
        return self._multi.device

    @property
    def cuda(self) -> Device | None:
        """The CUDA device that has all of its rows; None if they are in host memory."""
        return self._multi.cuda

    @property
    def delay_compensated(self) -> bool:
        return self._multi.delay_compensated

    @property
    def counts_sightings(self) -> bool:
        """Whether `TableIds.counts` matter to an admission filter."""
        return self._counts_sightings

    def table(self, name: str) -> Table:
        """Return one table, to inspect or dump it."""
        return self._multi[name]

    def lookup(self, ids: TableIds) -> Tensor:
        return self._multi.fused_lookup(ids.ids, ids.sizes, num_batches=ids.batches).embeddings

    def read_ahead(self, ids: TableIds) -> None:
        """Read rows that are in files, for a `lookup` of these IDs that is to see all updates until then.

        Does nothing for other tables. From any thread, while a step before trains.
        """
        self._multi.read_ahead(ids.ids, ids.sizes)

    def lookup_arrays(
        self, ids: NDArray[np.int64], sizes: NDArray[np.int64], batches: int
    ) -> NDArray[np.float32]:
        """Return the result of `lookup` for the arrays of a request, as a parameter server receives it."""
        return self._multi.fused_embeddings(ids, sizes, num_batches=batches)

    def lookup_into(self, ids: TableIds, out: Tensor) -> None:
        """Write the result of `lookup` into memory of the caller: float32 on the CPU, pinned for example."""
        self._multi.fused_lookup(ids.ids, ids.sizes, num_batches=ids.batches, out=out)

    def apply_gradients(
        self,
        ids: TableIds,
        gradients: Tensor,
        *,
        step: int = 0,
        event_time: int | Tensor = 0,
        latest_values: Tensor | None = None,
    ) -> None:
        self._multi.fused_apply_gradients(
            ids.ids,
            ids.sizes,
            gradients,
            num_batches=ids.batches,
            step=step,
            event_time=event_time,
            dedup=ids.batches > 1 or not ids.distinct,
            latest_values=latest_values,
            counts=ids.counts if self._counts_sightings else None,
        )
        self._memory.look(self._describe)

    @property
    def fused(self) -> FusedTables | None:
        """The tables as launches over all of them know them; None if they are not on one device."""
        return self._multi.fused

    @property
    def hot_rows(self) -> HotRows | None:
        """What brings rows to the device ahead of steps; None if no table keeps some in host memory, or one
        decides in host memory which ids get a row."""
        tables = list(self._multi.tables.values())
        if self._hot_rows is None and can_stage(tables):
            self._hot_rows = HotRows(tables, self._workers)
        return self._hot_rows

    def rates(self, step: int) -> NDArray[np.float32]:
        """Return the learning rates of all tables' segments at a step, as `CapturedStep` takes them."""
        return self._multi.rates(step)

    def attach_dense(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is not None:
            raise FeatureError("this store has dense variables already; one store serves one model")
        check_optimizer_covers(parameters, optimizer)
        self._optimizer = optimizer

    def push_dense(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def pull_dense(self) -> None:
        """Do nothing: the variables are the only copy."""

    def count_expired(self, now: int) -> dict[str, int]:
        return self._multi.count_expired(now)

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        return self._multi.evict(now, tables=tables)

    def stats(self) -> dict[str, TableStats]:
        return self._multi.stats()

    def close(self) -> None:
        self._multi.close()

    def _describe(self) -> str:
        """Describe how much host memory the tables use."""
        stats = {name: _in_host_memory(table) for name, table in self._multi.tables.items()}
        total = sum(one.bytes_total for one in stats.values() if one is not None)
        largest = max(stats, key=lambda name: 0 if (one := stats[name]) is None else one.bytes_total)
        if (most := stats[largest]) is None:
            return "no tables: rows are on the device"
        return (
            f"{describe_bytes(total)} of tables, most of it in {largest!r} "
            f"({describe_bytes(most.bytes_total)}, {most.rows:,} rows)"
        )


def _on_device(
    config: TableConfig,
    admission: AdmissionFilter,
    device: torch.device | Device,
    share: int | None,
    workers: native.Workers,
    reader: native.BlockReader,
) -> Table:
    whole = config.capacity_bytes
    if share is None or (whole is not None and whole <= share):
        return CudaTable(config, admission=admission, device=device)
    return SpillingTable.within(
        config, device_bytes=share, admission=admission, device=device, workers=workers, reader=reader
    )


def _in_host_memory(table: Table) -> TableStats | None:
    if isinstance(table, SpillingTable):
        return table.far.stats()
    return None if isinstance(table, CudaTable) else table.stats()
