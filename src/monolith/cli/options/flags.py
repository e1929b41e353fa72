"""Flags of a command line: their values checked, those of a run's config told apart, those about security.

A value is checked before it is parsed, so that a wrong one is refused in plain words. A command with short
flags of its own also takes fields of the run's config (`--cluster.num-ps 2`, `--num_ps=2`); an unknown flag
stays among the command's own, whose parser names the nearest one. Every command that listens takes
`SecurityOptions`, which set the `security` group of a run's config and win over file and environment.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal

from monolith.errors import ConfigError

if TYPE_CHECKING:
    from monolith.cluster.security import Guard, Role, SecurityConfig
    from monolith.runtime.config import RunConfig
    from monolith.wire.ports import Limits


_KINDS: Mapping[type, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def check_flags(command: str, options: type, flags: Sequence[str]) -> None:
    """Refuse a number that is none, and a word that is not among the choices of a flag.

    Args:
        options: The dataclass whose fields are the flags.

    Raises:
        ConfigError: Names the flag, what it was given and what it takes.
    """
    hints = typing.get_type_hints(options)
    types = {field.name: _members(hints[field.name]) for field in fields(options)}
    kinds: Sequence[Any] = ()
    flag, values = "", 0
    for word in flags:
        if word == "--":
            return
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            kinds, values = types.get(flag[2:].replace("-", "_"), ()), 0
            if equals:
                _check(command, flag, value, kinds)
                kinds = ()
        elif kinds and (values == 0 or tuple in kinds):
            _check(command, flag, word, kinds)
            values += 1


def _check(command: str, flag: str, value: str, kinds: Sequence[Any]) -> None:
    choices = [
        str(choice) for kind in kinds if typing.get_origin(kind) is Literal for choice in kind.__args__
    ]
    numbers = [_KINDS[kind] for kind in kinds if kind in _KINDS]
    if str in kinds or not (choices or numbers) or (type(None) in kinds and value == "None"):
        return
    if value in choices or any(_reads(read, value) for read, _ in numbers):
        return
    if choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{command}: {flag} must be one of {', '.join(choices)}, got {value!r}{hint}")
    raise ConfigError(f"{command}: {flag} must be {numbers[0][1]}, got {value!r}")


def _reads(read: Callable[[str], object], value: str) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the plain types of a field; with `tuple` among them, where it takes several values."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        inner = [arg for arg in typing.get_args(hint) if arg is not ...]
        return (tuple, *(member for arg in inner for member in _members(arg)))
    if origin in (typing.Union, UnionType):
        return tuple(member for arg in typing.get_args(hint) for member in _members(arg))
    return (hint,)


_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off")


def split_run_flags(args: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that are the command's own, and those that `load_run_config` reads.

    Args:
        own: Names of the command's own flags, with underscores.
    """
    names = [_name(word) for word in args]
    if all(not name or name in own for name in names):
        return list(args), []
    takes = _known()
    mine: list[str] = []
    run: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if word == "--":
            return [*mine, word, *args[position:]], run
        name = _name(word)
        found = None if not name or name in own else _found(name, takes)
        if found is None:
            mine.append(word)
            continue
        run.append(word)
        values = int("=" in word)
        while position < len(args) and _is_value(args[position], found, values):
            run.append(args[position])
            position += 1
            values += 1
    return mine, run


def _name(word: str) -> str:
    """The name of a flag, with underscores; nothing for a word that is none."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _known() -> Mapping[str, str]:
    """Name of each flag -> what follows it: "many" words, "one", or a "truth", which may be left out."""
    from monolith.config import Renamed, describe_fields
    from monolith.runtime.config import RunConfig
    from monolith.runtime.config_loading import moved_fields, old_names

    takes = {info.path: _takes(info.hint) for info in describe_fields(RunConfig)}
    for old, alias in old_names().items():
        takes[old] = takes[alias.path] if isinstance(alias, Renamed) else "many"
    former = (path for path in moved_fields() if "." in path)
    return {**dict.fromkeys(former, "one"), **takes}


def _tables() -> Collection[str]:
    """The groups of a run's config whose keys depend on the model, the features or the task."""
    from monolith.config.fields import field_hints, mapping_member
    from monolith.runtime.config import RunConfig

    return [name for name, hint in field_hints(RunConfig).items() if mapping_member(hint)]


