"""One process of a run: it trains, holds rows as a parameter server, or reads data for the workers.

`Run` calls `run_process`. Of several processes none ends well unless the run is finished: a process that was
not asked to stop itself ends with `stopped`, and resumes when it is started again. Only a worker that left
its work to the other workers, which a work queue allows, ends well while they continue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

from monolith import concurrency, filesystem, native
from monolith.checkpoint import read_checkpoint_state
from monolith.cluster import Discovery, Waiting
from monolith.cluster.security import guard_listener, ssl_context
from monolith.cluster.status import STATUS_PATH
from monolith.data.reading_process import ReadingProcess, may_fork
from monolith.errors import ConfigError, MonolithError, StoppedWhileWaitingError
from monolith.observe import ClockWatch, Metrics
from monolith.observe.logs import name_process
from monolith.observe.machine import usable_cores
from monolith.observe.metrics import MetricsServer
from monolith.observe.progress import describe_seconds
from monolith.runtime import Coordinator, LocalRun, Trainer, TrainReport
from monolith.runtime.batches import open_data
from monolith.runtime.config import RunConfig
from monolith.runtime.config_task import ConfigTask
from monolith.runtime.context import Output, RunContext, RunResult
from monolith.runtime.control import ControlPlace, control_hooks, control_place, profiled_on_demand, tracer_of
from monolith.runtime.data_service import data_security, read_for_workers, secured, served_task
from monolith.runtime.discovery import keys_are_named, listen_address, open_discovery
from monolith.runtime.launch import MARK
from monolith.runtime.local_profile import profiled_by_user
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.status import OwnStatus
from monolith.runtime.task_setup import MANY_CORES, prepared_task, set_threads
from monolith.train import Hook, Task, TrainConfig
from monolith.train.hooks import LiveLineHook, ProfilerHook, TrainStatus
from monolith.train.hooks.live_line import LiveValues, Outlook, gauge_status
from monolith.train.hooks.profiling import FIRST_STEP, WINDOW_STEPS
from monolith.train.hooks.save_timing import SaveListener

GAUGE_EVERY = timedelta(seconds=1)
SAY_EVERY = timedelta(seconds=15)
"""How often a wait for other processes is reported while nothing changes."""

Show = Callable[[TrainStatus], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What the functions below share: this process, its task, and everything it reports to."""

    run: RunContext
    config: RunConfig
    """The config of the run, with the secret that its processes share once it is known."""
    task: Task
    metrics: Metrics
    status: OwnStatus
    reading: ReadingProcess | None = None
    """The process that reads the training data; None reads it here."""
    control: ControlPlace | None = None
    """Where the chief is controlled; None if it is not, and in other processes."""

    @property
    def chief(self) -> bool:
        return self.config.cluster.role == "worker" and self.config.cluster.index == 0

    @property
    def output(self) -> Output:
        return self.run.output

    @property
    def environ(self) -> Mapping[str, str]:
        return self.run.environ


def run_process(run: RunContext) -> RunResult:
    """Do the part of a run that its config assigns to this process; see `Run.run`."""
    config, environ, output = run.config, run.environ, run.output
    on_cores = config.train.accelerator in (None, "cpu") or config.train.embedding_device == "host"
    computes = config.cluster.role == "worker" and on_cores
    set_threads(config.threads, shares_cores=computes and "OMP_NUM_THREADS" not in environ)
    _keep_freed_memory()
    task, config = prepared_task(run.task, config, say=output.say, warn=output.warn)
    hooks = config.train.hooks.with_environment(environ)
    config = replace(config, train=replace(config.train, hooks=hooks))
    for flag, given in {"--profile": run.profile, "--control": run.control}.items():
        if given and not config.train.model_dir:
            raise ConfigError(f"train: {flag} needs --model-dir")
    if config.distributed and not environ.get(MARK):  # a launcher names its processes itself
        name_process(f"{config.cluster.role} {config.cluster.index}")
    metrics = Metrics() if config.metrics.prefix is None else Metrics(config.metrics.prefix)
    process = Process(run=run, config=config, task=task, metrics=metrics, status=OwnStatus(config))
    with ExitStack() as open_things:
        if reads_elsewhere(task, config):  # first: a process with threads cannot be forked safely
            process = replace(
                process, reading=open_things.enter_context(ReadingProcess(partial(open_data, task)))
            )
        served = serve_metrics(metrics, config, process.status)
        if served is not None:
            open_things.enter_context(served)
            process.status.metrics_url = served.url
            output.say(f"metrics on {served.url}")
        open_things.enter_context(ClockWatch(metrics))
        if config.job.dump_features:
            return dump_features(process)
        process = _reachable(process, open_things)
        if config.cluster.reads_for_others:
            config = replace(config, security=data_security(config, environ))
            read_for_workers(task, config, run, process.status)
            return RunResult(outcome="finished")
        task = open_things.enter_context(served_task(task, config, run))
        process = replace(process, task=task)
        open_things.enter_context(last_checkpoint_reported(config, environ, output.warn))
        try:
            return _train_or_serve(process, gauges=served is not None)
        except StoppedWhileWaitingError as stopped:
            return RunResult(outcome="stopped", stop_reason=str(stopped))


