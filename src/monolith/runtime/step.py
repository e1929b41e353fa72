"""One training step, from a batch to updated parameters.

On a GPU that holds the rows, steps are replayed from graphs (`StepGraph`). Such a step is launched and
counted at once, and its outcome is known a few steps later (`settle`): until then the host waits for nothing.

    take    launch step 7 ──► count it ──► settle step 4: measure its predictions; or, if its batch was
                                           refused on the device, count one step less and one batch skipped
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from monolith.cuda.device import is_full
from monolith.errors import AcceleratorError, DataError, FeatureError, NonFiniteError
from monolith.feature import Batch
from monolith.model import EmbeddingOptimizer, PreparedBatch, apply_gradients
from monolith.model.step_graph import GraphedStep, SentBatch, StepGraph, Ungraphed
from monolith.runtime.batches import ReadBatch, TrainingBatches
from monolith.runtime.coordinator import Coordinator
from monolith.runtime.progress import RunProgress, check_not_all_skipped
from monolith.runtime.publish_shard import Learned, newest_event
from monolith.sync.messages import LearnedUpTo
from monolith.table.cuda.hot_rows import HotCounts
from monolith.train.hook import StepResult
from monolith.train.model import Model
from monolith.train.task import Outputs, Task

_log = logging.getLogger(__name__)

_BEHIND = 3
"""Steps that may be launched before the outcome of the first of them is looked at. Always so many, and not as
many as have arrived: what a run does must not depend on timing."""
_LOOK_EVERY = 64
"""Batches after which the run looks at how many of them were not replayed."""
_FEW = _LOOK_EVERY // 8
"""So many of them are not worth a warning."""
_ADVICE = {
    Ungraphed.OTHER_SIZE: "Have the dataset give batches of one size, with filters before batches are made. "
    "A size is the number of examples, and that of the IDs of each table, padded",
    Ungraphed.NO_IDS: "All histories of such a batch are empty: train on larger batches",
    Ungraphed.NO_ROOM: "Give rows more memory (train.device_memory_bytes; memory_bytes of tables that are "
    "full), or train on smaller batches",
}
"""What to do about batches that are not replayed; all other reasons pass, or the log has them already."""
_COST = "Launching one kernel after the other makes training several times slower if the model is small"


class TrainingStep:
    """Takes the training steps of one process.

        result = step.take()                     # None: no batch, because the data ended or waiting stopped
        result.step, result.loss                 # scalar; predictions: head -> (batch,), before the update

    Args:
        clock: Unix seconds, for publishing when rows were trained.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        model: Model,
        batches: TrainingBatches,
        progress: RunProgress,
        *,
        clock: Callable[[], float],
    ) -> None:
        assert model.sparse is not None
        self._model = model
        self._membership = coordinator.membership
        self._placement = coordinator.placement
        self._batches = batches
        self._progress = progress
        self._config = config = progress.config
        self._clock = clock
        self._sparse: EmbeddingOptimizer = model.sparse
        self._dense = self._placement.attach(model)
        self._modules = list(model.module.modules())  # to find them takes longer than to save their buffers
        self._updates = model.task.updates()
        asked = config.eval_predictions
        self._predicts_in_eval = asked == "always" or (asked == "auto" and model.differs_in_eval)
        """Whether each batch is predicted in eval mode, too, for metrics."""
        self.learned: Learned | None = None
        """Told what rows have learned from, once their update is done; on the thread that updates them."""
        self.at_steps = 0
        """How often the coordinator was asked since the last step; more than once if this process waited."""
        self.paused = False
        """Whether waiting for data stopped for a save, so that the data has not ended."""
        self.measure: Callable[[Mapping[str, Tensor], Batch, Mapping[str, bool]], None] = lambda *_: None
        """Given the predictions of steps that were launched as graphs, in host memory, once they are known to
        be trained; and whether those of each head are finite."""
        self.check: Callable[[Mapping[str, Tensor], Batch], object] | None = None
        """Given the predictions of the first batch, before a step is taken on it; of a step that was launched
        as a graph, once they are known. Raises an error if the run would end by one later."""
        self._unsettled: deque[tuple[GraphedStep, Batch]] = deque()
        self._schedule_ahead = 0  # steps that the schedule has moved for and that were refused
        self._said_captured = False
        self._not_captured = False
        """Whether the run was to replay its steps, and could not."""
        self._sent = 0
        """Batches that could have been replayed."""
        self._ungraphed: Counter[Ungraphed] = Counter()
        """How many of them were not, when the run looked last."""
        self._told: set[Ungraphed] = set()
        self._graph = self._make_graph()
        # All steps are taken on one stream, those without a graph, too.
        self._on_stream: Callable[[], AbstractContextManager[object]] = (
            nullcontext if self._graph is None else self._graph.on_stream
        )
        if self._graph is not None:
            batches.send, batches.send_ahead = self._send, bool(self._graph.hot_rows)

    def take(self) -> StepResult | None:
        """Predict the next batch, then train on it; None if there is no batch for now.

        Batches whose loss or gradient is not finite are skipped: the next one is taken instead.

        Raises:
            DivergedError: Too many batches in a row were skipped.
        """
        batches, progress = self._batches, self._progress
        while True:
            found = batches.next()
            if found is None:
                self._note_no_batch()
                return None
            # This process has waited: for data, in a slow start, at a barrier. The other workers may have
            # trained meanwhile, so its dense weights are older than `dense.max_staleness` allows.
            if self.at_steps > 1:
                self._placement.refresh()
            self.at_steps = 0

            read, rows = found
            batch = read.batch
            if isinstance(rows, SentBatch):
                assert self._graph is not None
                if (result := self._take_graphed(self._graph, read, rows)) is not None:
                    return result
            # A forward pass changes buffers (the running means of a batch norm). A skipped batch must not.
            held = [one for module in self._modules for one in module._buffers.values() if one is not None]
            buffers = [(buffer, buffer.clone()) for buffer in held]
            # A model may look up further IDs in its forward pass. Which updates such a lookup sees depends
            # on timing, unless all of them are done. In lockstep it would be a collective call of one rank.
            before_lookup = batches.drain if self._config.deterministic else None
            if self._membership.lockstep:
                before_lookup = self._refuse_other_ids

            # Ranks that have no data for this step take part in every exchange, without a forward pass.
            outputs: Outputs | None = None
            with self._on_stream():
                if isinstance(rows, SentBatch):
                    assert self._graph is not None
                    rows = self._graph.look_up(rows)
                if len(batch) or not self._membership.lockstep:
                    outputs = self._outputs(batch, rows, before_lookup)
                    if self.check is not None and bool(outputs.loss.detach().isfinite()):  # or it is skipped
                        self._check(outputs.predictions, batch)
                try:
                    # Dense weights are updated here and now; rows by `push`, behind the next lookup. The step
                    # is counted in between, because server 0 counts a step when it takes the dense gradients.
                    apply_gradients(
                        None if outputs is None else outputs.loss,
                        self._sparse,
                        self._dense,
                        self._updates,
                        together=self._placement.averaging,
                        examples=len(batch),
                        push=batches.push,
                        count=self._count,
                    )
                except NonFiniteError as cause:
                    for buffer, before in buffers:
                        buffer.copy_(before)
                    progress.skipping.note(cause, progress.step, batch)
                    batches.note_trained(read)
                    continue
            break

        progress.skipping.note_trained()
        self._note_trained(read)
        if outputs is None:
            assert self._placement.averaging is not None
            return StepResult(progress.step, batch, self._placement.averaging.loss, to_measure=False)
        loss = outputs.loss.detach()
        predictions = {head: tensor.detach() for head, tensor in outputs.predictions.items()}
        return StepResult(progress.step, batch, loss, predictions)

    def settle(self, keep: int = 0) -> None:
        """Look at the outcome of steps that were launched as graphs; waits for the device.

        Args:
            keep: So many of the newest may stay unknown.

        Raises:
            DivergedError: Too many batches in a row were refused.
        """
        progress = self._progress
        while len(self._unsettled) > keep:
            step, batch = self._unsettled.popleft()
            found = step.wait()
            if found.trouble is None:
                progress.skipping.note_trained()
                self._check(found.predictions, batch)
                self.measure(found.predictions, batch, found.finite)
                continue
            # The batch left no trace on the device, and leaves none here. Only a schedule of learning rates
            # was one step ahead for a few steps: it waits now.
            assert self._graph is not None
            self._graph.refused()
            progress.set_step(progress.step - 1)
            progress.examples -= len(batch)
            self._schedule_ahead += 1
            progress.skipping.note(NonFiniteError(found.trouble), progress.step, batch)

    @property
    def replays(self) -> bool:
        """Whether steps are replayed from graphs, if the model lets them."""
        return self._graph is not None

    @property
    def replayed(self) -> float | None:
        """The fraction of batches so far that was replayed; None if none was to be."""
        if self._graph is None:
            return 0.0 if self._not_captured else None
        return self._graph.replays / max(self._graph.replays + self._graph.ungraphed.total(), 1)

    def close(self) -> None:
        """Drop the graphs of steps; none is taken afterwards."""
        self._unsettled.clear()
        if self._graph is not None:
            if self._sent:
                found = self._graph.ungraphed.most_common()
                others = ", ".join(f"{count:,} {why}" for why, count in found if count)
                _log.info(
                    "%.1f%% of %s training batches were replayed as CUDA graphs, after %d captures; launched "
                    "kernel by kernel: %s",
                    100 * (self.replayed or 0.0),
                    f"{self._sent:,}",
                    self._graph.captures,
                    others or "none",
                )
            for hot in self._graph.hot_rows:
                _log.info(
                    "%.1f%% of the ids found their row on the device, or had none yet; the other rows came "
                    "from %s",
                    100 * hot.counts.share,
                    hot.elsewhere,
                )
            self._graph.close()

    @property
    def hot_counts(self) -> list[HotCounts]:
        """How often rows were on the device before a step, of stores that keep some in host memory."""
        return [] if self._graph is None else [hot.counts for hot in self._graph.hot_rows]

    def _outputs(
        self, batch: Batch, rows: list[PreparedBatch], before_lookup: Callable[[], None] | None = None
    ) -> Outputs:
        """Run the model on a batch."""
        # Predictions for metrics are those before the update. With dropout or batch norm they differ
        # between modes, and the metrics of training are compared with those of evaluation.
        model, evaluated = self._model, None
        if self._predicts_in_eval:
            with model.evaluating(), torch.no_grad():
                evaluated = model.outputs(batch, rows, otherwise=before_lookup).predictions
        outputs = model.outputs(batch, rows, otherwise=before_lookup)
        return outputs if evaluated is None else Outputs(outputs.loss, evaluated)

    def _check(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        check, self.check = self.check, None
        if check is not None:
            check(predictions, batch)

    def _note_trained(self, read: ReadBatch) -> None:
        """Count a batch that was trained on, and tell publishers of it."""
        batches, progress = self._batches, self._progress
        # Only now: a step that raised is not trained, and a checkpoint must resume with its batch.
        batches.note_trained(read)
        progress.note_batch(read.batch)
        if self.learned is not None:
            learned = LearnedUpTo(
                step=progress.step,
                watermark=progress.expiry.now() or 0,
                event_at=newest_event(read.batch.ids),
                read_at=read.at,
                trained_at=self._clock(),
            )
            tell = self.learned
            batches.push(lambda: tell(learned))  # after the update of the rows, which is pushed already

    # Steps as graphs

    def _make_graph(self) -> StepGraph | None:
        """Return what replays steps as graphs, if rows are on a GPU of this process and it can."""
        config, model = self._config, self._model
        if config.accelerator != "cuda" or not config.step_graphs:
            return None
        if not model.is_local or self._membership.lockstep or self._placement.averaging is not None:
            self._say_not_captured("graphs are for runs of one process")
            return None
        if config.embedding_device != "device":
            self._say_not_captured(
                "embedding rows are in host memory, see train.embedding_device and train.device_memory_bytes"
            )
            return None
        if config.deterministic and any(one.plan.jagged for one in model.collections):
            self._not_captured = True
            self._say_not_captured(
                "train.deterministic is set. How histories are padded depends on earlier batches, which a "
                "resumed run has not seen, and matrix products of another size round differently"
            )
            return None
        try:
            graph = StepGraph(
                model.module,
                model.collections,
                self._sparse,
                model.dense,
                self._graph_outputs,
                self._updates,
            )
        except AcceleratorError as why:
            self._not_captured = True
            self._say_not_captured(str(why))
            return None
        if graph.trouble is not None:
            self._say_not_captured(graph.trouble)
        for hot in graph.hot_rows:
            _log.info(
                "the device has room for %s rows (train.device_memory_bytes); those not used for longest are "
                "in %s, and come to the device ahead of the steps that need them",
                f"{hot.rows:,}",
                hot.elsewhere,
            )
        return graph

    def _graph_outputs(self, batch: Batch, rows: list[PreparedBatch]) -> tuple[Tensor, Mapping[str, Tensor]]:
        outputs = self._outputs(batch, rows)
        return outputs.loss, outputs.predictions

    def _send(self, batch: Batch) -> SentBatch:
        """Send a batch to the device; on the thread that reads ahead."""
        assert self._graph is not None
        self._model.check_features(batch)
        return self._graph.send(batch)

    def _take_graphed(self, graph: StepGraph, read: ReadBatch, sent: SentBatch) -> StepResult | None:
        """Launch a step; None if it has to be taken without a graph."""
        batch, progress, model = read.batch, self._progress, self._model
        if self._sent and self._sent % _LOOK_EVERY == 0:
            self._look_at_launches(graph)
        self._sent += 1
        if not graph.takes(sent):
            self.settle()  # so that batches are skipped and counted in their order
            return None
        if type(model.task).outputs is Task.outputs:  # which looks at labels only if they are in host memory
            for head, label in batch.labels.items():
                model.task.target(head).check(head, label)
        try:
            step = graph.train(sent)
        except AcceleratorError as error:
            if is_full(error) and self._config.device_memory_bytes is None:
                raise  # it resumes with fewer rows on the device; see `RowsPlace`
            self._say_not_captured(graph.trouble or "")
            self.settle()
            return None
        if graph.captures and not self._said_captured:
            self._said_captured = True
            _log.info(
                "training steps are replayed as CUDA graphs, one launch each: %s. What a step found is known "
                "%d steps later",
                graph.describe(),
                _BEHIND,
            )
        if model.schedule is not None:
            if self._schedule_ahead:
                self._schedule_ahead -= 1
            else:
                model.schedule.step()
        self._count()
        self._note_trained(read)
        self._unsettled.append((step, batch))
        result = StepResult(progress.step, batch, step.loss, step.predictions, to_measure=False)
        self.settle(_BEHIND)
        return result

    def _say_not_captured(self, why: str) -> None:
        _log.warning(
            "training steps are launched kernel by kernel and not replayed as CUDA graphs: %s. %s. "
            "train.step_graphs = false silences this warning",
            why,
            _COST,
        )

    def _look_at_launches(self, graph: StepGraph) -> None:
        """Warn of batches that are not replayed, once for each reason that lasts."""
        before, self._ungraphed = self._ungraphed, Counter(graph.ungraphed)
        for why, advice in _ADVICE.items():
            count = self._ungraphed[why] - before[why]
            if count > _FEW and why not in self._told:
                self._told.add(why)
                _log.warning(
                    "%d of the last %d training batches were launched kernel by kernel and not replayed as "
                    "CUDA graphs: batches %s. %s. %s",
                    count,
                    _LOOK_EVERY,
                    why,
                    _COST,
                    advice,
                )

    def _count(self) -> int:
        """Count this step, now that the dense weights took it; return its number."""
        self._progress.set_step(self._placement.count_step(self._progress.step))
        return self._progress.step

    def _note_no_batch(self) -> None:
        """Finish the updates if the data ended, and check that there was some."""
        batches, progress = self._batches, self._progress
        self.settle()
        if self.paused or batches.reassigned:
            return
        # The position may be past the last batch: bad records after it make no batch.
        if batches.exhausted:
            batches.position = batches.stream.position()
        batches.drain()
        task, shard = self._model.task.name, self._membership.shard
        passes = self._config.epochs or 1
        together = 1 if self._membership.lockstep else shard.workers
        if batches.exhausted and 0 < progress.step <= passes * together and progress.examples:
            _log.warning(
                "task %r: a batch is as large as all the data, or larger: its %s examples made %s. Choose a "
                "smaller one: examples.batch_size of a config, batch_size of a source, or rebatch",
                task,
                f"{progress.examples // passes:,}",
                "one step" if progress.step == 1 else f"{progress.step} steps in {passes} epochs",
            )
        if progress.examples or progress.skipping.batches or batches.interrupted:
            return
        if shard.workers == 1 or (self._membership.lockstep and not progress.step):
            check_not_all_skipped(0, batches.stream.bad_records())
            raise DataError(
                f"task {task!r}: dataset(Mode.TRAIN) has no examples; nothing was trained or saved"
            )
        _log.warning(
            "worker %d trained on no examples: its shard of the data is empty, or was trained on before a "
            "restart",
            shard.worker,
        )

    def _refuse_other_ids(self) -> None:
        raise FeatureError(
            f"task {self._model.task.name!r}: the model reads other ids than those of the batch it was "
            "given, which ranks look up together ahead of the step. Change ids in the dataset."
        )
