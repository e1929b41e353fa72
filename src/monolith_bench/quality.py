"""`monolith experiment quality`: the AUC of all ready CTR models with their defaults, on public sets.

A model is trained with the defaults of a config file: those of its class, its rows, the dense optimizer and
the batch size; in epochs until the valid part is no better. `monolith_bench.learner` describes the protocols.
docs/quality.md has the table, and the evidence for the defaults.

`--sweep` compares changes of the defaults by the valid part alone, so that they may guide a choice;
`--recipes` adds a DeepFM with the settings that are best on MovieLens-100k; `--prefetch` compares the ways to
look rows up, `--codings` the rows of an export; `--baselines` adds what other libraries learn from a stream.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from monolith.data import BatchSpec, MemorySource, Pipeline, Stream
from monolith.errors import ConfigError
from monolith.feature import Batch
from monolith.model.ffm import FFM_BIAS_OPTIMIZER
from monolith.nn import auc
from monolith.runtime import Trainer
from monolith.table import Adagrad, RandomUniform
from monolith.train import Hook, Mode, StepResult, Task, TrainConfig, TrainingRun
from monolith_bench.learner import (
    RECIPES,
    Protocol,
    Recipe,
    Split,
    TwoAucs,
    aucs,
    make_model,
    mean_and_error,
    one_id_each,
    parts,
    streamed,
)
from monolith_bench.options import ExperimentQualityOptions
from monolith_bench.public_sets import SETS, Examples, click_examples, protocols_of, read_set
from monolith_bench.report import stderr_console
from monolith_bench.served_codings import CODINGS, coded_aucs
from monolith_bench.stream_baselines import BASELINES, river

Part = Literal["valid", "test"]

DEFAULTS = "defaults"
REFERENCES: Mapping[tuple[str, Protocol], float] = {
    ("ml-100k", "random"): 0.7872,
    ("ml-100k", "time"): 0.7108,
    ("ml-small", "random"): 0.7846,
}
"""The best known results of open libraries, by set and protocol: those of RecBole."""
REFERENCE = "reference"
STREAM_RATE = 0.1
"""The rate of rows that is better than the default in each stream of docs/quality.md, by valid: next to
baselines of several settings, models have this one, too."""


def changes() -> dict[str, Recipe]:
    """Return the defaults, and changes to them: what moves the AUC, and what does not."""
    return {
        DEFAULTS: Recipe(),
        **{f"rates of rows {rate}": Recipe.of_rows(Adagrad(learning_rate=rate)) for rate in (0.02, 0.1)},
        "rate of vectors 0.1": Recipe(settings={"optimizer": Adagrad(learning_rate=0.1)}),
        "rate of biases 0.2": Recipe(settings={"bias_optimizer": Adagrad(learning_rate=0.2)}),
        **{
            f"biases by Ftrl {rate}": Recipe(
                settings={"bias_optimizer": replace(FFM_BIAS_OPTIMIZER, learning_rate=rate)}
            )
            for rate in (0.1, 0.2, 0.5)
        },
        "first accumulator 1": Recipe.of_rows(Adagrad(initial_accumulator_value=1.0)),
        **{
            f"decay of vectors {decay:g}": Recipe(settings={"optimizer": Adagrad(weight_decay=decay)})
            for decay in (0.1, 0.3, 1.0)
        },
        **{
            f"first values within {width}": Recipe().but(initializer=RandomUniform(low=-width, high=width))
            for width in (0.01, 0.2)
        },
        "dim 8": Recipe().but(dim=8),
        "dim 32": Recipe().but(dim=32),
        "dropout 0.2": Recipe().but(dropout=0.2),
        "dense rate 0.0003": Recipe(dense_rate=3e-4),
        "dense rate 0.003": Recipe(dense_rate=3e-3),
        "dense decay 0.0001": Recipe(dense_decay=1e-4),
        "batch 256": Recipe(batch=256),
        "batch 1024": Recipe(batch=1024),
    }


@dataclass(frozen=True, slots=True)
class Quality:
    """The AUCs of one model with some settings, on one set under one protocol."""

    model: str
    data: str
    protocol: Protocol
    settings: str
    outcomes: tuple[TwoAucs, ...]
    """One for each seed."""
    examples_per_s: float | None = None
    """How fast it trained, where that was measured."""

    @property
    def case(self) -> str:
        return f"{SETS[self.data].title}, {self.protocol}"

    @property
    def trained(self) -> str:
        own = self.settings == DEFAULTS and self.model not in BASELINES
        return self.model if own else f"{self.model}, {self.settings}"

    def auc(self, part: Part) -> tuple[float, float]:
        """Return the mean AUC of a part, and its standard error."""
        return mean_and_error([getattr(one, part) for one in self.outcomes])

    def cell(self, part: Part) -> str:
        mean, error = self.auc(part)
        speed = "" if self.examples_per_s is None else f" ({self.examples_per_s:,.0f}/s)"
        return f"{mean:.4f}{speed}" if len(self.outcomes) == 1 else f"{mean:.4f} ± {error:.4f}{speed}"

    def to_json(self, shown: Sequence[Part]) -> dict[str, object]:
        names = ("model", "data", "protocol", "settings")
        found: dict[str, object] = {name: getattr(self, name) for name in names}
        for part in shown:
            mean, error = self.auc(part)
            found[part] = {"auc": mean, "error": error if len(self.outcomes) > 1 else None}
        if self.examples_per_s is not None:
            found["examples_per_s"] = self.examples_per_s
        reference = REFERENCES.get((self.data, self.protocol))
        return found | {"epochs": [one.epoch for one in self.outcomes], "reference": reference}


# Predict-then-train by `Trainer`

PREFETCH: Mapping[str, Mapping[str, Any]] = {
    "prefetch 1, fresh rows (default)": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 1, rows looked up ahead": {"fresh_rows": False},
}
"""What `--prefetch` compares: settings of `TrainConfig`."""


@dataclass(frozen=True, eq=False)
class LikeTask(Task):
    """Learns from users and items which items are liked, in the order of time, by the recipe for streams."""

    data: Examples
    seed: int

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        columns = {**self.data.ids, "like": self.data.likes}
        spec = BatchSpec(ids=tuple(self.data.ids), labels={"like": ("like", 0)}, event_time=None)
        return Pipeline(MemorySource(columns, batch_size=RECIPES["stream"].batch)).to_batches(spec)

    def model(self) -> nn.Module:
        return make_model(RECIPES["stream"], one_id_each(tuple(self.data.ids)), self.seed)


class _Predicted(Hook):
    """Keeps the prediction of every example, made before it was trained on."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.found.append(result.predictions["like"])


