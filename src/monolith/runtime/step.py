"""One training step, from a batch to updated parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from monolith.errors import DataError, FeatureError, NonFiniteError
from monolith.model import EmbeddingOptimizer, apply_gradients
from monolith.runtime.batches import TrainingBatches
from monolith.runtime.coordinator import Coordinator
from monolith.runtime.progress import RunProgress, check_not_all_skipped
from monolith.sync.messages import LearnedUpTo
from monolith.train.hook import StepResult
from monolith.train.model import Model
from monolith.train.publishing.learning import Learned, newest_event
from monolith.train.task import Outputs

_log = logging.getLogger(__name__)


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

    def take(self) -> StepResult | None:
        """Predict the next batch, then train on it; None if there is no batch for now.

        Batches whose loss or gradient is not finite are skipped: the next one is taken instead.

        Raises:
            DivergedError: Too many batches in a row were skipped.
        """
        batches, progress, model = self._batches, self._progress, self._model
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
            # A forward pass changes buffers (the running means of a batch norm). A skipped batch must not.
            buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
            # A model may look up further IDs in its forward pass. Which updates such a lookup sees depends
            # on timing, unless all of them are done. In lockstep it would be a collective call of one rank.
            before_lookup = batches.drain if self._config.deterministic else None
            if self._membership.lockstep:
                before_lookup = self._refuse_other_ids

            # Predictions for metrics are those before the update. With dropout or batch norm they differ
            # between modes, and the metrics of training are compared with those of evaluation.
            evaluated = None
            if self._predicts_in_eval:
                with model.evaluating(), torch.no_grad():
                    evaluated = model.outputs(batch, rows, otherwise=before_lookup).predictions
            outputs = model.outputs(batch, rows, otherwise=before_lookup)
            if evaluated is not None:
                outputs = Outputs(outputs.loss, evaluated)
            try:
                # Dense weights are updated here and now; rows by `push`, behind the next lookup. The step is
                # counted in between, because server 0 counts a step when it takes the dense gradients.
                apply_gradients(
                    outputs.loss,
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
                batches.position = read.position
                continue
            break

        progress.skipping.note_trained()
        # Only now: a step that raised is not trained, and a checkpoint must resume with its batch.
        batches.position = read.position
        progress.note_batch(batch)
        if self.learned is not None:
            learned = LearnedUpTo(
                step=progress.step,
                watermark=progress.expiry.now() or 0,
                event_at=newest_event(batch.ids),
                read_at=read.at,
                trained_at=self._clock(),
            )
            tell = self.learned
            batches.push(lambda: tell(learned))  # after the update of the rows, which is pushed already
        loss = outputs.loss.detach()
        predictions = {head: tensor.detach() for head, tensor in outputs.predictions.items()}
        return StepResult(progress.step, batch, loss, predictions)

    def _count(self) -> int:
        """Count this step, now that the dense weights took it; return its number."""
        self._progress.set_step(self._placement.count_step(self._progress.step))
        return self._progress.step

    def _note_no_batch(self) -> None:
        """Finish the updates if the data ended, and check that there was some."""
        batches, progress = self._batches, self._progress
        if self.paused or batches.reassigned:
            return
        # The position may be past the last batch: bad records after it make no batch. In lockstep, a batch
        # may be left for which the other ranks had none; it is trained on after the next start.
        if batches.exhausted and not self._membership.lockstep:
            batches.position = batches.stream.position()
        batches.drain()
        if progress.examples or progress.skipping.batches or batches.interrupted:
            return
        task, shard = self._model.task.name, self._membership.shard
        if shard.workers == 1:
            check_not_all_skipped(0, batches.stream.bad_records())
            raise DataError(
                f"task {task!r}: dataset(Mode.TRAIN) has no examples; nothing was trained or saved"
            )
        if self._membership.lockstep and not progress.step:
            raise DataError(
                f"task {task!r}: nothing was trained: {shard.workers} ranks take their steps "
                "together, and one of them has no data. Each file is read by one rank alone: cut the data "
                f"into {shard.workers} files or more, train with fewer ranks, or with parameter servers, "
                "whose workers do not wait for each other."
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
