"""Filters by ids, slots, actions and labels; and ids moved to another slot, crossed, or dropped by slot.

An empty list is no constraint: a filter without conditions keeps every record.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.data.records import LINE_ID, Records
from monolith.data.transforms.columns import (
    ACTIONS,
    DATA_SOURCE_KEY,
    has_any,
    int64_tensor,
    parse_integer_list,
    read_column,
    read_labels,
    rows_count,
    rows_with_any,
    signed,
    unsigned,
)
from monolith.data.transforms.transform import NUMBER, Filter, Rewrite
from monolith.data.transforms.values import FilterByValue
from monolith.errors import ConfigError
from monolith.feature import MAX_SLOTS_V1, MAX_SLOTS_V2, hash_integers, slot_of, switch_slot
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor, ranges


def id_columns(records: Records, names: Sequence[str] | None) -> dict[str, RaggedTensor]:
    """Return the columns that hold ids: those named, or every int64 one except those that identify the
    event."""
    if names is not None:
        return {name: read_column(records, name, torch.int64) for name in names}
    return {
        name: records[name]
        for name, column in records.columns.items()
        if column.dtype is torch.int64
        and not name.startswith(LINE_ID)
        and name not in (NUMBER, DATA_SOURCE_KEY)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByFid(Filter):
    """Keeps records that have at least one of `has_fids`, none of `filter_fids` and all of `select_fids`."""

    any_thread = True

    has_fids: tuple[int, ...] = ()
    """At least one of these."""
    filter_fids: tuple[int, ...] = ()
    """None of these."""
    select_fids: tuple[int, ...] = ()
    """All of these."""
    columns: tuple[str, ...] | None = None
    """Where to look; None for every column of ids."""

    def __post_init__(self) -> None:
        for fid in (*self.has_fids, *self.filter_fids, *self.select_fids):
            signed(fid)
        if both := set(self.filter_fids) & set(self.select_fids):
            raise ConfigError(
                f"filter by fid: {sorted(both)} may not be there and must be; no record is left"
            )

    def mask(self, records: Records) -> Tensor:
        columns = id_columns(records, self.columns)
        kept = torch.ones(len(records), dtype=torch.bool)
        if self.has_fids:
            kept &= _any_column(columns, self.has_fids, len(records))
        if self.filter_fids:
            kept &= ~_any_column(columns, self.filter_fids, len(records))
        for fid in self.select_fids:
            kept &= _any_column(columns, (fid,), len(records))
        return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterBySlot(Filter):
    """Keeps records that have ids of all of some slots."""

    any_thread = True

    select_slots: tuple[int, ...]
    version: int = 2
    """The version of the fids: 2 for parsed ones, 1 if a column has them as they came."""
    columns: tuple[str, ...] | None = None
    """Where to look; None for every column of ids."""

    def __post_init__(self) -> None:
        check_slots("filter by slot", self.select_slots, self.version)

    def mask(self, records: Records) -> Tensor:
        columns = id_columns(records, self.columns)
        kept = torch.ones(len(records), dtype=torch.bool)
        slots = {name: slot_of(column.flat_values, self.version) for name, column in columns.items()}
        for slot in self.select_slots:
            found = torch.zeros(len(records), dtype=torch.bool)
            for name, column in columns.items():
                found |= rows_with_any(column, slots[name] == slot)
            kept &= found
        return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByAction(Filter):
    """Keeps records with at least one of some actions."""

    any_thread = True

    has_actions: tuple[int, ...]

    def mask(self, records: Records) -> Tensor:
        if not self.has_actions:
            return torch.ones(len(records), dtype=torch.bool)
        return has_any(read_column(records, ACTIONS, torch.int64), self.has_actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByLabel(Filter):
    """Keeps a record if any of its labels reaches the threshold at its position.

    A record with fewer labels than there are thresholds is dropped.
    """

    any_thread = True

    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise ConfigError("filter by label: thresholds must name at least one")

    def mask(self, records: Records) -> Tensor:
        labels = read_labels(records, "filter by label")
        wanted = torch.tensor(self.thresholds, dtype=torch.float32)
        reached = (labels.to_padded(len(wanted), float("nan")) >= wanted).any(1)
        return reached & (labels.row_lengths() >= len(wanted))


def instance_filters(
    *,
    req_time_min: int | None = None,
    filter_fids: str = "",
    has_fids: str = "",
    select_fids: str = "",
    select_slots: str = "",
    has_actions: str = "",
    version: int = 2,
) -> tuple[Filter, ...]:
    """Return the usual filters, from lists of numbers between commas; an empty list is no constraint.

    Args:
        req_time_min: The earliest request time that is kept, in Unix seconds.
        version: Of the fids whose slots are looked at.

    Raises:
        ConfigError: An item of a list is no number: `Invalid integer string: <item>`.
    """
    filters: list[Filter] = []
    if req_time_min is not None:
        filters.append(FilterByValue(column=LINE_ID + "req_time", op="ge", operand=req_time_min))
    fids = FilterByFid(
        has_fids=parse_integer_list(has_fids),
        filter_fids=parse_integer_list(filter_fids),
        select_fids=parse_integer_list(select_fids),
    )
    if fids != FilterByFid():
        filters.append(fids)
    if slots := parse_integer_list(select_slots):
        filters.append(FilterBySlot(select_slots=slots, version=version))
    if actions := parse_integer_list(has_actions):
        filters.append(FilterByAction(has_actions=actions))
    return tuple(filters)


def check_slots(who: str, slots: Sequence[int], version: int) -> None:
    """Raise ConfigError for slots that fids of this version cannot name."""
    if version not in (1, 2):
        raise ConfigError(f"{who}: version must be 1 or 2, got {version}")
    limit = {1: MAX_SLOTS_V1, 2: MAX_SLOTS_V2}[version]
    for slot in slots:
        if not 0 <= slot < limit:
            raise ConfigError(f"{who}: slot should be less than {limit}, while got {slot}")


def _any_column(columns: dict[str, RaggedTensor], fids: Collection[int], size: int) -> Tensor:
    wanted = int64_tensor(fids)
    found = torch.zeros(size, dtype=torch.bool)
    for column in columns.values():
        found |= rows_with_any(column, torch.isin(column.flat_values, wanted))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchSlot(Rewrite):
    """Gives the ids of a column another slot, so that features share rows."""

    column: str
    slot: int
    into: str | None = None
    """The column to write; None for the same one."""

    def __post_init__(self) -> None:
        check_slots("switch slot", (self.slot,), 2)

    def rewrite(self, records: Records) -> Records:
        ids = read_column(records, self.column, torch.int64)
        switched = ids.with_values(switch_slot(ids.flat_values, self.slot))
        return records.with_columns({self.into or self.column: switched})


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureCombine(Rewrite):
    """Crosses two features: one id for every pair of an id of the left with an id of the right.

    Pairs come in the order of the left ids, then the right. (a, b) is another id than (b, a).
    """

    left: str
    right: str
    slot: int
    into: str
    """The column to write."""

    def __post_init__(self) -> None:
        check_slots("feature combine", (self.slot,), 2)
        if not self.into:
            raise ConfigError("feature combine: into must name a column")

    def rewrite(self, records: Records) -> Records:
        left = read_column(records, self.left, torch.int64)
        right = read_column(records, self.right, torch.int64)
        rows = left.value_rowids
        partners = right.row_lengths()[rows]
        first = torch.repeat_interleave(left.flat_values, partners)
        second = right.flat_values[ranges(right.row_splits[rows], partners)]
        pairs = mix(unsigned(first)) + unsigned(second)  # modulo 2^64
        ids = hash_integers(torch.from_numpy(pairs.view(np.int64)), self.slot)
        lengths = left.row_lengths() * right.row_lengths()
        return records.with_columns({self.into: RaggedTensor.from_row_lengths(ids, lengths, validate=False)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFilter(Rewrite):
    """Leaves out ids by their slot; the records stay."""

    keep: tuple[int, ...] = ()
    """Only ids of these slots stay; empty for all."""
    drop: tuple[int, ...] = ()
    """Ids of these slots are dropped."""
    version: int = 2
    columns: tuple[str, ...] | None = None
    """Which columns; None for every column of ids."""

    def __post_init__(self) -> None:
        check_slots("slot filter", (*self.keep, *self.drop), self.version)
        if both := set(self.keep) & set(self.drop):
            raise ConfigError(f"slot filter: slots {sorted(both)} are to be kept and dropped")

    def rewrite(self, records: Records) -> Records:
        columns = {}
        for name, column in id_columns(records, self.columns).items():
            slots = slot_of(column.flat_values, self.version)
            stays = ~torch.isin(slots, torch.tensor(self.drop, dtype=torch.int64))
            if self.keep:
                stays &= torch.isin(slots, torch.tensor(self.keep, dtype=torch.int64))
            if not bool(stays.all()):
                lengths = rows_count(column, stays)
                columns[name] = RaggedTensor.from_row_lengths(
                    column.flat_values[stays], lengths, validate=False
                )
        return records.with_columns(columns)
