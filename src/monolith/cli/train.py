"""`monolith train TASK`: parses the command line, calls `Run`, and prints.

SIGINT and SIGTERM end a run after its current step. It saves, reports, and exits with 130 or 143, so that the
caller can tell that there was more to do. A second signal aborts it. With `--launch` the signals go to all
processes of the run. `monolith.cli.main` lists the exit statuses.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from monolith.checkpoint import read_checkpoint_state, start_named
from monolith.checkpoint.folder.state_files import absolute_path
from monolith.cli.options.train import TrainOptions
from monolith.cli.terminal import EverySignal, StopSignals, say, warn
from monolith.config import parse_duration
from monolith.errors import ConfigError
from monolith.observe.logs import logs_json
from monolith.observe.progress import describe_rate, describe_seconds
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import read_run
from monolith.runtime.context import Launch, Output, ProgressView, Stop
from monolith.runtime.launch import MARK, decided_fields, without_flags
from monolith.runtime.losses import describe_uncounted
from monolith.runtime.run import Run
from monolith.train.config import TrainConfig
from monolith.train.evaluate_config import LOSS, headlines
from monolith.train.hook import DATA_ENDED

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

    steps = config.train.report_every_steps
    if steps is not None or not sys.stderr.isatty() or logs_json():
        return ProgressView(log_status, steps or config.train.report_every, nullcontext())
    from monolith.observe.terminal import LiveLine

    line = LiveLine(f"Training {task.name}", "steps", sys.stderr)

    def show(status: TrainStatus) -> None:
        line.show(describe_status(status), status.step, status.last_step, status.data_read)

    return ProgressView(show, DRAW_EVERY, line)


_log = logging.getLogger(__name__)

SHORT_FLAGS = {
    "task": "job.task",
    "num_ps": "cluster.num_ps",
    "num_workers": "cluster.num_workers",
    "metrics_port": "metrics.port",
    "metrics_host": "metrics.host",
    "threads": "threads.intra_op",
    "model_dir": "train.model_dir",
    "steps": "train.steps",
    "max_steps": "train.max_steps",
    "epochs": "train.epochs",
    "evaluate_every_steps": "train.evaluate.every_steps",
    "patience": "train.evaluate.patience",
    "seed": "train.seed",
    "save_steps": "train.save.steps",
    "save_secs": "train.save.secs",
    "max_to_keep": "train.keep.max_to_keep",
    "full_every": "train.keep.full_every",
    "restore_dir": "train.restore.dir",
    "restore_checkpoint": "train.restore.checkpoint",
    "optimizer_state": "train.restore.optimizer_state",
    "prefetch": "train.prefetch",
    "evict_every_steps": "train.evict_every_steps",
}
"""Option -> the field of the run that it sets."""
SWITCHES: Mapping[str, tuple[str, object]] = {
    "deterministic": ("train.deterministic", True),
    "no_strict": ("train.restore.strict", False),
    "reset_dense": ("train.restore.reset_dense", True),
    "continue_training": ("train.restore.continue_training", True),
    "no_async_push": ("train.async_push", False),
    "no_summaries": ("train.summary_every_steps", None),
}
"""Option -> the field it sets, and to what."""


def run_of(
    options: TrainOptions,
    environ: Mapping[str, str],
    decided: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] | None = None,
) -> RunConfig:
    """Read the run that a command line asks for; see `read_run`.

    Args:
        decided: Fields of RunConfig that win over every other source.
        warn: Told of old names that mean nothing any more; by default the log, unless a launcher has read
            the same and said it.

    Raises:
        ConfigError: Lists every problem found.
    """
    for one, other in (("save_steps", "save_secs"), ("summaries", "no_summaries")):
        if getattr(options, one) and getattr(options, other):
            flags = " and ".join("--" + name.replace("_", "-") for name in (one, other))
            raise ConfigError(f"train: {flags} contradict each other; give one of them")
    run = read_run(
        options.config,
        environ,
        flags=options.run_flags,
        code={**_said(options), **(decided or {})},
        warn=warn or (_log.debug if environ.get(MARK) else _log.warning),
    )
    if options.from_ is not None:
        if not run.train.model_dir:
            raise ConfigError("train: --from needs a folder for the new run: --model-dir, or train.model_dir")
        if absolute_path(run.train.model_dir) == absolute_path(run.train.restore.dir or ""):
            raise ConfigError(
                f"train: --from {options.from_} would start a run from itself: its model_dir is "
                f"{run.train.model_dir}, too. Give the new run a folder of its own with --model-dir, or "
                "leave --from out to resume"
            )
    if options.summaries and run.train.summary_every_steps is None:
        train = replace(run.train, summary_every_steps=TrainConfig().summary_every_steps)
        return replace(run, train=train)
    return run


def _said(options: TrainOptions) -> dict[str, Any]:
    """What the short flags say, by the dotted paths of the run's config."""
    said = {
        path: getattr(options, name)
        for name, path in SHORT_FLAGS.items()
        if getattr(options, name) is not None
    }
    said |= dict(change for name, change in SWITCHES.items() if getattr(options, name))
    if options.mode is not None:
        if options.mode in ("async", "sync"):
            said["cluster.mode"] = options.mode
        else:
            _log.warning("--mode %s is now --job.command %s", options.mode, options.mode)
            said["job.command"] = options.mode
    if options.restore_checkpoint is not None:
        said["train.restore.required"] = True  # a person named it
    if options.from_ is not None:
        if options.restore_dir is not None or options.restore_checkpoint is not None:
            raise ConfigError(
                "train: --from says what to start from; leave out --restore-dir and --restore-checkpoint"
            )
        folder, name = start_named(options.from_)
        said |= {"train.restore.dir": folder, "train.restore.fit": True, "train.restore.restart_data": True}
        if name is not None:
            said |= {"train.restore.checkpoint": name, "train.restore.required": True}
    if options.metric_window is not None:
        said["train.metric_window"] = _window(options.metric_window)
    if options.max_time is not None:
        try:
            said["train.max_time"] = parse_duration(options.max_time)
        except ConfigError as cause:
            raise ConfigError(f"--max-time: {cause}") from cause
    return said


