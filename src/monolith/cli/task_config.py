"""The task and the run that `monolith evaluate`, `predict` and others read, and lines for a person."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monolith import filesystem
from monolith.cli.options.jobs import EmbeddingsOptions
from monolith.cli.options.train import EvaluateOptions, PredictOptions, TrainOptions
from monolith.cli.reading_flags import check_reading_flags, flags_of_model, with_values
from monolith.cli.terminal import say
from monolith.errors import ConfigError, MonolithError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import read_run
from monolith.runtime.report import read_run_manifest
from monolith.runtime.task_setup import make_task, set_threads, with_learned_features
from monolith.train import Task, TrainConfig

Options = TrainOptions | EvaluateOptions | PredictOptions | EmbeddingsOptions


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
    set_threads(run.threads)
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
