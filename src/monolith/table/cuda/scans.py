"""Scans: rows of a device table by the order of their hashes, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.table.cuda.memory import SIGN, DeviceMemory
from monolith.table.hashing import unmix
from monolith.table.table import Rows, Scan

LAST_HASH = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HashedRows:
    """Rows by the order of their hashes, column by column, all in one place."""

    hashes: Tensor
    """int64 of shape (n,): the bits of unsigned numbers."""
    times: Tensor
    values: Tensor
    state: Tensor

    def __len__(self) -> int:
        return len(self.hashes)

    def at(self, which: Tensor | slice) -> HashedRows:
        return HashedRows(self.hashes[which], self.times[which], self.values[which], self.state[which])

    def moved_to(self, device: torch.device | str) -> HashedRows:
        columns = self.hashes, self.times, self.values, self.state
        return HashedRows(*(column.to(device) for column in columns))

    @staticmethod
    def merged(several: list[HashedRows]) -> HashedRows:
        """Bring rows together whose hashes differ; there must be some, of none to many rows."""
        if len(several) == 1:
            return several[0]
        hashes = torch.cat([rows.hashes for rows in several])
        order = (hashes ^ SIGN).argsort()
        columns = (
            torch.cat([getattr(rows, name) for rows in several])[order]
            for name in ("times", "values", "state")
        )
        return HashedRows(hashes[order], *columns)


def first_rows(
    memory: DeviceMemory,
    rows: int,
    limit: int,
    *,
    first: int,
    last: int,
    flags: int = 0,
    no_flags: int = 0,
) -> tuple[HashedRows, int | None]:
    """Return the first rows of a range of hashes, on the device, and the hash to go on from.

    Args:
        rows: How many the table has.
        first, last: Hashes, both included.
        flags, no_flags: Only rows that have these flags, and none of those.
    """

    def read(hashes: Tensor, places: Tensor) -> HashedRows:
        return HashedRows(hashes, *memory.read(places.to(torch.int32)))

    # Hashes are spread evenly: so much of the range should hold what is asked for, and a little more.
    wanted = limit + 4 * int(limit**0.5) + 16
    room = min(rows, 2 * wanted)
    width = last - first if rows <= wanted else wanted * (LAST_HASH // rows)
    while True:
        until = min(last, first + width)
        hashes, places, found = memory.listed(room, first=first, last=until, flags=flags, no_flags=no_flags)
        if found > room:
            width //= 2
        elif found > limit:
            following = int(hashes[limit - 1].item()) & LAST_HASH
            return read(hashes[:limit], places[:limit]), following + 1
        elif until == last:
            return read(hashes, places), None
        elif found:
            return read(hashes, places), until + 1
        else:
            first, width = until + 1, 2 * width + 1


def joined(several: list[HashedRows], limit: int, following: int | None) -> Scan:
    """Return rows on the host as a chunk of a scan: up to `limit`, and then it goes on behind those."""
    rows = HashedRows.merged(several)
    if len(rows) > limit:
        rows = rows.at(slice(limit))
        following = (int(rows.hashes[-1]) & LAST_HASH) + 1
    ids = torch.from_numpy(unmix(rows.hashes.numpy().view(np.uint64)))
    return Scan(Rows(ids, rows.times, rows.values, rows.state), following)