def prefetched(data: Examples, seed: int, **settings: Any) -> tuple[TwoAucs, float]:
    """Train on all examples once, in order, by `Trainer` with these settings.

    Returns:
        The AUCs of predictions made before training, and how many seconds it took.
    """
    _, valid, test = parts(len(data), "time", seed)
    predicted, config = _Predicted(), TrainConfig(summary_every_steps=None, seed=seed, **settings)
    trainer = Trainer(LikeTask(data, seed), config, hooks=[predicted])
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    scores = torch.cat(predicted.found)
    found = [auc(scores[part], data.likes[part]) for part in (valid, test)]
    return TwoAucs(found[0], found[1], 1), seconds


# Measuring


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityPlan:
    """The options, settled."""

    models: tuple[str, ...]
    data: Mapping[str, Examples]
    protocols: tuple[Protocol, ...]
    seeds: int
    sweep: Mapping[str, Recipe]
    """The defaults and the changes to compare with them; empty if there is no sweep."""
    recipes: bool
    prefetch: bool
    codings: bool
    baselines: tuple[str, ...]
    """Packages to compare with in streams."""
    batch: int | None
    """The batch size, where it is not that of the settings."""

    @classmethod
    def settle(cls, options: ExperimentQualityOptions) -> QualityPlan:
        if options.seeds < 1:
            raise ConfigError(f"experiment quality: --seeds must be at least 1, got {options.seeds}")
        exclusive = [
            options.sweep,
            options.recipes,
            options.prefetch,
            options.codings,
            bool(options.baselines),
        ]
        if sum(exclusive) > 1:
            raise ConfigError(
                "experiment quality: choose one of --sweep, --recipes, --prefetch, --codings and --baselines"
            )
        if options.changes and not options.sweep:
            raise ConfigError("experiment quality: --changes are compared by --sweep")
        if options.batch is not None:
            if options.batch < 1:
                raise ConfigError(f"experiment quality: --batch must be at least 1, got {options.batch}")
            if options.sweep or options.recipes or options.prefetch:
                raise ConfigError("experiment quality: --batch is for the defaults and --baselines alone")
        if options.baselines and "stream" not in options.protocols:
            raise ConfigError(
                "experiment quality: --baselines are compared in streams: have stream among --protocols"
            )
        if "river" in options.baselines:
            river()  # a run of minutes should not find at its end that the package is missing
        chosen = {DEFAULTS: Recipe()}
        for named in options.changes or ("",):
            found = {said: one for said, one in changes().items() if said.startswith(named)}
            if not found:
                raise ConfigError(
                    f"experiment quality: no change begins with {named!r}; there are {', '.join(changes())}"
                )
            chosen |= found
        if options.quick:
            data = {"clicks": click_examples(3_000)}
        else:
            data = {name: read_set(name, Path(options.folder)) for name in options.sets}
        return cls(
            models=tuple(options.models),
            data=data,
            protocols=tuple(options.protocols),
            seeds=min(options.seeds, 2) if options.quick else options.seeds,
            sweep=chosen if options.sweep else {},
            recipes=options.recipes,
            prefetch=options.prefetch,
            codings=options.codings,
            baselines=tuple(options.baselines),
            batch=options.batch,
        )

    @property
    def shown(self) -> tuple[Part, ...]:
        """The parts whose AUC is printed; a sweep hides the test, so that settings cannot be chosen by it."""
        return ("valid",) if self.sweep else ("valid", "test")

    def settings(self, model: str, protocol: Protocol) -> dict[str, Recipe]:
        """Return what a model is trained with."""
        if self.sweep:
            return dict(self.sweep)
        if self.batch is not None or self.baselines:
            batch = Recipe().batch if self.batch is None else self.batch
            said = DEFAULTS if self.batch is None else f"batches of {batch}"
            found = {said: Recipe(batch=batch)}
            if self.baselines and protocol == "stream":
                faster = Adagrad(learning_rate=STREAM_RATE)
                found[f"rates of rows {STREAM_RATE}"] = Recipe.of_rows(faster, batch=batch)
            return found
        recipe = {"recipe": RECIPES[protocol]} if self.recipes and model == "deepfm" else {}
        return {DEFAULTS: Recipe(), **recipe}


