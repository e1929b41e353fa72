"""Permutation importance: how much worse a model becomes when one feature is shuffled among the examples.

A shuffled feature keeps its distribution and loses its connection with the label. What the metric loses is
what the model gets from that feature, whatever its scale and wherever in the model it is used; the size of
weights or inputs says neither.

Two features that say the same share their importance: shuffling one leaves the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monolith.errors import ConfigError
from monolith.feature import Batch, FeatureIds
from monolith.feature.spec.feature_spec import GAP
from monolith.tensors import RaggedTensor
from monolith.tensors.ragged import ranges
from monolith.train.evaluate_config import EvaluateConfig
from monolith.train.evaluating import choose_metric, measured
from monolith.train.model import Model
from monolith.train.task import Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureImportance:
    """What a model loses without one feature."""

    feature: str
    loss: float
    """By how much the metric became worse, on average over the repeats; below 0 it became better."""
    error: float
    """The standard error of that average; NaN with one repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Importances:
    """The features of a model by importance."""

    metric: str
    value: float
    """Of the metric with all features as they are."""
    examples: int
    repeats: int
    features: tuple[FeatureImportance, ...]
    """The most important first."""


def permutation_importance(
    model: Model,
    batches: Sequence[Batch],
    config: EvaluateConfig,
    *,
    repeats: int = 5,
    seed: int = 0,
    advance: Callable[[int], object] | None = None,
) -> Importances:
    """Shuffle each feature in turn, `repeats` times, and evaluate the model each time.

    Args:
        model: In eval mode.
        batches: Of evaluation data, with labels. Features are shuffled among all of their examples, since
            those of one batch of a sorted file may be alike.
        config: Its metric and mode decide what is measured; by default the first AUC or RMSE, or the loss.
        advance: Told the examples of each batch that was evaluated: (features * repeats + 1) passes in all.

    Raises:
        ConfigError: There are no examples, or no such metric.
    """
    if repeats < 1:
        raise ConfigError(f"importance: repeats must be at least 1, got {repeats}")

    def value_of(read: Iterator[Batch] | Sequence[Batch]) -> dict[str, float]:
        # The metrics see the batch as it is: those by group go by the example's own user, not a shuffled one.
        return measured(model.task, zip(batches, _outputs(model, read), strict=True), advance)

    base = value_of(batches)
    metric = choose_metric(config, base)
    better = 1.0 if config.direction(metric) == "max" else -1.0
    random = torch.Generator().manual_seed(seed)
    found = []
    for name in _features(batches[0]):
        values = [value_of(_shuffled(batches, name, random))[metric] for _ in range(repeats)]
        losses = [better * (base[metric] - value) for value in values]
        mean = math.fsum(losses) / repeats
        spread = math.fsum((one - mean) ** 2 for one in losses)
        error = math.sqrt(spread / (repeats - 1) / repeats) if repeats > 1 else math.nan
        found.append(FeatureImportance(feature=name, loss=mean, error=error))
    return Importances(
        metric=metric,
        value=base[metric],
        examples=sum(map(len, batches)),
        repeats=repeats,
        features=tuple(sorted(found, key=lambda one: -one.loss)),
    )


def _outputs(model: Model, batches: Iterator[Batch] | Sequence[Batch]) -> Iterator[Outputs]:
    for batch in batches:
        with torch.no_grad():
            yield model.outputs(batch, model.prepare(batch))


def _features(batch: Batch) -> list[str]:
    """Return what is shuffled; the gaps of a sequence move with it."""
    return [name for name in (*batch.ids.names, *batch.floats) if not name.endswith(GAP)]


def _shuffled(batches: Sequence[Batch], name: str, random: torch.Generator) -> Iterator[Batch]:
    """Yield the batches with one feature shuffled among all examples."""
    if name in batches[0].floats:
        rows = torch.cat([batch.floats[name] for batch in batches])
        rows = rows[torch.randperm(len(rows), generator=random)]
        for batch, some in zip(batches, torch.split(rows, [len(one) for one in batches]), strict=True):
            yield replace(batch, floats={**batch.floats, name: some})
        return
    together = [one for one in (name, name + GAP) if one in batches[0].ids.names]
    cells = [batch.ids[name].nrows for batch in batches]  # 1 in a batch whose examples share it
    order = torch.randperm(sum(cells), generator=random)
    moved = {one: _moved([batch.ids for batch in batches], one, order) for one in together}
    for number, batch in enumerate(batches):
        yield replace(batch, ids=_with(batch.ids, {one: parts[number] for one, parts in moved.items()}))


_Cells = tuple[RaggedTensor, Tensor | None]
"""The ids of one feature, and their weights."""


def _moved(batches: Sequence[FeatureIds], name: str, order: Tensor) -> list[_Cells]:
    """Return the cells of a feature in a new order over all batches, cut into batches again."""
    parts = [_cells(batch, name) for batch in batches]
    lengths = torch.cat([ids.row_lengths() for ids, _ in parts])
    starts = torch.cumsum(lengths, 0) - lengths
    places = ranges(starts[order], lengths[order])
    values = torch.cat([ids.flat_values for ids, _ in parts])[places]
    weights = [one for _, one in parts if one is not None]
    weighed = torch.cat(weights)[places] if len(weights) == len(parts) else None
    found, begin = [], 0
    for part in torch.split(lengths[order], [ids.nrows for ids, _ in parts]):
        end = begin + int(part.sum())
        ids = RaggedTensor.from_row_lengths(values[begin:end], part)
        found.append((ids, None if weighed is None else weighed[begin:end]))
        begin = end
    return found


def _cells(batch: FeatureIds, name: str) -> _Cells:
    ids = batch[name]
    if batch.weights is None:
        return ids, None
    cells = [1 if shared else len(batch) for shared in batch.shared]
    begin = int(batch.splits[sum(cells[: batch.names.index(name)])])
    return ids, batch.weights[begin : begin + len(ids.flat_values)]


def _with(batch: FeatureIds, new: Mapping[str, _Cells]) -> FeatureIds:
    parts = {name: new[name] if name in new else _cells(batch, name) for name in batch.names}
    return FeatureIds.pack(
        {name: ids for name, (ids, _) in parts.items()},
        shared=[name for name, alone in zip(batch.names, batch.shared, strict=True) if alone],
        event_time=batch.event_time,
        event_times=batch.event_times,
        batch_size=len(batch),
        weights={name: one for name, (_, one) in parts.items() if one is not None} or None,
    )
