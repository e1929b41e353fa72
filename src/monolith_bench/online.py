"""`monolith experiment online`: rankers on MovieLens-1M in the order of time, predict-then-train.

All ratings are read once, in the order of time, by `Trainer`, as a run reads a stream. A batch is predicted
by the model as it stands, and then trained on. The label is a rating of 4 or 5. AUC and log loss are those
of all predictions after the first fifth of the ratings, in which a model learns what there is.

All models read the user, the movie and the hour of the day. `hstu` (a `SequenceRanker`) and `din` read in
addition the last movies that the user liked, and when: histories that the pipeline builds as it reads, so
that they contain no rating of the future. Settings are the defaults of the models; only the width is the
same for all.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from monolith.data import HistoryConfig, MemorySource, Pipeline, Stream
from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureSpec, HistoryFeature, IdFeature, Label, SequenceFeature
from monolith.model import DeepFM, DeepInterest
from monolith.model.sequence_ranker import SequenceRanker
from monolith.nn import auc
from monolith.observe import progress
from monolith.runtime import Trainer
from monolith.train import Hook, Mode, StepResult, Task, TrainConfig, TrainingRun
from monolith_bench.jobs import computed
from monolith_bench.learner import mean_and_error
from monolith_bench.movielens import LIKED, RatingLog, fetch_ml_1m, read_ml_1m_ratings
from monolith_bench.options import ExperimentOnlineOptions
from monolith_bench.report import stderr_console

WARM_UP = 0.2
"""The share of the ratings that is learned before metrics begin."""
METRICS = ("auc", "log_loss")
HEADINGS = {"auc": "AUC", "log_loss": "log loss"}

_IDS: Mapping[str, Any] = {"user": IdFeature(), "item": IdFeature(), "hour": IdFeature()}


def spec_of(model: str, history: int) -> FeatureSpec:
    """Return the features of a model.

    Args:
        history: How many movies that the user liked `hstu` and `din` see.
    """
    features = dict(_IDS)
    if model == "hstu":
        features["liked"] = HistoryFeature(of="item", max=history, with_=("time",), by="user", only="like")
    elif model == "din":
        features["liked"] = SequenceFeature(length=history, shares="item", times="liked.time")
    return FeatureSpec(features=features, labels={"like": Label()}, event_time="time")


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "hstu": SequenceRanker,
    "din": DeepInterest,
    "deepfm": DeepFM,
}


@dataclass(frozen=True, eq=False)
class LikesTask(Task):
    """Learns which movies are liked, in the order of time."""

    log: RatingLog
    kind: str
    options: ExperimentOnlineOptions
    seed: int

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        columns = {
            "user": self.log.users,
            "item": self.log.items,
            "hour": self.log.times // 3600 % 24,
            "time": self.log.times,
            "like": (self.log.ratings >= LIKED).float(),
        }
        spec = spec_of(self.kind, self.options.history)
        records = Pipeline(MemorySource(columns, batch_size=self.options.batch))
        if "liked" in spec.features:
            config = HistoryConfig(
                by="user",
                of="item",
                max=self.options.history,
                time="time",
                companions={"time": "time"},
                only="like",
                name="liked",
            )
            records = records.history(config)
        return records.to_batches(spec)

    def model(self) -> nn.Module:
        return MODELS[self.kind](
            spec_of(self.kind, self.options.history), dim=self.options.dim, seed=self.seed
        )


class _Predicted(Hook):
    """Keeps the prediction of every example, made before it was trained on."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self.found: list[Tensor] = []
        self._advance = advance

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.found.append(result.predictions["like"])
        self._advance(len(self.found[-1]))


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """How well one model predicted what it had not learned yet."""

    model: str
    seed: int
    metrics: Mapping[str, float]
    seconds: float


