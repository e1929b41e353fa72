"""A session: one model with everything that trains it, in this process.

It can take steps, be saved and be restored, together with its peers. `Trainer` makes and runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monolith.checkpoint import Part, StatePart
from monolith.data import Epochs, Shard, Stream, WorkQueueSource, as_stream
from monolith.data.source import Position
from monolith.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FeatureError,
    NonFiniteError,
    NotRepeatableError,
    NotShareableError,
)
from monolith.feature import Batch
from monolith.model import EmbeddingOptimizer, WeightOptimizer, apply_gradients
from monolith.observe import Metrics
from monolith.runtime.coordinator import Coordinator, Gathered, LastCheckpoint, Staleness, Start, WorkerState
from monolith.runtime.prefetch import PrefetchPipeline, Silence
from monolith.runtime.progress import (
    RowExpiry,
    Skipping,
    check_not_all_skipped,
    joined_positions,
    order_of,
    positions_of,
    same_order,
    split_position,
)
from monolith.runtime.publish_shard import Learned, newest_event
from monolith.sync.messages import LearnedUpTo
from monolith.train.config import TrainConfig
from monolith.train.hook import Every, StepResult, TrainingRun
from monolith.train.metrics.heads import HeadMetrics
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.model import LookedUp, Model
from monolith.train.task import Mode, Outputs, Task
from monolith.wire.bulk import Traffic

_log = logging.getLogger(__name__)

RUN_IS_OVER = "the run is over"


LIVE_UPDATE_AFTER_S = 0.002
"""How long the update of a batch of a live stream waits for the next batch, which it could go along with.
Servers learn of it only after the update, so the wait is part of every answer's age."""


class _Read(NamedTuple):
    """A batch, and where the source stands after it."""

    batch: Batch
    position: Position
    at: float
    """When it was read, in Unix seconds."""


_Lane = PrefetchPipeline[
    _Read, Any
]  # what was looked up; ahead of that, if rows are to be fresh, what was gathered


def open_data(task: Task, share: Shard, epochs: Epochs | None = None) -> Stream[Batch]:
    """Return the data to train on, or one share of it.

    Args:
        epochs: How often it is read; None leaves that to the task.

    Raises:
        ConfigError: It cannot be shared out, or not be read several times.
    """
    data = as_stream(task.dataset(Mode.TRAIN))
    try:
        if epochs is not None:
            data.read_epochs(epochs)
        if share.workers > 1:
            data.read_shard(share)
    except BaseException as cause:
        data.close()
        if isinstance(cause, NotRepeatableError):
            raise ConfigError(
                f"train.epochs: task {task.name!r}: {cause}. Leave train.epochs out, or use a source of "
                "monolith.data that ends, such as FileSource or MemorySource."
            ) from cause
        if not isinstance(cause, NotShareableError):
            raise
        raise ConfigError(
            f"task {task.name!r}: its data cannot be shared out, so {share.workers} workers would each train "
            f"on all of it: {cause}. Add that method, or use a source of monolith.data, such as FileSource "
            "or KafkaSource."
        ) from cause
    return data


def _handing(stream: Stream[Batch], peers: Coordinator, config: TrainConfig) -> WorkQueueSource | None:
    """Return what gives back the work of workers that come and go; None where they do not.

    Raises:
        ConfigError: More may come than there are shares of the data.
    """
    found = stream.work_queue if peers.may_change and config.model_dir else None
    if found is None and peers.more_may_come:
        raise ConfigError(
            "cluster.max_workers: workers can come to a run only where its data hands out work and it has a "
            "model_dir: a FileSource on a queue, a KafkaSource without an assignment, or the data service, "
            "without rebatch, shuffle and take of a pipeline on top of it. Set it to num_workers."
        )
    return found


