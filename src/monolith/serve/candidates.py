"""Candidates: one row of a user's features with the rows of many items, in one request.

    {"user": ["ann"], "age": [31.0], "item": [7, 8, 9], "price": [3.5, 4.0, 1.0]}

A column with one row, next to columns of n rows, holds for all n. Its IDs are read and looked up once, and
the part of the dense half that depends on such columns alone is computed once (`split_graph`). A batch of
several requests has a row of each user, and the number of items of each. A dense half that is a Python module
or a compiled package gets full rows instead.

A server packs both sides out of the bytes of a request (`native.PackedRanking`); other requests come as
`CandidateColumns`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monolith import concurrency, native
from monolith.errors import ExportError, RequestTooLargeError
from monolith.feature import Batch, CrossFeature, FeatureIds, FeatureSpec, Gatherer
from monolith.feature.gathering import PackedBatch
from monolith.serve.dense import DenseGraph, SplitDense
from monolith.serve.histories import HistoryGraphs, RankedHistories
from monolith.serve.jagged import JaggedInputs
from monolith.serve.manifest import Servable, ServableCollection, ServableLayout
from monolith.serve.request_reader import MOST_REPEATED, Kind, RequestReader
from monolith.serve.rows import FoundRows, RowSource
from monolith.serve.split_graph import SplitInput
from monolith.tensors import RaggedTensor
from monolith.wire.open_inference import SPLITS

_log = logging.getLogger(__name__)

_MOST_SPLITS = 16
"""Ways of a model to tell columns of users from columns of items; requests in further ways get full rows."""


@dataclass(frozen=True, slots=True, eq=False)
class CandidateColumns:
    """The columns of one or several ranking requests.

    Example: two users, the first with two items: shared {"user": ["ann", "bob"]}, own {"item": [7, 8, 7]},
    counts [2, 1].
    """

    shared: Mapping[str, Any]
    """Columns with one row per user, in the forms of `request_reader`."""
    own: Mapping[str, Any]
    """Columns with one row per item, the items of each user after those of the one before."""
    counts: NDArray[np.int64]
    """Items of each user."""

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def repeated(self, names: Sequence[str]) -> dict[str, Any]:
        """Return shared columns with one row per item.

        Raises:
            RequestTooLargeError: They have too many values.
        """
        found: dict[str, Any] = {}
        for name in names:
            column, splits = self.shared[name], self.shared.get(name + SPLITS)
            size = _size(column) * int(self.counts.max(initial=0))
            if size > MOST_REPEATED:
                raise RequestTooLargeError(
                    f"column {name!r} has one row for all items, and would have {size} values or bytes if it "
                    f"is repeated for each; the most are {MOST_REPEATED}. Send fewer items in a request."
                )
            if splits is not None:
                found[name], found[name + SPLITS] = _repeat_lists(column, np.asarray(splits), self.counts)
            elif isinstance(column, RaggedTensor):
                rows = _repeat(column.to_list(), self.counts)
                found[name] = RaggedTensor.from_list(rows, dtype=column.dtype, ragged_rank=column.ragged_rank)
            else:
                found[name] = _repeat(column, self.counts)
        return found

    def full(self) -> dict[str, Any]:
        """Return all columns with one row per item."""
        names = [name for name in self.shared if not _has_splits(name, self.shared)]
        return {**self.repeated(names), **self.own}


def find_candidates(columns: Mapping[str, Any], known: Sequence[str]) -> CandidateColumns | None:
    """Return the columns of one ranking request by side; None if all columns have as many rows.

    Columns that are wrong in another way are left to `RequestReader`, which says how.

    Args:
        known: The columns that the model reads.
    """
    try:
        sizes = {name: _rows(name, columns) for name in known if name in columns}
    except TypeError:
        return None
    counts = set(sizes.values())
    if len(counts) != 2 or 1 not in counts:
        return None
    counts.discard(1)
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, size in sizes.items():
        side = sides[size != 1]
        side[name] = columns[name]
        if name + SPLITS in columns:
            side[name + SPLITS] = columns[name + SPLITS]
    return CandidateColumns(*sides, np.array([counts.pop()], np.int64))


def _rows(name: str, columns: Mapping[str, Any]) -> int:
    if name + SPLITS in columns:
        return len(columns[name + SPLITS]) - 1
    column = columns[name]
    return column.nrows if isinstance(column, RaggedTensor) else len(column)


def _has_splits(name: str, columns: Mapping[str, Any]) -> bool:
    """Whether a column has the row splits of another."""
    return name.endswith(SPLITS) and name.removesuffix(SPLITS) in columns


def _size(column: Any) -> int:
    """Return how many numbers, or bytes of texts, a column has."""
    if isinstance(column, RaggedTensor):
        return column.flat_values.numel()
    if isinstance(column, Tensor):
        return column.numel()
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column.size
    return sum(
        _size(one)
        if isinstance(one, (list, tuple, np.ndarray))
        else len(one)
        if hasattr(one, "__len__")
        else 1
        for one in column
    )


def _repeat(column: Any, counts: NDArray[np.int64]) -> Any:
    if isinstance(column, Tensor):
        return column.repeat_interleave(torch.from_numpy(counts), 0)
    if isinstance(column, np.ndarray):
        return np.repeat(column, counts, axis=0)
    return [value for value, count in zip(column, counts.tolist(), strict=True) for _ in range(count)]


def _repeat_lists(values: Any, splits: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Any, Any]:
    """Return the values and row splits of lists that are repeated."""
    lengths = np.diff(splits)
    kept = [
        place
        for begin, length, count in zip(splits[:-1].tolist(), lengths.tolist(), counts.tolist(), strict=True)
        for _ in range(count)
        for place in range(begin, begin + length)
    ]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.repeat(lengths, counts), dtype=np.int64)])
    return ([values[place] for place in kept] if isinstance(values, list) else values[kept]), ends


class CandidateRunner:
    """Answers ranking requests with a graph that is split by side. Thread-safe.

    Shapes: g users and n items in, float32 (n,) per head out.

    Args:
        servable: The model.
        graph: Its dense half: that of a model with histories in two graphs.
        rows: Looks up rows.
        workers: Threads for large batches.
        inputs: The columns that it reads, in the order of the plan that packs requests.
    """

    def __init__(
        self,
        servable: Servable,
        graph: DenseGraph | HistoryGraphs,
        rows: RowSource,
        workers: native.Workers,
        inputs: Sequence[str],
    ) -> None:
        assert servable.dense is not None
        assert servable.signature is not None
        self._servable = servable
        self._spec = servable.spec
        self._dense = servable.dense
        self._kinds: dict[str, Kind] = {one.name: one.kind for one in servable.signature.inputs}
        self._graph = graph
        self._rows = rows
        self._workers = workers
        self._inputs = tuple(inputs)
        self._lock = concurrency.Lock()  # guards `_splits`, and is held while one is made
        self._splits: dict[frozenset[str], _BySide | None] = {}
        self._own_names: dict[bytes, frozenset[str]] = {}
        """The columns of items by `native.PackedRanking.own`."""

    def run(
        self, asked: CandidateColumns | native.PackedRanking, deadline: float | None
    ) -> tuple[Mapping[str, Tensor], Sequence[FoundRows]] | None:
        """Return predictions by head, and the rows they were made of; None if full rows are needed.

        Raises:
            RequestError: A column or a value does not fit the model.
        """
        if isinstance(asked, native.PackedRanking):
            own = self._own_names.get(asked.own) or self._names_of(asked.own)
        else:
            own = frozenset(asked.own)
        split = self._splits[own] if own in self._splits else self._make(own)
        if split is None:
            return None
        shared_batch, own_batch = split.batches(asked)
        found: list[FoundRows] = []
        with torch.inference_mode():
            tensors = []
            for side, batch in ((split.shared, shared_batch), (split.own, own_batch)):
                made: list[Tensor] = []
                ids = batch.ids
                for gatherer in side.gatherers:
                    gathered, rows = self._rows.gather(gatherer, ids, deadline=deadline)
                    found.append(rows)
                    made += gathered
                if side.jagged:
                    assert isinstance(ids, FeatureIds), "requests with lists are not packed"
                    made = side.jagged.tensors(made, ids)
                tensors.append([*made, *(batch.floats[name] for name in side.floats)])
            outputs = split.dense(tensors[0], tensors[1], asked.counts)
        return dict(zip(self._dense.outputs, outputs, strict=True)), found

    def _names_of(self, own: bytes) -> frozenset[str]:
        found = frozenset(name for name, is_own in zip(self._inputs, own, strict=True) if is_own)
        if len(self._own_names) < _MOST_SPLITS:
            self._own_names[own] = found
        return found

    def _make(self, own: frozenset[str]) -> _BySide | None:
        with self._lock:
            if own in self._splits:
                return self._splits[own]
            if len(self._splits) >= _MOST_SPLITS:
                return None
            try:
                made = self._split(own)
            except ExportError as error:
                _log.warning(
                    "model %r: ranking requests are answered with full rows: %s", self._servable.model, error
                )
                made = None
            self._splits[own] = made
            return made

    def _split(self, own_columns: frozenset[str]) -> _BySide | None:
        features = dict.fromkeys(
            [name for one in self._servable.collections for name in one.inputs] + list(self._dense.floats)
        )
        columns = {name: _columns_of(self._spec, name) for name in features}
        own = {name for name in features if not columns[name].isdisjoint(own_columns)}
        shared = features.keys() - own
        if not shared or not own:
            return None
        sides = {False: _Side.of(self, shared), True: _Side.of(self, own)}
        if sides[True].jagged:
            raise ExportError(
                "a history is encoded once only if all of its columns, and the event time, have one row for "
                f"all items; requests have a row for each, for {', '.join(sides[True].jagged.histories)}"
            )
        inputs: list[SplitInput] = []
        outputs = {False: 0, True: 0}
        for collection in self._servable.collections:
            for layout in sorted(collection.layouts, key=lambda one: one.name):
                inputs += _split_layout(layout, collection, own, outputs)
        if times := sides[False].jagged.times:
            inputs += [SplitInput(outputs[False] + number, None) for number in range(len(times) + 1)]
            outputs[False] += len(times) + 1
        for name in self._dense.floats:
            side = name in own
            inputs.append(SplitInput(None, outputs[side]) if side else SplitInput(outputs[side], None))
            outputs[side] += 1
        return _BySide(sides[False], sides[True], self._graph.split(inputs))

    def make_side(self, names: Sequence[str]) -> tuple[RequestReader, tuple[Gatherer, ...]]:
        """Return what reads some features, and what gathers their rows."""
        chosen = set(names)
        gatherers = []
        for collection in self._servable.collections:
            kept = replace(
                collection,
                inputs={name: one for name, one in collection.inputs.items() if name in chosen},
                layouts=tuple(
                    replace(layout, slices=slices)
                    for layout in collection.layouts
                    if (slices := tuple(one for one in layout.slices if one.feature in chosen))
                ),
            )
            if kept.layouts:
                gatherers.append(Gatherer(kept.plan(self._rows.tables), self._workers))
        if self._spec is None:
            floats = {name: width for name, width in self._dense.floats.items() if name in chosen}
            ids = [name for name in names if name not in floats]
            return RequestReader(None, ids, floats, self._kinds), tuple(gatherers)
        return RequestReader(self._spec.only(with_parts(self._spec, names)), kinds=self._kinds), tuple(
            gatherers
        )

    @property
    def floats(self) -> Sequence[str]:
        return tuple(self._dense.floats)

    @property
    def times(self) -> Sequence[str]:
        return self._dense.times


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The features of users, or those of items."""

    reader: RequestReader
    gatherers: tuple[Gatherer, ...]
    jagged: JaggedInputs
    """The histories among them."""
    columns: frozenset[str]
    """The columns that they read."""
    floats: tuple[str, ...]

    @classmethod
    def of(cls, runner: CandidateRunner, names: set[str]) -> _Side:
        reader, gatherers = runner.make_side(sorted(names))
        plans = [one.plan for one in gatherers]
        has_histories = bool(JaggedInputs(plans))
        return cls(
            reader,
            gatherers,
            JaggedInputs(plans, runner.times if has_histories else ()),
            frozenset(one.name for one in reader.inputs),
            tuple(name for name in runner.floats if name in names),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _BySide:
    shared: _Side
    own: _Side
    dense: SplitDense | RankedHistories

    def batches(
        self, asked: CandidateColumns | native.PackedRanking
    ) -> tuple[Batch | PackedBatch, Batch | PackedBatch]:
        """Return the features of users, and those of items."""
        if isinstance(asked, native.PackedRanking):
            return self.shared.reader.packed_batch(asked.shared), self.own.reader.packed_batch(asked.items)
        shared, own = (
            {name: column for name, column in given.items() if name.removesuffix(SPLITS) in side.columns}
            for side, given in ((self.shared, asked.shared), (self.own, asked.own))
        )
        needed = [name for name in self.own.columns if name in asked.shared]
        return self.shared.reader.batch(shared), self.own.reader.batch({**asked.repeated(needed), **own})


def with_parts(spec: FeatureSpec, names: Sequence[str]) -> list[str]:
    """Return features with those that crosses among them are of."""
    found = dict.fromkeys(names)
    for name in names:
        one = spec.features.get(name)  # none of a list of a history, or of time gaps
        if isinstance(one, CrossFeature):
            found |= dict.fromkeys(with_parts(spec, one.of))
    return list(found)


def _columns_of(spec: FeatureSpec | None, name: str) -> frozenset[str]:
    return frozenset((name,)) if spec is None else frozenset(spec.only(with_parts(spec, [name])).inputs)


def _split_layout(
    layout: ServableLayout, collection: ServableCollection, own: set[str], outputs: dict[bool, int]
) -> list[SplitInput]:
    """Return how the tensors of a layout are made of those of the two sides.

    Args:
        outputs: How many tensors each side has before; counted on.
    """

    def place(side: bool) -> int:
        outputs[side] += 1
        return outputs[side] - 1

    sides = [one.feature in own for one in layout.slices]
    if collection.inputs[layout.slices[0].feature].combiner == "each":
        return [SplitInput(place(False), None) for _ in layout.slices for _ in ("values", "ends", "numbers")]
    if layout.kind == "NONE":
        return [SplitInput(None, place(True)) if side else SplitInput(place(False), None) for side in sides]
    if len(set(sides)) == 1:
        return [SplitInput(None, place(True)) if sides[0] else SplitInput(place(False), None)]
    both = (place(False), place(True))
    if layout.kind == "ADDN":
        return [SplitInput(*both)]
    places: tuple[list[int], list[int]] = ([], [])
    at = 0
    for side, one in zip(sides, layout.slices, strict=True):
        width = 1 if layout.kind == "STACK" else one.end - one.start
        places[side].extend(range(at, at + width))
        at += width
    # CONCAT is (rows, floats), or (rows, positions, floats) of features that keep their first IDs; STACK is
    # (rows, slices, ...).
    has_positions = collection.inputs[layout.slices[0].feature].length > 0
    dim = 2 if layout.kind == "CONCAT" and has_positions else 1
    return [SplitInput(*both, dim, tuple(places[False]), tuple(places[True]))]