def predictions(log: RatingLog, kind: str, options: ExperimentOnlineOptions, seed: int) -> Tensor:
    """Go over all ratings once; return the probability of each like, predicted before it was learned."""
    config = TrainConfig(
        summary_every_steps=None,
        seed=seed,
        accelerator="cuda" if options.device == "cuda" else None,
    )
    with progress(f"{kind}, seed {seed}", len(log), "ratings") as shown:
        hook = _Predicted(shown.advance)
        Trainer(LikesTask(log, kind, options, seed), config, hooks=[hook]).train()
    return torch.cat(hook.found).cpu()


def measure(log: RatingLog, kind: str, options: ExperimentOnlineOptions, seed: int) -> OnlineResult:
    """Measure one model with one seed, and show what it reached."""
    began = time.perf_counter()
    later = slice(int(WARM_UP * len(log)), None)
    scores = predictions(log, kind, options, seed)[later]
    seconds = time.perf_counter() - began
    likes = (log.ratings >= LIKED).float()[later]
    metrics = {"auc": auc(scores, likes), "log_loss": float(binary_cross_entropy(scores, likes))}
    found = ", ".join(f"{HEADINGS[name]} {metrics[name]:.4f}" for name in METRICS)
    stderr_console().print(f"[dim]{kind}, seed {seed}, {seconds:.0f} s:[/] {found}", highlight=False)
    return OnlineResult(kind, seed, metrics, seconds)


def measured(options: ExperimentOnlineOptions, log: RatingLog) -> Iterator[OnlineResult]:
    """Measure the models in turn for each seed, so that a busy machine slows all of them."""
    calls = [(log, kind, options, seed) for seed in range(options.seeds) for kind in options.models]
    yield from computed(options.jobs, measure, calls)


def protocol(log: RatingLog) -> str:
    """Return how results are made, in one line."""
    return (
        f"{len(log):,} ratings in the order of time, read once; each batch is predicted, then learned; "
        f"metrics over the last {1 - WARM_UP:.0%}; a like is a rating of {LIKED} or more"
    )


def run(options: ExperimentOnlineOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    for name in ("seeds", "batch", "history", "dim", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"experiment online: --{name} must be at least 1, got {getattr(options, name)}")
    log = read_ml_1m_ratings(fetch_ml_1m(Path(options.folder))).first(options.ratings)
    results = list(measured(options, log))
    console = stderr_console()
    console.print(table(results))
    console.print(f"Protocol: {protocol(log)}.", highlight=False)
    if options.json:
        report = {
            "experiment": "online",
            "protocol": protocol(log),
            "batch": options.batch,
            "history": options.history,
            "dim": options.dim,
            "device": options.device,
            "results": [to_json(results, model) for model in options.models],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


def to_json(results: Sequence[OnlineResult], model: str) -> dict[str, object]:
    """Return the means of a model with their errors, and what each seed reached."""
    own = [one for one in results if one.model == model]
    means = {name: mean_and_error([one.metrics[name] for one in own]) for name in METRICS}
    return {
        "model": model,
        "mean": {name: mean for name, (mean, _) in means.items()},
        "error": {name: None if math.isnan(error) else error for name, (_, error) in means.items()},
        "seeds": [{"seed": one.seed, **one.metrics, "seconds": one.seconds} for one in own],
    }


def table(results: Sequence[OnlineResult]) -> Table:
    """Return a line for each model: the mean over seeds, and its standard error."""
    title = "MovieLens-1M in the order of time, predict then train"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("model", *HEADINGS.values(), "seeds", "s"):
        drawn.add_column(heading)
    for model in dict.fromkeys(one.model for one in results):
        own = [one for one in results if one.model == model]
        means = [mean_and_error([one.metrics[name] for one in own]) for name in METRICS]
        seconds = sum(one.seconds for one in own) / len(own)
        drawn.add_row(
            model, *("{:.4f} ± {:.4f}".format(*mean) for mean in means), str(len(own)), f"{seconds:.0f}"
        )
    return drawn
