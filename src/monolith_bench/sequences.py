"""`monolith experiment sequences`: next-item models on MovieLens-1M, by the published protocol.

The protocol is that of the generative-recommenders repository (Zhai et al., 2024). The last item of each
user is the test, and all before it are trained on. The item is ranked among all items, without those of the
history that the model was given, which are the last 200. Every step predicts the next one, by a softmax over
its item and 128 others that are drawn evenly. All models have the same size and the same training, and the
metrics are those after the last epoch: no epoch is chosen by the test.

`--tables` trains the ready models as a run does, by the same protocol: rows are in tables, and negatives are
drawn from the items of a batch, with a correction for popular ones.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from monolith.data import UserSequences, leave_one_out
from monolith.errors import ConfigError
from monolith.feature import Batch, Each, FeatureIds
from monolith.model import HSTU, EmbeddingOptimizer, Feature, GRU4Rec, SASRec
from monolith.model.next_item import NextItem
from monolith.nn import GRUEncoder, HSTUEncoder, SASRecEncoder
from monolith.observe import progress
from monolith.table import Adam
from monolith.tensors import RaggedTensor
from monolith.train import Candidates
from monolith_bench.learner import mean_and_error
from monolith_bench.movielens import fetch_ml_1m, read_ml_1m
from monolith_bench.options import ExperimentSequencesOptions
from monolith_bench.report import stderr_console

KS = (10, 50)
SHOWN = ("hit_rate@10", "ndcg@10", "hit_rate@50", "mrr")
HEADINGS = {"hit_rate@10": "HR@10", "ndcg@10": "NDCG@10", "hit_rate@50": "HR@50", "mrr": "MRR"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The published settings; a test makes them smaller."""

    dim: int = 50
    layers: int = 2
    heads: int = 1
    max_length: int = 200
    dropout: float = 0.2
    negatives: int = 128
    temperature: float = 0.05
    batch: int = 128
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """Steps of some users, end to end, with the next step of each. On one device."""

    items: Tensor
    """int64 of shape (steps,): numbers from 0 on."""
    times: Tensor
    """int64 of shape (steps,): Unix seconds."""
    next_items: Tensor
    """int64 of shape (steps,): what each step predicts."""
    next_times: Tensor
    """int64 of shape (steps,): when that happened, which a server knows, too: it is the time of a request."""
    row_splits: Tensor
    """int64 of shape (users + 1,)."""

    @classmethod
    def of(cls, log: UserSequences, rows: Tensor, ends: Tensor, most: int, device: torch.device) -> Histories:
        """Take the last `most` steps before each end; the step at the end is the last that is predicted."""
        places, splits = log.windows(rows, ends, most)
        # One copy for all: each would wait for the device.
        columns = torch.stack(
            [log.items[places], log.times[places], log.items[places + 1], log.times[places + 1]]
        )
        if device.type == "cuda":
            columns, splits = columns.pin_memory(), splits.pin_memory()
        items, times, next_items, next_times = columns.to(device, non_blocking=True)
        return cls(items, times, next_items, next_times, splits.to(device, non_blocking=True))


