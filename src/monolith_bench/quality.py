"""`monolith experiment movielens`: how good a DeepFM is on MovieLens-100k, under three fixed protocols.

- random: 80 % at random to train, 10 % to choose by, 10 % to test; epochs until valid is no better.
- time: the same shares by time: valid comes after what is trained on, and the test after that.
- stream: one pass in the order of time; what comes after the first 80 % is predicted, batch by batch, before
  it is learned from.

`--prefetch` takes the stream through `Trainer`, once for each way to look rows up.

The settings are `RECIPES`. They were chosen by the valid part; docs/guides/tuning.md says what moved what.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from monolith.data import BatchSpec, MemorySource, Pipeline, Stream
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.nn import auc
from monolith.runtime import Trainer
from monolith.train import Hook, Mode, StepResult, Task, TrainConfig, TrainingRun
from monolith_bench.movielens import (
    RECIPES,
    Likes,
    Protocol,
    Ratings,
    Recipe,
    TwoAucs,
    early_stopped,
    find_wheel,
    make_deepfm,
    mean_and_error,
    parts,
    read_ratings,
    streamed,
    variants,
)
from monolith_bench.options import ExperimentMovielensOptions
from monolith_bench.report import stderr_console

Part = Literal["valid", "test"]


@dataclass(frozen=True, slots=True)
class Quality:
    """What some settings reached under one protocol."""

    protocol: Protocol
    settings: str
    outcomes: tuple[TwoAucs, ...]
    """One for each seed."""
    examples_per_s: float | None = None
    """How fast it trained, where that was measured."""

    def to_json(self, shown: Sequence[Part]) -> dict[str, object]:
        found: dict[str, object] = {"protocol": self.protocol, "settings": self.settings}
        for part in shown:
            mean, error = self.auc(part)
            found[part] = {"auc": mean, "error": error}
        if self.examples_per_s is not None:
            found["examples_per_s"] = self.examples_per_s
        return found | {"epochs": [one.epoch for one in self.outcomes]}

    def auc(self, part: Part) -> tuple[float, float]:
        """Return the mean AUC of a part, and its standard error."""
        return mean_and_error([getattr(one, part) for one in self.outcomes])


def aucs(protocol: Protocol, recipe: Recipe, ratings: Likes, seed: int) -> TwoAucs:
    """Train one model under a protocol."""
    if protocol == "stream":
        return streamed(recipe, ratings, seed)
    return early_stopped(recipe, ratings, protocol, seed)


PREFETCH: Mapping[str, Mapping[str, Any]] = {
    "prefetch 1, fresh rows (default)": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 1, rows looked up ahead": {"fresh_rows": False},
}
"""What `--prefetch` compares: settings of `TrainConfig`."""


@dataclass(frozen=True, eq=False)
class LikeTask(Task):
    """Learns who likes what, in the order of time, by a recipe."""

    ratings: Ratings
    recipe: Recipe
    seed: int

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        one = self.ratings
        columns = {"user": one.users, "item": one.items, "like": one.likes}
        spec = BatchSpec(ids=("user", "item"), labels={"like": ("like", 0)}, event_time=None)
        return Pipeline(MemorySource(columns, batch_size=self.recipe.batch)).to_batches(spec)

    def model(self) -> nn.Module:
        return make_deepfm(self.recipe, self.ratings.names, self.seed)

    def dense_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.recipe.dense_rate)


class _Predicted(Hook):
    """Keeps the prediction of every example, made before it was trained on."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.found.append(result.predictions["like"])


def prefetched(ratings: Ratings, seed: int, **settings: Any) -> tuple[TwoAucs, float]:
    """Go over all ratings once as `streamed`, by `Trainer` with these settings; return how well, and how many
    seconds that took."""
    _, valid, test = parts(len(ratings), "time", seed)
    predicted, config = _Predicted(), TrainConfig(summary_every_steps=None, seed=seed, **settings)
    trainer = Trainer(LikeTask(ratings, RECIPES["stream"], seed), config, hooks=[predicted])
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    scores = torch.cat(predicted.found)
    found = [auc(scores[part], ratings.likes[part]) for part in (valid, test)]
    return TwoAucs(found[0], found[1], 1), seconds


def compared(options: ExperimentMovielensOptions, ratings: Ratings) -> Iterator[Quality]:
    """Compare the ways to look rows up, in turn for each seed, so that a busy machine slows all of them."""
    outcomes: dict[str, list[tuple[TwoAucs, float]]] = {name: [] for name in PREFETCH}
    for seed in range(options.seeds):
        for name, settings in PREFETCH.items():
            outcomes[name].append(prefetched(ratings, seed, **settings))
    for name, found in outcomes.items():
        fastest = len(ratings) / min(seconds for _, seconds in found)
        yield Quality("stream", name, tuple(aucs for aucs, _ in found), fastest)


def measured(options: ExperimentMovielensOptions, ratings: Ratings) -> Iterator[Quality]:
    if options.prefetch:
        yield from compared(options, ratings)
        return
    for protocol in options.protocols:
        recipes = {"recipe": RECIPES[protocol]} | ({"defaults": Recipe()} if options.defaults else {})
        for name, recipe in (variants() if options.sweep else recipes).items():
            found = tuple(aucs(protocol, recipe, ratings, seed) for seed in range(options.seeds))
            yield Quality(protocol, name, found)


def run(options: ExperimentMovielensOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    if options.seeds < 1:
        raise ConfigError(f"experiment movielens: --seeds must be at least 1, got {options.seeds}")
    ratings = read_ratings(find_wheel(options.wheel))
    console = stderr_console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    results = []
    try:
        for one in measured(options, ratings):
            console.print(f"[dim]measured:[/] {one.protocol}, {one.settings}", highlight=False)
            results.append(one)
    finally:
        torch.set_num_threads(threads)
    shown: tuple[Part, ...] = ("valid",) if options.sweep else ("valid", "test")
    console.print(table(results, shown, options.seeds))
    if options.json:
        report = {"experiment": "movielens", "results": [one.to_json(shown) for one in results]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


def table(results: Sequence[Quality], shown: Sequence[Part], seeds: int) -> Table:
    """Return a line for each result, with the AUCs of the parts that are shown."""
    title = f"AUC on MovieLens-100k, mean of {seeds} seeds and its standard error"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("protocol", "settings", *shown, "epochs"):
        drawn.add_column(heading)
    if timed := any(one.examples_per_s is not None for one in results):
        drawn.add_column("examples/s")
    for one in results:
        cells = ["{:.4f} ± {:.4f}".format(*one.auc(part)) for part in shown]
        speed = [f"{one.examples_per_s or 0:,.0f}"] if timed else []
        epochs = " ".join(str(run.epoch) for run in one.outcomes)
        drawn.add_row(one.protocol, one.settings, *cells, epochs, *speed)
    return drawn
