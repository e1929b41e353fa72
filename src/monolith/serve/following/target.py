"""ServedTarget: a served model as a subscriber sees it.

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
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from monolith.checkpoint.shares import IdShare
from monolith.errors import MonolithError, RestoreError
from monolith.serve.following.followed_tables import FollowedTables
from monolith.serve.following.freshness import FollowMetrics
from monolith.sync.messages import PublishState
from monolith.table import Rows

_log = logging.getLogger(__name__)

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
