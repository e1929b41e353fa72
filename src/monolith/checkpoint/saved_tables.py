"""Saved tables: where the tables of a checkpoint are on disk, if one process or several servers wrote them.

    model.ckpt-100.assets/ps-0-of-2/item.manifest ...    the ids that are 0 modulo 2
    model.ckpt-100.assets/ps-1-of-2/item.manifest ...    and those that are 1, as unsigned numbers

A server writes its shard of every table, and of every filter, into a folder of its own. A single process
writes into the assets folder itself, and so did every checkpoint without shards. The manifest has one entry
for all shards, and calls them pieces: `merge_entries` makes it of the entries that the servers returned.

The id alone decides which shard it is in. So a process that has a shard itself reads only the saved shards
that may have ids of it: with k of n wanted and j of m saved, those with j = k modulo gcd(n, m). For example
server 1 of 4 reads, of a checkpoint of 2 servers, shard 1 alone; server 1 of 3 reads both.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from monolith import filesystem
from monolith.checkpoint.part import Entry
from monolith.errors import ConfigError, FileMissingError, RestoreError, SaveError
from monolith.observe import Progress
from monolith.table import ShardInfo, table_basename
from monolith.table.dumps import inspect_dump, removed_basename
from monolith.table.row_streams import DumpStep, History, describe_dump
from monolith.table.shard_files import Description, RowLayout, SegmentLayout

IdShard = tuple[int, int]
"""(k, n): the ids that are, as unsigned numbers, k modulo n."""

WHOLE: IdShard = (0, 1)
"""All ids."""

SHARD_FOLDER = re.compile(r"ps-\d+-of-\d+", re.ASCII)

_SUMS = {
    "full": ("rows", "bytes", "expired"),
    "changes": ("rows", "bytes", "changed", "removed"),
}


# Names


def assets_folder(prefix: str) -> str:
    """Return the folder of a checkpoint's tables and filters."""
    return f"{prefix}.assets"


def shard_folder(prefix: str, shard: IdShard = WHOLE) -> str:
    """Return the folder that one of the servers that write a checkpoint writes to."""
    folder, (number, shards) = assets_folder(prefix), shard
    return folder if shards == 1 else filesystem.join(folder, f"ps-{number}-of-{shards}")


def filter_basename(prefix: str, table: str, shard: IdShard = WHOLE) -> str:
    """Return the basename of the files of a table's filter."""
    return table_basename(shard_folder(prefix, shard), f"hash_filter_{table}")


def check_shard(what: str, shard: IdShard) -> None:
    """Refuse an impossible shard.

    Raises:
        ConfigError: It is not (k, n) with k from 0 to n - 1.
    """
    number, total = shard
    if not 0 <= number < total:
        raise ConfigError(f"{what} must be (k, n) with k from 0 to n - 1, got {shard}")


# Entries of a manifest


def shard_count(entry: Entry) -> int:
    """Return how many shards the tables of a checkpoint are in."""
    return int(entry.get("pieces", 1))


