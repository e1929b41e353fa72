"""The task seam: what is trained, written once, whatever way it runs.

    class Clicks(Task):
        def dataset(self, mode):
            return Pipeline(FileSource("day-*/*.parquet")).rebatch(512).to_batches(SPEC)

        def model(self):
            return DeepFM(["user", "item", "context"], dim=16)

A model is a plain `nn.Module` with an `EmbeddingCollection` in it. By default its output is
taken as the logits of the batch's labels. A label that is a number, or several labels with weights, are
`targets`; a task with another loss overrides `outputs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.config import to_snake_case
from monolith.data import Stream
from monolith.errors import FeatureError
from monolith.feature import Batch
from monolith.model import UpdateConfig
from monolith.nn.losses import Target
from monolith.nn.optimizers import EagerAdam
from monolith.train.hook import Hook

_CLASS = Target()


class Mode(Enum):
    """The purpose for which a task's data is read: training, evaluation or prediction.

    Examples:
        >>> from monolith import Mode
        >>> [mode.value for mode in Mode]
        ['train', 'evaluate', 'predict']
    """

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a model says of a batch."""

    loss: Tensor
    """A scalar, to be made small: the mean over the examples. Rows are trained by its gradient times the size
    of the batch, as in any loop with an `EmbeddingOptimizer`. Of a batch without labels NaN, unless the loss
    needs none."""
    predictions: Mapping[str, Tensor]
    """By head, of shape (examples,): probabilities, or values of a regression."""
    measures: Mapping[str, Tensor] = field(default_factory=dict)
    """By name, of shape (n,): what an evaluation reports the mean of, where a metric of predictions and
    labels does not say it; NaN for one of the n that has nothing to say."""


