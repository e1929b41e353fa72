"""The parts of a checkpoint besides tables: dense weights, and whatever fits into JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from torch import nn

from monolith.checkpoint.dense_files import FileRecord
from monolith.checkpoint.dense_state import (
    DenseSnapshot,
    Optimizers,
    Schedulers,
    capture_dense,
    restore_dense,
)
from monolith.checkpoint.part import Entry, RestoreOptions, SavedPart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import RestoreError, SaveError


class DensePart:
    """A model's parameters and buffers, its optimizers, and the random generators."""

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

    def cut(self, step: int) -> DenseCut:
        return DenseCut(
            capture_dense(
                self._model,
                self._optimizers,
                self._schedulers,
                random=self._random,
                global_step=step,
            )
        )

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        if not chain:
            return RestoreReport(missing=("dense weights",))
        if options.optimizer_state != "auto":
            return self._restore(chain[-1], options, options.optimizer_state)
        try:
            return self._restore(chain[-1], options, "keep")
        except RestoreError:  # nothing was touched; it may be the optimizers that do not fit
            report = self._restore(chain[-1], options, "reset")
            return report.merge(RestoreReport(reset={"dense optimizers": "reset, because they changed"}))

    def _restore(
        self, saved: SavedPart, options: RestoreOptions, optimizer_state: Literal["keep", "reset"]
    ) -> RestoreReport:
        return restore_dense(
            saved.prefix,
            self._model,
            self._optimizers,
            self._schedulers,
            records={name: FileRecord(**record) for name, record in saved.entry["files"].items()},
            custom=options.custom,
            strict=options.strict,
            optimizer_state=optimizer_state,
            model_dir=options.model_dir,
            random=self._random,
        )


class DenseCut:
    """A copy of the weights, to be written."""

    def __init__(self, snapshot: DenseSnapshot) -> None:
        self._snapshot: DenseSnapshot | None = snapshot

    def write(self, prefix: str, *, full: bool) -> Entry:  # noqa: ARG002
        assert self._snapshot is not None
        return {"files": {name: asdict(record) for name, record in self._snapshot.write(prefix).items()}}

    def close(self, *, saved: bool) -> None:  # noqa: ARG002
        self._snapshot = None


class PlainPart:
    """A value that survives JSON, such as the position of a source; it lies in the manifest itself.

    Args:
        read: Returns the value of this moment.
        write: Takes a value that was saved; not called where there is none.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name = name
        self._read = read
        self._write = write

    def cut(self, step: int) -> PlainCut:  # noqa: ARG002
        value = self._read()
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise SaveError(f"cannot save {self.name}: {cause}; it must be made of plain values") from cause
        return PlainCut(text)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:  # noqa: ARG002
        if not chain:
            return RestoreReport(missing=(self.name,))
        if "value" not in chain[-1].entry:
            raise RestoreError(f"cannot restore {self.name} from {chain[-1].prefix}: it holds no value")
        self._write(chain[-1].entry["value"])
        return RestoreReport(loaded={self.name: ""})


class PlainCut:
    """A value as text, which nobody changes any more."""

    def __init__(self, text: str) -> None:
        self._text = text

    def write(self, prefix: str, *, full: bool) -> Entry:  # noqa: ARG002
        return {"value": json.loads(self._text)}

    def close(self, *, saved: bool) -> None: ...
