"""What `monolith train | evaluate | predict` run: a task and its config, of a file, variables and flags."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from monolith.cli.options.train import EvaluateOptions, PredictOptions, TrainOptions
from monolith.cli.run_settings import (
    RunSettings,
    misplaced,
    read_settings,
    refused,
    settings_of,
    train_values,
)
from monolith.cluster.run_config import RunConfig, read_tables
from monolith.config import parse_duration
from monolith.config.reading import Reader
from monolith.config.tree import Node, grow, overlay, plant
from monolith.errors import ConfigError
from monolith.train import Task, TrainConfig, load_task

Options = TrainOptions | EvaluateOptions | PredictOptions

_PATHS = {
    "model_dir": "model_dir",
    "steps": "steps",
    "max_steps": "max_steps",
    "seed": "seed",
    "save_steps": "save.steps",
    "save_secs": "save.secs",
    "max_to_keep": "keep.max_to_keep",
    "full_every": "keep.full_every",
    "restore_dir": "restore.dir",
    "restore_checkpoint": "restore.checkpoint",
    "optimizer_state": "restore.optimizer_state",
    "prefetch": "prefetch",
    "evict_every_steps": "evict_every_steps",
}
"""Option to the field of the config that it sets."""
_SWITCHES = {
    "deterministic": ("deterministic", True),
    "no_strict": ("restore.strict", False),
    "clear_nn": ("restore.clear_nn", True),
    "continue_training": ("restore.continue_training", True),
    "no_async_push": ("async_push", False),
    "no_summaries": ("summary_every_steps", None),
}
"""Option to the field it sets, and to what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainFile(TrainConfig):
    """What a config file with TrainConfig's fields may hold."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A task, how it is trained, and the run that this is part of."""

    task: Task
    config: TrainConfig
    settings: RunSettings


def load_training(options: TrainOptions, environ: Mapping[str, str] | None = None) -> Training:
    """Return what to train, and how.

    Args:
        environ: By default that of this process.

    Raises:
        ConfigError: Lists every problem found.
    """
    config, task, settings = _resolved(options, os.environ if environ is None else environ)
    _set_threads(options, settings)
    return Training(task=_task(options, settings, task), config=config, settings=settings)


def check_file(file: Path, warn: Callable[[str], None]) -> None:
    """Refuse a config file that `monolith train --config FILE` would refuse, without its task or a start.

    One whose job.mode is not to train is for `evaluate` and `predict`, and is read as these do.

    Args:
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found.
    """
    training = TrainOptions(config=file)
    try:
        settings = read_settings(file, {}, warn=warn)
    except ConfigError as error:
        raise _with_training(error, training, {}) from error
    if settings.run.job.mode == "train":
        _typed(settings, {}, [*refused(settings)])
    else:
        _typed(settings, {}, [])


def _resolved(
    options: TrainOptions, environ: Mapping[str, str]
) -> tuple[TrainConfig, Mapping[str, Any], RunSettings]:
    """Return the config of a training, the settings of its task, and those of its run."""
    for one, other in (("save_steps", "save_secs"), ("summaries", "no_summaries")):
        if getattr(options, one) and getattr(options, other):
            flags = " and ".join("--" + name.replace("_", "-") for name in (one, other))
            raise ConfigError(f"train: {flags} contradict each other; give one of them")
    code = {
        path: getattr(options, name) for name, path in _PATHS.items() if getattr(options, name) is not None
    }
    if options.restore_checkpoint is not None:
        code["restore.required"] = True  # a person named it
    code |= dict(change for name, change in _SWITCHES.items() if getattr(options, name))
    if options.save_steps is not None or options.save_secs is not None:
        code |= {"save.steps": options.save_steps, "save.secs": options.save_secs}
    if options.max_time is not None:
        code["max_time"] = _duration("--max-time", options.max_time)
    try:
        settings = settings_of(options, environ)
    except ConfigError as error:
        raise _with_training(error, options, code) from error
    config, task = _typed(settings, code, [*refused(settings)])
    if options.summaries and config.summary_every_steps is None:
        config = dataclasses.replace(config, summary_every_steps=TrainConfig().summary_every_steps)
    return config, task, settings


