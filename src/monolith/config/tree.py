"""Values before they are typed: a tree that remembers where each value came from.

Each source (a file, the environment, flags, code) becomes one tree. Laid over each
other, the later wins, key by key; only the result is turned into a config, so
that a config is checked once, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    """What stands at the end of `path`."""
    for key in path:
        child = node.children.get(key) if isinstance(node, Branch) else None
        if child is None:
            return None
        node = child
    return node


def cut(node: Node, path: tuple[str, ...]) -> Node:
    """`node` without what stands at the end of `path`."""
    if not path or not isinstance(node, Branch) or path[0] not in node.children:
        return node
    rest = {key: child for key, child in node.children.items() if key != path[0]}
    if len(path) > 1:
        rest[path[0]] = cut(node.children[path[0]], path[1:])
    return Branch(rest, node.source)
