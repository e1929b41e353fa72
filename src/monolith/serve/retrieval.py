"""The towers of a retrieval model: the vector of a user or of an item, from raw columns.

A `RetrievalModel` is exported with a graph for each side next to the graph of its scores, so that items can
be embedded once and searched (`item_index`), and a user is embedded without an item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monolith.feature import Batch, Gatherer
from monolith.serve.dense import DenseGraph
from monolith.serve.jagged import JaggedInputs
from monolith.serve.manifest import Servable
from monolith.serve.request_reader import Kind, RequestReader
from monolith.serve.rows import FoundRows, RowSource
from monolith.store import TableIds


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """What a delta changed, or new dense weights."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Table -> IDs whose rows are new or different."""
    removed: Mapping[str, Tensor] = field(default_factory=dict)
    """Table -> IDs that have no row any more."""
    weights: Mapping[str, Tensor] | None = None
    """New dense weights, if there are any."""


RowsListener = Callable[[ChangedRows | None], None]
"""Called after a change; with None if any row may have changed. It must not wait."""


class TowerRunner:
    """Embeds users, or items, with one tower of a retrieval model. Thread-safe.

    Shapes: n rows in, vectors float32 (n, out) out.

    Args:
        side: "user" or "item".
        graph: The tower.
        gatherers: Of the collections of the model.
        rows: Looks up rows.
    """

    def __init__(
        self, servable: Servable, side: str, graph: DenseGraph, gatherers: Sequence[Gatherer], rows: RowSource
    ) -> None:
        dense, signature = servable.dense, servable.signature
        assert dense is not None
        assert dense.towers is not None
        assert signature is not None
        self.features = dense.towers.user if side == "user" else dense.towers.item
        kinds: dict[str, Kind] = {one.name: one.kind for one in signature.inputs}
        spec = servable.spec
        if spec is None:
            floats = {name: width for name, width in dense.floats.items() if name in self.features}
            ids = [name for name in self.features if name not in floats]
            self.reader = RequestReader(None, ids, floats, kinds)
        else:
            self.reader = RequestReader(spec.only(self.features), kinds=kinds)
        self._floats = dict(dense.floats)
        self._graph = graph
        self._gatherers = gatherers
        self._rows = rows
        self._jagged = JaggedInputs([one.plan for one in gatherers], dense.times)

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from the next call on.

        Raises:
            RestoreError: Names or shapes differ.
        """
        self._graph.swap(weights)

    def embed(self, columns: Any, deadline: float | None = None) -> tuple[Tensor, list[FoundRows]]:
        """Return the vectors of some rows of raw columns, and the embedding rows they were made of.

        Raises:
            RequestError: A column or a value does not fit the model.
        """
        return self.embed_batch(self.reader.batch(columns), deadline)

    def embed_batch(self, batch: Batch, deadline: float | None = None) -> tuple[Tensor, list[FoundRows]]:
        """Return the vectors of a batch that may have the features of this tower alone."""
        found: list[FoundRows] = []
        tensors: list[Tensor] = []
        with torch.inference_mode():
            for gatherer in self._gatherers:
                gathered = gatherer.read(batch.ids)  # features of the other tower have no IDs: zeros
                rows = self._rows.lookup(TableIds(gathered.ids, gathered.sizes), deadline=deadline)
                found.append(rows)
                tensors += gathered.gather(rows.rows)
            tensors = self._jagged.tensors(tensors, batch.ids)
            floats = [
                batch.floats[name] if name in batch.floats else torch.zeros(len(batch), width)
                for name, width in self._floats.items()
            ]
            (vectors,) = self._graph(tensors, floats)
        return vectors, found