def _takes(hint: Any) -> str:
    from monolith.config.fields import is_collection, is_mapping, members

    kinds = members(hint)
    if any(is_collection(kind) or is_mapping(kind) for kind in kinds):
        return "many"
    return "truth" if bool in kinds else "one"


def _found(name: str, takes: Mapping[str, str]) -> str | None:
    """What follows a flag; None for a flag that is not one of the run's."""
    group, dot, leaf = name.rpartition(".")
    positive = f"{group}{dot}{leaf.removeprefix('no_')}"
    if name in takes:
        return takes[name]
    if dot and name.partition(".")[0] in _tables():
        return "one"  # a key of a table, such as model.dim
    if takes.get(positive) == "truth" or takes.get(name.removeprefix("no").lstrip("_")) == "truth":
        return "nothing"
    # A mistyped field of a known group is for the reader of the config, who knows the nearest.
    return "one" if dot and any(path.startswith(f"{name.partition('.')[0]}.") for path in takes) else None


def _is_value(word: str, takes: str, values: int) -> bool:
    """Whether a word belongs to the flag before it, which has so many values already."""
    if word.startswith("-") and not word[1:2].isdigit():
        return False
    if takes == "truth":
        return not values and word.lower() in _TRUTHS
    return takes == "many" or (takes == "one" and not values)


_FIELDS = {
    "tls_cert": "cert",
    "tls_key": "key",
    "tls_ca": "ca",
    "tls_server_name": "server_name",
    "token_file": "token_file",
    "follow_token_file": "follow_token_file",
    "predict_token_file": "predict_token_file",
}
"""Option -> the field of `security` that it sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityOptions:
    """Who may connect, and what to show to others; part of a command's own options, without a prefix."""

    tls_cert: Path | None = None
    """The certificate of this process, PEM. It needs --tls-key and --tls-ca; both ends then show one."""
    tls_key: Path | None = None
    """The private key of that certificate, PEM."""
    tls_ca: Path | None = None
    """The certificate authority that must have signed the certificates of the others, PEM."""
    tls_server_name: str | None = None
    """The name in the servers' certificates, where it is not the host they are reached by."""
    token_file: Path | None = None
    """A file with the token for everything, which the processes of a run share."""
    follow_token_file: Path | None = None
    """A file with the token for following a run, and for the rows of serving servers. By default derived from
    that of --token-file, or found in the model_dir that the served export was made from."""
    predict_token_file: Path | None = None
    """A file with the token for asking for predictions. By default derived from that of --token-file."""
    config: Path | None = None
    """A config file of the run, whose group security has the same settings; flags win over it."""
    insecure: bool = False
    """Listen without certificates or a token on an address that others can reach."""


def guard_of(
    options: SecurityOptions, bind: str, environ: Mapping[str, str], *, role: Role = "control"
) -> Guard:
    """Return what a listener on `bind` demands of callers in a role, and its process presents.

    Raises:
        ConfigError: Others can reach that address and nothing is demanded of them; or a file cannot be used.
    """
    from monolith.cluster.security import guard_listener

    security = run_config_of(options, environ).security
    return guard_listener(bind, security, role=role, insecure=options.insecure)


def security_of(options: SecurityOptions, environ: Mapping[str, str]) -> SecurityConfig:
    """Return what flags, the run's config and the environment say of certificates and tokens."""
    return run_config_of(options, environ).security


def limits_of(options: SecurityOptions, environ: Mapping[str, str]) -> Limits:
    """Return what one caller of a listener may ask for, by the run's config and the environment."""
    return run_config_of(options, environ).limits


def run_config_of(
    options: SecurityOptions, environ: Mapping[str, str], more: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the config of file and environment, with the flags for security, and `more` by path, over it."""
    from monolith.runtime.config_loading import load_run_config

    chosen = {
        f"security.{field}": getattr(options, name)
        for name, field in _FIELDS.items()
        if getattr(options, name) is not None
    }
    return load_run_config(file=options.config, environ=environ, code={**chosen, **(more or {})})
