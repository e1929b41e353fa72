"""What `monolith train | evaluate | predict` run: a task, and the run that it is part of."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from monolith import filesystem
from monolith.cli.options.jobs import EmbeddingsOptions
from monolith.cli.options.train import EvaluateOptions, PredictOptions, TrainOptions
from monolith.cli.reading_flags import check_reading_flags, flags_of_model, with_values
from monolith.cli.run_settings import run_of
from monolith.errors import ConfigError, MonolithError
from monolith.observe.logs import only_warnings, process_label
from monolith.run import RunConfig, ThreadsConfig, check_run, read_run
from monolith.run.data_checks import check_before_training
from monolith.run.learned_features import with_learned_features
from monolith.run.task_settings import with_job, with_task
from monolith.train import Task, TrainConfig, load_task
from monolith.train.accelerator import accelerator_of
from monolith.train.manifest import read_run_manifest

Options = TrainOptions | EvaluateOptions | PredictOptions | EmbeddingsOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A task, and the run that trains it."""

    task: Task
    run: RunConfig

    @property
    def config(self) -> TrainConfig:
        """How the task is trained."""
        return self.run.train


def load_training(options: TrainOptions, environ: Mapping[str, str] | None = None) -> Training:
    """Return what to train, and how.

    Args:
        environ: By default that of this process.

    Raises:
        ConfigError: Lists every problem found.
    """
    run = run_of(options, os.environ if environ is None else environ)
    check_run(run)
    if run.cluster.role == "worker":
        accelerator_of(run.train.accelerator)  # or an error, before anything is made
    _set_threads(run.threads)
    task = with_job(make_task(run, options.config, options.set), run.job, warn)
    check_before_training(task, run)
    task = with_learned_features(task, run, trains=True, say=say)
    return Training(task=task, run=with_task(run, task))


def load_reading(
    options: EvaluateOptions | PredictOptions | EmbeddingsOptions,
) -> tuple[Task, TrainConfig]:
    """Return what to read, and from where: not from the checkpoint that the training started from."""
    task, run = load_reading_run(options)
    return task, run.train


def load_reading_run(
    options: EvaluateOptions | PredictOptions | EmbeddingsOptions, *, learns: bool = False
) -> tuple[Task, RunConfig]:
    """Return the task to read, and the run that trained it.

    Args:
        learns: Whether means and quantiles of features may be learned here, for a run without a checkpoint.
    """
    if not isinstance(options, EmbeddingsOptions) and options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {options.steps}")
    code: dict[str, Any] = {
        "job.local": True,  # one process reads, however many trained
        "train.restore.checkpoint": options.checkpoint,
        **({} if options.task is None else {"job.task": options.task}),
        **({} if options.model_dir is None else {"train.model_dir": options.model_dir}),
        **({} if options.threads is None else {"threads.intra_op": options.threads}),
    }
    flags = getattr(options, "run_flags", ())
    trained = _trained_by(options, code)
    before = [] if trained is None else flags_of_model(trained.run_flags)
    flags = tuple(word for one in with_values(flags) if one not in before for word in one)
    check_reading_flags(flags)
    if before:
        say(f"with the flags of the training: {' '.join(word for one in before for word in one)}")
    flags = (*(word for one in before for word in one), *flags)
    # What a data service hands out is for who trains.
    run = replace(read_run(options.config, os.environ, flags=flags, code=code), data_service=None)
    _set_threads(run.threads)
    settings = options.set if trained is None else (*trained.set, *options.set)
    task = make_task(run, options.config, settings)
    if not run.train.model_dir:
        raise ConfigError("needs --model-dir: the folder with the checkpoints of the training")
    return with_learned_features(task, run, trains=learns, say=say), run


def _trained_by(options: Options, code: Mapping[str, Any]) -> TrainOptions | None:
    """Return the options of the command that trained a run, if that was the same task; None if nothing says.

    A config file or a task other than that of the training is taken as it is.
    """
    model_dir = code.get("train.model_dir")
    if not model_dir and options.config is not None:
        model_dir = read_run(options.config, {}).train.model_dir
    if not model_dir or not filesystem.is_folder(model_dir):
        return None
    starts = read_run_manifest(model_dir)
    trained = train_options(starts[0].get("command", ())) if starts else None
    if trained is None or _absolute(trained.config) != _absolute(options.config):
        return None
    return trained if options.task in (None, trained.task) else None


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def train_options(command: Sequence[str]) -> TrainOptions | None:
    """Return the options of a recorded command line; None if it is no `monolith train`."""
    from monolith.cli.main import parse_options, shared_parser, split_command

    try:
        name, flags = split_command(shared_parser().parse_known_args(list(command)[1:])[1])
        found = parse_options(name, flags, list(command)[1:]) if name == "train" else None
    except (MonolithError, SystemExit, IndexError):
        return None
    return found if isinstance(found, TrainOptions) else None


def say(line: str) -> None:
    """Tell a person something that is no result, unless only warnings are shown. That nobody listens any more
    is no reason to fail."""
    if not only_warnings():
        warn(line)


def warn(line: str) -> None:
    """Tell a person something that is wrong, or may be."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{process_label()}{line}\n")
        sys.stderr.flush()


def make_task(run: RunConfig, config: Path | None, texts: Sequence[str] = ()) -> Task:
    """Return the task that a run names, or that its config says.

    Args:
        config: The file of the run, for messages.
        texts: Settings of the task as key=value.

    Raises:
        ConfigError: There is no such task, or a setting is wrong.
    """
    if not run.job.task:
        raise ConfigError(
            "name the task: package.module:Name or path/to/file.py:Name, or job.task in the config; or say "
            "what it is in the config: [model], [features] and [data]"
        )
    source = f"[task] of {config}" if config else "task"
    return load_task(
        run.job.task,
        _nested(run.task),
        texts=texts,
        source=source,
        inputs=run.inputs,
        optional=("data_service",),  # a task that reads files by its DataConfig need not know of it
    )


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the task, with a table for each dotted name."""
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *above, last = path.split(".")
        table = nested
        for key in above:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, Mapping) else {}
            table = table[key]
        table[last] = value
    return nested


def _set_threads(threads: ThreadsConfig) -> None:
    if threads.intra_op is not None:
        torch.set_num_threads(threads.intra_op)
    if threads.inter_op is not None and torch.get_num_interop_threads() != threads.inter_op:
        torch.set_num_interop_threads(threads.inter_op)
