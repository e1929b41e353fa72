"""Flags and environment variables: the config's fields under the names a shell can use.

`table.dim` is `--table.dim` and `MONOLITH_TABLE__DIM`. Both bring text, which is
typed later, together with all other sources, so that every mistake is reported at
once. tyro splits the command line, knows the names and prints the help.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, get_args

from monolith.config.hints import (
    dataclass_members,
    describe,
    field_hints,
    is_collection,
    is_mapping,
    mapping_member,
    mapping_types,
    members,
)
from monolith.config.reading import TAG, nearest
from monolith.config.tree import Branch, Leaf, Node, grow, overlay, plant
from monolith.config.units import format_duration

_NOT_GIVEN = ("\0",)  # no shell can pass it
_Shadow = Any  # a dataclass made on the fly


def flag_name(path: str) -> str:
    """`table.use_gpu` as `--table.use-gpu`."""
    return "--" + path.replace("_", "-")


def variable_name(prefix: str, path: str) -> str:
    """`table.dim` as `MONOLITH_TABLE__DIM`."""
    return f"{prefix}_{path.replace('.', '__')}".upper()


def flags_tree(cls: type, args: Sequence[str], prog: str | None = None) -> tuple[Node, list[str]]:
    """What `args` say about the fields of `cls`, and what is wrong with their names.

    `--help` prints and exits, as tyro does.
    """
    import tyro

    shadow = _shadow(cls, tyro, ())
    given, unknown = tyro.cli(shadow, args=args, prog=prog, return_unknown_args=True)
    tree: Node = Branch({}, "flags")
    known = set(leaf_paths(cls))
    for path, words in _given(given, ()):
        source = flag_name(".".join(path))
        if ".".join(path) in known:
            tree = overlay(tree, plant(path, Leaf(words, source, is_text=True)))
        else:  # --no-x turns x off
            positive = (*path[:-1], path[-1].removeprefix("no_"))
            tree = overlay(tree, plant(positive, Leaf(("false", *words), source, is_text=True)))
    return tree, _unknown_flags(cls, unknown)


def environment_tree(
    cls: type, environ: Mapping[str, str], prefix: str, ignore: Collection[str]
) -> tuple[Node, list[str]]:
    """What the variables that begin with `prefix` say, and which of them no field answers to."""
    tree: Node = Branch({}, "the environment")
    problems = []
    ours = [name for name in environ if name.startswith(f"{prefix}_") and name not in ignore]
    for name in sorted(ours, key=lambda each: (each.count("__"), each)):
        found = _locate(cls, name[len(prefix) + 1 :].split("__"))
        if found is None:
            known = [variable_name(prefix, path) for path in leaf_paths(cls)]
            near = nearest(name, known)
            advice = f"; the nearest known one is {near}" if near else ""
            problems.append(f"unknown environment variable {name}{advice}")
            continue
        path, hint = found
        tree = overlay(tree, plant(path, _variable(hint, name, environ[name])))
    return tree, problems


def leaf_paths(cls: type) -> Iterator[str]:
    """Dotted path of every field below `cls` that is no table of known fields itself."""
    for path, _, _ in _fields(cls, ()):
        yield ".".join(path)


def _variable(hint: Any, name: str, text: str) -> Node:
    if (dataclass_members(hint) or mapping_member(hint)) and text.lstrip().startswith("{"):
        try:
            return grow(json.loads(text), name)
        except ValueError:
            pass  # left as text, which the reader will refuse with its place
    return Leaf(text, name, is_text=True)


def _locate(hint: Any, segments: list[str]) -> tuple[tuple[str, ...], Any] | None:
    """The path and type that upper-case `segments` mean below `hint`."""
    if not segments:
        return (), hint
    first, rest = segments[0], segments[1:]
    classes = dataclass_members(hint)
    for cls in classes:
        for name, inner in field_hints(cls).items():
            if name.upper() == first and (found := _locate(inner, rest)):
                return (name, *found[0]), found[1]
    if len(classes) > 1 and first == TAG.upper() and not rest:
        return (TAG,), str
    mapping = mapping_member(hint)
    if mapping is not None and first and (found := _locate(mapping_types(mapping)[1], rest)):
        return (first.lower(), *found[0]), found[1]
    return None


def _fields(
    cls: type, path: tuple[str, ...], above: tuple[type, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dataclasses.Field[Any], Any]]:
    hints = field_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        inner = _nested(hints[field.name], (*above, cls))
        if inner is None:
            yield (*path, field.name), field, hints[field.name]
        else:
            yield from _fields(inner, (*path, field.name), (*above, cls))


def _nested(hint: Any, above: tuple[type, ...]) -> type | None:
    """The dataclass whose fields get names of their own; one of several, or one inside itself, does not."""
    classes = dataclass_members(hint)
    return classes[0] if len(classes) == 1 and classes[0] not in above else None


def _shadow(cls: type, tyro: Any, above: tuple[type, ...]) -> _Shadow:
    """A dataclass with the same nested names as `cls`, where every leaf takes any number of words."""
    hints, docs = field_hints(cls), _field_docs(cls)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        hint = hints[field.name]
        inner = _nested(hint, (*above, cls))
        if inner is not None:
            nested = _shadow(inner, tyro, (*above, cls))
            fields.append((field.name, nested, dataclasses.field(default_factory=nested)))
            continue
        told = tyro.conf.arg(
            metavar=_metavar(hint), help=docs.get(field.name, ""), help_behavior_hint=_default_hint(field)
        )
        fields.append((field.name, Annotated[tuple[str, ...], told], dataclasses.field(default=_NOT_GIVEN)))
        if bool in members(hint) and f"no_{field.name}" not in hints:
            off = tyro.conf.arg(metavar="", help="Turns it off.", help_behavior_hint="")
            negation = (f"no_{field.name}", Annotated[tuple[str, ...], off])
            fields.append((*negation, dataclasses.field(default=_NOT_GIVEN)))
    shadow = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    shadow.__doc__ = cls.__doc__
    return shadow


def _given(shadow: _Shadow, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    for field in dataclasses.fields(shadow):
        value = getattr(shadow, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, (*path, field.name))
        elif value != _NOT_GIVEN:
            yield (*path, field.name), value


def _unknown_flags(cls: type, words: Sequence[str]) -> list[str]:
    problems = []
    after_flag = False
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            near = nearest(flag.replace("_", "-"), map(flag_name, leaf_paths(cls)))
            problems.append(f"unknown flag {flag}" + (f"; the nearest known one is {near}" if near else ""))
        elif not after_flag:
            problems.append(f"unexpected argument {word!r}; values follow a flag, as in --name value")
        after_flag = True  # what follows an unknown flag is its values
    return problems


def _metavar(hint: Any) -> str:
    names = {_one_metavar(member): None for member in members(hint)}
    return "|".join(names)


def _one_metavar(hint: Any) -> str:
    if hint is bool:
        return "[BOOL]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "{" + ",".join(member.name.lower() for member in hint) + "}"
    if hint is timedelta:
        return "DURATION"
    if isinstance(hint, type) and issubclass(hint, PurePath):
        return "PATH"
    if dataclass_members(hint):
        return "JSON"
    if is_mapping(hint):
        return "JSON" if dataclass_members(mapping_types(hint)[1]) else "KEY=VALUE..."
    if is_collection(hint):
        args = get_args(hint)
        return f"{_metavar(args[0])}..." if args else "VALUE..."
    if describe(hint).startswith("one of "):
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    return describe(hint).upper()


def _default_hint(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "(required)"
    if isinstance(value, timedelta):
        value = format_duration(value)
    elif isinstance(value, Enum):
        value = value.name.lower()
    return f"(default: {value})"


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field, over all bases; nothing where there is no source to read."""
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
