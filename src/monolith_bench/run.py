"""`monolith bench run` measures what a user gets: `monolith train` as a process, from files to a model.

A run reads, shuffles, hashes, looks rows up, computes, updates rows and keeps metrics. Three baselines tell
which of these limits it, and what the usual way would have given:

    loop alone       the same model on batches that are in memory already, as `bench train` has it
    reading alone    the same files to the same batches, with nothing trained
    torch            a DataLoader over the same Parquet file, and one nn.EmbeddingBag for all features

The speed of a run is that of its second half, between two of its own progress lines, and after its first
pass over the file: by then its rows exist, the file is in the page cache and nothing starts any more. The
first pass, which creates the rows, has a speed of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith.cuda import device_of
from monolith.data import DataConfig, Epochs
from monolith.errors import ConfigError, UnavailableError
from monolith.feature import FeatureSpec, IdFeature, Label
from monolith.model.by_name import ModelConfig
from monolith.runtime.config_task import ConfigTask
from monolith.train.task import Mode
from monolith_bench.device_runs import GraphedRun, PipelinedRun, Windows
from monolith_bench.options import BenchRunOptions
from monolith_bench.report import Report, cores
from monolith_bench.timing import Timing
from monolith_bench.train import GPU_MANY, TrainPlan, contenders, make_batches, make_labels
from monolith_bench.trainers import FusedTorchTrainer, OurTrainer

Place = Literal["host", "device"]

_LABEL = "label"
_EPOCHS = 100_000
"""More than a run of some seconds reads; its time ends it."""
_LINE = re.compile(r"^(\S+ \S+) INFO monolith\.train\.hooks\.live_line: step ([\d,]+)[:/]")
_STOPPING = "monolith.runtime.trainer: stopping"
_IMPORTS = "import monolith.cli.main, monolith.runtime.trainer, monolith.runtime.config_task"
"""What `monolith train` imports before it does anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The options, settled."""

    records: int
    rows: int
    """Different ids of each feature."""
    features: int
    dim: int
    hidden: tuple[int, ...]
    batch: int
    seconds: float
    steps: int | None
    """Steps of a run, in place of `seconds`: a busy machine may take no step in a second."""
    repeats: int
    strings: bool
    places: tuple[Place | None, ...]
    """Where rows are on a GPU; None without one."""
    set: tuple[str, ...]
    seed: int

    @classmethod
    def settle(cls, options: BenchRunOptions) -> RunPlan:
        for name in ("records", "ids", "features", "dim", "hidden", "batch", "seconds", "repeats"):
            given = getattr(options, name)
            if given is not None and np.min(given, initial=1) < 1:
                raise ConfigError(f"bench run: --{name} must be at least 1, got {given}")
        quick, on_gpu = options.quick, options.device == "cuda"
        ids = min(options.ids, 10_000) if quick else options.ids
        batch = options.batch or (8192 if on_gpu else 2048)
        return cls(
            records=min(options.records, 4000) if quick else options.records,
            rows=max(ids // options.features, 1),
            features=options.features,
            dim=options.dim,
            hidden=options.hidden,
            batch=min(batch, 100) if quick else batch,
            seconds=0.5 if quick else options.seconds,
            steps=100 if quick else None,
            repeats=1 if quick else options.repeats,
            strings=options.strings,
            places=("device", "host") if on_gpu else (None,),
            set=options.set,
            seed=options.seed,
        )

    @property
    def pass_steps(self) -> int:
        """Steps that read the whole file once."""
        return self.records // self.batch

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"f{number:02d}" for number in range(self.features))

    def task(self, path: str) -> ConfigTask:
        """Return the task of a run, for reading its data in this process."""
        feature = IdFeature(kind="string" if self.strings else "int")
        spec = FeatureSpec(features=dict.fromkeys(self.names, feature), labels={_LABEL: Label()})
        return ConfigTask(
            features=spec,
            network=ModelConfig(type="deepfm", settings={"dim": self.dim, "hidden": list(self.hidden)}),
            data=DataConfig(path=path),
            batch_size=self.batch,
        )

    def config(self, path: str, model_dir: str, place: Place | None, steps: int | None) -> dict[str, Any]:
        """Return the config file of a run: a model as a user writes it, with all defaults."""
        train: dict[str, Any] = {"model_dir": model_dir, "epochs": _EPOCHS}
        if steps is None:
            # Metrics of the latest examples are computed for each line, so not more often than is needed.
            train |= {"max_time": f"{self.seconds}s", "report_every": f"{self.seconds / 20}s"}
        else:
            train |= {"steps": steps, "report_every": "1ms"}
        if place is not None:
            train |= {"accelerator": "cuda", "embedding_device": place}
        kind = "string" if self.strings else "int"
        return {
            "model": {"type": "deepfm", "dim": self.dim, "hidden": list(self.hidden)},
            "task": {"batch_size": self.batch},
            "data": {"path": path},
            "train": train,
            "labels": {_LABEL: {}},
            "features": {name: {"type": "IdFeature", "kind": kind} for name in self.names},
        }


def run(options: BenchRunOptions) -> int:
    """Measure, draw a table on standard error, and print JSON on request."""
    plan = RunPlan.settle(options)
    if plan.places != (None,):
        device_of(None)  # raises if there is none, before files are written
    report = Report("run")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        with tempfile.TemporaryDirectory(prefix="monolith-bench-") as folder:
            measure(plan, report, Path(folder))
    finally:
        torch.set_num_threads(threads)
    report.finish()
    if options.json:
        report.print_json()
    return 0


def measure(plan: RunPlan, report: Report, folder: Path) -> None:
    report.say(f"writing {plan.records:,} records of {plan.features} features")
    files = write_files(plan, folder)
    reading = {}
    for kind, path in files.items():
        report.say(f"reading alone, {kind}")
        reading[kind] = max(read_alone(plan, str(path)) for _ in range(plan.repeats))
        report.add(f"reading alone, {kind}", "records_per_s", reading[kind], "records/s")
    for place in plan.places:
        where = {None: "", "device": ", rows on the GPU", "host": ", rows in host memory"}[place]
        report.say(f"training loop alone{where}")
        loop = loop_alone(plan, place)
        report.add(f"training loop alone{where}", "examples_per_s", loop, "examples/s")
        report.say(f"torch's DataLoader and nn.EmbeddingBag{where}")
        torchs = max(torch_run(plan, files["parquet"], place) for _ in range(plan.repeats))
        report.add(f"torch, parquet{where}", "examples_per_s", torchs, "examples/s")
        for kind, path in files.items():
            report.say(f"monolith train, {kind}{where}")
            runs = []
            for number in range(plan.repeats):
                model_dir = folder / f"model-{kind}-{place}-{number}"
                runs.append(train(plan, path, model_dir, place, plan.steps))
            baselines = {
                f"training loop alone{where}": loop,
                f"reading alone, {kind}": reading[kind],
                f"torch, parquet{where}": torchs,
            }
            case = f"monolith train, {kind}{where}"
            pace = plan.batch * max(steady_pace(one.lines, plan.pass_steps) for one in runs)
            report.compare(case, "examples_per_s", pace, "examples/s", baselines)
            firsts = [first_pace(one.lines, plan.pass_steps) for one in runs]
            first = [one for one in firsts if one is not None]
            if first:
                report.add(f"{case}, first pass", "examples_per_s", plan.batch * max(first), "examples/s")
            if kind == "parquet":
                report_start(plan, report, path, folder, runs, place, where)
    report.show(
        f"DeepFM, {plan.features} features of {plan.rows:,} {'string' if plan.strings else 'integer'} ids, "
        f"{plan.dim} floats, batches of {plan.batch:,}"
    )


def report_start(
    plan: RunPlan,
    report: Report,
    path: Path,
    folder: Path,
    runs: Sequence[TimedRun],
    place: Place | None,
    where: str,
) -> None:
    """Report what the seconds before the first step go into, and those of a run that resumes."""
    best = min(runs, key=lambda one: one.to_first_step_s)
    command = [sys.executable, "-c", _IMPORTS]
    imports = min(seconds_of(command, folder) for _ in range(max(plan.repeats, 2)))
    # The newest run's checkpoint is that of its last step, so this one restores all rows.
    last = folder / f"model-parquet-{place}-{plan.repeats - 1}"
    resumed = train(plan, path, last, place, steps=1)
    report.add(f"start, imports{where}", "seconds", imports, "s")
    report.add(f"start, model, kernels and first batch{where}", "seconds", best.start_s, "s")
    if best.kernels_s:
        report.add(f"start, of these kernels{where}", "seconds", best.kernels_s, "s")
    report.add(f"start to the end of the first step{where}", "seconds", best.to_first_step_s, "s")
    restore = max(resumed.start_s - best.start_s, 0.0)
    report.add(f"start, restore of all rows{where}", "seconds", restore, "s")


# The files


def write_files(plan: RunPlan, folder: Path) -> dict[str, Path]:
    """Write the same records as CSV and as Parquet: an id of each feature and a label, drawn uniformly."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import csv, parquet

    random = np.random.default_rng(plan.seed)
    columns: dict[str, Any] = {}
    for name in plan.names:
        ids = random.integers(0, plan.rows, plan.records)
        # Strings of 9 to 10 bytes, as ids of users and items often are.
        columns[name] = pa.array(
            np.char.mod("u%08x", ids * 2_654_435_761 % (1 << 32)) if plan.strings else ids
        )
    columns[_LABEL] = pa.array(random.integers(0, 2, plan.records))
    table = pa.table(columns)
    files = {"csv": folder / "records.csv", "parquet": folder / "records.parquet"}
    csv.write_csv(table, files["csv"])
    parquet.write_table(table, files["parquet"], row_group_size=65_536)
    return files


