"""Shares: the tables of one checkpoint, written by several parameter servers.

    model.ckpt-100.assets/ps-0-of-2/item.manifest ...    the ids that are 0 modulo 2
    model.ckpt-100.assets/ps-1-of-2/item.manifest ...    and those that are 1, as unsigned numbers

A server writes its share of every table, and of every filter, into a folder of its own.
Who writes alone writes into the assets folder itself, and so did every checkpoint that
says nothing of shares. The manifest speaks of all shares as of one, and calls them pieces:
`merge_entries` makes one entry of those the servers returned.

Which share an id is in follows from the id. So a reader that holds a share itself reads
only the shares that may hold some of it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from monolith import filesystem
from monolith.checkpoint.part import Entry
from monolith.errors import ConfigError, FileMissingError, RestoreError, SaveError
from monolith.observe import Progress
from monolith.table import ShardInfo, table_basename
from monolith.table.dumps import inspect_dump, removed_basename
from monolith.table.row_streams import DumpStep
from monolith.table.shard_files import RowLayout, SegmentLayout

IdShard = tuple[int, int]
"""(k, n): the ids that are, as unsigned numbers, k modulo n."""

WHOLE: IdShard = (0, 1)

SHARE_FOLDER = re.compile(r"ps-\d+-of-\d+", re.ASCII)

_SUMS = {
    "full": ("rows", "bytes", "expired"),
    "changes": ("rows", "bytes", "changed", "removed"),
}


# Names


def assets_folder(prefix: str) -> str:
    """Return the folder of a checkpoint's tables and filters."""
    return f"{prefix}.assets"


def share_folder(prefix: str, share: IdShard = WHOLE) -> str:
    """Return the folder that one of the writers of a checkpoint writes to."""
    folder, (number, shares) = assets_folder(prefix), share
    return folder if shares == 1 else filesystem.join(folder, f"ps-{number}-of-{shares}")


def filter_basename(prefix: str, table: str, share: IdShard = WHOLE) -> str:
    """Return where the filter of a table lies."""
    return table_basename(share_folder(prefix, share), f"hash_filter_{table}")


def check_share(what: str, share: IdShard) -> None:
    """Refuse a share that cannot be.

    Raises:
        ConfigError: It is not (k, n) with k from 0 to n - 1.
    """
    number, total = share
    if not 0 <= number < total:
        raise ConfigError(f"{what} must be (k, n) with k from 0 to n - 1, got {share}")


# What a manifest says


def share_count(entry: Entry) -> int:
    """Return how many shares the tables of a checkpoint are in."""
    return int(entry.get("pieces", 1))


