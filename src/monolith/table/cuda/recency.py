"""Recency: when each row of a device table was last written, by the number of the batch.

Only tables whose rows may leave the device keep it: four bytes a place. It is worked on by torch alone, so
that the kernels of other tables are not slower for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER_IDLE = (1 << 31) - 1


class Recency:
    """The last batch of each place. Nothing here waits for the device, but `idle`. Not thread-safe.

    Args:
        places: All there are, those behind the buckets too.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        # One more, for ids that have no place.
        self._used = torch.zeros(places + 1, dtype=torch.int32, device=device)
        self._batch = 0

    def note(self, places: Tensor) -> None:
        """Take note of a batch that writes to places, int32; those beyond the last count for nothing."""
        self._batch += 1
        self._used.index_fill_(0, self._inside(places), self._batch)

    def idle(self, held: Tensor, count: int, besides: Tensor) -> Tensor:
        """Return the places that were not written for longest, `count` at most, in no order.

        Args:
            held: A bool for each place: whether it has a row.
            besides: Places that are not returned, int32; those beyond the last count for nothing.
        """
        free = torch.cat([~held, held.new_ones(1)]).index_fill_(0, self._inside(besides), True)
        used = self._used.masked_fill(free, _NEVER_IDLE)
        oldest = torch.topk(used, min(count, len(held)), largest=False, sorted=False)
        return oldest.indices[oldest.values != _NEVER_IDLE]

    def moved(self, before: Tensor, after: Tensor, places: int) -> Recency:
        """Return the same for rows that went to other places, both int64, of a memory of another size."""
        new = Recency(places, self._used.device)
        new._batch = self._batch
        new._used[after] = self._used[before]
        return new

    def _inside(self, places: Tensor) -> Tensor:
        return places.clamp(max=len(self._used) - 1).to(torch.int64)
