"""Feature insight for any model: how far the loss would move without a feature.

A ready model has a layer that sees all features, which tells what each brings (`FeatureInsightHook`). A
module of one's own may have no such layer. But whatever it does, it reads embeddings, and the loss has a
gradient for each of them. Their product with the embedding is, to first order, what the loss of an example
would change by if the feature were not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monolith.errors import ConfigError
from monolith.feature import LayoutKind, LayoutSpec
from monolith.filesystem import join
from monolith.model import EmbeddingCollection
from monolith.observe.summaries import insight_data
from monolith.observe.summary_files import SummaryWriter
from monolith.train.hook import Every, Hook, Run, StepResult
from monolith.train.hooks.reports.feature_insight import FOLDER, label_of


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

    def after_create(self, run: Run) -> None:
        if run.model_dir and self._writer is None:
            self._writer = SummaryWriter(join(run.model_dir, FOLDER))
            self._writer.start(run.step)
        self._collections = [one for one in run.model.modules() if isinstance(one, EmbeddingCollection)]
        self._every.begin(run.step)

    def before_step(self, run: Run) -> None:
        if self._writer is not None and self._every.crossed(run.step + 1):
            self._watches = [one.register_forward_hook(self._watch) for one in self._collections]

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
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
        if self._writer is not None:
            self._writer.close()

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
