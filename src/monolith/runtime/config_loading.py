"""Reading a run's config from every source, and refusing one that cannot be trained.

Code wins over flags, flags over the environment, the environment over the file, the file over the
defaults. A value that code leaves at its default counts as not given, so it never hides a flag. In a file,
`task` as a table has the settings of the task; as a text it is the old name of job.task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from monolith.cluster.security import guard_listener
from monolith.config import ConfigNames, Dropped, Renamed, Unsupported, differences, load_config
from monolith.config.fields import leaf_paths
from monolith.config.tree import is_table_text
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig, as_cpu_test, settle
from monolith.runtime.discovery import assign_role, discovery_defaults
from monolith.train.config import TrainConfig

_log = logging.getLogger(__name__)

FOREIGN_VARIABLES = {
    "TF_CONFIG": "discovery.tf_config",
    "ZK_AUTH": "discovery.zookeeper_auth",
}
"""Variable of another system -> the field that it sets."""

NOT_CONFIG = (
    "MONOLITH_CONSUL",
    "MONOLITH_KAFKA",
    "MONOLITH_ZOOKEEPER",
    "MONOLITH_VECTORS",
    "MONOLITH_SERVICES",
    "MONOLITH_REPORT_MARK",
    "MONOLITH_RUN_TOKEN",
)
"""Variables that commands and tests read; they set no field."""

EXCLUSIVE = (
    ("train.save.secs", "train.save.steps"),
    ("train.dense_save.secs", "train.dense_save.steps"),
)
"""Pairs of fields that exclude each other: a flag that sets one unsets the other, which a file had set."""

ENTRY_POINTS = "monolith.config_names"
"""The group of entry points by which a package adds old names of fields; `monolith_compat` adds those of the
original system."""

_MOVED: Mapping[str, str] = {
    "training.synchronous": "cluster.mode, async or sync",
    "training.partially_synchronous": "cluster.mode, async or sync, with cluster.num_ps",
    "training.realtime": "publish.to",
    "failover.partial_recovery": "failover.recovery",
    "job.model_dir": "train.model_dir",
    "job.params": "task",
    "training.gpu": "train.accelerator",
    "training.intra_op_threads": "threads.intra_op",
    "training.inter_op_threads": "threads.inter_op",
    "embedding.initial_capacity": "train.tables.initial_rows",
    "embedding.prefetch": "train.prefetch",
    "embedding.postpush": "train.async_push",
    "embedding.filter.kind": "admission.kind",
    "embedding.filter.capacity": "admission.capacity",
    "embedding.filter.splits": "admission.split_num",
    "embedding.filter.equal_probability": "admission.equal",
    "checkpoint.every": "train.save.secs",
    "checkpoint.every_steps": "train.save.steps",
    "checkpoint.dense_every": "train.dense_save.secs",
    "checkpoint.dense_every_steps": "train.dense_save.steps",
    "checkpoint.keep": "train.keep.max_to_keep",
    "checkpoint.evict_expired": "train.keep.evict",
    "checkpoint.max_expired_share": "train.expiry.max_fraction",
    "checkpoint.max_clock_ahead": "train.expiry.max_ahead",
    "restore.folder": "train.restore.dir",
    "restore.keep_step": "train.restore.continue_training",
    "restore.renamed": "train.restore.alias_map, from new names to old ones",
    "restore.guess_renamed": "train.restore.auto_alias",
    "tide.save_every": "train.save.secs_outside_hours",
    "metrics.summary_every_steps": "train.summary_every_steps",
    "metrics.targets": "train.hooks.deep_insight.targets",
    "metrics.sample_ratio": "train.hooks.deep_insight.sample_ratio",
    "timeouts.slow_start": "train.hooks.slow_start_max_wait",
    "data.record": "data.format",
    "data.features": "data.columns",
    "data.dynamic_sharding": "data.queue",
    "data.dump_features_only": "job.dump_features",
    **{
        f"data.framing.{name}": f"data.{name}"
        for name in ("lagrangex", "sort_id", "kafka_dump", "kafka_dump_prefix")
    },
}
"""Former path of a field -> its path now. A former path is refused with an error that names the new one."""

RENAMED_FIELDS: Mapping[str, Renamed] = {
    "job.mode": Renamed("job.command"),
    "job.model_name": Renamed("train.model_name"),
    "job.end_date": Renamed("job.override_end_date"),
    "job.submitted_at": Renamed("train.submitted_at"),
    "data.max_bad": Renamed("data.max_unreadable"),
    "train.rows_on": Renamed("train.embedding_device"),
    "train.tide": Renamed("train.hours"),
    "train.save.tide": Renamed("train.save.hours"),
    "train.save.tide_secs": Renamed("train.save.secs_outside_hours"),
    "train.expiry.max_share": Renamed("train.expiry.max_fraction"),
    "train.restore.clear_nn": Renamed("train.restore.reset_dense"),
    "train.hooks.model_name": Renamed("train.model_name"),
    "train.hooks.submitted_at": Renamed("train.submitted_at"),
}
"""Former paths of fields or tables that are still read; a log line names the new path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OldNames:
    """Names that a package adds to those of the config, such as the flags of the original system."""

    names: Mapping[str, Renamed | Dropped | Unsupported]
    """Old name of a field, without dots -> the field it sets, or why there is none."""
    paths: Mapping[str, Renamed | Dropped | Unsupported]
    """Former path of a field or group -> the field it sets, or why there is none."""


