"""What layers of selection make of each feature, for `monolith insight` and TensorBoard.

A search over widths (`IRazor`) has weights of its own, written as `selecting`. A gate (`SeNet`) computes how
much each feature counts anew for every example; the mean over the batch of a step is written as `gating`.
Only the steps that are written are watched, so the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from monolith.errors import ConfigError
from monolith.filesystem import join
from monolith.nn import IRazor, SeNet
from monolith.observe.summaries import nas_data
from monolith.observe.summary_files import SummaryWriter
from monolith.train.hook import Every, Hook, Run, StepResult
from monolith.train.hooks.reports.trackers import FOLDER


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

    def after_create(self, run: Run) -> None:
        if run.model_dir and self._writer is None:
            self._writer = SummaryWriter(join(run.model_dir, FOLDER))
            self._writer.start(run.step)
        self._every.begin(run.step)
        self._watched.begin(run.step)

    def before_step(self, run: Run) -> None:
        if self._writer is not None and self._watched.crossed(run.step + 1):
            self._watches = [
                gate.excite.register_forward_hook(partial(self._keep, name))
                for name, gate in self._gates.items()
            ]

    def after_step(self, run: Run, result: StepResult) -> None:  # noqa: ARG002
        self._unwatch()
        counts, self._counts = self._counts, {}
        if self._writer is not None:
            for name, gates in counts.items():
                names, widths = self._named(len(gates))
                self._writer.tensor(nas_data(gates, names, widths, name=_tag(name)), result.step)
        if self._every.crossed(result.step):
            self._write(result.step)

    def end(self, run: Run) -> None:
        if self._written != run.step:
            self._write(run.step)

    def close(self) -> None:
        self._unwatch()
        if self._writer is not None:
            self._writer.close()

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
