"""Features: ids moved to another slot, crossed, or left out by their slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from monolith.data.records import Records
from monolith.data.transforms.columns import read_column, rows_count, unsigned
from monolith.data.transforms.filters import check_slots, id_columns
from monolith.data.transforms.transform import Rewrite
from monolith.errors import ConfigError
from monolith.feature import hash_integers, slot_of, switch_slot
from monolith.table.hashing import mix
from monolith.tensors import RaggedTensor, ranges


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
    """Ids of these slots go."""
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
