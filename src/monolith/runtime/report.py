"""What a run reports: its result, and the manifest in its folder."""

from __future__ import annotations

import functools
import json
import math
import platform
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from monolith import __version__, concurrency, filesystem
from monolith.config import masked, masked_words, to_dict
from monolith.cuda.kernels import KernelCounts
from monolith.errors import CorruptFileError
from monolith.runtime.losses import Lost
from monolith.train.config import TrainConfig
from monolith.train.evaluation_log import Evaluation
from monolith.train.hook import Hook, StepResult, TrainingRun
from monolith.train.metrics.metric_set import WindowRow
from monolith.train.task import Task

LOSS_STEPS = 100
"""Over so many of the last steps a report has the mean loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestEvaluation:
    """Which step did best when it was evaluated, and how well."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The result of a training run.

    Examples:
        >>> from monolith import ClickLog, ClickLogConfig, DeepFM, Mode, Task, TrainConfig, Trainer
        >>> class Clicks(Task):
        ...     def dataset(self, mode: Mode):
        ...         return ClickLog(ClickLogConfig(users=100, items=50, history=4, dim=2)).batches(5, 64)
        ...     def model(self):
        ...         return DeepFM(["user", "item", "context"], dim=4)
        >>> report = Trainer(Clicks(), TrainConfig()).train()
        >>> report.steps, report.examples, report.finished, report.stop_reason
        (5, 320, True, 'the data ended')
    """

    step: int
    """The global step at its end."""
    steps: int
    """Steps taken in this run, by all processes."""
    examples: int
    """Examples trained on in this run, by all processes."""
    replayed: float | None = None
    """The fraction of the batches of this process whose steps were replayed as CUDA graphs; None without
    `train.step_graphs`, or with rows in host memory."""
    skipped: int = 0
    """Batches of this run that were skipped, because their loss or a gradient is NaN or infinite."""
    bad_records: Mapping[str, int] = field(default_factory=dict)
    """Why records of this process were left out, with the place of the first where it is known, and how many
    for each reason."""
    dense_staleness: int | None = None
    """The most steps, of all workers, that the dense weights of a gradient lacked when it was applied, of the
    gradients of this process; None if no other process has weights."""
    seconds: float
    """From when the run was asked for to its end."""
    start_seconds: float = 0.0
    """Of these, those before the first step: the model, the tables and the restore. All, without a step."""
    kernels: KernelCounts = field(default_factory=KernelCounts)
    """The GPU programs that this process has compiled, or read from the cache, and how long it waited for
    them, most of it before the first step. Without those of Triton."""
    save_seconds: float = 0.0
    """Seconds in which training waited for checkpoints; writing in the background is not counted."""
    evaluate_seconds: float = 0.0
    """Those in which it was evaluated."""
    loss: float = math.nan
    """The mean loss of the last `LOSS_STEPS` steps of this process; NaN without any."""
    stop_reason: str
    finished: bool
    """Whether the run completed; False if it was stopped with more to do, here or in another process."""
    restored_from: str | None
    windows: Mapping[str, Sequence[WindowRow]]
    """By "head/metric": the rows of the windows that ended in this run."""
    checkpoint: str | None
    """The last checkpoint that was saved."""
    save_trouble: str = ""
    """What could not be saved or exported by its end, and why; empty if nothing."""
    evaluation: Evaluation | None = None
    """The last evaluation of this run, where `evaluate` of its config asks for some."""
    evaluations: int = 0
    """How many evaluations there were in this run."""
    best: BestEvaluation | None = None
    """The best evaluation, of all runs."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """By table: ids refused because the table is full, in this process; a server logs its own."""
    overdue: Mapping[str, int] = field(default_factory=dict)
    """By table: expired rows that were kept, because too many expired at once."""
    departed: bool = False
    """Whether this worker was told to stop and left its work to the other workers, which continue."""
    lost: Lost = field(default_factory=Lost)
    """Losses of other processes while the run kept going."""


class FirstAndLastSteps(Hook):
    """When the first step began, and what the last ones lost. Reads no loss before it is asked: that would
    make the CPU wait for the device.

    Args:
        first_at: When the first step began, if an earlier attempt has taken it.
    """

    def __init__(self, first_at: float | None = None) -> None:
        self.first_at = first_at
        """By `concurrency.monotonic`; None before there was one."""
        self._losses: deque[Tensor] = deque(maxlen=LOSS_STEPS)

    def before_step(self, run: TrainingRun) -> None:  # noqa: ARG002
        if self.first_at is None:
            self.first_at = concurrency.monotonic()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._losses.append(result.loss.detach())

    def loss(self) -> float:
        """Return the mean of the last steps that were trained on; NaN without any."""
        return float(torch.stack([*self._losses]).double().nanmean()) if self._losses else math.nan


RUN_MANIFEST = "run.json"
"""In the model's folder; each start adds to it."""


def write_run_manifest(model_dir: str, task: Task, config: TrainConfig, step: int, now: float) -> None:
    """Add this start to the manifest: the newest first. Secrets are masked; only its owner reads it."""
    starts = read_run_manifest(model_dir)
    starts.insert(
        0,
        {
            "task": task.name,
            "class": f"{type(task).__module__}.{type(task).__qualname__}",
            "about": masked(dict(task.describe())),
            "config": to_dict(config),
            "started_at": now,
            "from_step": step,
            "versions": {
                "monolith": __version__,
                "python": platform.python_version(),
                **{name: found for name in ("torch", "numpy") if (found := _version(name))},
            },
            "machine": {"system": platform.platform(), "processor": platform.machine()},
            "command": sys.argv,
        },
    )
    for start in starts:  # those of older versions, too
        start["command"] = masked_words(start.get("command", []))
    _write(model_dir, starts)


def write_run_end(model_dir: str, *, step: int, reason: str, finished: bool, now: float) -> None:
    """Note in the manifest how the newest start ended, for processes that follow the run."""
    starts = read_run_manifest(model_dir)
    if starts:
        starts[0]["ended"] = {"step": step, "reason": reason, "finished": finished, "at": now}
        _write(model_dir, starts)


def read_run_manifest(model_dir: str) -> list[dict[str, Any]]:
    """Return the starts of a run, newest first; none if there is no manifest.

    Raises:
        CorruptFileError: The manifest does not parse.
    """
    path = filesystem.join(model_dir, RUN_MANIFEST)
    if not filesystem.exists(path):
        return []
    try:
        starts: list[dict[str, Any]] = json.loads(filesystem.read_bytes(path))["starts"]
        return list(starts)
    except (ValueError, KeyError, TypeError) as cause:
        raise CorruptFileError(path, 0, f"the run's manifest makes no sense: {cause}") from cause


def _write(model_dir: str, starts: list[dict[str, Any]]) -> None:
    with filesystem.atomic_write(filesystem.join(model_dir, RUN_MANIFEST), private=True) as file:
        file.write(json.dumps({"starts": starts[:100]}, indent=2, default=str).encode())


@functools.cache  # reading the metadata of a package takes milliseconds
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