def _window(text: str) -> int | timedelta:
    """Read a number of examples, or a duration with its unit."""
    if text.isdecimal():
        return int(text)
    try:
        return parse_duration(text)
    except ConfigError as cause:
        raise ConfigError(
            f"--metric-window: neither a number of examples nor a time such as 1h: {cause}"
        ) from cause


def write_report(report: Mapping[str, Any], options: TrainOptions, environ: Mapping[str, str]) -> None:
    """Hand a report to the launcher, if there is one; or print it, as JSON if so asked."""
    if environ.get(MARK):
        sys.stdout.write(f"{environ[MARK]} {json.dumps(report)}\n")
        sys.stdout.flush()
        return
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_report(report, options)
    if trouble := report.get("save_trouble"):
        sys.stdout.flush()
        sys.stderr.write(f"monolith: the run ended, and {trouble}\n")


def print_report(report: Mapping[str, Any], options: TrainOptions) -> None:
    """Print what a run did for a person."""
    from rich.console import Console
    from rich.markup import escape

    facts = {
        "ended": report["stop_reason"],
        "steps": f"{report['steps']:,} in {describe_seconds(report['seconds'])}, {report['step']:,} in all",
        "time": _describe_times(report),
        "examples": f"{report['examples']:,}, {describe_rate(report['examples_per_s'], 'examples')}",
        **({} if report["loss"] is None else {"loss": f"{report['loss']:.4f}, {_LAST_STEPS}"}),
        **{
            name.replace("/", " "): f"{report['metrics'][name]:.4f}"
            for name in headlines(report["metrics"])
            if report["metrics"][name] is not None
        },
    }
    if report.get("evaluation") is not None:
        metrics = report["evaluation"]["metrics"]
        facts |= {
            f"eval {name.replace('/', ' ')}": f"{metrics[name]:.4f}"
            for name in [*headlines(metrics), LOSS]
            if metrics.get(name) is not None
        }
    if best := report.get("best"):
        facts["best"] = f"{best['metric'].replace('/', ' ')} {best['value']:.4f} at step {best['step']:,}"
    for name, words in (("refused", "ids found no room"), ("overdue", "expired rows were kept")):
        if report.get(name):
            facts[name] = ", ".join(f"{table}: {count:,} {words}" for table, count in report[name].items())
    if bad := report.get("bad_records"):
        facts["bad records"] = "; ".join(f"{count:,} left out: {why}" for why, count in bad.items())
    if report["skipped_batches"]:
        facts["skipped"] = f"{report['skipped_batches']:,} batches with a loss or gradient of NaN or infinity"
    for kind in ("server", "worker"):
        if found := report.get(f"lost_{kind}s"):
            facts[f"lost {kind}s"] = "; ".join(_describe_lost(kind, one) for one in found)
    if (kernels := report.get("kernels")) and kernels["compiled"] + kernels["cached"]:
        facts["kernels"] = (
            f"{kernels['compiled']} GPU programs compiled and {kernels['cached']} read from the cache; "
            f"waited {kernels['seconds']:.1f}s for them"
        )
    if (replayed := report.get("replayed_batches")) is not None:
        facts["CUDA graphs"] = f"{replayed:.1%} of the batches were replayed"
    if report["restored_from"] is not None:
        facts["resumed from"] = report["restored_from"]
    if not report["model_dir"]:
        facts["kept"] = "nothing; give --model-dir to keep the model"
    elif report["checkpoint"] is not None:
        facts["checkpoint"] = report["checkpoint"]
        facts["evaluate with"] = evaluate_command(options, report["model_dir"])
    if (why := finished_before(report)) is not None:
        facts["finished"] = why
    console = Console(highlight=False)
    console.print(f"[bold]{escape(report['task'])}[/]")
    width = max(14, *(len(name) + 1 for name in facts))
    for name, value in facts.items():
        console.print(f"  [cyan]{escape(name):<{width}}[/]{escape(value)}", soft_wrap=True)