class NextItemModel(nn.Module):
    """Vectors of items, and an encoder of histories whose states find the next item by cosine."""

    def __init__(self, items: int, encoder: nn.Module, settings: Settings, *, timed: bool) -> None:
        super().__init__()
        self._settings, self._timed = settings, timed
        self.items = nn.Embedding(items, settings.dim)
        nn.init.trunc_normal_(self.items.weight, std=0.02)
        self.encoder = encoder
        self.dropout = nn.Dropout(settings.dropout)
        # The other encoders have positions of their own, or need none.
        self.positions = nn.Parameter(torch.empty(settings.max_length, settings.dim)) if timed else None
        for positions in (self.positions, getattr(encoder, "positions", None)):
            if positions is not None:
                nn.init.trunc_normal_(positions, std=settings.dim**-0.5)

    def states(self, batch: Histories) -> Tensor:
        """Return a state of length 1 for each step: float of shape (steps, dim)."""
        values = self.items(batch.items) * math.sqrt(self._settings.dim)
        if self.positions is None:
            states = self.encoder(values, batch.row_splits)
        else:
            steps = torch.arange(len(values), device=values.device)
            lengths = batch.row_splits.diff()
            starts = torch.repeat_interleave(batch.row_splits[:-1], lengths, output_size=len(values))
            values = self.dropout(values + self.positions[steps - starts])
            states = self.encoder(values, batch.row_splits, batch.times, batch.next_times)
        return functional.normalize(states, dim=1, eps=1e-6)

    def vectors(self) -> Tensor:
        """Return the vector of each item, of length 1."""
        return functional.normalize(self.items.weight, dim=1, eps=1e-6)

    def loss(self, batch: Histories) -> Tensor:
        """Return how badly the states pick the next items out of others that are drawn evenly."""
        wanted, count = batch.next_items[:, None], self.items.num_embeddings
        drawn = torch.randint(count - 1, (len(wanted), self._settings.negatives), device=wanted.device)
        drawn += drawn >= wanted  # never the wanted one: all others are as likely
        # The product with all items and a choice of its columns: the vectors of the drawn ones, gathered for
        # each step, would be 128 times as much memory as the states.
        scores = self.states(batch) @ self.vectors().t()
        chosen = scores.gather(1, torch.cat([wanted, drawn], 1)) / self._settings.temperature
        return -chosen.log_softmax(1)[:, 0].mean()

    def queries(self, batch: Histories) -> Tensor:
        """Return the last state of each user: what the item behind the history is found by."""
        return self.states(batch)[batch.row_splits[1:] - 1]


def _attending(kind: type[HSTUEncoder | SASRecEncoder], items: int, settings: Settings) -> NextItemModel:
    encoder = kind(
        settings.dim,
        settings.max_length,
        layers=settings.layers,
        heads=settings.heads,
        dropout=settings.dropout,
    )
    return NextItemModel(items, encoder, settings, timed=kind is HSTUEncoder)


def _gru4rec(items: int, settings: Settings) -> NextItemModel:
    encoder = GRUEncoder(settings.dim, settings.max_length, dropout=settings.dropout)
    return NextItemModel(items, encoder, settings, timed=False)


def _hstu_large(items: int, settings: Settings) -> NextItemModel:
    return _attending(HSTUEncoder, items, replace(settings, layers=8, heads=2))


MODELS: Mapping[str, Callable[[int, Settings], NextItemModel]] = {
    "sasrec": partial(_attending, SASRecEncoder),
    "hstu": partial(_attending, HSTUEncoder),
    "hstu-large": _hstu_large,
    "gru4rec": _gru4rec,
}
"""Makes a model that has learned nothing, of so many items."""


READY: Mapping[str, tuple[Callable[..., NextItem], Mapping[str, int]]] = {
    "sasrec": (SASRec, {}),
    "hstu": (HSTU, {}),
    "hstu-large": (HSTU, {"layers": 8, "heads": 2}),
    "gru4rec": (GRU4Rec, {"layers": 1}),
}
"""The ready model of each name, and what is not as `Settings` says."""


class TableModel(nn.Module):
    """A ready model with rows in tables. It has the methods of `NextItemModel`."""

    def __init__(self, kind: str, items: int, settings: Settings, seed: int, device: torch.device) -> None:
        super().__init__()
        made, changed = READY[kind]
        sizes: dict[str, Any] = {"dim": settings.dim, "layers": settings.layers, **changed}
        beta1, beta2 = settings.betas
        self._count = items
        self.model = made(
            ["item", Feature(name="history", shares="item", combiner=Each())],
            max_length=settings.max_length,
            temperature=settings.temperature,
            dropout=settings.dropout,
            optimizer=Adam(learning_rate=settings.rate, beta1=beta1, beta2=beta2, epsilon=1e-8),
            device=str(device),
            seed=seed,
            **sizes,
        )

    def loss(self, batch: Histories) -> Tensor:
        return self.model.pick(_as_batch(batch)).loss

    def vectors(self) -> Tensor:
        return self.model.items({"item": torch.arange(self._count)})

    def queries(self, batch: Histories) -> Tensor:
        return self.model.users(_as_batch(batch))


