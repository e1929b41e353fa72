"""Routes: which rows of a call go to which server, and the way back into the caller's order.

An id lives on the server that `shard_of_ids` says. What is sent to one has the layout of a
whole call, table after table, so a server need not know that there are others. This runs
for every step of every worker: numpy moves whole blocks, and no row is a Python object.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class Routes:
    """The ids of one call, spread over servers.

    Args:
        ids: Batch after batch and, within a batch, table after table.
        sizes: Ids of each cell: table k of batch b is cell `b * tables + k`.
        widths: Floats per row, for each cell.
        num_servers: 1 or more.
    """

    def __init__(self, ids: Ids, sizes: Ids, widths: Ids, num_servers: int) -> None:
        self._ids = ids
        self._widths = widths
        # One width for all makes a call one block.
        self._width = int(widths[0]) if len(widths) and (widths == widths[0]).all() else None
        self._order: Ids | None = None
        self.sizes = sizes.reshape(1, -1)
        """int64 of shape (servers, cells): ids of each cell that each server gets."""
        if num_servers > 1:
            # As `shard_of_ids` has it, at a tenth of the time.
            servers = (ids.view(np.uint64) % np.uint64(num_servers)).astype(np.uint16)
            self._order = np.argsort(servers, kind="stable")  # by radix, for 16 bits
            cells = servers.astype(np.int64) * len(sizes)
            if len(sizes) > 1:
                cells += np.repeat(np.arange(len(sizes)), sizes)
            counts = np.bincount(cells, minlength=num_servers * len(sizes))
            self.sizes = counts.reshape(num_servers, len(sizes)).astype(np.int64, copy=False)
        self.num_ids: list[int] = self.sizes.sum(1).tolist()
        self.num_floats: list[int] = (self.sizes * widths).sum(1).tolist()
        self._ends = np.cumsum(self.num_ids).tolist()

    def send_ids(self, server: int, out: Ids) -> None:
        """Write the ids of a server."""
        self.send_numbers(self._ids, server, out)

    def send_numbers(self, numbers: Ids, server: int, out: Ids) -> None:
        """Write what `numbers`, one per id, has for a server."""
        if self._order is None:
            out[:] = numbers
        else:
            np.take(numbers, self._of(server), out=out, mode="clip")

    def send_rows(self, rows: Floats, server: int, out: Floats) -> None:
        """Write what `rows`, flat, one per id, has for a server."""
        if self._order is None:
            out[:] = rows
            return
        order = self._of(server)
        if self._width is not None:
            _take(rows, order, self._width, out)
            return
        starts, id_starts = self._starts()
        at = first = 0
        for cell in np.flatnonzero(self.sizes[server]).tolist():
            size, width = int(self.sizes[server, cell]), int(self._widths[cell])
            block = rows[starts[cell] : starts[cell + 1]]
            positions = order[first : first + size] - id_starts[cell]
            _take(block, positions, width, out[at : at + size * width])
            at, first = at + size * width, first + size

    def receive_rows(self, answers: Sequence[Floats]) -> Floats:
        """Return rows in the caller's order, from those of each server. One answer alone is not copied."""
        if self._order is None:
            return answers[0]
        if self._width is not None:
            back = np.empty_like(self._order)
            back[self._order] = np.arange(len(back))
            out = np.empty(len(back) * self._width, np.float32)
            _take(np.concatenate(answers), back, self._width, out)
            return out
        starts, id_starts = self._starts()
        out = np.empty(starts[-1], np.float32)
        orders = [self._of(server) for server in range(len(answers))]
        at, first = [0] * len(answers), [0] * len(answers)
        for cell in np.flatnonzero(self.sizes.sum(0)).tolist():
            width = int(self._widths[cell])
            blocks, positions = [], []
            for server, size in enumerate(self.sizes[:, cell].tolist()):
                blocks.append(answers[server][at[server] : at[server] + size * width])
                positions.append(orders[server][first[server] : first[server] + size])
                at[server], first[server] = at[server] + size * width, first[server] + size
            order = np.concatenate(positions) - id_starts[cell]
            back = np.empty_like(order)
            back[order] = np.arange(len(back))
            _take(np.concatenate(blocks), back, width, out[starts[cell] : starts[cell + 1]])
        return out

    def _of(self, server: int) -> Ids:
        assert self._order is not None
        end = self._ends[server]
        return self._order[end - self.num_ids[server] : end]

    def _starts(self) -> tuple[list[int], list[int]]:
        """Return where each cell begins among the caller's floats and ids, and where the last ends."""
        sizes = self.sizes.sum(0)
        return [0, *np.cumsum(sizes * self._widths).tolist()], [0, *np.cumsum(sizes).tolist()]


def _take(rows: Floats, positions: Ids, width: int, out: Floats) -> None:
    if width == 0 or not len(positions):
        return
    # "clip" lets numpy write into `out` at once; positions are never out of range.
    np.take(rows.reshape(-1, width), positions, axis=0, out=out.reshape(-1, width), mode="clip")
