"""How far a run has come: positions in its data, counts of examples, skipped batches, expired rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from monolith import concurrency
from monolith.data import Stream
from monolith.data.source import Position
from monolith.errors import DivergedError, NonFiniteError, NothingTrainedError, RestoreError
from monolith.feature import Batch, FeatureIds
from monolith.feature.ranges import FloatRanges
from monolith.model import EmbeddingOptimizer
from monolith.observe import Doublings, Metrics
from monolith.runtime.coordinator import Start, WorkerState
from monolith.store import Store
from monolith.table import EventClock
from monolith.train.config import ExpiryConfig, TrainConfig

_log = logging.getLogger(__name__)

WORKERS = "workers"
"""The key of positions that are one per worker."""


def joined_positions(positions: Sequence[Position]) -> Position:
    """Return one position for all workers; of a single worker, its own as in a run of one process."""
    return positions[0] if len(positions) == 1 else {WORKERS: list(positions)}


def positions_of(position: Position) -> list[Position]:
    """Return the positions of all workers that saved one."""
    return list(position[WORKERS]) if set(position) == {WORKERS} else [position]


def order_of(config: TrainConfig) -> dict[str, Any] | None:
    """Return the settings that the order of the data follows from; None if the task alone decides it."""
    if config.epochs is None:
        return None
    return {"train.seed": config.seed, "train.shuffle_buffer": config.shuffle_buffer}


@contextmanager
def same_order(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[None]:
    """Name the settings to restore if data cannot resume because its order was another when it was saved.

    Args:
        saved, now: Results of `order_of`. A source with an order of its own resumes whatever they are.

    Raises:
        RestoreError: It cannot resume.
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
            f"epochs follows, and this run has {here}. Set it back to {was} to resume with the next "
            "record; or, to read the data from its start, start a new model_dir from this one with "
            "restore.dir and restore.restart_data."
        ) from cause


