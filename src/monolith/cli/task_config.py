"""What `monolith train | evaluate | predict` run: a task and its config, of a file and of flags."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from monolith.cli.train_options import EvaluateOptions, PredictOptions, TrainOptions
from monolith.config import load_config, parse_duration
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
    """What a config file of a run in one process may hold."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task, by name."""


def load_training(options: TrainOptions) -> tuple[Task, TrainConfig]:
    """Return what to train, and how."""
    for one, other in (("save_steps", "save_secs"), ("summaries", "no_summaries")):
        if getattr(options, one) and getattr(options, other):
            flags = " and ".join("--" + name.replace("_", "-") for name in (one, other))
            raise ConfigError(f"train: {flags} contradict each other; give one of them")
    code = {
        path: getattr(options, name) for name, path in _PATHS.items() if getattr(options, name) is not None
    }
    code |= dict(change for name, change in _SWITCHES.items() if getattr(options, name))
    if options.save_steps is not None or options.save_secs is not None:
        code |= {"save.steps": options.save_steps, "save.secs": options.save_secs}
    if options.max_time is not None:
        code["max_time"] = _duration("--max-time", options.max_time)
    task, config = _load(options, code)
    if options.summaries and config.summary_every_steps is None:
        config = dataclasses.replace(config, summary_every_steps=TrainConfig().summary_every_steps)
    return task, config


def load_reading(options: EvaluateOptions | PredictOptions) -> tuple[Task, TrainConfig]:
    """Return what to read, and of where. The checkpoint that a training starts from is not what it led to."""
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {options.steps}")
    code: dict[str, Any] = {"restore.checkpoint": options.checkpoint}
    if options.model_dir is not None:
        code["model_dir"] = options.model_dir
    task, config = _load(options, code)
    if not config.model_dir:
        raise ConfigError("say with --model-dir where the training left its checkpoints")
    return task, config


def say(line: str) -> None:
    """Tell a person something that is no result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _load(options: Options, code: Mapping[str, Any]) -> tuple[Task, TrainConfig]:
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"--threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    file = load_config(TrainFile, file=options.config, code=code, defaults=_defaults(options.config))
    names = [one.name for one in dataclasses.fields(TrainConfig)]
    config = TrainConfig(**{name: getattr(file, name) for name in names})
    task = load_task(options.task, file.task, texts=options.set, source=f"[task] of {options.config}")
    return task, config


def _defaults(file: Path | None) -> dict[str, Any]:
    """Saving by the clock takes the place of saving by the step, also where a file says nothing of that."""
    if file is None or file.suffix != ".toml":
        return {}
    try:
        save = tomllib.loads(file.read_text(encoding="utf-8")).get("save")
    except (OSError, ValueError):
        return {}  # whoever reads all of it says what is wrong
    return {"save.steps": None} if isinstance(save, dict) and "secs" in save else {}


def _duration(flag: str, text: str) -> Any:
    try:
        return parse_duration(text)
    except ConfigError as cause:
        raise ConfigError(f"{flag}: {cause}") from cause
