"""The fields of a config: their types, defaults and texts, and how to say a type to a person.

A config is a frozen dataclass. `field_hints` reads its annotations, `describe` turns one into words for an
error or a help text, and `describe_fields` lists every field below a class with its dotted path:

    [field.path for field in describe_fields(RunConfig)]   # ["job.task", ..., "train.save.steps", ...]
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import keyword
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from monolith.config.secret import Secret
from monolith.config.text import format_duration
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
    return dict(_field_hints(cls))


@cache  # annotations are texts, which are compiled each time
def _field_hints(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as cause:
        raise ConfigError(
            f"cannot read the annotations of {cls.__qualname__}: {cause}. Import what they name at run "
            "time, not under TYPE_CHECKING, and define the class at the top of its module."
        ) from cause
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def key_of(name: str) -> str:
    """The key of a field in files and flags: its name, or the Python word that it stands for (`with_`)."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


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


def check_fields(config: Any) -> None:
    """Refuse values that are not of the types of a config's fields, which a file could not have given either.

    For configs that people build in code, where Python takes any value. Lists become tuples.

    Raises:
        ConfigError: Names the first field, what it takes and what it got.
    """
    for name, hint in field_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, list) and not fits(value, hint):
            value = tuple(value)
            object.__setattr__(config, name, value)
        if not fits(value, hint):
            raise ConfigError(
                f"{type(config).__name__}: {key_of(name)} must be {describe(hint)}, got {value!r:.80}"
            )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type. A whole number is a float, too; a bool is no number."""
    return any(_fits(value, one) for one in members(hint))


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if not isinstance(origin, type) or hint is Any:
        return True
    if not isinstance(value, origin):
        return False
    if args and isinstance(value, Mapping):
        return all(fits(key, args[0]) and fits(one, args[1]) for key, one in value.items())
    each = args and is_collection(hint) and (origin is not tuple or args[-1] is Ellipsis)
    if each and isinstance(value, Collection):
        return all(fits(one, args[0]) for one in value)
    return True


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field that holds a value and no further fields."""

    path: str
    """Dotted."""
    hint: Any
    """Its type."""
    default: Any
    """The value if no source sets one; `dataclasses.MISSING` if a source must."""
    owner: type
    """The class that has the field."""

    @property
    def doc(self) -> str:
        """The text below the field; empty if there is none, or no source code to read it from."""
        return field_docs(self.owner).get(self.path.rpartition(".")[2], "")

    @property
    def type_text(self) -> str:
        """The type as a person would say it."""
        return describe(self.hint)

    @property
    def default_text(self) -> str:
        """The default as a person would write it; empty if there is none."""
        return default_text(self.default)


def describe_fields(cls: type) -> list[FieldInfo]:
    """Every field below `cls` that is no table of known fields itself, in order."""
    return [
        FieldInfo(path, hint, default, owner)
        for path, owner, hint, default in _walk(cls, (), (), dataclasses.MISSING)
    ]


def leaf_paths(cls: type) -> Iterator[str]:
    """The dotted path of each of them."""
    for path, _, _, _ in _walk(cls, (), (), dataclasses.MISSING):
        yield path


def nested_class(hint: Any, above: tuple[type, ...]) -> type | None:
    """The dataclass whose fields get names of their own; one of several, or one inside itself, does not."""
    classes = dataclass_members(hint)
    return classes[0] if len(classes) == 1 and classes[0] not in above else None


def default_of(field: dataclasses.Field[Any], above: Any = None) -> Any:
    """Return the value of a field that no source sets; `dataclasses.MISSING` if a source must.

    Args:
        above: The default of the table that the field is in, which has one of its own for the field.
    """
    if dataclasses.is_dataclass(above) and hasattr(above, field.name):
        return getattr(above, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def default_text(value: Any) -> str:
    """Return a default as a person would write it; empty if there is none."""
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, timedelta):
        return format_duration(value)
    return value.name.lower() if isinstance(value, Enum) else str(value)


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The string below each field by its key, over all bases, the nearest class winning.

    It is read from the source code, which takes ten milliseconds to find and parse, so it is cached.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            module = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        [definition] = module.body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                docs[key_of(statement.target.id)] = inspect.cleandoc(following.value.value)
    return docs


def argument_docs(cls: object) -> dict[str, str]:
    """What the docstring of a class or a function says of each argument, below "Args:"; of one that it lists
    with others, what it says of all."""
    _, _, text = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        said = line.strip()
        if not said or not line.startswith("    "):
            break
        if line.startswith("        "):  # continues the argument before
            docs |= {name: f"{docs[name]} {said}" for name in names}
            continue
        head, _, first = said.partition(": ")
        names = [name.strip() for name in head.split(",")]
        docs |= dict.fromkeys(names, first)
    return docs


def _walk(
    cls: type, path: tuple[str, ...], above: tuple[type, ...], default: Any
) -> Iterator[tuple[str, type, Any, Any]]:
    """Path, class, type and default of each."""
    hints = field_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        here, hint = (*path, key_of(field.name)), hints[field.name]
        fallback = default_of(field, default)
        inner = nested_class(hint, (*above, cls))
        if inner is None:
            yield ".".join(here), cls, hint, fallback
        else:
            yield from _walk(inner, here, (*above, cls), fallback)
