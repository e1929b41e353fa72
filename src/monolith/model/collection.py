"""EmbeddingCollection: the sparse half of a model, as an `nn.Module`.

It turns a batch of ids into the tensors that the dense half reads. Rows live in a
store, not in parameters: there is no end to them, and they are born and expire while
the model trains. So they are not in `state_dict`, and a torch optimizer does not see
them; `EmbeddingOptimizer` does.

    embeddings = EmbeddingCollection([Layout("vectors", CONCAT, [...])])
    sparse, dense = EmbeddingOptimizer(embeddings), torch.optim.Adam(mlp.parameters())
    for batch in batches:
        loss = loss_of(mlp(embeddings(batch)["vectors"]), batch.label)
        loss.backward()
        sparse.step(), dense.step()
        sparse.zero_grad(), dense.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from monolith import concurrency, native
from monolith.cuda import Carriers, Device, Transfers, device_of
from monolith.errors import FeatureError
from monolith.feature import (
    Batch,
    FeatureColumn,
    FeatureIds,
    GatheredBatch,
    Gatherer,
    InputSpec,
    Layout,
    LayoutPlan,
    LayoutSpec,
    SliceSpec,
    SlotTables,
    collect_tables,
    plan_layouts,
)
from monolith.feature.cuda import DeviceBatch, DeviceGatherer, PaddedSteps
from monolith.feature.cuda.host_rows import HostRowBatch, HostRowGatherer
from monolith.store import LocalStore, MakeStore, Store, TableIds
from monolith.table.config import EmbeddingDtype, EmbeddingRounding, TableTiers
from monolith.tensors import RaggedTensor

_log = logging.getLogger(__name__)

Input = Batch | FeatureIds | Mapping[str, RaggedTensor | Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch whose rows were looked up ahead of the step that uses them.

    Shapes: u distinct IDs of all tables together; `rows` has as many floats for each as its table is wide.
    """

    gathered: GatheredBatch | DeviceBatch | HostRowBatch
    keys: TableIds
    rows: Tensor | None
    """float32 of shape (sum of ids x width,); None while they are copied to a device: `HostRowBatch.rows`
    waits for them."""
    times: int | Tensor
    """Event times of the examples; see `FeatureIds.example_times`."""


StandIn = Callable[[Input | PreparedBatch], Mapping[str, Any]]
"""Replaces `EmbeddingCollection.forward`: takes the same input, returns the layouts."""


@dataclass(frozen=True, slots=True, eq=False)
class _ReadyRows:
    """Rows that were looked up ahead for some IDs, and the version of these IDs at that time."""

    ids: FeatureIds
    versions: tuple[int, ...]
    prepared: PreparedBatch
    otherwise: Callable[[], None] | None

    @classmethod
    def of(cls, ids: FeatureIds, prepared: PreparedBatch, otherwise: Callable[[], None] | None) -> _ReadyRows:
        return cls(ids, _versions(ids), prepared, otherwise)

    def fits(self, ids: FeatureIds) -> bool:
        """Whether the rows belong to these IDs: the same tensors, unchanged since the lookup."""
        known = self.ids
        return (
            (ids.ids is known.ids and ids.splits is known.splits and ids.names == known.names)
            and ids.weights is known.weights
            and (ids.batch_size == known.batch_size and ids.shared == known.shared)
            and _versions(ids) == self.versions
        )


def _versions(ids: FeatureIds) -> tuple[int, ...]:
    """Return how often each tensor was written to; tensors of inference mode do not count writes."""
    tensors = (ids.ids, ids.splits) if ids.weights is None else (ids.ids, ids.splits, ids.weights)
    return tuple(0 if one.is_inference() else one._version for one in tensors)


class Watcher(Protocol):
    """Receives every batch of rows that training may give a gradient: `EmbeddingOptimizer`."""

    def watch(self, collection: EmbeddingCollection, rows: Tensor, prepared: PreparedBatch) -> None:
        """Take rows in place of those that were prepared."""

    def row_scale(self, examples: int) -> float:
        """Return by what backward multiplies the gradient of rows of so many examples."""


