"""Custom restore: which saved tensor goes into which variable, when the names have changed.

A model is edited while its checkpoints stay: layers are renamed, renumbered, split into parts, or meant to
    start fresh. A plan decides, from names and shapes alone, which saved tensor each variable is loaded from;
    nothing is read before that is known.

A name is a path; torch writes it with dots, `tower.0.weight`, upstream with slashes,
`tower/dense_1/kernel`, and both mean the same here. `x/part_0`, `x/part_1`, ... are one
variable `x`, split along its first axis: a checkpoint has it as one tensor.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from monolith import filesystem
from monolith.errors import ConfigError, RestoreError

Shape: TypeAlias = tuple[int, ...]
Rule: TypeAlias = tuple[str, str]
"""A pattern of `re` over a path with slashes, and what takes its place."""

MAPPING_RULES: tuple[Rule, ...] = (
    (r"(^|/)([^/]*dcn[^/]*)/kernel_(\d+)$", r"\1\2/layers/\3/kernel/weight"),
    (r"(^|/)([^/]*dcn[^/]*)/bias_(\d+)$", r"\1\2/layers/\3/bias"),
    (r"(^|/)([^/]*dcn[^/]*)/(?:trainable_)?(?:kernel_)?norm_(\d+)$", r"\1\2/layers/\3/kernel/norm"),
    (r"(^|/)c_dot/mlp(?=/)", r"\1c_dot/compress_tower"),
)
"""Old names of our own layers, as new ones."""

CLEARED_MARKER = "clear_nn"
_CLEARED_TEXT = b"clean nn done!"

_PART = re.compile(r"(.+)[./]part_(\d+)")
_LAYER = re.compile(
    r"(?:(?P<prefix>.*?)/)?(?P<stem>[^/]*?)(?P<number>\d*)/"
    r"(?P<suffix>bias|kernel|trainable_kernel_norm|weight|kernel/weight|kernel/norm)"
)
_UNNUMBERED = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """A saved tensor, or some rows of it."""

    name: str
    rows: tuple[int, int] | None = None
    """From and up to; None is all of it."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What each variable is loaded from."""

    origins: Mapping[str, Origin]
    """A variable that is not here is not in the checkpoint."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Variable -> why its parts do not add up to the saved tensor."""

    @property
    def renamed(self) -> dict[str, str]:
        """Variable -> the name it was saved under, where that is another; parts of it are not."""
        return {
            name: origin.name
            for name, origin in self.origins.items()
            if path_of(origin.name) not in (path_of(name), path_of(whole_name(name)))
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomRestore:
    """How the first restore of a run differs from a plain one.

    For a run that trains on from a checkpoint; exports and evaluations restore plainly.
    """

    alias_map: Mapping[str, str] | None = None
    """New name -> old name; parts of a variable may be given one by one, or by its own name."""
    reset_dense: bool = False
    """Leave all dense variables as the model made them. Once per model folder, which a marker remembers."""
    continue_training: bool = False
    """With `reset_dense`: continue from the checkpoint's global step, not from 0."""
    auto_alias: bool = True
    """Without an `alias_map`: look for what the variables may have been called."""
    rules: Sequence[Rule] = ()
    """For `auto_alias`, tried after `MAPPING_RULES`."""

    def __post_init__(self) -> None:
        if self.reset_dense and self.alias_map:
            raise ConfigError(
                "reset_dense loads no dense variables and alias_map tells how to load them: choose one"
            )
        if self.continue_training and not self.reset_dense:
            raise ConfigError(
                "continue_training says what reset_dense does to the global step; other restores continue it "
                "anyway"
            )
        for pattern, replacement in self.rules:
            try:
                re.compile(pattern).sub(replacement, "")
            except re.error as cause:
                raise ConfigError(
                    f"rules: ({pattern!r}, {replacement!r}) is not a regular expression: {cause}"
                ) from cause

    def clears(self, model_dir: str | None) -> bool:
        """Whether this restore is to clear the dense variables: it was asked for and never done here.

        Raises:
            ConfigError: It was asked for, and there is no folder for the marker.
        """
        if not self.reset_dense:
            return False
        if model_dir is None:
            raise ConfigError("reset_dense needs a model_dir, in which a marker records that it was done")
        return not filesystem.exists(filesystem.join(model_dir, CLEARED_MARKER))

    def mark_cleared(self, model_dir: str) -> None:
        """Remember that the dense variables were cleared; the next start loads them."""
        with filesystem.atomic_write(filesystem.join(model_dir, CLEARED_MARKER)) as file:
            file.write(_CLEARED_TEXT)

    def plan(
        self,
        current: Mapping[str, Shape],
        saved: Mapping[str, Shape],
        *,
        wanted: Collection[str] | None = None,
    ) -> RestorePlan:
        """Settle what each current variable is loaded from. Does not look at `reset_dense`.

        Args:
            wanted: The variables that matter; the automatic map gives up if it lacks one of these.
                All by default.

        Raises:
            RestoreError: `alias_map` has names that do not exist.
        """
        variables = _variables(current)
        names = _Names(saved)
        if self.alias_map:
            return self._by_map(variables, names)
        if self.auto_alias:
            needed = [v for v in variables if wanted is None or not v.parts.keys().isdisjoint(wanted)]
            if (found := self._guess(needed, names)) is not None:
                return _plan(variables, names, found)
        return _plan(variables, names, {})

    def _by_map(self, variables: list[_Variable], names: _Names) -> RestorePlan:
        assert self.alias_map is not None
        owners = {path_of(part): (v, part) for v in variables for part in v.parts}
        wholes = {path_of(v.name): v for v in variables}
        aliases = {path_of(new): _node_name(old) for new, old in self.alias_map.items()}
        for new in aliases:
            if new not in owners and new not in wholes:
                near = difflib.get_close_matches(new, [*owners, *wholes], n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RestoreError(f"alias_map renames {new!r}, but the model has no such variable.{hint}")
        if all(names.find(new) or names.find(whole_name(new)) for new in aliases):
            _log.info("alias_map: the checkpoint has all its new names already, so they are loaded plainly")
            return _plan(variables, names, {})
        origins = dict(_plan(variables, names, {}).origins)
        problems: dict[str, str] = {}
        by_old: dict[tuple[str, str], list[str]] = {}
        for variable in variables:
            for part in variable.parts:
                old = aliases.get(path_of(part), aliases.get(path_of(variable.name)))
                if old is not None:
                    by_old.setdefault((variable.name, old), []).append(part)
        for (_, old), parts in by_old.items():
            if (found := names.find(old)) is None:
                raise RestoreError(
                    f"alias_map: {parts[0]!r} is to be loaded from {old!r}, not found in checkpoint. "
                    f"It has {_some(names.shapes)}."
                )
            shapes = {part: owners[path_of(part)][0].parts[part] for part in parts}
            piece = _Variable(old, shapes)
            origins |= piece.origins(found)
            problems |= piece.problems(found, names.shapes[found])
        return RestorePlan(origins, problems)

    def _guess(self, variables: list[_Variable], names: _Names) -> dict[str, str] | None:
        """Return variable -> saved name for all, or None: all are there already, or one cannot be found."""
        if all(v.is_in(names) for v in variables):
            return None
        views = [_View(rename, names) for rename in _renamings((*MAPPING_RULES, *self.rules))]
        found = _renumbered(variables, names, views)
        for variable in variables:
            if variable.name not in found:
                candidates = [names.find(variable.name), *(view.find(variable.name) for view in views)]
                fitting = (c for c in candidates if c is not None and names.shapes[c] == variable.shape)
                if (old := next(fitting, None)) is not None:
                    found[variable.name] = old
        unmatched = [v.name for v in variables if v.name not in found and not v.is_in(names)]
        used = list(found.values())
        unmatched += [name for name, old in found.items() if used.count(old) > 1]
        if unmatched:
            _log.warning(
                "no automatic map of names: nothing in the checkpoint fits %s; variables are loaded by their "
                "own names",
                _some(unmatched),
            )
            return None
        return found


def path_of(name: str) -> str:
    """Return a name in one spelling, with slashes."""
    return _node_name(name).replace(".", "/")


def whole_name(name: str) -> str:
    """Return the name of the variable that `name` is a part of: without `/part_k`."""
    found = _PART.fullmatch(name)
    return found[1] if found else name


def parts_by_whole(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return variable -> its parts, in order, for all variables that are cut into parts.

    Parts are numbered from 0 without a gap and differ in their first axis only. Names that
    merely look alike are variables of their own.
    """
    found: dict[str, dict[int, str]] = {}
    for name in shapes:
        if match := _PART.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = name
    return {
        whole: [numbers[k] for k in sorted(numbers)]
        for whole, numbers in found.items()
        if whole not in shapes
        and sorted(numbers) == list(range(len(numbers)))
        and all(shapes[name] for name in numbers.values())
        and len({shapes[name][1:] for name in numbers.values()}) == 1
    }


@dataclass(frozen=True, slots=True)
class _Variable:
    """A variable of the model, in one part or several."""

    name: str
    parts: dict[str, Shape]

    @property
    def shape(self) -> Shape:
        first = next(iter(self.parts.values()))
        if len(self.parts) == 1:
            return first
        return (sum(shape[0] for shape in self.parts.values()), *first[1:])

    def is_in(self, names: _Names) -> bool:
        return names.find(self.name) is not None or all(names.find(part) for part in self.parts)

    def origins(self, saved: str) -> dict[str, Origin]:
        if len(self.parts) == 1:
            return {part: Origin(saved) for part in self.parts}
        found, at = {}, 0
        for part, shape in self.parts.items():
            found[part] = Origin(saved, (at, at + shape[0]))
            at += shape[0]
        return found

    def problems(self, saved: str, shape: Shape) -> dict[str, str]:
        if len(self.parts) == 1 or shape == self.shape:
            return {}
        what = f"its {len(self.parts)} parts make {self.shape}, {saved} in the checkpoint has shape {shape}"
        return dict.fromkeys(self.parts, what)


class _Names:
    """The names of a checkpoint, found whichever way they are spelled."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self._by_path: dict[str, str | None] = {}
        for name in shapes:
            path = path_of(name)
            self._by_path[path] = None if path in self._by_path else name

    def find(self, name: str) -> str | None:
        """Return the saved name; None if there is none, or if two saved names differ only in their
        spelling."""
        return name if name in self.shapes else self._by_path.get(path_of(name))


class _View:
    """The names of a checkpoint, seen through a renaming; those that fall together are not seen."""

    def __init__(self, rename: Callable[[str], str], names: _Names) -> None:
        seen: dict[str, list[str]] = {}
        for name in names.shapes:
            seen.setdefault(rename(path_of(name)), []).append(name)
        self.names = {path: found[0] for path, found in seen.items() if len(found) == 1}

    def find(self, name: str) -> str | None:
        return self.names.get(path_of(name))


def _variables(current: Mapping[str, Shape]) -> list[_Variable]:
    cut = parts_by_whole(current)
    in_parts = {part for parts in cut.values() for part in parts}
    whole = [_Variable(name, {name: shape}) for name, shape in current.items() if name not in in_parts]
    return whole + [_Variable(name, {part: current[part] for part in parts}) for name, parts in cut.items()]


def _plan(variables: list[_Variable], names: _Names, found: Mapping[str, str]) -> RestorePlan:
    origins: dict[str, Origin] = {}
    problems: dict[str, str] = {}
    for variable in variables:
        saved = found.get(variable.name) or names.find(variable.name)
        if saved is not None:
            origins |= variable.origins(saved)
            problems |= variable.problems(saved, names.shapes[saved])
        else:
            for part in variable.parts:
                if (saved := names.find(part)) is not None:
                    origins[part] = Origin(saved)
    return RestorePlan(origins, problems)


# The automatic map


def _renamings(rules: Sequence[Rule]) -> list[Callable[[str], str]]:
    """Return ways an old path may have become a new one, the most careful first."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rewritten(path: str) -> str:
        for pattern, replacement in compiled:
            path = pattern.sub(replacement, path)
        return path

    return [
        str,
        _without_stutter,
        _without_repeats,
        rewritten,
        lambda path: rewritten(_without_stutter(path)),
        lambda path: rewritten(_without_repeats(path)),
    ]


def _without_stutter(path: str) -> str:
    """`a/a/b` as `a/b`."""
    kept: list[str] = []
    for part in path.split("/"):
        if part.isdigit() or kept[-1:] != [part]:
            kept.append(part)
    return "/".join(kept)


def _without_repeats(path: str) -> str:
    """`a/b/a/c` as `a/b/c`. Numbers stay: they mean something else in each place."""
    kept: list[str] = []
    for part in path.split("/"):
        if part.isdigit() or part not in kept:
            kept.append(part)
    return "/".join(kept)


@dataclass(slots=True)
class _Layers:
    """The layers under one prefix whose names differ in their number only: `tower/dense_<n>`."""

    names: dict[int, dict[str, str]] = field(default_factory=dict)
    """Number -> suffix -> name."""

    def in_order(self) -> list[dict[str, str]]:
        return [self.names[number] for number in sorted(self.names)]


def _layers(names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], _Layers]:
    """Return (prefix, stem) -> layers, of pairs (path, name).

    A layer without a number comes before those with one, as `dense` does before `dense_1`;
    by itself it is not numbered, and of no interest here.
    """
    groups: dict[tuple[str, str], _Layers] = {}
    bare: list[tuple[tuple[str, str], str, str]] = []
    for path, name in names:
        if not (match := _LAYER.fullmatch(path)):
            continue
        prefix, stem = match["prefix"] or "", match["stem"]
        if match["number"]:
            layers = groups.setdefault((prefix, stem), _Layers())
            layers.names.setdefault(int(match["number"]), {})[match["suffix"]] = name
        else:
            bare.append(((prefix, f"{stem}_"), match["suffix"], name))
    for key, suffix, name in bare:
        if key in groups:
            groups[key].names.setdefault(_UNNUMBERED, {})[suffix] = name
    return groups


def _renumbered(variables: list[_Variable], names: _Names, views: list[_View]) -> dict[str, str]:
    """Return variable -> saved name for layers that are as many as before, under other numbers."""
    by_name = {variable.name: variable for variable in variables}
    old_layers = [_layers(view.names.items()) for view in views]
    found: dict[str, str] = {}
    for key, layers in _layers((path_of(v.name), v.name) for v in variables).items():
        ordered = layers.in_order()
        if all(by_name[name].is_in(names) for layer in ordered for name in layer.values()):
            continue
        for olds in old_layers:
            before = olds[key].in_order() if key in olds else []
            if len(before) != len(ordered):
                continue
            pairs = [
                (name, old.get(suffix))
                for new, old in zip(ordered, before, strict=True)
                for suffix, name in new.items()
            ]
            fitting = {
                name: old
                for name, old in pairs
                if old is not None and names.shapes[old] == by_name[name].shape
            }
            if len(fitting) == len(pairs):
                found |= fitting
                break
    return found


def _node_name(name: str) -> str:
    return name.removesuffix(":0")


def _some(names: Iterable[str], shown: int = 8) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more
