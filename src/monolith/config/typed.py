"""Typed configs: frozen dataclasses, read strictly from wherever a run is described.

    config = load_config(RunConfig, file=Path("run.toml"), environ=os.environ, args=sys.argv[1:])

What code sets wins over flags, flags over the environment, the environment over
the file, the file over the defaults. An unknown key, a value of the wrong type
and a missing one are errors; all of them are reported at once, each with its dotted
path and where it came from.

Understood are nested dataclasses, None, unions, lists, tuples, sets, dicts,
`Literal`, `Enum`, `Path`, `timedelta` ("10m"), and sizes ("64GiB") in
int fields whose name ends in `_bytes`. For a field that may be None the text "none"
means None, since TOML and shells have no null. A field that may be one of several
dataclasses names its class in the key `type`, if the keys alone do not tell. The key
of a field is its name; of one such as `with_`, which Python does not allow without the
underscore, it is `with`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

from monolith.config.fields import (
    allows_none,
    dataclass_members,
    field_hints,
    is_collection,
    is_mapping,
    item_types,
    key_of,
    mapping_types,
    members,
)
from monolith.config.flags import environment_tree, flag_name, flags_tree, variable_name
from monolith.config.problems import UnreadableConfigError
from monolith.config.reading import TAG, Reader
from monolith.config.secret import MASK, Secret
from monolith.config.text import NONE, format_duration, write_toml
from monolith.config.tree import (
    Aliases,
    Branch,
    Leaf,
    Moved,
    Node,
    Renamed,
    cut,
    find,
    grow,
    old_flags,
    overlay,
    plant,
    relocate,
    rename,
)
from monolith.errors import ConfigError

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigNames:
    """The names by which sources may set fields, in addition to the fields' own names."""

    prefix: str = "MONOLITH"
    """First part of our environment variables, before an underscore."""
    ignore: Collection[str] = ()
    """Variables that start with `prefix` and are not config."""
    foreign: Mapping[str, str] = field(default_factory=dict)
    """Variables of other programs, such as TF_CONFIG -> the dotted path of the field that one sets."""
    aliases: Aliases = field(default_factory=dict)
    """Old names of fields, which any source may use."""
    moved: Moved = field(default_factory=dict)
    """Former dotted paths of fields. A Renamed one is read, with a warning that names the new path; any other
    is an error that names the new path, or the reason why there is none."""
    exclusive: Sequence[tuple[str, str]] = ()
    """Pairs of dotted paths: a source that sets one of them unsets the other."""
    prog: str | None = None
    """The name of the program in the help of `args`."""
    code_source: str = "code"
    """The name of `code` in messages."""


def load_config(
    cls: type[T],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    args: Sequence[str] | None = None,
    code: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    names: ConfigNames | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> T:
    """Read a config from the given sources. A later one of file, environ, args and code overrides the
    earlier.

    Example: with dim = 1 in the file and MONOLITH_DIM=2 in `environ`, the config has dim 2.

    Args:
        cls: A frozen dataclass.
        file: TOML or JSON, by its suffix.
        environ: Variables such as `MONOLITH_TABLE__DIM` for `table.dim`. Other variables are ignored.
        args: Flags such as `--table.dim 8`, `--no-use-gpu`. `--help` prints and exits.
        code: Values by name or dotted path; typed values and whole configs are accepted.
        defaults: Values by name or dotted path that replace the defaults of `cls`.
        names: Old and foreign names that sources may use.
        warn: Called with a message for each name that is accepted and has no effect any more.

    Raises:
        ConfigError: Lists every problem found.
    """
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"cannot read {cls!r}: it is not a dataclass")
    names = names or ConfigNames()
    known, moved = names.aliases, names.moved
    layers: list[Node] = [_code_tree(defaults or {}, "defaults")]
    problems: list[str] = []
    if file is not None:
        layers.append(grow(_file_data(file), str(file)))
    if environ is not None:
        layer, unknown = environment_tree(
            cls,
            environ,
            names.prefix,
            ignore=names.ignore,
            foreign=names.foreign,
            old=known,
            moved=moved,
        )
        layers.append(layer)
        problems += unknown
    if args is not None:
        old, rest = old_flags(args, known, moved)
        if rest:
            layer, unknown = flags_tree(cls, rest, names.prog, old=known)
            old = overlay(old, layer)
            problems += unknown
        layers.append(old)
    layers.append(_code_tree(code or {}, names.code_source))
    tree: Node = Branch({}, "defaults")
    for layer in layers:
        current, misplaced = relocate(layer, moved, known, warn)
        renamed, wrong = rename(current, known, warn)
        tree = overlay(tree, _choosing(renamed, names.exclusive))
        problems += [*misplaced, *wrong]

    def how_to_set(path: str) -> str:
        ways = [f"{path} in {file}"] if file is not None else []
        ways += [variable_name(names.prefix, path)] if environ is not None else []
        ways += [flag_name(path)] if args is not None else []
        return "set " + (" or ".join(ways) or path)

    elsewhere = {old: alias.path for old, alias in known.items() if isinstance(alias, Renamed)}
    return _typed(cls, tree, problems, lambda: Reader(how_to_set, elsewhere))