def filter_shards(entry: Entry, table: str) -> int:
    """Return how many shards the filter of a table is in. It may differ from that of the rows: resharding
    rewrites rows and copies filters."""
    return int(entry.get("filter_pieces", {}).get(table, shard_count(entry)))


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table in one checkpoint: all of its rows, or the changes. A list of them is its history."""

    prefix: str
    name: str
    shards: int
    entry: Entry

    @classmethod
    def find(cls, prefix: str, part: Entry, name: str) -> SavedTable | None:
        """Return the table `name` of a checkpoint whose entry of tables is `part`."""
        entry = part["tables"].get(name)
        return None if entry is None else cls(prefix, name, shard_count(part), entry)

    @property
    def changes(self) -> bool:
        return bool(self.entry["kind"] != "full")

    @property
    def cleared(self) -> tuple[bool, ...]:
        """Whether each shard of the table was cleared before the changes."""
        found = self.entry.get("cleared", False)
        return tuple(found) if isinstance(found, list) else (found,) * self.shards

    @property
    def basenames(self) -> list[str]:
        return [self.basename(shard) for shard in range(self.shards)]

    def basename(self, shard: int) -> str:
        return table_basename(shard_folder(self.prefix, (shard, self.shards)), self.name)

    def step(self, shard: int) -> DumpStep:
        return DumpStep(self.basename(shard), changes=self.changes, cleared=self.cleared[shard])

    def shards_for(self, shard: IdShard) -> list[int]:
        """Return the numbers of the saved shards that may have ids of a shard."""
        number, total = shard
        apart = math.gcd(total, self.shards)
        return [one for one in range(self.shards) if (one - number) % apart == 0]

    def called(self, shard: int) -> str:
        """Return the name of a shard for a message."""
        where = filesystem.base_name(self.prefix)
        return where if self.shards == 1 else f"shard ps-{shard}-of-{self.shards} of {where}"

    def inspect(
        self, shard: int, *, verify: bool = False, workers: int = 4, progress: Progress | None = None
    ) -> list[ShardInfo]:
        """Return the files of a shard, without its list of removed ids.

        Args:
            verify: Whether every byte is read, and not only the headers.
            progress: Advanced by rows, if they are read.

        Raises:
            RestoreError: A file is missing, or is of another dump or layout.
            CorruptFileError: A file is damaged.
        """
        with self._whole(shard):
            found = inspect_dump(self.basename(shard), verify=verify, workers=workers, progress=progress)
        layout = found[0].description.layout
        if [[s.dim, s.optimizer, s.state_dim] for s in layout.segments] != self.entry["layout"]:
            raise RestoreError(f"{found[0].path} has {layout}, the checkpoint was saved with {self.layout}")
        return found

    def inspect_removed(self, shard: int, *, verify: bool = False) -> None:
        """Check the list of removed ids, if changes are saved; raises as `inspect` does."""
        if self.changes:
            with self._whole(shard):
                inspect_dump(removed_basename(self.basename(shard)), verify=verify)

    @contextlib.contextmanager
    def _whole(self, shard: int) -> Iterator[None]:
        try:
            yield
        except FileMissingError as cause:
            raise RestoreError(
                f"table {self.name!r} is incomplete in {self.called(shard)}: {cause}. "
                "Restore the missing file, or another checkpoint."
            ) from cause

    def check_rows(self, found: int) -> None:
        """Refuse another number of rows than the manifest has, in all shards together.

        Raises:
            RestoreError: There are more or fewer.
        """
        if not self.changes and found != self.entry["rows"]:
            where = self.basename(0) if self.shards == 1 else f"{self.called(0)} to {self.shards - 1}"
            raise RestoreError(
                f"table {self.name!r} has {found:,} rows in {where}, "
                f"the checkpoint was saved with {self.entry['rows']:,}"
            )

    @property
    def layout(self) -> str:
        """The layout of a row, as a text."""
        segments = (SegmentLayout(dim, state, kind, "") for dim, kind, state in self.entry["layout"])
        return str(RowLayout(tuple(segments)))


# One entry of several


def merge_entries(entries: Sequence[Entry]) -> Entry:
    """Return the one entry of tables for the manifest, made of the entries that all servers returned.

    Counts are added up. Whether a table was cleared is stored per shard: one server may have cleared its
    shard, which removes no row of the remaining shards.

    Args:
        entries: One of every shard, in any order.

    Raises:
        SaveError: A shard is missing or comes twice, or they are not of one checkpoint: other tables,
            filters or layouts, or full rows in one and changes in another.
    """
    ordered = _in_order(entries)
    first = ordered[0]
    for number, other in enumerate(ordered):
        for what in ("tables", "filters"):
            if sorted(other[what]) != sorted(first[what]):
                raise _unlike(f"the {what}", number, _listed(other[what]), _listed(first[what]))
    merged: Entry = {
        "tables": {
            name: _merge_table(name, [one["tables"][name] for one in ordered])
            for name in sorted(first["tables"])
        },
        "filters": sorted(first["filters"]),
        "pieces": len(ordered),
    }
    if all("slots" in one for one in ordered):
        slots: Counter[int] = Counter()
        for one in ordered:
            slots.update({int(slot): many for slot, many in one["slots"].items()})
        merged["slots"] = {str(slot): slots[slot] for slot in sorted(slots)}
    return merged


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries ordered by shard, if each shard is there once."""
    shards = [tuple(entry.get("piece", WHOLE)) for entry in entries]
    totals = sorted({total for _, total in shards})
    if totals != [len(entries)] or sorted(number for number, _ in shards) != list(range(len(entries))):
        found = ", ".join(f"ps-{number}-of-{total}" for number, total in shards) or "none"
        raise SaveError(
            f"cannot make one checkpoint of the shards {found}: each must be there once. "
            "Every server must write its shard, with the same number of servers."
        )
    return [entry for _, entry in sorted(zip(shards, entries, strict=True), key=lambda both: both[0])]


def _merge_table(name: str, entries: Sequence[Entry]) -> Entry:
    first = entries[0]
    for number, other in enumerate(entries):
        for what in ("kind", "layout"):
            if other[what] != first[what]:
                raise _unlike(f"the {what} of table {name!r}", number, other[what], first[what])
    merged: Entry = {
        "kind": first["kind"],
        "layout": first["layout"],
        **{what: sum(entry[what] for entry in entries) for what in _SUMS[first["kind"]]},
    }
    if "merged" in first:
        merged["merged"] = first["merged"]
    if first["kind"] != "full":
        merged["cleared"] = [bool(entry["cleared"]) for entry in entries]
    return merged


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _unlike(what: str, number: int, found: object, expected: object) -> SaveError:
    return SaveError(
        f"cannot make one checkpoint of the servers' shards: {what} of shard {number}: {found}; "
        f"of shard 0: {expected}. All servers must have one model, and save the same step in the same way."
    )


# A table in a chain of checkpoints

SavedHistory = Sequence[SavedTable]
"""A table in the checkpoints of a chain, oldest first."""


def dumps_of(history: SavedHistory) -> History:
    """Return the dumps of a table: for each checkpoint, those of all shards."""
    return [[saved.step(shard) for shard in range(saved.shards)] for saved in history]


def describe_table(history: SavedHistory) -> Description:
    """Return the description of a table's newest dump, with the largest scales of all shards."""
    newest = history[-1]
    found = [describe_dump(basename) for basename in newest.basenames]
    for shard, one in enumerate(found):
        if one.layout != found[0].layout:
            raise RestoreError(
                f"{newest.called(shard)} has {one.layout}, {newest.called(0)} has {found[0].layout}: "
                "they are not of one checkpoint"
            )
    scales = tuple(max(each) for each in zip(*(one.scales for one in found), strict=True))
    return replace(found[0], scales=scales)
