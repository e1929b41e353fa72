"""Reading a run's config from every source, and refusing one that cannot be trained.

Code wins over flags, flags over the environment, the environment over the file, the file over the
defaults. A value that code leaves at its default counts as not given, so it never hides a flag. In a file,
`task` as a table has the settings of the task; as a text it is the old name of job.task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from monolith.cluster.security import guard_listener
from monolith.config import differences, load_config
from monolith.config.tree import is_table_text
from monolith.errors import ConfigError
from monolith.run.config import RunConfig
from monolith.run.old_names import OLD_NAMES, moved_fields
from monolith.run.runtime import discovery_defaults, place
from monolith.run.settling import as_cpu_test, settle

_log = logging.getLogger(__name__)

FOREIGN_VARIABLES = {
    "TF_CONFIG": "discovery.tf_config",
    "ZK_AUTH": "discovery.zookeeper_auth",
}
"""Variables that others set and that mean a field of ours."""

NOT_CONFIG = (
    "MONOLITH_CONSUL",
    "MONOLITH_KAFKA",
    "MONOLITH_ZOOKEEPER",
    "MONOLITH_VECTORS",
    "MONOLITH_SERVICES",
    "MONOLITH_REPORT_MARK",
    "MONOLITH_RUN_TOKEN",
)
"""Variables of ours that commands and tests read."""

EXCLUSIVE = (
    ("train.save.secs", "train.save.steps"),
    ("train.dense_save.secs", "train.dense_save.steps"),
)
"""Pairs of which a source that sets one unsets the other, such as a flag the interval of a file."""


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
    """Read a config from all sources given, by new names and old. Reads `file` and nothing else.

    Args:
        environ: Variables such as MONOLITH_CLUSTER__NUM_PS, MONOLITH_NUM_PS or TF_CONFIG.
        args: Flags such as --cluster.num-ps 2 or --num_ps=2.
        code: Values by dotted path; or a config, of which only what differs from the defaults counts.
        code_source: What gave `code`, for messages.
        defaults: By dotted path, in place of RunConfig's own.
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found.
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
        code_source=code_source,
        defaults=defaults,
        ignore=NOT_CONFIG,
        aliases=OLD_NAMES,
        moved=moved_fields(),
        exclusive=EXCLUSIVE,
        foreign=FOREIGN_VARIABLES,
        warn=warn,
    )


def _with_the_job_named(
    environ: Mapping[str, str] | None, args: Sequence[str] | None
) -> tuple[Mapping[str, str] | None, Sequence[str] | None]:
    """Say job.task where the old name `task` does: a shell has the same name for settings of the task."""
    if environ and "MONOLITH_TASK" in environ and not is_table_text(environ["MONOLITH_TASK"]):
        rest = {name: text for name, text in environ.items() if name != "MONOLITH_TASK"}
        environ = {"MONOLITH_JOB__TASK": environ["MONOLITH_TASK"], **rest}
    if args:
        words = list(args)
        for place, word in enumerate(words):
            flag, equals, text = word.partition("=")
            value = text if equals else "".join(words[place + 1 : place + 2])
            if flag == "--task" and not is_table_text(value):
                words[place] = f"--job.{word[2:]}"
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
