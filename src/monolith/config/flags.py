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

from monolith.config.fields import (
    dataclass_members,
    default_of,
    default_text,
    describe,
    field_docs,
    field_hints,
    is_collection,
    is_mapping,
    key_of,
    leaf_paths,
    mapping_member,
    mapping_types,
    members,
    nested_class,
)
from monolith.config.reading import TAG, nearest
from monolith.config.secret import looks_secret
from monolith.config.tree import Branch, Leaf, Moved, Node, former_path, grow, overlay, plant

_NOT_GIVEN = ("\0",)  # no shell can pass it
_Shadow = Any  # a dataclass made on the fly


def flag_name(path: str) -> str:
    """`table.use_gpu` as `--table.use-gpu`."""
    return "--" + path.replace("_", "-")


def _as_flag(word: str) -> str:
    """The flag in a word such as `--table.use_gpu=true`."""
    return word.partition("=")[0].replace("_", "-")


def variable_name(prefix: str, path: str) -> str:
    """`table.dim` as `MONOLITH_TABLE__DIM`."""
    return f"{prefix}_{path.replace('.', '__')}".upper()


def flags_tree(
    cls: type, args: Sequence[str], prog: str | None = None, old: Collection[str] = ()
) -> tuple[Node, list[str]]:
    """What `args` say about the fields of `cls`, and what is wrong with their names.

    `--help` prints and exits, as tyro does. A mistyped flag is compared with `old` names, too.
    """
    import tyro

    inside, args = _flags_in_tables(cls, args)
    explained = not {"-h", "--help"}.isdisjoint(args)
    named = None if explained else {_as_flag(word) for word in args if word.startswith("-")}
    shadow = _shadow(cls, tyro, (), dataclasses.MISSING, named)
    given, unknown = tyro.cli(shadow, args=args, prog=prog, return_unknown_args=True)
    tree: Node = inside
    known = set(leaf_paths(cls))
    for path, words in _given(given, ()):
        source = flag_name(".".join(path))
        if ".".join(path) in known:
            tree = overlay(tree, plant(path, Leaf(words, source, is_text=True)))
        else:  # --no-x turns x off
            positive = (*path[:-1], path[-1].removeprefix("no_"))
            tree = overlay(tree, plant(positive, Leaf(("false", *words), source, is_text=True)))
    return tree, _unknown_flags([*leaf_paths(cls), *old], unknown)


def _flags_in_tables(cls: type, args: Sequence[str]) -> tuple[Node, list[str]]:
    """What `args` say about keys of tables, and the other arguments.

    A table is a field whose keys are not known here: `--model.dim 8` is a key of `model`,
    `--features.price.scale log` one of the table of a feature. A list is JSON: `--model.hidden '[64, 32]'`.
    """
    tables = [name for name, hint in field_hints(cls).items() if mapping_member(hint)]
    tree: Node = Branch({}, "flags")
    rest: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, text = word.partition("=")
        path = flag.removeprefix("--").split(".")
        if not flag.startswith("--") or len(path) < 2 or path[0].replace("-", "_") not in tables:
            rest.append(word)
            continue
        # The name of a feature is the user's own and stays as it is; keys of a table have underscores.
        path = [path[0].replace("-", "_"), *path[1:-1], path[-1].replace("-", "_")]
        value = text if equals else next(words, "")
        tree = overlay(tree, plant(tuple(path), Leaf((value,), flag, is_text=True)))
    return tree, rest


def environment_tree(
    cls: type,
    environ: Mapping[str, str],
    prefix: str,
    *,
    ignore: Collection[str] = (),
    foreign: Mapping[str, str] | None = None,
    old: Collection[str] = (),
    moved: Moved | None = None,
) -> tuple[Node, list[str]]:
    """What the variables that begin with `prefix` say, and which of them no field answers to.

    Args:
        ignore: Variables that begin with `prefix` and are not config.
        foreign: Variables of others -> the path of the field that one sets. Ours win over them.
        old: Old names of fields, which stay in the tree as they are.
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
        if "." in former and former_path(former, moved or {}) is not None:
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
            if key_of(name).upper() == first and (found := _locate(inner, rest)):
                return (key_of(name), *found[0]), found[1]
    if len(classes) > 1 and first == TAG.upper() and not rest:
        return (TAG,), str
    mapping = mapping_member(hint)
    if mapping is not None and first and (found := _locate(mapping_types(mapping)[1], rest)):
        return (first.lower(), *found[0]), found[1]
    return None


def _shadow(
    cls: type,
    tyro: Any,
    above: tuple[tuple[str, type], ...],
    default: Any,
    named: Collection[str] | None,
) -> _Shadow:
    """A dataclass with the same nested names as `cls`, where every leaf takes any number of words.

    Args:
        above: The fields that lead here, each with the class that has it.
        named: Flags that were given; all else is left out, since each takes a millisecond to prepare. None
            has all of them, with the texts of the fields, which take longer to find than everything else.
    """
    hints, docs = field_hints(cls), field_docs(cls) if named is None else {}
    fields: list[tuple[str, Any, Any]] = []
    steps = [step for step, _ in above]

    def add(field_name: str, **explained: str) -> None:
        key = key_of(field_name)  # tyro takes the field's name unless it is given another one
        told = tyro.conf.arg(**explained, name=None if key == field_name else key)
        fields.append((field_name, Annotated[tuple[str, ...], told], dataclasses.field(default=_NOT_GIVEN)))

    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        hint = hints[field.name]
        key = key_of(field.name)
        here, flag = (*above, (key, cls)), flag_name(".".join([*steps, key]))
        inner = nested_class(hint, tuple(owner for _, owner in here))
        if inner is not None:
            if named is None or any(given.startswith(f"{flag}.") for given in named):
                nested = _shadow(inner, tyro, here, default_of(field, default), named)
                kind = nested if named is None else Annotated[nested, tyro.conf.arg(help="")]
                fields.append((field.name, kind, dataclasses.field(default_factory=nested)))
            continue
        if named is None or flag in named:
            shown = _default_hint(default_of(field, default))
            text = docs.get(key, "")
            add(field.name, metavar=_metavar(hint), help=text, help_behavior_hint=shown)
        off = f"no_{field.name}"
        if (
            (named is None or flag_name(".".join([*steps, off])) in named)
            and bool in members(hint)
            and off not in hints
        ):
            add(off, metavar="", help="Turns it off.", help_behavior_hint="")
    shadow = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    shadow.__doc__ = cls.__doc__
    return shadow


def _given(shadow: _Shadow, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    for field in dataclasses.fields(shadow):
        value = getattr(shadow, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, (*path, field.name))
        elif value != _NOT_GIVEN:
            yield (*path, key_of(field.name)), value


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