class EmbeddingCollection(nn.Module):
    """The sparse half of a model: features over a store.

    Shapes: n examples, u distinct IDs of one table, d floats of its rows. The rows of a batch are float32 of
    shape (u, d) per table; each layout is a float32 tensor of shape (n, ...).

    Args:
        layouts: The tensors to make, over slices of features.
        store: Where rows live, with the tables that the slots need. Without it, the run sets it by
            `bind`; otherwise rows live in a `LocalStore` from their first use on.
        device: The device of the outputs. On a CUDA device the distinct rows are looked up into pinned
            memory, copied there while it computes, and combined there; see `HostRowGatherer`. If the store is
            on a CUDA device, IDs are copied to it, rows and gradients stay there, and no call waits for it.
        seed: The seed of random initializers.
        threads: The most threads that share a batch, the caller included; by default as many as torch uses.
            How many a call gets is found by measuring, and changes nothing but its time.

    Examples:
        >>> import torch
        >>> from monolith import EmbeddingCollection, EmbeddingOptimizer, FeatureSet
        >>> from monolith.feature import CONCAT, Layout
        >>> features = FeatureSet(["user", "item"])
        >>> vectors = features.slices(features.names, "vector", 4)
        >>> embeddings = EmbeddingCollection([Layout("vectors", CONCAT, vectors)])
        >>> optimizer = EmbeddingOptimizer([embeddings])
        >>> inputs = embeddings({"user": torch.tensor([17, 18]), "item": torch.tensor([7, 7])})
        >>> inputs["vectors"].shape  # n = 2 examples of 2 features of 4 floats
        torch.Size([2, 8])
        >>> inputs["vectors"].sum().backward()
        >>> optimizer.step()
        >>> {name: stats.rows for name, stats in embeddings.store.stats().items()}  # of distinct IDs
        {'item': 1, 'user': 2}
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        *,
        store: Store | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        columns = _columns(layouts)
        self._columns = columns
        self._seed = seed
        self.slot_tables: SlotTables = collect_tables((column.slot for column in columns.values()), seed=seed)
        self._threads = torch.get_num_threads() if threads is None else threads
        self._features = _features(columns, self.slot_tables)
        self._layouts = _specs(layouts)
        self._workers = native.Workers(self._threads)
        self._gatherer: Gatherer | DeviceGatherer | HostRowGatherer = Gatherer(
            self._plan({name: c.dim for name, c in self.slot_tables.configs.items()}), self._workers
        )
        self._changing = concurrency.Lock()  # held while who reads a batch changes `_gatherer`
        self._there: Device | None = None
        self._store: Store | None = None
        self.device = torch.device(device)
        if store is not None:
            self._use(store)
        self._watchers: list[Watcher] = []
        self._held: _ReadyRows | None = None
        self._said_twice = False
        self._stand_in: StandIn | None = None
        self.padded_steps: PaddedSteps | str = "the model does not say that it reads padded histories"
        """What the model reads of histories that `send` pads; or why it takes none, as a clause for a log.
        Only matters if a layout keeps each ID of a feature."""

    @property
    def store(self) -> Store:
        """Where its rows live. An unbound collection makes a `LocalStore` when it is first asked."""
        if self._store is None:
            self.bind(LocalStore.from_configs)
        assert self._store is not None
        return self._store

    def arrange(
        self,
        *,
        merge_equal: bool = False,
        initial_rows: int = 0,
        embedding_dtype: EmbeddingDtype = "float32",
        embedding_rounding: EmbeddingRounding = "stochastic",
        tiers: TableTiers | None = None,
    ) -> None:
        """Say how slots become tables; see `collect_tables`. Called before `bind`.

        Raises:
            FeatureError: The collection has a store, whose tables are settled.
        """
        if self._store is not None:
            raise FeatureError(
                "the tables of this collection are settled: it has a store. Leave the store to the run"
            )
        slots = (column.slot for column in self._columns.values())
        self.slot_tables = collect_tables(
            slots,
            seed=self._seed,
            merge_equal=merge_equal,
            initial_rows=initial_rows,
            embedding_dtype=embedding_dtype,
            embedding_rounding=embedding_rounding,
            tiers=tiers,
        )
        self._features = _features(self._columns, self.slot_tables)
        dims = {name: config.dim for name, config in self.slot_tables.configs.items()}
        self._gatherer = Gatherer(self._plan(dims), self._workers)

    def bind(self, make: MakeStore) -> None:
        """Let `make` decide where rows live: called by the run before the model is used.

        A collection that has a store keeps it.

        Raises:
            FeatureError: The store that was made lacks a table, or has it with rows of another length.
        """
        if self._store is None:
            tables = self.slot_tables
            self._use(make(tables.configs, thresholds=tables.thresholds, threads=self._threads))

    def _use(self, store: Store) -> None:
        _check_store(store, self.slot_tables)
        plan = self._plan(dict(store.tables))  # it may have more tables than are needed
        cuda = store.cuda if isinstance(store, LocalStore) else None
        self._gatherer = Gatherer(plan, self._workers) if cuda is None else DeviceGatherer(plan, cuda)
        if cuda is not None:
            self.device = cuda.torch_device
        self._store = store

    def compute_on(self, device: Device) -> None:
        """Have outputs come to a device; the store stays where it is."""
        self._there = device
        self.device = device.torch_device

    @property
    def transfers(self) -> Transfers | None:
        """What brings rows of host memory to a device and gradients back; None if neither is copied there."""
        return self._gatherer.transfers if isinstance(self._gatherer, HostRowGatherer) else None

    def _reader(self) -> Gatherer | DeviceGatherer | HostRowGatherer:
        """Return what reads batches, for the device that is wanted now."""
        found = self._gatherer
        if isinstance(found, DeviceGatherer):
            return found
        wanted: Device | None = None
        if self._there is not None and self._there.torch_device == self.device:
            wanted = self._there
        elif self.device.type == "cuda":
            wanted = device_of(self.device)
        if wanted == (found.device if isinstance(found, HostRowGatherer) else None):
            return found
        with self._changing:
            if self._gatherer is found:
                self._gatherer = (
                    Gatherer(found.plan, self._workers)
                    if wanted is None
                    else HostRowGatherer(found.plan, self._workers, wanted)
                )
            return self._gatherer

    def _plan(self, tables: dict[str, int]) -> LayoutPlan:
        return plan_layouts(tables, self._features, self._layouts)

    @property
    def features(self) -> tuple[str, ...]:
        """The features it reads, sorted. A batch may have more; one that it lacks reads as zeros."""
        return tuple(feature.name for feature in self._gatherer.plan.features)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The same features with whose rows each reads, and how it combines them."""
        return self._gatherer.plan.features

    @property
    def plan(self) -> LayoutPlan:
        """The layouts, worked out."""
        return self._gatherer.plan

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | list[tuple[int, ...]]]:
        """The shape of each layout, without the examples; a list for one that is NONE."""
        plan = self._gatherer.plan
        return {
            name: [plan.shapes[n] for n in numbers] if name in plan.lists else plan.shapes[numbers[0]]
            for name, numbers in plan.names.items()
        }

    @property
    def layouts(self) -> tuple[LayoutSpec, ...]:
        """What `forward` returns, and which slices of features each of it is made of."""
        return tuple(self._layouts)

    def gather(self, batch: Input) -> GatheredBatch | None:
        """Find the distinct IDs of a batch for `prepare`, without looking rows up; from any thread.

        Rows of tiered tables that are in files are read, so that `prepare` need not wait for the disk.

        None if a device reads the batch: `prepare` then does all of it.
        """
        reader, store = self._reader(), self.store
        if not isinstance(reader, Gatherer):
            return None
        found = reader.read(_ids(batch))
        if isinstance(store, LocalStore):
            store.read_ahead(TableIds(found.ids, found.sizes))
        return found

    def send(
        self, batch: Input, *, numbers: Sequence[Tensor] = (), carriers: Carriers | None = None
    ) -> DeviceBatch:
        """Start copying the IDs of a batch to the device that has the rows; from any thread.

        Those of ragged features are padded, so that many batches have one shape: see `DeviceGatherer`. Where
        each ID of a feature is kept, this needs `padded_steps`.

        Args:
            numbers, carriers: As of `DeviceGatherer.read`.

        Raises:
            FeatureError: Rows are not on a device.
        """
        reader = self._reader()
        if not isinstance(reader, DeviceGatherer):
            raise FeatureError("the rows of this collection are in host memory: its IDs stay there")
        steps = self.padded_steps
        padded = None if isinstance(steps, str) else steps
        return reader.read(_ids(batch), padded=True, steps=padded, numbers=numbers, carriers=carriers)

    def prepare(self, batch: Input, found: GatheredBatch | None = None) -> PreparedBatch:
        """Look up the rows of a batch ahead of the step that uses it; from any thread.

        `forward` takes the result in place of the batch. Rows that change in between are not seen.

        Args:
            found: The result of `gather` for this batch.
        """
        ids, store = _ids(batch), self.store
        gathered = self._reader().read(ids) if found is None else found
        keys = TableIds(gathered.ids, gathered.sizes, gathered.counts, distinct=gathered.distinct)
        if isinstance(gathered, HostRowBatch):
            gathered.send(partial(_look_up_into, store, keys))
            return PreparedBatch(gathered, keys, None, ids.example_times())
        rows = store.lookup(keys)
        if not isinstance(gathered, DeviceBatch) and self.device.type != "cpu":
            rows = rows.to(self.device)
        return PreparedBatch(gathered, keys, rows, ids.example_times())

    def hold(
        self, batch: Input, prepared: PreparedBatch | None, otherwise: Callable[[], None] | None = None
    ) -> None:
        """Use prepared rows when the model next reads `batch`, so that the model need not know of them.

        Rows belong to IDs: a batch with other labels or floats and the same IDs has the same rows. If the
        model changes the IDs, they are looked up in the step, with one warning.

        Only one batch is ready at a time: this replaces an earlier one, and None removes it.

        Args:
            otherwise: Called before such a lookup, to apply the updates that it should see.
        """
        self._held = None if prepared is None else _ReadyRows.of(_ids(batch), prepared, otherwise)

    @contextmanager
    def replaced(self, stand_in: StandIn) -> Iterator[None]:
        """Replace `forward` by `stand_in` for a block, in which no row is looked up.

        Tracing needs it: embedding rows are inputs of a graph, not part of it.
        """
        before, self._stand_in = self._stand_in, stand_in
        try:
            yield
        finally:
            self._stand_in = before

    def forward(self, batch: Input | PreparedBatch) -> dict[str, Any]:
        """Return a tensor for each layout, of shape (examples, ...); for NONE a list with one per slice.

        In training mode, with gradients on, an attached `EmbeddingOptimizer` will update the rows.
        """
        if self._stand_in is not None:
            return dict(self._stand_in(batch))
        if torch.compiler.is_compiling():  # a graph cannot contain the lookup of rows
            found: dict[str, Any] = torch.compiler.disable(self._forward)(batch)  # type: ignore[no-untyped-call]
            return found
        return self._forward(batch)

    def _forward(self, batch: Input | PreparedBatch) -> dict[str, Any]:
        prepared = batch if isinstance(batch, PreparedBatch) else self._prepared(batch)
        gathered = prepared.gathered
        rows = gathered.rows() if isinstance(gathered, HostRowBatch) else prepared.rows
        assert rows is not None, "only a HostRowBatch has no rows of its own"
        scale: Callable[[], float] | None = None
        if torch.is_grad_enabled():
            # A leaf tensor per step: autograd fills its gradient, and rows never become parameters.
            rows = rows.detach().requires_grad_()
            if self.training:
                for watcher in self._watchers:
                    watcher.watch(self, rows, prepared)
                    scale = partial(watcher.row_scale, gathered.batch_size)
        return gathered.layouts(gathered.outputs(rows, scale))

    def _prepared(self, batch: Input) -> PreparedBatch:
        held = self._held
        if held is None:
            return self.prepare(batch)
        ids = _ids(batch)
        if held.fits(ids):
            # A step that is captured has no times to look at here.
            return held.prepared if ids is held.ids else replace(held.prepared, times=ids.example_times())
        if not self._said_twice:
            self._said_twice = True
            _log.warning(
                "the model reads other ids than those of the batch it was given: rows are looked up a second "
                "time in every step. Change ids in the dataset, where they are looked up ahead."
            )
        if held.otherwise is not None:
            held.otherwise()
        return self.prepare(batch)

    def attach(self, watcher: Watcher) -> None:
        """Send every batch of rows to `watcher` from now on. One collection has one optimizer.

        Raises:
            FeatureError: The collection already has one.
        """
        if self._watchers:
            raise FeatureError("this collection has an optimizer already: two would train its rows twice")
        self._watchers.append(watcher)

    def extra_repr(self) -> str:
        tables = self.slot_tables.configs if self._store is None else self._store.tables
        return f"features={len(self.features)}, tables={len(tables)}, layouts={self.shapes}"