class Session:
    """A model, the data it trains on and how far it has come. Used by one thread.

    Args:
        model: Of which the session closes everything in the end.
        stream: The data that this process trains on, likewise.
        peers: Whom it trains with.
        report: Given "head/metric" and the row of each window that ends.
        clock: Unix seconds, which event times are held against.
        metrics: Where what became of expired rows is counted.
    """

    def __init__(
        self,
        model: Model,
        stream: Stream[Batch],
        peers: Coordinator,
        config: TrainConfig,
        *,
        report: Callable[[str, WindowRow], None] | None = None,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
    ) -> None:
        assert model.sparse is not None
        self.task = model.task
        self.model = model
        self.data = stream
        self.config = config
        self._peers = peers
        self._sparse: EmbeddingOptimizer = model.sparse
        self._dense: WeightOptimizer | None = peers.attach(model)
        self._updates = model.task.updates()
        self.metrics = HeadMetrics(model.task, Mode.TRAIN, window=config.metric_window, report=report)
        self._handing = _handing(stream, peers, config)
        self._dealing = self._handing if self._handing is not None and self._handing.chief_assigns else None
        if self._dealing is not None:
            self._dealing.defer_to_chief()
        self._position = stream.position()
        self.expiry = RowExpiry(config.expiry, wall=clock, metrics=metrics)
        self._clock = clock
        self.learned: Learned | None = None
        """Told what rows have learned from, when their update is done; on the thread that updates them."""
        self.log_places: Callable[[], Mapping[str, Any]] | None = None
        """Says for a checkpoint how far the log of each share is published, where somebody publishes."""
        self.save_due: Callable[[], bool] = lambda: False
        """Says whether a save that failed is to be tried again, though there is no data to take a step."""
        self.idle: Callable[[], None] = lambda: None
        """Called now and then while there is no data, by the training thread."""
        here = model.is_local and not peers.in_step
        if config.fresh_rows and config.prefetch and not here:
            raise ConfigError(
                "train.fresh_rows: rows of this run are on parameter servers or dealt to ranks, and are "
                "looked up ahead of the step. Set train.prefetch to 0 to look them up in the step, or leave "
                "train.fresh_rows out."
            )
        self._fresh = config.wants_fresh_rows and here
        """Whether rows are looked up when a step begins, after the updates of those before it."""
        every = config.evict_every_steps
        self._evictions = None if every is None else Every(every)
        self._lane: _Lane | None = None
        self._moves = False
        """Whether the data is still to be read from `_position`, which was dealt."""
        self._paused = False
        """Whether the last step was not taken, for a save that somebody waits for."""
        self._handed_back = False
        """Whether work was given back since the data was last read from where it stands: it may have ended
        before."""
        self._interrupted = False
        self._holds = False
        """Whether the others are held back now."""
        self._drains = False
        """Whether somebody waits for the lane to be done with what it was asked for."""
        asked = config.eval_predictions
        self._predicts_in_eval = asked == "always" or (asked == "auto" and model.differs_in_eval)
        """Whether each batch is predicted in eval mode, too, for metrics."""
        self._skipping = Skipping(config.max_skipped_in_a_row)
        self._step = 0
        self.examples = 0
        """Trained on so far, in all runs."""
        self._heads: tuple[str, ...] = ()
        """The labels of the last batch that had some."""
        self._saved_order: Mapping[str, Any] | None = None
        """What the order of the data followed from when it was saved."""
        self._restored_examples = self._restored_skipped = 0
        self._starts: list[Position] = []
        """Where the data of each worker goes on, if a checkpoint said so."""
        self._others: tuple[WorkerState, ...] = ()
        """What the others said of themselves when all stood still the last time."""
        self.restarts_data = False
        """Whether a restore leaves the data where it is."""
        self._meetings = 0
        """How often the others were met since the last step."""

    @property
    def step(self) -> int:
        """The global step: how many steps the model has taken, as far as is known here."""
        return self._step

    def _be_at(self, step: int) -> None:
        """Be at a global step; only this says which. The optimizer of rows keeps it for checkpoints."""
        self._step = self._sparse.global_step = step

    @property
    def total_examples(self) -> int:
        """Trained on so far, in all runs and by everybody."""
        return self.examples + sum(state.examples for state in self._others)

    @property
    def skipped(self) -> int:
        """Batches that were not trained on because of a loss or gradient that is not finite, in all runs."""
        return self._skipping.batches

    @property
    def total_skipped(self) -> int:
        """The same, by everybody."""
        return self.skipped + sum(state.skipped for state in self._others)

    @property
    def staleness(self) -> Staleness | None:
        """How old the dense weights are that this process computes with; None where there are no others."""
        return self._peers.staleness()

    @property
    def traffic(self) -> Traffic | None:
        """What came over the wire and went there; None where there are no others. From any thread."""
        return self._peers.traffic()

    @property
    def standbys(self) -> str:
        """Which shards of the parameter servers lack a standby, in words; empty if none does."""
        return self._peers.standbys()

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    def fraction_read(self) -> float | None:
        """Return which part of its data this process has trained on; None where nobody knows. From any
        thread."""
        return self.data.fraction_read(self._position)

    @property
    def live(self) -> bool:
        """Whether its data has events as they happen, so that it can be behind the clock."""
        return self.data.live is not False

    @property
    def in_step(self) -> bool:
        """Whether others take every step together with this process."""
        return self._peers.in_step

    def state(self) -> WorkerState:
        """Return what a checkpoint keeps of this process, beside the model."""
        return WorkerState(
            position=self._position,
            examples=self.examples - self._restored_examples,
            skipped=self.skipped - self._restored_skipped,
            event_time=self.expiry.now(),
        )

    # Together with others

    def begin(self) -> None:
        """Make ready for a restore."""
        self._peers.begin(hands_out=self._handing is not None)
        self.go_on_from(0)

    def ready(self) -> str | None:
        """Go on, now that everything is made or restored; return why not."""
        if self._handing is not None:
            self._handing.defer_to_chief()
            if self._peers.leads and not self._starts and not self._peers.resumed:
                self._share_out_anew([])
        found = Start(
            step=self._step,
            positions=tuple(self._starts),
            hands_out=self._handing is not None,
            deals_out=self._dealing is not None,
        )
        start = self._peers.open(found, self)
        if start is None:
            return RUN_IS_OVER
        self._be_at(start.step)
        if self._peers.leads:
            self._count_on(start)
            if self._handing is not None and self._peers.resumed:
                self._read_from(start.positions[0] if start.back is None else start.back.position)
        elif start.back is not None:
            self._read_from(start.back.position)
            self.examples, self._skipping.batches = start.back.examples, start.back.skipped
        elif start.positions:
            self._read_from(start.positions[self._peers.share.worker])
        return None

    def _count_on(self, start: Start) -> None:
        """Count on from what was saved, as the one that leads; in a run that goes on others count theirs."""
        self._others = start.others
        self.examples -= sum(state.examples for state in start.others)
        self._skipping.batches -= sum(state.skipped for state in start.others)
        if start.back is not None:
            self._restored_examples = self.examples - start.back.examples
            self._restored_skipped = self.skipped - start.back.skipped

    def meet(self, run: TrainingRun) -> bool:
        """Halt, stop or fail as the others do, between two steps; return whether all stop here."""
        reason = self._meet()
        if (safe := self._peers.safe()) is not None:
            self.commit(safe)
        if reason is not None:
            run.request_stop(reason)
        return reason is not None

    def _meet(self) -> str | None:
        self._meetings += 1
        return self._peers.meet(self)

    @property
    def resumed(self) -> bool:
        """Whether this process, which leads, came back to others who went on without it."""
        return self._peers.resumed

    @property
    def save_wanted(self) -> bool:
        """Whether somebody waits for a save, where this process leads."""
        return self._peers.save_wanted

    def give_back(self, position: Position) -> Position:
        """Have the data hand out what another worker has not done."""
        assert self._handing is not None, "the data does not hand out work"
        self._handed_back = True
        return self._handing.give_back(position)

    def deal(self, positions: Sequence[Position], workers: int) -> list[Position]:
        """Have the data deal what some workers had to so many."""
        assert self._dealing is not None, "the data deals out nothing"
        return self._dealing.reassign(positions, workers)

    def move_to(self, position: Position) -> None:
        """Go on from what was dealt to this process, before another step is taken."""
        self._position, self._moves = position, True

    def wait_for_more(self, run: TrainingRun, look: Callable[[], None]) -> bool:
        """Do what is to be done where a step found nothing; return whether another may.

        Args:
            look: Saves if it is time to, or somebody waits for it.
        """
        if run.stop_reason is not None or self._interrupted:
            return False
        if self._paused or self._moves:
            self._paused = False
            look()
            return True
        if not self._handed_back and not self._peers.wait_for_more(self, look):
            return False
        self._close_lane()  # its source goes on where it has ended
        return True

    def outlives(self, error: Exception) -> bool:
        """Whether training goes on although a save failed with this: somebody was lost, and will be back."""
        return self._peers.outlives(error)

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Say where what is lost is restored from. It may be asked from any thread."""
        self._peers.restore_from(last)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold back whoever else trains this model, while a moment is cut; within a block that does so
        already, nothing more."""
        if self._holds:
            yield
            return
        with self._peers.halted(self) as gathered:
            self._take_in(gathered)
            self._holds = True
            try:
                yield
            finally:
                self._holds = False

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Hold the others back, with every update done and the newest weights here, to look at the model."""
        with self.together():
            self.drain()
            self._peers.refresh()
            yield

    def looking(self) -> AbstractContextManager[None]:
        """Have every row within reach, in a block of `standing_still`, to evaluate the model."""
        return self._peers.looking()

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Hold the others while this process, which leads, restores an earlier checkpoint; all go on from
        it."""
        with self.together():
            yield
            self._others = ()  # what they had done by then was counted and saved
            self._peers.go_back(Start(step=self._step, positions=tuple(self._starts)))

    def go_back(self, start: Start) -> None:
        self._be_at(start.step)
        if self._evictions is not None:
            self._evictions.begin(start.step)
        if start.positions:
            self._read_from(start.positions[self._peers.share.worker])
        self.examples = self._skipping.batches = 0
        self._restored_examples = self._restored_skipped = 0

    def gather(self, run: TrainingRun, look: Callable[[], None]) -> None:
        """Wait for the others, where this process leads: it has no more to do.

        Args:
            look: Saves if it is time to.
        """
        self.drain()
        gathered = self._peers.gather(self, run, look)
        if gathered is not None:
            self._take_in(gathered)

    def leave(self, run: TrainingRun) -> None:
        """End this process's part, when all is done and saved; or where others go on with it."""
        if self._handing is not None and self._peers.leaves_work(run):
            self._handing.interrupt()
            self._close_lane()
        if self._peers.leave(run, self.state()):
            self._close_lane()  # nothing more is read, and the rows may be gone
            self.data.commit(self._position)

    def _take_in(self, gathered: Gathered) -> None:
        self._others = gathered.others
        self._be_at(gathered.step)

    # Saving and training

    def dense_part(self) -> Part:
        """Return what a dense-only checkpoint keeps."""
        return self._peers.dense_part(self.model)

    def parts(self) -> list[Part]:
        """Return everything that a checkpoint of this session keeps."""
        incremental = self.config.keep.full_every > 1
        return [
            *self.model.features_parts(),
            *self._peers.parts(self.model, incremental=incremental, beside=self.config.saves_beside),
            StatePart("progress", self._progress, self._set_progress),
            StatePart("position", self._positions, self._go_to),
            StatePart("metrics", self.metrics.state, self.metrics.restore),
            *self._log_parts(),
        ]

    def _log_parts(self) -> list[Part]:
        """Return what a checkpoint keeps of what was published, for exports; nobody restores it."""
        if self.log_places is None:
            return []
        return [StatePart("log_places", self.log_places, lambda _: None)]

    def take_step(self) -> StepResult | None:
        """Predict the next batch, then train on it; None at the end of the data.

        Batches whose loss or gradient is not finite are passed over.

        Raises:
            DivergedError: There were too many of them in a row.
        """
        lane = self._open_lane()
        outputs: Outputs | None = None
        while outputs is None:
            found = lane.next()
            if found is None and (self._paused or self._moves):
                return None
            if found is None:
                if (
                    lane.exhausted and not self.in_step
                ):  # there, a batch may be left that others had no step for
                    self._position = (
                        self.data.position()
                    )  # past what came after the last batch, and made none
                lane.drain()
                if not self.examples and not self.skipped and not self._interrupted:
                    self._found_nothing()
                return None
            if self._meetings > 1:  # it waited: for data, for its turn in a slow start, at a barrier
                self._peers.refresh()
            self._meetings = 0
            (batch, position, read_at), rows = found
            outputs = self._train(batch, rows, lane)
            self._position = position
        loss = outputs.loss.detach()
        predictions = {head: tensor.detach() for head, tensor in outputs.predictions.items()}
        self.examples += len(batch)
        self._heads = tuple(batch.labels) or self._heads
        self.expiry.observe(batch.ids)
        if self.learned is not None:
            self._tell_learned(self.learned, batch, read_at, lane)
        if self._evictions is not None and self._evictions.crossed(self.step):
            self.evict()
        return StepResult(self.step, batch, loss, predictions)

    def _tell_learned(self, tell: Learned, batch: Batch, read_at: float, lane: _Lane) -> None:
        """Say what rows have learned from, after the update of this step, which is on its way."""
        learned = LearnedUpTo(
            step=self.step,
            watermark=self.expiry.now() or 0,
            event_at=newest_event(batch.ids),
            read_at=read_at,
            trained_at=self._clock(),
        )
        lane.push(lambda: tell(learned))

    def _train(self, batch: Batch, rows: LookedUp, lane: _Lane) -> Outputs | None:
        """Train on a batch; None where it was skipped, and everything is as before."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.module.buffers()]
        # Which updates a lookup in the step would find is a matter of time, unless all are done.
        settle = lane.drain if self.config.deterministic else None
        if self.in_step:
            settle = self._refuse_other_ids
        said = self._said_in_eval(batch, rows, settle)
        outputs = self.model.outputs(batch, rows, otherwise=settle)
        if said is not None:
            outputs = Outputs(outputs.loss, said)
        try:
            apply_gradients(
                outputs.loss,
                self._sparse,
                self._dense,
                self._updates,
                together=self._peers.together,
                examples=len(batch),
                push=lane.push,
                count=self._count,
            )
        except NonFiniteError as cause:
            for buffer, before in buffers:  # a forward pass changes them: the means of a batch norm
                buffer.copy_(before)
            self._skipping.note(cause, self.step, batch)
            return None
        self._skipping.note_trained()
        return outputs

    def _said_in_eval(
        self, batch: Batch, rows: LookedUp, settle: Callable[[], None] | None
    ) -> Mapping[str, Tensor] | None:
        """Return what the model says of a batch in eval mode; None where that is what it says in training."""
        if not self._predicts_in_eval:
            return None
        with self.model.evaluating(), torch.no_grad():
            return self.model.outputs(batch, rows, otherwise=settle).predictions

    def _count(self) -> int:
        """Return which step this is, now that the weights took it."""
        self._be_at(self._peers.count(self._step))
        return self._step

    def check_weights(self) -> None:
        """See that the dense weights are worth saving.

        Raises:
            DivergedError: One is NaN or infinite.
        """
        for name, weight in self.model.weights().items():
            if not bool(weight.detach().isfinite().all()):
                raise DivergedError(
                    f"step {self.step} was not saved: the weight {name!r} is NaN or infinite. Restart from "
                    "the last checkpoint with a lower learning rate, or clip gradients."
                )

    def evict(self) -> None:
        """Drop expired rows, after the updates so far; before a save, do so before `drain`.

        What was looked up ahead still has them, and a run that is restored would not.
        """
        if not self._peers.leads:
            return
        if self.in_step:  # all of them, at the same place between their updates
            with self.together():
                if (now := self._expiry_time()) is not None:
                    self.expiry.evict(self.model.stores, now)
            return
        now = self._expiry_time()
        if now is not None:
            self._open_lane().push(lambda: self.expiry.evict(self.model.stores, now))

    def interrupt(self) -> None:
        """Wait for data no longer: a step that does is not taken. From any thread."""
        self._interrupted = True
        if self._lane is not None and not self.in_step:  # those in step hear of it first
            self._lane.interrupt()

    def drain(self) -> None:
        """Return when all rows are up to date: before every save."""
        if self._lane is not None:
            self._drains = True
            self._lane.drain()
            self._drains = False

    def commit(self, position: Position) -> None:
        """Tell the source that everything before a position is safe, and the others theirs."""
        self._open_lane().push(lambda: self.data.commit(position))
        self._peers.note_saved(position)

    @property
    def position(self) -> Position:
        """Where the data goes on after what was trained."""
        return self._position

    def go_on_from(self, step: int) -> None:
        """Count steps from here: what a restore found."""
        self._be_at(step)
        self._peers.go_to(step)
        if self._evictions is not None:
            self._evictions.begin(step)

    def close(self) -> None:
        self._close_lane()
        self.data.close()
        self.model.close()

    def _open_lane(self) -> _Lane:
        if self._moves:
            self._moves = False
            self._go_on_with_what_was_dealt()
        if self._lane is None:
            config, fresh = self.config, self._fresh
            self._handed_back = False
            waits = config.deterministic and self._handing is None
            items: Iterator[_Read | Silence] = self._read()
            if self.in_step:
                items = self._peers.read_in_step(
                    self._read(),
                    every=config.idle_after.total_seconds(),
                    pressed=lambda: self._interrupted or self._drains,
                    silences=not config.deterministic,
                )
            self._lane = PrefetchPipeline(
                items,
                lambda read: (self.model.gather if fresh else self.model.prepare)(read.batch),
                (lambda read, found: self.model.prepare(read.batch, found)) if fresh else None,
                ahead=config.prefetch,
                behind=config.async_push,
                patience=None if waits else config.idle_after.total_seconds(),
                idle=self._idle,
                threaded=self._handing is not None,  # it may wait for what another worker has
                in_step=self.in_step,
                update_after=LIVE_UPDATE_AFTER_S if self.data.live and not waits else None,
            )
            if self._interrupted and not self.in_step:
                self._lane.interrupt()
        return self._lane

    def _found_nothing(self) -> None:
        """Refuse data that ended where nothing was ever trained; the others may have some."""
        share = self._peers.share
        if share.workers == 1:
            check_not_all_skipped(0, self.data.bad_records())
            raise DataError(
                f"task {self.task.name!r}: dataset(Mode.TRAIN) has no examples; nothing was trained or saved"
            )
        if self.in_step and not self.step:
            raise DataError(
                f"task {self.task.name!r}: nothing was trained: {share.workers} ranks take their steps "
                "together, and one of them has no data. Each file is read by one rank alone: cut the data "
                f"into {share.workers} files or more, train with fewer ranks, or with parameter servers, "
                "whose workers do not wait for each other."
            )
        _log.warning(
            "worker %d trained on no examples: its share of the data is empty, or was trained on before a "
            "restart",
            share.worker,
        )

    def _idle(self) -> bool:
        """Called again and again while the data has nothing to say; return whether to stop waiting."""
        self.idle()
        if self._meet() is not None:
            self._interrupted = True
            if self._lane is not None:
                self._lane.interrupt()
        self._paused = self._peers.save_wanted or (not self.in_step and self.save_due())
        return self._paused or self._moves

    def _refuse_other_ids(self) -> None:
        raise FeatureError(
            f"task {self.task.name!r}: the model reads other ids than those of the batch it was given, which "
            "ranks look up together ahead of the step. Change ids in the dataset."
        )

    def _read(self) -> Iterator[_Read]:
        for batch in self.data:
            yield _Read(batch, self.data.position(), self._clock())

    def _expiry_time(self) -> int | None:
        """Return the time by which rows expire; None as long as nobody can tell.

        Of several workers the one with the oldest data says it, so that the rows it trains live. What the
        others have reached is known from the last time that all stood still.
        """
        times = [self.expiry.now(), *(state.event_time for state in self._others)]
        return min((time for time in times if time is not None), default=None)

    def _close_lane(self) -> bool:
        """Read no more ahead; return whether nobody reads the data now."""
        lane, self._lane = self._lane, None
        return lane is None or lane.close()

    def _go_on_with_what_was_dealt(self) -> None:
        assert self._dealing is not None
        self._dealing.interrupt()
        if not self._close_lane():
            raise DataError(
                f"task {self.task.name!r}: its data is still being read, so what was dealt to this worker "
                "cannot be read instead; it resumes from the last checkpoint when it is started again"
            )
        self.data.restore(self._position)

    def _positions(self) -> Position:
        return joined_positions([self._position, *(state.position for state in self._others)])

    def _go_to(self, position: Position) -> None:
        if self.restarts_data:
            return
        share = self._peers.share
        self._close_lane()  # it may read the data
        resumed = self._peers.resumed
        with same_order(self._saved_order, order_of(self.config)):
            if self._handing is None:
                self._starts = split_position(position, share.workers, self.data, resumed=resumed)
                self._read_from(self._starts[share.worker])
            elif not resumed:  # otherwise the others have what they have
                self._share_out_anew(positions_of(position))

    def _share_out_anew(self, positions: Sequence[Position]) -> None:
        """Have data that hands out work take everything back, but for what these positions hold."""
        share = self._peers.share
        if self._dealing is None:
            self._starts = self.data.redistribute(positions, share.workers)
        else:
            everything = self._dealing.collect(positions)
            self._starts = [everything, *[self._dealing.give_back(everything)] * (share.workers - 1)]
        self._read_from(self._starts[share.worker])

    def _read_from(self, position: Position) -> None:
        self._close_lane()  # what was read ahead is not what follows
        self._moves = False
        self.data.restore(position)
        self.data.commit(position)  # a kill may have come between the checkpoint and its commit
        self._position = position

    def _progress(self) -> dict[str, Any]:
        return {
            "examples": self.total_examples,
            "skipped": self.total_skipped,
            "event_times": self.expiry.state(),
            "heads": list(self._heads),
            "order": order_of(self.config),
        }

    def _set_progress(self, saved: Mapping[str, Any]) -> None:
        self.examples = int(saved["examples"])
        self._skipping.batches = int(saved.get("skipped", 0))
        self._restored_examples, self._restored_skipped = self.examples, self.skipped
        self.expiry.restore(saved.get("event_times", []))
        self._heads = tuple(saved.get("heads", ()))
        self._saved_order = saved.get("order")