def _as_batch(given: Histories) -> Batch:
    """Return the histories as a run reads them: an example for each user, whose item is the last next one."""
    last = given.row_splits[1:] - 1
    ids: dict[str, RaggedTensor | Tensor] = {
        "item": given.next_items[last],
        "history": RaggedTensor(given.items, given.row_splits),
        "history.time": RaggedTensor(given.times, given.row_splits),
    }
    return Batch(FeatureIds.pack(ids, event_times=given.next_times[last]))


class NextItemLearner:
    """A model with what trains it on all steps of a log but the last of each user.

    Args:
        tables: Whether it is the ready model.
    """

    def __init__(
        self,
        kind: str,
        log: UserSequences,
        seed: int,
        device: torch.device,
        settings: Settings | None = None,
        *,
        tables: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self._settings = Settings() if settings is None else settings
        # Tables take IDs from the host, wherever their rows are.
        self._log, self._device = log, torch.device("cpu") if tables else device
        self._split = leave_one_out(log, valid=False)
        self._items = int(log.items.max()) + 1
        self._random = torch.Generator().manual_seed(seed)
        self._model: NextItemModel | TableModel
        if tables:
            self._model = TableModel(kind, self._items, self._settings, seed, device)
        else:
            self._model = MODELS[kind](self._items, self._settings).to(device)
        self._optimizers: list[torch.optim.Optimizer | EmbeddingOptimizer] = [
            torch.optim.Adam(self._model.parameters(), lr=self._settings.rate, betas=self._settings.betas)
        ]
        if tables:
            self._optimizers.append(EmbeddingOptimizer(self._model))

    @property
    def steps(self) -> int:
        """Steps of the optimizer in an epoch."""
        return math.ceil(len(self._log) / self._settings.batch)

    def epoch(self, advance: Callable[[int], object] | None = None) -> None:
        """Go over all users once, in another order each time."""
        self._model.train()
        order = torch.randperm(len(self._log), generator=self._random)
        for rows in torch.split(order, self._settings.batch):
            # The last step that is trained on is only predicted.
            batch = self._histories(rows, self._split.train[rows] - 1)
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(self._model.loss(batch))
            for optimizer in self._optimizers:
                optimizer.step()
            if advance is not None:
                advance(1)

    @torch.no_grad()
    def metrics(self, ks: Sequence[int] = KS) -> dict[str, float]:
        """Return the metrics of the test steps."""
        self._model.eval()
        candidates = Candidates(torch.arange(self._items), self._model.vectors())
        found: dict[str, list[Tensor]] = {}
        for places in torch.split(self._split.test, 1024):
            batch = self._histories(self._log.rows_of(places), places)
            wanted = RaggedTensor(self._log.items[places], torch.arange(len(places) + 1))
            seen = RaggedTensor(batch.items.cpu(), batch.row_splits.cpu())
            ranked = candidates.ranked(self._model.queries(batch), wanted, ks, seen)
            for name, values in ranked.items():
                found.setdefault(name, []).append(values)
        return {name: float(torch.cat(values).mean()) for name, values in found.items()}

    def _histories(self, rows: Tensor, ends: Tensor) -> Histories:
        return Histories.of(self._log, rows, ends, self._settings.max_length, self._device)


def protocol(log: UserSequences, settings: Settings) -> str:
    """Return how results are made, in one line."""
    return (
        f"{leave_one_out(log, valid=False).protocol}; histories of the last {settings.max_length}; full "
        f"ranking over {int(log.items.max()) + 1:,} items without those of the history; ties count as the "
        "mean over all orders"
    )


@dataclass(frozen=True, slots=True)
class NextItemResult:
    """What one model reached with one seed."""

    model: str
    seed: int
    metrics: Mapping[str, float]
    """After the last epoch."""
    course: tuple[tuple[int, Mapping[str, float]], ...]
    """Epochs and metrics of each evaluation."""
    epoch_seconds: float
    """The mean time that an epoch trained for."""


def trained(
    options: ExperimentSequencesOptions, log: UserSequences, settings: Settings | None = None
) -> Iterator[NextItemResult]:
    """Train each model with each seed; show how far it is."""
    console = stderr_console()
    device = torch.device(options.device)
    for model in options.models:
        for seed in range(options.seeds):
            learner = NextItemLearner(model, log, seed, device, settings, tables=options.tables)
            course, seconds = [], 0.0
            with progress(f"{model}, seed {seed}", options.epochs * learner.steps, "steps") as shown:
                for epoch in range(1, options.epochs + 1):
                    began = time.perf_counter()
                    learner.epoch(shown.advance)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    seconds += time.perf_counter() - began
                    if epoch % options.evaluate_every == 0 or epoch == options.epochs:
                        course.append((epoch, learner.metrics()))
                        found = ", ".join(f"{HEADINGS[name]} {course[-1][1][name]:.4f}" for name in SHOWN)
                        said = f"{model}, seed {seed}, epoch {epoch}, {seconds / epoch:.1f} s per epoch:"
                        console.print(f"[dim]{said}[/] {found}", highlight=False)
            yield NextItemResult(model, seed, course[-1][1], tuple(course), seconds / options.epochs)


def run(options: ExperimentSequencesOptions) -> int:
    """Train, draw a table on standard error, and print JSON on request."""
    for name in ("seeds", "epochs", "evaluate_every"):
        if getattr(options, name) < 1:
            said = "--" + name.replace("_", "-")
            raise ConfigError(
                f"experiment sequences: {said} must be at least 1, got {getattr(options, name)}"
            )
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"experiment sequences: --device {options.device}: torch finds no GPU here; use cpu"
        )
    began = time.perf_counter()
    log = read_ml_1m(fetch_ml_1m(Path(options.folder)))
    results = list(trained(options, log))
    said = protocol(log, Settings())
    console = stderr_console()
    console.print(table(results, options))
    console.print(f"Protocol: {said}.\nTook {time.perf_counter() - began:,.0f} s.", highlight=False)
    if options.json:
        report = {
            "experiment": "sequences",
            "protocol": said,
            "epochs": options.epochs,
            "device": options.device,
            "tables": options.tables,
            "results": [to_json(results, model) for model in options.models],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


def to_json(results: Sequence[NextItemResult], model: str) -> dict[str, object]:
    """Return the means of a model, and what each seed reached."""
    own = [one for one in results if one.model == model]
    means = {name: mean_and_error([one.metrics[name] for one in own]) for name in SHOWN}
    return {
        "model": model,
        "mean": {name: mean for name, (mean, _) in means.items()},
        "error": {name: None if math.isnan(error) else error for name, (_, error) in means.items()},
        "seconds_per_epoch": [one.epoch_seconds for one in own],
        "seeds": [
            {"seed": one.seed, "evaluations": [{"epoch": at, **found} for at, found in one.course]}
            for one in own
        ],
    }


def table(results: Sequence[NextItemResult], options: ExperimentSequencesOptions) -> Table:
    """Return a line for each seed of a model, and one for its mean and standard error."""
    trained_by = "the ready models, with tables" if options.tables else "the published training"
    title = f"MovieLens-1M after {options.epochs} epochs of {trained_by}"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("model", "seed", *HEADINGS.values(), "s per epoch"):
        drawn.add_column(heading)
    for model in dict.fromkeys(one.model for one in results):
        own = [one for one in results if one.model == model]
        for one in own:
            cells = [f"{one.metrics[name]:.4f}" for name in SHOWN]
            drawn.add_row(model, str(one.seed), *cells, f"{one.epoch_seconds:.1f}")
        if len(own) > 1:
            means = [mean_and_error([one.metrics[name] for one in own]) for name in SHOWN]
            drawn.add_row(model, "mean", *(f"{mean:.4f} ± {error:.4f}" for mean, error in means), "")
    return drawn
