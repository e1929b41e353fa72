"""Summaries of a run: its loss, metrics, size and speed, where TensorBoard or another tracker finds them."""

from __future__ import annotations

import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from monolith import concurrency, filesystem
from monolith.errors import ConfigError, MissingExtraError, optional_package
from monolith.observe.summaries import SummaryWriter
from monolith.table import TableStats
from monolith.train.hook import Every, Hook, StepResult, TrainingRun
from monolith.train.hooks.config import TrackingConfig
from monolith.train.hooks.live_line import RunningLoss
from monolith.train.metrics.heads import HeadMetrics

if TYPE_CHECKING:
    from monolith.train.metrics import MetricSet


class SummaryHook(Hook):
    """Writes scalars every `every_steps` steps, and of what is left when the run ends well.

    `loss` is the mean over the steps since the last writing, `examples_per_s` their speed; `metrics/...`
    are as they stand, and left out while they have nothing to say; `rows/<table>` and `bytes/<table>` are
    what the tables hold. The loss is read from the device only when it is written. A run without
    a model folder has no files of TensorBoard.

    Args:
        metrics: Is only read: those of the session, which a hook before this one keeps up to date.
        stats: What the tables hold, by name: `store.stats`.
        sinks: Open the sinks of the scalars; by default files of TensorBoard in the model folder.
        clock: Seconds that never run backwards.
    """

    _examples: int

    def __init__(
        self,
        every_steps: int = 100,
        *,
        metrics: HeadMetrics | MetricSet | None = None,
        stats: Callable[[], Mapping[str, TableStats]] | None = None,
        sinks: Sequence[OpenSink] | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._open = sink_openers(TrackingConfig(), "") if sinks is None else sinks
        self._every = Every(every_steps, "summaries: every_steps")
        self._metrics = metrics
        self._stats = stats
        self._clock = clock
        self._sinks: list[ScalarSink] = []
        self._loss = RunningLoss()
        self._waiting: tuple[int, dict[str, float], concurrency.Future[dict[str, float]]] | None = None
        """What is to be written as soon as its metrics are known: the step, and other values."""
        self._begin_span()

    def after_create(self, run: TrainingRun) -> None:
        if not self._sinks:
            for opened in self._open:
                if (sink := opened(run)) is not None:
                    self._sinks.append(sink)
        self._every.begin(run.step)
        self._begin_span()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._loss.add(result.loss)
        self._examples += result.examples
        if self._waiting is not None and self._waiting[2].done():
            self._write_waiting()
        if self._every.crossed(result.step):
            self._write(result.step)

    def end(self, run: TrainingRun) -> None:
        if self._loss.steps:
            self._write(run.step)
        self._write_waiting()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _begin_span(self) -> None:
        self._examples = 0
        self._began = self._clock()

    def _write(self, step: int) -> None:
        self._write_waiting()
        loss = self._loss.take()
        if self._sinks:
            values = {"loss": loss}
            passed = self._clock() - self._began
            if passed > 0:
                values["examples_per_s"] = self._examples / passed
            stats = self._stats() if self._stats is not None else {}
            for name, table in stats.items():
                values |= {f"rows/{name}": table.rows, f"bytes/{name}": table.bytes_total}
                if table.device_bytes:
                    values[f"device_rows/{name}"] = table.device_rows
                if table.is_tiered:
                    values |= {f"cold_rows/{name}": table.cold_rows, f"cold_bytes/{name}": table.cold_bytes}
            if self._metrics is None:
                self._put(step, values, {})
            elif isinstance(self._metrics, HeadMetrics):
                self._waiting = step, values, self._metrics.values_later()
                if self._waiting[2].done():
                    self._write_waiting()
            else:
                self._put(step, values, self._metrics.values())
        self._begin_span()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            step, values, metrics = waiting
            self._put(step, values, metrics.result())

    def _put(self, step: int, values: dict[str, float], metrics: Mapping[str, float]) -> None:
        said = {f"metrics/{name}": value for name, value in metrics.items() if not math.isnan(value)}
        for sink in self._sinks:
            sink.scalars(values | said, step)
            sink.flush()


# Trackers: MLflow and W&B, which are told what TensorBoard is told.
#
# A run that is resumed continues in the run of the tracker that it began: its id is kept in the
# model_dir. What a tracker does not take is no reason not to train: it is logged once, counted, and said
# again at the end.


_log = logging.getLogger(__name__)


class ScalarSink(Protocol):
    """Takes the numbers of a run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers of one step, by tag."""

    def flush(self) -> None: ...
    def close(self) -> None: ...


class _EventFile:
    """The event file of a run, which is not closed with one of the hooks that write to it."""

    def __init__(self, writer: SummaryWriter) -> None:
        self.scalars = writer.scalars
        self.flush = writer.flush

    def close(self) -> None: ...


OpenSink = Callable[[TrainingRun], ScalarSink | None]
"""Opens a sink when a run begins; None if there is nowhere to write."""


class _Tracker(ABC):
    """A sink whose failures are counted, and not raised."""

    name = ""

    def __init__(self) -> None:
        self.lost = 0
        """Steps of which it took nothing."""
        self._closed = False

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        try:
            self._send(values, step)
        except Exception as error:
            self._lose(error)

    def flush(self) -> None:  # noqa: B027  nothing is buffered
        pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        except Exception as error:
            self._lose(error)
        if self.lost:
            _log.warning("%s did not take the numbers of %d steps", self.name, self.lost)

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        if self.lost == 1:
            _log.warning("%s does not take numbers; training continues without it: %r", self.name, error)

    @abstractmethod
    def _send(self, values: Mapping[str, float], step: int) -> None:
        """Hand over numbers of one step; whatever it raises is counted."""

    @abstractmethod
    def _finish(self) -> None:
        """Hand over what is still here, and end; likewise."""


class MlflowSink(_Tracker):
    """Numbers as metrics of an MLflow run, sent by a thread of MLflow's own.

    Args:
        uri: Of the tracking server or database; None for that of MLFLOW_TRACKING_URI.
        run_id: The run to resume; None starts one.

    Raises:
        MissingExtraError: mlflow is not installed.
        ConfigError: The server does not answer, or has no such run.
    """

    name = "MLflow"

    def __init__(self, uri: str | None, experiment: str, run_name: str, run_id: str | None = None) -> None:
        super().__init__()
        with optional_package("mlflow", "mlflow", "metrics in MLflow"):
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric: Any = Metric
        self._pending: Any = None
        try:
            self._client = MlflowClient(tracking_uri=uri)
            if run_id is None:
                found = self._client.get_experiment_by_name(experiment)
                number = self._client.create_experiment(experiment) if found is None else found.experiment_id
                run_id = self._client.create_run(number, run_name=run_name).info.run_id
            else:
                self._client.update_run(run_id, status="RUNNING")
        except MlflowException as cause:
            raise ConfigError(
                f"tracking: MLflow at {uri or 'its default'} has no run for this one: {cause}. Check "
                "tracking.mlflow_uri, or leave mlflow out of tracking.sinks."
            ) from cause
        self.run_id = str(run_id)

    def _send(self, values: Mapping[str, float], step: int) -> None:
        now = int(concurrency.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._pending = self._client.log_batch(self.run_id, metrics=metrics, synchronous=False)

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self._client.set_terminated(self.run_id)


class WandbSink(_Tracker):
    """Numbers in the history of a W&B run.

    Args:
        folder: Where it keeps its files.
        offline: Whether nothing is sent; `wandb sync` does that later.
        run_id: The run to resume; None starts one.

    Raises:
        MissingExtraError: wandb is not installed.
        ConfigError: W&B refuses the run: no key, for instance.
    """

    name = "W&B"

    def __init__(
        self, project: str, run_name: str, folder: str, *, offline: bool, run_id: str | None = None
    ) -> None:
        super().__init__()
        with optional_package("wandb", "wandb", "metrics in W&B"):
            import wandb
        self.run_id = run_id or uuid.uuid4().hex[:12]
        try:
            self._run: Any = wandb.init(
                project=project,
                name=run_name,
                id=self.run_id,
                resume=None if offline else "allow",
                mode="offline" if offline else "online",
                dir=folder,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as cause:
            raise ConfigError(
                f"tracking: W&B has no run for this one: {cause}. Run `wandb login`, set "
                "tracking.wandb_offline, or leave wandb out of tracking.sinks."
            ) from cause

    def _send(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def _finish(self) -> None:
        self._run.finish()


def sink_openers(config: TrackingConfig, task_name: str) -> list[OpenSink]:
    """Return what opens the sinks that a run asks for.

    Raises:
        MissingExtraError: The package of a tracker is not installed. TensorBoard, which is on by default, is
            left out with a line in the log instead.
    """
    project, name = config.project or task_name, config.run_name or task_name

    def tensorboard(run: TrainingRun) -> ScalarSink | None:
        return None if run.summaries is None else _EventFile(run.summaries)

    def mlflow(run: TrainingRun) -> ScalarSink:
        sink = MlflowSink(config.mlflow_uri or None, project, name, _kept(run, "mlflow"))
        _keep(run, "mlflow", sink.run_id)
        return sink

    def wandb(run: TrainingRun) -> ScalarSink:
        folder = "." if not run.model_dir or "://" in run.model_dir else run.model_dir
        sink = WandbSink(project, name, folder, offline=config.wandb_offline, run_id=_kept(run, "wandb"))
        _keep(run, "wandb", sink.run_id)
        return sink

    kinds: dict[str, OpenSink] = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    found: list[OpenSink] = []
    for kind in config.sinks:
        if find_spec(kind) is not None:
            found.append(kinds[kind])
        elif kind == "tensorboard":
            _log.info("no TensorBoard summaries: they need pip install 'monolith-recsys[tensorboard]'")
        else:
            raise MissingExtraError(kind, kind, f"tracking.sinks with {kind!r}")
    return found


def _kept(run: TrainingRun, kind: str) -> str | None:
    """Return the id of the tracker's run that this one began earlier."""
    path = filesystem.join(run.model_dir, f"{kind}_run")
    if not run.model_dir or not filesystem.exists(path):
        return None
    with filesystem.open_read(path) as file:
        return file.read().decode().strip() or None


def _keep(run: TrainingRun, kind: str, run_id: str) -> None:
    if run.model_dir:
        with filesystem.atomic_write(filesystem.join(run.model_dir, f"{kind}_run")) as file:
            file.write(run_id.encode())


# How large the tables are, in the log now and then.


class TableInfoHook(Hook):
    """Logs rows and bytes of each table, at most every so many seconds.

    Args:
        stats: Asked only when there is something to log.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, TableStats]],
        *,
        every_secs: float = 600.0,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._stats = stats
        self._every_secs = every_secs
        self._clock = clock
        self._last: float | None = None

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        now = self._clock()
        if self._last is not None and now < self._last + self._every_secs:
            return
        self._last = now
        for name, table in self._stats().items():
            _log.info(
                "step %d: table %s: %d rows, %d bytes%s",
                run.step,
                name,
                table.rows,
                table.bytes_total,
                f"; {table.cold_rows} rows, {table.cold_bytes} bytes in files" if table.is_tiered else "",
            )
