"""What else one would train on a stream: a DeepFM in plain torch, and the online learners of river.

`monolith experiment quality --baselines` compares the ready models with them, predict-then-train. What is
in doubt favours the baselines:

- The tables of torch have a row for every ID of the whole set from the start; a stream does not say how many
  there will be.
- Each has several settings, among them its own defaults, and the best of them by the valid part is what the
  defaults of a ready model are compared with.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.errors import ConfigError
from monolith_bench.learner import Recipe, StreamLearner
from monolith_bench.public_sets import Examples

Rows = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class PlainDeepFM(nn.Module):
    """A DeepFM of the size of `monolith.model.DeepFM`, with `nn.Embedding` and tables of a fixed size.

    Args:
        rows: How many IDs each feature has.
        numbers: How many numbers an example has.
        deviation: Of the first values of vectors; None leaves those of `nn.Embedding`, which is 1.
        sparse: Whether embeddings have sparse gradients.
    """

    def __init__(
        self,
        rows: Sequence[int],
        numbers: int = 0,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        deviation: float | None = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(count, dim, sparse=sparse) for count in rows)
        self.biases = nn.ModuleList(nn.Embedding(count, 1, sparse=sparse) for count in rows)
        for table in self.biases:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]
        if deviation is not None:
            for table in self.vectors:
                nn.init.normal_(table.weight, std=deviation)  # type: ignore[arg-type]
        layers: list[nn.Module] = []
        widths = (len(rows) * dim + numbers, *hidden)
        for width, following in itertools.pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, places: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return logits of shape (examples,).

        Args:
            places: int64 of shape (examples, features): rows of the tables.
            numbers: float32 of shape (examples, width).
        """
        columns = places.unbind(1)
        vectors = torch.stack([table(ids) for table, ids in zip(self.vectors, columns, strict=True)], 1)
        bias = torch.cat([table(ids) for table, ids in zip(self.biases, columns, strict=True)], 1).sum(1)
        pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
        read = vectors.flatten(1) if numbers is None else torch.cat([vectors.flatten(1), numbers], 1)
        logits: Tensor = bias + pairs + self.mlp(read).squeeze(1)
        return logits


class TorchLearner:
    """`PlainDeepFM` with two optimizers of torch: one for embeddings, and Adam for dense layers.

    Args:
        rows: Makes the optimizer of embeddings.
        sparse, deviation: As of `PlainDeepFM`.
    """

    def __init__(
        self,
        data: Examples,
        seed: int,
        batch: int,
        *,
        rows: Rows,
        sparse: bool = False,
        deviation: float | None = 0.01,
    ) -> None:
        torch.manual_seed(seed)
        self.data = data
        self._batch = batch
        unique: Any = torch.unique
        found = [unique(ids, return_inverse=True) for ids in data.ids.values()]
        self._places = torch.stack([places for _, places in found], 1)
        width = 0 if data.numbers is None else data.numbers.shape[1]
        self._model = PlainDeepFM([len(ids) for ids, _ in found], width, deviation=deviation, sparse=sparse)
        tables = [*self._model.vectors.parameters(), *self._model.biases.parameters()]
        dense = torch.optim.Adam(self._model.mlp.parameters(), lr=Recipe().dense_rate)
        self._optimizers = (rows(tables), dense)

    def _logits(self, some: Tensor) -> Tensor:
        numbers = self.data.numbers
        found: Tensor = self._model(self._places[some], None if numbers is None else numbers[some])
        return found

    def train(self, some: Tensor) -> None:
        """Learn from examples, in their order."""
        for part in torch.split(some, self._batch):
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(self._logits(part), self.data.likes[part])
            torch.autograd.backward(loss)
            unchecked: Any = torch.sparse.check_sparse_tensor_invariants  # off, said aloud: else it warns
            with unchecked(False):
                for optimizer in self._optimizers:
                    optimizer.step()

    def predict_then_train(self, some: Tensor) -> Tensor:
        """Return logits of examples, each predicted before it is learned from, batch by batch."""
        found = []
        for part in torch.split(some, self._batch):
            with torch.no_grad():
                found.append(self._logits(part))
            self.train(part)
        return torch.cat(found)


