"""Values before they are typed: a tree by key that remembers each value's source, and old names in it.

Each source (a file, the environment, flags, code) becomes one tree. In each of them, old names of fields
are replaced by new ones. Then the trees are laid over each other: the later source wins, key by key. Only
the result is turned into a config, so that a config is checked once, as a whole.

An old name has no dots. If it counted in another unit, or meant the opposite, a function converts its
value. A name without effect is accepted with a warning that says why; one that asks for something
impossible is an error, unless its value asks for nothing. A field may also have moved within the config:
its former path is read, with a warning that names the new one, or is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from monolith.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value."""

    value: object
    """As the source has it. From flags a tuple of words, which may be empty."""
    source: str
    """For a person: a file's path, a variable's name, a flag."""
    is_text: bool = False
    """The source knows only text, so "8" may mean a number."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Values by key."""

    children: dict[str, Node]
    source: str


Node = Leaf | Branch


def grow(value: object, source: str) -> Node:
    """The tree of plain data. Lists stay leaves: they are replaced, never merged."""
    if isinstance(value, Mapping):
        return Branch({str(key): grow(item, source) for key, item in value.items()}, source)
    return Leaf(value, source)


def plant(path: tuple[str, ...], node: Node) -> Node:
    """`node` at the end of `path` and nothing else."""
    for key in reversed(path):
        node = Branch({key: node}, node.source)
    return node


def overlay(lower: Node, higher: Node) -> Node:
    """Both, `higher` winning wherever they disagree."""
    if not (isinstance(lower, Branch) and isinstance(higher, Branch)):
        return higher
    children = dict(lower.children)
    for key, node in higher.children.items():
        children[key] = overlay(children[key], node) if key in children else node
    return Branch(children, higher.source)


def find(node: Node, path: tuple[str, ...]) -> Node | None:
    """Return the node at the end of `path`; None if there is none."""
    for key in path:
        child = node.children.get(key) if isinstance(node, Branch) else None
        if child is None:
            return None
        node = child
    return node


def cut(node: Node, path: tuple[str, ...]) -> Node:
    """Return `node` without the node at the end of `path`."""
    if not path or not isinstance(node, Branch) or path[0] not in node.children:
        return node
    rest = {key: child for key, child in node.children.items() if key != path[0]}
    if len(path) > 1:
        rest[path[0]] = cut(node.children[path[0]], path[1:])
    return Branch(rest, node.source)


@dataclass(frozen=True, slots=True)
class Renamed:
    """An old name of a field."""

    path: str
    """Dotted path of the field."""
    convert: Callable[[object], object] | None = None
    """From the old value to the new; it gets text if the source knows only text. May raise ConfigError."""
    beside_table: bool = False
    """Whether there is a table of that name now, so that only a plain value is meant by the old one."""
    off_is_nothing: bool = False
    """Whether the old name was one of two switches for the same field, so that turned off it says nothing."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The name of a field that is gone."""

    reason: str
    """Why nothing is lost, to follow "ignored: "."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The name of a field for what cannot be had: to ask for it is an error."""

    reason: str
    """Why it cannot be had, and what to do instead."""
    default: object = None
    """The value that asks for nothing, as do an empty text or list and, unless the default is True, False and
    0."""


Aliases = Mapping[str, Renamed | Dropped | Unsupported]
Moved = Mapping[str, str | Renamed | Dropped | Unsupported]
"""The former dotted path of a field or table -> Renamed if it is still read; a text with the new path, for an
error that names it; or the reason why there is no such field."""


def rename(tree: Node, aliases: Aliases, warn: Callable[[str], None]) -> tuple[Node, list[str]]:
    """One source's tree with new names for old, and what is wrong with the old ones."""
    if not isinstance(tree, Branch) or aliases.keys().isdisjoint(tree.children):
        return tree, []
    meant = {key: alias for key, alias in aliases.items() if not _is_table(tree.children.get(key), alias)}
    rest = {key: child for key, child in tree.children.items() if key not in meant}
    result: Node = Branch(rest, tree.source)
    problems: list[str] = []
    for old, child in tree.children.items():
        alias = meant.get(old)
        if isinstance(alias, Dropped):
            warn(f"{old} (from {child.source}) is ignored: {alias.reason}")
        elif isinstance(alias, Unsupported):
            if _asks_for_something(child, alias.default):
                problems.append(f"{old} (from {child.source}): {alias.reason}")
        elif alias is not None:
            if alias.off_is_nothing and not _asks_for_something(child, None):
                continue
            path = tuple(alias.path.split("."))
            try:
                converted = _converted(child, alias)
            except ConfigError as cause:
                problems.append(f"{old} (from {child.source}): {cause}")
                continue
            found = find(result, path)
            if found is None:
                result = overlay(result, plant(path, converted))
            elif alias.convert is None or not _is_same(found, converted):  # two switches may say the same
                problems.append(
                    f"{alias.path} (from {child.source}): given twice, also by the old name {old}"
                )
    return result, problems


