"""`monolith bench parts`: where the time of a training step goes, on one thread, on more, and as we choose.

A step of the DeepFM of `bench train`, taken apart: distinct ids are found (plan), rows are
looked up, placed into the model's inputs (gather), the dense half computes in torch, and
gradients are summed by id (scatter) and applied (update). Each part is timed where it
stands in the step, since torch's threads still wait busily for work when ours begin.
torch has all threads throughout; ours vary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monolith import native
from monolith.errors import ConfigError
from monolith.feature import FeatureIds, Gatherer, plan_layouts
from monolith.model import DeepFM
from monolith.store import LocalStore, TableIds
from monolith.table import Adagrad, NativeTable, TableConfig
from monolith_bench.ids import DISTRIBUTIONS
from monolith_bench.options import BenchPartsOptions
from monolith_bench.report import Report, cores
from monolith_bench.rivals import LEARNING_RATE
from monolith_bench.table import counted, need_memory
from monolith_bench.trainers import ACCUMULATOR, FIRST_VALUE, dense_adagrad, loss_of

PARTS = ("plan", "lookup", "gather", "dense", "scatter", "update")
OURS = tuple(part for part in PARTS if part != "dense")
CHOSEN = 0
"""Stands for as many threads as were found to be fastest."""
BATCHES = 8
TRIAL = 24
"""Steps until a choice among up to 32 threads is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsPlan:
    """The options, settled."""

    rows: int
    """Of each feature."""
    features: int
    dim: int
    hidden: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    ids: str
    repeats: int
    window: float
    seed: int

    @classmethod
    def settle(cls, options: BenchPartsOptions) -> PartsPlan:
        for name in ("ids", "features", "dim", "hidden", "batches", "threads", "repeats"):
            if np.min(getattr(options, name), initial=1) < 1:
                raise ConfigError(f"bench parts: --{name} must be at least 1, got {getattr(options, name)}")
        if options.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"bench parts: --distribution must be one of {', '.join(DISTRIBUTIONS)}, "
                f"got {options.distribution!r}"
            )
        ids = min(options.ids, 100_000) if options.quick else options.ids
        most = cores()
        threads = options.threads or (*(2**n for n in range(most.bit_length())), most)
        return cls(
            rows=max(ids // options.features, 1),
            features=options.features,
            dim=options.dim,
            hidden=options.hidden,
            batches=tuple(min(n, 256) for n in options.batches[:1]) if options.quick else options.batches,
            threads=tuple(
                sorted({min(n, most) for n in threads} | ({most} if not options.threads else set()))
            ),
            ids=options.distribution,
            repeats=1 if options.quick else options.repeats,
            window=0.02 if options.quick else 0.2,
            seed=options.seed,
        )


def run(options: BenchPartsOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = PartsPlan.settle(options)
    report = Report("parts")
    with torch_threads(cores()):
        measure(plan, report)
    report.finish()
    if options.json:
        report.print_json()
    return 0


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(plan: PartsPlan, report: Report) -> None:
    need_memory(plan.features * plan.rows * (plan.dim + 4) * 4 * 2 * 1.5)
    report.say(f"filling {plan.features} features of {plan.rows:,} rows")
    step = TimedStep(plan, native.Workers(max(plan.threads)))
    for size in plan.batches:
        report.say(f"steps of {size:,} examples, on {', '.join(map(named, (*plan.threads, CHOSEN)))}")
        best = race_parts(step, plan, size)
        for number, times in best.items():
            case = f"{size:,} examples, {named(number)}"
            for part, seconds in times.items():
                if (part, number) != ("ours", CHOSEN):
                    report.add(f"{part}, {case}", "ms_per_step", seconds * 1e3, "ms")
        ours = {number: times["ours"] * 1e3 for number, times in best.items()}
        report.compare(
            f"ours, {size:,} examples, {named(CHOSEN)}",
            "ms_per_step",
            ours[CHOSEN],
            "ms",
            {f"ours, {size:,} examples, {named(number)}": ours[number] for number in plan.threads},
        )
        report.show(f"{plan.features} features of {plan.rows:,} {plan.ids} ids and {plan.dim} floats")


def named(threads: int) -> str:
    return "chosen" if threads == CHOSEN else counted(threads, "thread")


class TimedStep:
    """A DeepFM with its rows in this process, and its step part by part."""

    def __init__(self, plan: PartsPlan, workers: native.Workers) -> None:
        self.workers = workers
        self._names = tuple(f"f{number:03d}" for number in range(plan.features))
        adagrad = Adagrad(learning_rate=LEARNING_RATE, initial_accumulator_value=ACCUMULATOR)
        model = DeepFM(
            self._names, dim=plan.dim, hidden=plan.hidden, optimizer=adagrad, bias_optimizer=adagrad
        )
        model.embeddings.bind(self._make_store)
        store = model.embeddings.store
        ids = torch.arange(plan.rows)
        for name in self._names:
            self._store.table(name).assign(ids, torch.full((plan.rows, store.tables[name]), FIRST_VALUE))
        layouts = plan_layouts(dict(store.tables), model.embeddings.inputs, model.embeddings.layouts)
        self._gatherer = Gatherer(layouts, workers)
        self._half = model.dense
        self._optimizer = dense_adagrad(self._half)

    def _make_store(self, configs: Mapping[str, TableConfig], **_: Any) -> LocalStore:
        tables = {name: NativeTable(config, workers=self.workers) for name, config in configs.items()}
        self._store = LocalStore(tables, workers=self.workers, counts_sightings=False)
        return self._store

    def rows(self, feature: str, positions: Tensor) -> Tensor:
        return self._store.table(feature).lookup(positions)

    def __call__(self, positions: Tensor, labels: Tensor) -> dict[str, float]:
        """Train on one batch; return the seconds of each part."""
        seconds: dict[str, float] = {}

        def timed(part: str, work: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            found = work()
            seconds[part] = time.perf_counter() - began
            return found

        ids = FeatureIds.one_each(self._names, positions)
        batch = timed("plan", lambda: self._gatherer.read(ids))
        keys = TableIds(batch.ids, batch.sizes, batch.counts)
        rows = timed("lookup", lambda: self._store.lookup(keys))
        outputs = timed("gather", lambda: batch.gather(rows))
        gradients = timed("dense", lambda: self._compute(outputs, labels))
        gradient = timed("scatter", lambda: batch.scatter(rows, gradients, float(len(labels))))
        timed("update", lambda: self._store.apply_gradients(keys, gradient))
        return seconds

    def _compute(self, outputs: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor | None, ...]:
        bias, vectors = (output.requires_grad_() for output in outputs)
        self._optimizer.zero_grad()
        loss_of(self._half(bias, vectors), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return bias.grad, vectors.grad


def race_parts(step: TimedStep, plan: PartsPlan, size: int) -> dict[int, dict[str, float]]:
    """Return the best time of every part, by number of threads, with those that are ours added up.

    Numbers take turns in windows, so that a disturbance hits all of them alike. What is chosen is found out
    before, in as many steps as that takes or in the time of 25 windows.
    """
    random = np.random.default_rng(plan.seed)
    drawn = DISTRIBUTIONS[plan.ids](plan.rows, BATCHES * size * plan.features, random).astype(np.int64)
    batches = itertools.cycle(torch.from_numpy(drawn).view(BATCHES, size, plan.features))
    labels = torch.from_numpy(random.integers(0, 2, size)).float()
    numbers = (*plan.threads, CHOSEN)
    best = {number: dict.fromkeys((*PARTS, "ours", "step"), float("inf")) for number in numbers}
    step.workers.fix(CHOSEN)
    for _ in itertools.islice(steps_for(25 * plan.window, lambda: step(next(batches), labels)), TRIAL):
        pass
    for turn in range(plan.repeats + 1):
        for number in numbers:
            step.workers.fix(number)
            for seconds in steps_for(plan.window, lambda: step(next(batches), labels)):
                ours = sum(seconds[part] for part in OURS)
                found = seconds | {"ours": ours, "step": ours + seconds["dense"]}
                if turn > 0:
                    best[number] = {part: min(known, found[part]) for part, known in best[number].items()}
    step.workers.fix(CHOSEN)
    return best


def steps_for(window: float, step: Callable[[], dict[str, float]]) -> Iterator[dict[str, float]]:
    end = time.perf_counter() + window
    while True:
        yield step()
        if time.perf_counter() >= end:
            return
