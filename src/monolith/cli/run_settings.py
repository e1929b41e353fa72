"""From the config of a run to that of a training: what each field of the one means in the other.

`RunConfig` is the one tree that all commands and launchers read; `TrainConfig` is what a trainer takes. A
config file has one of two shapes: groups of RunConfig, or TrainConfig's own fields, flat.

Nothing here needs torch, but for a file that may have the second shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

from monolith.cli.options.train import TrainOptions
from monolith.cli.run_fields import NOT_YET, TRAIN_FIELDS
from monolith.cluster.run_config import (
    ALIASES,
    FLAGS_OF_OTHERS,
    RunConfig,
    load_run_config,
    read_tables,
    said_fields,
    settle,
)
from monolith.cluster.runtime import discovery_defaults, place
from monolith.cluster.security import guard_listener
from monolith.config.fields import leaf_paths
from monolith.errors import ConfigError

_log = logging.getLogger(__name__)

_PLATFORM = "TENSORBOARD_LOG_PATH"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What the sources say of a run."""

    run: RunConfig
    """Placed among its processes, with nothing left open."""
    said: frozenset[str]
    """Fields of the run that somebody set."""
    file: Path | None
    """The config file, whichever its shape."""
    tables: Mapping[str, Any]
    """What stands in the file, if it has TrainConfig's own shape."""
    unkept: tuple[str, ...] = ()
    """What was asked for in so many words, and `run` does not have, since it cannot be done."""

    @property
    def distributed(self) -> bool:
        return self.run.distributed


