"""How often ids turn up in batches, told from the batches themselves.

A sampled softmax needs to know how likely each candidate was to be there, and a stream has no table of
popularity. So each id is watched: the steps between two of its appearances, and how many copies of it there
are when it appears. Their quotient is the number of copies that a batch is expected to have.

Ids share buckets, in several rows with a hash each. Two ids in a bucket look more frequent than either, so
the least frequent of an id's buckets is the one to believe.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monolith.errors import LayerArgumentError

_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161, -8796714831421723037)
"""Multipliers of the rows' hashes: odd, with bits all over."""


class ItemFrequency(nn.Module):
    """Estimates how many copies of an id a batch has.

    What it knows is in buffers, and so in checkpoints. They are numbers throughout: where several workers
    count, a checkpoint has their mean.

    Args:
        buckets: Of each row, a power of two; 16 bytes each.
        rows: Hashes of each id, 1 to 4.
        rate: The share of the newest sighting in an estimate, above 0 and at most 1.
    """

    step: Tensor
    seen: Tensor
    gap: Tensor
    copies: Tensor

    def __init__(self, buckets: int = 1 << 16, rows: int = 2, rate: float = 0.05) -> None:
        super().__init__()
        if buckets < 2 or buckets & (buckets - 1):
            raise LayerArgumentError(f"item frequency: buckets must be a power of two, got {buckets}")
        if not 1 <= rows <= len(_ODD):
            raise LayerArgumentError(f"item frequency: rows must be 1 to {len(_ODD)}, got {rows}")
        if not 0 < rate <= 1:
            raise LayerArgumentError(f"item frequency: rate must be above 0 and at most 1, got {rate}")
        self._bits = buckets.bit_length() - 1
        self._rate = rate
        self.register_buffer("step", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(rows, buckets, dtype=torch.float64))
        self.register_buffer("gap", torch.zeros(rows, buckets))
        self.register_buffer("copies", torch.ones(rows, buckets))

    @torch.no_grad()
    def observe(self, ids: Tensor) -> None:
        """Take in the ids of one batch, int64 of shape (n,), with as many copies as it has of each."""
        self.step += 1
        ids = ids.to(self.seen.device)
        for row in range(len(self.seen)):
            there, counts = torch.unique(self._buckets(ids, row), return_counts=True)
            seen, gap, copies = self.seen[row], self.gap[row], self.copies[row]
            known = seen[there] > 0
            since, now = (self.step - seen[there]).float(), counts.float()
            gap[there] = torch.where(known, torch.lerp(gap[there], since, self._rate), since)
            copies[there] = torch.where(known, torch.lerp(copies[there], now, self._rate), now)
            seen[there] = self.step

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return the log of how many copies of each id a batch is expected to have: float of shape (n,).

        An id that was never seen counts as if the next batch had it first.
        """
        found = []
        ids = ids.to(self.seen.device)
        for row in range(len(self.seen)):
            at = self._buckets(ids, row)
            gap = torch.where(self.seen[row][at] > 0, self.gap[row][at], (self.step + 1).float())
            found.append(self.copies[row][at].log() - gap.log())
        return torch.stack(found).amin(0)

    def _buckets(self, ids: Tensor, row: int) -> Tensor:
        """Return the bucket of each id: the high bits of a product, which every bit of the id reaches."""
        mixed = (ids ^ (ids >> 32)) * _ODD[row]
        return (mixed >> (64 - self._bits)) & ((1 << self._bits) - 1)

    def extra_repr(self) -> str:
        return f"buckets={1 << self._bits}, rows={len(self.seen)}, rate={self._rate}"
