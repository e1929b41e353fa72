"""What a subscriber brings up to date: the rows of a server or of a standby, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.sync.messages import PublishState
from monolith.table import Rows


class DeltaTarget(Protocol):
    """Takes what a subscriber reads. Called by one thread at a time.

    Snapshots are taken one after the other; between two calls of one, deltas of other shares are applied.
    A table that the target does not have is passed over.
    """

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to floats per row."""

    @property
    def generation(self) -> int:
        """Rises whenever what was brought is let go of: places that were reached before count no more."""

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        """Put rows in place of those of the same ids, and drop those of other ids. Each row as a whole."""

    def begin_snapshot(self, share: IdShare, buckets: Tensor | None) -> None:
        """Take note that all rows of a share follow, or those of some buckets of it."""

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        """Put rows of the snapshot in place."""

    def end_snapshot(self) -> None:
        """Drop what the share, or its buckets, held and the snapshot did not bring, of every table."""

    def drop_snapshot(self) -> None:
        """Forget that a snapshot was begun: it broke off. The rows that came may stay."""

    def digests(self, table: str, share: IdShare, buckets: Tensor) -> Tensor | None:
        """Return what `Table.digests` says; None where it cannot be compared."""

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        """Put all dense weights in place, between two batches."""

    def follow(self, state: PublishState) -> None:
        """Take note of the newest publish state; where it names a version, go back to it."""
