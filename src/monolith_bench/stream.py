"""`monolith bench stream` trains an HSTU ranking model day by day, in the shape of MLPerf's recommender.

The model trains on day T and is evaluated on day T + 1, before it trains on that one. The run is the
product's: a task, a `Trainer`, rows in tables, and a checkpoint after each day from which the next one
starts. On the last day a second run stops in the middle and another process resumes from its checkpoint. It
must end with the same bits as the run that was not stopped.

Baselines of the same run:

    plain torch      the same model with nn.Embedding and padded histories, on batches in memory
    reading alone    the same batches, with nothing trained
    dense product    of square matrices on this device: model FLOP utilisation is a share of it
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from monolith.checkpoint.offline import compare
from monolith.cuda import device_of
from monolith.data import Pipeline, Stream
from monolith.errors import AcceleratorError, ConfigError, UnavailableError
from monolith.feature import Batch
from monolith.model.sequence_ranker import SequenceRanker
from monolith.observe.machine import read_fields
from monolith.runtime import LocalRun, Trainer, TrainReport
from monolith.train import Hook, RestoreConfig, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith.train.task import Mode, Task
from monolith_bench.listening import LABEL, TABLES, ListeningConfig, ListeningDays, ListeningLog, feature_spec
from monolith_bench.options import BenchStreamOptions
from monolith_bench.plain_hstu import PaddedBatch, PlainHSTU, PlainTrainer
from monolith_bench.report import Report, cores
from monolith_bench.rivals import quiet_logs

METRICS = ("auc", "log_loss", "ne")
_HIDDEN = (128, 64)
_READ_AHEAD = 2
"""Batches that `to_batches` keeps ready."""
_SQUARE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices whose product is the device's rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """The options, settled: everything follows from the scale."""

    users: int
    items: int
    max_length: int
    dim: int
    layers: int
    heads: int
    batch: int
    steps: int
    """Of each day: so many batches."""
    days: int
    """Days that are trained on; one more is evaluated."""
    device: Literal["cpu", "cuda"]
    baseline_seconds: float
    """How long each baseline works at a time."""
    seed: int

    @classmethod
    def settle(cls, options: BenchStreamOptions) -> StreamPlan:
        if not 0.01 <= options.scale <= 10_000:
            raise ConfigError(f"bench stream: --scale must be from 0.01 to 10000, got {options.scale}")
        if options.days < 1:
            raise ConfigError(f"bench stream: --days must be at least 1, got {options.days}")
        scale = 0.05 if options.quick else options.scale
        dim = _rounded(32 * scale**0.6, 32)
        return cls(
            users=max(round(400 * scale**0.7), 20),
            items=max(round(2000 * scale), 100),
            max_length=_rounded(64 * scale**0.75, 16),
            dim=dim,
            layers=2 + max(round(math.log10(scale)), 0),
            heads=max(dim // 128, 1),
            batch=_rounded(64 * scale**0.15, 16),
            steps=12 if options.quick else 64,
            days=min(options.days, 2) if options.quick else options.days,
            device=options.device,
            baseline_seconds=0.1 if options.quick else 2.0,
            seed=options.seed,
        )

    @property
    def log(self) -> ListeningConfig:
        return ListeningConfig(
            users=self.users,
            items=self.items,
            max_length=self.max_length,
            days=self.days + 1,
            examples=self.batch * self.steps,
            seed=self.seed,
        )

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def window(self) -> int:
        """How many steps are timed together."""
        return min(self.steps - self.steps // 2, 8)

    def describe(self) -> str:
        """Return the model and the data in words."""
        return (
            f"HSTU of {self.layers} layers, {self.dim} floats, {self.heads} heads; {len(TABLES)} tables, "
            f"{self.users:,} users, {self.items:,} items, histories of up to {self.max_length:,} steps, "
            f"batches of {self.batch}"
        )


def _rounded(number: float, multiple: int) -> int:
    return max(round(number / multiple), 1) * multiple


# What a sample costs


def forward_flops(plan: StreamPlan, lengths: NDArray[np.int64], *, padded: bool = False) -> float:
    """Return the floating-point operations of the forward pass of examples with histories of these lengths.

    Products of matrices count, with two operations for a multiplication and an addition. A layer has four
    projections and an output, 10 dim^2 for each step, and 4 dim for each pair of a step and itself or a step
    before it: a score, and its part of a sum. Then comes the MLP. What is computed value by value does not
    count.

    Args:
        padded: Count all pairs of steps, as attention without a mask computes them.
    """
    steps = lengths.astype("float64") + 1  # and the item that is asked about
    pairs = steps * steps if padded else steps * (steps + 1) / 2
    layer = 10 * plan.dim**2 * steps.sum() + 4 * plan.dim * pairs.sum()
    widths = [plan.dim * (1 + len(TABLES)), *_HIDDEN, 1]
    mlp = 2 * sum(one * other for one, other in itertools.pairwise(widths)) * len(lengths)
    return float(plan.layers * layer + mlp)


def training_flops(plan: StreamPlan, lengths: NDArray[np.int64]) -> float:
    """Return the operations of a training step: backward is twice forward."""
    return 3 * forward_flops(plan, lengths)


@dataclass(frozen=True, order=True, slots=True)
class Pace:
    """How fast a model trains, and on what."""

    samples_per_s: float
    steps: float
    """Of a history, the mean."""
    flops: float
    """Of a sample in training, the mean, without those of padding."""

    @classmethod
    def of(cls, plan: StreamPlan, lengths: NDArray[np.int64], seconds: float) -> Pace:
        """Return the pace of examples with histories of these lengths that took so long together."""
        flops = training_flops(plan, lengths) / len(lengths)
        return cls(len(lengths) / seconds, float(lengths.mean()), flops)


def matmul_flops_per_s(device: torch.device, seconds: float) -> float:
    """Return the rate of a dense product of square matrices: of bfloat16 on a GPU, of float32 on a CPU."""
    size = _SQUARE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    several = 10 if device.type == "cuda" else 2
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        _settle(device)
        began = time.perf_counter()
        for _ in range(several):
            torch.mm(one, other, out=out)
        _settle(device)
        best = max(best, several * 2 * size**3 / (time.perf_counter() - began))
    return best


# The run


class ListenTask(Task):
    """Predicts whether a user listens to a track. Trains up to one day, and is evaluated on the next."""

    def __init__(self, plan: StreamPlan, log: ListeningLog, day: int) -> None:
        self._plan, self._log, self._day = plan, log, day

    def dataset(self, mode: Mode) -> Stream[Batch]:
        first, last = (0, self._day) if mode is Mode.TRAIN else (self._day + 1, self._day + 1)
        days = ListeningDays(self._log, self._plan.batch, first=first, last=last)
        return Pipeline(days).to_batches(feature_spec(self._plan.max_length), threads=min(cores(), 4))

    def model(self) -> nn.Module:
        plan = self._plan
        return SequenceRanker(
            feature_spec(plan.max_length),
            encoder="hstu",
            dim=plan.dim,
            layers=plan.layers,
            heads=plan.heads,
            hidden=_HIDDEN,
            seed=torch.initial_seed() % (1 << 31),
        )

    def metrics(self, mode: Mode) -> tuple[str, ...]:  # noqa: ARG002
        return METRICS


def config_of(plan: StreamPlan, model_dir: Path, **more: Any) -> TrainConfig:
    """Return how the model is trained: on a GPU with rows on it, in bfloat16."""
    on_gpu = plan.device == "cuda"
    return TrainConfig(
        model_dir=str(model_dir),
        seed=plan.seed,
        deterministic=True,
        accelerator="cuda" if on_gpu else "cpu",
        embedding_device="device" if on_gpu else "host",
        precision="bfloat16" if on_gpu else "float32",
        save=SaveConfig(),
        summary_every_steps=None,
        **more,
    )


class DayTimer(Hook):
    """Times the second half of a day, a few steps at a time, and notes what the tables take at its end."""

    def __init__(self, run: LocalRun, plan: StreamPlan, log: ListeningLog, day: int) -> None:
        self._run, self._plan, self._log, self._day = run, plan, log, day
        self._device = plan.torch_device
        self._taken, self._began = 0, 0.0
        self.paces: list[Pace] = []
        """Of each window. A run that begins within a day has none that mean anything."""
        self.rows = self.table_bytes = self.device_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        plan, self._taken = self._plan, self._taken + 1
        timed, window = self._taken - plan.steps // 2, plan.window
        if timed >= 0 and timed % window == 0:
            _settle(self._device)
            began, self._began = self._began, time.perf_counter()
            if timed:
                end = (self._day * plan.steps + self._taken) * plan.batch
                lengths = self._log.lengths(end - window * plan.batch, end)
                self.paces.append(Pace.of(plan, lengths, self._began - began))
                self._began = time.perf_counter()
        if self._taken == plan.steps:
            found = self._run.session.model.stats().values()
            self.rows = sum(one.rows for one in found)
            self.table_bytes = sum(one.bytes_total for one in found)
            if self._device.type == "cuda":
                self.device_bytes = torch.cuda.max_memory_allocated(self._device)


def train_day(
    plan: StreamPlan,
    log: ListeningLog,
    day: int,
    config: TrainConfig,
) -> tuple[TrainReport, DayTimer]:
    """Train up to the end of a day, from the newest checkpoint of the model_dir."""
    watches: list[DayTimer] = []

    def hooks(run: LocalRun) -> list[Hook]:
        watches.append(DayTimer(run, plan, log, day))
        return list(watches)

    report = Trainer(ListenTask(plan, log, day), config, hooks=hooks).train()
    return report, watches[0]


def run(options: BenchStreamOptions) -> int:
    """Measure, draw tables on standard error, and print JSON on request.

    Returns:
        1 if the resumed run did not end with the bits of the one that was not stopped, otherwise 0.
    """
    plan = StreamPlan.settle(options)
    if plan.device == "cuda":
        try:
            device_of(None)
        except AcceleratorError as cause:
            raise AcceleratorError(
                f"bench stream: --device cuda: {cause}. Leave --device out to measure on the CPU"
            ) from cause
    report = Report("stream")
    report.about = {"plan": asdict(plan)}
    prefix = "monolith-bench-"
    with quiet_logs(), tempfile.TemporaryDirectory(prefix=prefix, dir=options.folder) as folder:
        differences = measure(plan, report, Path(folder))
    return conclude(report, differences, as_json=options.json)


def conclude(report: Report, differences: Sequence[str], *, as_json: bool) -> int:
    """Report what a stop and a resume changed; return the exit status of the command."""
    for one in differences:
        report.say(f"not the same after a stop and a resume: {one}")
    case = "tables, weights and states changed by a stop and a resume"
    report.add(case, "count", len(differences), "")
    report.show("The last day, trained in one run and in two")
    report.finish()
    if as_json:
        report.print_json()
    return 1 if differences else 0


def measure(plan: StreamPlan, report: Report, folder: Path) -> list[str]:
    """Report all that is measured; return what differs after a stop and a resume, see `differing`."""
    report.say(plan.describe())
    log = ListeningLog(plan.log)
    model_dir, stopped_dir = folder / "straight", folder / "stopped"
    ours: list[Pace] = []
    plain: list[Pace] = []
    size = plan.batch
    for day in range(plan.days):
        if day == plan.days - 1:
            report.say(f"day {day}: a run that stops after {plan.steps // 2} of {plan.steps} steps")
            start = RestoreConfig(dir=str(model_dir) if day else None)
            train_day(plan, log, day, config_of(plan, stopped_dir, restore=start, steps=plan.steps // 2))
        report.say(f"day {day}: training")
        trained, watch = train_day(plan, log, day, config_of(plan, model_dir))
        ours += watch.paces
        report.say(f"day {day + 1}: evaluating")
        measured = Trainer(ListenTask(plan, log, day), config_of(plan, model_dir)).evaluate()
        report_day(report, log, day + 1, measured)
        # By turns with the runs, so that a disturbance of the machine hits both.
        report.say(f"day {day}: plain torch")
        pace, size = plain_torch(plan, log, day, size)
        plain.append(pace)
    report.show("Trained on the days before each")

    report.say("reading alone, and dense products")
    reading = read_alone(plan, log)
    product = matmul_flops_per_s(plan.torch_device, plan.baseline_seconds)
    report_speed(plan, report, max(ours), max(plain), size, reading, product)
    report.add("all tables", "rows", watch.rows, "rows")
    report.add("all tables", "table_bytes", watch.table_bytes, "B")
    report.add("the process at its largest", "host_bytes", peak_memory(), "B")
    if plan.device == "cuda":
        report.add("tensors on the device at most, training", "device_bytes", watch.device_bytes, "B")
    report.show(plan.describe())

    report.say("resuming in another process")
    assert trained.checkpoint is not None
    return differing(trained.checkpoint, resume(plan, stopped_dir))


def report_day(report: Report, log: ListeningLog, day: int, measured: Mapping[str, float]) -> None:
    """Report the metrics of a day that was not trained on yet, and what they can be compared with."""
    case = f"day {day}"
    best, popular = log.best_auc(day), log.popularity_auc(day)
    report.compare(
        case,
        "auc",
        measured[f"{LABEL}/auc"],
        "",
        {f"share of listeners of an item before, {case}": popular, f"true probabilities, {case}": best},
    )
    report.add(f"share of listeners of an item before, {case}", "auc", popular, "")
    report.add(f"true probabilities, {case}", "auc", best, "")
    report.add(f"{case}, log loss", "log_loss", measured[f"{LABEL}/log_loss"], "")
    report.add(f"{case}, normalized entropy", "ne", measured[f"{LABEL}/ne"], "")


def report_speed(
    plan: StreamPlan, report: Report, ours: Pace, plain: Pace, size: int, reading: float, product: float
) -> None:
    """Report the pace of a run next to plain torch in batches of `size`, reading alone and dense products."""
    torchs = f"plain torch, padded, batches of {size} in memory"
    report.add(torchs, "samples_per_s", plain.samples_per_s, "samples/s")
    report.add("reading alone", "samples_per_s", reading, "samples/s")
    against = {torchs: plain.samples_per_s, "reading alone": reading}
    report.compare("training", "samples_per_s", ours.samples_per_s, "samples/s", against)
    steps = ours.samples_per_s * ours.steps
    report.add("training, steps of histories", "history_steps_per_s", steps, "steps/s")
    report.add("steps of a history, mean", "steps", ours.steps, "steps")
    report.add("FLOPs of a sample", "flops", ours.flops, "FLOP")
    products = f"a dense product, {'bfloat16' if plan.device == 'cuda' else 'float32'}"
    report.add(products, "flops_per_s", product, "FLOP/s")
    for name, pace in (("training", ours), ("plain torch, padding not counted", plain)):
        rate = pace.samples_per_s * pace.flops
        report.compare(f"{name}, model FLOPs", "flops_per_s", rate, "FLOP/s", {products: product})


def read_alone(plan: StreamPlan, log: ListeningLog) -> float:
    """Return the samples per second of reading day 0, without its first batches."""
    with closing(ListenTask(plan, log, 0).dataset(Mode.TRAIN)) as stream:
        batches = iter(stream)
        for _ in range(_READ_AHEAD + 1):  # those that are read before the clock starts
            next(batches)
        began = time.perf_counter()
        read = sum(len(batch) for batch in batches)
    return read / (time.perf_counter() - began)


def plain_torch(plan: StreamPlan, log: ListeningLog, day: int, size: int) -> tuple[Pace, int]:
    """Train the same model in plain torch on batches of the second half of a day, which are in memory.

    Args:
        size: Of a batch. On a GPU whose memory does not hold a step it is halved until it does.

    Returns:
        The pace of the best round over these batches, and the size of a batch.
    """
    while True:
        pace = None
        try:
            pace = _plain_pace(plan, log, day, size)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
        torch.cuda.empty_cache()  # the process that resumes needs memory of the device, too
        if pace is not None:
            return pace, size


def _plain_pace(plan: StreamPlan, log: ListeningLog, day: int, size: int) -> Pace:
    device, first = plan.torch_device, (day * plan.steps + plan.steps // 2) * plan.batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        trainer = PlainTrainer(plain_model(plan, log), device, half=plan.device == "cuda")
    ranges = [(first + n * size, first + (n + 1) * size) for n in range(plan.window)]
    batches = [PaddedBatch.of(log.records(*one), device) for one in ranges]

    def seconds(some: list[PaddedBatch]) -> float:
        _settle(device)
        began = time.perf_counter()
        for batch in some:
            trainer.step(batch)
        _settle(device)
        return time.perf_counter() - began

    seconds(batches[:1])
    # A step of long histories may take seconds: then a round has fewer of them, and there are fewer rounds.
    batches = batches[: max(1, int(plan.baseline_seconds / seconds(batches[:1])))]
    best, end = math.inf, time.perf_counter() + plan.baseline_seconds
    while best == math.inf or time.perf_counter() < end:
        best = min(best, seconds(batches))
    return Pace.of(plan, log.lengths(first, first + len(batches) * size), best)


def plain_model(plan: StreamPlan, log: ListeningLog) -> PlainHSTU:
    return PlainHSTU(
        log.config.sizes,
        dim=plan.dim,
        layers=plan.layers,
        heads=plan.heads,
        max_length=plan.max_length,
        hidden=_HIDDEN,
    )


# A stop in the middle of a day


def resume(plan: StreamPlan, model_dir: Path) -> str:
    """Continue a stopped run to the end of its day in a process of its own; return its last checkpoint."""
    program = "import sys; from monolith_bench.stream import resume_here as r; r(*sys.argv[1:])"
    words = [json.dumps(asdict(plan)), str(model_dir)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise UnavailableError(f"bench stream: the process that resumes failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def resume_here(plan: str, model_dir: str) -> None:
    """Continue a stopped run in this process, and print its last checkpoint."""
    read = StreamPlan(**json.loads(plan))
    done, _ = train_day(read, ListeningLog(read.log), read.days - 1, config_of(read, Path(model_dir)))
    sys.stdout.write(f"{done.checkpoint}\n")


def differing(one: str, other: str) -> list[str]:
    """Return the names of what two checkpoints do not hold with the same bits."""
    found = compare(one, other)
    names = [f"table {table.name}" for table in found.tables if not table.same]
    names += [f"weight {variable.name}" for variable in found.variables]
    # A stop ends the window over which metrics of training are reported, so they differ by intention.
    names += [f"state {name}" for name in found.states if name != "metrics"]
    if found.steps[0] != found.steps[1]:
        names.append(f"step {found.steps[0]} and {found.steps[1]}")
    return names


# The machine


def peak_memory() -> int | None:
    """Return the most bytes that this process has had in memory; None if the system does not say."""
    found = read_fields(Path("/proc/self/status")).get("VmHWM")
    return None if found is None else int(found.split()[0]) * 1024


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
