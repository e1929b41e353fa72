"""Fitting: what of a checkpoint a changed model can use.

A model that got a feature, another width or another type is started from a checkpoint of the old one. Rows go
by the name of their table and weights by theirs, as in any restore. What is special is here: which rows
stand for other things now, and which part of a weight is of an input that both models have.

    {"dense.mlp.0.kernel.weight": {"0": [["user", 4], ["item", 4], ["price", 1]]}}

says that the first axis of that weight has four places for user, four for item and one for price. A
checkpoint keeps that of its model, so that the places of an input are found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

InputAxes = Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]
"""Variable to axis, as a text, to the names and widths of the inputs along it."""

Places = tuple[int, int, int]
"""Where a stretch begins in the checkpoint, where in the model, and how long it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """How a model differs from the one of a checkpoint. Plain values: they are sent to parameter servers."""

    fresh: Mapping[str, str] = field(default_factory=dict)
    """Table to why its rows start fresh: the same ids would stand for other things."""
    rescaled: tuple[str, ...] = ()
    """Features of numbers that are scaled in another way; the weights on them start fresh."""
    before: InputAxes = field(default_factory=dict)
    """The inputs along the axes of weights, in the checkpoint."""
    now: InputAxes = field(default_factory=dict)
    """The same of the model."""

    def pieces(
        self, name: str, saved: Sequence[int], wanted: Sequence[int]
    ) -> tuple[list[tuple[Places, ...]], str]:
        """Return the blocks of a variable that are taken over, each as its places along every axis, and why
        others are not.

        No block and no reason stand for all of it. An axis of inputs goes by their names. Along others, such
        as hidden units, the leading part is taken, but only if the inputs of both models are known: otherwise
        nothing says which axis that is.

        Args:
            saved, wanted: The shapes in the checkpoint and in the model.
        """
        if len(saved) != len(wanted):
            return [], f"it has {len(saved)} axes in the checkpoint and {len(wanted)} in this model"
        before, now = self.before.get(name, {}), self.now.get(name, {})
        if not self.before or not self.now or before.keys() != now.keys():
            if tuple(saved) == tuple(wanted) and not (before and now):
                return [], ""
            return [], f"it has shape {tuple(saved)} in the checkpoint, this model needs {tuple(wanted)}"
        axes: list[list[Places]] = []
        for axis, (old, new) in enumerate(zip(saved, wanted, strict=True)):
            if str(axis) in now:
                axes.append(list(self._named(before[str(axis)], now[str(axis)])))
            else:
                axes.append([(0, 0, min(old, new))])
        whole = tuple(saved) == tuple(wanted) and all(
            sum(size for begin, to, size in places if begin == to) == size_of_axis
            for places, size_of_axis in zip(axes, wanted, strict=True)
        )
        return ([] if whole else list(product(*axes))), ""

    def _named(self, before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[Places]:
        places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, width in before:
            places[name] = (at, width)
            at += width
        at = 0
        for name, width in now:
            if name in places and name not in self.rescaled:
                begin, size = places[name]
                yield begin, at, min(size, width)
            at += width


def covered(blocks: Sequence[tuple[Places, ...]]) -> int:
    """Return how many numbers of a variable are taken over."""
    total = 0
    for block in blocks:
        size = 1
        for _, _, length in block:
            size *= length
        total += size
    return total


def aligned(saved: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return which segments of rows belong together, by their numbers; None if nothing says so.

    A row is a vector, maybe with a bias before it; so where one has a segment more, the last ones go
    together.
    """
    if len(saved) == len(wanted):
        return [(at, at) for at in range(len(saved))]
    if {len(saved), len(wanted)} == {1, 2}:
        return [(len(saved) - 1, len(wanted) - 1)]
    return None


def changes_to_json(changes: Changes | None) -> dict[str, Any] | None:
    """Return changes as plain values, for a parameter server or a rank."""
    return None if changes is None else {each.name: getattr(changes, each.name) for each in fields(changes)}


def changes_from_json(plain: Mapping[str, Any] | None) -> Changes | None:
    """Return what `changes_to_json` was given."""
    return None if plain is None else Changes(**{**plain, "rescaled": tuple(plain["rescaled"])})
