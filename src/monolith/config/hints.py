"""What a field's annotation says: its parts, and how to say it to a person."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from monolith.config.secret import Secret
from monolith.errors import ConfigError

NONE_TYPE = type(None)


def bare(hint: Any) -> Any:
    """`hint` without `Annotated`, `NewType` and alias wrappers."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type X = ...`, from Python 3.12 on
            hint = hint.__value__
        else:
            return hint


def members(hint: Any) -> list[Any]:
    """What a union offers, flat, None included; for any other hint, itself."""
    hint = bare(hint)
    if get_origin(hint) in {Union, types.UnionType}:
        return [inner for arg in get_args(hint) for inner in members(arg)]
    return [hint]


def allows_none(hint: Any) -> bool:
    """Whether None is a value of `hint`."""
    return any(member is NONE_TYPE or member is Any or member is object for member in members(hint))


def is_dataclass_type(hint: Any) -> bool:
    """Whether `hint` is a dataclass, and not an instance of one."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def dataclass_members(hint: Any) -> list[type]:
    """The dataclasses among `members(hint)`."""
    return [member for member in members(hint) if is_dataclass_type(member)]


def mapping_member(hint: Any) -> Any | None:
    """The dict or Mapping among `members(hint)`."""
    return next((member for member in members(hint) if is_mapping(member)), None)


def is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def is_collection(hint: Any) -> bool:
    """Whether `hint` is a list, tuple, set or the like."""
    origin = get_origin(hint) or hint
    return (
        isinstance(origin, type)
        and issubclass(origin, Collection)
        and not issubclass(origin, (str, bytes, Mapping, Enum))
    )


def mapping_types(hint: Any) -> tuple[Any, Any]:
    """Types of keys and values of a mapping hint."""
    args = get_args(hint)
    return (args[0], args[1]) if len(args) == 2 else (str, Any)


def item_types(hint: Any, count: int) -> list[Any] | None:
    """The type of each of `count` items of a collection hint; None when there must be another number."""
    args = get_args(hint)
    if (get_origin(hint) or hint) is not tuple:
        return [args[0] if args else Any] * count
    if not args:
        return [Any] * count
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * count
    if args == ((),):  # tuple[()]
        args = ()
    return list(args) if len(args) == count else None


def field_hints(cls: type) -> dict[str, Any]:
    """Each field the constructor takes -> its type, in order.

    Raises:
        ConfigError: An annotation names what its module does not have at run time.
    """
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as cause:
        raise ConfigError(
            f"cannot read the annotations of {cls.__qualname__}: {cause}. Import what they name at run "
            "time, not under TYPE_CHECKING, and define the class at the top of its module."
        ) from cause
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def describe(hint: Any) -> str:
    """`hint` as a person would say it: "int or None", "one of 'adam', 'sgd'"."""
    offered = members(hint)
    if len(offered) > 1:
        return " or ".join(dict.fromkeys(map(describe, offered)))
    hint = offered[0]
    origin, args = get_origin(hint), get_args(hint)
    if hint is NONE_TYPE:
        return "None"
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if hint is timedelta:
        return 'duration (seconds or text such as "10m")'
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "path"
    if hint is Secret:
        return "secret text"
    if is_dataclass_type(hint):
        return f"table of {hint.__name__}"
    if args and is_mapping(hint):
        return f"table from {describe(args[0])} to {describe(args[1])}"
    if args and origin is tuple and args[-1] is not Ellipsis:
        return f"list of {len(args)} ({', '.join(map(describe, args))})"
    if args and is_collection(hint):
        return f"list of {describe(args[0])}"
    return getattr(hint, "__name__", str(hint))