def reads_elsewhere(task: Task, config: RunConfig) -> bool:
    """Whether this process has another one read its training data; see `TrainConfig.reading_process`.

    Raises:
        ConfigError: It is to, and cannot.
    """
    asked = config.train.reading_process
    service = config.data_service is not None and config.data_service.enabled
    if asked is False or config.cluster.role != "worker" or service or config.job.dump_features:
        return False
    if asked is None:
        plain = isinstance(task, ConfigTask) and not (
            task.data.live or task.data.queue or task.builds_histories
        )
        return plain and usable_cores() >= MANY_CORES and may_fork()
    if not may_fork():
        raise ConfigError(
            "train.reading_process: a process that has threads cannot start one that reads, and only Linux "
            "has the memory that they share. Start the run with `monolith train` on Linux, or leave it out"
        )
    return True


def _keep_freed_memory() -> None:
    """Let this process keep the memory of a batch for the next one; see `native.keep_freed_memory`."""
    native.keep_freed_memory()
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own would give pages back


def _reachable(process: Process, open_things: ExitStack) -> Process:
    """Let operators reach this process while the block lasts: status file, local profiles, control server."""
    run, config, status = process.run, process.config, process.status
    controlled = run.control or (process.chief and may_be_paused(config, process.output))
    tracer = tracer_of(config, status)
    name, model_dir = config.job.name or process.task.name, config.train.model_dir
    own_name = f"{config.cluster.role}-{config.cluster.index}"
    open_things.enter_context(
        profiled_by_user(own_name, process.environ, name=name, model_dir=model_dir, make=lambda: tracer)
    )
    control = control_place(config, process.environ, tracer, asked=controlled)
    open_things.enter_context(status.written())
    if process.chief:
        return replace(process, control=control)
    open_things.enter_context(profiled_on_demand(control, config, status))
    return process


def _train_or_serve(process: Process, *, gauges: bool) -> RunResult:
    """Train in this process alone, or find the other processes and train or serve rows with them."""
    config, environ = process.config, process.environ
    ranks_are_named = config.cluster.mode == "sync" and not config.cluster.num_ps and keys_are_named(environ)
    if not config.distributed or ranks_are_named:
        return train(process, gauges=gauges)
    config = secured(config, environ)
    process = replace(process, config=config)
    with open_discovery(config, environ) as discovery:
        assert discovery is not None  # the run is not local
        if config.cluster.role == "ps":
            return serve_rows(process, discovery)
        with reported_outcome(config, environ) as yarn:
            result = train(process, discovery, gauges=gauges)
            if result.exit_status:
                yarn.problem = f"the chief was stopped, with status {result.exit_status}"
            return result


def may_be_paused(config: RunConfig, output: Output) -> bool:
    """Whether the run publishes: an operator may have to pause that, so the chief has a control server."""
    if not config.publish.enabled or not config.train.model_dir:
        return False
    if find_spec("grpc") is None:
        output.warn(
            "`monolith publish` cannot reach this run without grpcio (pip install 'monolith-recsys[grpc]')"
        )
        return False
    return True


