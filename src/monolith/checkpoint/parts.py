"""The parts of a checkpoint in addition to tables: dense weights, plain state, and the feature spec."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint.dense.state import DenseSelection, DenseSnapshot, capture_dense, restore_dense
from monolith.checkpoint.dense.training_state import Optimizers, Schedulers
from monolith.checkpoint.part import (
    FEATURES,
    Changes,
    Entry,
    InputAxes,
    RestoreOptions,
    RestoreReport,
    SavedPart,
)
from monolith.errors import ConfigError, RestoreError
from monolith.feature import FeatureSpec, FloatFeature, HistoryFeature
from monolith.feature.spec.feature_spec import differences
from monolith.tensors.files import FileRecord, read_tensors, write_tensors
from monolith.tensors.plain_state import decode, encode


class DensePart:
    """A model's parameters and buffers, its optimizers, and the random generators.

    Examples:
        >>> import torch
        >>> from monolith import Checkpointer, DensePart, Saver
        >>> model = torch.nn.Linear(2, 1)
        >>> part = DensePart(model, [torch.optim.Adam(model.parameters())])
        >>> checkpointer = Checkpointer(Saver("run"), [part])
        >>> prefix = checkpointer.save(100)
        >>> saved = model.weight.detach().clone()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> checkpointer.restore(prefix).step, torch.equal(model.weight, saved)
        (100, True)
    """

    name = "dense"

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers = (),
        schedulers: Schedulers = (),
        *,
        random: bool = True,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._random = random

    def snapshot(self, step: int) -> DenseSnapshot:
        return capture_dense(
            self._model, self._optimizers, self._schedulers, random=self._random, global_step=step
        )

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        if not chain:
            return RestoreReport(missing=("dense weights",))
        prefix, entry = chain[-1]
        return restore_dense(
            prefix,
            self._model,
            self._optimizers,
            self._schedulers,
            records={name: FileRecord(**record) for name, record in entry["files"].items()},
            options=options,
            selection=DenseSelection(random=self._random and options.changes is None),
        )


class StatePart:
    """Plain values and tensors, such as the position of a source or the counts of a metric.

    The values are in the manifest itself; tensors, if there are any, in `<prefix>.<name>.safetensors`.

    Args:
        read: Returns the current state.
        write: Receives the saved state; not called if there is none.
        longest_text: Characters of a text that the manifest should hold; a longer one is a tensor of its
            bytes.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        *,
        longest_text: float = math.inf,
    ) -> None:
        self.name = name
        self._longest_text = longest_text
        self._read = read
        self._write = write

    def snapshot(self, step: int) -> StateSnapshot:  # noqa: ARG002
        tensors: dict[str, Tensor] = {}
        value = encode(self._read(), self.name, tensors, longest_text=self._longest_text)
        return StateSnapshot(self.name, json.dumps(value), {name: t.clone() for name, t in tensors.items()})

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:  # noqa: ARG002
        if not chain:
            return RestoreReport(missing=(self.name,))
        prefix, entry = chain[-1]
        if "value" not in entry:
            raise RestoreError(f"cannot restore {self.name} from {prefix}: it has no value")
        tensors: dict[str, Tensor] = {}
        for name, record in entry.get("files", {}).items():
            path = filesystem.join(filesystem.parent(prefix), name)
            tensors |= read_tensors(path, record=FileRecord(**record))
        self._write(decode(entry["value"], tensors))
        return RestoreReport(loaded={self.name: ""})


class StateSnapshot:
    """A copy of plain values and tensors."""

    def __init__(self, name: str, text: str, tensors: dict[str, Tensor]) -> None:
        self._name = name
        self._text = text
        self._tensors = tensors
        self.more: Entry = {}
        """Further keys of the entry."""

    def write(self, prefix: str, *, full: bool) -> Entry:  # noqa: ARG002
        entry: Entry = {"value": json.loads(self._text), **self.more}
        if self._tensors:
            path = f"{prefix}.{self._name}.safetensors"
            record = write_tensors(path, self._tensors, {})
            entry["files"] = {filesystem.base_name(path): asdict(record)}
        return entry

    def close(self, *, saved: bool) -> None: ...


