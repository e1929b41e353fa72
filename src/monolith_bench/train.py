"""`monolith bench train` compares a DeepFM on our rows with torch's and FBGEMM's, in examples a second.

All take turns on the same batches, so that a disturbance hits them alike. A step on one
example has all the work of Python and next to none of the kernels', so its time over that
of a whole step bounds the share of time outside native code and torch's kernels. No
profiler would tell better: Python's own does not see calls into a core like ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monolith.cuda import Device, device_of
from monolith.errors import AcceleratorError, ConfigError
from monolith_bench.device_runs import (
    DeviceRun,
    GraphedRun,
    GraphedTorchRun,
    PipelinedRun,
    PlainRun,
    TorchRun,
    Windows,
)
from monolith_bench.ids import DISTRIBUTIONS
from monolith_bench.options import BenchTrainOptions
from monolith_bench.report import Report, cores
from monolith_bench.rivals import why_no_fbgemm
from monolith_bench.table import counted, need_memory
from monolith_bench.timing import Contender, Timing, race
from monolith_bench.trainers import (
    FbgemmTrainer,
    FusedTorchTrainer,
    GraphedTorchTrainer,
    OurTrainer,
    TimedTrainer,
    TorchTrainer,
)

BATCHES = 64
GPU_BATCHES = (2048, 8192, 65536)
GPU_MANY = 16
"""Batches that are gone through in turn on a GPU, of each size."""
TORCHS = "one nn.EmbeddingBag for all"
GRAPHED = "rows on the device, steps as graphs"
GRAPHED_HALF = f"{GRAPHED}, bfloat16"
TORCHS_GRAPH = "torch's rows, steps as a graph"
HERE = "rows in host memory"
HOT = f"{HERE}, hot ones on the device"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The options, settled."""

    rows: int
    """Of each feature."""
    features: int
    dim: int
    hidden: tuple[int, ...]
    batches: tuple[int, ...]
    """Examples in a batch, one size after another."""
    threads: int
    timing: Timing
    least_steps: int
    """Of a window, on a GPU: the first waits for its rows, and the last for its update."""
    hot_rows: int | None = None
    """Of each feature: the room of the cache on a GPU."""
    seed: int

    @classmethod
    def settle(cls, options: BenchTrainOptions) -> TrainPlan:
        for name in ("ids", "features", "dim", "hidden", "batch", "threads", "repeats"):
            given = getattr(options, name)
            if given is not None and np.min(given, initial=1) < 1:
                raise ConfigError(f"bench train: --{name} must be at least 1, got {given}")
        if not 0 < options.hot <= 1:
            raise ConfigError(f"bench train: --hot must be above 0 and at most 1, got {options.hot}")
        ids = min(options.ids, 100_000) if options.quick else options.ids
        on_gpu = options.device == "cuda"
        batches = options.batch or (GPU_BATCHES if on_gpu else (2048,))
        threads = options.threads or (cores() if on_gpu else 2)
        repeats = options.repeats or (2 if on_gpu else 8)
        return cls(
            rows=max(ids // options.features, 1),
            features=options.features,
            dim=options.dim,
            hidden=options.hidden,
            batches=tuple(sorted({min(batch, 256) for batch in batches})) if options.quick else batches,
            threads=min(threads, cores()),
            timing=Timing(repeats=1, window=0.02)
            if options.quick
            else Timing(repeats=repeats, window=0.3 if on_gpu else 0.4),
            least_steps=4 if options.quick else 12,
            hot_rows=max(int(options.hot * ids / options.features), 1),
            seed=options.seed,
        )

    @property
    def shape(self) -> tuple[int, int, int, tuple[int, ...]]:
        """What all trainers are made by: features, the rows of each, floats, hidden widths."""
        return self.features, self.rows, self.dim, self.hidden


def run(options: BenchTrainOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = TrainPlan.settle(options)
    device = _gpu() if options.device == "cuda" else None
    report = Report("train")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        if device is None:
            measure(plan, report)
        else:
            measure_on(device, plan, report)
    finally:
        torch.set_num_threads(torch_threads)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def _gpu() -> Device:
    try:
        return device_of(None)
    except AcceleratorError as cause:
        raise AcceleratorError(
            f"bench train: --device cuda: {cause}. Leave --device out to measure training on the CPU"
        ) from cause


def measure(plan: TrainPlan, report: Report) -> None:
    need_memory(plan.features * plan.rows * (plan.dim + 4) * 4 * 2 * 5.0)
    for batch in plan.batches:
        measure_batch(plan, batch, report)


def measure_batch(plan: TrainPlan, batch: int, report: Report) -> None:
    report.say(f"filling {plan.features} features of {plan.rows:,} rows")
    ours = OurTrainer(*plan.shape, plan.threads)
    trainers: dict[str, TimedTrainer] = {
        "monolith": ours,
        "nn.EmbeddingBag": TorchTrainer(*plan.shape, batch),
        TORCHS: FusedTorchTrainer(*plan.shape, batch),
    }
    missing = why_no_fbgemm()
    if missing is None:
        trainers["fbgemm"] = FbgemmTrainer(*plan.shape, batch)
    else:
        report.add("fbgemm", "examples_per_s", None, "examples/s", note=missing)
    labels = make_labels(plan, batch)
    more = f", batches of {batch:,}" if len(plan.batches) > 1 else ""
    for name in DISTRIBUTIONS:
        case = f"{name}, {counted(plan.threads, 'thread')}{more}"
        report.say(f"training, {case}")
        batches = make_batches(name, plan, batch)
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
    measure_python(plan, report, ours, labels, more)
    report.show(f"{describe(plan)}, batches of {batch:,}")


def describe(plan: TrainPlan) -> str:
    """Return the model in words."""
    return (
        f"DeepFM, {plan.features} features of {plan.rows:,} ids and {plan.dim} floats, "
        f"MLP {'-'.join(map(str, plan.hidden))}"
    )


def make_labels(plan: TrainPlan, batch: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(plan.seed).integers(0, 2, batch)).float()


def make_batches(distribution: str, plan: TrainPlan, batch: int, many: int = BATCHES) -> list[Tensor]:
    """Return positions, int64 of shape (examples, features), of every feature drawn alike."""
    random = np.random.default_rng(plan.seed)
    positions = DISTRIBUTIONS[distribution](plan.rows, many * batch * plan.features, random).astype(np.int64)
    return list(torch.from_numpy(positions).view(many, batch, plan.features))


def contenders(
    trainers: Mapping[str, TimedTrainer], batches: list[Tensor], labels: Tensor
) -> dict[str, Contender]:
    def stepper(trainer: TimedTrainer) -> Callable[[int], object]:
        return lambda number: trainer.step(batches[number], labels)

    return {
        name: Contender(len(labels), stepper(trainer), itertools.cycle(range(len(batches))))
        for name, trainer in trainers.items()
    }


def measure_python(plan: TrainPlan, report: Report, ours: TimedTrainer, labels: Tensor, more: str) -> None:
    """Bound the share of a step that is neither native code nor torch's kernels."""
    report.say("steps on one example")
    batches = make_batches("uniform", plan, len(labels))
    whole = contenders({"whole": ours}, batches, labels)
    single = contenders({"single": ours}, [batch[:1] for batch in batches], labels[:1])
    rates = race(whole | single, **plan.timing)
    seconds = {name: examples / rates[name] for name, examples in (("whole", len(labels)), ("single", 1))}
    report.add(f"step, whole batch{more}", "ms_per_step", seconds["whole"] * 1e3, "ms")
    report.compare(
        f"step on one example: all of Python, hardly a kernel{more}",
        "ms_per_step",
        seconds["single"] * 1e3,
        "ms",
        {f"step, whole batch{more}": seconds["whole"] * 1e3},
    )


# On a GPU


def measure_on(device: Device, plan: TrainPlan, report: Report) -> None:
    """Measure the model on a GPU: on rows that lie there, on rows in host memory, with a cache of the hot
    ones and without, and on torch's."""
    need_memory(plan.features * plan.rows * (plan.dim + 4) * 4 * 2 * 3.0)
    report.say(f"filling {plan.features} features of {plan.rows:,} rows, on the device and in host memory")
    torchs = FusedTorchTrainer(*plan.shape, max(plan.batches), device=device.torch_device)
    there = OurTrainer(*plan.shape, plan.threads, device=device, embedding_device="device")
    here = PipelinedRun(OurTrainer(*plan.shape, plan.threads, device=device), device)
    on_device = PlainRun(there, device)
    some = OurTrainer(
        *plan.shape, plan.threads, device=device, embedding_device="device", hot_rows=plan.hot_rows
    )
    cached = GraphedRun(some, device)
    runs: dict[str, DeviceRun] = {
        TORCHS: TorchRun(torchs, device),
        "rows on the device": on_device,
        HERE: here,
    }
    graphed: dict[str, DeviceRun] = {HOT: cached}
    if device.torch_device.type == "cuda":
        torch_graphed = GraphedTorchTrainer(*plan.shape, device=device.torch_device)
        graphed |= {
            GRAPHED: GraphedRun(there, device),
            GRAPHED_HALF: GraphedRun(there, device, half=True),
            TORCHS_GRAPH: GraphedTorchRun(torch_graphed, device),
        }
    for batch in plan.batches:
        for name in DISTRIBUTIONS if batch == max(plan.batches) else ("uniform",):
            case = f"{name}, batches of {batch:,}"
            report.say(f"training, {case}")
            batches, labels = make_batches(name, plan, batch, GPU_MANY), make_labels(plan, batch)
            for one in runs.values():
                one.load(batches, labels)
            windows = Windows(GPU_MANY, plan.least_steps)
            racing = {of: one.run for of, one in runs.items()}
            for of, one in graphed.items():
                if captures(of, one, batches, labels, report):
                    racing[of] = one.run
            before = cached.hits()
            paces = windows.race(racing, plan.timing)
            report_paces(report, case, batch, paces)
            if HOT in paces:
                seen, fetched = (now - then for now, then in zip(cached.hits(), before, strict=True))
                report.add(f"ids whose row was there, {HOT}, {case}", "share", 1 - fetched / seen, "")
            for phase, took in on_device.phases().items():
                report.add(f"{phase} of a step, rows on the device, {case}", "ms_per_step", took, "ms")
            once = Timing(repeats=1, window=plan.timing["window"])
            halves = windows.race({"host work": here.run_host, "device work": here.run_device}, once)
            report_halves(report, case, paces[HERE], halves)
            report.show(f"{describe(plan)}, batches of {batch:,}, on {device.torch_device}")


def captures(name: str, run: DeviceRun, batches: Sequence[Tensor], labels: Tensor, report: Report) -> bool:
    """Give batches to a run that replays graphs; where none can be captured, say so and do without it."""
    try:
        run.load(batches, labels)
    except (RuntimeError, AcceleratorError) as cause:
        report.say(f"{name}: cannot be captured: {cause}")
        return False
    return True


def report_paces(report: Report, case: str, batch: int, paces: Mapping[str, float]) -> None:
    """Report examples and milliseconds by steps a second."""
    torchs = {f"{TORCHS}, {case}": batch * paces[TORCHS]}
    for name, pace in paces.items():
        if name == TORCHS:
            report.add(f"{name}, {case}", "examples_per_s", batch * pace, "examples/s")
        else:
            report.compare(f"{name}, {case}", "examples_per_s", batch * pace, "examples/s", torchs)
        report.add(f"{name}, {case}", "ms_per_step", 1e3 / pace, "ms")


def report_halves(report: Report, case: str, pace: float, halves: Mapping[str, float]) -> None:
    """Report what host and device do of a step on rows in host memory, and how well one hides the other."""
    for name, alone in halves.items():
        report.add(f"{name} of a step, {case}", "ms_per_step", 1e3 / alone, "ms")
    larger = f"larger half, {case}"
    slowest = 1e3 / min(halves.values())
    report.add(larger, "ms_per_step", slowest, "ms")
    report.compare(f"step, {HERE}, {case}", "ms_per_step", 1e3 / pace, "ms", {larger: slowest})
