"""The fields of a config, one by one: path, type, default, and the text written below each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Any

from monolith.config.hints import dataclass_members, describe, field_hints
from monolith.config.units import format_duration


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field that holds a value and no further fields."""

    path: str
    """Dotted."""
    hint: Any
    """Its type."""
    default: Any
    """What it is when nobody sets it; `dataclasses.MISSING` when somebody must."""
    owner: type
    """The class that has the field."""

    @property
    def doc(self) -> str:
        """The text below the field; empty where there is none, or no source to read it from."""
        return field_docs(self.owner).get(self.path.rpartition(".")[2], "")

    @property
    def type_text(self) -> str:
        """The type as a person would say it."""
        return describe(self.hint)

    @property
    def default_text(self) -> str:
        """The default as a person would write it; empty where there is none."""
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
    """What the field is when nobody sets it; `dataclasses.MISSING` when somebody must.

    Args:
        above: The default of the table that the field is in, which has one of its own for the field.
    """
    if dataclasses.is_dataclass(above) and hasattr(above, field.name):
        return getattr(above, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def default_text(value: Any) -> str:
    """A default as a person would write it; empty where there is none."""
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, timedelta):
        return format_duration(value)
    return value.name.lower() if isinstance(value, Enum) else str(value)


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The string below each field, over all bases, the nearest class winning.

    It stands in the source, which takes ten milliseconds to find and parse; but it stays as it is.
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
                docs[statement.target.id] = inspect.cleandoc(following.value.value)
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
        if line.startswith("        "):  # goes on with the one before
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
        here, hint = (*path, field.name), hints[field.name]
        fallback = default_of(field, default)
        inner = nested_class(hint, (*above, cls))
        if inner is None:
            yield ".".join(here), cls, hint, fallback
        else:
            yield from _walk(inner, here, (*above, cls), fallback)
