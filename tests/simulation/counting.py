"""A model of integers: each record has a row that counts how often it was trained, so every loss and every
repetition is seen as a number that is not 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from monolith import concurrency
from monolith.checkpoint import Checkpointer, Saver
from monolith.data import Pipeline, Position, Records, Shard, Source, Stream
from monolith.data.formats.memory import to_records
from monolith.data.records import BatchSpec
from monolith.data.source import ShardChoice
from monolith.feature import ADDN, Batch, Layout
from monolith.model import EmbeddingCollection, Feature, UpdateConfig
from monolith.model.features import FeatureSet
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.table import Sgd, Zeros, iterate
from monolith.train import Mode, Outputs, Task, TrainConfig
from monolith.train.model import Model as TrainedModel

RECORD = "record"
COUNTS = "counts"
LABEL = "label"
SPEC = BatchSpec(ids=(RECORD,), labels={LABEL: (LABEL, 0)})


class Numbers(Source):
    """The numbers 1 to `records`, in batches. Of n workers each reads every n-th batch.

    Args:
        ahead: So many of the first batches are all of worker 0, which has more than the other workers then.
        seconds: How long reading a batch takes: a run of no length would be over before the first fault.
    """

    repeats_order = True
    live = False

    def __init__(self, records: int, batch_size: int, seconds: float = 0.0, ahead: int = 0) -> None:
        self._records, self._size, self._seconds, self._ahead = records, batch_size, seconds, ahead
        self._choice = ShardChoice("numbers")
        self._next: int | None = None

    def read_shard(self, shard: Shard) -> None:
        self._choice.choose(shard)

    def __iter__(self) -> Iterator[Records]:
        shard = self._choice.settle()
        while (first := self._first()) < self._records:
            if self._seconds:
                concurrency.sleep(self._seconds)
            end = min(first + self._size, self._records)
            self._next = first + self._size
            if first >= self._ahead * self._size:
                self._next += self._size * (shard.workers - 1)
            numbers = np.arange(first, end, dtype=np.int64) + 1
            yield to_records({RECORD: numbers, LABEL: np.ones(len(numbers), np.float32)})

    def position(self) -> Position:
        return {"next": self._first(), "shard": list(self._choice.settle())}

    def restore(self, position: Position) -> None:
        assert position["shard"] == list(self._choice.settle())
        self._next = position["next"]

    def _first(self) -> int:
        if self._next is None:
            worker = self._choice.settle().worker
            self._next = (self._ahead + worker if worker else 0) * self._size
        return self._next


class CountingModel(nn.Module):
    """One row for each record, and one weight for all of them. Every update adds 1 to a row."""

    def __init__(self) -> None:
        super().__init__()
        rows = FeatureSet(
            [Feature(name=RECORD, slot=COUNTS)], optimizer=Sgd(learning_rate=1.0), initializer=Zeros()
        )
        self.rows = EmbeddingCollection([Layout(COUNTS, ADDN, rows.slices([RECORD], "times", 1))], threads=1)
        self.trained = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        counts: Tensor = self.rows(batch)[COUNTS]
        return counts.squeeze(1)


@dataclass(frozen=True)
class Counting(Task):
    """Counts how often each record was trained."""

    batches: int = 6
    batch_size: int = 2
    read_seconds: float = 0.0
    ahead: int = 0

    @property
    def records(self) -> int:
        return self.batches * self.batch_size

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        numbers = Numbers(self.records, self.batch_size, self.read_seconds, self.ahead)
        return Pipeline(numbers).to_batches(SPEC)

    def model(self) -> nn.Module:
        return CountingModel()

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        counts = model(batch)
        trained: Tensor = model.get_parameter("trained")
        # The gradient of each row is -1, that of the weight is minus the number of records.
        return Outputs(-counts.sum() - trained.sum() * len(batch), {LABEL: counts.detach()})

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def updates(self) -> UpdateConfig:
        return UpdateConfig(multiply_rows_by=1)

    def metrics(self, mode: Mode) -> tuple[str, ...]:  # noqa: ARG002
        return ()


@dataclass(frozen=True)
class Counted:
    """What a checkpoint holds."""

    step: int
    times: dict[int, int]
    """Record -> how often it was trained."""
    trained: int
    """Number of records that the dense weight counted."""

    def check_exactly_once(self, task: Counting, *, steps: int | None = None) -> None:
        """Check a run of all records. Ranks average the gradients of the dense weight, which then counts the
        records of one batch in each of their steps."""
        counts = {record: self.times.get(record, 0) for record in range(1, task.records + 1)}
        wrong = {record: times for record, times in counts.items() if times != 1}
        assert not wrong, f"records that were not trained exactly once: {wrong}"
        assert self.times.keys() == counts.keys(), f"unknown rows: {self.times}"
        trained = task.records if steps is None else steps * task.batch_size
        assert self.trained == trained, f"the dense weight counted {self.trained} records of {trained}"


def read_counts(task: Task, model_dir: str) -> Counted | None:
    """Return the newest checkpoint of a model_dir; None if there is none."""
    prefix = newest_checkpoint(TrainConfig(model_dir=model_dir), "train")
    if prefix is None:
        return None
    model = TrainedModel(task, Mode.TRAIN, seed=0)
    with contextlib.closing(model):
        restored = Checkpointer(Saver(model_dir), model.parts()).restore(prefix)
        times = {
            record: int(value[0])
            for store in model.stores
            for chunk in iterate(store.table(COUNTS))  # type: ignore[attr-defined]
            for record, value in zip(chunk.ids.tolist(), chunk.values.tolist(), strict=True)
        }
        return Counted(restored.step, times, int(model.module.get_parameter("trained").item()))
