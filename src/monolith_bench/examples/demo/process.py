"""The process that the demo trains in, and kills.

It is a run as `monolith train` has it, with metrics, a control server, and publishing. It reports
each event on its standard output at once, as a line of JSON: the events reported before it died are the
work it had done. Its log goes to a file. When its standard output has no reader any more, it ends.

    python -m monolith_bench.examples.demo.process JOB      # JOB: the fields of a DemoJob, as JSON
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from monolith.cli.terminal import StopSignals
from monolith.errors import TrainingError
from monolith.observe import Metrics, configure_logging
from monolith.runtime import LocalRun, Trainer
from monolith.runtime.control import control_hooks, control_place, tracer_of
from monolith.runtime.process import GAUGE_EVERY, line_hook, serve_metrics
from monolith.runtime.publish import publish_plan
from monolith.runtime.status import OwnStatus
from monolith.train import Hook, StepResult, TrainingRun, WindowRow
from monolith.train.hooks.live_line import gauge_status
from monolith_bench.examples.demo.live_stream import LiveScript
from monolith_bench.examples.demo.task import DemoJob, LiveTask

_log = logging.getLogger(__name__)

# What it tells


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The model is there, new or restored."""

    at: float
    """Unix seconds, as in all events."""
    step: int
    next_record: int
    """The number of the record that is trained on next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """One batch was predicted, and trained on."""

    at: float
    step: int
    first: int
    """The number of its first record."""
    end: int
    """The number after its last."""
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowEnded:
    """The AUC over some records, each of which was predicted before it was trained on."""

    at: float
    first: int
    end: int
    event_time: int
    auc: float
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The run ended well, and saved."""

    at: float
    step: int
    checkpoint: str


Event = Started | Stepped | WindowEnded | Ended
EVENTS: dict[str, type[Event]] = {
    "started": Started,
    "stepped": Stepped,
    "window": WindowEnded,
    "ended": Ended,
}


def to_line(event: Event) -> str:
    """Return an event as one line. Floats keep every bit."""
    (kind,) = (name for name, one in EVENTS.items() if isinstance(event, one))
    return json.dumps({"kind": kind, **asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Return the event of a line; None for half a line, the last word of one that was killed."""
    if not line.endswith("\n"):
        return None
    fields = json.loads(line)
    return EVENTS[fields.pop("kind")](**fields)


# From outside


class TrainingProcess:
    """A process that trains a job. One thread uses it.

    Args:
        log: A file that its log is added to.
    """

    def __init__(self, job: DemoJob, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(asdict(job))],
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """Yield the events of the process until it ends. May be called again after a `break`."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            event = from_line(line)
            if event is not None:
                yield event

    def kill(self) -> float:
        """Kill it with -9 and return when, in Unix seconds."""
        killed_at = time.time()
        self._process.kill()
        self._process.wait()
        return killed_at

    def stop(self) -> None:
        """Ask it to save and end."""
        self._process.terminate()

    def died(self) -> TrainingError:
        """Return what to raise when its events end before they should."""
        status = self._process.wait()
        words = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        return TrainingError(
            f"demo: the process that trains ended with status {status}: {words or 'it said nothing'}. "
            f"Its log is {self._log}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# Inside


class _Teller(Hook):
    """Tells of every step, and of every window of the metric."""

    _run: LocalRun

    def hooks(self, run: LocalRun) -> list[Hook]:
        self._run = run
        return [self]

    def after_create(self, run: TrainingRun) -> None:
        _tell(Started(at=time.time(), step=run.step, next_record=self._next_record()))

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        end = self._next_record()
        first = end - result.examples
        _tell(Stepped(at=time.time(), step=run.step, first=first, end=end, loss=float(result.loss)))

    def window_ended(self, name: str, row: WindowRow) -> None:  # noqa: ARG002
        session = self._run.session
        stats = session.model.stats().values()
        _tell(
            WindowEnded(
                at=time.time(),
                first=session.progress.examples - row.examples,  # windows are whole batches, and end with one
                end=session.progress.examples,
                event_time=row.event_time,
                auc=row.value,
                rows=sum(table.rows for table in stats),
                bytes=sum(table.bytes_total for table in stats),
            )
        )

    def _next_record(self) -> int:
        return int(self._run.session.batches.position["next"])


def _tell(event: Event) -> None:
    sys.stdout.write(to_line(event))
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Train from the last checkpoint, if there is one, and publish, until SIGTERM."""
    fields = json.loads(arguments[0])
    job = DemoJob(**{**fields, "script": LiveScript(**fields["script"])})
    configure_logging("info")
    torch.set_num_threads(1)  # the layers are small, and other processes want the cores, too
    run, teller, metrics = job.run_config(), _Teller(), Metrics()
    status = OwnStatus(run)
    with ExitStack() as opened:
        served = serve_metrics(metrics, run, status)
        assert served is not None  # the run names a port
        opened.enter_context(served)
        status.metrics_url = served.url
        place = control_place(run, os.environ, tracer_of(run, status), asked=True)
        assert place is not None  # there is a model_dir
        opened.enter_context(status.written())

        def hooks(local: LocalRun) -> list[Hook]:
            return [
                *control_hooks(local, run, place, status, _log.info),
                line_hook(local, run.train, gauge_status(metrics), GAUGE_EVERY),
                status.watch_worker(local),
                *teller.hooks(local),
            ]

        plan = publish_plan(run, metrics)
        trainer = Trainer(LiveTask(job), run.train, hooks=hooks, metrics=metrics, publish=plan)
        with StopSignals(trainer.stop, _log.info):
            report = trainer.train(report=teller.window_ended)
    _tell(Ended(at=time.time(), step=report.step, checkpoint=str(report.checkpoint)))


if __name__ == "__main__":
    main(sys.argv[1:])
