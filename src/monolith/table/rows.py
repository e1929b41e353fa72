"""Rows of a table, column by column, for lookups, scans, dumps and deltas; and the counters of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monolith.front_door import module_when_used

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = module_when_used("torch")


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows, column by column: n rows of dim values and state_dim floats of optimizer state."""

    ids: Tensor
    """int64 of shape (n,)."""
    event_times: Tensor
    """int64 of shape (n,): Unix seconds of the newest event that changed each row."""
    values: Tensor
    """float32 of shape (n, dim): all segments side by side, as stored (never fake-quantized)."""
    state: Tensor
    """float32 of shape (n, state_dim): optimizer state by segment. A counter is two floats of bits."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def slice(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end), over the same memory."""
        if begin <= 0 and end >= len(self):
            return self
        span = slice(begin, end)
        return Rows(self.ids[span], self.event_times[span], self.values[span], self.state[span])

    def take(self, places: Tensor) -> Rows:
        """Return the rows at these places, int64, in any order and as often as they are given."""
        return Rows(
            self.ids.index_select(0, places),
            self.event_times.index_select(0, places),
            self.values.index_select(0, places),
            self.state.index_select(0, places),
        )

    def keep(self, mask: Tensor) -> Rows:
        """Return the rows where the bool `mask` is True."""
        return self if bool(mask.all()) else self.take(mask.nonzero().squeeze(1))

    @staticmethod
    def concat(several: Sequence[Rows]) -> Rows:
        """Concatenate rows of one layout; `several` must not be empty."""
        if len(several) == 1:
            return several[0]
        return Rows(
            torch.cat([rows.ids for rows in several]),
            torch.cat([rows.event_times for rows in several]),
            torch.cat([rows.values for rows in several]),
            torch.cat([rows.state for rows in several]),
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """One bounded chunk of a table and where the next one begins."""

    rows: Rows
    cursor: int | None
    """Pass this to the next `scan`; None when the shard has been read to its end."""


@dataclass(frozen=True, slots=True)
class TableStats:
    """The size of a table and what became of the ids it was given."""

    rows: int
    bytes_total: int
    """Everything the table has allocated: rows, free rows, index, directory."""
    bytes_rows: int
    """Bytes allocated for rows, free rows included."""
    bytes_index: int
    load: float
    """Occupied share of the index, 0 to 1."""
    inserted: int
    """Ids that were given a row since the table was made."""
    filtered: int
    """Sightings turned away by the admission filter."""
    refused: int
    """Ids turned away because `capacity_bytes` was reached."""
    evicted: int
    """Rows that expired, by `evict` or because a full table needed their memory."""
    removed: int
    """Rows taken out by `remove`, or by a zero assignment to a table that skips zeros."""
    max_event_time: int
    """The newest event time written so far."""
    non_finite: int = 0
    """Updates left out because their gradient, or the row they would have made, was NaN or infinite."""
