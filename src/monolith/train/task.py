"""The task seam: what is trained, written once, whatever way it runs.

    class Clicks(Task):
        def dataset(self, mode):
            return Pipeline(FileSource("day-*/*.parquet")).rebatch(512).to_batches(SPEC)

        def model(self):
            return DeepFM(["user", "item", "context"], dim=16)

A model is a plain `nn.Module` with an `EmbeddingCollection` in it. By default its output is
taken as the logits of the batch's labels; a task with another loss overrides `outputs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.config import to_snake_case
from monolith.data import Stream
from monolith.errors import FeatureError
from monolith.feature import Batch
from monolith.model import UpdateConfig
from monolith.train.hook import Hook


class Mode(Enum):
    """What a task is run for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a model says of a batch."""

    loss: Tensor
    """A scalar, to be made small: the mean over the examples. Rows are trained by its gradient times the size
    of the batch, as in any loop with an `EmbeddingOptimizer`. Of a batch without labels whatever."""
    predictions: Mapping[str, Tensor]
    """By head, of shape (examples,): probabilities, or values of a regression."""


class Task(ABC):
    """What to train on what. One object may be run several times, in any mode."""

    @property
    def name(self) -> str:
        """How the task is called in logs and metrics; by default its class in snake case."""
        return to_snake_case(type(self).__name__)

    @abstractmethod
    def dataset(self, mode: Mode) -> Stream[Batch]:
        """Return the batches to train on, or those to evaluate or predict, from their beginning."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with its first weights. Torch's random numbers are seeded before the call."""

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Run the model on a batch: by default, its output is logits, one column per label.

        Args:
            model: The model, perhaps wrapped.
        """
        logits = model(batch)
        if isinstance(logits, Mapping):
            by_head = dict(logits)
        else:
            heads = list(batch.labels) or ["prediction"]
            columns = [logits] if logits.ndim == 1 else list(logits.unbind(-1))
            if len(columns) != len(heads):
                raise FeatureError(
                    f"task {self.name!r}: the model returns {len(columns)} columns for {len(heads)} labels "
                    f"({', '.join(heads)}). Return a column for each, or a dict by label, or override "
                    "outputs()."
                )
            by_head = dict(zip(heads, columns, strict=True))
        losses = [
            binary_cross_entropy_with_logits(by_head[head], label.to(by_head[head].device))
            for head, label in batch.labels.items()
        ]
        loss = torch.stack(losses).sum() if losses else next(iter(by_head.values())).new_zeros(())
        return Outputs(loss, {head: torch.sigmoid(logit) for head, logit in by_head.items()})

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return what trains the dense weights; None where there are none. Rows have their own."""
        weights = list(model.parameters())
        return torch.optim.Adam(weights, lr=1e-3) if weights else None

    def updates(self) -> UpdateConfig:
        """Return what is done to gradients before they are applied: clipping, weight decay."""
        return UpdateConfig()

    def metrics(self, mode: Mode) -> Mapping[str, Sequence[str]] | Sequence[str]:  # noqa: ARG002
        """Return names of metrics, for every label or by label; see `METRICS`."""
        return ("auc", "log_loss", "calibration")

    def groups(self, batch: Batch) -> Tensor | None:  # noqa: ARG002
        """Return the group of each example, int64, such as its user, for metrics that ask for it."""
        return None

    def weights(self, batch: Batch) -> Mapping[str, Tensor] | None:  # noqa: ARG002
        """Return the weight of each example by label, for metrics."""
        return None

    def hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        """Return hooks of one's own; they run after the others."""
        return ()

    def chief_hooks(self, mode: Mode) -> Sequence[Hook]:  # noqa: ARG002
        """Return hooks that only the chief runs, before all ordinary ones."""
        return ()

    def describe(self) -> Mapping[str, Any]:
        """Return what the run's manifest should say of this task: plain values."""
        return {}
