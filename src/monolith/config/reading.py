"""From untyped values to a typed config, strictly, with every problem and not only the first."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

from monolith.config.fields import (
    NONE_TYPE,
    allows_none,
    bare,
    dataclass_members,
    default_of,
    describe,
    field_hints,
    is_collection,
    is_dataclass_type,
    is_mapping,
    item_types,
    key_of,
    mapping_types,
    members,
)
from monolith.config.problems import ConfigProblemsError, Problem
from monolith.config.secret import MASK, Secret, is_secret_name, looks_secret
from monolith.config.text import NONE, parse_bytes, parse_duration
from monolith.config.tree import Branch, Leaf, Node, find, grow
from monolith.errors import ConfigError

TAG = "type"
"""In a table that may be one of several dataclasses, the key that holds the class's name."""

_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


class _Invalid(Enum):
    """Marks a value that could not be read; its problem is already noted."""

    VALUE = 0


_INVALID = _Invalid.VALUE


class Reader:
    """Reads trees and collects what is wrong with them."""

    def __init__(
        self, how_to_set: Callable[[str], str] | None = None, elsewhere: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            how_to_set: Says, for the dotted path of a missing value, how to give it.
            elsewhere: Names that are not keys of the table they may be found in -> the dotted path to use.
        """
        self.problems: list[Problem] = []
        """Each with full paths, and its text a whole sentence."""
        self.absent: list[str] = []
        """Paths of required values that no source sets."""
        self.cause: Exception | None = None
        self._private: set[str] = set()
        """Tables with a secret in them, which may have been given for its neighbour."""
        self._how_to_set = how_to_set or (lambda path: f"set {path}")
        self._elsewhere = elsewhere or {}

    def read(self, hint: Any, node: Node, path: str, *, default: Any = None, is_size: bool = False) -> Any:
        """The value of type `hint` that `node` holds; meaningless once there are problems.

        Args:
            path: Dotted, for messages.
            default: Where this is a dataclass, has the fields that `node` leaves out.
            is_size: Whether an int counts bytes and may be written "64GiB".
        """
        hint = bare(hint)
        if isinstance(node, Leaf) and allows_none(hint) and _says_none(node):
            return None
        if hint is Any or hint is object:
            return _unwrapped(node)
        offered = [member for member in members(hint) if member is not NONE_TYPE]
        if len(offered) > 1:
            return self._read_union(offered, hint, node, path, default=default, is_size=is_size)
        if not offered:
            return self._mismatch(hint, node, path)
        return self._read_one(offered[0], node, path, default=default, is_size=is_size)

    def _read_one(self, hint: Any, node: Node, path: str, *, default: Any, is_size: bool) -> Any:
        if is_dataclass_type(hint):
            return self._read_dataclass(hint, node, path, default)
        if is_mapping(hint):
            return self._read_mapping(hint, node, path, is_size=is_size)
        if isinstance(node, Branch):
            return self._mismatch(hint, node, path)
        if is_collection(hint):
            return self._read_collection(hint, node, path, is_size=is_size)
        if node.is_text and isinstance(node.value, tuple):
            words = node.value
            if not words and hint is bool:
                words = ("true",)  # a bare --flag
            if len(words) != 1:
                expected = describe(hint)
                return self._note(path, node, f"takes one value, {expected}, got {len(words) or 'none'}")
            node = dataclasses.replace(node, value=words[0])
        try:
            return _scalar(hint, node, is_size=is_size)
        except ConfigError as cause:
            return self._note(path, node, str(cause))
        except (ValueError, TypeError, OverflowError):
            return self._mismatch(hint, node, path)

    def _read_dataclass(self, cls: type, node: Node, path: str, default: Any = None) -> Any:
        if isinstance(node, Leaf) and isinstance(node.value, cls):
            return node.value
        table = self._parsed(node, path)
        if not isinstance(table, Branch):
            return _INVALID if table is None else self._mismatch(cls, table, path)
        hints = field_hints(cls)
        if _has_secret(cls):
            self._private.add(path)
        keys = {name: key_of(name) for name in hints}
        for key, child in table.children.items():
            if key not in keys.values():
                here, advice = _below(path, key), self._advice(key, keys.values(), path)
                self.problems.append(Problem((here,), f"unknown key {here} (from {child.source}); {advice}"))
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name not in hints:
                continue
            key, hint = keys[field.name], hints[field.name]
            here = _below(path, key)
            fallback = default_of(field, default if type(default) is cls else None)
            if key in table.children:
                is_size = key.endswith("_bytes")
                child = table.children[key]
                values[field.name] = self.read(hint, child, here, default=fallback, is_size=is_size)
            elif fallback is not dataclasses.MISSING:
                values[field.name] = fallback
            else:
                values[field.name] = self._absent(hint, here)
        return self._construct(cls, values, table, path)

    def _absent(self, hint: Any, path: str) -> Any:
        """Return the value of a required field that no source sets: a dataclass with defaults needs none."""
        if is_dataclass_type(bare(hint)):
            return self._read_dataclass(bare(hint), Branch({}, "defaults"), path)
        text = f"{path} is required: expected {describe(hint)}; {self._how_to_set(path)}"
        self.problems.append(Problem((path,), text))
        self.absent.append(path)
        return _INVALID

    def _advice(self, key: str, hints: Iterable[str], path: str) -> str:
        here = tuple(hints)
        if key in self._elsewhere:
            return f"did you mean {self._elsewhere[key]}?"
        if not here and not self._elsewhere:
            return "it takes no keys"
        near = _nearest(key, (*here, *self._elsewhere))
        near = _below(path, near) if near in here else near
        return f"the nearest known key is {self._elsewhere.get(near, near)}"

    def _construct(self, cls: type, values: dict[str, Any], node: Branch, path: str) -> Any:
        if any(isinstance(value, _Invalid) for value in values.values()):
            return _INVALID
        try:
            return cls(**values)
        except ConfigProblemsError as cause:
            self.cause = self.cause or cause
            for problem in cause.problems:
                paths = tuple(_below(path, field) for field in problem.fields)
                found = {
                    p: find(node, tuple(f.split("."))) for p, f in zip(paths, problem.fields, strict=True)
                }
                given = {p: child.source for p, child in found.items() if child is not None}
                blamed = given or {paths[0]: "the defaults"}
                sources = " and ".join(dict.fromkeys(blamed.values()))
                said = f"{' and '.join(blamed)} (from {sources}): {problem.text}"
                self.problems.append(Problem(paths, said))
            return _INVALID
        except ValueError as cause:  # __post_init__ found the values do not go together
            self.cause = self.cause or cause
            return self._note(path or cls.__name__, node, str(cause))

    def _read_union(
        self, offered: list[Any], hint: Any, node: Node, path: str, *, default: Any, is_size: bool
    ) -> Any:
        classes = dataclass_members(hint)
        if classes and isinstance(node, Leaf):
            if isinstance(node.value, tuple(classes)):
                return node.value
            parsed = self._parsed(node, path)
            if parsed is None:
                return _INVALID
            node = parsed
        if classes and isinstance(node, Branch) and not any(map(is_mapping, offered)):
            if len(classes) > 1:
                return self._read_tagged(classes, node, path, default)
            return self._read_dataclass(classes[0], node, path, default)
        is_typed = isinstance(node, Leaf) and not node.is_text
        exact = [m for m in offered if is_typed and isinstance(node, Leaf) and type(node.value) is m]
        rest = sorted((m for m in offered if m not in exact), key=lambda m: m is str)  # any text is a str
        for member in [*exact, *rest]:
            trial = Reader(self._how_to_set, self._elsewhere)
            result = trial.read(member, node, path, default=default, is_size=is_size)
            if not trial.problems:
                return result
        return self._mismatch(hint, node, path)

    def _read_tagged(self, classes: list[type], node: Branch, path: str, default: Any) -> Any:
        by_name = {cls.__name__: cls for cls in classes}
        tag = node.children.get(TAG)
        if tag is not None and not any(TAG in field_hints(cls) for cls in classes):
            name = tag.value if isinstance(tag, Leaf) else None
            if isinstance(name, tuple) and len(name) == 1:
                name = name[0]
            if name not in by_name:
                expected = ", ".join(by_name)
                return self._note(_below(path, TAG), tag, f"expected one of {expected}, got {_shown(tag)}")
            rest = {key: child for key, child in node.children.items() if key != TAG}
            return self._read_dataclass(by_name[str(name)], Branch(rest, node.source), path, default)
        fitting = []
        for cls in sorted(classes, key=lambda cls: cls is not type(default)):
            trial = Reader(self._how_to_set, self._elsewhere)
            result = trial._read_dataclass(cls, node, path, default)
            if not trial.problems:
                fitting.append(result)
                if cls is type(default):
                    break
        if len(fitting) == 1:
            return fitting[0]
        said = f'say which of {", ".join(by_name)} it is with {TAG} = "..."'
        if not fitting and (meant := _meant(classes, node)) is not None:
            trial = Reader(self._how_to_set, self._elsewhere)
            trial._read_dataclass(meant, node, path, default)
            self.problems += [
                dataclasses.replace(problem, text=f"{problem.text} (read as {meant.__name__}; or {said})")
                for problem in trial.problems
            ]
            return _INVALID
        fits = "more than one" if fitting else "none"
        told = f'fits {fits} of {", ".join(by_name)}; say which with {TAG} = "..."'
        known = dict.fromkeys(key_of(name) for cls in classes for name in field_hints(cls))
        for key in node.children.keys() - known.keys() - {TAG}:
            told += f". None of them has {key!r}; the nearest known key is {nearest(key, known)!r}"
        return self._note(path, node, told)

    def _read_mapping(self, hint: Any, node: Node, path: str, *, is_size: bool) -> Any:
        key_hint, value_hint = mapping_types(hint)
        if isinstance(node, Leaf) and node.is_text and not _looks_like_json(node):
            pairs: dict[str, Node] = {}
            for word in _words(node):
                key, equals, text = word.partition("=")
                if not equals:
                    return self._note(path, node, f"expected key=value, got {word!r}")
                pairs[key.strip()] = Leaf(text, node.source, is_text=True)
            node = Branch(pairs, node.source)
        table = self._parsed(node, path)
        if not isinstance(table, Branch):
            return _INVALID if table is None else self._mismatch(hint, table, path)
        result: dict[Any, Any] = {}
        for name, child in table.children.items():
            here = _below(path, name)
            key = self.read(key_hint, Leaf(name, child.source, is_text=True), f"key of {here}")
            result[key] = self.read(value_hint, child, here, is_size=is_size)
        if any(isinstance(item, _Invalid) for pair in result.items() for item in pair):
            return _INVALID
        return result

    def _read_collection(self, hint: Any, node: Leaf, path: str, *, is_size: bool) -> Any:
        if node.is_text and not _looks_like_json(node):
            items: list[Node] = [Leaf(word, node.source, is_text=True) for word in _words(node)]
        else:
            parsed = self._parsed(node, path)
            if parsed is None:
                return _INVALID
            if not isinstance(parsed, Leaf) or not isinstance(parsed.value, (list, tuple, set, frozenset)):
                return self._mismatch(hint, parsed, path)
            items = [grow(item, node.source) for item in parsed.value]
        types = item_types(hint, len(items))
        if types is None:
            return self._note(path, node, f"expected {describe(hint)}, got {len(items)} values")
        values = [
            self.read(each, item, f"{path}[{index}]", is_size=is_size)
            for index, (each, item) in enumerate(zip(types, items, strict=True))
        ]
        if any(isinstance(value, _Invalid) for value in values):
            return _INVALID
        origin = get_origin(hint) or hint
        return origin(values) if origin in {list, set, frozenset} else tuple(values)

    def _parsed(self, node: Node, path: str) -> Node | None:
        """`node`, with JSON text opened up; None, and a problem noted, if that is malformed."""
        if not isinstance(node, Leaf) or not node.is_text or not _looks_like_json(node):
            return node
        try:
            return grow(json.loads(_text(node)), node.source)
        except ValueError as cause:
            self._note(path, node, f"malformed JSON: {cause}")
            return None

    def _mismatch(self, hint: Any, node: Node, path: str) -> _Invalid:
        hidden = _may_be_secret(hint, path) or (_has_text(node) and path.rpartition(".")[0] in self._private)
        shown = HIDDEN if isinstance(node, Leaf) and hidden else _shown(node)
        return self._note(path, node, f"expected {describe(hint)}, got {shown}")

    def _note(self, path: str, node: Node, problem: str) -> _Invalid:
        self.problems.append(Problem((path,), f"{path} (from {node.source}): {problem}"))
        return _INVALID


def _meant(classes: Iterable[type], node: Branch) -> type | None:
    """The class of which a table has most keys, and lacks fewest; None if it has none of any."""

    def fits(cls: type) -> tuple[int, int]:
        given = node.children.keys()
        hints = field_hints(cls)
        needed = [
            key_of(field.name)
            for field in dataclasses.fields(cls)
            if field.name in hints and default_of(field) is dataclasses.MISSING
        ]
        return len(set(map(key_of, hints)) & given), -len(set(needed) - given)

    best = max(classes, key=fits)
    return best if fits(best)[0] else None


HIDDEN = "something else, which is not shown"
"""In place of a value that may be a secret."""


def _may_be_secret(hint: Any, path: str) -> bool:
    """Whether a value may be a secret that was given for another field: by its neighbours, or by its name."""
    if is_secret_name(path):
        return True
    kinds = [kind for kind in members(hint) if is_dataclass_type(kind)]
    if any(Secret in members(field) for kind in kinds for field in field_hints(kind).values()):
        return True
    return Secret in members(hint)


def _has_text(node: Node) -> bool:
    return isinstance(node, Leaf) and not isinstance(node.value, (int, float))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`; None if there are none."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)), None)


def _scalar(hint: Any, leaf: Leaf, *, is_size: bool) -> Any:
    """Return the value as a `hint`; raise ValueError or TypeError if it is not one."""
    value = leaf.value
    text = value if isinstance(value, str) else None
    if get_origin(hint) is Literal:
        for option in get_args(hint):
            if (type(option) is type(value) and option == value) or (leaf.is_text and str(option) == text):
                return option
        raise ValueError
    if not isinstance(hint, type):
        raise TypeError
    if issubclass(hint, Enum):
        return _enum(hint, value, is_text=leaf.is_text)
    if hint is bool:
        if leaf.is_text and text is not None and text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        return _instance(bool, value)
    if hint is int:
        if is_size and text is not None:
            return parse_bytes(text)
        return int(text) if leaf.is_text and text is not None else _instance(int, value)
    if hint is float:
        return float(text) if leaf.is_text and text is not None else float(_instance((int, float), value))
    if hint is timedelta:
        return value if isinstance(value, timedelta) else parse_duration(_instance((int, float, str), value))
    if hint is Secret:
        return _secret(value)
    if issubclass(hint, PurePath):
        return value if isinstance(value, hint) else hint(_instance(str, value))
    return _instance(hint, value)


def _secret(value: object) -> Secret:
    if isinstance(value, Secret):
        return value
    if value == MASK:
        raise ConfigError(f"{MASK} is what is printed in place of a secret; give the secret itself")
    return Secret(_instance(str, value))


def _instance(kind: type | tuple[type, ...], value: Any) -> Any:
    """`value` if it is a `kind`; a bool is no number here."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _enum(hint: type[Enum], value: object, *, is_text: bool) -> Enum:
    if isinstance(value, hint):
        return value
    for member in hint:
        if isinstance(value, str) and value.lower() == member.name.lower():
            return member
    for member in hint:
        same = type(member.value) is type(value) and member.value == value
        if same or (is_text and str(member.value) == value):
            return member
    raise ValueError


def _says_none(leaf: Leaf) -> bool:
    return leaf.value is None or leaf.value == NONE or (leaf.is_text and leaf.value == (NONE,))


def _unwrapped(node: Node) -> Any:
    if isinstance(node, Branch):
        return {key: _unwrapped(child) for key, child in node.children.items()}
    if isinstance(node.value, tuple) and node.is_text:
        return _literal(node.value[0]) if len(node.value) == 1 else list(map(_literal, node.value))
    if _says_none(node):
        return None
    return _literal(node.value) if node.is_text and isinstance(node.value, str) else node.value


def _literal(text: str) -> Any:
    """Text of a field without a type: a number, truth or JSON list or table if it looks like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(leaf: Leaf) -> str:
    if isinstance(leaf.value, tuple):
        return leaf.value[0] if len(leaf.value) == 1 else ""
    return leaf.value if isinstance(leaf.value, str) else ""


def _looks_like_json(leaf: Leaf) -> bool:
    return _text(leaf).lstrip().startswith(("{", "["))


def _words(leaf: Leaf) -> list[str]:
    """The items of a list given as text: several words of a flag, or one split at its commas."""
    if isinstance(leaf.value, tuple) and len(leaf.value) != 1:
        return list(leaf.value)
    text = _text(leaf)
    return [word.strip() for word in text.split(",")] if text.strip() else []


def _shown(node: Node) -> str:
    if not isinstance(node, Leaf):
        return "a table"
    value = node.value
    if node.is_text and isinstance(value, tuple):
        value = " ".join(value)
    if isinstance(value, str) and looks_secret(value):
        return HIDDEN
    return repr(value) if node.is_text else f"{type(value).__name__} {reprlib.repr(value)}"


# Each feature is tried as a dozen kinds of dataclasses, most of which do not fit and have unknown keys.
# Without these two caches that takes three times as long.
@functools.lru_cache(maxsize=1024)
def _has_secret(cls: type) -> bool:
    return any(Secret in members(hint) for hint in field_hints(cls).values())


@functools.lru_cache(maxsize=1024)
def _nearest(key: str, names: tuple[str, ...]) -> str:
    return max(names, key=lambda name: difflib.SequenceMatcher(None, key, name).ratio())


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
