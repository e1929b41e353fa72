"""Reading a run's config from everything that may say something about it.

Code wins over flags, flags over the environment, the environment over the file, the file over
the defaults. What code leaves at its default counts as not said, so it never hides a flag.

In a file, the table [task] has settings of the task, as job.params does; as a text, `task` is the old
name of job.task.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from monolith.cluster.run_config.aliases import ALIASES, FLAGS_OF_OTHERS
from monolith.cluster.run_config.run import RunConfig
from monolith.config import Renamed, differences, load_config
from monolith.config.fields import leaf_paths
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
    "MONOLITH_REPORT_MARK",
    "MONOLITH_RUN_TOKEN",
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
    cls: type[RunConfig] = RunConfig
    aliases = OLD_NAMES
    if isinstance((read_tables(file) or {}).get("task"), dict):
        cls = RunConfigFile
        aliases = {name: alias for name, alias in OLD_NAMES.items() if name != "task"}
        environ, args, code = _name_the_job(environ, args, code)
    config = load_config(
        cls,
        file=file,
        environ=environ,
        args=args,
        code=code,
        defaults=defaults,
        ignore=NOT_CONFIG,
        aliases=aliases,
        foreign=FOREIGN_VARIABLES,
        warn=warn,
    )
    return config.plain() if isinstance(config, RunConfigFile) else config


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfigFile(RunConfig):
    """A file whose `task` is a table."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task, by name; they win over job.params."""

    def plain(self) -> RunConfig:
        """Return the run, with these among its job.params."""
        groups = {each.name: getattr(self, each.name) for each in fields(RunConfig)}
        job = replace(self.job, params={**self.job.params, **self.task})
        return RunConfig(**{**groups, "job": job})


def read_tables(file: Path | None) -> dict[str, Any] | None:
    """Return what a config file has, untyped; None where it cannot be read: `load_run_config` says why."""
    if file is None or file.suffix not in (".toml", ".json"):
        return None
    try:
        text = file.read_text(encoding="utf-8")
        found = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def said_fields(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
) -> frozenset[str]:
    """Return the dotted paths of the fields that these sources set, be it to the default.

    For who has defaults of their own, over which only counts what somebody said. Names that mean
    nothing are passed over: `load_run_config` refuses them.
    """
    known = set(leaf_paths(RunConfig))
    names = [*_said_in(read_tables(file) or {}, known), *_flags(args)]
    for name in environ or {}:
        if name in FOREIGN_VARIABLES and (environ or {})[name]:
            names.append(FOREIGN_VARIABLES[name])
        elif name.startswith("MONOLITH_") and name not in NOT_CONFIG:
            names.append(name.removeprefix("MONOLITH_").lower().replace("__", "."))
    return frozenset(path for name in names if (path := _path_of(name, known)) is not None)


def _said_in(tables: Mapping[str, Any], known: set[str], above: str = "") -> Iterator[str]:
    for key, value in tables.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and path not in known:
            yield from ["job.params"] if path == "task" else _said_in(value, known, f"{path}.")
        else:
            yield path


def _flags(args: Sequence[str]) -> Iterator[str]:
    for word in args:
        if word.startswith("--"):
            yield word[2:].partition("=")[0].replace("-", "_")


def _path_of(name: str, known: set[str]) -> str | None:
    """The field that a name means: a new one, an old one, a --no- form, or a key of a table."""
    group, _, leaf = name.rpartition(".")
    off = f"{group}.{leaf.removeprefix('no_')}" if group else leaf.removeprefix("no").lstrip("_")
    for each in (name, off):
        if each in known:
            return each
        alias = OLD_NAMES.get(each)
        if isinstance(alias, Renamed):
            return alias.path
    return next((path for path in known if name.startswith(f"{path}.")), None)


def _name_the_job(
    environ: Mapping[str, str] | None, args: Sequence[str] | None, code: Mapping[str, Any] | None
) -> tuple[Mapping[str, str] | None, Sequence[str] | None, Mapping[str, Any] | None]:
    """Say job.task in every source that says it by its old name, which a table has taken."""
    if environ and "MONOLITH_TASK" in environ:
        rest = {name: text for name, text in environ.items() if name != "MONOLITH_TASK"}
        environ = {"MONOLITH_JOB__TASK": environ["MONOLITH_TASK"], **rest}
    if args:
        args = [f"--job.{word[2:]}" if word.partition("=")[0] == "--task" else word for word in args]
    if code and "task" in code:
        code = {"job.task" if name == "task" else name: value for name, value in code.items()}
    return environ, args, code
