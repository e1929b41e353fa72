"""Routes: which rows of a call go to which server, and the way back into the caller's order.

An id lives on the server that `shard_of_ids` says. What is sent to one has the layout of a
whole call, table after table, so a server need not know that there are others. This runs
for every step of every worker: the core makes one pass over the ids for each array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from monolith import native
from monolith.errors import TableArgumentError

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class Routes:
    """The ids of one call, spread over servers.

    Args:
        ids: Batch after batch and, within a batch, table after table.
        sizes: Ids of each cell: table k of batch b is cell `b * tables + k`.
        widths: Floats per row, for each table.
        batches: 1 or more.
        num_servers: 1 or more.

    Raises:
        TableArgumentError: Sizes do not fit tables, batches or ids.
    """

    def __init__(self, ids: Ids, sizes: Ids, widths: Ids, batches: int, num_servers: int) -> None:
        try:
            self._routes = native.Routes(ids, sizes, widths, batches, num_servers)
        except ValueError as cause:
            raise TableArgumentError(
                f"{cause} ({len(widths)} tables, {batches} batches, {len(ids)} ids)"
            ) from cause
        self._ids = ids
        self.sizes: Ids = self._routes.sizes.reshape(num_servers, -1)
        """int64 of shape (servers, cells): ids of each cell that each server gets."""
        self.num_ids = self._routes.num_ids
        self.num_floats = self._routes.num_floats
        self.floats = self._routes.floats
        """Of all rows."""

    def spread_ids(self, out: Sequence[Ids]) -> None:
        """Write the ids of each server."""
        self._routes.spread_numbers(self._ids, list(out))

    def spread_numbers(self, numbers: Ids, out: Sequence[Ids]) -> None:
        """Write what `numbers`, one per id, has for each server."""
        self._routes.spread_numbers(numbers, list(out))

    def spread_rows(self, rows: Floats, out: Sequence[Floats]) -> None:
        """Write what `rows`, flat, one per id, has for each server."""
        self._routes.spread_rows(rows, list(out))

    def gather_rows(self, answers: Sequence[Floats]) -> Floats:
        """Return rows in the caller's order, from those of each server. One answer alone is not copied."""
        if len(answers) == 1:
            return answers[0]
        rows = np.empty(self.floats, np.float32)
        self._routes.gather_rows(list(answers), rows)
        return rows
