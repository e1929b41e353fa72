"""MultiTable: many tables by name, and one call for all of them.

A model has a table per slot, or per group of slots that are configured alike, and
every step reads and trains all of them. Tables are in the order of their names,
whatever order they were given in: ids, sizes and learning rates of a fused call
follow it. Over native tables a fused call is one call into the core, over tables on
one GPU it is a few launches; over any other `Table` it is a loop with the same outcome. Tiered tables work
side by side in it, so that none waits for what another reads from files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import native
from monolith.cuda import Device
from monolith.errors import TableArgumentError, UnknownTableError
from monolith.table import arguments
from monolith.table.config import TableConfig, merge
from monolith.table.cuda.fused import FusedBatch, FusedTables, common_device
from monolith.table.native_table import NativeTable
from monolith.table.table import Table, TableStats
from monolith.table.tiered_table import SideBySide, TieredTable


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The embeddings of a fused lookup over K tables and N batches, and the position of each cell in them.

    Cell `batch * K + table` holds the embeddings of one table's ids in one batch.
    """

    embeddings: Tensor
    """float32, flat: cell after cell, one embedding per id, in the order of the ids."""
    recv_splits: Tensor
    """int64 of shape (N,): floats of each batch."""
    id_offsets: Tensor
    """int64 of shape (K * N + 1,): where each cell begins among the ids, then their number."""
    emb_offsets: Tensor
    """int64 of shape (K * N + 1,): where each cell begins in `embeddings`, then its length."""