# The baselines


def read_alone(plan: RunPlan, path: str) -> float:
    """Return the records per second of reading, from after the first batch on."""
    with closing(plan.task(path).dataset(Mode.TRAIN)) as stream:
        stream.read_epochs(Epochs(count=_EPOCHS))
        batches = iter(stream)
        next(batches)
        began, read = time.perf_counter(), 0
        for batch in batches:
            read += len(batch)
            if (passed := time.perf_counter() - began) >= plan.seconds / 2:
                return read / passed
    raise AssertionError("epochs without end ended")


def loop_alone(plan: RunPlan, place: Place | None) -> float:
    """Return the examples per second of training on batches that are in memory; see `bench train`.

    On the CPU with as many threads of torch as are best: with one for each core, they may get in the way of
    those that look rows up.
    """
    if place is not None:
        return _loop_alone(plan, place)
    before, found = torch.get_num_threads(), []
    try:
        for threads in sorted({max(cores() // share, 1) for share in (1, 2, 4)}):
            torch.set_num_threads(threads)
            found.append(_loop_alone(plan, None))
    finally:
        torch.set_num_threads(before)
    return max(found)


def _loop_alone(plan: RunPlan, place: Place | None) -> float:
    drawn = TrainPlan(
        rows=plan.rows,
        features=plan.features,
        dim=plan.dim,
        hidden=plan.hidden,
        batches=(plan.batch,),
        threads=cores(),
        timing=Timing(repeats=max(plan.repeats, 4), window=min(plan.seconds / 10, 0.4)),
        least_steps=4,
        seed=plan.seed,
    )
    batches, labels = make_batches("uniform", drawn, plan.batch, GPU_MANY), make_labels(drawn, plan.batch)
    if place is None:
        ours = OurTrainer(*drawn.shape, drawn.threads)
        racing = contenders({"ours": ours}, batches, labels)["ours"]
        return max(racing.rows_per_s(drawn.timing["window"]) for _ in range(drawn.timing["repeats"] + 1))
    device = device_of(None)
    trainer = OurTrainer(*drawn.shape, drawn.threads, device=device, embedding_device=place)
    # With rows on the device a run replays its steps as graphs, and so does its loop.
    one = GraphedRun(trainer, device) if place == "device" else PipelinedRun(trainer, device)
    one.load(batches, labels)
    paces = Windows(GPU_MANY, drawn.least_steps).race({"ours": one.run}, drawn.timing)
    return plan.batch * paces["ours"]


def torch_run(plan: RunPlan, path: Path, place: Place | None) -> float:
    """Return the examples per second of the usual way, in a process of its own."""
    words = [str(path), str(plan.features), str(plan.rows), str(plan.dim), json.dumps(plan.hidden)]
    words += [str(plan.batch), str(plan.seconds), "cpu" if place is None else "cuda"]
    program = "import sys; from monolith_bench.run import train_with_torch as t; t(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=as_installed(os.environ, path.parent),
    )
    return float(done.stdout)


class ParquetBatches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of a Parquet file without end: row groups in turn among the workers, each shuffled."""

    def __init__(self, path: str, features: int, rows: int, batch: int) -> None:
        self._path, self._features, self._rows, self._batch = path, features, rows, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        return self.batches(*(0, 1) if worker is None else (worker.id, worker.num_workers))

    def batches(self, worker: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one of several workers."""
        from pyarrow import parquet

        file, random = parquet.ParquetFile(self._path), np.random.default_rng(worker)
        left: NDArray[np.int64] = np.empty((0, self._features + 1), np.int64)
        for group in itertools.cycle(range(worker % file.num_row_groups, file.num_row_groups, workers)):
            table = file.read_row_group(group)
            arrays = [column.to_numpy() for column in table.columns]
            if arrays[0].dtype == object:  # strings have no rows in nn.EmbeddingBag until they are hashed
                arrays[:-1] = [np.array([hash(text) for text in one]) % self._rows for one in arrays[:-1]]
            found = np.stack(arrays, 1)[random.permutation(len(table))]
            # What is left of a row group goes before the next: one may be smaller than a batch.
            found = np.concatenate([left, found])
            whole = len(found) // self._batch * self._batch
            left = found[whole:]
            for batch in found[:whole].reshape(-1, self._batch, self._features + 1):
                labels = torch.from_numpy(batch[:, -1].astype(np.float32))
                yield torch.from_numpy(np.ascontiguousarray(batch[:, :-1])), labels


def train_with_torch(
    path: str, features: str, rows: str, dim: str, hidden: str, batch: str, seconds: str, device: str
) -> None:
    """Train as one does with torch alone, and print the examples per second of the second half."""
    torch.set_num_threads(cores())
    dataset = ParquetBatches(path, int(features), int(rows), int(batch))
    workers = max(min(cores() // 2, 8), 1)
    # Not forked: a process that uses CUDA or several threads may wait for ever after a fork.
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context="spawn"
    )
    shape = (int(features), int(rows), int(dim), json.loads(hidden), int(batch))
    trainer = FusedTorchTrainer(*shape, device=torch.device(device))
    loss, began, counted, half = torch.zeros(1), 0.0, 0, 0.0
    for positions, labels in loader:
        began = began or time.perf_counter()  # from the first batch on: workers take seconds to start
        loss = trainer.step(positions, labels.to(device))
        passed = time.perf_counter() - began
        if not half and passed >= float(seconds) / 2:
            loss.item()  # a GPU is behind the host: wait for it where the clock is read
            half, counted = time.perf_counter(), 0
        elif half:
            counted += len(positions)
        if passed >= float(seconds) and counted:
            break
    loss.item()
    sys.stdout.write(f"{counted / (time.perf_counter() - half)}\n")


# The run


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """What a process of `monolith train` said of itself."""

    lines: Sequence[tuple[float, int]]
    """Its progress lines, each the Unix second and the step."""
    start_s: float
    """From when the run was asked for, in the process, to its first step: its `start_seconds`."""
    kernels_s: float
    """Of these, while it waited for kernels of the GPU, compiled or read from the cache."""
    to_first_step_s: float
    """From the start of the process to its first progress line, that of the first step."""


def train(plan: RunPlan, path: Path, model_dir: Path, place: Place | None, steps: int | None) -> TimedRun:
    """Start `monolith train` on a file and wait for its end: after so many steps, or `plan.seconds`.

    Raises:
        UnavailableError: It failed.
    """
    config = model_dir.with_suffix(".json")
    config.write_text(json.dumps(plan.config(str(path), str(model_dir), place, steps)))
    command = [sys.executable, "-m", "monolith", "train", "--config", str(config), "--json"]
    for one in plan.set:
        key, _, value = one.partition("=")
        command += [f"--{key.replace('_', '-')}", value]
    began = time.time()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**as_installed(os.environ, model_dir.parent), "TZ": "UTC"},
    )
    if done.returncode:
        raise UnavailableError(f"bench run: monolith train failed:\n{done.stderr[-2000:]}")
    told: Mapping[str, Any] = json.loads(done.stdout)
    lines = progress_lines(done.stderr)
    return TimedRun(
        lines=lines,
        start_s=told["start_seconds"],
        kernels_s=told["kernels"]["seconds"],
        to_first_step_s=lines[0][0] - began if lines else float(told["seconds"]),
    )


def progress_lines(log: str) -> list[tuple[float, int]]:
    """Return the Unix second and the step of each progress line, up to where the run began to stop."""
    found = []
    for line in log.splitlines():
        if _STOPPING in line:
            break
        if match := _LINE.match(line):
            moment = datetime.strptime(match[1] + " +0000", "%Y-%m-%d %H:%M:%S,%f %z")
            found.append((moment.timestamp(), int(match[2].replace(",", ""))))
    return found


def steady_pace(lines: Sequence[tuple[float, int]], first_pass: int) -> float:
    """Return the steps per second of the second half of a run, in time, and after its first pass.

    Args:
        first_pass: The steps of the first pass over the data. If the run took no more, its speed counts.
    """
    if len(lines) < 3:
        raise UnavailableError(f"bench run: {len(lines)} progress lines are too few to tell a speed from")
    half = (lines[0][0] + lines[-1][0]) / 2
    later = [line for line in lines[:-1] if line[0] >= half] or [lines[-2]]
    return _pace(next((line for line in later if line[1] > first_pass), later[0]), lines[-1])


def first_pace(lines: Sequence[tuple[float, int]], first_pass: int) -> float | None:
    """Return the steps per second of the first pass over the data; None if the lines do not tell."""
    within = [line for line in lines if line[1] <= first_pass]
    return _pace(within[0], within[-1]) if len(within) > 1 else None


def _pace(begin: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - begin[1]) / max(end[0] - begin[0], 1e-9)


def seconds_of(command: Sequence[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, env=as_installed(os.environ, folder))
    return time.perf_counter() - began


def as_installed(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of processes that find byte code, as users do: pip compiles what it installs.

    Otherwise, where PYTHONDONTWRITEBYTECODE is set, each start compiles the package again, which takes 1 to
    2 s. The first process then writes byte code below `folder`.
    """
    found = dict(environ)
    if found.pop("PYTHONDONTWRITEBYTECODE", ""):
        found.setdefault("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
    return found
