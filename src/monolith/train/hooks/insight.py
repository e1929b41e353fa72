"""Feature insight: what each feature brings to a layer, written while a model trains.

The layer's product is cut at the borders of the features (`monolith.nn.feature_insight`); its
pieces and the label go to an event file, from which `monolith evaluate insight` tells which features
matter. Only steps that are written are watched, so other steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monolith.errors import ConfigError
from monolith.feature import LayoutKind, LayoutSpec
from monolith.model import EmbeddingCollection
from monolith.nn import Dense, IRazor, SeNet, feature_insight, watch_segments
from monolith.observe.summaries import Groups, SummaryWriter, TensorSummary, insight_data, nas_data
from monolith.train.hook import Every, Hook, StepResult, TrainingRun


def feature_insight_data(
    inputs: Tensor,
    segment_names: Sequence[str],
    segment_sizes: Sequence[int],
    weight: Tensor | None = None,
    *,
    group_info: Groups | None = None,
    label: Tensor | None = None,
    description: str | None = None,
    name: str | None = None,
) -> TensorSummary:
    """Return the summary of what each segment of `inputs` contributes.

    Args:
        inputs: float of shape (examples, sum of the sizes).
        weight: float of shape (sum of the sizes, k): the inputs are multiplied by it, segment by segment.
            With a label that leaves k columns to each segment; without, one: the sum of their squares.
        label: Of shape (examples,) or (examples, labels), written next to the segments.

    Raises:
        ConfigError: There are no segments, or lengths do not agree.
    """
    if not segment_names or len(segment_names) != len(segment_sizes):
        raise ConfigError(
            "feature insight needs as many segment_sizes as segment_names and at least one, "
            f"got {len(segment_sizes)} and {len(segment_names)}"
        )
    values, sizes = inputs.detach(), list(segment_sizes)
    if weight is not None:
        values = feature_insight(values, weight.detach(), sizes, aggregate=label is None)
        sizes = [1 if label is None else weight.shape[1]] * len(sizes)
    return insight_data(
        values, segment_names, sizes, group_info=group_info, label=label, description=description, name=name
    )


def label_of(result: StepResult, label: str | None, most: int) -> Tensor | None:
    """Return the label of the first `most` examples of a step; None if none is asked for.

    Raises:
        ConfigError: The batches have no such label.
    """
    if label is None:
        return None
    if label not in result.batch.labels:
        there = ", ".join(result.batch.labels) or "none"
        raise ConfigError(f"train: insight_label: the batches have no label {label!r}; they have {there}")
    return result.batch.labels[label][:most]


class FeatureInsightHook(Hook):
    """Writes what each feature brings to a layer, every `every_steps` steps.

    Args:
        layer: The first layer over all features: `model.dense.first` of a ready model, `mlp.first` of an MLP.
        segments: Feature to its width, in the order in which they lie in the layer's input.
        label: Name of the label to write next to them; None writes only how large the contributions are.
        max_rows: Examples of a batch that are written; one takes 4 bytes a feature, and with a label
            that many for each output of the layer.
    """

    def __init__(
        self,
        layer: Dense,
        segments: Mapping[str, int],
        *,
        label: str | None = None,
        every_steps: int = 1000,
        max_rows: int = 512,
        group_info: Groups | None = None,
        name: str | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"feature insight: max_rows must be at least 1, got {max_rows}")
        self._layer = layer
        self._segments = dict(segments)
        self._label = label
        self._every = Every(every_steps, "feature insight: every_steps")
        self._most = max_rows
        self._groups = group_info
        self._name = name
        self._writer: SummaryWriter | None = None
        self._watch: RemovableHandle | None = None
        self._parts: Tensor | None = None

    def after_create(self, run: TrainingRun) -> None:
        self._writer = run.summaries
        self._every.begin(run.step)

    def before_step(self, run: TrainingRun) -> None:
        if self._writer is not None and self._every.crossed(run.step + 1):
            self._watch = watch_segments(
                self._layer, list(self._segments.values()), self._keep, aggregate=self._label is None
            )

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if self._watch is None:
            return
        self._unwatch()
        parts, self._parts = self._parts, None
        # A layer that did not run in this step, or not on one row for each example, has nothing to tell.
        if self._writer is None or parts is None or len(parts) != result.examples:
            return
        count = len(self._segments)
        label = label_of(result, self._label, self._most)
        summary = insight_data(
            parts[: self._most],
            list(self._segments),
            [parts.shape[1] // count] * count,
            group_info=self._groups,
            label=label,
            name=self._name,
        )
        self._writer.tensor(summary, result.step)

    def close(self) -> None:
        self._unwatch()

    def _keep(self, parts: Tensor) -> None:
        self._parts = parts

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


# Feature insight for any model: how far the loss would move without a feature.
#
# A ready model has a layer that sees all features, which tells what each brings (`FeatureInsightHook`). A
# module of one's own may have no such layer. But whatever it does, it reads embeddings, and the loss has a
# gradient for each of them. Their product with the embedding is, to first order, what the loss of an example
# would change by if the feature were not there.


class ModelInsightHook(Hook):
    """Writes how far the loss would move without each feature, every `every_steps` steps, whatever the model.

    Features that a layout has added up have one number together, under their names with `+` between.

    Args:
        label: Name of the label that is written next to them, with the direction in which the loss would
            move; None writes only how far.
        max_rows: Examples of a batch that are written.
    """

    def __init__(
        self,
        *,
        label: str | None = None,
        every_steps: int = 1000,
        max_rows: int = 512,
        name: str | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"feature insight: max_rows must be at least 1, got {max_rows}")
        self._every = Every(every_steps, "feature insight: every_steps")
        self._most = max_rows
        self._label = label
        self._name = name
        self._writer: SummaryWriter | None = None
        self._collections: list[EmbeddingCollection] = []
        self._watches: list[RemovableHandle] = []
        self._moved: dict[str, Tensor] = {}

    def after_create(self, run: TrainingRun) -> None:
        self._writer = run.summaries
        self._collections = [one for one in run.model.modules() if isinstance(one, EmbeddingCollection)]
        self._every.begin(run.step)

    def before_step(self, run: TrainingRun) -> None:
        if self._writer is not None and self._every.crossed(run.step + 1):
            self._watches = [one.register_forward_hook(self._watch) for one in self._collections]

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if not self._watches:
            return
        self._unwatch()
        moved, self._moved = self._moved, {}
        # Of a loss that is a mean, an example has only its share.
        parts = {
            name: values[: self._most] * result.examples
            for name, values in sorted(moved.items())
            if len(values) == result.examples
        }
        if self._writer is not None and parts:
            together = torch.stack(list(parts.values()), dim=1)
            label = label_of(result, self._label, self._most)
            summary = insight_data(
                together.abs() if label is None else together,
                list(parts),
                [1] * len(parts),
                label=label,
                name=self._name,
            )
            self._writer.tensor(summary, result.step)

    def close(self) -> None:
        self._unwatch()

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _watch(self, module: nn.Module, _arguments: Any, outputs: dict[str, Any]) -> None:
        assert isinstance(module, EmbeddingCollection)
        if not module.training:
            return
        for layout in module.layouts:
            found = outputs[layout.name]
            for number, tensor in enumerate(found if isinstance(found, list) else [found]):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._take, layout, number, tensor.detach()))

    def _take(self, layout: LayoutSpec, number: int, values: Tensor, gradient: Tensor) -> None:
        for name, part in _by_feature(layout, number, values * gradient.detach()):
            moved = part.reshape(len(part), -1).sum(1).cpu()
            self._moved[name] = self._moved[name] + moved if name in self._moved else moved


def _by_feature(layout: LayoutSpec, number: int, product: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the part of each feature of one output; see `LayoutKind`."""
    names = [one.feature for one in layout.slices]
    if layout.kind is LayoutKind.NONE:
        yield names[number], product
    elif layout.kind is LayoutKind.CONCAT:
        yield from zip(names, torch.split(product, [one.dim for one in layout.slices], -1), strict=True)
    elif layout.kind is LayoutKind.STACK:
        yield from zip(names, product.unbind(dim=1), strict=True)
    else:
        yield "+".join(dict.fromkeys(names)), product