def load_reading(options: EvaluateOptions | PredictOptions) -> tuple[Task, TrainConfig]:
    """Return what to read, and of where. The checkpoint that a training starts from is not what it led to."""
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {options.steps}")
    code: dict[str, Any] = {"restore.checkpoint": options.checkpoint}
    if options.model_dir is not None:
        code["model_dir"] = options.model_dir
    # One process reads, wherever the run had others.
    run = {"job.task": options.task, "job.model_dir": options.model_dir, "job.local": True}
    settings = read_settings(options.config, os.environ, code=run)
    config, given = _typed(settings, code, [])
    _set_threads(options, settings)
    task = _task(options, settings, given)
    if not config.model_dir:
        raise ConfigError("say with --model-dir where the training left its checkpoints")
    return task, config


def say(line: str) -> None:
    """Tell a person something that is no result. That nobody listens any more is no reason to fail."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _with_training(error: ConfigError, options: TrainOptions, code: Mapping[str, Any]) -> ConfigError:
    """Return an error of the run with what is wrong with [train] added to it."""
    train = (read_tables(options.config) or {}).get("train")
    if not isinstance(train, dict):
        return error
    bare = RunSettings(run=RunConfig(train=train), said=frozenset(), file=options.config, tables={})
    try:
        _typed(bare, code, ())
    except ConfigError as more:
        _, *problems = str(more).split("\n")
        return ConfigError("\n".join([f"{error}", *problems]))
    return error


def _typed(
    settings: RunSettings, code: Mapping[str, Any], problems: Sequence[str]
) -> tuple[TrainConfig, Mapping[str, Any]]:
    """Return the config of the training, and the settings of the task, of all layers.

    Raises:
        ConfigError: Lists every problem, those given first.
    """
    found = [*problems, *misplaced(settings.run.train)]
    values: Mapping[str, Any] = {}
    try:
        values = train_values(settings)
    except ConfigError as error:
        found.append(str(error))
    layers: list[Node] = [
        grow(_beginnings(settings.tables), "defaults"),
        grow(settings.tables, str(settings.file)),
        *_planted(values, "the run's config"),
        grow(_plain(settings.run.train), f"[train] of {settings.file}" if settings.file else "train"),
        *_planted(code, "flags"),
    ]
    reader = Reader()
    file = reader.read(TrainFile, functools.reduce(overlay, layers), "")
    found += [problem.text for problem in reader.problems]
    if found:
        count = "one problem" if len(found) == 1 else f"{len(found)} problems"
        listed = "".join(f"\n  - {problem}" for problem in found)
        raise ConfigError(f"cannot train as the config says: {count}{listed}") from reader.cause
    names = [one.name for one in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{name: getattr(file, name) for name in names}), file.task


def _task(options: Options, settings: RunSettings, given: Mapping[str, Any]) -> Task:
    name = options.task or settings.run.job.task
    if not name:
        raise ConfigError(
            "say which task: package.module:Name or path/to/file.py:Name, or job.task in the config"
        )
    source = f"[task] of {settings.file}" if settings.file else "job.params"
    changes: dict[str, Any] = dict(given)
    for path, value in settings.run.job.params.items():
        *above, last = path.split(".")
        table = changes
        for key in above:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, Mapping) else {}
            table = table[key]
        table[last] = value
    return load_task(name, changes, texts=options.set, source=source)


def _set_threads(options: Options, settings: RunSettings) -> None:
    training, said = settings.run.training, settings.said
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {options.threads}")
    if options.threads is not None or "training.intra_op_threads" in said:
        torch.set_num_threads(options.threads or training.intra_op_threads)
    if "training.inter_op_threads" in said and torch.get_num_interop_threads() != training.inter_op_threads:
        torch.set_num_interop_threads(training.inter_op_threads)


def _planted(values: Mapping[str, Any], source: str) -> list[Node]:
    return [plant(tuple(path.split(".")), grow(value, source)) for path, value in values.items()]


def _beginnings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Saving by the clock takes the place of saving by the step, also where a file says nothing of that."""
    save = tables.get("save")
    return {"save": {"steps": None}} if isinstance(save, dict) and "secs" in save else {}


def _plain(train: Mapping[str, Any]) -> dict[str, Any]:
    """What [train] says, with numbers and truths for the text that variables and flags have for them."""
    found: dict[str, Any] = {}
    for key, value in train.items():
        if isinstance(value, Mapping):
            found[key] = _plain(value)
            continue
        try:
            found[key] = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found[key] = value
    return found


def _duration(flag: str, text: str) -> Any:
    try:
        return parse_duration(text)
    except ConfigError as cause:
        raise ConfigError(f"{flag}: {cause}") from cause
