"""`monolith experiment sequences`: next-item models on public sets, by the published protocol.

The protocol is that of the generative-recommenders repository (Zhai et al., 2024). The last item of each
user is the test, and all before it are trained on. The item is ranked among all items, without those of the
history that the model was given, which are the last 200. Every step predicts the next one, by a softmax over
its item and 128 others that are drawn evenly. All models have the same size and the same training, and the
metrics are those after the last epoch: no epoch is chosen by the test.

Batches are padded to one shape (`sequence_models`). On a GPU, histories lie in its memory, a step is captured
as a CUDA graph and replayed, and products are computed in TF32, as in the published training. `--jobs` trains
several models at the same time, in processes of their own: one alone leaves most of a GPU idle.

`--tables` trains the ready models as a run does, by the same protocol: rows are in tables, and negatives are
drawn from the items of a batch, with a correction for popular ones.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from monolith.data import UserSequences
from monolith.errors import ConfigError
from monolith.observe import progress
from monolith.tensors import RaggedTensor
from monolith.train import Candidates
from monolith_bench.event_sets import Protocol, read_event_set, split_of
from monolith_bench.jobs import computed
from monolith_bench.learner import mean_and_error
from monolith_bench.options import ExperimentSequencesOptions
from monolith_bench.report import stderr_console
from monolith_bench.sequence_models import (
    MODELS,
    Histories,
    NextItemModel,
    Settings,
    TableModel,
    TrainedSteps,
)

KS = (10, 50)
SHOWN = ("hit_rate@10", "ndcg@10", "hit_rate@50", "mrr")
HEADINGS = {"hit_rate@10": "HR@10", "ndcg@10": "NDCG@10", "hit_rate@50": "HR@50", "mrr": "MRR"}
_EAGER_STEPS = 3  # before a step is captured: libraries choose and load their kernels in the first ones


class PaddedTrainer:
    """Trains a model on padded histories, a batch at a time; on a GPU by a graph of the whole step.

    Args:
        graph: Whether to capture a step; on a GPU only.
    """

    def __init__(
        self,
        model: NextItemModel,
        steps: TrainedSteps,
        optimizer: torch.optim.Optimizer,
        batch: int,
        *,
        graph: bool,
    ) -> None:
        self._model, self._steps, self._optimizer = model, steps, optimizer
        # The graph reads the rows of a batch from here, and leaves its loss in `_loss`.
        self._rows = torch.full((batch,), -1, device=steps.items.device)
        self._loss = torch.zeros((), device=steps.items.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture_in = _EAGER_STEPS if graph else -1

    def train(self, rows: Tensor) -> Tensor:
        """Train on the histories of some rows, as many as a batch at most; return the loss.

        Returns:
            A scalar on the device; a later call may overwrite it.
        """
        self._rows.fill_(-1)
        self._rows[: len(rows)] = rows
        if self._graph is not None:
            self._graph.replay()
        elif self._capture_in == 0:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._step()
            self._graph.replay()  # capturing has computed nothing
        elif self._capture_in > 0:
            # As capturing does, on a stream that is not the default one.
            self._capture_in -= 1
            device = self._rows.device
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._loss = self._step()
            torch.cuda.current_stream(device).wait_stream(stream)
        else:
            self._loss = self._step()
        return self._loss

    def _step(self) -> Tensor:
        # Without gradients, so that those of a graph are tensors of its own, which each replay writes anew.
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model.loss(self._steps.batch(self._rows))
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()


class NextItemLearner:
    """A model with what trains it on the steps of a log that are not tested.

    Args:
        tables: Whether it is the ready model.
        graph: Whether a step on a GPU is captured and replayed.
    """

    def __init__(
        self,
        kind: str,
        log: UserSequences,
        seed: int,
        device: torch.device,
        settings: Settings | None = None,
        *,
        protocol: Protocol = "leave-one-out",
        tables: bool = False,
        graph: bool = True,
    ) -> None:
        torch.manual_seed(seed)
        self._settings = Settings() if settings is None else settings
        # Tables take IDs from the host, wherever their rows are.
        self._log, self._device = log, torch.device("cpu") if tables else device
        self._split = split_of(log, protocol)
        # The last step that is trained on is only predicted: a user needs one before it.
        ends, starts = self._split.train - 1, log.row_splits[:-1]
        self._users = (ends > starts).nonzero().flatten()
        self._ends = torch.maximum(ends, starts)
        self._items = int(log.items.max()) + 1
        self._random = torch.Generator().manual_seed(seed)
        self._model: NextItemModel | TableModel
        self._train: Callable[[Tensor], Tensor]
        rate, betas = self._settings.rate, self._settings.betas
        on_gpu = device.type == "cuda"
        if tables:
            table_model = TableModel(kind, self._items, self._settings, seed, device)
            dense = torch.optim.Adam(table_model.parameters(), lr=rate, betas=betas)
            self._model, self._train = table_model, partial(self._train_tables, table_model, dense)
        else:
            model = MODELS[kind](self._items, self._settings).to(device)
            optimizer = torch.optim.Adam(
                model.parameters(), lr=rate, betas=betas, capturable=on_gpu, fused=on_gpu
            )
            steps = TrainedSteps.of(log, self._ends, self._settings.max_length, device)
            trainer = PaddedTrainer(model, steps, optimizer, self._settings.batch, graph=graph and on_gpu)
            self._model, self._train = model, trainer.train

    @property
    def steps(self) -> int:
        """Steps of the optimizer in an epoch."""
        return math.ceil(len(self._users) / self._settings.batch)

    def epoch(self, advance: Callable[[int], object] | None = None) -> float:
        """Go over all users once, in another order each time; return the loss of the last batch."""
        self._model.train()
        # One copy for all batches: each would wait for the device.
        order = self._users[torch.randperm(len(self._users), generator=self._random)].to(self._device)
        loss = torch.zeros(())
        for rows in torch.split(order, self._settings.batch):
            loss = self._train(rows)
            if advance is not None:
                advance(1)
        return float(loss)  # waits for the device

    def _train_tables(self, model: TableModel, dense: torch.optim.Optimizer, rows: Tensor) -> Tensor:
        batch = self._histories(rows, self._ends[rows])
        for optimizer in (dense, model.rows):
            optimizer.zero_grad()
        loss = model.loss(batch)
        torch.autograd.backward(loss)
        for optimizer in (dense, model.rows):
            optimizer.step()
        return loss.detach()

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


def describe(log: UserSequences, protocol: Protocol, settings: Settings) -> str:
    """Return how results are made, in one line."""
    return (
        f"{split_of(log, protocol).protocol}; histories of the last {settings.max_length}; full "
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
    seconds: float
    """All of it: training, its start and the evaluations."""


def trained(
    options: ExperimentSequencesOptions, log: UserSequences, settings: Settings | None = None
) -> Iterator[NextItemResult]:
    """Train each model with each seed, so many at a time as `options.jobs` says; show how far each is."""
    calls = [
        (options, log, model, seed, settings) for model in options.models for seed in range(options.seeds)
    ]
    yield from computed(options.jobs, train_one, calls)


def train_one(
    options: ExperimentSequencesOptions,
    log: UserSequences,
    model: str,
    seed: int,
    settings: Settings | None,
) -> NextItemResult:
    """Train one model with one seed, and evaluate it now and then."""
    began = time.perf_counter()
    console = stderr_console()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    learner = NextItemLearner(
        model,
        log,
        seed,
        device,
        settings,
        protocol=options.protocol,
        tables=options.tables,
        graph=options.graph,
    )
    course, seconds = [], 0.0
    with progress(f"{model}, seed {seed}", options.epochs * learner.steps, "steps") as shown:
        for epoch in range(1, options.epochs + 1):
            epoch_began = time.perf_counter()
            loss = learner.epoch(shown.advance)
            seconds += time.perf_counter() - epoch_began
            if epoch % options.evaluate_every == 0 or epoch == options.epochs:
                course.append((epoch, learner.metrics()))
                found = ", ".join(f"{HEADINGS[name]} {course[-1][1][name]:.4f}" for name in SHOWN)
                said = f"{model}, seed {seed}, epoch {epoch}, {seconds / epoch:.2f} s per epoch:"
                console.print(f"[dim]{said}[/] {found}, loss {loss:.4f}", highlight=False)
    whole = time.perf_counter() - began
    return NextItemResult(model, seed, course[-1][1], tuple(course), seconds / options.epochs, whole)


def run(options: ExperimentSequencesOptions) -> int:
    """Train, draw a table on standard error, and print JSON on request."""
    for name in ("seeds", "epochs", "evaluate_every", "jobs"):
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
    data = read_event_set(options.set, Path(options.folder), options.protocol)
    results = list(trained(options, data.log))
    said = describe(data.log, options.protocol, Settings())
    console = stderr_console()
    console.print(table(results, options, data.title))
    seconds = time.perf_counter() - began
    console.print(
        f"Set: {data.said}\nLicence: {data.licence}.\nProtocol: {said}.\n"
        f"{len(results)} trainings, {options.jobs} at a time, took {seconds:,.0f} s.",
        highlight=False,
    )
    if options.json:
        report = {
            "experiment": "sequences",
            "set": options.set,
            "counts": data.counts,
            "licence": data.licence,
            "protocol": said,
            "epochs": options.epochs,
            "device": options.device,
            "tables": options.tables,
            "jobs": options.jobs,
            "seconds": seconds,
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
        "seconds": [one.seconds for one in own],
        "seeds": [
            {"seed": one.seed, "evaluations": [{"epoch": at, **found} for at, found in one.course]}
            for one in own
        ],
    }


def table(results: Sequence[NextItemResult], options: ExperimentSequencesOptions, of: str) -> Table:
    """Return a line for each seed of a model, and one for its mean and standard error."""
    trained_by = "the ready models, with tables" if options.tables else "the published training"
    title = f"{of[0].upper()}{of[1:]} after {options.epochs} epochs of {trained_by}"
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("model", "seed", *HEADINGS.values(), "s per epoch", "s"):
        drawn.add_column(heading)
    for model in dict.fromkeys(one.model for one in results):
        own = [one for one in results if one.model == model]
        for one in own:
            cells = [f"{one.metrics[name]:.4f}" for name in SHOWN]
            drawn.add_row(model, str(one.seed), *cells, f"{one.epoch_seconds:.2f}", f"{one.seconds:.0f}")
        if len(own) > 1:
            means = [mean_and_error([one.metrics[name] for one in own]) for name in SHOWN]
            drawn.add_row(model, "mean", *(f"{mean:.4f} ± {error:.4f}" for mean, error in means), "", "")
    return drawn