class Task(ABC):
    """A training task: its data, its model and its metrics. One object may be run several times, in any mode.

    Shapes: a batch has n examples. The model returns logits of shape (n,), (n, labels) with a column for each
    label, or a dict of logits (n,) by label.

    Examples:
        >>> from monolith import ClickLog, ClickLogConfig, DeepFM, Mode, Task, TrainConfig, Trainer
        >>> class Clicks(Task):
        ...     def dataset(self, mode: Mode):
        ...         return ClickLog(ClickLogConfig(users=100, items=50, history=4, dim=2)).batches(5, 64)
        ...     def model(self):
        ...         return DeepFM(["user", "item", "context"], dim=4)
        ...     def metrics(self, mode: Mode):
        ...         return ("auc", "calibration")
        >>> Trainer(Clicks(), TrainConfig()).train().examples
        320
    """

    @property
    def name(self) -> str:
        """How the task is called in logs and metrics; by default its class in snake case."""
        return to_snake_case(type(self).__name__)

    save_steps: int | None = None
    """How many steps there are between checkpoints, for a task that knows better than the run: it beats
    train.save. None leaves it to the run."""

    @abstractmethod
    def dataset(self, mode: Mode) -> Stream[Batch]:
        """Return the batches to train on, or those to evaluate or predict, from their beginning."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with its first weights. Torch's random numbers are seeded before the call."""

    def targets(self) -> Mapping[str, Target]:
        """Return how each label is trained and predicted; a label that is not named is a class, 0 or 1.

        def targets(self):
            return {"click": Target(), "seconds": Target(loss="log", weight=0.2)}
        """
        return {}

    def target(self, head: str) -> Target:
        """Return how one label is trained and predicted."""
        return self.targets().get(head, _CLASS)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Run the model on a batch: by default, its output has one column per label; see `targets`.

        Args:
            model: The model, perhaps wrapped.

        Raises:
            FeatureError: The model returned something else, or a label has values that its loss cannot take.
        """
        by_head = self._by_head(model, model(batch), batch)
        losses = []
        for head, label in batch.labels.items():
            target = self.target(head)
            if label.device.type == "cpu" and not torch.compiler.is_exporting():
                target.check(head, label)  # on a GPU it would wait for the device
            losses.append(target.loss_of(by_head[head], label.to(by_head[head].device)))
        loss = torch.stack(losses).sum() if losses else torch.tensor(float("nan"))
        return Outputs(loss, {head: self.target(head).prediction(one) for head, one in by_head.items()})

    def predictions(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return what a model says of a batch, without its loss: what is served."""
        return self.outputs(model, batch).predictions

    def meaning(self, head: str) -> Literal["", "probability", "value", "score"]:
        """Return what the predictions of a label are, for the clients of a server; empty if unknown."""
        if type(self).outputs is not Task.outputs:
            return ""  # the task computes them itself
        return "probability" if self.target(head).is_probability else "value"

    def _by_head(self, model: nn.Module, given: Any, batch: Batch) -> dict[str, Tensor]:
        """Return what a model gave by label, each of shape (examples,).

        Raises:
            FeatureError: It gave something else; says what, and where the model is written.
        """
        heads = list(batch.labels) or ["prediction"]
        size = batch.ids.batch_size  # and not len(batch): an export leaves it open

        def wrong(found: str) -> FeatureError:
            forward = f"forward of {type(model).__name__} ({_written_at(model)})"
            return FeatureError(
                f"task {self.name!r}: {forward} returns {found}. Return logits of shape ({size},), or "
                f"({size}, {len(heads)}) with a column for each label ({', '.join(heads)}), or a dict of "
                "them by label; or override outputs()."
            )

        if isinstance(given, Mapping):
            by_head = dict(given)
            if missing := [head for head in batch.labels if head not in by_head]:
                has = ", ".join(map(repr, by_head)) or "nothing"
                raise wrong(f"a dict without {missing[0]!r}: it has {has}")
        elif not isinstance(given, Tensor):
            raise wrong(f"a {type(given).__name__}")
        elif given.ndim not in (1, 2):
            raise wrong(f"a tensor of shape {tuple(given.shape)}")
        else:
            columns = [given] if given.ndim == 1 else list(given.unbind(-1))
            if len(columns) != len(heads):
                raise wrong(f"{len(columns)} columns for {len(heads)} labels")
            by_head = dict(zip(heads, columns, strict=True))
        for head, logits in by_head.items():
            if not isinstance(logits, Tensor):
                raise wrong(f"{type(logits).__name__} for {head!r}")
            if logits.shape != (size,):
                raise wrong(f"shape {tuple(logits.shape)} for {head!r}")
        return by_head

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return what trains the dense weights; None if there are none. Rows have their own."""
        weights = list(model.parameters())
        return EagerAdam(weights, lr=1e-3) if weights else None

    def dense_schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:  # noqa: ARG002
        """Return what moves the rates of the dense optimizer after every step of the model; None for nothing.

        It acts where the weights are trained, in this process or on parameter servers, and is saved.

        Args:
            optimizer: What `dense_optimizer` returned.
        """
        return None

    def updates(self) -> UpdateConfig:
        """Return what is done to gradients before they are applied: clipping, weight decay."""
        return UpdateConfig()

    def metrics(self, mode: Mode) -> Mapping[str, Sequence[str]] | Sequence[str]:  # noqa: ARG002
        """Return names of metrics, for every label or by label; see `METRICS`.

        A label that is not named has the metrics of its target, and one with () has none. By default all have
        those of their target: auc, log_loss and calibration of classes; rmse, mae and calibration of numbers.
        """
        targets = self.targets()
        if all(target.is_probability for target in targets.values()):
            return _CLASS.metrics
        return {head: target.metrics for head, target in targets.items()}

    def measures(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        """Return the names of the `measures` of its outputs."""
        return ()

    def protocol(self, mode: Mode) -> str | None:  # noqa: ARG002
        """Return how an evaluation on the data of a mode is made, in a line that is printed with its metrics.

        By default None: the names of the metrics say it.
        """
        return None

    def reading(self, model: nn.Module, mode: Mode) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return what holds while a model, as it stands and in eval mode, reads the data of a mode.

        It is for what is computed once for all batches; see `RetrievalTask`.
        """
        return nullcontext()

    def groups(self, batch: Batch) -> Tensor | None:
        """Return the group of each example, int64, such as its user, for metrics that ask for it.

        By default that of the feature spec that made the batch.
        """
        return batch.groups

    def weights(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Return the weight of each example by label, for metrics.

        By default 1, and 0 for an example without a label whose target is `optional`.
        """
        optional = [head for head, target in self.targets().items() if target.optional]
        found = {head: (~batch.labels[head].isnan()).float() for head in optional if head in batch.labels}
        return found or None

    def hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        """Return hooks of one's own; they run after all other hooks."""
        return ()

    def chief_hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        """Return hooks that only the chief runs, before all ordinary ones."""
        return ()

    def describe(self) -> Mapping[str, Any]:
        """Return what the run's manifest should say of this task: plain values."""
        return {}


def _written_at(model: nn.Module) -> str:
    """Return the file and line of a model's forward, for error messages."""
    code = getattr(type(model).forward, "__code__", None)
    return "built in" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
