"""Merging: slots that are configured alike share one physical table.

A model has hundreds of slots and few ways to configure them. One table per way
means fewer, fuller batches. The name of a merged table follows from the names of
its slots, so that the same model finds the same table in a checkpoint. Ids of
merged slots must not overlap; feature ids carry their slot and do not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from monolith.table.config import TableConfig

_FC_SLOT = re.compile(r"fc_slot_[0-9]*")


@dataclass(frozen=True, slots=True)
class MergedTable:
    """One physical table and the slots that live in it, sorted."""

    config: TableConfig
    slots: tuple[str, ...]


def merged_name(slots: Iterable[str]) -> str:
    """Return the name of the table that holds `slots`: the md5 of their sorted names."""
    return _md5(sorted(slots))


def legacy_names(slots: Iterable[str]) -> tuple[str, ...]:
    """Return the name, if any, the table had while `fc_slot_7` was still called `slot_7`."""
    ordered = sorted(slots)
    # In the order of today's names: that is how such tables were written.
    before = _md5([slot.removeprefix("fc_") if _FC_SLOT.fullmatch(slot) else slot for slot in ordered])
    return () if before == _md5(ordered) else (before,)


def merge(configs: Mapping[str, TableConfig]) -> list[MergedTable]:
    """Group slots whose configs have equal signatures, one table per group, by first slot name.

    A merged table can be restored from whatever its slots could be, then from its legacy name.
    The configs given are left as they are.
    """
    groups: dict[str, list[str]] = {}
    for slot in sorted(configs):
        groups.setdefault(configs[slot].signature(), []).append(slot)
    return [_merged(slots, configs) for slots in groups.values()]


def _merged(slots: list[str], configs: Mapping[str, TableConfig]) -> MergedTable:
    old_names = [name for slot in slots for name in configs[slot].extra_restore_names]
    config = replace(
        configs[slots[0]],
        name=merged_name(slots),
        extra_restore_names=tuple(dict.fromkeys([*old_names, *legacy_names(slots)])),
    )
    return MergedTable(config, tuple(slots))


def _md5(names: list[str]) -> str:
    return hashlib.md5(",".join(names).encode(), usedforsecurity=False).hexdigest()
