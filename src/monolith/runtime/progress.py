"""How far a run has come: positions in its data, skipped batches and expired rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch

from monolith.data import Stream
from monolith.data.source import Position
from monolith.errors import DivergedError, NonFiniteError, NothingTrainedError, RestoreError
from monolith.feature import Batch, FeatureIds
from monolith.observe import Doublings, Metrics
from monolith.store import Store
from monolith.table import EventClock
from monolith.train.config import ExpiryConfig, TrainConfig

_log = logging.getLogger(__name__)

WORKERS = "workers"
"""The key of positions that are one per worker."""


def joined_positions(positions: Sequence[Position]) -> Position:
    """Return one position for all workers; that of a single one is as if it were alone."""
    return positions[0] if len(positions) == 1 else {WORKERS: list(positions)}


def positions_of(position: Position) -> list[Position]:
    """Return the positions of all workers that saved one."""
    return list(position[WORKERS]) if set(position) == {WORKERS} else [position]


def order_of(config: TrainConfig) -> dict[str, Any] | None:
    """Return the settings that the order of the data follows from; None where the task alone says it."""
    if config.epochs is None:
        return None
    return {"train.seed": config.seed, "train.shuffle_buffer": config.shuffle_buffer}


@contextmanager
def same_order(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[None]:
    """Say which settings to put back where data cannot go on, since its order was another when it was saved.

    Args:
        saved, now: What `order_of` found. A source with an order of its own goes on whatever they are.

    Raises:
        RestoreError: It cannot go on.
    """
    try:
        yield
    except RestoreError as cause:
        changed = {name: value for name, value in (saved or {}).items() if (now or {}).get(name) != value}
        if not changed:
            raise
        was = " and ".join(f"{name} {value}" for name, value in changed.items())
        here = " and ".join(f"{name} {now[name]}" for name in changed) if now else "no train.epochs"
        raise RestoreError(
            f"cannot resume the data: the checkpoint was trained with {was}, from which the order of its "
            f"epochs follows, and this run has {here}. Set it back to {was} to go on with the record that "
            "comes next; or, to read the data from its start, start a new model_dir from this one with "
            "restore.dir and restore.restart_data."
        ) from cause


def split_position(
    position: Position, workers: int, data: Stream[Any], *, resumed: bool = False
) -> list[Position]:
    """Return the position of each worker.

    Args:
        data: The stream of one of them. It redistributes positions of another number of workers, and is to
            be restored afterwards.
        resumed: Whether the others read on: what they have cannot be redistributed.

    Raises:
        RestoreError: They are of another number of workers, and the data cannot be redistributed.
    """
    found = positions_of(position)
    if len(found) == workers:
        return found
    if resumed:
        raise RestoreError(
            f"cannot come back to a run of {workers} workers that goes on: nothing was saved since it began "
            f"from the checkpoint of {len(found)}, whose positions were redistributed then. Restart all "
            "of its workers together."
        )
    try:
        return data.redistribute(found, workers)
    except RestoreError as cause:
        raise RestoreError(
            f"cannot resume the data: the checkpoint was saved by {len(found)} workers, each with its own "
            f"position, and this run has {workers}: {cause}. Train with {len(found)} workers; or, to read "
            "the data from its start, start a new model_dir from this one with restore.dir and "
            "restore.restart_data."
        ) from cause


LINES = 20
"""As many skipped batches have a line in the log; then every hundredth."""


class Skipping:
    """Counts the batches that were skipped.

    Args:
        max_in_a_row: One more ends the run.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.batches = 0
        """Skipped so far, in all runs."""

    def note(self, cause: NonFiniteError, step: int, batch: Batch) -> None:
        """Count a batch that was not trained on, after `step` steps.

        Raises:
            DivergedError: It was one too many in a row.
        """
        self.batches += 1
        self._in_a_row += 1
        if self._in_a_row > self._max_in_a_row:
            many = "1 batch" if self._in_a_row == 1 else f"{self._in_a_row} batches"
            self._in_a_row = 0
            raise DivergedError(
                f"stopped at step {step} without saving: {many} in a row could not be trained on; in the "
                f"last one, {cause}{_without_labels(batch)}. Lower the learning rate or clip gradients; look "
                "for NaN in the data with `monolith data validate`; or, if the weights are NaN, go back to "
                "an earlier checkpoint with --restore-checkpoint. max_skipped_in_a_row sets how many "
                "are skipped."
            ) from cause
        if self.batches <= LINES or self.batches % 100 == 0:
            _log.warning(
                "skipped a batch of %d examples after step %d: %s%s. Nothing of it was applied; %d so far",
                len(batch),
                step,
                cause,
                _without_labels(batch),
                self.batches,
            )

    def note_trained(self) -> None:
        """Start counting those in a row anew."""
        self._in_a_row = 0


def check_not_all_skipped(batches: int, bad: Mapping[str, int]) -> None:
    """Refuse a run that came to the end of its data without a step because nothing of it could be trained on.

    Args:
        batches: How many were skipped.
        bad: Why records were left out before they were in a batch, and how many for each reason.

    Raises:
        NothingTrainedError: It is such a run.
    """
    reasons = [f"{count:,} records were left out: {reason}" for reason, count in bad.items()]
    if batches:
        reasons.append(f"{batches:,} batches were skipped: their loss or a gradient is NaN or infinite")
    if reasons:
        raise NothingTrainedError(
            f"the run took no step: all of its data was skipped. {'; '.join(reasons)}. Mend the data, "
            "which `monolith data validate` looks at, or name the right columns."
        )


def _without_labels(batch: Batch) -> str:
    """Return which labels are not there, the likeliest cause of a loss of NaN; nothing where all are."""
    empty = {name: int(values.isnan().sum()) for name, values in batch.labels.items()}
    said = [f"{count} have no label {name!r}" for name, count in empty.items() if count]
    if not said:
        return ""
    return f" (of its {len(batch)} examples, {' and '.join(said)}: leave such records out of the data)"


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
