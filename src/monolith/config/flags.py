"""Flags and environment variables: the config's fields under the names a shell can use.

`table.dim` is `--table.dim` and `MONOLITH_TABLE__DIM`. Both bring text, which is
typed later, together with all other sources, so that every mistake is reported at
once. tyro splits the command line, knows the names and prints the help.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, get_args

from monolith.config.fields import default_of, default_text, field_docs, leaf_paths, nested_class
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
from monolith.config.secret import looks_secret
from monolith.config.tree import Branch, Leaf, Node, grow, overlay, plant

_NOT_GIVEN = ("\0",)  # no shell can pass it
_Shadow = Any  # a dataclass made on the fly


def flag_name(path: str) -> str:
    """`table.use_gpu` as `--table.use-gpu`."""
    return "--" + path.replace("_", "-")


def variable_name(prefix: str, path: str) -> str:
    """`table.dim` as `MONOLITH_TABLE__DIM`."""
    return f"{prefix}_{path.replace('.', '__')}".upper()


def flags_tree(
    cls: type, args: Sequence[str], prog: str | None = None, old: Collection[str] = ()
) -> tuple[Node, list[str]]:
    """What `args` say about the fields of `cls`, and what is wrong with their names.

    `--help` prints and exits, as tyro does. `old` names are known, too, to whoever mistypes one.
    """
    import tyro

    explained = not {"-h", "--help"}.isdisjoint(args)
    shadow = _shadow(cls, tyro, (), dataclasses.MISSING, explained)
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
    return tree, _unknown_flags([*leaf_paths(cls), *old], unknown)


def environment_tree(
    cls: type,
    environ: Mapping[str, str],
    prefix: str,
    *,
    ignore: Collection[str] = (),
    foreign: Mapping[str, str] | None = None,
    old: Collection[str] = (),
    moved: Collection[str] = (),
) -> tuple[Node, list[str]]:
    """What the variables that begin with `prefix` say, and which of them no field answers to.

    Args:
        ignore: Variables that begin with `prefix` and are not config.
        foreign: Variables of others -> the path of the field that one sets. Ours win over them.
        old: Old names of fields, which stand in the tree as they are.
        moved: Former dotted paths of fields, which do, too.
    """
    tree: Node = Branch({}, "the environment")
    problems = []
    for name, field in (foreign or {}).items():
        if environ.get(name):
            tree = overlay(tree, plant(tuple(field.split(".")), Leaf(environ[name], name, is_text=True)))
    ours = [name for name in environ if name.startswith(f"{prefix}_") and name not in ignore]
    for name in sorted(ours, key=lambda each: (each.count("__"), each)):
        ending = name[len(prefix) + 1 :]
        if ending.lower() in old:
            tree = overlay(tree, plant((ending.lower(),), Leaf(environ[name], name, is_text=True)))
            continue
        former = ending.lower().replace("__", ".")
        if "." in former and former in moved:
            tree = overlay(tree, plant(tuple(former.split(".")), Leaf(environ[name], name, is_text=True)))
            continue
        found = _locate(cls, ending.split("__"))
        if found is None:
            known = [variable_name(prefix, path) for path in leaf_paths(cls)]
            near = nearest(name, known)
            advice = f"; the nearest known one is {near}" if near else ""
            problems.append(f"unknown environment variable {name}{advice}")
            continue
        path, hint = found
        tree = overlay(tree, plant(path, _variable(hint, name, environ[name])))
    return tree, problems


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


def _shadow(cls: type, tyro: Any, above: tuple[type, ...], default: Any, explained: bool) -> _Shadow:
    """A dataclass with the same nested names as `cls`, where every leaf takes any number of words.

    Args:
        explained: With the texts of the fields, which take longer to find than everything else.
    """
    hints, docs = field_hints(cls), field_docs(cls) if explained else {}
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        hint = hints[field.name]
        inner = nested_class(hint, (*above, cls))
        if inner is not None:
            nested = _shadow(inner, tyro, (*above, cls), default_of(field, default), explained)
            kind = nested if explained else Annotated[nested, tyro.conf.arg(help="")]
            fields.append((field.name, kind, dataclasses.field(default_factory=nested)))
            continue
        told = tyro.conf.arg(
            metavar=_metavar(hint),
            help=docs.get(field.name, ""),
            help_behavior_hint=_default_hint(default_of(field, default)),
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


def _unknown_flags(known: Sequence[str], words: Sequence[str]) -> list[str]:
    problems = []
    after_flag = False
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            near = nearest(flag.replace("_", "-"), map(flag_name, known))
            problems.append(f"unknown flag {flag}" + (f"; the nearest known one is {near}" if near else ""))
        elif not after_flag:
            shown = "that is not shown" if looks_secret(word) else repr(word)
            problems.append(f"unexpected argument {shown}; values follow a flag, as in --name value")
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


def _default_hint(default: Any) -> str:
    return "(required)" if default is dataclasses.MISSING else f"(default: {default_text(default)})"