# The feature spec: which raw data the rows and weights were trained with

OF_IDS = ("type", "kind", "boundaries", "of", "gaps")
"""Settings of a feature that decide which id a value becomes."""
OF_NUMBERS = ("width", "scale", "mean", "std")
"""Settings of a feature of numbers that decide what a number becomes."""


class FeaturesPart(StatePart):
    """A feature spec: which raw data the rows and weights were trained with. A text in the manifest.

    Restoring changes nothing: it refuses a checkpoint whose features mean other things.
    """

    def __init__(self, spec: FeatureSpec, axes: InputAxes | None = None, *, all_read: bool = True) -> None:
        """
        Args:
            axes: The inputs along the axes of the model's weights; see `Changes`.
            all_read: Whether the model reads every feature. Otherwise features may come and go.
        """
        super().__init__(FEATURES, spec.to_json, lambda _: None)
        self._spec = spec
        self._axes = dict(axes or {})
        self._all_read = all_read

    def snapshot(self, step: int) -> StateSnapshot:
        taken = super().snapshot(step)
        taken.more = {"inputs": self._axes}
        return taken

    def changes(self, chain: Sequence[SavedPart]) -> Changes:
        """Return how the model differs from that of a checkpoint."""
        if not chain:
            return Changes(now=self._axes)
        prefix, entry = chain[-1]
        found = saved_spec(prefix, entry.get("value"))
        fresh: dict[str, str] = {}
        rescaled = []
        if self._spec.fids != found.fids:
            why = f"fids was {found.fids} in the checkpoint and is {self._spec.fids} now"
            fresh = {self._spec.rows(name): why for name in self._spec.with_rows}
        for name, one in self._spec.features.items():
            other = found.features.get(name)
            if other is None:
                continue
            differ = list(differences(other, one))
            meaning = [each for each in differ if each[0] in OF_IDS]
            if isinstance(one, FloatFeature):
                if type(one) is not type(other) or any(each[0] in OF_NUMBERS for each in differ):
                    rescaled.append(name)
            elif meaning and not isinstance(one, HistoryFeature):  # which has no rows of its own
                path, before, now = meaning[0]
                what = "" if path == "boundaries" else f": {before} in the checkpoint, {now} now"
                fresh[self._spec.rows(name)] = f"features.{name}.{path} changed{what}"
        return Changes(fresh=fresh, rescaled=tuple(rescaled), before=entry.get("inputs", {}), now=self._axes)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        """Compare the specs. A checkpoint without one is of a model that was built by hand, and fits any
        spec.

        Raises:
            RestoreError: The saved spec gives rows or weights another meaning; names the first difference.
        """
        if not chain:
            return RestoreReport()
        if options.changes is not None:
            return RestoreReport()
        prefix, entry = chain[-1]
        found = saved_spec(prefix, entry.get("value"))
        difference = self._spec.difference(found, strict=options.strict and self._all_read)
        if difference is not None:
            raise RestoreError(
                f"cannot restore {prefix}: {difference}. Resume with the features it was trained by, which "
                "`monolith checkpoint inspect` prints; or start a run of the changed model from it: monolith "
                f"train --from {filesystem.parent(prefix)} --model-dir NEW-FOLDER."
            )
        return RestoreReport(loaded={FEATURES: ""})


def saved_spec(prefix: str, value: Any) -> FeatureSpec:
    """Return the spec of a manifest.

    Raises:
        RestoreError: This version cannot read it.
    """
    try:
        return FeatureSpec.from_json(value, prefix)
    except (ConfigError, TypeError) as cause:
        raise RestoreError(f"cannot restore {prefix}: its features cannot be read: {cause}") from cause