class MultiTable:
    """Named tables that are read and trained together. Thread-safe, as its tables are.

    Calls that take a mapping are keyed by slot. A slot is the name of a table, unless slots
    share tables (`from_configs`). An unknown slot raises UnknownTableError and an argument
    that does not fit TableArgumentError, both before any table has changed.

    Shapes: n ids of one slot in a call, dim floats of an embedding of its table.

    Args:
        tables: The tables by name. `close` closes them.
        slots: Slot to the name of the table it lives in; by default each table is a slot of its own.
        workers: Threads among which fused calls share native tables.
        exclusive: Whether tables are closed by `close` alone, so that a fused call need not ask each.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, TableConfig
        >>> from monolith.table import MultiTable
        >>> configs = {
        ...     "user": TableConfig(name="user", segments=(Segment(dim=1, learning_rate=1.0),)),
        ...     "item": TableConfig(name="item", segments=(Segment(dim=2),)),
        ... }
        >>> tables = MultiTable.from_configs(configs, NativeTable)
        >>> tables.apply_gradients({"user": (torch.tensor([17, 18]), torch.ones(2, 1))})
        >>> found = tables.lookup({"user": torch.tensor([17]), "item": torch.tensor([7, 8])})
        >>> found["user"], found["item"].shape  # (n, dim) of each slot
        (tensor([[-1.]]), torch.Size([2, 2]))
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        slots: Mapping[str, str] | None = None,
        workers: native.Workers | None = None,
        exclusive: bool = False,
    ) -> None:
        self._exclusive = exclusive
        self._tables = {name: tables[name] for name in sorted(tables)}
        routes = {name: name for name in tables} if slots is None else slots
        self._slots = {slot: routes[slot] for slot in sorted(routes)}
        for slot, name in self._slots.items():
            if name not in self._tables:
                raise UnknownTableError(f"slot {slot!r} is to live in table {name!r}, which is not given")
        self._dims = np.array([table.dim for table in self._tables.values()], np.int64)
        self._workers = workers
        self._memory = native.KeptMemory()
        self._kept: tuple[list[native.Table], native.TableGroup] | None = None
        self._device = common_device(list(self._tables.values()))
        self._side_by_side = _side_by_side(list(self._tables.values()))
        self._kept_fused: FusedTables | None = None
        # Computed once, since fused calls are made every step.
        configs = [table.config for table in self._tables.values()]
        segments = [segment for config in configs for segment in config.segments]
        self._serving = next((config for config in configs if config.serving), None)
        self._delayed = next(
            (c for c in configs if any(s.optimizer.delay_compensation is not None for s in c.segments)), None
        )
        self._budgeted = [
            table
            for table in self._tables.values()
            if isinstance(table, NativeTable) and table.config.capacity_bytes is not None
        ]
        self._num_rates = len(segments)
        self._fixed_rates = arguments.fixed_rates(segments)

    @classmethod
    def from_configs(
        cls, slot_configs: Mapping[str, TableConfig], make_table: Callable[[TableConfig], Table]
    ) -> MultiTable:
        """Make one table for all slots that are configured alike, named as `merging.merge` says.

        Ids of slots that share a table must not overlap: equal ids are one row.
        """
        merged = merge(slot_configs)
        return cls(
            {group.config.name: make_table(group.config) for group in merged},
            slots={slot: group.config.name for group in merged for slot in group.slots},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The slots, sorted."""
        return tuple(self._slots)

    @property
    def slots(self) -> Mapping[str, str]:
        """Slot to the name of its table, sorted by slot."""
        return MappingProxyType(self._slots)

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables in the order of fused calls. Scan and restore them one by one."""
        return MappingProxyType(self._tables)

    @property
    def device(self) -> torch.device:
        """The device of all rows; fused calls accept tensors on it."""
        return torch.device("cpu") if self._device is None else self._device.torch_device

    @property
    def cuda(self) -> Device | None:
        """The same as kernels know it; None if tables are in host memory, or not together."""
        return self._device

    def __getitem__(self, slot: str) -> Table:
        """Return the table that a slot lives in."""
        return self._tables[self._table_name(slot)]

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    def __len__(self) -> int:
        """Return the number of rows of all tables together."""
        return sum(self.feature_counts().values())

    # Calls by slot

    def lookup(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one embedding per id, for each slot given.

        Args:
            ids: Slot to int64 of shape (n,).

        Returns:
            Slot to float32 of shape (n, dim). An id without a row reads as zeros and gets none.
        """
        return {slot: self[slot].lookup(wanted) for slot, wanted in ids.items()}

    def contains(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a bool per id, for each slot given: whether it has a row."""
        return {slot: self[slot].contains(wanted) for slot, wanted in ids.items()}

    def assign(
        self, updates: Mapping[str, tuple[Tensor, Tensor]], *, event_time: int | Mapping[str, Tensor] = 0
    ) -> None:
        """Set embeddings, as `Table.assign` does.

        Args:
            updates: Slot to its ids, int64 of shape (n,), and values, float32 of shape (n, dim).
                Slots that share a table are written in the order of their names.
            event_time: Unix seconds: one for all, or for each slot of the call int64 of shape (n,).
        """
        for batch in self._batches(updates, event_time):
            batch.table.assign(batch.ids, batch.values, event_time=batch.event_time)

    def assign_add(
        self, updates: Mapping[str, tuple[Tensor, Tensor]], *, event_time: int | Mapping[str, Tensor] = 0
    ) -> None:
        """Add to embeddings, as `Table.assign_add` does. Arguments as for `assign`."""
        for batch in self._batches(updates, event_time):
            batch.table.assign_add(batch.ids, batch.values, event_time=batch.event_time)

    def apply_gradients(
        self,
        updates: Mapping[str, tuple[Tensor, Tensor]],
        *,
        step: int = 0,
        event_time: int | Mapping[str, Tensor] = 0,
        learning_rates: Mapping[str, Tensor] | None = None,
        dedup: bool = False,
        latest_values: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take one optimizer step per id, as `Table.apply_gradients` does.

        Args:
            updates: As for `assign`, with gradients for values. Tables of other slots stay as they are.
            step: The global step.
            event_time: As for `assign`.
            learning_rates: Slot to float32, one per segment. A table whose slots have none here
                takes its own at `step`; slots that share a table cannot have different ones.
            dedup: Whether equal ids of one table become one step with the sum of their gradients.
            latest_values: For each slot of the call float32 of shape (n, dim); required when a
                segment of their tables is delay-compensated.
        """
        arguments.check_step(step)
        batches = self._batches(updates, event_time, latest_values)
        rates = self._rates_by_table(learning_rates or {})
        for batch in batches:
            config = batch.table.config
            arguments.check_trainable(config, "apply_gradients")
            arguments.rate_array(rates.get(batch.name), config, step)
            arguments.latest_array(batch.latest_values, config, len(batch.ids))
        for batch in batches:
            batch.table.apply_gradients(
                batch.ids,
                batch.values,
                step=step,
                event_time=batch.event_time,
                learning_rates=rates.get(batch.name),
                dedup=dedup,
                latest_values=batch.latest_values,
            )

    def reinitialize(self, slot: str, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows to their initializer with event time `now`.

        Returns:
            int8 per id: 1 it existed, 0 it was inserted, -1 there is no such slot, or no room for the id.
        """
        if slot in self:
            return self[slot].reinitialize(ids, now=now)
        arguments.event_second(now, "now")
        return torch.full((len(arguments.id_array(ids)),), -1, dtype=torch.int8)

    # Fused calls

    def fused_lookup(
        self, ids: Tensor, sizes: Tensor, *, num_batches: int, out: Tensor | None = None
    ) -> FusedRows:
        """Look up the ids of K tables and N batches at once.

        Args:
            ids: int64, flat: batch after batch and, within a batch, table after table as in `tables`; on the
                CPU or on the device of the tables, where embeddings are then.
            sizes: int64 of shape (N * K,), on the CPU: how many ids there are at `batch * K + table`.
            num_batches: N, 1 or more.
            out: float32, on the CPU: where to put the embeddings; new memory by default.
        """
        if (fused := self.fused) is not None:
            keys_there, cells = fused.inputs.ids(ids), arguments.id_array(sizes, "sizes")
            offsets = self._offsets(cells, num_batches, len(keys_there))
            found = fused.lookup(keys_there, cells, *offsets[1:]).to(ids.device)
            if out is not None:
                arguments.out_array(out, len(found))
                found = out.copy_(found)
            return FusedRows(found, *map(torch.from_numpy, offsets))
        keys, counts = arguments.id_array(ids), arguments.id_array(sizes, "sizes")
        recv_splits, id_offsets, emb_offsets = self._offsets(counts, num_batches, len(keys))
        floats = int(emb_offsets[-1])
        if out is None:
            out = torch.from_numpy(self._memory.floats(floats))
        answer, embeddings = arguments.out_array(out, floats)
        self._group().lookup(keys, counts, num_batches, embeddings)
        return FusedRows(answer, *map(torch.from_numpy, (recv_splits, id_offsets, emb_offsets)))

    def read_ahead(self, ids: Tensor, sizes: Tensor) -> None:
        """Read rows of tiered tables that are in files, for a `fused_lookup` of these IDs that is to see all
        updates until then. Does nothing for other tables. From any thread, while a step before trains.
        """
        tables = list(self._tables.values())
        if not any(isinstance(table, TieredTable) for table in tables):
            return
        cells = torch.split(ids, sizes.tolist())
        _each(
            self._side_by_side,
            [
                partial(table.read_ahead, cell)
                for table, cell in zip(itertools.cycle(tables), cells)
                if isinstance(table, TieredTable)
            ],
        )

    def fused_embeddings(
        self, ids: NDArray[np.int64], sizes: NDArray[np.int64], *, num_batches: int
    ) -> NDArray[np.float32]:
        """Return the embeddings of `fused_lookup`, flat, for arrays on the CPU.

        Tables in host memory answer in one native call, without offsets and tensors that are not needed: a
        parameter server does little else.
        """
        group = None if self._device is not None else self._group()
        if not isinstance(group, native.TableGroup):
            found = self.fused_lookup(torch.from_numpy(ids), torch.from_numpy(sizes), num_batches=num_batches)
            return found.embeddings.numpy()
        try:
            return group.read(ids, sizes, num_batches, self._memory)
        except ValueError as cause:
            raise self._misfit(cause, num_batches, len(ids)) from cause

    def fused_apply_gradients(
        self,
        ids: Tensor,
        sizes: Tensor,
        gradients: Tensor,
        *,
        num_batches: int,
        **options: Unpack[arguments.UpdateOptions],
    ) -> None:
        """Train K tables at once; each takes its ids of all N batches in one call, in batch order.

        Args:
            ids: As for `fused_lookup`.
            sizes: As for `fused_lookup`.
            gradients: float32, flat, laid out as the embeddings of `fused_lookup`.
            num_batches: N, 1 or more.
            options: As for `Table.apply_gradients`, over all tables: `learning_rates` is flat, one per
                segment, table after table as in `tables`; `latest_values` is laid out as `gradients`.
        """
        update = arguments.update_options(options)
        arguments.check_step(update.step)
        if self._serving is not None:
            arguments.check_trainable(self._serving, "fused_apply_gradients")
        if self._delayed is not None and update.latest_values is None:
            arguments.latest_array(None, self._delayed, 0)
        cells = arguments.id_array(sizes, "sizes")
        rates = (
            self.rates(update.step)
            if update.learning_rates is None
            else arguments.float_array(update.learning_rates, (self._num_rates,), "learning_rates")
        )
        latest = update.latest_values
        if (fused := self.fused) is not None:
            there, keys_there = fused.inputs, fused.inputs.ids(ids)
            n = len(keys_there)
            shape = (int(self._offsets(cells, num_batches, n)[-1][-1]),)
            batch = FusedBatch(
                ids=keys_there,
                sizes=cells,
                gradients=there.floats(gradients, shape, "gradients"),
                rates=rates,
                step=update.step,
                dedup=update.dedup,
                event_time=there.seconds(update.event_time, n),
                latest=None if latest is None else there.floats(latest, shape, "latest_values"),
                counts=there.counts(update.counts, n),
            )
            fused.apply_gradients(batch.by_table(self._dims))
            return
        keys = arguments.id_array(ids)
        n = len(keys)
        shape = (int(self._offsets(cells, num_batches, n)[-1][-1]),)
        self._group().apply_gradients(
            keys,
            cells,
            num_batches,
            gradients=arguments.float_array(gradients, shape, "gradients"),
            rates=rates,
            step=update.step,
            times=arguments.event_second_array(update.event_time, n),
            dedup=update.dedup,
            latest=None if latest is None else arguments.float_array(latest, shape, "latest_values"),
            counts=arguments.count_array(update.counts, n),
        )
        for table in self._budgeted:
            table.note_refusals()

    # All tables

    def count_expired(self, now: int) -> dict[str, int]:
        """Return how many rows `evict` would drop, by table."""
        return {name: table.count_expired(now) for name, table in self._tables.items()}

    def evict(self, now: int | None = None, *, tables: Collection[str] | None = None) -> dict[str, int]:
        """Drop the rows that expired at `now`, each table by its own expiry; return how many, by table.

        Args:
            now: By default each table's own newest event time; see `Table.evict`.
            tables: From which to drop; by default all.
        """
        return {
            name: table.evict(now) if tables is None or name in tables else 0
            for name, table in self._tables.items()
        }

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds, by table."""
        return {name: table.stats() for name, table in self._tables.items()}

    def feature_counts(self) -> dict[str, int]:
        """Return the number of rows, by table."""
        return {name: len(table) for name, table in self._tables.items()}

    def close(self) -> None:
        """Close every table. Closing again does nothing."""
        self._kept = None
        for table in self._tables.values():
            table.close()

    # Inside

    def _table_name(self, slot: str) -> str:
        if slot not in self._slots:
            near = get_close_matches(str(slot), self._slots, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self._slots)} others"
            raise UnknownTableError(f"no slot or table is named {slot!r}; {hint}")
        return self._slots[slot]

    def _batches(
        self,
        updates: Mapping[str, tuple[Tensor, Tensor]],
        event_time: int | Mapping[str, Tensor],
        latest_values: Mapping[str, Tensor] | None = None,
    ) -> list[_Batch]:
        """Check every slot of a call, then bring the slots of each table together."""
        second = 0 if isinstance(event_time, Mapping) else arguments.event_second(event_time)
        # All slots are checked before any table changes: a call either fails as a whole or not at all.
        by_slot: dict[str, list[dict[str, Tensor]]] = {}
        for slot in sorted(updates):
            columns = dict(zip(("ids", "values"), updates[slot], strict=True))
            if isinstance(event_time, Mapping):
                columns["event_time"] = _given(event_time, slot, "event_time")
            if latest_values is not None:
                columns["latest_values"] = _given(latest_values, slot, "latest_values")
            _check_columns(columns, slot, self[slot].dim)
            by_slot.setdefault(self._slots[slot], []).append(columns)
        batches = []
        for name, several in sorted(by_slot.items()):
            whole = {column: _joined([one[column] for one in several]) for column in several[0]}
            times, latest = whole.get("event_time", second), whole.get("latest_values")
            batches.append(_Batch(name, self._tables[name], whole["ids"], whole["values"], times, latest))
        return batches

    def _rates_by_table(self, learning_rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for slot, rates in learning_rates.items():
            name = self._table_name(slot)
            if name in found and not torch.equal(found[name], rates):
                raise TableArgumentError(
                    f"learning_rates: slot {slot!r} shares table {name!r} with a slot of other rates; "
                    "give all slots of a table the same ones"
                )
            found[name] = rates
        return found

    def _offsets(self, sizes: NDArray[np.int64], num_batches: int, num_ids: int) -> list[NDArray[np.int64]]:
        if not isinstance(num_batches, int) or num_batches < 1:
            raise TableArgumentError(f"num_batches must be a whole number, 1 or more, got {num_batches!r}")
        try:
            return list(native.fused_offsets(self._dims, sizes, num_batches, num_ids))
        except ValueError as cause:
            raise self._misfit(cause, num_batches, num_ids) from cause

    def _misfit(self, cause: ValueError, num_batches: int, num_ids: int) -> TableArgumentError:
        """Return the error for sizes that do not fit tables, batches or ids."""
        return TableArgumentError(
            f"{cause} ({len(self._tables)} tables, {num_batches} batches, {num_ids} ids)"
        )

    @property
    def fused(self) -> FusedTables | None:
        """The tables as their device has them, if all are on one."""
        if self._kept_fused is None and self._device is not None:
            self._kept_fused = FusedTables(list(self._tables.values()), self._device)
        return self._kept_fused

    def _group(self) -> native.TableGroup | _PlainGroup:
        kept = self._kept  # once: another thread may close the tables meanwhile
        if self._exclusive and kept is not None:
            return kept[1]
        # Tables may have been closed or replaced behind our back: compare the cores with those of the group.
        tables = list(self._tables.values())
        natives = [table for table in tables if isinstance(table, NativeTable)]
        if len(natives) < len(tables):
            return _PlainGroup(tables, self._side_by_side)
        cores = [table.core for table in natives]  # raises where one was closed
        if kept is None or kept[0] != cores:
            kept = self._kept = cores, native.TableGroup(cores, self._workers)
        return kept[1]

    def rates(self, step: int) -> NDArray[np.float32]:
        """Return the learning rates of all segments at a step, table after table."""
        if self._fixed_rates is not None:
            return self._fixed_rates
        configs = [table.config for table in self._tables.values()]
        return np.array([rate for config in configs for rate in config.learning_rates(step)], np.float32)

    @property
    def delay_compensated(self) -> bool:
        """Whether `latest_values` must be given with gradients."""
        return self._delayed is not None


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one table gets of a call by slot."""

    name: str
    table: Table
    ids: Tensor
    values: Tensor
    event_time: int | Tensor
    latest_values: Tensor | None


def _given(column: Mapping[str, Tensor], slot: str, what: str) -> Tensor:
    if slot not in column:
        raise TableArgumentError(
            f"{what} must have one entry for each slot of the call, got none for {slot!r}"
        )
    return column[slot]


def _check_columns(columns: Mapping[str, Tensor], slot: str, dim: int) -> None:
    n = len(arguments.id_array(columns["ids"], f"ids of {slot!r}"))
    for name in ("values", "latest_values"):
        if name in columns:
            arguments.float_array(columns[name], (n, dim), f"{name} of {slot!r}")
    if "event_time" in columns:
        arguments.event_time_array(columns["event_time"], n)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class _UpdateArrays(TypedDict):
    """The checked arrays of a fused update, as `native.TableGroup.apply_gradients` takes them."""

    gradients: NDArray[np.float32]
    rates: NDArray[np.float32]
    step: int
    times: NDArray[np.uint32]
    dedup: bool
    latest: NDArray[np.float32] | None
    counts: NDArray[np.uint32] | None


class _PlainGroup:
    """Fused calls by plain calls on tables of any kind: side by side, or table after table."""

    def __init__(self, tables: list[Table], side_by_side: SideBySide | None) -> None:
        self._tables = tables
        self._side_by_side = side_by_side

    def lookup(
        self, ids: NDArray[np.int64], sizes: NDArray[np.int64], num_batches: int, out: NDArray[np.float32]
    ) -> None:
        tables = self._tables * num_batches
        cells = torch.from_numpy(ids).split_with_sizes(sizes.tolist())
        parts = torch.from_numpy(out).split_with_sizes(self._floats(sizes, num_batches))
        _each(
            self._side_by_side,
            [
                partial(table.lookup, cell, out=part.view(-1, table.dim))
                for table, cell, part in zip(tables, cells, parts, strict=True)
            ],
        )

    def apply_gradients(
        self,
        ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        num_batches: int,
        **update: Unpack[_UpdateArrays],
    ) -> None:
        latest, counts = update["latest"], update["counts"]
        lengths_of_ids, floats = sizes.tolist(), self._floats(sizes, num_batches)
        seconds = np.broadcast_to(update["times"], ids.shape).astype(np.int64)
        segments = [len(table.config.segments) for table in self._tables]
        often = np.ones_like(ids) if counts is None else counts.astype(np.int64)
        columns = [
            (ids, lengths_of_ids),
            (update["gradients"], floats),
            (seconds, lengths_of_ids),
            (often, lengths_of_ids),
        ]
        columns += [] if latest is None else [(latest, floats)]
        cells = [torch.from_numpy(column).split_with_sizes(lengths) for column, lengths in columns]
        own = torch.from_numpy(update["rates"]).split_with_sizes(segments)

        # Cells are ordered by batch, then by table: those of table k are every K-th from k on.
        def train(k: int, table: Table) -> None:
            keys, grads, when, met, *seen = (torch.cat(column[k :: len(self._tables)]) for column in cells)
            table.apply_gradients(
                keys,
                grads.view(-1, table.dim),
                step=update["step"],
                event_time=when,
                learning_rates=own[k],
                dedup=update["dedup"],
                latest_values=seen[0].view(-1, table.dim) if seen else None,
                counts=None if counts is None else met,
            )

        _each(self._side_by_side, [partial(train, k, table) for k, table in enumerate(self._tables)])

    def _floats(self, sizes: NDArray[np.int64], num_batches: int) -> list[int]:
        widths = [table.dim for table in self._tables] * num_batches
        return [n * dim for n, dim in zip(sizes.tolist(), widths, strict=True)]


def _side_by_side(tables: list[Table]) -> SideBySide | None:
    """Return threads for tables that read files; None if that does not help.

    Tables on a device keep to the thread of their caller, whose stream they work on.
    """
    tiered = sum(isinstance(table, TieredTable) for table in tables)
    return SideBySide(len(tables)) if tiered > 1 and all(table.cuda is None for table in tables) else None


def _each(side_by_side: SideBySide | None, calls: Sequence[Callable[[], object]]) -> None:
    if side_by_side is not None:
        side_by_side.each(calls)
        return
    for call in calls:
        call()
