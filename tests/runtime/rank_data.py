"""Tasks for ranks whose batches are given, so that one can see what each rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from runtime.fleets import Tallied
from torch import Tensor, nn

from monolith.data import Shard, Stream
from monolith.data.source import Position
from monolith.feature import (
    CONCAT,
    Batch,
    Combiner,
    FeatureColumn,
    FeatureIds,
    FeatureSlot,
    Layout,
    SlotConfig,
    Sum,
)
from monolith.model import EmbeddingCollection, UpdateConfig
from monolith.table import Adagrad, Zeros
from monolith.tensors import RaggedTensor
from monolith.train import Mode, Outputs, Task


class GivenBatches:
    """A stream of batches that are in memory; each rank has its own."""

    def __init__(self, batches: Sequence[Batch], wait: Callable[[int], None] = lambda _: None) -> None:
        self._batches = batches
        self._wait = wait
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        while self._next < len(self._batches):
            self._wait(self._next)
            self._next += 1
            yield self._batches[self._next - 1]

    def position(self) -> Position:
        return {"next": self._next}

    def restore(self, position: Position) -> None:
        self._next = position["next"]

    def commit(self, position: Position) -> None: ...
    def close(self) -> None: ...
    def read_shard(self, share: Shard) -> None: ...


class Pooled(nn.Module):
    """One embedding, summed over the ids of an example, and a weight on top."""

    def __init__(self, dim: int, combiner: Combiner, dense: bool) -> None:
        super().__init__()
        slot = FeatureSlot(
            SlotConfig(
                name="f",
                optimizer=Adagrad(initial_accumulator_value=1.0),
                learning_rate=0.1,
                initializer=Zeros(),
            )
        )
        column = FeatureColumn(slot, "f", combiner=combiner)
        self.embeddings = EmbeddingCollection(
            [Layout("f", CONCAT, [column.lookup(slot.add_slice(dim))])], threads=1
        )
        self.top = nn.Linear(dim, 1) if dense else None
        if self.top is not None:  # the same on every thread that makes one
            with torch.no_grad():
                self.top.weight.copy_(torch.arange(dim) / 4 - 0.5)
                self.top.bias.zero_()

    def forward(self, batch: Batch) -> Tensor:
        found: Tensor = self.embeddings(batch)["f"]
        return found


@dataclass
class Given(Task):
    """Trains on batches that are given."""

    batches: Sequence[Batch] = ()
    dim: int = 5
    combiner: Combiner = field(default_factory=Sum)
    dense: bool = False
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(multiply_rows_by=1))
    loss: Callable[[Any, Tensor, Batch], Tensor] = lambda _, vectors, __: vectors.sum()
    wait: Callable[[int], None] = lambda _: None
    predict: Callable[[Tensor, Batch], Tensor] = lambda vectors, _: vectors.flatten(1).sum(1)

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        found: Any = GivenBatches(self.batches, self.wait)
        return found

    def model(self) -> nn.Module:
        return Pooled(self.dim, self.combiner, self.dense)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.SGD(model.parameters(), lr=0.1) if self.dense else None

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        vectors = model(batch)
        return Outputs(self.loss(model, vectors, batch), {"sum": self.predict(vectors, batch)})

    def metrics(self, mode: Mode) -> Sequence[str]:  # noqa: ARG002
        return ()

    def updates(self) -> UpdateConfig:
        return self.update


def batch_of(*examples: Sequence[int], **more: Any) -> Batch:
    """Return a batch in which each example has some ids of the one feature."""
    ragged = RaggedTensor.from_list([list(one) for one in examples], dtype=torch.int64)
    return Batch(FeatureIds.pack({"f": ragged}), **more)


@dataclass(frozen=True)
class Steady(Tallied):
    """Whose weights begin alike on every thread that makes a model, though all share one random generator."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight))
        return model