@contextmanager
def last_checkpoint_reported(
    config: RunConfig, environ: Mapping[str, str], warn: Callable[[str], None]
) -> Iterator[None]:
    """If an error ends the chief, name the checkpoint to resume from; a launcher does so itself."""
    try:
        yield
    except (ConfigError, StoppedWhileWaitingError):
        raise  # the same command would fail again
    except Exception:
        model_dir = config.train.model_dir
        chief = config.cluster.role == "worker" and not config.cluster.index
        if chief and model_dir and not environ.get(MARK):
            with suppress(MonolithError):
                state = read_checkpoint_state(model_dir)
                if state is not None:
                    last = state.model_checkpoint_path
                    warn(f"the last checkpoint is {last}; the same command resumes from it")
        raise


def dump_features(process: Process) -> RunResult:
    """Write features instead of training."""
    config = process.config.train
    written = Trainer(process.task, config).dump_features(steps=config.steps)
    process.output.say(f"{written:,} batches of features in {filesystem.join(config.model_dir, 'features')}")
    return RunResult(outcome="finished")


# A parameter server


def serve_rows(process: Process, discovery: Discovery) -> RunResult:
    """Hold a shard of the model until the run is over, or a request stops this process."""
    from monolith.runtime import serve_parameters
    from monolith.runtime.parameter_server import ServedShard, ServerPort

    config = process.config
    host, port = listen_address(config, process.environ)
    guard = guard_listener(host, config.security)
    stop = concurrency.Event()
    reasons: list[str] = []

    def ask(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    def serving(shard: ServedShard, address: str) -> None:
        cluster = config.cluster
        spare = ", a spare," if cluster.index >= cluster.num_ps else ""
        servers = cluster.num_ps + cluster.num_spares
        process.output.say(f"parameter server {cluster.index} of {servers}{spare} listens on {address}")
        process.status.watch_server(shard, address)

    with process.run.stopped_by(ask):
        end = serve_parameters(
            process.task,
            config,
            discovery,
            port=ServerPort(host=host, port=port, guard=guard),
            stop=stop,
            on_serving=serving,
            publish=_publish_plan(config, process.metrics, discovery),
        )
    process.output.say(f"parameter server {config.cluster.index} ended: {end.why}")
    if reasons:
        return RunResult(outcome="stopped", stop_reason=reasons[0])
    return RunResult(outcome="finished" if end.finished else "stopped", stop_reason=end.why)


# A worker, or the one process of a run


class Stopper:
    """Takes a request to stop to the trainer of this attempt, or ends a wait for other processes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = concurrency.Lock()  # guards the two fields below: requests come from any thread
        self._trainer: Trainer | None = None
        self._reason: str | None = None
        self.asked = concurrency.Event()
        self._said = (-1, timedelta(0))
        """How many processes were found, and after how long, when the wait was last reported."""

    def __call__(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            self.asked.set()
            if self._trainer is not None:
                self._trainer.stop(reason)

    def use(self, trainer: Trainer) -> None:
        """Stop this trainer on a request from now on, and at once if there was a request before."""
        with self._lock:
            self._trainer = trainer
            if self._reason is not None:
                trainer.stop(self._reason)

    def check(self, waiting: Waiting) -> None:
        """Report now and then which processes are waited for; end the wait on a request to stop.

        Raises:
            StoppedWhileWaitingError: Its text is the reason.
        """
        if self.asked.is_set():
            raise StoppedWhileWaitingError(self._reason)
        found, at = self._said
        if waiting.found != found or waiting.elapsed - at >= SAY_EVERY:
            self._said = (waiting.found, waiting.elapsed)
            seconds = describe_seconds(waiting.elapsed.total_seconds())
            self._output.say(
                f"waiting for {waiting.what}: {waiting.found} of {waiting.needed} are there after {seconds}"
            )


def train(process: Process, discovery: Discovery | None = None, *, gauges: bool) -> RunResult:
    """Train, and report; among several workers only the chief reports.

    Args:
        discovery: Finds the other processes; None trains in this process alone.
        gauges: Whether the status of training is also a set of metrics, since metrics are served.
    """
    config, task, metrics, output = process.config, process.task, process.metrics, process.output
    shown: list[tuple[Show, timedelta | int]] = [(gauge_status(metrics), GAUGE_EVERY)] if gauges else []
    stopper = Stopper(output)
    with ExitStack() as open_things:
        if output.progress is not None:
            progress = output.progress(task, config)
            open_things.enter_context(progress.opened)
            shown.append((progress.show, progress.every))
        first = config.profile.from_step
        profiled = process.run.profile or first is not None

        def hooks(local: LocalRun) -> list[Hook]:
            controlled: list[Hook] = []
            if process.control is not None:
                controlled = control_hooks(local, config, process.control, process.status, output.say)
            return [
                *controlled,
                *([ProfilerHook(profiled_steps(config.train, first))] if profiled else []),
                *(line_hook(local, config.train, show, every) for show, every in shown),
                process.status.watch_worker(local),
            ]

        listeners: list[SaveListener] = []
        if process.chief and config.export.when_saving:
            from monolith.runtime.export import exports_when_saving

            exports = exports_when_saving(task, config.train, config.export, metrics=metrics, say=output.warn)
            listeners = open_things.enter_context(exports)
        open_things.enter_context(process.run.stopped_by(stopper))

        def attempt(coordinator: Coordinator | None = None) -> TrainReport:
            trainer = Trainer(
                task,
                config.train,
                hooks=hooks,
                metrics=metrics,
                coordinator=coordinator,
                listeners=listeners,
                publish=_publish_plan(config, metrics, discovery),
                opens=None if process.reading is None else process.reading.open,
            )
            stopper.use(trainer)
            return trainer.train()

        as_rank = config.distributed and config.cluster.mode == "sync"
        if not as_rank and discovery is None:
            return _ended(process, attempt())
        # One process starts sooner without these.
        from monolith.runtime.attempts import Retries, SharedTraining

        together = SharedTraining(
            config=config,
            environ=process.environ,
            metrics=metrics,
            output=output,
            retries=Retries(config.failover, metrics, say=output.warn, pause=stopper.asked.wait),
            on_waiting=stopper.check,
            on_lost=process.status.lost_others,
        )
        if as_rank:
            report = together.train_as_rank(attempt, discovery)
        else:
            assert discovery is not None
            report = together.train_on_servers(attempt, discovery)
    return _ended(process, report)


def _publish_plan(config: RunConfig, metrics: Metrics, discovery: Discovery | None) -> PublishPlan | None:
    if config.publish.to is None:
        return None
    from monolith.runtime.publish import publish_plan  # a run that publishes nothing starts sooner without it

    return publish_plan(config, metrics, discovery)


def _ended(process: Process, report: TrainReport) -> RunResult:
    """Report how training ended, and return the result."""
    config, output = process.config, process.output
    found = None
    if config.cluster.index == 0:
        found = report_as_json(report, process.task, config.train)
        output.report(found)
    else:
        left = "; the other workers continue with the data it had not trained" if report.departed else ""
        output.say(f"worker {config.cluster.index} ended at step {report.step:,}: {report.stop_reason}{left}")
    outcome: Literal["departed", "not_saved", "stopped", "finished"]
    if report.departed:
        outcome = "departed"
    elif report.save_trouble and not config.train.save.ignore_errors:
        outcome = "not_saved"
    else:
        # A run that a signal stopped at its very end is finished, and still says which signal it was.
        stopped = report.stop_reason in ("SIGINT", "SIGTERM") or not report.finished
        outcome = "stopped" if stopped else "finished"
    return RunResult(outcome=outcome, stop_reason=report.stop_reason, report=found)


# What it reports to


def serve_metrics(
    metrics: Metrics, config: RunConfig, status: OwnStatus | None = None
) -> MetricsServer | None:
    """Serve metrics to Prometheus, and the status to `monolith status watch`, if the config asks for it.

    Raises:
        ConfigError: Other machines can reach the address, and callers need no token.
        ListenError: The port is taken.
    """
    if config.metrics.port is None:
        return None
    guard = guard_listener(config.metrics.host, config.security)
    labels = {
        "model_name": config.model_name,
        "role": config.cluster.role,
        "cluster_type": config.cluster.kind,
    }
    metrics.gauge("run_info", "What this process is; always 1.", list(labels)).set(1, **labels)
    return metrics.serve(
        config.metrics.port,
        config.metrics.host,
        context=ssl_context(config.security, server=True),
        admits=None if guard.token is None else guard.admits,
        pages=None if status is None else {STATUS_PATH: status.page},
    )


class JobOutcome:
    """How a run ended: with success, unless there is a problem."""

    problem: str | None = None


@contextmanager
def reported_outcome(config: RunConfig, environ: Mapping[str, str]) -> Iterator[JobOutcome]:
    """Report the outcome of the block to the job's master, such as that of YARN, if this process is the
    chief.

    A package adds a master by an entry point of the group `monolith.job_masters`: a function that takes the
    environment and returns an object with `finish()`, `kill(reason)` and `close()`, or None if there is none.
    """
    outcome = JobOutcome()
    points = metadata.entry_points(group="monolith.job_masters") if config.cluster.index == 0 else ()
    masters = [master for point in points if (master := point.load()(environ)) is not None]
    try:
        yield outcome
    except BaseException as error:
        outcome.problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        for master in masters:
            with closing(master):
                if outcome.problem is None:
                    master.finish()
                else:
                    master.kill(outcome.problem)


def line_hook(local: LocalRun, config: TrainConfig, show: Show, every: timedelta | int) -> Hook:
    """Return the hook that shows the status of training every so often."""
    coordinator = local.session.coordinator
    return LiveLineHook(
        show,
        LiveValues(
            stats=local.session.model.stats,
            metrics=local.session.metrics.values_later,
            skipped=lambda: local.session.progress.total_skipped,
            staleness=lambda: None if (found := coordinator.status().staleness) is None else found.last,
            evaluated=lambda: last.metrics if local.evaluate and (last := local.evaluate.latest) else {},
        ),
        Outlook(steps=config.steps, max_steps=config.max_steps, read=local.session.fraction_read),
        every=every,
        epochs=config.epochs or 1,
        live=local.session.batches.live,
    )


def profiled_steps(config: TrainConfig, first: int | None = None) -> tuple[int, int]:
    """Return the steps to profile: by default when caches are warm, but inside of a run that is short."""
    if first is None:
        given = [limit for limit in (config.steps, config.max_steps) if limit is not None]
        first = min([FIRST_STEP, *(max(limit - WINDOW_STEPS, 0) // 2 for limit in given)])
    return first, first + WINDOW_STEPS


def report_as_json(report: TrainReport, task: Task, config: TrainConfig) -> dict[str, Any]:
    """Return the report of a run, as JSON can hold it.

    Its speed is that of the training steps: the time before the first step, saves and evaluations do not
    count.
    """
    training = report.seconds - report.start_seconds - report.save_seconds - report.evaluate_seconds
    return {
        "task": task.name,
        "model_dir": config.model_dir or None,
        "step": report.step,
        "steps": report.steps,
        "examples": report.examples,
        "replayed_batches": None if report.replayed is None else round(report.replayed, 4),
        "skipped_batches": report.skipped,
        "bad_records": dict(report.bad_records),
        "dense_staleness": report.dense_staleness,
        "seconds": round(report.seconds, 3),
        "start_seconds": round(report.start_seconds, 3),
        "kernels": asdict(report.kernels),
        "save_seconds": round(report.save_seconds, 3),
        "evaluate_seconds": round(report.evaluate_seconds, 3),
        "examples_per_s": round(report.examples / training if training > 0 else 0.0, 1),
        "loss": None if math.isnan(report.loss) else report.loss,
        "stop_reason": report.stop_reason,
        "finished": report.finished,
        "restored_from": report.restored_from,
        "checkpoint": report.checkpoint,
        "save_trouble": report.save_trouble,
        "refused": dict(report.refused),
        "overdue": dict(report.overdue),
        "lost_servers": [asdict(one) for one in report.lost.servers],
        "lost_workers": [asdict(one) for one in report.lost.workers],
        "metrics": {
            name: None if math.isnan(rows[-1].value) else rows[-1].value
            for name, rows in report.windows.items()
            if rows
        },
        "evaluations": report.evaluations,
        "evaluation": None if report.evaluation is None else report.evaluation.to_json(),
        "best": None if report.best is None else asdict(report.best),
    }