def split_position(
    position: Position, workers: int, data: Stream[Any], *, resumed: bool = False
) -> list[Position]:
    """Return the position of each worker.

    Args:
        data: The stream of one worker. It redistributes positions of another number of workers, and must
            be restored afterwards.
        resumed: Whether the other workers read on: their work cannot be redistributed.

    Raises:
        RestoreError: The positions are of another number of workers, and cannot be redistributed.
    """
    found = positions_of(position)
    if len(found) == workers:
        return found
    if resumed:
        raise RestoreError(
            f"cannot rejoin a run of {workers} workers that continues: nothing was saved since it started "
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
"""Number of skipped batches that each get a line in the log; after them, every hundredth does."""


class Skipping:
    """Counts the batches that were skipped.

    Args:
        max_in_a_row: One more ends the run.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.batches = 0
        """Batches skipped so far, in all runs."""

    def note(self, cause: NonFiniteError, step: int, batch: Batch) -> None:
        """Count a batch that was not trained on, after `step` steps.

        Raises:
            DivergedError: It was one too many in a row.
        """
        self.batches += len(batch) > 0  # a rank without data skips what another rank's batch has spoilt
        self._in_a_row += 1
        if self._in_a_row > self._max_in_a_row:
            many = "1 batch" if self._in_a_row == 1 else f"{self._in_a_row} batches"
            self._in_a_row = 0
            raise DivergedError(
                f"stopped at step {step} without saving: {many} in a row could not be trained on; in the "
                f"last one, {cause}{_without_labels(batch)}. Lower the learning rate or clip gradients; "
                "check the data for NaN with `monolith data validate`; or, if the weights are NaN, roll "
                "back to an earlier checkpoint with --restore-checkpoint. max_skipped_in_a_row sets how many "
                "are skipped."
            ) from cause
        if len(batch) and (self.batches <= LINES or self.batches % 100 == 0):
            _log.warning(
                "skipped a batch of %d examples after step %d: %s%s. Nothing of it was applied; %d so far",
                len(batch),
                step,
                cause,
                _without_labels(batch),
                self.batches,
            )

    def note_trained(self) -> None:
        """Reset the count of skipped batches in a row."""
        self._in_a_row = 0


def check_not_all_skipped(batches: int, bad: Mapping[str, int]) -> None:
    """Refuse a run that reached the end of its data without a step because none of it could be trained on.

    Args:
        batches: How many were skipped.
        bad: Reason -> how many records were left out for it before they were in a batch.

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
    """Describe the missing labels, the likeliest cause of a loss of NaN; empty if none is missing."""
    empty = {name: int(values.isnan().sum()) for name, values in batch.labels.items()}
    said = [f"{count} have no label {name!r}" for name, count in empty.items() if count]
    if not said:
        return ""
    return f" (of its {len(batch)} examples, {' and '.join(said)}: leave such records out of the data)"


class RowExpiry:
    """Tells the time by the batches of one process, and drops the rows that have expired by then.

    Args:
        wall: Unix seconds.
        metrics: Counts evictions that were withheld.
    """

    def __init__(
        self,
        config: ExpiryConfig,
        *,
        wall: Callable[[], float] = concurrency.time,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._clock = EventClock(max_ahead=config.max_ahead, wall=wall)
        self._metrics = metrics
        self._warned: dict[str, Doublings] = {}
        self.overdue: dict[str, int] = {}
        """Table -> expired rows that the last eviction left in place because there were too many."""
        self.held_back: dict[str, int] = {}
        """Table -> how often that happened."""
        self.trouble = ""
        """Tables that evict nothing, because too much of them has expired; empty if there is none."""

    def observe(self, ids: FeatureIds) -> None:
        """Take note of a batch that is trained on."""
        times = ids.event_times
        self._clock.observe(ids.event_time if times is None else times, len(ids))

    def now(self) -> int | None:
        """Return the time by which rows expire, in Unix seconds; None while it is not known."""
        return self._clock.now()

    def evict(self, stores: Iterable[Store], now: int) -> None:
        """Drop the rows that have expired by `now`; of a table that would lose too many at once, none, or the
        oldest."""
        stuck = []
        for store in stores:
            rows = {name: stats.rows for name, stats in store.stats().items()}
            expired = {name: count for name, count in store.count_expired(now).items() if count}
            kept = {name for name, count in expired.items() if count > self._config.max_fraction * rows[name]}
            for name, count in rows.items():
                gone = self._evict_oldest(store, name, now, count) if name in kept else 0
                overdue = expired[name] - gone if name in kept else 0
                if overdue or name in self.overdue:
                    self.overdue[name] = overdue
                    self._show(name, overdue)
                if overdue:
                    stuck += self._say_overdue(name, overdue, gone, count, now)
            if going := expired.keys() - kept:
                store.evict(now, tables=going)
        self.trouble = "; ".join(stuck)

    def _evict_oldest(self, store: Store, table: str, now: int, rows: int) -> int:
        """Evict the rows that expired first, nearly as many as may go at once; return how many went."""
        if not self._config.gradual:
            return 0
        most = self._config.max_fraction * rows
        # By `now - late` few enough have expired, and by `now - early` too many. Each question counts the
        # rows of the table, so the time is only found to a sixteenth.
        early, late = 0, 60
        while store.count_expired(now - late)[table] > most:
            early, late = late, 2 * late
        for _ in range(4):
            middle = (early + late) // 2
            if store.count_expired(now - middle)[table] > most:
                early = middle
            else:
                late = middle
        return store.evict(now - late, tables={table})[table]

    def state(self) -> list[list[int]]:
        """Return the state of the clock, for a checkpoint."""
        return self._clock.state()

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Resume with the clock of a checkpoint."""
        self._clock.restore(state)

    def _say_overdue(self, table: str, overdue: int, gone: int, rows: int, now: int) -> list[str]:
        """Log that expired rows were kept; return what is wrong if the next eviction will keep them, too."""
        self.held_back[table] = times = self.held_back.get(table, 0) + 1
        expired = (
            f"{overdue + gone:,} of {rows:,} rows of table {table!r} have expired by "
            f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC, more than the fraction of "
            f"{self._config.max_fraction:g} that may be evicted at once"
        )
        due = self._warned.setdefault(table, Doublings()).due(times)
        if gone:
            if due:
                _log.warning(
                    "%s; the oldest %s are evicted, and more at the next eviction (train.expiry.gradual)",
                    expired,
                    f"{gone:,}",
                )
            return []
        if due:
            _log.warning(
                "%s; none is evicted (%s times so far), and none will be until you act: the number grows, as "
                "after a pause of the run or a hole in its data. Check that event times are right. If they "
                "are, set train.expiry.gradual to true (expiry of a TrainConfig), which evicts the oldest at "
                "each eviction, or train.expiry.max_fraction to 1, which evicts all of them at once.",
                expired,
                f"{times:,}",
            )
        return [f"{expired}; none is evicted until you set train.expiry.gradual or max_fraction"]

    def _show(self, table: str, overdue: int) -> None:
        if self._metrics is None:
            return
        about = "Rows kept although they have expired: too many at once"
        self._metrics.gauge("train_rows_overdue", about, ["table"]).set(overdue, table=table)
        if overdue:
            about = "Evictions that would have taken too much of a table"
            self._metrics.counter("train_evictions_held_back", about, ["table"]).inc(table=table)


class RunProgress:
    """How far one process has come: the global step, and what it trained on. Used by the training thread.

    Counts are of all runs of the model. The chief's include what all processes had done when it restored
    them; every other process counts from 0. So the total is:

        total = chief.examples + sum of state.examples over the other processes, at the last quiesce

    Args:
        sparse: The optimizer of rows, which stamps them with the global step.
    """

    def __init__(self, sparse: EmbeddingOptimizer, config: TrainConfig, expiry: RowExpiry) -> None:
        self._sparse = sparse
        self.config = config
        self.expiry = expiry
        self.skipping = Skipping(config.max_skipped_in_a_row)
        self.step = 0
        """The global step: how many steps the model has taken, as far as this process knows."""
        self.examples = 0
        """Examples trained on so far."""
        self.others: tuple[WorkerState, ...] = ()
        """The states of all other processes at the last quiesce, as the chief."""
        self.saved_order: Mapping[str, Any] | None = None
        """The settings that the order of the data followed from when it was saved; see `order_of`."""
        self._heads: tuple[str, ...] = ()
        """The labels of the last batch that had some."""
        self._restored_examples = self._restored_skipped = 0
        self._ranges = FloatRanges()

    def set_step(self, step: int) -> None:
        """Set the global step; nothing else does, so that the optimizer of rows has the same."""
        self.step = self._sparse.global_step = step

    def note_batch(self, batch: Batch) -> None:
        """Count a batch that was trained on."""
        self.examples += len(batch)
        self._heads = tuple(batch.labels) or self._heads
        self.expiry.observe(batch.ids)
        self._ranges.note(batch.floats)

    @property
    def total_examples(self) -> int:
        """Examples trained on so far, by all processes."""
        return self.examples + sum(state.examples for state in self.others)

    @property
    def total_skipped(self) -> int:
        """Batches skipped so far, by all processes."""
        return self.skipping.batches + sum(state.skipped for state in self.others)

    def state(self, position: Position) -> WorkerState:
        """Return the state of this process that a checkpoint keeps, with its position in the data."""
        return WorkerState(
            position=position,
            examples=self.examples - self._restored_examples,
            skipped=self.skipping.batches - self._restored_skipped,
            event_time=self.expiry.now(),
            heads=self._heads,
        )

    def expiry_time(self) -> int | None:
        """Return the time by which rows expire; None while it is not known.

        The worker with the oldest data decides, so that the rows it trains stay. The times of the other
        workers are those of the last quiesce.
        """
        times = [self.expiry.now(), *(state.event_time for state in self.others)]
        return min((time for time in times if time is not None), default=None)

    def rejoin(self, start: Start) -> None:
        """Count on as the chief, which restored the counts of all: in a run that continued, the other
        workers count theirs."""
        self.others = start.others
        self.examples -= sum(state.examples for state in start.others)
        self.skipping.batches -= sum(state.skipped for state in start.others)
        if start.back is not None:
            self._restored_examples = self.examples - start.back.examples
            self._restored_skipped = self.skipping.batches - start.back.skipped

    def count_from(self, examples: int, skipped: int) -> None:
        """Count on from these, as a process that is not the chief."""
        self.examples, self.skipping.batches = examples, skipped

    def roll_back(self, step: int) -> None:
        """Start again at an earlier step; the chief has the counts of all."""
        self.set_step(step)
        self.examples = self.skipping.batches = 0
        self._restored_examples = self._restored_skipped = 0

    def saved(self) -> dict[str, Any]:
        """Return the counts of all processes, for a checkpoint."""
        every = (self._heads, *(state.heads for state in self.others))
        return {
            "examples": self.total_examples,
            "skipped": self.total_skipped,
            "event_times": self.expiry.state(),
            "heads": list(next(filter(None, every), ())),
            "order": order_of(self.config),
            "ranges": self._ranges.state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Count on from a checkpoint, as the chief."""
        self.examples = int(saved["examples"])
        self.skipping.batches = int(saved.get("skipped", 0))
        self._restored_examples, self._restored_skipped = self.examples, self.skipping.batches
        self.expiry.restore(saved.get("event_times", []))
        self._heads = tuple(saved.get("heads", ()))
        self.saved_order = saved.get("order")
        self._ranges.restore(saved.get("ranges", {}))
