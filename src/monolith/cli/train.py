"""`monolith train TASK`: this process trains, alone or as one of those that train a model together.

SIGINT and SIGTERM end a run after its current step. It saves, says what it did, and exits with
130 or 143, so that whoever started it can tell that there was more to do. A second one aborts.
Of several processes none exits with 0 unless the run is finished; those that were not asked to stop
themselves exit with 75, and go on when they are started again. Only a worker that left its work to the
others, where the data hands it out, exits with 0 while they go on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TextIO

from monolith import filesystem
from monolith.checkpoint import read_checkpoint_state
from monolith.cli.control import ControlPlace, control_place, profiled_on_demand, tracer_of
from monolith.cli.data_roles import data_security, read_for_others, secured, served_task
from monolith.cli.failover import Failover
from monolith.cli.options.train import TrainOptions
from monolith.cli.own_status import OwnStatus
from monolith.cli.profile import profiled_by_user
from monolith.cli.stop_signals import StopSignals
from monolith.cli.task_config import Training, load_training, say, warn
from monolith.cli.train_report import MARK, to_json, write_report
from monolith.cluster import Discovery, Waiting
from monolith.cluster.mpi import keys_are_named
from monolith.cluster.security import guard_caller, guard_listener, ssl_context
from monolith.cluster.status import STATUS_PATH
from monolith.cluster.yarn import ApplicationMaster, application_master_address
from monolith.errors import ConfigError, MonolithError, RetryableError
from monolith.observe import ClockWatch, Metrics
from monolith.observe.logs import logs_json, name_process
from monolith.observe.metrics import MetricsServer
from monolith.observe.progress import describe_seconds
from monolith.run import RunConfig
from monolith.run.publishing import publish_plan
from monolith.run.runtime import listen_address, open_discovery
from monolith.train import (
    Fleet,
    FleetPeers,
    Hook,
    LocalRun,
    Peers,
    Run,
    Task,
    TrainConfig,
    Trainer,
    TrainReport,
)
from monolith.train.hooks import (
    ActionFileHook,
    BarrierHook,
    ControllerHook,
    ControlServerHook,
    LiveLineHook,
    ProfilerHook,
    Standing,
)
from monolith.train.hooks.controller import ACTION_FILE
from monolith.train.hooks.live_line import describe_standing, gauge_standing, log_standing
from monolith.train.hooks.profiling import FIRST_STEP, WINDOW_STEPS
from monolith.train.hooks.save_timing import SaveListener

DRAW_EVERY = timedelta(seconds=0.2)
GAUGE_EVERY = timedelta(seconds=1)
SAY_EVERY = timedelta(seconds=15)
"""How often somebody is told that others are waited for, while nothing changes."""

Show = Callable[[Standing], None]


def run(options: TrainOptions, environ: Mapping[str, str] | None = None) -> int:
    """Do what this process is to do of a run, and say what came of it.

    Args:
        environ: By default that of this process.
    """
    environ = os.environ if environ is None else environ
    training = load_training(options, environ)
    hooks = training.run.train.hooks.with_environment(environ)
    training = replace(training, run=replace(training.run, train=replace(training.run.train, hooks=hooks)))
    run = training.run
    asked = {
        "--profile": options.profile,
        "--control": options.control,
    }
    for flag in (flag for flag, given in asked.items() if given and not training.config.model_dir):
        raise ConfigError(f"train: {flag} needs --model-dir")
    if run.distributed and not environ.get(MARK):  # a launcher names its processes itself
        name_process(f"{run.cluster.role} {run.cluster.index}")
    metrics = Metrics() if run.metrics.prefix is None else Metrics(run.metrics.prefix)
    status = OwnStatus(run)
    with ExitStack() as open_things:
        served = serve_metrics(metrics, run, status)
        if served is not None:
            open_things.enter_context(served)
            status.metrics_url = served.url
            say(f"metrics on {served.url}")
        open_things.enter_context(ClockWatch(metrics))
        if run.job.dump_features:
            return dump_features(training)
        chief = run.cluster.role == "worker" and run.cluster.index == 0
        controlled = options.control or (chief and is_to_be_held(run))
        tracer = tracer_of(run, status)
        own_name = f"{run.cluster.role}-{run.cluster.index}"
        name, model_dir = run.job.name or training.task.name, run.train.model_dir
        open_things.enter_context(
            profiled_by_user(own_name, environ, name=name, model_dir=model_dir, make=lambda: tracer)
        )
        control = control_place(run, environ, tracer, asked=controlled)
        open_things.enter_context(status.written())
        if not chief:
            open_things.enter_context(profiled_on_demand(control, run, status))
            control = None
        if run.cluster.reads_for_others:
            run = replace(run, security=data_security(run, environ))
            return read_for_others(training.task, run, environ, status)
        task = open_things.enter_context(served_task(options, training.task, run, environ))
        training = replace(training, task=task)
        in_step = run.cluster.mode == "sync"

        def train_in(run: RunConfig, discovery: Discovery | None = None) -> int:
            return train(
                options,
                training,
                run,
                metrics,
                environ,
                shown=served is not None,
                status=status,
                control=control,
                discovery=discovery,
            )

        open_things.enter_context(last_checkpoint_said(run, environ))
        if not run.distributed or (in_step and not run.cluster.num_ps and keys_are_named(environ)):
            return train_in(run)
        run = secured(run, environ)
        with open_discovery(run, environ) as discovery:
            assert discovery is not None  # the run is not local
            if run.cluster.role == "ps":
                return serve(training, run, discovery, environ, status, metrics=metrics)
            with reported_to_yarn(run, environ) as outcome:
                ended = train_in(run, discovery)
                if ended:
                    outcome.problem = f"the chief was stopped, with status {ended}"
                return ended


def is_to_be_held(run: RunConfig) -> bool:
    """Whether the run publishes, so that somebody may have to hold it: the chief is then controlled."""
    if not run.publish.enabled or not run.train.model_dir:
        return False
    if find_spec("grpc") is None:
        warn("`monolith publish` cannot reach this run without grpcio (pip install 'monolith-recsys[grpc]')")
        return False
    return True


@contextmanager
def last_checkpoint_said(run: RunConfig, environ: Mapping[str, str]) -> Iterator[None]:
    """Say what is left of a run that an error ends, and how it goes on; a launcher does so itself."""
    try:
        yield
    except ConfigError:
        raise  # it would not go on before somebody has changed something
    except Exception:
        chief = run.cluster.role == "worker" and not run.cluster.index
        if chief and run.train.model_dir and not environ.get(MARK):
            with suppress(MonolithError):
                state = read_checkpoint_state(run.train.model_dir)
                if state is not None:
                    last = state.model_checkpoint_path
                    warn(f"the last checkpoint is {last}; the same command goes on from it")
        raise


def dump_features(training: Training) -> int:
    """Write features instead of training."""
    written = Trainer(training.task, training.config).dump_features(steps=training.config.steps)
    say(f"{written:,} batches of features in {filesystem.join(training.config.model_dir, 'features')}")
    return 0


# A parameter server


def serve(
    training: Training,
    run: RunConfig,
    discovery: Discovery,
    environ: Mapping[str, str],
    status: OwnStatus,
    *,
    metrics: Metrics,
) -> int:
    """Hold a share of the model until the run is over, or a signal ends this process."""
    from monolith.train import serve_parameters
    from monolith.train.fleet.standby_copies import CopyPlan

    host, port = listen_address(run, environ)
    guard = guard_listener(host, run.security)
    stop = threading.Event()
    with StopSignals(lambda _: stop.set(), say) as signals:
        end = serve_parameters(
            training.task,
            training.config,
            discovery,
            index=run.cluster.index,
            num_ps=run.cluster.num_ps,
            num_workers=run.cluster.num_workers,
            max_workers=run.cluster.max_workers or None,
            num_spares=run.cluster.num_spares,
            holds_weights=run.cluster.mode == "async",
            host=host,
            port=port,
            guard=guard,
            limits=run.limits,
            stop=stop,
            say=say,
            start_timeout=run.timeouts.start,
            lost_after=run.timeouts.silence,
            abandoned_after=run.timeouts.abandoned,
            on_serving=status.watch_server,
            publish=publish_plan(run, metrics, discovery),
            copies=CopyPlan(interval=run.cluster.standby_interval.total_seconds()),
        )
    say(f"parameter server {run.cluster.index} ended: {end.why}")
    if signals.received is not None:
        return 128 + signals.received
    return 0 if end.finished else os.EX_TEMPFAIL


# A worker, or the one process of a run


class Stopper:
    """Where a request to stop goes: to whoever trains now, or to who waits for others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._trainer: Trainer | None = None
        self._reason: str | None = None
        self.asked = threading.Event()
        self._said = (-1, timedelta(0))
        """How many were there, and after how long, when somebody was last told who is waited for."""

    def __call__(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            self.asked.set()
            if self._trainer is not None:
                self._trainer.stop(reason)

    def use(self, trainer: Trainer) -> None:
        """Tell this trainer from now on, and now what was asked before."""
        with self._lock:
            self._trainer = trainer
            if self._reason is not None:
                trainer.stop(self._reason)

    def check(self, waiting: Waiting) -> None:
        """Say now and then who is waited for; end the wait when somebody asked to stop.

        Raises:
            SystemExit: With the status of whoever the signal ended.
        """
        if self.asked.is_set():
            raise SystemExit(143 if self._reason == "SIGTERM" else 130)
        found, at = self._said
        if waiting.found != found or waiting.elapsed - at >= SAY_EVERY:
            self._said = (waiting.found, waiting.elapsed)
            seconds = describe_seconds(waiting.elapsed.total_seconds())
            say(f"waiting for {waiting.what}: {waiting.found} of {waiting.needed} are there after {seconds}")


def train(
    options: TrainOptions,
    training: Training,
    run: RunConfig,
    metrics: Metrics,
    environ: Mapping[str, str],
    *,
    shown: bool,
    status: OwnStatus,
    control: ControlPlace | None = None,
    discovery: Discovery | None = None,
) -> int:
    """Train, and write the report; among others only the chief does.

    Args:
        run: That of the training, with the secret that its processes share.
        shown: Whether metrics are served.
        status: Told how this worker stands.
        control: Where the chief is controlled, if it is to be.
        discovery: Where the others are; None trains in this process alone.
    """
    task, config = training.task, training.config
    chief = run.cluster.index == 0
    lines: list[tuple[Show, timedelta]] = [(gauge_standing(metrics), GAUGE_EVERY)] if shown else []
    stopper = Stopper()
    with ExitStack() as open_things:
        if not options.quiet:
            lines.append(live_line(task, config, sys.stderr, open_things))

        first = run.profile.from_step
        profiled = options.profile or first is not None

        def hooks(local: LocalRun) -> list[Hook]:
            return [
                *(control_hooks(local, run, control, status) if control is not None else []),
                *([ProfilerHook(profiled_steps(config, first))] if profiled else []),
                *(line_hook(local, config, show, every) for show, every in lines),
                status.watch_worker(local),
            ]

        listeners: list[SaveListener] = []
        if chief and run.export.when_saving:
            from monolith.run.servables import exports_when_saving

            exports = exports_when_saving(task, config, run.export, metrics=metrics, say=warn)
            listeners = open_things.enter_context(exports)
        signals = open_things.enter_context(StopSignals(stopper, say))

        def attempt(peers: Peers | None = None) -> TrainReport:
            trainer = Trainer(
                task,
                config,
                hooks=hooks,
                metrics=metrics,
                peers=peers,
                listeners=listeners,
                publish=publish_plan(run, metrics, discovery),
            )
            stopper.use(trainer)
            return trainer.train()

        if run.distributed and run.cluster.mode == "sync":
            from monolith.cli.rank_training import as_rank

            failover = Failover(run.failover, metrics, say=warn, pause=stopper.asked.wait)
            report = as_rank(
                attempt,
                run,
                discovery,
                environ,
                failover=failover,
                on_waiting=stopper.check,
                lost_others=status.lost_others,
            )
        elif discovery is not None:
            report = with_failover(attempt, run, discovery, metrics, stopper, status=status)
        else:
            report = attempt()
    if chief:
        write_report(to_json(report, task, config), options, environ)
    else:
        left = "; the others go on with what it had not trained" if report.departed else ""
        say(f"worker {run.cluster.index} ended at step {report.step:,}: {report.stop_reason}{left}")
    if report.departed:
        return 0
    if report.save_trouble and not config.save.ignore_errors:
        return 2  # what servers wait for is not there, however well the training went
    return signals.status(report.stop_reason) or (0 if report.finished else os.EX_TEMPFAIL)


def fleet_of(run: RunConfig, discovery: Discovery, metrics: Metrics, stopper: Stopper) -> Fleet:
    """Wait for the servers of the run, and return this worker's place among its processes."""
    from monolith.train import join_fleet

    cluster, timeouts = run.cluster, run.timeouts
    fleet = join_fleet(
        discovery,
        index=cluster.index,
        num_ps=cluster.num_ps,
        num_workers=cluster.num_workers,
        max_workers=cluster.max_workers or None,
        model_dir=run.train.model_dir,
        run_id=run.job.id,
        num_redundant_ps=cluster.num_redundant_ps,
        num_extra_ps=cluster.num_extra_ps,
        standbys=cluster.standbys,
        measure_ps=cluster.measure_ps,
        use_ps=cluster.use_ps,
        metrics=metrics,
        model_name=run.model_name,
        cluster_type=cluster.kind,
        say=say,
        guard=guard_caller(run.security),
        start_timeout=timeouts.start,
        finish_timeout=timeouts.finish,
        call_timeout=timeouts.operation or timeouts.lookup,
        lookup_timeout=timeouts.lookup,
        keep_going=run.failover.recovery == "keep_going",
        spare_after=run.failover.spare_after,
        half_rows=cluster.half_rows,
        on_waiting=stopper.check,
    )
    if run.train.submitted_at is not None:
        ready = metrics.gauge(
            "container_ready_seconds", "From the job's submission to its servers' being there."
        )
        ready.set(time.time() - run.train.submitted_at)
    return fleet


def with_failover(
    attempt: Callable[[Peers], TrainReport],
    run: RunConfig,
    discovery: Discovery,
    metrics: Metrics,
    stopper: Stopper,
    *,
    status: OwnStatus,
) -> TrainReport:
    """Train; where others were lost, wait and go on from the last checkpoint, as often as is allowed."""
    failover = Failover(run.failover, metrics, say=warn, pause=stopper.asked.wait)
    while True:
        fleet = fleet_of(run, discovery, metrics, stopper)  # servers that do not come in time will not come
        try:
            with fleet:
                failover.joined(fleet.servers)
                return attempt(FleetPeers(fleet, run.dense))
        except RetryableError as error:
            status.lost_others()
            failover.lost(error)


# Whom it tells


def serve_metrics(metrics: Metrics, run: RunConfig, status: OwnStatus | None = None) -> MetricsServer | None:
    """Let Prometheus ask for metrics, and `monolith status watch` for the status, where the config says so.

    Raises:
        ConfigError: Others can reach the address, and nothing is demanded of them.
        ListenError: The port is taken.
    """
    if run.metrics.port is None:
        return None
    guard = guard_listener(run.metrics.host, run.security)
    labels = {"model_name": run.model_name, "role": run.cluster.role, "cluster_type": run.cluster.kind}
    metrics.gauge("run_info", "What this process is; always 1.", list(labels)).set(1, **labels)
    return metrics.serve(
        run.metrics.port,
        run.metrics.host,
        context=ssl_context(run.security, server=True),
        admits=None if guard.token is None else guard.admits,
        pages=None if status is None else {STATUS_PATH: status.page},
    )


class Outcome:
    """How a job ended: well, unless there is a problem."""

    problem: str | None = None


@contextmanager
def reported_to_yarn(run: RunConfig, environ: Mapping[str, str]) -> Iterator[Outcome]:
    """Tell the application master how the block ended, as the chief; no end but a clean one is a success."""
    outcome = Outcome()
    if run.cluster.index != 0 or application_master_address(environ) is None:
        yield outcome
        return
    with ApplicationMaster(environ) as master:
        try:
            yield outcome
        except BaseException as error:
            outcome.problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            if outcome.problem is None:
                master.finish()
            else:
                master.kill(outcome.problem)


# While it runs


def live_line(
    task: Task, config: TrainConfig, stream: TextIO, open_things: ExitStack
) -> tuple[Show, timedelta]:
    """Return what shows how the run stands, and how often: drawn where a person looks on, else in the log."""
    if not stream.isatty() or logs_json():
        return log_standing, config.report_every
    from monolith.observe.terminal import LiveLine

    line = open_things.enter_context(LiveLine(f"Training {task.name}", "steps", stream))
    return lambda standing: line.show(
        describe_standing(standing), standing.step, standing.last_step, standing.data_read
    ), DRAW_EVERY


def line_hook(run: LocalRun, config: TrainConfig, show: Show, every: timedelta) -> Hook:
    return LiveLineHook(
        show,
        every=every,
        stats=run.session.model.stats,
        metrics=run.session.metrics.values,
        skipped=lambda: run.session.total_skipped,
        staleness=lambda: None if (found := run.session.staleness) is None else found.last,
        evaluated=lambda: last.metrics if run.evaluate and (last := run.evaluate.latest) else {},
        steps=config.steps,
        max_steps=config.max_steps,
        read=run.session.fraction_read,
        epochs=config.epochs or 1,
        live=run.session.live,
    )


def control_hooks(local: LocalRun, run: RunConfig, place: ControlPlace, status: OwnStatus) -> list[Hook]:
    """Return what lets an operator halt, resume, save, stop and profile the run, and hold what it
    publishes."""
    assert local.save is not None  # there is a model_dir
    controller = ControllerHook(local.save.trigger_save)
    server = ControlServerHook(
        local.barrier,
        local.save.trigger_save,
        tracer=place.tracer,
        publish=None if local.publish is None else local.publish.obey,
        address=place.address,
        security=place.security,
        limits=run.limits,
    )
    status.control = lambda: server.address or ""
    return [
        BarrierHook(local.barrier, idle=[local.save.before_step]),
        controller,
        ActionFileHook(controller),
        server,
        _SayAddress(server),
    ]


class _SayAddress(Hook):
    def __init__(self, server: ControlServerHook) -> None:
        self._server = server

    def after_create(self, run: Run) -> None:
        path = filesystem.join(run.model_dir, ACTION_FILE)
        say(f"control on {self._server.address}, and by the file {path}")


def profiled_steps(config: TrainConfig, first: int | None = None) -> tuple[int, int]:
    """Return the steps to profile: by default when caches are warm, but inside of a run that is short."""
    if first is None:
        given = [limit for limit in (config.steps, config.max_steps) if limit is not None]
        first = min([FIRST_STEP, *(max(limit - WINDOW_STEPS, 0) // 2 for limit in given)])
    return first, first + WINDOW_STEPS
