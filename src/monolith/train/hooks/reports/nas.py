"""Weights of an architecture search, where `monolith insight` and TensorBoard find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from monolith.errors import ConfigError
from monolith.filesystem import join
from monolith.nn import IRazor
from monolith.observe.summaries import nas_data
from monolith.observe.summary_files import SummaryWriter
from monolith.train.every import Every
from monolith.train.hook import Hook, Run, StepResult
from monolith.train.hooks.reports.trackers import FOLDER


def searches_of(module: nn.Module) -> dict[str, IRazor]:
    """Return the layers of a model that search for the width of embeddings, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, IRazor)}


class NasDataHook(Hook):
    """Writes how likely each width is for each feature, every `every_steps` steps and when the run ends well.

    Args:
        searches: By name; see `searches_of`.
        features: Names of the features, for searches over as many; others are numbered.

    Raises:
        ConfigError: There is no search.
    """

    def __init__(
        self, searches: Mapping[str, IRazor], *, features: Sequence[str] = (), every_steps: int = 1000
    ) -> None:
        if not searches:
            raise ConfigError("nas data: the model has no IRazor layer whose weights could be written")
        self._searches = dict(searches)
        self._features = list(features)
        self._every = Every(every_steps, "nas data: every_steps")
        self._writer: SummaryWriter | None = None
        self._written: int | None = None

    def after_create(self, run: Run) -> None:
        if run.model_dir and self._writer is None:
            self._writer = SummaryWriter(join(run.model_dir, FOLDER))
            self._writer.start(run.step)
        self._every.begin(run.step)

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        if self._every.crossed(result.step):
            self._write(result.step)

    def end(self, run: Run) -> None:
        if self._written != run.step:
            self._write(run.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int) -> None:
        if self._writer is None:
            return
        for name, search in self._searches.items():
            weights = search.choice_weights()
            count = len(weights)
            known = self._features if len(self._features) == count else [f"feature {i}" for i in range(count)]
            widths = [list(search.nas_space)] * count
            self._writer.tensor(nas_data(weights, known, widths, name=name.replace(".", "_") or None), step)
        self._writer.flush()
        self._written = step
