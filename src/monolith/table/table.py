"""The table seam: int64 ids to rows that are created, trained and expire.

A row is an embedding, the optimizer state that trains it and the newest event time it was trained with: older
data does not make it older. Every implementation (a plain dict, the native core, the core with cold rows in
files, a GPU, a GPU that spills to host memory) answers the same calls and passes
`tests/contracts/test_table.py` and `test_table_snapshot.py`.

Ids are any int64. Calls are batched and thread-safe; each row changes as a whole, a batch does not.

A checkpoint must be of one moment, and training must not wait for the disk. So a table can be snapshotted:
from then on a row is copied before it changes for the first time, and the snapshot reads the copy.

    snapshot opened        row 7 is trained             snapshot.scan()
         |                 copy of row 7 -> snapshot    row 7 from its copy, all others from the table
    -----+-----------------------+--------------------------+----------------- time

Opening a snapshot costs next to nothing, whatever the size of the table; memory grows with the rows that
change until it is closed. A table that tracks changes also says what happened since the snapshot before:
which rows changed and which ids were removed. An incremental checkpoint writes only those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Unpack

import numpy as np

from monolith.front_door import module_when_used
from monolith.table.hashing import mix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from monolith.cuda.device import Device
    from monolith.table.arguments import UpdateOptions
    from monolith.table.cold_files import ColdRows
    from monolith.table.config import TableConfig
    from monolith.table.tiered_table import TieredTable
    from monolith.table.touched_keys import TouchedKeySet
else:
    torch = module_when_used("torch")


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows, column by column: n rows of dim values and state_dim floats of optimizer state.

    Examples:
        >>> import torch
        >>> from monolith import Adagrad, NativeTable, Segment, TableConfig
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad()),)))
        >>> table.assign(torch.tensor([7, 8]), torch.ones(2, 2), event_time=1_700_000_000)
        >>> rows = table.scan().rows
        >>> rows.ids.shape, rows.values.shape, rows.state.shape  # n = 2, dim = 2, state_dim = 2
        (torch.Size([2]), torch.Size([2, 2]), torch.Size([2, 2]))
    """

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
    device_rows: int = 0
    """Of the rows, those on a device, if others may be elsewhere; see `SpillingTable`."""
    device_bytes: int = 0
    """Of `bytes_total`, those of that device."""
    tiered_ids: int = 0
    """Ids that were looked up in a tiered table, or written to it; repeats count each time."""
    cold_rows: int = 0
    """Of the rows, those in files; see `TieredTable`."""
    cold_bytes: int = 0
    """Bytes of the files."""
    cold_found: int = 0
    """Cold rows that lookups and updates found."""
    cold_found_in_memory: int = 0
    """Of these, rows that were about to be written, or had been read lately."""
    cold_reads: int = 0
    """Reads of files, each of a block, or of several that follow each other."""
    cold_bytes_read: int = 0
    """Bytes read from files."""
    cold_bytes_written: int = 0
    """Bytes written to files, compaction included."""
    compactions: int = 0
    """Files that were removed because most of their rows were dead, once the live ones had moved."""

    @property
    def is_tiered(self) -> bool:
        """Whether this is of a tiered table that was used."""
        return self.tiered_ids > 0 or self.cold_rows > 0

    @property
    def cold_ids_read(self) -> int:
        """Of `tiered_ids`, those whose row had to be read from a file."""
        return self.cold_found - self.cold_found_in_memory


