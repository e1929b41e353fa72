"""A run as its model_dir shows it: its processes, evaluations and checkpoints, and the metrics of its chief.

Nothing is asked of those that train but the metrics that they offer: everything else is files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from monolith import filesystem
from monolith.checkpoint.offline.listing import list_checkpoints
from monolith.cluster.security import SecurityConfig
from monolith.cluster.status import FAILED, JobStatus, ProcessStatus, StatusBoard
from monolith.errors import MonolithError, UnavailableError
from monolith.observe.progress import describe_seconds
from monolith.observe.summaries import read_summaries
from monolith.train.evaluation_log import EvaluationLog
from monolith.ui.figures import CheckpointFigures, CurvePoint, PageReading, PublishFigures, RunState
from monolith.ui.publishing import PublishOrders, RunPublishing, orders_of
from monolith.ui.sources import MOST_METRICS, ProcessSource, chart_of, is_auc, process_figures, tier_facts

_log = logging.getLogger(__name__)

FILES_EVERY = 5.0
REMOTE_FILES_EVERY = 60.0
"""Seconds between two looks at checkpoints and evaluations."""
MOST_CHECKPOINTS = 50


class RunSource:
    """A run, by its model_dir.

    Args:
        security: What to show to the metrics port of the run, and to its control server.
        order: Reaches the publishing of the run; by default through its control server.
        clock: Unix seconds.
        timer: Seconds that only grow.
    """

    def __init__(
        self,
        name: str,
        model_dir: str,
        security: SecurityConfig | None = None,
        *,
        order: PublishOrders | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._model_dir = model_dir
        self._security = security
        self._clock = clock
        self._timer = timer
        self._board = StatusBoard(model_dir)
        self._evaluations = _Evaluations(model_dir)
        self._files_every = REMOTE_FILES_EVERY if self._board.is_remote else FILES_EVERY
        self._looked: float | None = None
        self._checkpoints: Sequence[CheckpointFigures] = ()
        self._chief: tuple[str, ProcessSource] | None = None
        self._stored = False
        """Whether the summaries of the run were read."""
        self.publishing = RunPublishing(order or orders_of(model_dir, security), timer=timer)
        """What the buttons of the page do."""
        self.set_split = None
        """A run answers no requests."""

    @property
    def name(self) -> str:
        return self._name

    def read(self) -> PageReading:
        if not filesystem.is_folder(self._model_dir):
            raise UnavailableError(f"there is no folder {self._model_dir!r} yet")
        job = self._board.read(self._clock)
        reading = self._of_metrics(job)
        points = list(reading.points)
        if not any(point.chart == "examples" for point in points):
            points += self._speed(job)
        if self._looked is None or self._timer() - self._looked >= self._files_every:
            self._looked = self._timer()
            self._checkpoints = self._list()
            points += self._evaluations.new()
        note, state = reading.note, self._state(job)
        if state in ("ended", "failed", "silent") and not self._stored and self._chief is None:
            self._stored = True  # its metrics were not asked for while it trained
            points += stored_points(self._model_dir)
        if state == "ended":
            note = self._last_words()
        elif state == "not begun":
            note = "no process says that it runs: it has not begun, or has ended without a checkpoint"
        elif state == "silent":
            age = min(one.age(job.time) for one in job.processes)
            note = f"no process wrote its status for {describe_seconds(age)}: killed, or it cannot write"
        note = next((one.save_trouble for one in job.processes if one.save_trouble), note)
        return replace(
            reading,
            kind="run",
            state=state,
            note=note,
            facts={**reading.facts, **tier_facts(job)},
            points=points,
            publish=self._published(job) or reading.publish,
            checkpoints=self._checkpoints,
            processes=process_figures(job),
        )

    def _state(self, job: JobStatus) -> RunState:
        """Return the state of the run: a clean end removes its status files, a crash leaves them."""
        if not job.processes:
            return "ended" if self._checkpoints else "not begun"
        alive = [one for one in job.processes if one.state != FAILED and not one.is_silent(job.time)]
        if alive:
            return "up"
        return "failed" if any(one.state == FAILED for one in job.processes) else "silent"

    def _last_words(self) -> str:
        last = self._checkpoints[0]  # the newest comes first
        return f"no process says that it runs; its last checkpoint is {last.name}, of step {last.step:,}"

    def _published(self, job: JobStatus) -> PublishFigures | None:
        controlled = any(one.control and not one.is_silent(job.time) for one in job.processes)
        return self.publishing.figures() if controlled else None

    def close(self) -> None:
        """Do nothing: no connection is kept between two reads."""

    def _of_metrics(self, job: JobStatus) -> PageReading:
        """Return what the chief shows over HTTP; its status file says where."""
        url = next((metrics_url(one) for one in job.processes if one.metrics), None)
        if url is None:
            running = any(one.role == "worker" for one in job.processes)
            advice = "start the run with --metrics-port 0 to see quality, tables and freshness"
            return PageReading(kind="run", note=advice if running else "")
        if self._chief is None or self._chief[0] != url:
            chief = ProcessSource(self._name, url, self._security, clock=self._clock, timer=self._timer)
            self._chief = url, chief
        try:
            return self._chief[1].read()
        except MonolithError as error:
            return PageReading(kind="run", note=str(error))

    def _speed(self, job: JobStatus) -> list[CurvePoint]:
        known = [
            one.examples_per_s
            for one in job.processes
            if one.examples_per_s is not None and not one.is_silent(job.time)
        ]
        return [CurvePoint("examples", "", job.time, sum(known))] if known else []

    def _list(self) -> list[CheckpointFigures]:
        try:
            found = list_checkpoints(self._model_dir).checkpoints
        except MonolithError:
            return []  # the run deletes and writes meanwhile; the next look is soon
        return [
            CheckpointFigures(
                name=one.name,
                step=one.step,
                saved_at=one.saved_at,
                kind=one.kind,
                rows=sum(one.rows.values()),
                bytes=one.bytes,
                marks=list(one.marks),
                problem=one.problem,
            )
            for one in reversed(found[-MOST_CHECKPOINTS:])
        ]


def metrics_url(process: ProcessStatus) -> str:
    """Return where the metrics of a process can be asked for; one that listens everywhere, by its host."""
    parts = urlsplit(process.metrics)
    if parts.hostname in ("0.0.0.0", "::") and process.host:
        return f"{parts.scheme}://{process.host}:{parts.port}"
    return f"{parts.scheme}://{parts.netloc}"


def stored_points(model_dir: str) -> list[CurvePoint]:
    """Return the loss and the metrics of a run as its summaries have them; none if they cannot be read."""
    folder = Path(model_dir, "summaries")
    if filesystem.is_remote(model_dir) or not folder.is_dir():
        return []
    points = []
    try:
        for one in read_summaries(sorted(map(str, folder.iterdir())), "scalars"):
            metric = one.tag.removeprefix("metrics/")
            if metric == one.tag != "loss":
                continue
            chart = "auc_by_step" if is_auc(metric) else chart_of("online", metric)
            points.append(CurvePoint(chart, metric.rpartition("/")[0], float(one.step), float(one.data)))
    except (MonolithError, OSError) as error:
        _log.info("the summaries in %s are not shown: %s", folder, error)
    return points


class _Evaluations:
    """The points that evaluations have added since one last looked."""

    def __init__(self, model_dir: str) -> None:
        self._log = EvaluationLog(model_dir)
        self._known: dict[str, list[tuple[int, float]]] = {}

    def new(self) -> list[CurvePoint]:
        try:
            lines = self._log.lines()
        except MonolithError:
            return []
        points: list[CurvePoint] = []
        for kind, saved in (("", False), ("checkpoints", True)):
            of_kind = [line for line in lines if (line.get("checkpoint") is not None) == saved]
            there = [(int(line["step"]), float(line.get("time") or 0.0)) for line in of_kind]
            before = self._known.get(kind, [])
            # A run that rolled back has rewritten the log: all of it is drawn again.
            first = len(before) if there[: len(before)] == before else 0
            self._known[kind] = there
            for line in of_kind[first:]:
                points += _evaluated(line, kind)
        return points


def _evaluated(line: dict[str, object], kind: str) -> list[CurvePoint]:
    metrics = line.get("metrics")
    found = metrics if isinstance(metrics, dict) else {}
    values = {name: value for name, value in found.items() if isinstance(value, int | float)}
    step = float(str(line["step"]))
    return [
        CurvePoint(chart_of("evaluation", name), f"{name} {kind}".strip(), step, float(value))
        for name, value in sorted(values.items(), key=lambda one: (not is_auc(one[0]), one[0]))[:MOST_METRICS]
    ]
