"""The tables of a served model that follow a trainer: exported rows, and what deltas brought over them.

Deltas and snapshots come from one thread; versions that are loaded, and let go of, from others. Lookups take
no lock: they go to an `OverlaidTables`, of which each loaded version has its own over one overlay.

ServedTarget: a served model as a subscriber sees it.

Rows go to the tables under the versions that are loaded, dense weights to their predictors. Where the trainer
says that servers go back to an exported version, that version is served as it was exported:

    following ──state names a version──► back: the version is served, what deltas brought is dropped
        ▲                                   │
        └──state names none: the newest version is loaded again, and a new epoch brings all of it
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from monolith.checkpoint.shares import WHOLE, IdShare, check_share
from monolith.errors import MonolithError, RestoreError, TableArgumentError
from monolith.serve.metrics import FollowMetrics
from monolith.sync.messages import BUCKETS, PublishState
from monolith.table import FrozenTables, OverlaidTables, RowOverlay, Rows, digest_rows, in_share
from monolith.table.overlaid_tables import hash_spans

_log = logging.getLogger(__name__)

_BUCKET_HASHES = (1 << 64) // BUCKETS


class FollowedTables:
    """Applies deltas and snapshots over whichever exported version is attached. Thread-safe.

    Args:
        share: The ids that this server has; those of others are passed over.
    """

    def __init__(self, share: IdShare = WHOLE) -> None:
        check_share("share", share)
        self._share = share
        self.turn = threading.RLock()  # taken by whoever writes to the overlay, and guards all below
        self._overlay: RowOverlay | None = None
        self._current: OverlaidTables | None = None
        self._snapshot: tuple[IdShare, Tensor | None, dict[str, list[Tensor]]] | None = None
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
        """Rises whenever what deltas brought is let go of."""
        return self._generation

    @property
    def is_passing(self) -> bool:
        """Whether what comes is not applied."""
        return self._passing or self._overlay is None

    @property
    def in_snapshot(self) -> bool:
        """Whether rows of a share are on their way, all of them or some buckets."""
        return self._snapshot is not None

    @property
    def rows(self) -> int:
        """That deltas brought and the attached version does not have, those that have gone among them."""
        overlay = self._overlay
        return 0 if overlay is None else len(overlay)

    @property
    def bytes(self) -> int:
        """Of memory, of what deltas brought."""
        overlay = self._overlay
        return 0 if overlay is None else overlay.bytes

    def attach(self, below: FrozenTables, *, threads: int | None = None) -> OverlaidTables:
        """Return an exported version under what deltas brought; these go on over it from now on.

        Where its tables are others than before, nothing that deltas brought is kept.
        """
        with self.turn:
            overlay = self._overlay
            if overlay is None or dict(overlay.widths) != dict(below.tables):
                overlay = RowOverlay(below.tables)
                self._generation += 1
            view = OverlaidTables(below, overlay, threads=threads)
            self._overlay, self._current = overlay, view
            return view

    def drop(self) -> None:
        """Forget what deltas brought, and pass over what comes until a version is attached again.

        Versions that were attached keep what they have.
        """
        with self.turn:
            self._snapshot = self._overlay = self._current = None
            self._generation += 1

    def pass_over(self, on: bool) -> None:
        """Apply nothing that comes, or go on."""
        with self.turn:
            self._passing = on
            self._snapshot = None

    def settle(self) -> int:
        """Let go of rows that the attached version has as well; return how many."""
        current = self._current
        return 0 if current is None else current.settle(self.turn)

    # What a subscriber brings

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> int:
        """Apply a delta; return how many rows came and went."""
        count = 0
        with self.turn:
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

    def begin_snapshot(self, share: IdShare, buckets: Tensor | None) -> None:
        """Expect the rows of a share, in some buckets, or in all."""
        with self.turn:
            # One whose rows are not applied must not end either: it would bury every row as not seen.
            self._snapshot = None if self._passing else (share, buckets, {name: [] for name in self.tables})

    def snapshot_rows(self, table: str, rows: Rows) -> int:
        """Take some of them; return how many were not known."""
        with self.turn:
            if self._snapshot is None or self._of(table) is None or self._current is None:
                return 0
            kept = self._own(rows)
            self._snapshot[2][table].append(kept.ids)
            return self._current.put_changed(table, kept.ids, kept.values)

    def end_snapshot(self) -> int:
        """Bury what the snapshot did not have; return how many that were."""
        with self.turn:
            if self._snapshot is None or self._current is None:
                return 0
            share, buckets, seen = self._snapshot
            self._snapshot = None
            buried = 0
            for name, parts in seen.items():
                kept = torch.cat([torch.empty(0, dtype=torch.int64), *parts]).sort().values
                buried += self._current.bury_others(name, kept, share, spans_of(buckets))
            return buried

    def drop_snapshot(self) -> None:
        """Forget about a snapshot that broke off. The rows that came are right, and stay."""
        with self.turn:
            self._snapshot = None

    def digests(self, table: str, share: IdShare, buckets: Tensor) -> Tensor | None:
        """Return the digests of buckets, of the ids of a share; None where they cannot be compared.

        That is where the exported rows are halves or bytes, which are not the trainer's floats; and where
        this server has only some ids of the share, whose digest nobody sends.
        """
        with self.turn:
            if self._of(table) is None or self._current is None:
                return None
            if not (self._has_all_of(share) and self._current.is_exact(table)):
                return None
            sums = [torch.empty(0, dtype=torch.int64)]
            for run in runs_of(buckets):
                span = _hashes(run)
                ids, values = self._current.present(table, span.start, span.stop - 1)
                sums.append(digest_rows(ids, values, torch.arange(run.start, run.stop), share=share))
            return torch.cat(sums)

    # Inside

    def _of(self, table: str) -> RowOverlay | None:
        """Return the overlay, where the model has such a table."""
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

    def _has_all_of(self, share: IdShare) -> bool:
        """Whether every id of a trainer's share is an id of ours."""
        number, total = share
        mine, servers = self._share
        return total % servers == 0 and number % servers == mine