def config_from_mapping(cls: type[T], data: Mapping[str, Any], source: str = "mapping") -> T:
    """Read a config from plain data, such as `to_dict` gives.

    Args:
        source: Where the data came from, for messages.

    Raises:
        ConfigError: Lists every problem found.
    """
    return _typed(cls, grow(data, source), [], Reader)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain data that JSON can hold and `config_from_mapping` reads back, but for secrets.

    Durations become text, enum members their names, paths strings, tuples and sets
    lists, and a secret a mask.

    Raises:
        ConfigError: A value has no plain form.
    """
    plain: dict[str, Any] = _plain(config, type(config), type(config).__name__)
    return plain


def to_toml(config: Any) -> str:
    """A config as the text of a TOML file that `load_config` reads back, every default spelled out.

    Raises:
        ConfigError: A value has no plain form.
    """
    return write_toml(to_dict(config))


def differences(config: Any, other: Any) -> dict[str, Any]:
    """Dotted path -> value of every field in which `config` is not as `other`, of the same class.

    What a dataclass cannot say is whether a value was chosen or left alone; this takes one that
    is as in `other`, the defaults, to be left alone. Good as `code` of `load_config`.
    """
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        mine, theirs = getattr(config, entry.name), getattr(other, entry.name)
        if not entry.init or mine == theirs:
            continue
        if type(mine) is type(theirs) and dataclasses.is_dataclass(mine):
            inner = differences(mine, theirs)
            found |= {f"{entry.name}.{path}": value for path, value in inner.items()}
        else:
            found[entry.name] = mine
    return found


def _code_tree(values: Mapping[str, Any], source: str) -> Node:
    tree: Node = Branch({}, source)
    for path, value in values.items():
        tree = overlay(tree, plant(tuple(path.split(".")), grow(value, source)))
    return tree


def _choosing(layer: Node, exclusive: Sequence[tuple[str, str]]) -> Node:
    """A source's tree, in which what it sets of two that exclude each other unsets the other."""
    for pair in exclusive:
        for one, other in (pair, pair[::-1]):
            chosen = find(layer, tuple(one.split(".")))
            if isinstance(chosen, Leaf) and chosen.value is not None:
                unset = plant(tuple(other.split(".")), Leaf(None, chosen.source))
                layer = overlay(unset, layer)
    return layer


def _typed(cls: type[T], tree: Node, problems: list[str], make_reader: Callable[[], Reader]) -> T:
    """The config that `tree` describes.

    Fields with a problem are taken out and the rest read again, so that what is wrong
    between the other fields is found as well.
    """
    found = list(problems)
    cause: Exception | None = None
    bad: set[str] = set()
    while True:
        reader = make_reader()
        config: T = reader.read(cls, tree, "")
        cause = cause or reader.cause
        fresh = [p for p in reader.problems if not any(_touches(f, bad) for f in p.fields)]
        if not fresh:
            break
        found += [problem.text for problem in fresh]
        paths = {path for problem in fresh for path in problem.fields}
        # A table that lacks a required value is left out as a whole, or nothing above it could be read.
        paths |= {path.rpartition(".")[0] for path in reader.absent if "." in path}
        bad |= paths
        for path in paths:
            tree = cut(tree, tuple(path.split(".")))
    if found:
        raise UnreadableConfigError(getattr(cls, "TITLE", cls.__name__), found) from cause
    return config


def _touches(path: str, others: Collection[str]) -> bool:
    """Whether `path` is one of `others`, or above or below one."""
    return any(
        not path or path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
        for other in others
    )


def _file_data(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            return tomllib.loads(text)
        if file.suffix == ".json":
            data = json.loads(text, object_pairs_hook=_without_repeats)
            if not isinstance(data, dict):
                raise ConfigError(f"cannot read config {file}: expected an object, got {type(data).__name__}")
            return data
    except OSError as cause:
        raise ConfigError(f"cannot read config {file}: {cause.strerror}. Check the path.") from cause
    except ConfigError:
        raise
    except ValueError as cause:  # also malformed TOML, JSON and UTF-8
        raise ConfigError(f"cannot read config {file}: {cause}") from cause
    raise ConfigError(f"cannot read config {file}: expected a name that ends in .toml or .json")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return result


def _plain(value: Any, hint: Any, path: str) -> Any:
    if value == NONE and isinstance(value, str) and allows_none(hint):
        raise ConfigError(f"cannot write {path}: the text {NONE!r} could not be told from None; change it")
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if dataclasses.is_dataclass(value):
        hints = field_hints(type(value))
        fields = {key_of(n): _plain(getattr(value, n), h, f"{path}.{key_of(n)}") for n, h in hints.items()}
        return {TAG: type(value).__name__, **fields} if len(dataclass_members(hint)) > 1 else fields
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        member = next((m for m in members(hint) if is_mapping(m)), dict)
        key_hint, value_hint = mapping_types(member)
        return {
            str(_plain(key, key_hint, path)): _plain(item, value_hint, f"{path}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
        member = next((m for m in members(hint) if is_collection(m)), list)
        types = item_types(member, len(items)) or [Any] * len(items)
        return [_plain(v, h, f"{path}[{i}]") for i, (v, h) in enumerate(zip(items, types, strict=True))]
    raise ConfigError(f"cannot write {path}: {type(value).__name__} has no plain form")
