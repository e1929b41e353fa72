"""`monolith experiment collisions`: the first experiment of the paper, on data that is at hand.

A table without collisions gives each id a row. The usual way around an unbounded vocabulary is to hash ids to
a fixed number of rows, where some ids share one. The same DeepFM is trained both ways, hashed to as many rows
as there are ids, to half and to a quarter, and measured after each epoch on ratings it has not seen.

Hashing is by MD5, as in the paper, users and items apart, another hash for each seed. Epochs are not chosen
by anything: the table shows all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from monolith.data import DriftConfig, DriftingStream
from monolith.errors import ConfigError
from monolith_bench.figures import new_figure, save_figure
from monolith_bench.learner import RECIPES, Learner, Recipe, epochs, mean_and_error, parts
from monolith_bench.movielens import Ratings, find_wheel, read_ratings
from monolith_bench.options import ExperimentCollisionsOptions
from monolith_bench.report import stderr_console

COLLISIONLESS = "a row for each id"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollisionPlan:
    """The options, settled."""

    ratings: Ratings
    data: str
    recipe: Recipe
    shares: tuple[float, ...]
    epochs: int
    seeds: int

    @classmethod
    def settle(cls, options: ExperimentCollisionsOptions) -> CollisionPlan:
        for name in ("epochs", "seeds"):
            if getattr(options, name) < 1:
                raise ConfigError(
                    f"experiment collisions: --{name} must be at least 1, got {getattr(options, name)}"
                )
        if wrong := [share for share in options.shares if not 0 < share <= 1]:
            raise ConfigError(
                f"experiment collisions: --shares are above 0 and at most 1, such as 0.5, got {wrong[0]:g}"
            )
        clicks = options.quick or options.data == "clicks"
        if clicks:
            ratings = click_log(1_500 if options.quick else 100_000)
        else:
            ratings = read_ratings(find_wheel(options.wheel))
        return cls(
            ratings=ratings,
            data="a click log made here" if clicks else "MovieLens-100k",
            recipe=RECIPES["random"].but(hidden=(8,)) if options.quick else RECIPES["random"],
            shares=options.shares,
            epochs=min(options.epochs, 2) if options.quick else options.epochs,
            seeds=min(options.seeds, 2) if options.quick else options.seeds,
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """The AUC of the test after each epoch, over the seeds."""

    name: str
    rows: int
    """How many users and items are told apart; the least of all seeds."""
    means: tuple[float, ...]
    errors: tuple[float, ...]
    """Standard errors of the means."""


def click_log(examples: int) -> Ratings:
    """Return clicks of users on items that were made up, not all by chance."""
    records = DriftingStream(DriftConfig()).records(0, examples)
    users, items, label = (records[name].flat_values for name in ("user", "item", "label"))
    return Ratings(users, items, label.float())


def hashed(ids: Tensor, share: float, salt: str) -> Tensor:
    """Return other ids for ids: numbers below a share of how many distinct ones there are, by MD5."""
    known, where = torch.unique(ids, return_inverse=True)
    rows = max(round(share * len(known)), 1)
    names = (hashlib.md5(f"{salt}/{one}".encode(), usedforsecurity=False) for one in known.tolist())
    return torch.tensor([int.from_bytes(name.digest()[:8]) % rows for name in names])[where]


def with_collisions(ratings: Ratings, share: float, seed: int) -> Ratings:
    users = hashed(ratings.users, share, f"user {seed}")
    return replace(ratings, users=users, items=hashed(ratings.items, share, f"item {seed}"))


def distinct(ratings: Ratings) -> int:
    return len(torch.unique(ratings.users)) + len(torch.unique(ratings.items))


def aucs_by_epoch(plan: CollisionPlan, ratings: Ratings, seed: int) -> list[float]:
    """Train one model; return the AUC of its test after each epoch."""
    train, _, test = parts(len(ratings), "random", seed)
    learner = Learner(plan.recipe, ratings, seed)
    steps = itertools.islice(epochs(learner, train, seed), plan.epochs)
    return [learner.auc(test) for _ in steps]


def measure(plan: CollisionPlan, say: Callable[[str], None]) -> list[Curve]:
    """Train all models, one after the other."""
    variants: dict[str, Callable[[int], Ratings]] = {COLLISIONLESS: lambda _: plan.ratings}
    for share in plan.shares:
        variants[f"hashed to {share:.0%}"] = lambda seed, share=share: with_collisions(  # type: ignore[misc]
            plan.ratings, share, seed
        )
    curves = []
    for name, ratings_of in variants.items():
        say(name)
        data = [ratings_of(seed) for seed in range(plan.seeds)]
        runs = [aucs_by_epoch(plan, one, seed) for seed, one in enumerate(data)]
        found = [mean_and_error(epoch) for epoch in zip(*runs, strict=True)]
        means, errors = zip(*found, strict=True)
        curves.append(Curve(name, min(map(distinct, data)), means, errors))
    return curves


def run(options: ExperimentCollisionsOptions) -> int:
    """Measure, draw a table on standard error, and a picture and JSON on request."""
    plan = CollisionPlan.settle(options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    console = stderr_console()
    try:
        curves = measure(plan, lambda name: console.print(f"[dim]training:[/] {name}", highlight=False))
    finally:
        torch.set_num_threads(threads)
    console.print(table(plan, curves))
    if options.plot is not None:
        draw(plan, curves, Path(options.plot))
        console.print(f"drawn to {options.plot}", highlight=False)
    if options.json:
        sys.stdout.write(json.dumps(as_json(plan, curves), indent=2) + "\n")
    return 0


def table(plan: CollisionPlan, curves: Sequence[Curve]) -> Table:
    """Return the AUCs, an epoch in each line."""
    title = f"Test AUC on {plan.data}, mean of {plan.seeds} seeds and its standard error"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    drawn.add_column("epoch", justify="right")
    for curve in curves:
        drawn.add_column(f"{curve.name}\n{curve.rows:,} rows", justify="right")
    for epoch in range(plan.epochs):
        cells = (f"{curve.means[epoch]:.4f} ± {curve.errors[epoch]:.4f}" for curve in curves)
        drawn.add_row(str(epoch + 1), *cells)
    return drawn


def as_json(plan: CollisionPlan, curves: Sequence[Curve]) -> dict[str, object]:
    return {
        "experiment": "collisions",
        "data": plan.data,
        "seeds": plan.seeds,
        "curves": [
            {"name": one.name, "rows": one.rows, "auc": list(one.means), "error": list(one.errors)}
            for one in curves
        ],
    }


def draw(plan: CollisionPlan, curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves with error bars.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write that ending.
    """
    figure = new_figure("experiment collisions", 7, 4.2)
    axes = figure.subplots()
    for curve in curves:
        axes.errorbar(
            range(1, plan.epochs + 1), curve.means, curve.errors, label=curve.name, marker="o", capsize=3
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("test AUC")
    axes.set_title(f"{plan.data}: a DeepFM, mean of {plan.seeds} seeds with standard errors")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(curves), frameon=False)
    save_figure(figure, "experiment collisions", path)
