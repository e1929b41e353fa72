"""`monolith config init | explain | check | show | token`: write, understand and check a run's config."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING

from monolith import filesystem
from monolith.cli.options.jobs import (
    ConfigCheckOptions,
    ConfigExplainOptions,
    ConfigInitOptions,
    ConfigShowOptions,
    ConfigTokenOptions,
)
from monolith.cli.train import run_of
from monolith.config import Dropped, FieldInfo, Renamed, Unsupported, describe_fields, to_toml
from monolith.config.flags import flag_name, variable_name
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig, settle
from monolith.runtime.config_help import BY_NAME, TypedKey, template, typed_keys
from monolith.runtime.config_loading import check_run, load_run_config, moved_fields, old_names
from monolith.runtime.launch import decided_fields

_WIDTH = 100


def init(options: ConfigInitOptions) -> int:
    """Write a file to begin with."""
    text = template(options.kind)
    if options.to is None:
        sys.stdout.write(text)
        return 0
    if options.to.suffix != ".toml":
        raise ConfigError(f"cannot write {options.to}: the name of a config file in TOML ends in .toml")
    if options.to.exists():
        raise ConfigError(f"cannot write {options.to}: it exists; remove it first, or choose another name")
    with filesystem.atomic_write(options.to) as file:
        file.write(text.encode())
    _say(f"wrote {options.to}; name your task in it, then check it with: monolith config check {options.to}")
    return 0


def token(options: ConfigTokenOptions) -> int:
    """Print the token that a role has if none is set for it."""
    from monolith.cluster.run_token import TOKEN_FILE, read_token
    from monolith.cluster.security import SecurityConfig, derive_token, guard_caller

    if (options.model_dir is None) == (options.token_file is None):
        raise ConfigError(
            "config token: give --model-dir or --token-file, whichever the run has its token from"
        )
    if options.model_dir is not None:
        control = read_token(options.model_dir / TOKEN_FILE)
    else:
        given = guard_caller(SecurityConfig(token_file=options.token_file)).token
        assert given is not None  # a file was named
        control = given
    _say(derive_token(control, options.role).reveal())
    return 0


def explain(options: ConfigExplainOptions) -> int:
    """Say what a field does."""
    fields = describe_fields(RunConfig)
    name = options.field.removeprefix("--").replace("-", "_")
    exact = {info.path: info for info in fields}
    alias = old_names().get(name)
    if name in exact:
        keys = _listed_by_type(name, typed_keys(name, options.task))
        _say("\n".join([_explained(exact[name]), *([""] if keys else []), *keys]))
    elif isinstance(alias, Renamed):
        _say(f"{name} is the old name of {alias.path}.\n\n{_explained(exact[alias.path])}")
    elif isinstance(alias, Dropped):
        _say(f"{name} is accepted and ignored: {alias.reason}.")
    elif isinstance(alias, Unsupported):
        _say(f"{name} is refused: {alias.reason}.")
    elif name in moved_fields():
        now = moved_fields()[name]
        if isinstance(now, Renamed):
            _say(f"{name} is the old name of {now.path}.")
        else:
            _say(f"{name} is {now}." if isinstance(now, str) else f"{name} is gone: {now.reason}.")
    elif (said := _explained_by_type(name, exact, options.task)) is not None:
        _say(said)
    else:
        group = [info for info in fields if name == "all" or info.path.startswith(f"{name}.")]
        if not group:
            raise ConfigError(f"no field of the config is called {options.field!r}; {_near(name, exact)}")
        _say("\n".join(_listed(info) for info in group))
    return 0


def check(options: ConfigCheckOptions) -> int:
    """Name everything for which `monolith train` would refuse a file; status 1 if there is something."""
    warnings: list[str] = []
    problems: list[str] = []
    try:
        environ = os.environ if options.environment else {}
        decided = decided_fields(options.launch) if options.launch else None
        run = run_of(options, environ, decided, warn=warnings.append)
        check_run(run)
        if not options.no_data and run.job.task:  # else the task is named when training starts
            from monolith.runtime.task_data import task_problems
            from monolith.runtime.task_setup import make_task

            task = make_task(run, options.config, options.set)
            problems = [str(error) for error in task_problems(task, run)]
    except ConfigError as error:
        problems = [str(error)]
    for warning in warnings:
        _say(f"warning: {warning}")
    _say("\n".join(problems) or f"{options.config}: no problems")
    return 1 if problems else 0


def show(options: ConfigShowOptions) -> int:
    """Print a file with every default and decision spelled out."""
    environ = os.environ if options.environment else None
    _say(to_toml(settle(load_run_config(file=options.file, environ=environ))).rstrip("\n"))
    return 0


def _explained(info: FieldInfo) -> str:
    old = [
        name for name, alias in old_names().items() if isinstance(alias, Renamed) and alias.path == info.path
    ]
    facts = {
        "type": info.type_text,
        "default": _default(info),
        "flag": flag_name(info.path),
        "variable": variable_name("MONOLITH", info.path),
        "old name": ", ".join(old),
    }
    return _paragraph(info.path, info.doc, facts)


def _paragraph(path: str, doc: str, facts: Mapping[str, str]) -> str:
    doc = textwrap.fill(doc, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([path, doc, *(f"  {key + ':':<10}{value}" for key, value in facts.items() if value)])


def _listed(info: FieldInfo) -> str:
    return _line(info.path, info.doc, _default(info))


def _line(path: str, doc: str, default: str) -> str:
    """One line for each key, however long: the first sentence of its text is never cut."""
    first = re.split(r"(?<=[.])\s+(?=[A-Z])", " ".join(doc.split()), maxsplit=1)[0]
    return f"{path:<40} {first} (default: {default})".replace("(default: (required))", "(required)")


def _default(info: FieldInfo) -> str:
    return "(required)" if info.default is MISSING else info.default_text or "(empty)"


def _explained_by_type(name: str, exact: Collection[str], task: str | None) -> str | None:
    """Return the text for a key whose table depends on a type, such as model.dim or features.user.kind, or
    for all keys of a table. None if there is no such table.

    Raises:
        ConfigError: There is no such key.
    """
    group, _, rest = name.partition(".")
    if group not in exact or not (keys := typed_keys(group, task)):
        return None
    table = f"{group}.{rest.partition('.')[0]}" if group in BY_NAME else group
    key = name.removeprefix(table).removeprefix(".")
    chosen = [one for one in keys if key in ("", one.of)]
    if chosen:
        return "\n".join(_listed_by_type(table, chosen))
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in keys:
        if one.name == key:
            found.setdefault((one.doc, one.type_text, one.default_text), []).append(one.of)
    if not found:
        near = difflib.get_close_matches(key, {one.name for one in keys}, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(f'{table}.{one}' for one in near)}" if near else ""
        raise ConfigError(
            f"no {group} has a key {key!r}; {hint or f'`monolith config explain {group}` lists them'}"
        )
    return "\n\n".join(
        _paragraph(f"{table}.{key}", doc, {"of type": ", ".join(of), "type": kind, "default": default})
        for (doc, kind, default), of in found.items()
    )


def _listed_by_type(table: str, keys: Sequence[TypedKey]) -> list[str]:
    """A line for each key, below the type that has it."""
    table = f"{table}.NAME" if table in BY_NAME else table
    return [
        line
        for of, inside in itertools.groupby(keys, lambda one: one.of)
        for line in (
            f"{of}:",
            *(f"  {_line(f'{table}.{one.name}', one.doc, one.default_text)}" for one in inside),
        )
    ]


def _near(name: str, exact: dict[str, FieldInfo]) -> str:
    """The known names most like one that is not."""
    leaf = name.rpartition(".")[2]
    known = {**{path.rpartition(".")[2]: path for path in exact}, **{path: path for path in exact}}
    known |= {old: old for old in old_names()}
    found = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or difflib.get_close_matches(
        leaf, known, n=3, cutoff=0.5
    )
    names = list(dict.fromkeys(known[each] for each in found))
    return f"the nearest are {', '.join(names)}" if names else "`monolith config explain all` lists them"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
