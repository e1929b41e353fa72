"""Old names of fields: still read, in files, variables, flags and code, and put where the fields are now.

An old name has no dots. Where it counted in another unit, or said the opposite, a function turns its
value into what the field takes. A name whose field is gone is accepted with a warning that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from monolith.config.tree import Branch, Leaf, Node, find, grow, overlay, plant
from monolith.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Renamed:
    """An old name of a field."""

    path: str
    """Dotted path of the field."""
    convert: Callable[[object], object] | None = None
    """From the old value to the new; takes text where the source knows only text. May raise ConfigError."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The name of a field that is gone."""

    reason: str
    """Why nothing is lost, to follow "ignored: "."""


Aliases = Mapping[str, Renamed | Dropped]


def rename(tree: Node, aliases: Aliases, warn: Callable[[str], None]) -> tuple[Node, list[str]]:
    """One source's tree with new names for old, and what is wrong with the old ones."""
    if not isinstance(tree, Branch) or aliases.keys().isdisjoint(tree.children):
        return tree, []
    rest = {key: child for key, child in tree.children.items() if key not in aliases}
    result: Node = Branch(rest, tree.source)
    problems: list[str] = []
    for old, child in tree.children.items():
        alias = aliases.get(old)
        if isinstance(alias, Dropped):
            warn(f"{old} (from {child.source}) is ignored: {alias.reason}")
        elif alias is not None:
            path = tuple(alias.path.split("."))
            if find(result, path) is not None:
                problems.append(
                    f"{alias.path} (from {child.source}): given twice, also by the old name {old}"
                )
                continue
            try:
                result = overlay(result, plant(path, _converted(child, alias)))
            except ConfigError as cause:
                problems.append(f"{old} (from {child.source}): {cause}")
    return result, problems


def old_flags(args: Sequence[str], aliases: Aliases) -> tuple[Node, list[str]]:
    """What `args` say by old names (`--num_ps 2`, `--num-ps=2`, `--nois_local`), and the arguments left."""
    tree: Node = Branch({}, "flags")
    rest: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        off = name.removeprefix("no").lstrip("_")
        if name not in aliases and (not name.startswith("no") or off not in aliases):
            rest.append(word)
            continue
        words = [text] if equals else []
        while not equals and position < len(args) and not _is_flag(args[position]):
            words.append(args[position])
            position += 1
        if name in aliases:
            leaf = Leaf(tuple(words), flag, is_text=True)
        else:
            name, leaf = off, Leaf(("false", *words), flag, is_text=True)
        tree = overlay(tree, plant((name,), leaf))
    return tree, rest


def _is_flag(word: str) -> bool:
    """Whether a word names a flag; "-1" is a value."""
    return word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit() and len(word) > 1)


def _converted(node: Node, alias: Renamed) -> Node:
    if alias.convert is None or not isinstance(node, Leaf):
        return node
    value = node.value
    if node.is_text and isinstance(value, tuple):
        if len(value) > 1:
            return node  # a list, or too much; the reader knows which
        value = value[0] if value else "true"  # a bare --flag
    converted = alias.convert(value)
    grown = grow(converted, node.source)
    return (
        replace(grown, is_text=node.is_text and isinstance(converted, str))
        if isinstance(grown, Leaf)
        else grown
    )
