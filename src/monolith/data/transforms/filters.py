"""Filters by ids, slots, actions and labels; and ids moved to another slot, crossed, or dropped by slot.

An empty list is no constraint: a filter without conditions keeps every record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.data.records import LABEL, LINE_ID, Records
from monolith.data.transforms.columns import (
    ACTIONS,
    DATA_SOURCE_KEY,
    has_column,
    has_labels,
    parse_integer_list,
    read_column,
    rows_count,
    signed,
    unsigned,
)
from monolith.data.transforms.transform import NUMBER, Filter, Rewrite
from monolith.data.transforms.values import FilterByValue, asking_for_all
from monolith.errors import ConfigError
from monolith.feature import MAX_SLOTS_V1, MAX_SLOTS_V2, hash_integers, slot_of, switch_slot
from monolith.feature.fids import SIGNATURE_BITS
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor, ranges


def id_columns(records: Records, names: Sequence[str] | None) -> list[str]:
    """Return which columns hold ids: of those named, or every int64 one except those that identify the
    event."""
    if names is not None:
        return [name for name in names if has_column(records, name, torch.int64)]
    return [
        name
        for name in records.columns
        if records.dtype_of(name) is torch.int64
        and not name.startswith(LINE_ID)
        and name not in (NUMBER, DATA_SOURCE_KEY)
    ]


def _passing(tests: Sequence[native.RowTest], records: Records, names: Sequence[str]) -> Tensor:
    """Return which records pass all of some tests by their values in some columns."""
    views = records.views(names)
    passing = np.ones(len(records), np.uint8)
    for test in tests:
        passing &= test.passing(views, len(records))
    return torch.from_numpy(passing.view(np.bool_))


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
    _tests: list[native.RowTest] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for fid in (*self.has_fids, *self.filter_fids, *self.select_fids):
            signed(fid)
        if both := set(self.filter_fids) & set(self.select_fids):
            raise ConfigError(
                f"filter by fid: {sorted(both)} may not be there and must be; no record is left"
            )

    def mask(self, records: Records) -> Tensor:
        if not self._tests:
            self._tests[:] = self._make_tests()
        return _passing(self._tests, records, id_columns(records, self.columns))

    def _make_tests(self) -> list[native.RowTest]:
        has, without = ([signed(fid) for fid in fids] for fids in (self.has_fids, self.filter_fids))
        first = native.RowTest(
            "one of",
            ints=[*has, *without],
            wishes=[1] * len(has) + [2] * len(without),
            any=1 if has else 0,
            none=2,
        )
        return [first, *asking_for_all([signed(fid) for fid in self.select_fids])]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterBySlot(Filter):
    """Keeps records that have ids of all of some slots."""

    any_thread = True

    select_slots: tuple[int, ...]
    version: int = 2
    """The version of the fids: 2 for parsed ones, 1 if a column has them as they came."""
    columns: tuple[str, ...] | None = None
    """Where to look; None for every column of ids."""
    _tests: list[native.RowTest] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_slots("filter by slot", self.select_slots, self.version)

    def mask(self, records: Records) -> Tensor:
        if not self._tests:
            bits = SIGNATURE_BITS[self.version]
            most = {1: MAX_SLOTS_V1, 2: MAX_SLOTS_V2}[self.version]
            self._tests[:] = asking_for_all(self.select_slots, shift=bits, bits=most - 1)
        return _passing(self._tests, records, id_columns(records, self.columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterByAction(Filter):
    """Keeps records with at least one of some actions."""

    any_thread = True

    has_actions: tuple[int, ...]

    def mask(self, records: Records) -> Tensor:
        if not self.has_actions:
            return torch.ones(len(records), dtype=torch.bool)
        there = [ACTIONS] if has_column(records, ACTIONS, torch.int64) else []
        wanted = [signed(action) for action in self.has_actions]
        test = native.RowTest("one of", ints=wanted, wishes=[1] * len(wanted), any=1)
        return _passing([test], records, there)


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
        if not has_labels(records, "filter by label"):
            return torch.zeros(len(records), dtype=torch.bool)
        wanted = torch.tensor(self.thresholds, dtype=torch.float32).numpy()
        reached = native.rows_that_reach(records.views([LABEL]), wanted)
        return torch.from_numpy(reached.view(np.bool_))


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
        for name in id_columns(records, self.columns):
            column = records[name]
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
