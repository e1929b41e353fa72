"""Jagged inputs of an exported graph: histories, step by step, without padding to their maximum.

A layout that keeps each ID of a feature is three tensors of a graph: its values (steps, ...), where each
example ends among them (examples,), and the numbers 0, 1 and so on, as many as the longest sequence has and
one more, by which the graph knows how far to pad. Behind the tensors of all collections follow the times of
steps (steps,) that the model reads, and the event time of each example (examples,).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from monolith.feature import FeatureIds, LayoutPlan
from monolith.tensors import RaggedTensor

_LEAST = 2
"""Sizes of 0 and 1 are special for torch.export: smaller tensors get zeros, which belong to no example."""


Taken = tuple[list[Tensor], dict[int, Tensor], Tensor | None]
"""The outputs of a plan, the row splits of its features that keep each ID, and the numbers of steps."""


InputKind = Literal["rows", "values", "ends", "numbers", "times", "asked"]
"""What a tensor of a graph is: rows of examples; of histories the values of steps, the ends, the numbers, and
the times; or the event times of examples."""


class JaggedInputs:
    """The jagged inputs of a model.

    Args:
        plans: The layouts of its collections.
        times: Features of times that it reads, each named after its history.
    """

    def __init__(self, plans: Sequence[LayoutPlan], times: Sequence[str] = ()) -> None:
        self._plans = plans
        self.times = tuple(times)
        self.histories = tuple(
            dict.fromkeys(plan.features[number].name for plan in plans for number in plan.jagged)
        )
        """The features of which each ID is kept."""

    def __bool__(self) -> bool:
        return bool(self.histories)

    def tensors(self, outputs: Sequence[Tensor], ids: FeatureIds) -> list[Tensor]:
        """Return the tensors of a graph.

        Args:
            outputs: Of the gatherers of all collections.
            ids: Of the batch.
        """
        if not self.histories:
            return list(outputs)
        splits = [plan.row_splits(ids) for plan in self._plans]
        lengths = [one.diff() for by_feature in splits for one in by_feature.values()]
        longest = max((int(one.max()) for one in lengths if len(one)), default=0)
        numbers = torch.arange(max(longest + 1, _LEAST))
        made: list[Tensor] = []
        given = iter(outputs)
        for plan, row_splits in zip(self._plans, splits, strict=True):
            for feature in plan.each:
                values = next(given)
                made += [values] if feature < 0 else [at_least(values), row_splits[feature][1:], numbers]
        for name in self.times:
            times = self._times(name, ids)
            made.append(at_least(times.flat_values))
        if self.times:
            made.append(self._event_times(ids))
        return made

    @property
    def kinds(self) -> list[InputKind]:
        """What each tensor of a graph is."""
        found: list[InputKind] = []
        for plan in self._plans:
            for feature in plan.each:
                found += ["rows"] if feature < 0 else ["values", "ends", "numbers"]
        for _ in self.times:
            found.append("times")
        return [*found, "asked"] if self.times else found

    def sizes(self, examples: Any) -> list[dict[int, Any]]:
        """Return the dimensions of the tensors that differ from batch to batch, for torch.export."""
        roots = dict.fromkeys(map(self.root, self.histories))
        steps = {root: torch.export.Dim(f"steps_{number}", min=_LEAST) for number, root in enumerate(roots)}
        longest = torch.export.Dim("longest", min=_LEAST)
        found: list[dict[int, Any]] = []
        for plan in self._plans:
            for feature in plan.each:
                if feature < 0:
                    found.append({0: examples})
                else:
                    root = self.root(plan.features[feature].name)
                    found += [{0: steps[root]}, {0: examples}, {0: longest}]
        found += [{0: steps[self.root(name)]} for name in self.times]
        return [*found, {0: examples}] if self.times else found

    def layouts(self, plan: LayoutPlan, given: Iterator[Tensor]) -> Taken:
        """Take the tensors of one collection."""
        outputs: list[Tensor] = []
        row_splits: dict[int, Tensor] = {}
        numbers = None
        for feature in plan.each:
            outputs.append(next(given))
            if feature >= 0:
                ends, numbers = next(given), next(given)
                row_splits[feature] = torch.cat([ends.new_zeros(1), ends])
        return outputs, row_splits, numbers

    def root(self, name: str) -> str:
        """Return the history that a feature belongs to, with as many steps."""
        return min((one for one in self.histories if f"{name}.".startswith(f"{one}.")), key=len)

    def _times(self, name: str, ids: FeatureIds) -> RaggedTensor:
        """Return the times of a history; zeros if the batch has none."""
        if name in ids.names:
            return ids[name]
        root = self.root(name)
        if root in ids.names:
            steps = ids[root]
        else:
            none = torch.zeros(ids.batch_size + 1, dtype=torch.int64)
            steps = RaggedTensor(torch.empty(0, dtype=torch.int64), none)
        return RaggedTensor(torch.zeros_like(steps.flat_values), steps.row_splits, validate=False)

    def _event_times(self, ids: FeatureIds) -> Tensor:
        """Return the event time of each example; if it has none, the time of its last step."""
        known = ids.event_times
        if known is not None and bool(known.all()):
            return known
        times = self._times(self.times[0], ids)
        padded = torch.cat([times.flat_values, times.flat_values.new_zeros(1)])
        some = times.row_lengths() > 0
        last = padded[torch.where(some, times.row_splits[1:] - 1, len(padded) - 1)]
        last = last.expand(ids.batch_size) if len(last) != ids.batch_size else last
        return last.contiguous() if known is None else torch.where(known > 0, known, last)


def at_least(values: Tensor) -> Tensor:
    """Return values with so many rows that torch.export takes them."""
    missing = _LEAST - len(values)
    return values if missing <= 0 else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
