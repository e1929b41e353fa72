"""The process of `monolith bench freshness` that trains and publishes.

It tells on its standard output, a JSON object in each line, when its stream began, when each batch was read
and trained on, when the items of marked events were removed, and when a checkpoint was being saved. It does
as standard input says, line by line: `save` saves a checkpoint during training, and the process ends at the
end of its input.

    python -c COMMAND JOB URL INTERVAL      # JOB: the fields of a FreshnessJob, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from monolith.errors import MonolithError, UnavailableError
from monolith.runtime import LocalRun, Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import how_to_export, task_exporter
from monolith.runtime.publish_shard import PublishPlan
from monolith.sync.channel_url import open_writer
from monolith.sync.publish_config import PublishConfig
from monolith.train import Hook, SaveConfig, StepResult, TrainConfig, TrainingRun
from monolith_bench.marked_events import MARKED, FreshnessJob, MarkedEvents, task_of

COMMAND = "import sys; from monolith_bench.marked_trainer import main; sys.exit(main(sys.argv[1:]))"
_CHUNK = 1 << 16
_PATIENCE = 300.0


class FillTables(Hook):
    """Gives every id a row before the first step, so that tables are as large as in life."""

    def __init__(self, run: LocalRun, job: FreshnessJob) -> None:
        self._run = run
        self._job = job

    def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
        random = torch.Generator().manual_seed(self._job.seed)
        for _, table in sorted(self._run.session.model.tables.items()):
            for first in range(0, self._job.rows, _CHUNK):
                ids = torch.arange(first, min(first + _CHUNK, self._job.rows))
                values = torch.rand(len(ids), table.dim, generator=random) * 0.1 - 0.05
                table.assign(ids, values, event_time=1)


def export_filled(job: FreshnessJob, root: Path) -> None:
    """Write the first version of the model, for a server to start from."""
    job = replace(job, model_dir=f"{root}-run", rate=None, mark_every=0)
    config = TrainConfig(model_dir=job.model_dir, steps=1, save=SaveConfig(), summary_every_steps=None)
    task = task_of(job)
    made = Trainer(task, config, hooks=lambda run: [FillTables(run, job)]).train()
    assert made.checkpoint is not None
    how = how_to_export(ExportConfig(), config)
    with task_exporter(task, config, how, warm_up=False) as exporter:
        exporter.export(made.checkpoint, str(root))


def publish_plan_to(url: str, interval: timedelta) -> PublishPlan:
    """Return how to publish at a URL."""
    config = PublishConfig(to=url, interval=interval)
    return PublishPlan(config=config, run="bench", open_writer=lambda _: open_writer(url))


# From outside


class TrainerProcess:
    """The process, and what it has told. Used by one thread."""

    def __init__(self, job: FreshnessJob, url: str, interval: timedelta) -> None:
        words = [json.dumps(asdict(job)), url, str(interval.total_seconds())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.began = 0.0
        """When its first event happened, in Unix seconds as all times; 0 before."""
        self.batches: list[tuple[float, float]] = []
        """When each batch was read and trained on."""
        self.saves: list[tuple[float, float]] = []
        """Of each checkpoint, when it was asked for and when it was on disk."""
        self.removed: dict[int, float] = {}
        """Number of a mark -> when its item was removed."""
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, name="trainer-told", daemon=True)
        self._reader.start()

    def wait_until_started(self) -> None:
        """Wait for the first event.

        Raises:
            UnavailableError: The process ended, or took too long.
        """
        if not self._started.wait(_PATIENCE) or not self.began:
            raise UnavailableError("bench freshness: the process that trains did not start")

    def save(self) -> None:
        """Have it save a checkpoint, unless one is on its way."""
        assert self._process.stdin is not None
        self._process.stdin.write("save\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "began" in told:
                self.began = told["began"]
                self._started.set()
            elif "batch" in told:
                self.batches.append(tuple(told["batch"]))
            elif "removed" in told:
                self.removed |= dict.fromkeys(told["removed"], told["at"])
            else:
                self.saves.append(tuple(told["save"]))
        self._started.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


# Inside


class _Teller(Hook):
    """Tells when each batch was read and trained on; of events from a file, only of the first."""

    def __init__(self, events: MarkedEvents | None) -> None:
        self._events = events
        self._told = 0

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if not self._told:
            _tell({"began": time.time() if self._events is None else self._events.began})
        if self._events is None:
            self._told += 1
            return
        _tell({"batch": [self._events.read[self._told], time.time()]})
        self._told += 1


class _Remover(Hook):
    """Removes the items of marked events some time after each, as expiry would."""

    def __init__(self, run: LocalRun, job: FreshnessJob, events: MarkedEvents) -> None:
        self._run, self._job, self._events = run, job, events
        self._next = 0

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        job, now = self._job, time.time()
        over = (now - self._events.began - job.remove_after) * (job.rate or 0)
        old = list(range(self._next, int(over // job.mark_every) + 1))
        if old:
            self._next = old[-1] + 1
            (table,) = (one for name, one in self._run.session.model.tables.items() if "item" in name)
            table.remove(torch.tensor([MARKED + number for number in old]))
            _tell({"removed": old, "at": now})


class _Orders(Hook):
    """Does what standard input says, in a thread of its own."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run

    def after_create(self, run: TrainingRun) -> None:  # noqa: ARG002
        threading.Thread(target=self._obey, name="orders", daemon=True).start()

    def _obey(self) -> None:
        for _ in sys.stdin:
            if self._run.save is not None:
                asked = time.time()
                self._run.save.trigger_save().result()
                _tell({"save": [asked, time.time()]})
        self._run.interrupt("no process listens any more")


def _tell(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Train until standard input ends."""
    job, url, interval = FreshnessJob(**json.loads(arguments[0])), arguments[1], float(arguments[2])
    torch.set_num_threads(1)  # the other core is the server's
    events = None if job.file else MarkedEvents(job)
    config = TrainConfig(
        model_dir=job.model_dir,
        save=SaveConfig(asynchronous=True),
        summary_every_steps=None,
        idle_after=timedelta(seconds=1),
    )

    def hooks(run: LocalRun) -> list[Hook]:
        remover = [_Remover(run, job, events)] if job.remove_after and events is not None else []
        return [FillTables(run, job), _Teller(events), *remover, _Orders(run)]

    plan = publish_plan_to(url, timedelta(seconds=interval))
    try:
        Trainer(task_of(job, events), config, hooks=hooks, publish=plan).train()
    except MonolithError as error:
        sys.stderr.write(f"bench freshness: the process that trains failed: {error}\n")
        return 1
    return 0
