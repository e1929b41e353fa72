"""The overlay of a served model that follows a trainer: deltas on top of exported rows.

`FollowedTables` applies deltas and snapshots to a `RowOverlay` and attaches loaded versions below it. Lookups
take no lock: each loaded version has its own `OverlaidTables`, its exported rows below the shared overlay.

    lookup(id) = the overlay's row if it has one, else the exported row, else zeros

Each time the overlay is dropped, its *generation* rises. A message that was read for an earlier generation is
incomplete over the new one, so the subscriber asks for a snapshot. Versions that were attached before keep
the overlay they had.

`FollowTarget` is the served model as a subscriber sees it: rows go to the overlay, dense weights to the
loaded predictors. If the trainer rolls servers back, the named version is served as exported:

    following ──state names a version──► rolled back: the version is served, the overlay is dropped
        ▲                                   │
        └──state names none: the newest version is loaded again, and a new epoch sends all rows
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from monolith import concurrency
from monolith.checkpoint.saved_tables import WHOLE, IdShard, check_shard
from monolith.errors import MonolithError, RestoreError, TableArgumentError
from monolith.serve.metrics import FollowMetrics
from monolith.serve.predictor import Predictor
from monolith.serve.retrieval import ChangedRows
from monolith.sync.messages import BUCKETS, PublishState
from monolith.table import FrozenTables, OverlaidTables, RowOverlay, Rows, digest_rows, in_share
from monolith.table.overlaid_tables import hash_spans

_log = logging.getLogger(__name__)

_BUCKET_HASHES = (1 << 64) // BUCKETS


class FollowedTables:
    """Applies deltas and snapshots over the attached exported version. Thread-safe.

    Example: the export has row 7 = [1.0]. `apply({"item": rows(7: [2.0])}, {})` makes lookups of 7 return
    [2.0]; `apply({}, {"item": [7]})` buries it, and lookups return [0.0].

    Args:
        share: The shard of IDs that this server has, as (number, total); other IDs are ignored.
    """

    def __init__(self, share: IdShard = WHOLE) -> None:
        check_shard("shard", share)
        self._share = share
        # Taken by every writer of the overlay, and guards all below. The subscriber's thread applies
        # messages, other threads attach versions and compact: a delta must never be applied between the
        # tables that `attach` returns and the claims that its caller makes for them. Lookups do not take it.
        self.write_lock = concurrency.RLock()
        self._overlay: RowOverlay | None = None
        self._current: OverlaidTables | None = None
        self._snapshot: tuple[IdShard, Tensor | None, dict[str, list[Tensor]]] | None = None
        self._passing = False
        self._generation = 0
        self._unknown: set[str] = set()

    @property
    def tables(self) -> Mapping[str, int]:
        """Table to floats per row; empty before a version is attached."""
        overlay = self._overlay
        return MappingProxyType({}) if overlay is None else overlay.widths

    @property
    def generation(self) -> int:
        """Rises whenever the overlay is dropped."""
        return self._generation

    @property
    def is_paused(self) -> bool:
        """Whether messages are ignored: applying is paused, or no version is attached."""
        return self._passing or self._overlay is None

    @property
    def in_snapshot(self) -> bool:
        """Whether a snapshot, of all rows of a shard or of some buckets, is being applied."""
        return self._snapshot is not None

    @property
    def rows(self) -> int:
        """Number of overlay rows, deleted ones included."""
        overlay = self._overlay
        return 0 if overlay is None else len(overlay)

    @property
    def bytes(self) -> int:
        """Bytes of host memory the overlay uses."""
        overlay = self._overlay
        return 0 if overlay is None else overlay.bytes

    def attach(self, below: FrozenTables, *, threads: int | None = None) -> OverlaidTables:
        """Put an exported version below the overlay; return both as one. Deltas apply to it from now on.

        If its tables or their widths differ from those before, the overlay is dropped.
        """
        with self.write_lock:
            overlay = self._overlay
            if overlay is None or dict(overlay.widths) != dict(below.tables):
                overlay = RowOverlay(below.tables)
                self._generation += 1
            view = OverlaidTables(below, overlay, threads=threads)
            self._overlay, self._current = overlay, view
            return view

    def drop(self) -> None:
        """Drop the overlay, and ignore messages until a version is attached again.

        Versions that were attached keep the overlay they have.
        """
        with self.write_lock:
            self._snapshot = self._overlay = self._current = None
            self._generation += 1

    def pause_applying(self, on: bool) -> None:
        """Ignore messages, or apply them again."""
        with self.write_lock:
            self._passing = on
            self._snapshot = None

    def settle(self) -> int:
        """Drop overlay rows that equal those of the attached version; return how many."""
        current = self._current
        return 0 if current is None else current.settle(self.write_lock)

    # Messages of a subscriber

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> int:
        """Apply a delta; return how many rows it changed or deleted."""
        count = 0
        with self.write_lock:
            for name, ids in removed.items():
                if (overlay := self._of(name)) is not None:
                    mine = self._mine(ids)
                    overlay.bury(name, mine)
                    count += len(mine)
            for name, some in rows.items():
                if (overlay := self._of(name)) is not None:
                    kept = self._own(some)
                    overlay.put(name, kept.ids, kept.values)
                    count += len(kept)
        return count

    def begin_snapshot(self, shard: IdShard, buckets: Tensor | None) -> None:
        """Begin a snapshot of a shard's rows, of some buckets or of all."""
        with self.write_lock:
            # A snapshot whose rows are ignored must not end either: it would bury every row as missing.
            self._snapshot = None if self._passing else (shard, buckets, {name: [] for name in self.tables})

    def snapshot_rows(self, table: str, rows: Rows) -> int:
        """Apply some rows of the snapshot; return how many were new or different."""
        with self.write_lock:
            if self._snapshot is None or self._of(table) is None or self._current is None:
                return 0
            kept = self._own(rows)
            self._snapshot[2][table].append(kept.ids)
            return self._current.put_changed(table, kept.ids, kept.values)

    def end_snapshot(self) -> int:
        """Bury the rows that the snapshot did not contain; return how many."""
        with self.write_lock:
            if self._snapshot is None or self._current is None:
                return 0
            share, buckets, seen = self._snapshot
            self._snapshot = None
            buried = 0
            for name, parts in seen.items():
                kept = torch.cat([torch.empty(0, dtype=torch.int64), *parts]).sort().values
                buried += self._current.bury_others(name, kept, share, spans_of(buckets))
            return buried

    def abort_snapshot(self) -> None:
        """Forget a snapshot that was interrupted. Its applied rows are right, and stay."""
        with self.write_lock:
            self._snapshot = None

    def digests(self, table: str, shard: IdShard, buckets: Tensor) -> Tensor | None:
        """Return the digests of buckets of a shard's rows; None if they cannot be compared with the
        trainer's.

        They cannot if the exported rows are fp16 or int8, which are not the trainer's floats, or if this
        server has only some IDs of the shard, for which no publisher sends a digest.
        """
        with self.write_lock:
            if self._of(table) is None or self._current is None:
                return None
            if not (self._has_all_of(shard) and self._current.is_exact(table)):
                return None
            sums = [torch.empty(0, dtype=torch.int64)]
            for run in runs_of(buckets):
                span = _hashes(run)
                ids, values = self._current.present(table, span.start, span.stop - 1)
                sums.append(digest_rows(ids, values, torch.arange(run.start, run.stop), share=shard))
            return torch.cat(sums)

    # Inside

    def _of(self, table: str) -> RowOverlay | None:
        """Return the overlay if the model reads the table, and applying is not paused."""
        overlay = None if self._passing else self._overlay
        if overlay is None or table not in overlay.widths:
            if overlay is not None and overlay.widths and table not in self._unknown:
                self._unknown.add(table)
                _log.warning("the trainer publishes table %r, which the served model does not read", table)
            return None
        return overlay

    def _mine(self, ids: Tensor) -> Tensor:
        return ids if self._share == WHOLE else ids[in_share(ids, self._share)]

    def _own(self, rows: Rows) -> Rows:
        return rows if self._share == WHOLE else rows.keep(in_share(rows.ids, self._share))

    def _has_all_of(self, share: IdShard) -> bool:
        """Whether this server has every ID of a trainer's shard."""
        number, total = share
        mine, servers = self._share
        return total % servers == 0 and number % servers == mine


