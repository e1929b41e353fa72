"""Reading a run's config from everything that may say something about it.

Code wins over flags, flags over the environment, the environment over the file, the file over
the defaults. What code leaves at its default counts as not said, so it never hides a flag.

In a file, `task` as a table has the settings of the task; as a text it is the old name of job.task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monolith.config import differences, load_config
from monolith.config.aliases import is_table_text
from monolith.errors import ConfigError
from monolith.run.config import RunConfig
from monolith.run.old_names import OLD_NAMES, moved_fields

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