class TableSnapshot(Protocol):
    """The rows of a table at the moment it was opened. Thread-safe; a table has one at a time.

    Examples:
        >>> import torch
        >>> from monolith import NativeTable, Segment, TableConfig
        >>> table = NativeTable(TableConfig(name="item", segments=(Segment(dim=2),)))
        >>> table.assign(torch.tensor([7]), torch.ones(1, 2))
        >>> snapshot = table.snapshot()
        >>> table.assign(torch.tensor([7, 8]), torch.zeros(2, 2))  # not in the snapshot
        >>> snapshot.scan().rows.values
        tensor([[1., 1.]])
        >>> snapshot.close(saved=True)
    """

    @property
    def config(self) -> TableConfig: ...

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment was."""

    @property
    def max_event_time(self) -> int:
        """The newest event time of the table when the snapshot was opened."""

    @property
    def captured_bytes(self) -> int:
        """Memory of the rows copied so far because they changed."""

    @property
    def tracked(self) -> bool:
        """Whether the snapshot knows which rows changed since the snapshot before."""

    @property
    def cleared(self) -> bool:
        """Whether the table was cleared since the snapshot before: all rows of that one were removed."""

    @property
    def cold(self) -> ColdRows | None:
        """Rows in files that a dump may link to, instead of reading them; None if there are none."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def removed(self) -> Tensor:
        """Return the ids removed since the snapshot before, int64; some may have a new, changed row."""

    def scan(
        self,
        cursor: int | None = None,
        *,
        limit: int = 65536,
        shard: int = 0,
        num_shards: int = 1,
        changed_only: bool = False,
    ) -> Scan:
        """As `Table.scan`; with `changed_only`, the rows that changed since the snapshot before."""

    def close(self, *, saved: bool) -> None:
        """Free the copies. Closing again does nothing.

        Args:
            saved: Whether the changes up to the snapshot are on disk now. If not, they count as changed again
                and are part of the next snapshot.
        """