def spans_of(buckets: Tensor | None) -> Iterator[range]:
    """Yield the hash ranges of some buckets, or of all."""
    return hash_spans() if buckets is None else map(_hashes, runs_of(buckets))


def runs_of(buckets: Tensor) -> Iterator[range]:
    """Yield ascending bucket numbers as ranges without gaps."""
    numbers = buckets.tolist()
    if numbers and not 0 <= numbers[0] <= numbers[-1] < BUCKETS:
        raise TableArgumentError(f"buckets are from 0 to {BUCKETS - 1} and ascending, got {numbers[:5]}")
    begin = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield range(numbers[begin], number + 1)
            begin = place + 1


def _hashes(run: range) -> range:
    return range(run.start * _BUCKET_HASHES, run.stop * _BUCKET_HASHES)


GoTo = Callable[[str | None], None]
"""Loads and serves an exported version, or with None the newest; raises a MonolithError if it cannot."""


class FollowTarget:
    """A `DeltaTarget` over the loaded versions of one model.

    Args:
        model: Its name.
        tables: Its overlay; that of an entry stays empty.
        metrics: Counts rows and states.
        go_to: Called on the subscriber's thread when the trainer names the version to serve.
    """

    def __init__(self, model: str, tables: FollowedTables, metrics: FollowMetrics, go_to: GoTo) -> None:
        self._model = model
        self.rows = tables
        self._metrics = metrics
        self._go_to = go_to
        self._going = concurrency.Lock()  # one thread changes the served version at a time
        # Guards the two below. Held while weights are swapped, too: a version that is being loaded and the
        # subscriber both swap, and the older weights must not come last.
        self._lock = concurrency.Lock()
        self._predictors: weakref.WeakSet[Predictor] = weakref.WeakSet()
        self._dense: Mapping[str, Tensor] | None = None
        self._refused = ""
        self.state = PublishState()
        """The newest state that the trainer published."""
        self.rolled_back_to: str | None = None
        """The version that the trainer rolled servers back to; None while following."""
        self.problem = ""
        """Why the version that the trainer names cannot be served."""

    # Loaded versions

    def add(self, predictor: Predictor, *, newer_dense: bool) -> None:
        """Update the dense weights of a predictor from now on.

        Args:
            newer_dense: Whether the followed weights are newer than the exported ones.
        """
        with self._lock:
            self._predictors.add(predictor)
            if newer_dense and self._dense is not None:
                self._swap(predictor, self._dense)

    # Messages of a subscriber

    @property
    def tables(self) -> Mapping[str, int]:
        return self.rows.tables

    @property
    def generation(self) -> int:
        return self.rows.generation

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        self._metrics.applied(self.rows.apply(rows, removed))
        self._tell(ChangedRows({name: some.ids for name, some in rows.items()}, removed))

    def begin_snapshot(self, shard: IdShard, buckets: Tensor | None) -> None:
        self._metrics.snapshot_began(None if buckets is None else len(buckets))
        self.rows.begin_snapshot(shard, buckets)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        self._metrics.snapshot_rows(len(rows), self.rows.snapshot_rows(table, rows))
        self._tell(ChangedRows({table: rows.ids}, {}))

    def end_snapshot(self) -> None:
        buried = self.rows.end_snapshot()
        self._metrics.snapshot_rows(0, buried)
        if buried:
            self._tell(None)  # whichever rows were missing

    def _tell(self, changed: ChangedRows | None) -> None:
        """Tell the predictors, after the rows were changed, which."""
        with self._lock:
            predictors = list(self._predictors)
        for predictor in predictors:
            predictor.rows_changed(changed)

    def abort_snapshot(self) -> None:
        self.rows.abort_snapshot()

    def digests(self, table: str, shard: IdShard, buckets: Tensor) -> Tensor | None:
        return self.rows.digests(table, shard, buckets)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        if self.rolled_back_to is not None:
            return
        with self._lock:
            self._dense = weights
            for predictor in list(self._predictors):
                self._swap(predictor, weights)

    def set_state(self, state: PublishState) -> None:
        known, self.state = self.state, state
        if state.paused and not known.paused:
            _log.warning("model %r: the trainer paused publishing: %s", self._model, state.reason)
        elif known.paused and not state.paused:
            _log.info("model %r: the trainer resumed publishing", self._model)
        self.apply_state()

    def apply_state(self) -> None:
        """Serve the version that the newest state names, if it is not served yet."""
        with self._going:
            if self.state.version != self.rolled_back_to:
                self._serve(self.state.version)
            self._metrics.set_state(self.state, self.rolled_back_to)

    def _serve(self, version: str | None) -> None:
        before, self.rolled_back_to = self.rolled_back_to, version
        try:
            # Following again: the overlay is dropped first, so that the newest version starts as exported.
            # Rolling back: the version is loaded first, so that a failure changes nothing.
            if version is None:
                self._forget()
            self._go_to(version)
            if version is not None:
                self._forget()
        except MonolithError as error:
            self.rolled_back_to = before
            if str(error) != self.problem:
                self.problem = str(error)
                _log.error(
                    "model %r: cannot serve %s, nothing changes: %s",
                    *(self._model, f"version {version}" if version else "the newest version", error),
                )
        else:
            self.problem = ""
            said = f"rolled back to version {version}" if version else "following the trainer again"
            _log.warning("model %r: %s", self._model, said)

    def _forget(self) -> None:
        """Drop the overlay and the followed dense weights."""
        self.rows.drop()
        with self._lock:
            self._dense = None
            self._predictors.clear()

    def _swap(self, predictor: Predictor, weights: Mapping[str, Tensor]) -> None:
        names = predictor.weight_names
        try:
            missing = [name for name in names if name not in weights]
            if missing:
                raise RestoreError(f"the trainer does not publish the dense weight {missing[0]!r}")
            predictor.swap_weights({name: weights[name] for name in names})
        except RestoreError as error:
            self._metrics.dense_refused()
            if str(error) != self._refused:
                self._refused = str(error)
                _log.error("model %r: refused dense weights: %s. Export the model again.", self._model, error)