def filter_shares(entry: Entry, table: str) -> int:
    """Return how many shares the filter of a table is in. Who rewrites rows leaves filters as they were."""
    return int(entry.get("filter_pieces", {}).get(table, share_count(entry)))


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table in one checkpoint: all of its rows, or what changed. A list of them is its history."""

    prefix: str
    name: str
    shares: int
    entry: Entry

    @classmethod
    def find(cls, prefix: str, part: Entry, name: str) -> SavedTable | None:
        """Return the table `name` of a checkpoint whose entry of tables is `part`."""
        entry = part["tables"].get(name)
        return None if entry is None else cls(prefix, name, share_count(part), entry)

    @property
    def changes(self) -> bool:
        return bool(self.entry["kind"] != "full")

    @property
    def cleared(self) -> tuple[bool, ...]:
        """Of changes, by share: whether its share of the table was cleared before them."""
        found = self.entry.get("cleared", False)
        return tuple(found) if isinstance(found, list) else (found,) * self.shares

    @property
    def basenames(self) -> list[str]:
        return [self.basename(share) for share in range(self.shares)]

    def basename(self, share: int) -> str:
        return table_basename(share_folder(self.prefix, (share, self.shares)), self.name)

    def step(self, share: int) -> DumpStep:
        return DumpStep(self.basename(share), changes=self.changes, cleared=self.cleared[share])

    def shares_for(self, share: IdShard) -> list[int]:
        """Return the numbers of the saved shares that may hold ids of a share."""
        number, total = share
        apart = math.gcd(total, self.shares)
        return [one for one in range(self.shares) if (one - number) % apart == 0]

    def called(self, share: int) -> str:
        """Return what to call a share in a message."""
        where = filesystem.base_name(self.prefix)
        return where if self.shares == 1 else f"share ps-{share}-of-{self.shares} of {where}"

    def inspect(
        self, share: int, *, verify: bool = False, workers: int = 4, progress: Progress | None = None
    ) -> list[ShardInfo]:
        """Return the files of a share, without its list of removed ids.

        Args:
            verify: Whether every byte is read, and not only what the files say of themselves.
            progress: Advanced by rows, where they are read.

        Raises:
            RestoreError: A file is missing, or is of another dump or layout.
            CorruptFileError: A file is damaged.
        """
        with self._whole(share):
            found = inspect_dump(self.basename(share), verify=verify, workers=workers, progress=progress)
        layout = found[0].description.layout
        if [[s.dim, s.optimizer, s.state_dim] for s in layout.segments] != self.entry["layout"]:
            raise RestoreError(f"{found[0].path} has {layout}, the checkpoint was saved with {self.layout}")
        return found

    def inspect_removed(self, share: int, *, verify: bool = False) -> None:
        """Look at the list of removed ids, if changes are saved; raises as `inspect` does."""
        if self.changes:
            with self._whole(share):
                inspect_dump(removed_basename(self.basename(share)), verify=verify)

    @contextlib.contextmanager
    def _whole(self, share: int) -> Iterator[None]:
        try:
            yield
        except FileMissingError as cause:
            raise RestoreError(
                f"table {self.name!r} is incomplete in {self.called(share)}: {cause}. "
                "Restore the missing file, or another checkpoint."
            ) from cause

    def check_rows(self, found: int) -> None:
        """Refuse another number of rows than was saved, in all shares together.

        Raises:
            RestoreError: There are more or fewer.
        """
        if not self.changes and found != self.entry["rows"]:
            where = self.basename(0) if self.shares == 1 else f"{self.called(0)} to {self.shares - 1}"
            raise RestoreError(
                f"table {self.name!r} has {found:,} rows in {where}, "
                f"the checkpoint was saved with {self.entry['rows']:,}"
            )

    @property
    def layout(self) -> str:
        """What a row is made of, in words."""
        segments = (SegmentLayout(dim, state, kind, "") for dim, kind, state in self.entry["layout"])
        return str(RowLayout(tuple(segments)))


# Several entries as one


def merge_entries(entries: Sequence[Entry]) -> Entry:
    """Return the one entry of tables for the manifest, made of those that the writers of all shares returned.

    Counts are added up. Whether a table was cleared is kept by share: one server may have cleared its
    share, and that takes no row of the others.

    Args:
        entries: Of every share one, in any order.

    Raises:
        SaveError: A share is missing or comes twice, or they are not of one checkpoint: other tables,
            filters or layouts, or all rows beside changes.
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
    """Return the entries by share, if each share is there once."""
    shares = [tuple(entry.get("piece", WHOLE)) for entry in entries]
    totals = sorted({total for _, total in shares})
    if totals != [len(entries)] or sorted(number for number, _ in shares) != list(range(len(entries))):
        found = ", ".join(f"ps-{number}-of-{total}" for number, total in shares) or "none"
        raise SaveError(
            f"cannot make one checkpoint of the shares {found}: each must be there once. "
            "Every server must write its share, with the same number of servers."
        )
    return [entry for _, entry in sorted(zip(shares, entries, strict=True), key=lambda both: both[0])]


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
        f"cannot make one checkpoint of what the servers wrote: {what} of share {number}: {found}; "
        f"of share 0: {expected}. All servers must be of one model, and save the same step alike."
    )
