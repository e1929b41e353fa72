"""The run that `monolith train` was asked for: its short flags are names for fields of the run's config.

Nothing here needs torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from monolith.checkpoint import start_named
from monolith.checkpoint.folder.state_files import absolute_path
from monolith.cli.options.train import TrainOptions
from monolith.config import parse_duration
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import read_run
from monolith.train.config import TrainConfig

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
    options: TrainOptions, environ: Mapping[str, str], decided: Mapping[str, Any] | None = None
) -> RunConfig:
    """Read the run that a command line asks for; see `read_run`.

    Args:
        decided: Fields of RunConfig that nobody else has a say in.

    Raises:
        ConfigError: Lists every problem found.
    """
    for one, other in (("save_steps", "save_secs"), ("summaries", "no_summaries")):
        if getattr(options, one) and getattr(options, other):
            flags = " and ".join("--" + name.replace("_", "-") for name in (one, other))
            raise ConfigError(f"train: {flags} contradict each other; give one of them")
    run = read_run(
        options.config, environ, flags=options.run_flags, code={**_said(options), **(decided or {})}
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
