"""`monolith bench train`: a DeepFM trained on our rows beside torch's and FBGEMM's, in examples a second.

All take turns on the same batches, so that a disturbance hits them alike. A step on one
example has all the work of Python and next to none of the kernels', so its time over that
of a whole step bounds the share of time outside native code and torch's kernels. No
profiler would tell better: Python's own does not see calls into a core like ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.bench.ids import DISTRIBUTIONS
from monolith.bench.options import BenchTrainOptions
from monolith.bench.report import Report, cores
from monolith.bench.rivals import why_no_fbgemm
from monolith.bench.table import counted, need_memory
from monolith.bench.timing import Contender, Timing, race
from monolith.bench.trainers import (
    FbgemmTrainer,
    FusedTorchTrainer,
    OurTrainer,
    TimedTrainer,
    TorchTrainer,
)
from monolith.errors import ConfigError

BATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The options, settled."""

    rows: int
    """Of each feature."""
    features: int
    dim: int
    hidden: tuple[int, ...]
    batch: int
    threads: int
    timing: Timing
    seed: int

    @classmethod
    def settle(cls, options: BenchTrainOptions) -> TrainPlan:
        for name in ("ids", "features", "dim", "hidden", "batch", "threads", "repeats"):
            if np.min(getattr(options, name), initial=1) < 1:
                raise ConfigError(f"bench train: --{name} must be at least 1, got {getattr(options, name)}")
        ids = min(options.ids, 100_000) if options.quick else options.ids
        return cls(
            rows=max(ids // options.features, 1),
            features=options.features,
            dim=options.dim,
            hidden=options.hidden,
            batch=min(options.batch, 256) if options.quick else options.batch,
            threads=min(options.threads, cores()),
            timing=Timing(repeats=1, window=0.02)
            if options.quick
            else Timing(repeats=options.repeats, window=0.4),
            seed=options.seed,
        )


def run(options: BenchTrainOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = TrainPlan.settle(options)
    report = Report("train")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        measure(plan, report)
    finally:
        torch.set_num_threads(torch_threads)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: TrainPlan, report: Report) -> None:
    need_memory(plan.features * plan.rows * (plan.dim + 4) * 4 * 2 * 5.0)
    shape = (plan.features, plan.rows, plan.dim, plan.hidden)
    report.say(f"filling {plan.features} features of {plan.rows:,} rows")
    ours = OurTrainer(*shape, plan.threads)
    trainers: dict[str, TimedTrainer] = {
        "monolith": ours,
        "nn.EmbeddingBag": TorchTrainer(*shape, plan.batch),
        "one nn.EmbeddingBag for all": FusedTorchTrainer(*shape, plan.batch),
    }
    missing = why_no_fbgemm()
    if missing is None:
        trainers["fbgemm"] = FbgemmTrainer(*shape, plan.batch)
    else:
        report.add("fbgemm", "examples_per_s", None, "examples/s", note=missing)
    labels = torch.from_numpy(np.random.default_rng(plan.seed).integers(0, 2, plan.batch)).float()
    for name in DISTRIBUTIONS:
        case = f"{name}, {counted(plan.threads, 'thread')}"
        report.say(f"training, {case}")
        batches = make_batches(name, plan)
        rates = race(contenders(trainers, batches, labels), **plan.timing)
        for other in [other for other in rates if other != "monolith"]:
            report.add(f"{other}, {case}", "examples_per_s", rates[other], "examples/s")
        report.compare(
            f"DeepFM, {case}",
            "examples_per_s",
            rates.pop("monolith"),
            "examples/s",
            {f"{other}, {case}": rate for other, rate in rates.items()},
        )
    measure_python(plan, report, ours, labels)
    report.show(
        f"DeepFM, {plan.features} features of {plan.rows:,} ids and {plan.dim} floats, "
        f"batches of {plan.batch:,}, MLP {'-'.join(map(str, plan.hidden))}"
    )


def make_batches(distribution: str, plan: TrainPlan) -> list[Tensor]:
    """Return positions, int64 of shape (examples, features), of every feature drawn alike."""
    random = np.random.default_rng(plan.seed)
    count = BATCHES * plan.batch * plan.features
    positions = DISTRIBUTIONS[distribution](plan.rows, count, random).astype(np.int64)
    return list(torch.from_numpy(positions).view(BATCHES, plan.batch, plan.features))


def contenders(
    trainers: Mapping[str, TimedTrainer], batches: list[Tensor], labels: Tensor
) -> dict[str, Contender]:
    def stepper(trainer: TimedTrainer) -> Callable[[int], object]:
        return lambda number: trainer.step(batches[number], labels)

    return {
        name: Contender(len(labels), stepper(trainer), itertools.cycle(range(len(batches))))
        for name, trainer in trainers.items()
    }


def measure_python(plan: TrainPlan, report: Report, ours: TimedTrainer, labels: Tensor) -> None:
    """Bound the share of a step that is neither native code nor torch's kernels."""
    report.say("steps on one example")
    batches = make_batches("uniform", plan)
    whole = contenders({"whole": ours}, batches, labels)
    single = contenders({"single": ours}, [batch[:1] for batch in batches], labels[:1])
    rates = race(whole | single, **plan.timing)
    seconds = {name: examples / rates[name] for name, examples in (("whole", plan.batch), ("single", 1))}
    report.add("step, whole batch", "ms_per_step", seconds["whole"] * 1e3, "ms")
    report.compare(
        "step on one example: all of Python, hardly a kernel",
        "ms_per_step",
        seconds["single"] * 1e3,
        "ms",
        {"step, whole batch": seconds["whole"] * 1e3},
    )