class Table(Protocol):
    """Maps int64 ids to rows of floats.

    Shapes: n ids of a call, dim floats of an embedding, state_dim floats of optimizer state.

    Examples:
        >>> import torch
        >>> from monolith import Adagrad, NativeTable, Segment, TableConfig
        >>> segment = Segment(dim=2, optimizer=Adagrad(learning_rate=0.1))
        >>> table = NativeTable(TableConfig(name="item", segments=(segment,)))
        >>> ids = torch.tensor([7, 8])
        >>> table.lookup(ids)  # reading creates no row
        tensor([[0., 0.],
                [0., 0.]])
        >>> table.apply_gradients(ids, torch.ones(2, 2), step=1)  # training does
        >>> len(table)
        2
        >>> table.lookup(ids)
        tensor([[-0.0953, -0.0953],
                [-0.0953, -0.0953]])
    """

    @property
    def config(self) -> TableConfig: ...

    @property
    def dim(self) -> int:
        """Floats per embedding, all segments together."""

    @property
    def state_dim(self) -> int:
        """Floats of optimizer state per row; 0 for a serving table."""

    @property
    def cuda(self) -> Device | None:
        """The GPU that the rows are on, as kernels know it; None for rows in host memory."""

    @property
    def cold(self) -> TieredTable | None:
        """The table itself if it can take over the files that a dump links to; see `TieredTable.adopt`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def lookup(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return one embedding per id, in the order given.

        Never creates a row: an id the table does not hold reads as zeros. A
        training segment with a fixed_r8 or one_bit compressor reads as its
        quantized view.

        Args:
            ids: int64 of shape (n,). Repeats are allowed.
            out: float32, contiguous, of shape (n, dim), to fill instead of a new tensor.

        Returns:
            float32 of shape (n, dim). A copy: later updates do not show through it.
        """

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Rows]:
        """Return a mask of the ids found and their whole rows; rows not found are zeros."""

    def contains(self, ids: Tensor) -> Tensor:
        """Return a bool per id: whether it has a row."""

    def assign(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        """Set embeddings, creating rows with fresh optimizer state where there are none.

        Repeats are written in order. Ids without a row pass the admission filter first.
        On a serving table with `skip_zero`, an all-zero value removes the row instead.
        """

    def assign_add(self, ids: Tensor, values: Tensor, *, event_time: int | Tensor = 0) -> None:
        """Add to embeddings; a new row starts from its initializer."""

    def apply_gradients(self, ids: Tensor, gradients: Tensor, **options: Unpack[UpdateOptions]) -> None:
        """Take one optimizer step per id; a new row starts from its initializer.

        A gradient with a NaN, an infinity or a float beyond 1e15 is left out, and so is a step that would
        make its row so: the row keeps its values, and `stats().non_finite` counts it.

        Args:
            ids: int64 of shape (n,).
            gradients: float32 of shape (n, dim).
            options: See `UpdateOptions`.
        """

    def reinitialize(self, ids: Tensor, *, now: int) -> Tensor:
        """Reset rows to their initializer with event time `now`; int8 per id: 1 existed, 0 was inserted."""

    def remove(self, ids: Tensor) -> int:
        """Drop rows; return how many there were."""

    def count_expired(self, now: int) -> int:
        """Return how many rows `evict` would drop."""

    def evict(self, now: int | None = None) -> int:
        """Drop rows whose age at `now` reached their slot's expiry.

        Args:
            now: Unix seconds. By default the newest event time that was written, which a single event
                from the future sets; pass the time of an `EventClock` if the data may be wrong.

        Returns:
            How many there were.
        """

    def scan(
        self, cursor: int | None = None, *, limit: int = 65536, shard: int = 0, num_shards: int = 1
    ) -> Scan:
        """Return up to `limit` rows of a shard, from `cursor` on (None starts).

        Shards are disjoint and cover the table. A row that is there throughout a scan is
        returned exactly once, whatever is inserted or removed meanwhile.
        """

    def restore(self, rows: Rows) -> None:
        """Insert or overwrite whole rows, past the admission filter, with their own event times."""

    def clear(self, *, expect_rows: int = 0) -> None:
        """Drop all rows and give their memory back. Counters are kept.

        Args:
            expect_rows: How many will follow; a table that knows need not grow step by step.
        """

    def stats(self) -> TableStats: ...

    # Snapshots, for checkpoints

    def frozen(self) -> AbstractContextManager[None]:
        """Pause writers while the block runs; readers continue. Nests."""

    def snapshot(self) -> TableSnapshot:
        """Open a snapshot of this moment. Writers wait while it is opened, not longer. It can be opened in a
        `frozen` block, so that many tables are snapshotted at one moment.

        Raises:
            TableArgumentError: Another snapshot is open.
        """

    def track_changes(self, on: bool = True) -> None:
        """Remember from now on which rows change, for later snapshots; earlier changes are forgotten."""

    @property
    def scales(self) -> list[float]:
        """One per segment: how steep a one_bit segment has become."""

    def set_scales(self, scales: list[float]) -> None:
        """Set how steep one_bit segments are, one number per segment."""

    # Changed rows, for publishers

    def touch(self, touched: TouchedKeySet) -> None:
        """Insert into a set from now on, after each change, the ids whose rows changed or were removed.

        A reader that takes ids from the set and looks them up sees those changes, or finds the ids in the set
        again. There may be several sets. Writers wait while one is added, not longer.
        """

    def untouch(self, touched: TouchedKeySet) -> None:
        """Stop inserting into a set."""

    def digests(self, buckets: Tensor, *, share: tuple[int, int] = (0, 1)) -> Tensor:
        """Return a digest of each bucket: what `digests.digest_rows` says of its ids and values.

        Args:
            buckets: int64, ascending.
            share: (k, n): of the ids that are, as unsigned numbers, k modulo n.

        Returns:
            int64, one per bucket. Rows that change meanwhile count as before or as after.
        """

    def close(self) -> None:
        """Free the table. Any later call raises TableClosedError; closing again does nothing."""


def iterate(table: Table, *, limit: int = 65536, shard: int = 0, num_shards: int = 1) -> Iterator[Rows]:
    """Yield all rows of a shard in chunks of at most `limit`."""
    cursor: int | None = None
    while True:
        scan = table.scan(cursor, limit=limit, shard=shard, num_shards=num_shards)
        if len(scan.rows):
            yield scan.rows
        if scan.cursor is None:
            return
        cursor = scan.cursor


def joined_scan(scans: Sequence[Scan], limit: int) -> Scan:
    """Return the first `limit` rows of several scans from one hash, and the hash to continue from."""
    rows = Rows.concat([scan.rows for scan in scans])
    # A scan that stopped early knows nothing beyond its cursor: only rows before the smallest cursor are
    # complete.
    hashes = mix(rows.ids.numpy())
    order = np.argsort(hashes)
    end = min((scan.cursor for scan in scans if scan.cursor is not None), default=None)
    known = len(order) if end is None else int(np.searchsorted(hashes[order], np.uint64(end)))
    if known > limit:
        known, end = limit, int(hashes[order[limit - 1]]) + 1
    return Scan(rows.take(torch.from_numpy(order[:known])), end)