def relocate(
    tree: Node, moved: Moved, aliases: Aliases, warn: Callable[[str], None]
) -> tuple[Node, list[str]]:
    """Return one source's tree with moved fields at their new paths, and the problems of paths that have no
    new one.

    A former path that is also an old name counts as that, unless the source has other former paths, too.
    """
    found = {path: (*former, leaf) for path, leaf in _leaves(tree) if (former := former_path(path, moved))}
    if found.keys() <= aliases.keys():
        return tree, []
    problems = []
    for path, (known, now, leaf) in found.items():
        tree = _without(tree, tuple(path.split(".")))
        if isinstance(now, str):
            problems.append(f"{path} is {now} (from {leaf.source})")
        elif not isinstance(now, Renamed):
            problems.append(f"{path} is gone (from {leaf.source}): {now.reason}")
        elif find(tree, new := tuple((now.path + path.removeprefix(known)).split("."))) is not None:
            problems.append(f"{'.'.join(new)} (from {leaf.source}): given twice, also by its old path {path}")
        else:
            warn(f"{path} (from {leaf.source}) is now {'.'.join(new)}")
            tree = overlay(tree, plant(new, leaf))
    return tree, problems


def former_path(path: str, moved: Moved) -> tuple[str, str | Renamed | Dropped | Unsupported] | None:
    """Return the key of `moved` that is `path` or a table above it, with its value; None for other paths."""
    known = path
    while known:
        if known in moved:
            return known, moved[known]
        known = known.rpartition(".")[0]
    return None


def _without(tree: Node, path: tuple[str, ...]) -> Node:
    """The tree without a value, and without tables that are then empty."""
    tree = cut(tree, path)
    above = find(tree, path[:-1])
    return (
        _without(tree, path[:-1]) if isinstance(above, Branch) and path[1:] and not above.children else tree
    )


def _leaves(node: Node, above: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the dotted path of each value, and the value."""
    if isinstance(node, Leaf):
        yield above, node
        return
    for key, child in node.children.items():
        yield from _leaves(child, f"{above}.{key}" if above else key)


def _is_table(node: Node | None, alias: Renamed | Dropped | Unsupported) -> bool:
    """Whether a value is for the table that has the same name as an old name."""
    if not isinstance(alias, Renamed) or not alias.beside_table or node is None:
        return False
    return isinstance(node, Branch) or (node.is_text and is_table_text(node.value))


def is_table_text(value: object) -> bool:
    """Whether text, or the words of a flag, are a table: key=value, or JSON."""
    words = value if isinstance(value, tuple) else (value,)
    return any(isinstance(word, str) and ("=" in word or word.lstrip().startswith("{")) for word in words)


def _is_same(one: Node, other: Node) -> bool:
    return isinstance(one, Leaf) and isinstance(other, Leaf) and one.value == other.value


def _asks_for_something(node: Node, default: object) -> bool:
    if isinstance(node, Branch):
        return bool(node.children)
    value = node.value
    if isinstance(value, tuple) and node.is_text:
        value = " ".join(value) if value else "true"  # a bare --flag
    text = str(value).strip().lower()
    off, on = ("0", "0.0", "false", "no", "off"), ("1", "1.0", "true", "yes", "on")
    return text not in ("", "()", "[]", "none", str(default).lower(), *(on if default is True else off))


def old_flags(args: Sequence[str], aliases: Aliases, moved: Moved | None = None) -> tuple[Node, list[str]]:
    """What `args` say by old names (`--num_ps 2`, `--num-ps=2`, `--nois_local`), and the arguments left.

    Flags of fields that have moved are taken, too: see `relocate`.
    """
    tree: Node = Branch({}, "flags")
    rest: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        off = name.removeprefix("no").lstrip("_")
        was_moved = "." in name and former_path(name, moved or {}) is not None
        if not was_moved and name not in aliases and (not name.startswith("no") or off not in aliases):
            rest.append(word)
            continue
        words = [text] if equals else []
        while not equals and position < len(args) and not _is_flag(args[position]):
            words.append(args[position])
            position += 1
        if name in aliases or was_moved:
            leaf = Leaf(tuple(words), flag, is_text=True)
        else:
            name, leaf = off, Leaf(("false", *words), flag, is_text=True)
        tree = overlay(tree, plant(tuple(name.split(".")), leaf))
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