def _ids(batch: Input) -> FeatureIds:
    if isinstance(batch, Batch):
        return batch.ids
    return batch if isinstance(batch, FeatureIds) else FeatureIds.pack(batch)


def _look_up_into(store: Store, keys: TableIds, out: Tensor) -> None:
    if isinstance(store, LocalStore):
        store.lookup_into(keys, out)
    else:
        out.copy_(store.lookup(keys))


def _columns(layouts: Sequence[Layout]) -> dict[str, FeatureColumn]:
    columns: dict[str, FeatureColumn] = {}
    for layout in layouts:
        for use in layout.slices:
            known = columns.setdefault(use.column.feature, use.column)
            if known is not use.column:
                raise FeatureError(
                    f"layout {layout.name!r}: feature {use.column.feature!r} has two feature columns; it is "
                    "read from one slot in one way, so make its FeatureColumn once and use it in every layout"
                )
    return columns


def _features(columns: Mapping[str, FeatureColumn], tables: SlotTables) -> list[InputSpec]:
    return [
        InputSpec(name, tables.table_of[column.slot.name], column.combiner)
        for name, column in columns.items()
    ]


def _specs(layouts: Sequence[Layout]) -> list[LayoutSpec]:
    return [
        LayoutSpec(
            layout.name,
            layout.kind,
            tuple(SliceSpec(use.column.feature, use.start, use.end) for use in layout.slices),
        )
        for layout in layouts
    ]


def _check_store(store: Store, tables: SlotTables) -> None:
    for name, config in tables.configs.items():
        if store.tables.get(name) != config.dim:
            found = f"rows of {store.tables[name]}" if name in store.tables else "no such table"
            raise FeatureError(
                f"the store does not fit: table {name!r} needs rows of {config.dim} floats, it has {found}"
            )
