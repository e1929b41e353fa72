"""The run that a command was asked for, with nothing left open, and what a training refuses of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from monolith.cluster.security import guard_listener
from monolith.errors import ConfigError
from monolith.run.config import RunConfig
from monolith.run.loading import load_run_config
from monolith.run.runtime import discovery_defaults, place
from monolith.run.settling import as_cpu_test, settle

_log = logging.getLogger(__name__)

_PLATFORM = "TENSORBOARD_LOG_PATH"


def read_run(
    file: Path | None,
    environ: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    code: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> RunConfig:
    """Read a run from a file, the environment and flags.

    Args:
        flags: Of RunConfig, by new names and old.
        code: Fields of RunConfig, by dotted path, that a command's own flags set and that win over all.
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found.
    """
    if environ.get(_PLATFORM):
        _log.info("%s is ignored: summaries are in summaries/ of the model_dir", _PLATFORM)
    run = load_run_config(
        file=file,
        environ=environ,
        args=list(flags),
        code=code,
        code_source="the command line",
        defaults=discovery_defaults(environ),
        warn=warn,
    )
    return settle(place(as_cpu_test(run), environ))


def refused(run: RunConfig) -> Iterator[str]:
    """Yield what a run asks for and `monolith train` cannot do."""
    if run.job.command == "train_and_eval":
        yield (
            "job.command: 'train_and_eval' is not supported: `monolith train` evaluates while it trains if "
            "train.evaluate.every_steps or train.evaluate.every is set, and `monolith evaluate --follow` "
            "evaluates its checkpoints in another process. Set job.command to train, and one of these"
        )
    elif run.job.command != "train":
        yield (
            f"job.command: {run.job.command!r} is not training; use `monolith evaluate` or `monolith predict`"
        )
    if run.distributed and run.train.accelerator == "xla":
        yield (
            "train.accelerator: 'xla' is not supported with parameter servers or several workers: what they "
            "exchange each step would have to be fetched from the device. Set job.local, or cuda"
        )
    if run.distributed and run.cluster.num_ps and run.train.embedding_device == "device":
        yield (
            "train.embedding_device: 'device' is for runs of one process or of ranks: with parameter servers "
            "rows are in their host memory. Set train.embedding_device to host, or job.local, or "
            "cluster.mode to sync without parameter servers"
        )
    if run.profile.from_step is not None and not run.train.model_dir:
        yield "profile.from_step: a profile is a file in the model_dir; set --model-dir"
    if run.job.dump_features and not run.train.model_dir:
        yield "job.dump_features: features are written to the model_dir; set --model-dir"
    if not run.train.model_dir and (run.has_data_service or run.cluster.reads_for_others):
        yield (
            "data_service.enabled: processes of a run with a data service of its own share its model_dir; "
            "set --model-dir, or data_service.dispatcher for a service that others started"
        )
    if run.metrics.port is not None:
        try:
            guard_listener(run.metrics.host, run.security)
        except ConfigError as error:
            yield f"metrics.host: {error}"
    if run.distributed and run.cluster.num_ps == 0 and run.cluster.mode == "async":
        yield (
            f"cluster.num_workers and cluster.num_ps: {run.cluster.num_workers} workers need parameter "
            "servers to train one model; set cluster.num_ps (--num-ps), num_workers to 1, or cluster.mode "
            "(--mode) to sync"
        )
    if (run.cluster.num_spares or run.cluster.standbys) and run.cluster.num_ps == 0:
        yield (
            "cluster.num_redundant_ps, cluster.num_extra_ps and cluster.standbys: there are spare parameter "
            "servers for a run without any; set cluster.num_ps (--num-ps)"
        )
    if run.cluster.standbys and run.failover.recovery != "keep_going":
        yield (
            "cluster.standbys and failover.recovery: a standby may lack the last updates of a lost server, "
            "and an exact run goes back to its last checkpoint instead; set failover.recovery to keep_going, "
            "or standbys to 0"
        )
    if run.train.save.secs_outside_hours is not None and run.train.save.hours is None:
        yield "train.save.secs_outside_hours: it applies outside of a daily window; set train.hours, too"
    if run.distributed and run.job.dump_features:
        yield "job.dump_features: features are written by one process; set job.local"


def check_run(run: RunConfig) -> None:
    """Refuse a run that cannot be trained.

    Raises:
        ConfigError: Lists every problem found.
    """
    found = [*refused(run)]
    if found:
        raise ConfigError(listed_problems("cannot train as the config says", found))


def listed_problems(what: str, problems: Sequence[str]) -> str:
    """Return a message with one line for each problem."""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{what}: {count}" + "".join(f"\n  - {problem}" for problem in problems)