# What layers of selection make of each feature, for `monolith evaluate insight` and TensorBoard.
#
# A search over widths (`IRazor`) has weights of its own, written as `selecting`. A gate (`SeNet`) computes
# how much each feature counts anew for every example; the mean over the batch of a step is written as
# `gating`. Only the steps that are written are watched, so other steps cost nothing.


def searches_of(module: nn.Module) -> dict[str, IRazor]:
    """Return the layers of a model that search for the width of embeddings, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, IRazor)}


def gates_of(module: nn.Module) -> dict[str, SeNet]:
    """Return the layers of a model that weigh features, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, SeNet)}


class NasDataHook(Hook):
    """Writes how likely each width is for each feature, every `every_steps` steps and when the run ends well;
    and how much each feature counts, in the batches of these steps.

    Args:
        searches: By name; see `searches_of`.
        gates: By name; see `gates_of`.
        features: Feature to its width, for layers over as many; those of other layers are numbered.

    Raises:
        ConfigError: There is no such layer.
    """

    def __init__(
        self,
        searches: Mapping[str, IRazor],
        gates: Mapping[str, SeNet] | None = None,
        *,
        features: Mapping[str, int] | None = None,
        every_steps: int = 1000,
    ) -> None:
        if not searches and not gates:
            raise ConfigError(
                "nas data: the model has no IRazor or SeNet layer whose weights could be written"
            )
        self._searches = dict(searches)
        self._gates = dict(gates or {})
        self._features = dict(features or {})
        self._every = Every(every_steps, "nas data: every_steps")
        self._watched = Every(every_steps, "nas data: every_steps")
        self._watches: list[RemovableHandle] = []
        self._counts: dict[str, Tensor] = {}
        self._writer: SummaryWriter | None = None
        self._written: int | None = None

    def after_create(self, run: TrainingRun) -> None:
        self._writer = run.summaries
        self._every.begin(run.step)
        self._watched.begin(run.step)

    def before_step(self, run: TrainingRun) -> None:
        if self._writer is not None and self._watched.crossed(run.step + 1):
            self._watches = [
                gate.excite.register_forward_hook(partial(self._keep, name))
                for name, gate in self._gates.items()
            ]

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self._unwatch()
        counts, self._counts = self._counts, {}
        if self._writer is not None:
            for name, gates in counts.items():
                names, widths = self._named(len(gates))
                self._writer.tensor(nas_data(gates, names, widths, name=_tag(name)), result.step)
        if self._every.crossed(result.step):
            self._write(result.step)

    def end(self, run: TrainingRun) -> None:
        if self._written != run.step:
            self._write(run.step)

    def close(self) -> None:
        self._unwatch()

    def _keep(self, name: str, _module: nn.Module, _inputs: object, weights: Tensor) -> None:
        self._counts[name] = weights.detach().float().mean(0).cpu()

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _named(self, count: int) -> tuple[list[str], list[int]]:
        """Return the names of the features of a layer, and how wide each is."""
        if len(self._features) == count:
            return list(self._features), list(self._features.values())
        return [f"feature {number}" for number in range(count)], [1] * count

    def _write(self, step: int) -> None:
        if self._writer is None:
            return
        for name, search in self._searches.items():
            weights = search.choice_weights()
            widths = [list(search.nas_space)] * len(weights)
            known, _ = self._named(len(weights))
            self._writer.tensor(nas_data(weights, known, widths, name=_tag(name)), step)
        self._writer.flush()
        self._written = step


def _tag(name: str) -> str | None:
    return name.replace(".", "_") or None
