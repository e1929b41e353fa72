"""`monolith train TASK`: parses the command line, calls `Run`, and prints.

SIGINT and SIGTERM end a run after its current step. It saves, reports, and exits with 130 or 143, so that the
caller can tell that there was more to do. A second signal aborts it. With `--launch` the signals go to all
processes of the run. `monolith.cli.main` lists the exit statuses.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from monolith.checkpoint import read_checkpoint_state
from monolith.cli.options.train import TrainOptions
from monolith.cli.run_settings import run_of
from monolith.cli.terminal import EverySignal, StopSignals, say, warn
from monolith.cli.train_report import write_report
from monolith.errors import ConfigError
from monolith.observe.logs import logs_json
from monolith.runtime.config import RunConfig
from monolith.runtime.context import Launch, Output, ProgressView, Stop
from monolith.runtime.launch import decided_fields, without_flags
from monolith.runtime.run import Run

if TYPE_CHECKING:
    from monolith.train import Task
    from monolith.train.hooks import TrainStatus

DRAW_EVERY = timedelta(seconds=0.2)


def run(options: TrainOptions, environ: Mapping[str, str] | None = None) -> int:
    """Train in this process, or launch all processes of the run; return the exit status.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    if options.launch is None and options.ray_address is not None:
        raise ConfigError("train: --ray-address needs --launch ray")
    config = run_of(options, environ, decided_fields(options.launch) if options.launch else None)
    result = Run(
        config,
        partial(_make_task, options) if options.launch is None else None,
        launch=Launch(
            kind=options.launch,
            ray_address=options.ray_address,
            command=options.words,
            flags=options.run_flags,
        ),
        control=options.control,
        profile=options.profile,
        output=Output(
            say=say,
            warn=warn,
            report=lambda report: write_report(report, options, {} if options.launch else environ),
            progress=None if options.quiet else live_line,
            stop_requests=_signals_for(options, config),
            lines=sys.stderr,
        ),
        environ=environ,
    ).run()
    if options.launch is not None and result.exit_status and result.outcome != "not_saved":
        sys.stderr.write(f"monolith: {result.stop_reason}\n{how_to_resume(options, config)}\n")
    return result.exit_status


def _make_task(options: TrainOptions, config: RunConfig) -> Task:
    from monolith.runtime.task_setup import make_task  # which needs torch

    return make_task(config, options.config, options.set)


def _signals_for(
    options: TrainOptions, config: RunConfig
) -> Callable[[Stop], AbstractContextManager[object]]:
    """Return what turns signals into requests to stop: a launcher forwards each one, and a process that only
    reads data has no step to finish."""
    if options.launch is not None or config.cluster.reads_for_others:
        return EverySignal
    return lambda stop: StopSignals(stop, say)


def how_to_resume(options: TrainOptions, config: RunConfig) -> str:
    """Return a line with the last checkpoint of a run that ended early, and the command that resumes it."""
    state = read_checkpoint_state(config.train.model_dir)
    command = shlex.join(["monolith", *without_flags(options.words, "restore_checkpoint")])
    if state is None:
        return f"monolith: there is no checkpoint yet; this restarts it: {command}"
    return f"monolith: the last checkpoint is {state.model_checkpoint_path}; this resumes from it: {command}"


def live_line(task: Task, config: RunConfig) -> ProgressView:
    """Return what shows the status of training: a line redrawn on a terminal, else lines of the log."""
    from monolith.train.hooks.live_line import describe_status, log_status

    if not sys.stderr.isatty() or logs_json():
        return ProgressView(log_status, config.train.report_every, nullcontext())
    from monolith.observe.terminal import LiveLine

    line = LiveLine(f"Training {task.name}", "steps", sys.stderr)

    def show(status: TrainStatus) -> None:
        line.show(describe_status(status), status.step, status.last_step, status.data_read)

    return ProgressView(show, DRAW_EVERY, line)
