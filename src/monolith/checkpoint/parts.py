"""The parts of a checkpoint besides tables: dense weights, and whatever else is plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint.dense.state import DenseSnapshot, capture_dense, restore_dense
from monolith.checkpoint.dense.training_state import Optimizers, Schedulers
from monolith.checkpoint.part import Entry, RestoreOptions, SavedPart
from monolith.checkpoint.report import RestoreReport
from monolith.errors import RestoreError
from monolith.tensors.files import FileRecord, read_tensors, write_tensors
from monolith.tensors.plain_state import decode, encode


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
        prefix, entry = chain[-1]
        return restore_dense(
            prefix,
            self._model,
            self._optimizers,
            self._schedulers,
            records={name: FileRecord(**record) for name, record in entry["files"].items()},
            custom=options.custom,
            strict=options.strict,
            optimizer_state=options.optimizer_state,
            model_dir=options.model_dir,
            random=self._random and options.changes is None,
            changes=options.changes,
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


class StatePart:
    """Plain values and tensors, such as the position of a source or the counts of a metric.

    The values lie in the manifest itself; tensors, if there are any, in `<prefix>.<name>.safetensors`.

    Args:
        read: Returns the state of this moment.
        write: Takes a state that was saved; not called where there is none.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name = name
        self._read = read
        self._write = write

    def cut(self, step: int) -> StateCut:  # noqa: ARG002
        tensors: dict[str, Tensor] = {}
        value = encode(self._read(), self.name, tensors)
        return StateCut(self.name, json.dumps(value), {name: t.clone() for name, t in tensors.items()})

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:  # noqa: ARG002
        if not chain:
            return RestoreReport(missing=(self.name,))
        prefix, entry = chain[-1]
        if "value" not in entry:
            raise RestoreError(f"cannot restore {self.name} from {prefix}: it holds no value")
        tensors: dict[str, Tensor] = {}
        for name, record in entry.get("files", {}).items():
            path = filesystem.join(filesystem.parent(prefix), name)
            tensors |= read_tensors(path, record=FileRecord(**record))
        self._write(decode(entry["value"], tensors))
        return RestoreReport(loaded={self.name: ""})


class StateCut:
    """State that nobody changes any more."""

    def __init__(self, name: str, text: str, tensors: dict[str, Tensor]) -> None:
        self._name = name
        self._text = text
        self._tensors = tensors
        self.more: Entry = {}
        """What else the manifest keeps."""

    def write(self, prefix: str, *, full: bool) -> Entry:  # noqa: ARG002
        entry: Entry = {"value": json.loads(self._text), **self.more}
        if self._tensors:
            path = f"{prefix}.{self._name}.safetensors"
            record = write_tensors(path, self._tensors, {})
            entry["files"] = {filesystem.base_name(path): asdict(record)}
        return entry

    def close(self, *, saved: bool) -> None: ...