class RiverLearner:
    """A classifier of river, which learns from one example at a time.

    Args:
        batch: How many examples are predicted before they are learned from.
        make: Returns the classifier, given river and a seed.
    """

    def __init__(self, data: Examples, seed: int, batch: int, *, make: Callable[[Any, int], Any]) -> None:
        self.data = data
        self._batch = batch
        self._model = make(river(), seed)
        # An input for each ID, whose name begins with that of its feature, and one for each number.
        columns = [[f"{name}_{value}" for value in ids.tolist()] for name, ids in data.ids.items()]
        self._read = [dict.fromkeys(names, 1.0) for names in zip(*columns, strict=True)]
        if data.numbers is not None:
            for read, values in zip(self._read, data.numbers.tolist(), strict=True):
                read.update((f"number{place}", value) for place, value in enumerate(values))
        self._liked = data.likes.bool().tolist()

    def train(self, some: Tensor) -> None:
        """Learn from examples, in their order."""
        for at in some.tolist():
            self._model.learn_one(self._read[at], self._liked[at])

    def predict_then_train(self, some: Tensor) -> Tensor:
        """Return the probability of each like, predicted before it is learned from, batch by batch."""
        found = []
        for part in torch.split(some, self._batch):
            found += [self._model.predict_proba_one(self._read[at])[True] for at in part.tolist()]
            self.train(part)
        return torch.tensor(found)


def river() -> Any:
    """Return the package river.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        for module in ("facto", "linear_model", "optim"):
            importlib.import_module(f"river.{module}")
        return importlib.import_module("river")
    except ImportError as cause:
        raise ConfigError(
            "experiment quality: --baselines compares with river, which cannot be imported; "
            f"`pip install river` installs it ({cause})"
        ) from cause


@dataclass(frozen=True, slots=True)
class OfTorch:
    """Makes a `TorchLearner`, whose arguments are the fields."""

    rows: Rows
    sparse: bool = False
    deviation: float | None = 0.01

    def __call__(self, data: Examples, seed: int, batch: int) -> StreamLearner:
        settings: Any = {"rows": self.rows, "sparse": self.sparse, "deviation": self.deviation}
        return TorchLearner(data, seed, batch, **settings)


@dataclass(frozen=True, slots=True)
class OfRiver:
    """Makes a `RiverLearner` of a classifier."""

    make: Callable[[Any, int], Any]

    def __call__(self, data: Examples, seed: int, batch: int) -> StreamLearner:
        return RiverLearner(data, seed, batch, make=self.make)


def _machine(package: Any, seed: int, optimizer: str, rate: float) -> Any:
    """Return a factorization machine whose weights and vectors are trained alike."""
    made = getattr(package.optim, optimizer)
    return package.facto.FMClassifier(weight_optimizer=made(rate), latent_optimizer=made(rate), seed=seed)


BASELINES: Mapping[str, Mapping[str, Callable[[Examples, int, int], StreamLearner]]] = {
    "torch deepfm": {
        "Adam 0.001": OfTorch(lambda tables: torch.optim.Adam(tables, lr=0.001)),
        "Adam 0.001, vectors of deviation 1": OfTorch(
            lambda tables: torch.optim.Adam(tables, lr=0.001), deviation=None
        ),
        "Adam 0.01": OfTorch(lambda tables: torch.optim.Adam(tables, lr=0.01)),
        "SparseAdam 0.001": OfTorch(lambda tables: torch.optim.SparseAdam(tables, lr=0.001), sparse=True),
        "SparseAdam 0.01": OfTorch(lambda tables: torch.optim.SparseAdam(tables, lr=0.01), sparse=True),
        "sparse Adagrad 0.01": OfTorch(lambda tables: torch.optim.Adagrad(tables, lr=0.01), sparse=True),
        "sparse Adagrad 0.1": OfTorch(lambda tables: torch.optim.Adagrad(tables, lr=0.1), sparse=True),
    },
    "river logistic": {
        "defaults": OfRiver(lambda package, _seed: package.linear_model.LogisticRegression()),
        "SGD 0.3": OfRiver(
            lambda package, _seed: package.linear_model.LogisticRegression(package.optim.SGD(0.3))
        ),
        "AdaGrad 1": OfRiver(
            lambda package, _seed: package.linear_model.LogisticRegression(package.optim.AdaGrad(1.0))
        ),
    },
    "river fm": {
        "defaults": OfRiver(lambda package, seed: package.facto.FMClassifier(seed=seed)),
        "SGD 0.1": OfRiver(lambda package, seed: _machine(package, seed, "SGD", 0.1)),
        "AdaGrad 0.1": OfRiver(lambda package, seed: _machine(package, seed, "AdaGrad", 0.1)),
    },
}
"""By name, which begins with that of the package, and settings: what makes a learner of examples, given a
seed and a batch size. Rates of 0.001 (Adam) and 0.01 (Adagrad) are the defaults of torch. The field-aware
machine of river is left out: on two features it is this one."""
