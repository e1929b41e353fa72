"""A session: one model with everything that trains it, in this process.

Built from a task, it can take steps, be saved and be restored. `Trainer` runs it.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monolith.checkpoint import DensePart, Part, StatePart, TablesPart
from monolith.data import Stream
from monolith.data.source import Position, commit_to
from monolith.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FeatureError,
    NonFiniteError,
    RestoreError,
)
from monolith.feature import Batch
from monolith.model import (
    EmbeddingCollection,
    EmbeddingOptimizer,
    PreparedBatch,
    WeightOptimizer,
    apply_gradients,
)
from monolith.observe import Metrics, Resting
from monolith.store import LocalStore, MakeStore, Store, default_stores
from monolith.table import AdmissionFilter, DumpableTable, TableStats
from monolith.train.config import TrainConfig
from monolith.train.every import Every
from monolith.train.expiring import RowExpiry
from monolith.train.hook import StepResult
from monolith.train.lane import Lane
from monolith.train.metrics.metric_set import MetricSet, WindowRow
from monolith.train.positions import split_position
from monolith.train.skipping import Skipping
from monolith.train.task import Mode, Outputs, Task

_log = logging.getLogger(__name__)

SHARE = 0.1
"""Of a processor, for whoever saves where training has them all."""


class _Read(NamedTuple):
    """A batch, and where the source stands after it."""

    batch: Batch
    position: Position


_Rows = list[PreparedBatch]


class Model:
    """A task's model with its tables, ready to be restored.

    Args:
        mode: Only a model that trains has optimizers.
        make_store: Where its rows live; by default in this process.
    """

    def __init__(self, task: Task, mode: Mode, *, seed: int, make_store: MakeStore | None = None) -> None:
        torch.manual_seed(seed)
        self.task = task
        self._mode = mode
        with nullcontext() if make_store is None else default_stores(make_store):
            self.module = task.model()
        self.collections = [m for m in self.module.modules() if isinstance(m, EmbeddingCollection)]
        self.stores: list[Store] = list(dict.fromkeys(c.store for c in self.collections))
        self.sparse: EmbeddingOptimizer | None = None
        self.dense: torch.optim.Optimizer | None = None
        if mode is Mode.TRAIN:
            if not self.collections:
                raise ConfigError(
                    f"task {task.name!r}: its model has no EmbeddingCollection, so there are no rows to train"
                )
            self.sparse = EmbeddingOptimizer(self.module)
            self.dense = task.dense_optimizer(self.module)
        self.module.train(mode is Mode.TRAIN)
        self._checked = False

    def parts(self, *, incremental: bool = False, beside: bool = False) -> list[Part]:
        """Return what a checkpoint keeps of the model; see `TablesPart`.

        Args:
            beside: Whether it is written while training goes on: by one thread, which rests where training
                has all processors, so that little is lost to it.
        """
        return [self.tables_part(incremental=incremental, beside=beside), self.dense_part()]

    def tables_part(
        self,
        *,
        incremental: bool = False,
        beside: bool = False,
        shard: tuple[int, int] | None = None,
        piece: tuple[int, int] | None = None,
    ) -> TablesPart:
        """Return what a checkpoint keeps of the rows; see `parts` and `TablesPart`."""
        tables, filters = self._tables()
        busy = torch.get_num_threads() >= (os.cpu_count() or 1)
        return TablesPart(
            tables,
            filters,
            shard=shard,
            piece=piece,
            incremental=incremental,
            write_workers=1 if beside else 4,
            write_progress=Resting(SHARE) if beside and busy else None,
        )

    def dense_part(self) -> DensePart:
        """Return what a checkpoint keeps of the dense half."""
        optimizers: dict[str, torch.optim.Optimizer] = {}
        if self.sparse is not None:
            optimizers["rows"] = self.sparse
        if self.dense is not None:
            optimizers["dense"] = self.dense
        return DensePart(self.module, optimizers, random=self.sparse is not None)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the dense weights that are trained, by name."""
        groups = [] if self.dense is None else self.dense.param_groups
        trained = {id(weight) for group in groups for weight in group["params"]}
        return {name: p for name, p in self.module.named_parameters() if id(p) in trained}

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds."""
        return {name: stats for store in self.stores for name, stats in store.stats().items()}

    def prepare(self, batch: Batch) -> _Rows:
        """Look the rows of a batch up, from any thread.

        Raises:
            FeatureError: The model reads a feature that the first batch does not have.
        """
        if not self._checked:
            self._check_features(batch)
        return [collection.prepare(batch) for collection in self.collections]

    def outputs(self, batch: Batch, rows: _Rows, *, otherwise: Callable[[], None] | None = None) -> Outputs:
        """Run the model on a batch whose rows were looked up.

        Args:
            otherwise: Called before the model looks rows up itself; see `EmbeddingCollection.hold`.
        """
        for collection, prepared in zip(self.collections, rows, strict=True):
            collection.hold(batch, prepared, otherwise)
        try:
            outputs = self.task.outputs(self.module, batch)
        finally:
            for collection in self.collections:
                collection.hold(batch, None)
        if self._mode is not Mode.PREDICT and not batch.labels and bool(outputs.loss.isnan()):
            raise DataError(
                f"task {self.task.name!r}: the batches to {self._mode.value} on have no labels; name their "
                "column in the BatchSpec's labels, or override outputs() if the loss needs none"
            )
        return outputs

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _check_features(self, batch: Batch) -> None:
        there = batch.ids.names
        for name in (name for collection in self.collections for name in collection.features):
            if name not in there:
                near = difflib.get_close_matches(name, there, n=1)
                raise FeatureError(
                    f"task {self.task.name!r}: the model reads feature {name!r}, which the batches do not "
                    f"have; they have {', '.join(there) or 'none'}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                    + " One that only some records have stands in BatchSpec's ids and optional."
                )
        self._checked = True

    def _tables(self) -> tuple[dict[str, DumpableTable], dict[str, AdmissionFilter]]:
        tables: dict[str, Any] = {}
        filters: dict[str, AdmissionFilter] = {}
        for store in self.stores:
            if not isinstance(store, LocalStore):
                raise ConfigError(f"a run in one process keeps its rows in a LocalStore, got {store!r}")
            for name in store.tables:
                if name in tables:
                    raise ConfigError(
                        f"two stores of the model have a table {name!r}; let the collections share one "
                        "store, or name their slots apart"
                    )
                tables[name] = store.table(name)
            filters |= store.filters
        return tables, filters


class Session:
    """A model, the data it trains on and how far it has come. Used by one thread.

    Args:
        window: Of its metrics: examples, or event time.
        report: Given "head/metric" and the row of each window that ends.
        clock: Unix seconds, which event times are held against.
        metrics: Where what became of expired rows is counted.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        *,
        report: Callable[[str, WindowRow], None] | None = None,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
    ) -> None:
        self.task = task
        self.config = config
        self.model = self._make_model()
        assert self.model.sparse is not None
        self._sparse: EmbeddingOptimizer = self.model.sparse
        self._dense: WeightOptimizer | None = self.model.dense
        self._updates = task.updates()
        self.metrics = HeadMetrics(task, Mode.TRAIN, window=config.metric_window, report=report)
        self.data: Stream[Batch] = self._open_data()
        self._position = self.data.position()
        self.expiry = RowExpiry(config.expiry, wall=clock, metrics=metrics)
        every = config.evict_every_steps
        self._evictions = None if every is None else Every(every)
        self._lane: Lane[_Read, _Rows] | None = None
        self._interrupted = False
        self._skipping = Skipping(config.max_skipped_in_a_row)
        self.examples = 0
        """Trained on so far, in all runs."""
        self.restarts_data = False
        """Whether a restore leaves the data where it is."""

    @property
    def step(self) -> int:
        return self._sparse.global_step

    @property
    def total_examples(self) -> int:
        """Trained on so far, in all runs and by everybody."""
        return self.examples

    @property
    def skipped(self) -> int:
        """Batches that were not trained on because of a loss or gradient that is not finite, in all runs."""
        return self._skipping.batches

    @property
    def total_skipped(self) -> int:
        """The same, by everybody."""
        return self.skipped

    def begin(self) -> None:
        """Make ready for a restore. Nothing to do in one process."""

    def ready(self) -> str | None:
        """Go on, now that everything is made or restored; return why not. Nothing to do in one process."""
        return None

    def together(self) -> AbstractContextManager[None]:
        """Hold back whoever else trains this model, while a moment is cut. Nobody, in one process."""
        return nullcontext()

    def dense_part(self) -> Part:
        """Return what a dense-only checkpoint keeps."""
        return self.model.dense_part()

    def parts(self) -> list[Part]:
        """Return everything that a checkpoint of this session keeps."""
        return [
            *self.model.parts(incremental=self.config.keep.full_every > 1, beside=self.config.saves_beside),
            StatePart("position", lambda: self._position, self._go_to),
            StatePart("progress", self._progress, self._set_progress),
            StatePart("metrics", self.metrics.state, self.metrics.restore),
        ]

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
            if found is None:
                if lane.exhausted:
                    self._position = (
                        self.data.position()
                    )  # past what came after the last batch, and made none
                lane.drain()
                if not self.examples and not self.skipped and not self._interrupted:
                    self._found_nothing()
                return None
            (batch, position), rows = found
            outputs = self._train(batch, rows, lane)
            self._position = position
        loss = outputs.loss.detach()
        predictions = {head: tensor.detach() for head, tensor in outputs.predictions.items()}
        self.examples += len(batch)
        self.expiry.observe(batch.ids)
        if self._evictions is not None and self._evictions.crossed(self.step):
            self.evict()
        return StepResult(self.step, batch, loss, predictions)

    def _train(self, batch: Batch, rows: _Rows, lane: Lane[_Read, _Rows]) -> Outputs | None:
        """Train on a batch; None where it was skipped, and everything is as before."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.module.buffers()]
        # Which updates a lookup in the step would find is a matter of time, unless all are done.
        settle = lane.drain if self.config.deterministic else None
        outputs = self.model.outputs(batch, rows, otherwise=settle)
        try:
            apply_gradients(outputs.loss, self._sparse, self._dense, self._updates, push=lane.push)
        except NonFiniteError as cause:
            for buffer, before in buffers:  # a forward pass changes them: the means of a batch norm
                buffer.copy_(before)
            self._skipping.note(cause, self.step, len(batch))
            return None
        self._skipping.note_trained()
        return outputs

    def check_weights(self) -> None:
        """See that the dense weights are worth saving.

        Raises:
            DivergedError: One is NaN or infinite.
        """
        for name, weight in self.model.weights().items():
            if not bool(weight.detach().isfinite().all()):
                raise DivergedError(
                    f"step {self.step} was not saved: the weight {name!r} is not finite, so the model is "
                    "spoiled. Go on from the last checkpoint with a lower learning rate, or clip gradients."
                )

    def evict(self) -> None:
        """Drop expired rows, after the updates so far; before a save, do so before `drain`.

        What was looked up ahead still has them, and a run that is restored would not.
        """
        now = self._expiry_time()
        if now is not None:
            self._open_lane().push(lambda: self._evict(now))

    def interrupt(self) -> None:
        """Wait for data no longer: a step that does is not taken. From any thread."""
        self._interrupted = True
        if self._lane is not None:
            self._lane.interrupt()

    def drain(self) -> None:
        """Return when all rows are up to date: before every save."""
        if self._lane is not None:
            self._lane.drain()

    def commit(self, position: Position) -> None:
        """Tell the source that everything before a position is safe."""
        self._open_lane().push(lambda: commit_to(self.data, position))

    @property
    def position(self) -> Position:
        """Where the data goes on after what was trained."""
        return self._position

    def go_on_from(self, step: int) -> None:
        """Count steps from here: what a restore found."""
        self._sparse.global_step = step
        if self._evictions is not None:
            self._evictions.begin(step)

    def close(self) -> None:
        self._close_lane()
        self.data.close()
        self.model.close()

    def _open_lane(self) -> Lane[_Read, _Rows]:
        if self._lane is None:
            config = self.config
            self._lane = Lane(
                self._read(),
                lambda read: self.model.prepare(read.batch),
                ahead=config.prefetch,
                behind=config.async_push,
                patience=None if config.deterministic else config.idle_after.total_seconds(),
                idle=self._idle,
            )
            if self._interrupted:
                self._lane.interrupt()
        return self._lane

    def _make_model(self) -> Model:
        return Model(self.task, Mode.TRAIN, seed=self.config.seed)

    def _open_data(self) -> Stream[Batch]:
        return self.task.dataset(Mode.TRAIN)

    def _found_nothing(self) -> None:
        """Called where the data ended, and nothing was ever trained."""
        raise DataError(
            f"task {self.task.name!r}: dataset(Mode.TRAIN) has no examples; nothing was trained or saved"
        )

    def _idle(self) -> None:
        """Called again and again while the data has nothing to say."""

    def _read(self) -> Iterator[_Read]:
        for batch in self.data:
            yield _Read(batch, self.data.position())

    def _expiry_time(self) -> int | None:
        """Return the time by which rows expire; None as long as nobody can tell."""
        return self.expiry.now()

    def _evict(self, now: int) -> None:
        self.expiry.evict(self.model.stores, now)

    def _close_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _go_to(self, position: Position) -> None:
        if not self.restarts_data:
            self._read_from(split_position(position, 1)[0])

    def _read_from(self, position: Position) -> None:
        self._close_lane()  # what was read ahead is not what follows
        self.data.restore(position)
        commit_to(self.data, position)  # a kill may have come between the checkpoint and its commit
        self._position = position

    def _progress(self) -> dict[str, Any]:
        return {
            "examples": self.total_examples,
            "skipped": self.total_skipped,
            "event_times": self.expiry.state(),
        }

    def _set_progress(self, saved: Mapping[str, Any]) -> None:
        self.examples = int(saved["examples"])
        self._skipping.batches = int(saved.get("skipped", 0))
        self.expiry.restore(saved.get("event_times", []))


class HeadMetrics:
    """The metrics of a task, made when the first batch shows what heads there are.

    Args:
        window: Examples or event time after which a row is reported; None counts from the start.
    """

    def __init__(
        self,
        task: Task,
        mode: Mode,
        *,
        window: Any = None,
        report: Callable[[str, WindowRow], None] | None = None,
    ) -> None:
        self._task = task
        self._wanted = task.metrics(mode)
        self._window = window
        self._report = report
        self._set: MetricSet | None = None
        self._saved: Mapping[str, Any] | None = None
        self.left_out = 0
        """Batches that are not measured, because a prediction is not finite."""

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Take in a batch as it was predicted; labels that are not predicted are passed over. A batch with a
        prediction that is not finite is left out, said and counted."""
        heads = [head for head in predictions if head in batch.labels]
        if self._set is None and heads:
            wanted = self._wanted if isinstance(self._wanted, Mapping) else dict.fromkeys(heads, self._wanted)
            self._set = MetricSet.named({h: wanted.get(h, ()) for h in heads}, window=self._window)
            if self._saved is not None:
                try:
                    self._set.restore(self._saved)
                except RestoreError as cause:  # of another window, for instance: no reason not to train
                    _log.warning("metrics begin anew: %s", cause)
                    self._set.reset()
                self._saved = None
        if self._set is None:
            return
        if bad := [head for head in heads if not bool(predictions[head].isfinite().all())]:
            self.left_out += 1
            if self.left_out == 1:
                _log.warning(
                    "metrics leave out a batch: predictions of %s are NaN or infinite. More are only counted",
                    ", ".join(bad),
                )
            return
        self._set.update(
            {head: predictions[head] for head in heads},
            {head: batch.labels[head] for head in heads},
            self._task.weights(batch),
            self._task.groups(batch),
            batch.ids.event_time,
        )
        self._tell()

    def values(self) -> dict[str, float]:
        return {} if self._set is None else self._set.values()

    def end(self) -> None:
        """Report the window that is open."""
        if self._set is not None and self._window is not None:
            self._set.close_windows()
            self._tell()

    def state(self) -> dict[str, Any]:
        if self._set is not None:
            return {"set": self._set.state()}
        return {"set": self._saved} if self._saved is not None else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved.get("set")
        self._set = None

    def _tell(self) -> None:
        if self._set is None or self._window is None:
            return
        for name, rows in self._set.take_rows().items():
            for row in rows:
                if self._report is not None:
                    self._report(name, row)
