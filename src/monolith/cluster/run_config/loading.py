"""Reading a run's config from everything that may say something about it.

Code wins over flags, flags over the environment, the environment over the file, the file over
the defaults. What code leaves at its default counts as not said, so it never hides a flag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monolith.cluster.run_config.aliases import ALIASES, FLAGS_OF_OTHERS
from monolith.cluster.run_config.run import RunConfig
from monolith.config import differences, load_config
from monolith.errors import ConfigError

_log = logging.getLogger(__name__)

USER_DEFAULTS: Mapping[str, object] = {
    "failover.max_retries": 6,
    "failover.wait": "5s",
    "failover.partial_recovery": False,
}
"""What an author of a task gets who chooses nothing; a scheduler begins with RunConfig's own defaults."""

FOREIGN_VARIABLES = {
    "TF_CONFIG": "discovery.tf_config",
    "ZK_AUTH": "discovery.zookeeper_auth",
    "TENSORBOARD_LOG_PATH": "metrics.tensorboard_dir",
}
"""Variables that others set and that mean a field of ours."""

NOT_CONFIG = (
    "MONOLITH_CONSUL",
    "MONOLITH_KAFKA",
    "MONOLITH_ZOOKEEPER",
    "MONOLITH_VECTORS",
    "MONOLITH_SERVICES",
)
"""Variables of ours that commands and tests read."""

OLD_NAMES = {**FLAGS_OF_OTHERS, **ALIASES}


def load_run_config(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    args: Sequence[str] | None = None,
    code: RunConfig | Mapping[str, Any] | None = None,
    defaults: Mapping[str, object] | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> RunConfig:
    """Read a config from all sources given, by new names and old. Reads `file` and nothing else.

    Args:
        environ: Variables such as MONOLITH_CLUSTER__NUM_PS, MONOLITH_NUM_PS or TF_CONFIG.
        args: Flags such as --cluster.num-ps 2 or --num_ps=2.
        code: Values by dotted path; or a config, of which only what differs from the defaults counts.
        defaults: In place of RunConfig's own, such as USER_DEFAULTS. In a config given as `code`, a value
            that is as either of them counts as left alone.
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found.
    """
    if args is not None and {"-h", "--help"} & set(args):
        raise ConfigError(
            "a config has no --help, since building one prints nothing and exits nowhere; "
            "`monolith config explain` lists its fields"
        )
    if isinstance(code, RunConfig):
        chosen = differences(code, RunConfig())
        if defaults:
            other = differences(code, load_run_config(defaults=defaults))
            chosen = {path: value for path, value in chosen.items() if path in other}
        code = chosen
    return load_config(
        RunConfig,
        file=file,
        environ=environ,
        args=args,
        code=code,
        defaults=defaults,
        ignore=NOT_CONFIG,
        aliases=OLD_NAMES,
        foreign=FOREIGN_VARIABLES,
        warn=warn,
    )
