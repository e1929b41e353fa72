"""How models are trained and judged by experiments: a recipe, three protocols, and their AUC.

Examples are cut into three parts. A model learns from the first, settings are chosen by the second (valid),
and the third (test) is looked at once, by the model that was best on the second:

- random: 80 % at random to train, 10 % to choose by, 10 % to test; epochs until valid is no better.
- time: the same shares by time: valid comes after what is trained on, and the test after that.
- stream: one pass in the order of time; what comes after the first 80 % is predicted, batch by batch, before
  it is learned from.

What a `Recipe` leaves out is what the model and a run of a config file begin with.
"""

from __future__ import annotations

import math
import statistics
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.feature import Batch, FeatureSpec, IdFeature, Label
from monolith.model import EmbeddingOptimizer
from monolith.model.by_name import MODELS, model_settings
from monolith.nn import auc
from monolith.runtime.config_task import ConfigTask, DenseAdam
from monolith.store import LocalStore
from monolith.table import Adagrad, Optimizer

Split = Literal["random", "time"]
Protocol = Literal["random", "time", "stream"]


class Likes(typing.Protocol):
    """Examples with a label of 0 or 1, in the order of time where there is one."""

    @property
    def features(self) -> FeatureSpec:
        """The features, and the label `like`."""

    @property
    def likes(self) -> Tensor:
        """float32, 1 for a like."""

    def __len__(self) -> int: ...

    def batch(self, some: Tensor) -> Batch:
        """Return the examples at these positions, with the label `like`."""


class StreamLearner(typing.Protocol):
    """What learns from examples in order, and predicts each before it learns from it."""

    @property
    def data(self) -> Likes: ...

    def train(self, some: Tensor) -> None:
        """Learn from examples, in their order."""

    def predict_then_train(self, some: Tensor) -> Tensor:
        """Return scores of examples, the higher the likelier, each made before it is learned from."""


