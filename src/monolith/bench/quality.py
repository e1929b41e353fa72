"""`monolith experiment movielens`: how good a DeepFM is on MovieLens-100k, under three fixed protocols.

- random: 80 % at random to train, 10 % to choose by, 10 % to test; epochs until valid is no better.
- time: the same shares by time: valid comes after what is trained on, and the test after that.
- stream: one pass in the order of time; what comes after the first 80 % is predicted, batch by batch, before
  it is learned from.

The settings are `RECIPES`. They were chosen by the valid part; docs/guides/tuning.md says what moved what.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich import box
from rich.table import Table

from monolith.bench.movielens import (
    RECIPES,
    Likes,
    Protocol,
    Ratings,
    Recipe,
    TwoAucs,
    early_stopped,
    find_wheel,
    mean_and_error,
    read_ratings,
    streamed,
    variants,
)
from monolith.bench.options import ExperimentMovielensOptions
from monolith.bench.report import stderr_console
from monolith.errors import ConfigError

Part = Literal["valid", "test"]


@dataclass(frozen=True, slots=True)
class Quality:
    """What some settings reached under one protocol."""

    protocol: Protocol
    settings: str
    outcomes: tuple[TwoAucs, ...]
    """One for each seed."""

    def to_json(self, shown: Sequence[Part]) -> dict[str, object]:
        found: dict[str, object] = {"protocol": self.protocol, "settings": self.settings}
        for part in shown:
            mean, error = self.auc(part)
            found[part] = {"auc": mean, "error": error}
        return found | {"epochs": [one.epoch for one in self.outcomes]}

    def auc(self, part: Part) -> tuple[float, float]:
        """Return the mean AUC of a part, and its standard error."""
        return mean_and_error([getattr(one, part) for one in self.outcomes])


def aucs(protocol: Protocol, recipe: Recipe, ratings: Likes, seed: int) -> TwoAucs:
    """Train one model under a protocol."""
    if protocol == "stream":
        return streamed(recipe, ratings, seed)
    return early_stopped(recipe, ratings, protocol, seed)


def measured(options: ExperimentMovielensOptions, ratings: Ratings) -> Iterator[Quality]:
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
    for one in results:
        cells = ["{:.4f} ± {:.4f}".format(*one.auc(part)) for part in shown]
        drawn.add_row(one.protocol, one.settings, *cells, " ".join(str(run.epoch) for run in one.outcomes))
    return drawn