def measured(plan: QualityPlan) -> Iterator[Quality]:
    """Train all models of a plan, set by set."""
    for name, data in plan.data.items():
        if plan.prefetch:
            yield from compared(name, data, plan.seeds)
            continue
        for protocol in (one for one in plan.protocols if one in protocols_of(data)):
            for model in plan.models:
                made = [data.made_for(model, protocol, seed) for seed in range(plan.seeds)]
                if (ready := [one for one in made if one is not None]) != made:
                    continue  # the set has not what the model reads
                if plan.codings:
                    if protocol != "stream":  # whose rows are of each moment
                        yield from served(name, ready, protocol, model)
                    continue
                for said, recipe in plan.settings(model, protocol).items():
                    found = [aucs(protocol, recipe, one, seed, model) for seed, one in enumerate(ready)]
                    yield Quality(model, name, protocol, said, tuple(found))
            if protocol == "stream":
                yield from others(name, data, plan)


def others(name: str, data: Examples, plan: QualityPlan) -> Iterator[Quality]:
    """Have the baselines of a plan learn from a stream, with the batches of the ready models."""
    batch = Recipe().batch if plan.batch is None else plan.batch
    for model, settings in BASELINES.items():
        if model.startswith(plan.baselines):
            for said, make in settings.items():
                found = [streamed(make(data, seed, batch), seed) for seed in range(plan.seeds)]
                yield Quality(model, name, "stream", said, tuple(found))


def served(name: str, data: Sequence[Examples], protocol: Split, model: str) -> Iterator[Quality]:
    """Compare the rows of exports; there are examples for each seed."""
    found = [coded_aucs(protocol, Recipe(), one, seed, model) for seed, one in enumerate(data)]
    for coding in CODINGS:
        yield Quality(model, name, protocol, coding, tuple(one[coding] for one in found))


def compared(name: str, data: Examples, seeds: int) -> Iterator[Quality]:
    """Compare the ways to look rows up, in turn for each seed, so that a busy machine slows all of them."""
    outcomes: dict[str, list[tuple[TwoAucs, float]]] = {settings: [] for settings in PREFETCH}
    for seed in range(seeds):
        for said, settings in PREFETCH.items():
            outcomes[said].append(prefetched(data, seed, **settings))
    for said, found in outcomes.items():
        fastest = len(data) / min(seconds for _, seconds in found)
        yield Quality("deepfm", name, "stream", said, tuple(aucs for aucs, _ in found), fastest)


def run(options: ExperimentQualityOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = QualityPlan.settle(options)
    console = stderr_console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batches are small: a second thread costs more than it does
    results = []
    try:
        for one in measured(plan):
            part = plan.shown[-1]
            console.print(f"[dim]{one.case}, {one.trained}:[/] {part} {one.cell(part)}", highlight=False)
            results.append(one)
    finally:
        torch.set_num_threads(threads)
    console.print(table(results, plan))
    if options.json:
        report = {"experiment": "quality", "results": [one.to_json(plan.shown) for one in results]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


def table(results: Sequence[Quality], plan: QualityPlan) -> Table:
    """Return a line for each set and protocol, and a column for each model; of many settings, transposed."""
    part = plan.shown[-1]
    title = f"AUC of the {part} part, mean of {plan.seeds} seeds and its standard error"
    cells = {(one.case, one.trained): one.cell(part) for one in results}
    cells |= {
        (one.case, REFERENCE): f"{found:.4f}"
        for one in results
        if part == "test" and (found := REFERENCES.get((one.data, one.protocol)))
    }
    if plan.sweep or plan.baselines:  # many settings: a line for each
        cells = {(settings, data): cell for (data, settings), cell in cells.items()}
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = list(dict.fromkeys(column for _, column in cells))
    for heading in ("", *columns):
        drawn.add_column(heading)
    for row in dict.fromkeys(row for row, _ in cells):
        drawn.add_row(row, *(cells.get((row, column), "–") for column in columns))
    return drawn