def one_id_each(names: Sequence[str]) -> FeatureSpec:
    """Return features of one ID each, and the label `like`."""
    return FeatureSpec(features={name: IdFeature() for name in names}, labels={"like": Label()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Changes to the defaults of a ready model and of its training."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's class. Those that a model does not have are left out."""
    batch: int = ConfigTask.batch_size
    dense_rate: float = ConfigTask.dense_rate
    dense_decay: float = 0.0

    @classmethod
    def of_rows(cls, optimizer: Optimizer, *, batch: int = ConfigTask.batch_size) -> Recipe:
        """Return a recipe whose vectors and biases are both trained by an optimizer."""
        return cls(settings={"optimizer": optimizer, "bias_optimizer": optimizer}, batch=batch)

    def but(self, **settings: Any) -> Recipe:
        """Return the recipe with other arguments of the model."""
        return replace(self, settings={**self.settings, **settings})


RECIPES: dict[Protocol, Recipe] = {
    "random": Recipe(settings={"optimizer": Adagrad(weight_decay=1.0)}, batch=1024),
    "time": Recipe(settings={"optimizer": Adagrad(learning_rate=0.02, weight_decay=1.0)}, batch=1024),
    "stream": Recipe(
        settings={"optimizer": Adagrad(learning_rate=0.1), "bias_optimizer": Adagrad(learning_rate=0.2)},
        batch=256,
    ),
}
"""What did best for a DeepFM on the valid part of MovieLens-100k, by protocol; the test was not looked at to
choose."""


def make_model(
    recipe: Recipe, features: FeatureSpec, seed: int, *, kind: str = "deepfm", store: LocalStore | None = None
) -> nn.Module:
    """Return a model that has learned nothing; the same seed gives the same first weights.

    Args:
        kind: One of `MODELS`.
        store: The rows of the model, by default new ones.
    """
    known = {one.name for one in model_settings(kind).__dataclass_fields__.values()}
    settings = {name: value for name, value in recipe.settings.items() if name in known}
    if kind == "ffm":  # the one model without a default for its pairs
        settings.setdefault("pairs", ffm_pairs(features))
    make: Any = MODELS[kind]
    model: nn.Module = make(features, store=store, seed=seed, threads=1, **settings)
    return model


def ffm_pairs(features: FeatureSpec) -> list[tuple[str, str, int]]:
    """Return all pairs of features, so wide that a row has about as many floats as one of a DeepFM."""
    names = list(features.ids)
    width = max(16 // max(len(names) - 1, 1), 2)
    return [(one, other, width) for one, other in combinations(names, 2)]


def logits_of(model: nn.Module, likes: Likes, some: Tensor) -> Tensor:
    """Return the logits of some examples; the model learns nothing by it."""
    model.eval()
    with torch.no_grad():
        return torch.cat([like_logits(model, likes.batch(part)) for part in torch.split(some, 4096)])


def like_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of the label `like`: all that a model of one task returns."""
    found = model(batch)
    logits: Tensor = found["like"] if isinstance(found, Mapping) else found
    return logits


class Learner:
    """A ready model with its optimizers. One thread."""

    def __init__(self, recipe: Recipe, likes: Likes, seed: int, *, kind: str = "deepfm") -> None:
        torch.manual_seed(seed)
        self.data = likes
        self._recipe = recipe
        self._model = make_model(recipe, likes.features, seed, kind=kind)
        self._rows = EmbeddingOptimizer(self._model)
        weights = list(self._model.parameters())
        adam = DenseAdam(weight_decay=recipe.dense_decay)
        self._dense = adam.make(weights, recipe.dense_rate) if weights else None

    @property
    def model(self) -> nn.Module:
        """The model as learned so far; further training changes it."""
        return self._model

    def scores(self, some: Tensor) -> Tensor:
        """Return logits; the model learns nothing by it."""
        return logits_of(self._model, self.data, some)

    def auc(self, some: Tensor) -> float:
        return auc(self.scores(some), self.data.likes[some])

    def train(self, some: Tensor) -> None:
        """Learn from examples, in their order."""
        self._model.train()
        for part in torch.split(some, self._recipe.batch):
            self._rows.zero_grad()
            if self._dense is not None:
                self._dense.zero_grad()
            batch = self.data.batch(part)
            loss = binary_cross_entropy_with_logits(like_logits(self._model, batch), batch.labels["like"])
            torch.autograd.backward(loss)
            self._rows.step()
            if self._dense is not None:
                self._dense.step()

    def predict_then_train(self, some: Tensor) -> Tensor:
        """Return logits of examples, each predicted before it is learned from, batch by batch."""
        found = []
        for part in torch.split(some, self._recipe.batch):
            found.append(self.scores(part))
            self.train(part)
        return torch.cat(found)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of several runs, and its standard error: NaN for one run, which cannot say."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


@dataclass(frozen=True, slots=True)
class TwoAucs:
    """The AUC of the part that settings are chosen by, and of the test."""

    valid: float
    test: float
    epoch: int
    """The epoch that was best on valid."""


def parts(count: int, split: Split, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which examples are trained on, chosen by, and tested on: 80, 10 and 10 %."""
    order = torch.arange(count)
    if split == "random":
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    tenth = count // 10
    train, valid, test = torch.split(order, [count - 2 * tenth, tenth, tenth])
    return train, valid, test


def epochs(learner: Learner, train: Tensor, seed: int) -> Iterator[int]:
    """Train epoch after epoch, each in another order, for as long as one asks."""
    generator = torch.Generator().manual_seed(seed)
    epoch = 0
    while True:
        learner.train(train[torch.randperm(len(train), generator=generator)])
        epoch += 1
        yield epoch


def aucs(protocol: Protocol, recipe: Recipe, likes: Likes, seed: int, kind: str = "deepfm") -> TwoAucs:
    """Train one model under a protocol."""
    learner = Learner(recipe, likes, seed, kind=kind)
    return streamed(learner, seed) if protocol == "stream" else early_stopped(learner, protocol, seed)


def early_stopped(
    learner: Learner,
    split: Split,
    seed: int,
    *,
    most: int = 60,
    patience: int = 3,
    on_best: Callable[[Tensor], None] = lambda _: None,
) -> TwoAucs:
    """Train until valid has been no better for `patience` epochs; return what its best epoch reached.

    Args:
        on_best: Called with the test after each epoch that is the best so far.
    """
    train, valid, test = parts(len(learner.data), split, seed)
    best = TwoAucs(0.0, 0.0, 0)
    for epoch in epochs(learner, train, seed):
        reached = learner.auc(valid)
        if reached > best.valid:
            best = TwoAucs(reached, learner.auc(test), epoch)
            on_best(test)
        if epoch == most or epoch - best.epoch >= patience:
            return best
    raise AssertionError("epochs continue for good")


def streamed(learner: StreamLearner, seed: int) -> TwoAucs:
    """Go over all examples once, in the order of time, predicting first; return how well."""
    train, valid, test = parts(len(learner.data), "time", seed)
    learner.train(train)
    likes = learner.data.likes
    found = [auc(learner.predict_then_train(part), likes[part]) for part in (valid, test)]
    return TwoAucs(found[0], found[1], 1)