def spans_of(buckets: Tensor | None) -> Iterator[range]:
    """Yield the hashes of buckets, or all, in ranges."""
    return hash_spans() if buckets is None else map(_hashes, runs_of(buckets))


def runs_of(buckets: Tensor) -> Iterator[range]:
    """Yield buckets, which are in ascending order, as ranges without gaps."""
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
"""Serves an exported version, loaded anew, or with None the newest; a MonolithError where it cannot."""


class SwapsWeights(Protocol):
    """What computes with dense weights: a predictor."""

    @property
    def weight_names(self) -> tuple[str, ...]: ...

    def swap_weights(self, weights: Mapping[str, Tensor]) -> None: ...


class ServedTarget:
    """A `DeltaTarget` over whatever versions of one model are loaded.

    Args:
        model: Its name.
        tables: Its rows; an entry has none.
        metrics: Counts.
        go_to: Called where the trainer says which version to serve; on the subscriber's thread.
    """

    def __init__(self, model: str, tables: FollowedTables, metrics: FollowMetrics, go_to: GoTo) -> None:
        self._model = model
        self.rows = tables
        self._metrics = metrics
        self._go_to = go_to
        self._going = threading.Lock()  # one goes to a version at a time
        self._lock = threading.Lock()  # guards the two below
        self._predictors: weakref.WeakSet[SwapsWeights] = weakref.WeakSet()
        self._dense: Mapping[str, Tensor] | None = None
        self._refused = ""
        self.state = PublishState()
        """The newest that was heard of."""
        self.back: str | None = None
        """The version that is served since the trainer said so."""
        self.problem = ""
        """Why the version that the trainer names is not served."""

    # Versions that are loaded

    def add(self, predictor: SwapsWeights, *, newer_dense: bool) -> None:
        """Bring a predictor's dense weights up to date from now on.

        Args:
            newer_dense: Whether those that came are newer than its own.
        """
        with self._lock:
            self._predictors.add(predictor)
            dense = self._dense
        if newer_dense and dense is not None:
            self._swap(predictor, dense)

    # What a subscriber brings

    @property
    def tables(self) -> Mapping[str, int]:
        return self.rows.tables

    @property
    def generation(self) -> int:
        return self.rows.generation

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        self._metrics.applied(self.rows.apply(rows, removed))

    def begin_snapshot(self, share: IdShare, buckets: Tensor | None) -> None:
        self._metrics.snapshot_began(None if buckets is None else len(buckets))
        self.rows.begin_snapshot(share, buckets)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        self._metrics.snapshot_rows(len(rows), self.rows.snapshot_rows(table, rows))

    def end_snapshot(self) -> None:
        self._metrics.snapshot_rows(0, self.rows.end_snapshot())

    def drop_snapshot(self) -> None:
        self.rows.drop_snapshot()

    def digests(self, table: str, share: IdShare, buckets: Tensor) -> Tensor | None:
        return self.rows.digests(table, share, buckets)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        if self.back is not None:
            return
        with self._lock:
            self._dense = weights
            predictors = list(self._predictors)
        for predictor in predictors:
            self._swap(predictor, weights)

    def follow(self, state: PublishState) -> None:
        known, self.state = self.state, state
        if state.held and not known.held:
            _log.warning("model %r: the trainer holds publishing back: %s", self._model, state.reason)
        elif known.held and not state.held:
            _log.info("model %r: the trainer publishes again", self._model)
        self.settle_state()

    def settle_state(self) -> None:
        """Serve the version that the newest state names, where it is not served yet."""
        with self._going:
            if self.state.version != self.back:
                self._serve(self.state.version)
            self._metrics.told(self.state, self.back)

    def _serve(self, version: str | None) -> None:
        before, self.back = self.back, version
        try:
            if version is None:
                self._forget()
            self._go_to(version)
            if version is not None:
                self._forget()
        except MonolithError as error:
            self.back = before
            if str(error) != self.problem:
                self.problem = str(error)
                _log.error(
                    "model %r stays as it is: cannot go to %s: %s",
                    *(self._model, f"version {version}" if version else "the newest version", error),
                )
        else:
            self.problem = ""
            said = f"went back to version {version}" if version else "follows again"
            _log.warning("model %r: %s", self._model, said)

    def _forget(self) -> None:
        """Let go of what deltas brought."""
        self.rows.drop()
        with self._lock:
            self._dense = None
            self._predictors.clear()

    def _swap(self, predictor: SwapsWeights, weights: Mapping[str, Tensor]) -> None:
        names = predictor.weight_names
        try:
            missing = [name for name in names if name not in weights]
            if missing:
                raise RestoreError(f"the trainer publishes no dense weight {missing[0]!r}")
            predictor.swap_weights({name: weights[name] for name in names})
        except RestoreError as error:
            self._metrics.dense_refused()
            if str(error) != self._refused:
                self._refused = str(error)
                _log.error(
                    "model %r: dense weights were not taken: %s. Export the model again.", self._model, error
                )