@cache
def _installed_names() -> OldNames:
    """Return the names that installed packages add by an entry point, whose value is an `OldNames`."""
    added: list[OldNames] = [point.load() for point in metadata.entry_points(group=ENTRY_POINTS)]
    return OldNames(
        names={old: meaning for one in added for old, meaning in one.names.items()},
        paths={old: meaning for one in added for old, meaning in one.paths.items()},
    )


def old_names() -> Mapping[str, Renamed | Dropped | Unsupported]:
    """Return the old names of fields, which flags, variables and files may use as well."""
    return _installed_names().names


def moved_fields() -> dict[str, str | Renamed | Dropped | Unsupported]:
    """Return the former paths of fields: the path that each has now, or why there is no such field.

    The fields of `train` were once at the top of a file, without `train.` before them.
    """
    flat = {path: f"train.{path}" for path in leaf_paths(TrainConfig)}
    return {**flat, **_installed_names().paths, **_MOVED, **RENAMED_FIELDS}


def load_run_config(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    args: Sequence[str] | None = None,
    code: RunConfig | Mapping[str, Any] | None = None,
    code_source: str = "code",
    defaults: Mapping[str, object] | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> RunConfig:
    r"""Read a config from all sources given, by new names and old. Reads `file` and nothing else.

    Args:
        environ: Variables such as MONOLITH_CLUSTER__NUM_PS, MONOLITH_NUM_PS or TF_CONFIG.
        args: Flags such as --cluster.num-ps 2 or --num_ps=2.
        code: Values by dotted path; or a config, of which only what differs from the defaults counts.
        code_source: What gave `code`, for messages.
        defaults: By dotted path, in place of RunConfig's own.
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found.

    Examples:
        >>> from pathlib import Path
        >>> from monolith import load_run_config
        >>> _ = Path("run.toml").write_text('[train]\nmodel_dir = "run"\nsave = {steps = 1000}\n')
        >>> config = load_run_config(file=Path("run.toml"), args=["--train.save.steps", "500"])
        >>> config.train.model_dir, config.train.save.steps  # a flag beats the file
        ('run', 500)
    """
    if args is not None and {"-h", "--help"} & set(args):
        raise ConfigError(
            "a config has no --help, since building one prints nothing and exits nowhere; "
            "`monolith config explain` lists its fields"
        )
    environ, args = _with_the_job_named(environ, args)
    return load_config(
        RunConfig,
        file=file,
        environ=environ,
        args=args,
        code=differences(code, RunConfig()) if isinstance(code, RunConfig) else code,
        defaults=defaults,
        names=ConfigNames(
            ignore=NOT_CONFIG,
            foreign=FOREIGN_VARIABLES,
            aliases=old_names(),
            moved=moved_fields(),
            exclusive=EXCLUSIVE,
            code_source=code_source,
        ),
        warn=warn,
    )


def _with_the_job_named(
    environ: Mapping[str, str] | None, args: Sequence[str] | None
) -> tuple[Mapping[str, str] | None, Sequence[str] | None]:
    """Return variables and flags with the old name `task` read as job.task, unless it sets a table."""
    if environ and "MONOLITH_TASK" in environ and not is_table_text(environ["MONOLITH_TASK"]):
        rest = {name: text for name, text in environ.items() if name != "MONOLITH_TASK"}
        environ = {"MONOLITH_JOB__TASK": environ["MONOLITH_TASK"], **rest}
    if args:
        words = list(args)
        for i, word in enumerate(words):
            flag, equals, text = word.partition("=")
            value = text if equals else "".join(words[i + 1 : i + 2])
            if flag == "--task" and not is_table_text(value):
                words[i] = f"--job.{word[2:]}"
        args = words
    return environ, args


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
        _log.info(
            "%s is ignored: summaries are in summaries/ of the model_dir, or where "
            "train.tracking.tensorboard_dir says",
            _PLATFORM,
        )
    run = load_run_config(
        file=file,
        environ=environ,
        args=list(flags),
        code=code,
        code_source="the command line",
        defaults=discovery_defaults(environ),
        warn=warn,
    )
    return settle(assign_role(as_cpu_test(run), environ))


def refused(run: RunConfig) -> Iterator[str]:
    """Yield one sentence for each setting that `monolith train` cannot obey."""
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
    if run.distributed and run.cluster.num_ps and run.train.asks_for_device_rows:
        yield (
            "train.embedding_device: 'device' is for runs of one process or of ranks: with parameter servers "
            "rows are in their host memory. Set train.embedding_device to host and leave "
            "train.device_memory_bytes out, or set job.local, or "
            "cluster.mode to sync without parameter servers"
        )
    if run.profile.from_step is not None and not run.train.model_dir:
        yield "profile.from_step: a profile is a file in the model_dir; set --model-dir"
    tracking = run.train.tracking
    if not run.train.model_dir and (tracking.tensorboard_dir or {*tracking.sinks} - {"tensorboard"}):
        yield "train.tracking: only a run with a model_dir is tracked; set --model-dir"
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
            "and an exact run rolls back to its last checkpoint instead; set failover.recovery to "
            "keep_going, or standbys to 0"
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
