"""`monolith experiment retrieval`: what a two-tower model finds on MovieLens-100k, by its negatives.

Likes are split at random, 80 % to train, 10 % to choose by and 10 % that nothing here looks at. After each
epoch, all movies but those that a user is known to like are ranked for each user with likes in the second
part, and the recall of these is measured. The best epoch counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.model import EmbeddingOptimizer, TwoTower
from monolith.model.retrieval import Negatives
from monolith.train.metrics import ranking_scores
from monolith_bench.learner import mean_and_error, parts
from monolith_bench.movielens import Ratings, find_wheel, read_ratings
from monolith_bench.options import ExperimentRetrievalOptions
from monolith_bench.report import stderr_console

BATCH = 512
"""Likes in a batch; with drawn negatives, as many of these again."""
AT = 10
PATIENCE = 3
SETTINGS: tuple[tuple[Negatives, bool], ...] = (
    ("batch", True),
    ("batch", False),
    ("both", True),
    ("both", False),
)
"""Negatives, and whether popularity is corrected for."""


@dataclass(frozen=True, slots=True)
class RecallBySetting:
    """What a setting reached on the valid part."""

    negatives: Negatives
    correction: bool
    mean: float
    error: float
    epochs: tuple[int, ...]
    """The best of each seed."""


class Finder:
    """A two-tower model of users and movies with what trains it. One thread."""

    def __init__(self, likes: Ratings, negatives: Negatives, correction: bool, seed: int) -> None:
        self._likes, self._drawn = likes, negatives != "batch"
        self._items = torch.unique(likes.items)
        self._random = torch.Generator().manual_seed(seed)
        self._model = TwoTower(
            ["user", "item"],
            item=["item"],
            user_id="user",
            negatives=negatives,
            correction=correction,
            seed=seed,
            threads=1,
        )
        self._rows = EmbeddingOptimizer(self._model)
        self._dense = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def train(self, some: Tensor) -> None:
        """Learn from likes, in another order each time."""
        self._model.train()
        order = some[torch.randperm(len(some), generator=self._random)]
        for part in torch.split(order, BATCH):
            users, items, liked = self._likes.users[part], self._likes.items[part], torch.ones(len(part))
            if self._drawn:
                places = torch.randint(len(self._items), (len(part),), generator=self._random)
                users, items = users.repeat(2), torch.cat([items, self._items[places]])
                liked = torch.cat([liked, torch.zeros(len(part))])
            batch = Batch(ids=FeatureIds.pack({"user": users, "item": items}), labels={"like": liked})
            self._rows.zero_grad()
            self._dense.zero_grad()
            torch.autograd.backward(self._model.pick(batch).loss)
            self._rows.step()
            self._dense.step()

    def recall(self, known: Tensor, wanted: Tensor) -> float:
        """Return how many of the wanted likes are among the first `AT`, those known left out, by user."""
        self._model.eval()
        users = torch.unique(self._likes.users[wanted])
        with torch.no_grad():
            mine = self._model.users(self._batch(users, self._items[:1].expand(len(users))))
            all_items = self._model.items(self._batch(users[:1].expand(len(self._items)), self._items))
        scores = mine @ all_items.t()
        scores[self._places(users, known)] = -torch.inf
        relevant = torch.zeros_like(scores)
        relevant[self._places(users, wanted)] = 1
        return float(ranking_scores(scores, relevant, ks=[AT])[f"recall@{AT}"].nanmean())

    def _batch(self, users: Tensor, items: Tensor) -> Batch:
        return Batch(ids=FeatureIds.pack({"user": users, "item": items}))

    def _places(self, users: Tensor, likes: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of the likes of these users."""
        own = likes[torch.isin(self._likes.users[likes], users)]
        rows = torch.searchsorted(users, self._likes.users[own])
        return rows, torch.searchsorted(self._items, self._likes.items[own])


def best_recall(likes: Ratings, negatives: Negatives, correction: bool, seed: int) -> tuple[float, int]:
    """Train until the valid part is no better; return its best recall, and after which epoch."""
    train, valid, _ = parts(len(likes), "random", seed)
    finder = Finder(likes, negatives, correction, seed)
    best, at, epoch = -1.0, 0, 0
    while epoch - at < PATIENCE:
        finder.train(train)
        epoch += 1
        if (reached := finder.recall(train, valid)) > best:
            best, at = reached, epoch
    return best, at


def measured(likes: Ratings, seeds: int) -> Iterator[RecallBySetting]:
    for negatives, correction in SETTINGS:
        runs = [best_recall(likes, negatives, correction, seed) for seed in range(seeds)]
        mean, error = mean_and_error([recall for recall, _ in runs])
        yield RecallBySetting(negatives, correction, mean, error, tuple(epoch for _, epoch in runs))


def run(options: ExperimentRetrievalOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    if options.seeds < 1:
        raise ConfigError(f"experiment retrieval: --seeds must be at least 1, got {options.seeds}")
    ratings = read_ratings(find_wheel(options.wheel))
    liked = ratings.likes > 0
    likes = Ratings(ratings.users[liked], ratings.items[liked], ratings.likes[liked])
    console = stderr_console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    results = []
    try:
        for one in measured(likes, options.seeds):
            said = f"{one.negatives}, {'corrected' if one.correction else 'not corrected'}"
            console.print(f"[dim]{said}:[/] {one.mean:.4f} ± {one.error:.4f}", highlight=False)
            results.append(one)
    finally:
        torch.set_num_threads(threads)
    console.print(table(results, options.seeds))
    if options.json:
        lines = [
            {
                "negatives": one.negatives,
                "correction": one.correction,
                "valid": {f"recall@{AT}": one.mean, "error": one.error},
                "epochs": list(one.epochs),
            }
            for one in results
        ]
        sys.stdout.write(json.dumps({"experiment": "retrieval", "results": lines}, indent=2) + "\n")
    return 0


def table(results: Sequence[RecallBySetting], seeds: int) -> Table:
    title = f"recall@{AT} of the valid part, mean of {seeds} seeds and its standard error"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("negatives", "correction", "recall", "epochs"):
        drawn.add_column(heading)
    for one in results:
        cell = f"{one.mean:.4f} ± {one.error:.4f}"
        drawn.add_row(one.negatives, "yes" if one.correction else "no", cell, " ".join(map(str, one.epochs)))
    return drawn
