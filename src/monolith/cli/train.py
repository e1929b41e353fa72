"""`monolith train TASK`: one process trains a task, from its data to checkpoints.

SIGINT and SIGTERM end a run after its current step. It saves, says what it did, and exits with
130 or 143, so that whoever started it can tell that there was more to do. A second one aborts.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from monolith import filesystem
from monolith.cli.stop_signals import StopSignals
from monolith.cli.task_config import load_training, say
from monolith.cli.train_options import TrainOptions
from monolith.errors import ConfigError
from monolith.observe import Metrics
from monolith.observe.logs import logs_json
from monolith.observe.progress import describe_rate, describe_seconds
from monolith.train import Hook, LocalRun, Run, Task, TrainConfig, Trainer, TrainReport
from monolith.train.hooks import (
    ActionFileHook,
    BarrierHook,
    ControllerHook,
    ControlServerHook,
    LiveLineHook,
    LocalBarrier,
    ProfilerHook,
    Standing,
)
from monolith.train.hooks.control import ACTION_FILE
from monolith.train.hooks.live_line import describe_standing, gauge_standing, log_standing
from monolith.train.hooks.profiling import FIRST_STEP, WINDOW_STEPS

DRAW_EVERY = timedelta(seconds=0.2)
GAUGE_EVERY = timedelta(seconds=1)

Show = Callable[[Standing], None]


def run(options: TrainOptions) -> int:
    """Train, and say what came of it."""
    task, config = load_training(options)
    for flag in ("profile", "control"):
        if getattr(options, flag) and not config.model_dir:
            raise ConfigError(f"train: --{flag} leaves files in the model_dir; give one with --model-dir")
    metrics = Metrics()
    lines: list[tuple[Show, timedelta]] = []
    with ExitStack() as open_things:
        if options.metrics_port is not None:
            server = open_things.enter_context(metrics.serve(options.metrics_port))
            say(f"metrics on http://{server.address}:{server.port}/metrics")
            lines.append((gauge_standing(metrics), GAUGE_EVERY))
        if not options.quiet:
            lines.append(live_line(task, config, sys.stderr, open_things))

        def hooks(run: LocalRun) -> list[Hook]:
            return [
                *(control_hooks(run) if options.control else []),
                *([ProfilerHook(profiled_steps(config))] if options.profile else []),
                *(line_hook(run, config, show, every) for show, every in lines),
            ]

        trainer = Trainer(task, config, hooks=hooks, metrics=metrics)
        signals = open_things.enter_context(StopSignals(trainer.stop, say))
        report = trainer.train()
    if options.json:
        sys.stdout.write(json.dumps(to_json(report, task, config)) + "\n")
    else:
        print_report(report, options, task, config)
    return signals.status(report.stop_reason)


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
        describe_standing(standing), standing.step, standing.last_step
    ), DRAW_EVERY


def line_hook(run: LocalRun, config: TrainConfig, show: Show, every: timedelta) -> Hook:
    return LiveLineHook(
        show,
        every=every,
        stats=run.session.model.stats,
        metrics=run.session.metrics.values,
        steps=config.steps,
        max_steps=config.max_steps,
    )


def control_hooks(run: LocalRun) -> list[Hook]:
    """Return what lets an operator halt, resume, save and stop the run."""
    assert run.save is not None  # there is a model_dir
    barrier = LocalBarrier(1)
    controller = ControllerHook(run.save.trigger_save)
    server = ControlServerHook(barrier, run.save.trigger_save)
    return [
        BarrierHook(barrier, 0, idle=[run.save.before_step]),
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


def profiled_steps(config: TrainConfig) -> tuple[int, int]:
    """Return the steps to profile: late enough for caches to be warm, and inside of a run that is short."""
    given = [limit for limit in (config.steps, config.max_steps) if limit is not None]
    begin = min([FIRST_STEP, *(max(limit - WINDOW_STEPS, 0) // 2 for limit in given)])
    return begin, begin + WINDOW_STEPS


# When it has ended


def last_values(report: TrainReport) -> dict[str, float]:
    """Return each metric over the last window that ended."""
    return {name: rows[-1].value for name, rows in report.windows.items() if rows}


def to_json(report: TrainReport, task: Task, config: TrainConfig) -> dict[str, Any]:
    return {
        "task": task.name,
        "model_dir": config.model_dir or None,
        "step": report.step,
        "steps": report.steps,
        "examples": report.examples,
        "seconds": round(report.seconds, 3),
        "examples_per_s": round(speed_of(report), 1),
        "stop_reason": report.stop_reason,
        "restored_from": report.restored_from,
        "checkpoint": report.checkpoint,
        "metrics": {n: None if math.isnan(v) else v for n, v in last_values(report).items()},
    }


def print_report(report: TrainReport, options: TrainOptions, task: Task, config: TrainConfig) -> None:
    facts = {
        "ended": report.stop_reason,
        "steps": f"{report.steps:,} in {describe_seconds(report.seconds)}, {report.step:,} in all",
        "examples": f"{report.examples:,}, {describe_rate(speed_of(report), 'examples')}",
        **{
            name.replace("/", " "): f"{value:.4f}" for name, value in last_values(report).items() if auc(name)
        },
    }
    if report.restored_from is not None:
        facts["went on from"] = report.restored_from
    if not config.model_dir:
        facts["kept"] = "nothing; give --model-dir to keep what was learned"
    elif report.checkpoint is not None:
        facts["checkpoint"] = report.checkpoint
        facts["evaluate with"] = evaluate_command(options, config)
    console = Console(highlight=False)
    console.print(f"[bold]{escape(task.name)}[/]")
    for name, value in facts.items():
        console.print(f"  [cyan]{escape(name):<14}[/]{escape(value)}", soft_wrap=True)


def evaluate_command(options: TrainOptions, config: TrainConfig) -> str:
    words: Sequence[str] = ["monolith", "evaluate", options.task, "--model-dir", config.model_dir]
    if options.config is not None:
        words = [*words, "--config", str(options.config)]
    for text in options.set:
        words = [*words, "--set", text]
    return shlex.join(words)


def auc(name: str) -> bool:
    return name.endswith("auc")


def speed_of(report: TrainReport) -> float:
    return report.examples / report.seconds if report.seconds > 0 else 0.0
