"""Who answers rows in serving.

A predictor asks for all rows of a batch at once and does not know where they are: mapped from files of this
machine, or spread over serving servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from monolith.serve.claims import UNKNOWN, ClaimCell, RowsClaim, spanning
from monolith.store import TableIds
from monolith.table import FrozenTable, FrozenTables, OverlaidTables


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """The rows of a batch."""

    rows: Tensor
    """float32 of one dimension: a row for each id in order, zeros where there is none."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer, and whose rows were read as zeros."""
    claim: RowsClaim | None = UNKNOWN
    """How new the rows are; None if no row was read."""


class RowSource(Protocol):
    """Answers rows. Thread-safe."""

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to the width of its rows, sorted by name."""

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:
        """Return the rows of some ids; those of an id that is not there are zeros.

        Args:
            deadline: When the answer is of no use any more, by `time.monotonic`.

        Raises:
            DeadlineExceededError: It came before the rows did.
            UnavailableError: A shard does not answer, and may not be left out.
        """

    def close(self) -> None:
        """Let go of everything. Closing again does nothing."""


class MappedRows:
    """Rows in files of this machine, which all who map them share.

    Args:
        claim: How new the rows of the files are.
    """

    def __init__(
        self, tables: Mapping[str, FrozenTable], *, threads: int | None = None, claim: RowsClaim = UNKNOWN
    ) -> None:
        self._claims = ClaimCell(claim)
        self.threads = threads
        """That share large calls."""
        self._files = FrozenTables(tables, threads=threads)
        self._all: FrozenTables | OverlaidTables = self._files
        self._widths = dict(self._files.tables)

    @property
    def files(self) -> FrozenTables:
        """What is mapped."""
        return self._files

    @property
    def claim(self) -> RowsClaim:
        """How new the rows are at this moment."""
        return self._claims.now

    def lie_under(self, overlaid: OverlaidTables, claims: ClaimCell) -> None:
        """Answer from the files under an overlay, from the next lookup on; none may be under way.

        Args:
            claims: Says how new the rows under the overlay are.
        """
        self._all, self._claims = overlaid, claims

    @property
    def tables(self) -> Mapping[str, int]:
        return self._widths

    def lookup(self, ids: TableIds, *, deadline: float | None = None) -> FoundRows:  # noqa: ARG002
        before = self._claims.now
        rows = self._all.lookup(ids)
        return FoundRows(rows, claim=spanning(before, self._claims.now))

    def close(self) -> None:
        self._all.close()
        self._files.close()
