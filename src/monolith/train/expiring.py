"""Expiring rows in training: by which clock, and how many at once.

Rows go for good, so two things stand between a wrong date and a table: a clock that a few records cannot
move, see `EventClock`, and a bound on the share of a table that goes at once. Where more have expired, the
table keeps all of its rows and somebody is told: that is what a wrong clock looks like, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import torch

from monolith.feature import FeatureIds
from monolith.observe import Doublings, Metrics
from monolith.store import Store
from monolith.table import EventClock
from monolith.train.config import ExpiryConfig

_log = logging.getLogger(__name__)


class RowExpiry:
    """Tells the time by the batches of one process, and drops the rows that have expired by then.

    Args:
        wall: Unix seconds.
        metrics: Where evictions that were held back are counted.
    """

    def __init__(
        self,
        config: ExpiryConfig,
        *,
        wall: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._clock = EventClock(max_ahead=config.max_ahead, wall=wall)
        self._metrics = metrics
        self._warned: dict[str, Doublings] = {}
        self.overdue: dict[str, int] = {}
        """By table: rows that the last eviction kept because too many had expired."""
        self.held_back: dict[str, int] = {}
        """By table: how often that happened."""

    def observe(self, ids: FeatureIds) -> None:
        """Take note of a batch that is trained on."""
        times = ids.event_times
        self._clock.observe(torch.full((len(ids),), ids.event_time) if times is None else times)

    def now(self) -> int | None:
        """Return what time it is for rows, in Unix seconds; None as long as nobody can tell."""
        return self._clock.now()

    def evict(self, stores: Iterable[Store], now: int) -> None:
        """Drop the rows that have expired by `now`, of tables that do not lose too many at once."""
        for store in stores:
            rows = {name: stats.rows for name, stats in store.stats().items()}
            expired = {name: count for name, count in store.count_expired(now).items() if count}
            kept = {name for name, count in expired.items() if count > self._config.max_fraction * rows[name]}
            for name, count in rows.items():
                self._note(name, expired[name] if name in kept else 0, count, now)
            if going := expired.keys() - kept:
                store.evict(now, tables=going)

    def state(self) -> list[list[int]]:
        """Return what the clock remembers, for a checkpoint."""
        return self._clock.state()

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Go on with the clock of a checkpoint."""
        self._clock.restore(state)

    def _note(self, table: str, overdue: int, rows: int, now: int) -> None:
        if overdue or table in self.overdue:
            self.overdue[table] = overdue
            self._show(table, overdue)
        if not overdue:
            return
        self.held_back[table] = times = self.held_back.get(table, 0) + 1
        if self._warned.setdefault(table, Doublings()).due(times):
            _log.warning(
                "table %r: %s of %s rows have expired by %s UTC, more than the share of %g that may go at "
                "once; all are kept (%s times so far). Check that event times are right. If they are, set "
                "expiry.max_fraction (train.expiry.max_fraction in a run's config) to 1 to evict them.",
                table,
                f"{overdue:,}",
                f"{rows:,}",
                datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M"),
                self._config.max_fraction,
                f"{times:,}",
            )

    def _show(self, table: str, overdue: int) -> None:
        if self._metrics is None:
            return
        about = "Rows kept although they have expired: too many at once"
        self._metrics.gauge("train_rows_overdue", about, ["table"]).set(overdue, table=table)
        if overdue:
            about = "Evictions that would have taken too much of a table"
            self._metrics.counter("train_evictions_held_back", about, ["table"]).inc(table=table)
