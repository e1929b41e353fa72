"""Values of flags, checked before they are parsed, so that a wrong one is answered in plain words."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal

from monolith.errors import ConfigError

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
