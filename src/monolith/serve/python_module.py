"""A dense half that is a Python module: for models that cannot be exported as a graph.

The servable names a function that makes the module, and its arguments. Serving it imports and runs that code,
so the operator of the server must allow it.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from monolith import concurrency
from monolith.errors import ConfigError, RestoreError, ServingTableError
from monolith.feature import Batch
from monolith.model import EmbeddingCollection
from monolith.serve.rows import FoundRows, RowSource
from monolith.store import TableIds
from monolith.table import SlotThresholds, TableConfig, TableStats


class PythonModule(NamedTuple):
    """A Python module to serve, and the function that runs it; the result of a factory."""

    module: nn.Module
    outputs: Callable[[nn.Module, Batch], Mapping[str, Tensor]]
    """Runs the module on a batch; returns predictions by head."""


def make_module(factory: str, arguments: Mapping[str, Any]) -> PythonModule:
    """Call the factory that a servable names.

    Args:
        factory: package.module:function.

    Raises:
        ConfigError: There is no such function, or it fails.
    """
    where, _, name = factory.partition(":")
    try:
        found = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ConfigError(
            f"the servable is made by {factory}, which cannot be imported here: {cause}. Install the package "
            "that it was trained with, or start in its folder."
        ) from cause
    made: PythonModule = found(**arguments)
    return made


class ModuleRunner:
    """Runs a Python module over rows for serving. Thread-safe if the module is, in eval mode."""

    def __init__(
        self, own: PythonModule, weights: Mapping[str, Tensor], rows: RowSource, labels: Sequence[str]
    ) -> None:
        self._module, self._outputs = own
        self._labels = tuple(labels)
        self._store = ServedRows(rows)
        for part in self._module.modules():
            if isinstance(part, EmbeddingCollection):
                part.bind(self._make_store)
        self._tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._module.eval()
        self._between = _BetweenBatches()
        self.swap(weights)

    def _make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
    ) -> ServedRows:
        del configs, thresholds, threads  # the collection itself checks that the tables fit
        return self._store

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from now on.

        Raises:
            RestoreError: Names or shapes differ.
        """
        for name, tensor in self._tensors.items():
            if name not in weights or weights[name].shape != tensor.shape:
                raise RestoreError(
                    f"the weights do not fit the module: {name!r} is missing, or of another shape"
                )
        with self._between, torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(weights[name])

    def run(self, batch: Batch, deadline: float | None) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]]:
        """Return predictions by head, and the rows that they were made of."""
        if self._labels and not batch.labels:
            unknown = torch.full((len(batch),), math.nan)
            batch = replace(batch, labels=dict.fromkeys(self._labels, unknown))
        with self._between.batch(), self._store.lookups(deadline) as rows, torch.no_grad():
            found = self._outputs(self._module, batch)
        return found, rows


class _BetweenBatches:
    """Lets many threads run batches, or one thread swap weights between them.

    A swap waits for the running batches, and no new batch starts while one waits: otherwise a busy server
    would never swap.
    """

    def __init__(self) -> None:
        self._changed = concurrency.Condition()
        # Both are guarded by the condition: running batches, and swaps that wait or run.
        self._batches = 0
        self._swaps = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._swaps)
            self._batches += 1
        try:
            yield
        finally:
            with self._changed:
                self._batches -= 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        self._changed.acquire()
        self._swaps += 1
        self._changed.wait_for(lambda: not self._batches)

    def __exit__(self, *_: object) -> None:
        self._swaps -= 1
        self._changed.notify_all()
        self._changed.release()


class _LookupContext(threading.local):
    """The deadline of the request that a thread runs, and the rows it has found."""

    deadline: float | None = None
    found: list[FoundRows] | None = None


class ServedRows:
    """Rows for serving, as a `Store` of which only `lookup` works."""

    delay_compensated = False

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows
        self._context = _LookupContext()

    def lookups(self, deadline: float | None) -> _LookupScope:
        """Set the deadline of this thread's lookups for a block, and collect the rows they find."""
        return _LookupScope(self._context, deadline)

    @property
    def tables(self) -> Mapping[str, int]:
        return self._rows.tables

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def lookup(self, ids: TableIds) -> Tensor:
        found = self._rows.lookup(ids, deadline=self._context.deadline)
        if self._context.found is not None:
            self._context.found.append(found)
        return found.rows

    def apply_gradients(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be trained."""
        raise ServingTableError("rows for serving cannot be trained")

    def attach_dense(self, *_: Any) -> NoReturn:
        """Refuse to be trained."""
        raise ServingTableError("rows for serving cannot be trained")

    def push_dense(self) -> None:
        """Do nothing: nothing is trained."""

    def pull_dense(self) -> None:
        """Do nothing: nothing is trained."""

    def count_expired(self, now: int) -> dict[str, int]:  # noqa: ARG002
        return {}

    def evict(self, *_: Any, **__: Any) -> dict[str, int]:
        return {}

    def stats(self) -> dict[str, TableStats]:
        return {}

    def close(self) -> None:
        """Do nothing: the owner of the rows closes them."""


class _LookupScope:
    """The lookups of one request, on one thread."""

    def __init__(self, context: _LookupContext, deadline: float | None) -> None:
        self._context = context
        self._deadline = deadline

    def __enter__(self) -> list[FoundRows]:
        found: list[FoundRows] = []
        self._context.deadline, self._context.found = self._deadline, found
        return found

    def __exit__(self, *_: object) -> None:
        self._context.deadline = self._context.found = None