def finished_before(report: Mapping[str, Any]) -> str | None:
    """Return what to say of a run that had nothing more to do when it was started again; None of others."""
    if report["steps"] or report["restored_from"] is None or not report.get("finished"):
        return None
    if report["stop_reason"] == DATA_ENDED:
        why = "all of its data was trained on before, and there is none new"
        more = "give it more data, or --epochs with a larger number if it was trained with --epochs"
    else:
        why = f"it had come to its limit before ({report['stop_reason']})"
        more = "raise the limit"
    return (
        f"this run was finished, and nothing was trained: {why}. To train on, {more}; to train anew, give "
        "another --model-dir; to use what it learned, see `monolith evaluate`, `predict` and `export`"
    )


_LAST_STEPS = "the mean of the last steps"


def _describe_times(report: Mapping[str, Any]) -> str:
    """Return what the time of a run went to; what took none is left out."""
    apart = {"start": "start_seconds", "saving": "save_seconds", "evaluating": "evaluate_seconds"}
    spent = {name: float(report[key]) for name, key in apart.items()}
    spent = {"training": max(report["seconds"] - sum(spent.values()), 0.0), **spent}
    return ", ".join(
        f"{name} {f'{seconds:.1f}s' if seconds < 10 else describe_seconds(seconds)}"
        for name, seconds in spent.items()
        if seconds >= 0.05 or name == "training"
    )


def _describe_lost(kind: str, one: Mapping[str, Any]) -> str:
    seconds = f"{kind} {one[kind]} for {one['seconds']:.1f} s"
    if kind == "worker":
        return f"{seconds}, {one['records']:,} records trained again"
    rows = "unknown" if one["rows"] is None else f"{one['rows']:,}"
    if one.get("standby"):
        seconds += ", until its standby took over"
    more = describe_uncounted(one.get("uncounted", ()), one.get("uncounted_why", ""))
    return f"{seconds}, {rows} rows and {one['updates']:,} updates gone{more}"


def evaluate_command(options: TrainOptions, model_dir: str) -> str:
    """Return the command that evaluates the trained model."""
    words: Sequence[str] = ["monolith", "evaluate", *([] if options.task is None else [options.task])]
    words = [*words, "--model-dir", model_dir]
    if options.config is not None:
        words = [*words, "--config", str(options.config)]
    for text in options.set:
        words = [*words, "--set", text]
    return shlex.join(words)