def read_settings(
    file: Path | None,
    environ: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    code: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> RunSettings:
    """Read a run from a file of either shape, the environment and flags. Needs no torch for one of groups.

    Args:
        flags: Of RunConfig, by new names and old.
        code: Fields of RunConfig that win over all of them.
        warn: Told of old names that mean nothing any more.

    Raises:
        ConfigError: Lists every problem found; or the file mixes the two shapes.
    """
    if environ.get(_PLATFORM):
        _log.info("%s is not followed: summaries are in summaries/ of the model_dir", _PLATFORM)
        environ = {name: text for name, text in environ.items() if name != _PLATFORM}
    tables = read_tables(file) or {}
    flat = bool(tables) and _is_flat(file, tables)
    groups = None if flat else file
    defaults = discovery_defaults(environ)
    if flat and isinstance(tables.get("model_dir"), str):
        defaults["job.model_dir"] = tables["model_dir"]
    chosen = {path: value for path, value in (code or {}).items() if value is not None}
    run = load_run_config(
        file=groups, environ=environ, args=list(flags), code=chosen, defaults=defaults, warn=warn
    )
    run = place(run, environ)
    said = said_fields(file=groups, environ=environ, args=flags) | chosen.keys()
    return RunSettings(
        run=settle(run),
        said=said,
        file=file,
        tables=tables if flat else {},
        unkept=tuple(_unkept(run, said)),
    )


def _unkept(run: RunConfig, said: Collection[str]) -> Iterator[str]:
    """Yield what settling a run decides otherwise than somebody said."""
    if "dense.partition" in said and run.dense.partition:
        yield f"dense.partition: {NOT_YET['dense.partition']}"
    if "timeouts.operation" in said and run.timeouts.operation is None:
        yield (
            "timeouts.operation: a call without a limit would wait for a server that hangs for ever; name a "
            "limit, or leave it out for that of timeouts.lookup"
        )


def settings_of(
    options: TrainOptions, environ: Mapping[str, str], decided: Mapping[str, Any] | None = None
) -> RunSettings:
    """Read the run that `monolith train` was asked for; see `read_settings`.

    Args:
        decided: Fields of RunConfig that nobody else has a say in.
    """
    code = {
        "job.task": options.task,
        "job.model_dir": options.model_dir,
        "cluster.num_ps": options.num_ps,
        "cluster.num_workers": options.num_workers,
        "metrics.port": options.metrics_port,
        "metrics.host": options.metrics_host,
    }
    return read_settings(options.config, environ, flags=options.run_flags, code={**code, **(decided or {})})


def refused(settings: RunSettings) -> Iterator[str]:
    """Yield what the run asks for and a training cannot do."""
    yield from settings.unkept
    plain = settle(RunConfig())
    for path, why in NOT_YET.items():
        asked, default = (attrgetter(path)(config) for config in (settings.run, plain))
        nothing = not asked and not default
        if path in settings.said and asked != default and not nothing:
            yield f"{path}: {why}"
    run = settings.run
    if run.profile.from_step is not None and not run.job.model_dir:
        yield "profile.from_step: profiles are files in the model_dir; give one with --model-dir"
    if run.metrics.port is not None:
        try:
            guard_listener(run.metrics.host, run.security)
        except ConfigError as error:
            yield f"metrics.host: {error}"
    if run.job.mode != "train":
        yield f"job.mode: {run.job.mode!r} is not training; see `monolith evaluate` and `monolith predict`"
    if run.distributed and run.cluster.num_ps == 0:
        yield (
            f"cluster.num_workers and cluster.num_ps: {run.cluster.num_workers} workers share what they "
            "learn on parameter servers, and there are none; set cluster.num_ps (--num-ps), or num_workers "
            "to 1"
        )
    if run.tide.save_every is not None and run.tide.start_hour is None:
        yield "tide.save_every: it is for the hours outside of a window, which tide.start_hour etc. give"
    if run.distributed and run.data.dump_features_only:
        yield "data.dump_features_only: features are written by one process; set job.local"


def train_values(settings: RunSettings) -> dict[str, Any]:
    """Return what was said of the run by the dotted paths of TrainConfig.

    Raises:
        ConfigError: Two weights would have one name.
    """
    run, said = settings.run, settings.said
    found = {
        path: _as_secs(attrgetter(field)(run))
        for field, path in TRAIN_FIELDS.items()
        if field in said and not field.startswith("tide.")
    }
    for one, other in (("secs", "steps"), ("steps", "secs")):
        for group in ("save", "dense_save"):
            if found.get(f"{group}.{one}") is not None:
                found.setdefault(f"{group}.{other}", None)
    if "restore.alias_map" in found:
        found["restore.alias_map"] = _by_new_name(run.restore.renamed)
    if run.tide.start_hour is not None:
        window = {
            name: getattr(run.tide, name) for name in ("start_hour", "start_minute", "end_hour", "end_minute")
        }
        where = "tide" if run.tide.save_every is None else "save.tide"
        found |= {f"{where}.{name}": value for name, value in window.items()}
        if run.tide.save_every is not None:
            found["save.tide_secs"] = run.tide.save_every.total_seconds()
    return found


def misplaced(train: Mapping[str, Any]) -> Iterator[str]:
    """Yield what stands in [train] though a group of the run has it."""
    groups = {path: field for field, path in TRAIN_FIELDS.items()}
    for path in _paths(train):
        if path in groups:
            yield f"train.{path}: in a run's config it is called {groups[path]}"


def _as_secs(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _by_new_name(renamed: Mapping[str, str]) -> dict[str, str]:
    """Old name -> new, the other way round."""
    turned = {new: old for old, new in renamed.items()}
    if len(turned) < len(renamed):
        twice = sorted(new for new in turned if list(renamed.values()).count(new) > 1)
        raise ConfigError(f"restore.renamed: two old names become {twice[0]}; which one is it?")
    return turned


def _paths(tables: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


# The two shapes of a file


def _is_flat(file: Path | None, tables: Mapping[str, Any]) -> bool:
    """Whether a file has TrainConfig's fields, and no group of a run.

    Raises:
        ConfigError: It has both.
    """
    known = tuple(leaf_paths(RunConfig))
    both = ("task", "restore", "tide")  # tables that say nothing of the shape while they are empty
    paths = [path for path in _paths(tables) if path not in both and not path.startswith("task.")]
    run = {path for path in paths if _is_of_run(path, known)}
    if len(run) == len(paths):
        # What both shapes have, such as model_dir, means the same in either.
        return all(_is_shared(path) for path in run)
    train = {path for path in paths if _is_of_training(path)}
    run, train = run - train, train - run
    if run and train:
        elsewhere = {path: field for field, path in TRAIN_FIELDS.items()}
        places = ", ".join(f"{path} is {elsewhere.get(path, f'train.{path}')}" for path in sorted(train))
        raise ConfigError(
            f"cannot read {file}: it mixes two shapes. {_listed(run)} of a run's config, and "
            f"{_listed(train)} of TrainConfig. In a run's config {places}."
        )
    return not run


def _is_of_run(path: str, known: Sequence[str]) -> bool:
    group, _, rest = path.partition(".")
    if group in ALIASES or group in FLAGS_OF_OTHERS:
        return not rest
    if any(path == each or path.startswith(f"{each}.") for each in known):
        return True
    if group in ("restore", "tide"):  # TrainConfig has groups of that name
        return False
    return any(each.startswith(f"{group}.") for each in known)


def _is_shared(path: str) -> bool:
    """Whether a field of a run has the same name in TrainConfig."""
    return path == "model_dir" or TRAIN_FIELDS.get(path) == path


def _is_of_training(path: str) -> bool:
    from monolith.train import RestoreConfig, TideWindow, TrainConfig

    group, _, rest = path.partition(".")
    shared: Mapping[str, type[RestoreConfig | TideWindow]] = {"restore": RestoreConfig, "tide": TideWindow}
    if group in shared and rest:
        return rest.partition(".")[0] in {each.name for each in fields(shared[group])}
    return group in {each.name for each in fields(TrainConfig)}


def _listed(paths: set[str]) -> str:
    names = sorted(paths)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
