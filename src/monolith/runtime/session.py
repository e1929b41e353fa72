"""A session: one model with everything that trains it, in this process.

It takes steps (`step.py`) on batches (`batches.py`), counts them (`progress.py`), and acts on the decisions
of its coordinator (`coordinator.py`). `Trainer` makes it and runs the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, assert_never

from monolith import concurrency
from monolith.checkpoint import Part, StatePart
from monolith.data import Stream
from monolith.data.source import Position
from monolith.errors import DivergedError
from monolith.feature import Batch
from monolith.observe import Metrics
from monolith.runtime.batches import TrainingBatches
from monolith.runtime.coordinator import (
    Continue,
    Coordinator,
    Outcome,
    Pause,
    Quiesced,
    Rebalance,
    Restore,
    Start,
    Stop,
    WorkerProgress,
    WorkerState,
)
from monolith.runtime.progress import RowExpiry, RunProgress, joined_positions
from monolith.runtime.step import TrainingStep
from monolith.train.config import TrainConfig
from monolith.train.hook import Every, StepResult, TrainingRun
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.model import Model
from monolith.train.task import Mode

RUN_IS_OVER = "the run is over"


class Session:
    """A model, the data it trains on and how far it has come. Used by one thread.

    Args:
        model: Closed by the session, as is the stream.
        stream: The data that this process trains on.
        report: Given "head/metric" and the row of each window that ends.
        clock: Unix seconds, which event times are compared with.
        metrics: Counts evictions of expired rows.
        stop: Set once this process was asked to stop; see `interrupt`.
    """

    def __init__(
        self,
        model: Model,
        stream: Stream[Batch],
        coordinator: Coordinator,
        config: TrainConfig,
        *,
        report: Callable[[str, WindowRow], None] | None = None,
        clock: Callable[[], float] = concurrency.time,
        metrics: Metrics | None = None,
        stop: concurrency.Event | None = None,
    ) -> None:
        assert model.sparse is not None
        self.task = model.task
        self.model = model
        self.config = config
        self.coordinator = coordinator
        expiry = RowExpiry(config.expiry, wall=clock, metrics=metrics)
        self.progress = RunProgress(model.sparse, config, expiry)
        self.batches = TrainingBatches(
            model, stream, coordinator, config, idle=self._idle, clock=clock, stop=stop
        )
        self.training_step = TrainingStep(coordinator, model, self.batches, self.progress, clock=clock)
        counts = self.training_step.hot_counts
        if metrics is not None and counts:
            metrics.gauge(
                "train_hot_ids",
                "Fraction of the ids so far whose row was on the device, or that had none yet; see "
                "train.device_memory_bytes",
            ).read_from(lambda: sum(one.share for one in counts) / len(counts))
        if metrics is not None and self.training_step.replayed is not None:
            metrics.gauge(
                "train_replayed_batches",
                "Fraction of the batches so far whose steps were replayed as CUDA graphs; see "
                "train.step_graphs",
            ).read_from(lambda: self.training_step.replayed or 0.0)
        self.metrics = HeadMetrics(
            model.task,
            Mode.TRAIN,
            window=config.metric_window,
            report=report,
            threaded=self.training_step.replays,
        )
        self.training_step.measure = self.metrics.update
        self.training_step.check = self.metrics.check
        every = config.evict_every_steps
        self._evictions = None if every is None else Every(every)
        self.rejoined = False
        """Whether this process is a chief that rejoined a run which continued without it."""
        self.save_wanted = False
        """Whether the chief should save now, because a worker left; see `Continue.save`."""
        self._to_commit: Position | None = None
        """A position on disk that was told while waiting for data; its source commits it between steps."""
        self._quiesced: Quiesced | None = None
        """Set while this chief has all processes quiesced."""
        self.restarts_data = False
        """Whether a restore leaves the data at its beginning."""
        # Set by the hooks that publish and save:
        self.log_places: Callable[[], Mapping[str, Any]] | None = None
        """Returns for a checkpoint how far the log of each shard is published."""
        self.save_due: Callable[[], bool] = lambda: False
        """Whether a save that failed is due to be retried, although there is no data for a step."""
        self.idle: Callable[[], None] = lambda: None
        """Called now and then while there is no data, by the training thread."""

    @property
    def step(self) -> int:
        """The global step: how many steps the model has taken, as far as this process knows."""
        return self.progress.step

    @property
    def interrupted(self) -> bool:
        """Whether this process was asked to stop."""
        return self.batches.interrupted

    def interrupt(self) -> None:
        """Stop waiting for data: a step that waits is not taken. From any thread."""
        self.batches.interrupt()

    def fraction_read(self) -> float | None:
        """Return the fraction of its data this process has trained on, if that is known. From any thread."""
        return self.batches.fraction_read()

    def state(self) -> WorkerState:
        """Return the state of this process that a checkpoint keeps, in addition to the model."""
        return self.progress.state(self.batches.position)

    def _progress(self, *, data_ended: bool = False) -> WorkerProgress:
        return WorkerProgress(step=self.step, state=self.state(), data_ended=data_ended)

    # Starting

    def join(self, restore: Callable[[], None]) -> str | None:
        """Start together with the other processes; return why this one has nothing to do, if so.

        Args:
            restore: Restores the newest checkpoint, if there is one; called on the chief.
        """
        batches, progress = self.batches, self.progress
        queue, is_chief = batches.work_queue, self.coordinator.membership.is_chief

        def restored(rejoined: bool) -> Start:
            self.rejoined = rejoined
            restore()
            if queue is not None:
                queue.defer_to_chief()
                if not batches.starts and not rejoined:  # nothing was restored: all work is still to do
                    batches.divide([])
            return Start(
                step=self.step,
                positions=tuple(batches.starts),
                hands_out=queue is not None,
                deals_out=batches.assigned_queue is not None,
            )

        if queue is not None and not is_chief:
            queue.defer_to_chief()
        self.start_from(0)
        start = self.coordinator.join(restored, work_queue=queue, interrupted=lambda: self.interrupted)
        if start is None:
            return RUN_IS_OVER
        progress.set_step(start.step)
        if is_chief:
            progress.rejoin(start)
            if queue is not None and self.rejoined:
                batches.read_from(start.positions[0] if start.back is None else start.back.position)
        elif start.back is not None:
            batches.read_from(start.back.position)
            progress.count_from(start.back.examples, start.back.skipped)
        elif start.positions:
            batches.read_from(start.positions[self.coordinator.membership.index])
        return None

    def start_from(self, step: int) -> None:
        """Count steps from this one, which was restored."""
        self.progress.set_step(step)
        if self._evictions is not None:
            self._evictions.begin(step)

    # Between steps

    def at_step(self, run: TrainingRun) -> bool:
        """Do what the coordinator decides, between two steps; return whether all processes stop here."""
        decision = self._decide()
        if self._to_commit is not None:
            self.commit(self._to_commit)
            self._to_commit = None
        if isinstance(decision, Stop):
            run.request_stop(decision.reason)
        return isinstance(decision, Stop)

    def _decide(self, *, data_ended: bool = False) -> Continue | Stop:
        """Act on decisions until the coordinator lets this process continue, or stops it.

        If its data has ended, a `Rebalance` lets it continue, too: there may be more to read now.
        """
        self.training_step.at_steps += 1
        while True:
            decision = self.coordinator.at_step(self._progress(data_ended=data_ended))
            match decision:
                case Pause():
                    with self.coordinator.quiesce(self._progress(), self.drain):
                        pass
                case Restore(start):
                    self._roll_back_to(start)
                case Rebalance(position):
                    if position is None:
                        self.batches.work_returned = True
                    else:
                        self.batches.reassign(position)
                    if data_ended:
                        return Continue()
                case Continue() | Stop():
                    self._to_commit = decision.committed or self._to_commit
                    self.save_wanted = isinstance(decision, Continue) and decision.save
                    return decision
                case _:
                    assert_never(decision)

    def _roll_back_to(self, start: Start) -> None:
        self.progress.roll_back(start.step)
        if self._evictions is not None:
            self._evictions.begin(start.step)
        if start.positions:
            self.batches.read_from(start.positions[self.coordinator.membership.index])

    def _idle(self) -> bool:
        """Called again and again while there is no data; return whether to stop waiting."""
        self.training_step.settle()
        self.idle()
        if isinstance(self._decide(), Stop):
            self.batches.stop_waiting()
        due = not self.coordinator.membership.lockstep and self.save_due()
        self.training_step.paused = self.save_wanted or due
        return self.training_step.paused or self.batches.reassigned

    def take_step(self) -> StepResult | None:
        """Take a step; None if there is no batch for now. See `TrainingStep.take`."""
        result = self.training_step.take()
        if result is not None and self._evictions is not None and self._evictions.crossed(self.step):
            self.evict()
        return result

    def wait_for_more(self, run: TrainingRun, save_if_due: Callable[[], None]) -> bool:
        """Wait for more work after a step found no batch; return whether another step may find one."""
        if run.stop_reason is not None or self.interrupted:
            return False
        if self.training_step.paused or self.batches.reassigned:
            self.training_step.paused = False
            save_if_due()
            return True
        while not self.batches.work_returned and not self.batches.reassigned:
            if isinstance(self._decide(data_ended=True), Stop) or self.interrupted:
                return False
            save_if_due()
        self.batches.close_pipeline()  # its source has more now, but the pipeline has ended
        return True

    def evict(self) -> None:
        """Drop expired rows, as the chief, after the updates so far; before a save, call this before `drain`.

        Rows that were looked up ahead are still there, and would not be after a restore.
        """
        membership = self.coordinator.membership
        if not membership.is_chief:
            return
        self.training_step.settle()
        if membership.lockstep:  # all ranks, at the same place between their updates
            with self.quiesced():
                if (now := self.progress.expiry_time()) is not None:
                    self.progress.expiry.evict(self.model.stores, now)
            return
        now = self.progress.expiry_time()
        if now is not None:
            self.batches.push(lambda: self.progress.expiry.evict(self.model.stores, now))

    def drain(self) -> None:
        """Return when all rows are up to date, and all steps are known: before every save."""
        self.training_step.settle()
        self.batches.drain()

    # Quiesced

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Have all processes quiesced, as the chief, while a snapshot is taken. Blocks may be nested."""
        with self._quiesce():
            yield

    @contextmanager
    def _quiesce(self) -> Iterator[Quiesced]:
        if self._quiesced is not None:
            yield self._quiesced
            return
        self.training_step.settle()  # a step that was refused is not counted: before the step is told
        with self.coordinator.quiesce(self._progress(), self.drain) as quiesced:
            assert quiesced is not None, "only the chief quiesces all processes by itself"
            self._take_in(quiesced)
            self._quiesced = quiesced
            try:
                yield quiesced
            finally:
                self._quiesced = None

    @contextmanager
    def evaluable(self) -> Iterator[None]:
        """Have all processes quiesced, every update done and the newest weights here."""
        with self.quiesced():
            self.drain()
            self.coordinator.placement.refresh()
            yield

    def readable(self) -> AbstractContextManager[None]:
        """Make every row readable by this process, in a block of `evaluable`."""
        return self.coordinator.placement.readable()

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Have all processes quiesced while this chief restores an earlier checkpoint; all follow it."""
        with self._quiesce() as quiesced:
            yield
            self.progress.others = ()  # what they had done by then was counted and saved
            quiesced.restored = Start(step=self.step, positions=tuple(self.batches.starts))

    def _take_in(self, quiesced: Quiesced) -> None:
        self.progress.others = quiesced.others
        self.progress.set_step(quiesced.step)

    # Saving

    def parts(self) -> list[Part]:
        """Return all parts of a checkpoint of this session."""
        incremental = self.config.keep.full_every > 1
        placement = self.coordinator.placement
        parts: list[Part] = [
            *self.model.features_parts(),
            *placement.parts(self.model, incremental=incremental, background=self.config.saves_in_background),
            StatePart("progress", self.progress.saved, self.progress.restore),
            # A stage with a large state has it in the position as texts; the manifest stays small.
            StatePart("position", self._positions, self._restore_positions, longest_text=4096),
            StatePart("metrics", self.metrics.state, self.metrics.restore),
        ]
        if self.log_places is not None:  # for exports: how far the log was published. Never restored.
            parts.append(StatePart("log_places", self.log_places, lambda _: None))
        return parts

    def _positions(self) -> Position:
        return joined_positions([self.batches.position, *(one.position for one in self.progress.others)])

    def _restore_positions(self, position: Position) -> None:
        if not self.restarts_data:
            self.batches.restore(position, self.progress.saved_order, rejoined=self.rejoined)

    def check_weights(self) -> None:
        """Check that the dense weights are worth saving.

        Raises:
            DivergedError: A weight is NaN or infinite.
        """
        for name, weight in self.model.weights().items():
            if not bool(weight.detach().isfinite().all()):
                raise DivergedError(
                    f"step {self.step} was not saved: the weight {name!r} is NaN or infinite. Restart from "
                    "the last checkpoint with a lower learning rate, or clip gradients."
                )

    def commit(self, position: Position) -> None:
        """Tell the source that all before a position is safe; as the chief, the other processes too."""
        self.batches.push(lambda: self.batches.stream.commit(position))
        self.coordinator.committed(position)

    # Ending

    def finish(self, run: TrainingRun, save_if_due: Callable[[], None]) -> None:
        """Say that this process has no more to do; as the chief, wait for the other processes."""
        self.drain()
        self.save_wanted = False
        outcome = Outcome(reason=run.stop_reason, interrupted=run.interrupted)
        while isinstance(found := self.coordinator.finish(outcome, self._progress(), save_if_due), Restore):
            self._roll_back_to(found.start)
        if found is not None:
            self._take_in(found)

    def leave(self, run: TrainingRun) -> None:
        """End this process's part, when all is done and saved, or the other workers take over its work."""
        queue, membership = self.batches.work_queue, self.coordinator.membership
        stopping = self.coordinator.status().stopping
        if queue is not None and run.interrupted and not membership.is_chief and not stopping:
            # Its work returns to the queue: it must not take another piece by reading ahead.
            queue.interrupt()
            self.batches.close_pipeline()
        outcome = Outcome(reason=run.stop_reason, interrupted=run.interrupted)
        if self.coordinator.leave(outcome, self.state()):
            self.batches.close_pipeline()  # nothing more is read, and the rows may be gone
            self.batches.stream.commit(self.batches.position)

    def close(self) -> None:
        self.batches.close()
        self.training_step.close()
        self.metrics.close()
        self.model.close()
