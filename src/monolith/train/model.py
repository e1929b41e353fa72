"""A task's model with its tables: what is trained, saved, restored and looked at."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from monolith.checkpoint import DensePart, FeaturesPart, Part, TablesPart
from monolith.data import BatchSpec
from monolith.errors import ConfigError, DataError, FeatureError
from monolith.feature import Batch, FeatureSpec, GatheredBatch
from monolith.feature.cuda import DeviceIds
from monolith.feature.spec.feature_spec import differences
from monolith.model import EmbeddingCollection, EmbeddingOptimizer, PreparedBatch
from monolith.nn import RateSchedule
from monolith.observe import Resting
from monolith.observe.machine import usable_cores
from monolith.store import AllToAllStore, LocalStore, MakeStore, Store, TableIds
from monolith.table import AdmissionFilter, ConstantRate, Table, TableConfig, TableStats
from monolith.table.config import TableTiers
from monolith.train.accelerator import Accelerator, take
from monolith.train.config import TablesConfig
from monolith.train.rate_schedule import ScheduleConfig, ScheduledRate
from monolith.train.task import Mode, Outputs, Task

_log = logging.getLogger(__name__)

SHARE = 0.1
"""The fraction of a processor for a save in the background, if training uses all of them."""

LookedUp = list[PreparedBatch]
"""The rows of a batch, by collection."""

Gathered = Sequence[GatheredBatch | None]
"""The ids of a batch, by collection; see `EmbeddingCollection.gather`."""


class Model:
    """A task's model with its tables, ready to be restored.

    Args:
        mode: Only a model that trains has optimizers.
        make_store: Where its rows live; by default in this process.
        accelerator: Where its dense half computes; by default where the task has put it.
        rates: What moves the learning rates, in place of the task; None leaves it to the task.
        tables: How its slots become tables.
        precision: See `TrainConfig.precision`.
    """

    def __init__(
        self,
        task: Task,
        mode: Mode,
        *,
        seed: int,
        make_store: MakeStore = LocalStore.from_configs,
        accelerator: Accelerator | None = None,
        rates: ScheduleConfig | None = None,
        tables: TablesConfig | None = None,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        torch.manual_seed(seed)
        self._precision = precision
        self.task = task
        self._mode = mode
        self.module = task.model()
        self._device: torch.device | None = None
        """Where the module computes and gets its batches; None if that is up to the task."""
        if accelerator is not None:
            take(accelerator, self.module)
            self._device = accelerator.device()
        self.collections = [m for m in self.module.modules() if isinstance(m, EmbeddingCollection)]
        if mode is Mode.TRAIN and rates is not None and rates.rows:
            make_store = _ScheduledStores(make_store, rates)
        for collection in self.collections:
            if tables is not None and tables != TablesConfig():
                collection.arrange(
                    merge_equal=tables.merge_equal_slots,
                    initial_rows=tables.initial_rows,
                    embedding_dtype=tables.embedding_dtype,
                    embedding_rounding=tables.embedding_rounding,
                    tiers=TableTiers(tables.storage, tables.memory_bytes, tables.storage_dir),
                )
            collection.bind(make_store)
        if isinstance(make_store, _ScheduledStores) and make_store.made < len(self.collections):
            raise ConfigError(
                f"task {task.name!r}: schedule.rows cannot move the rates of a store that the model brings "
                "along; leave the store to the run, or give its slots a learning_rate of their own"
            )
        configs = [config for one in self.collections for config in one.slot_tables.configs.values()]
        if tables is not None and tables.merge_equal_slots and not any(one.merged for one in configs):
            _log.warning(
                "train.tables.merge_equal_slots merges none of the %d tables: slots are merged if their rows "
                "are equal and their ids are fids (examples.fids, or slot_id of each feature)",
                len(configs),
            )
        self.stores: list[Store] = list(dict.fromkeys(c.store for c in self.collections))
        if not self.stores:
            # A store also has the dense weights, and on servers the count of steps, so that a model without
            # embeddings has one, too: without tables.
            self.stores = [make_store({}, thresholds=None, threads=None)]
        self.sparse: EmbeddingOptimizer | None = None
        self.dense: torch.optim.Optimizer | None = None
        self.schedule: LRScheduler | None = None
        """Moves the rates of `dense` after each step."""
        if mode is Mode.TRAIN:
            self.sparse = EmbeddingOptimizer(self.collections)
            self.dense = task.dense_optimizer(self.module)
            self.schedule = None if self.dense is None else _schedule(task, self.dense, rates)
        self.module.train(mode is Mode.TRAIN)
        self.restoring: Callable[[], AbstractContextManager[object]] = nullcontext
        """Made around every restore of rows of this process."""
        self.resting: Resting | None = None
        """What the threads that write rows rest by, if they write during training on all processors."""
        self._checked = False
        self._data_spec: FeatureSpec | None = None

    def parts(self, *, incremental: bool = False, background: bool = False) -> list[Part]:
        """Return what a checkpoint keeps of the model; see `TablesPart`.

        Args:
            background: Whether it is written while training continues: by one thread, which rests if training
                uses all processors, so that training loses little.
        """
        return [self.tables_part(incremental=incremental, background=background), self.dense_part()]

    @property
    def spec(self) -> FeatureSpec | None:
        """What its features are made of: the spec of its module, or of the first part with one; for a module
        without, that of its data."""
        return self._data_spec if self._own_spec is None else self._own_spec

    @property
    def reads_data_spec(self) -> bool:
        """Whether its module has no spec, and reads what it wants of the batches of its data."""
        return self._own_spec is None

    @property
    def _own_spec(self) -> FeatureSpec | None:
        specs = (getattr(module, "spec", None) for module in self.module.modules())
        return next((spec for spec in specs if isinstance(spec, FeatureSpec)), None)

    def read(self, spec: BatchSpec | FeatureSpec | None) -> None:
        """Take note of the spec that makes the batches of the model; see `Stream.spec`.

        Raises:
            FeatureError: A feature has another meaning there than in the spec that is known.
        """
        self.check_spec(spec)
        if isinstance(spec, FeatureSpec):
            self._data_spec = spec

    def check_spec(self, other: BatchSpec | FeatureSpec | None) -> None:
        """Compare the spec of some data with that of the model.

        Raises:
            FeatureError: A feature has another meaning there.
        """
        spec = self.spec
        if spec is None or not isinstance(other, FeatureSpec):
            return
        for name, one in spec.features.items():
            for path, mine, theirs in differences(one, other.features.get(name, one)):
                raise FeatureError(
                    f"task {self.task.name!r}: features.{name}.{path} is {theirs!r} in the spec of its data, "
                    f"and {mine!r} in that of the model or of the data to train on: the model would read "
                    "something else than it was trained on. Give all of them the same spec."
                )

    def features_parts(self) -> list[Part]:
        """Return what a checkpoint keeps of the spec; nothing where there is none. To be restored first."""
        if self.spec is None:
            return []
        axes = {
            f"{name}.{variable}".removeprefix(".").replace("_orig_mod.", ""): named
            for name, module in self.module.named_modules()
            for variable, named in (getattr(module, "input_axes", None) or {}).items()
        }
        # A module without a spec reads what it wants of the batches: another shape of it is seen by weights.
        return [FeaturesPart(self.spec, axes, all_read=not self.reads_data_spec)]

    def tables_part(
        self,
        *,
        incremental: bool = False,
        background: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> TablesPart:
        """Return what a checkpoint keeps of the rows; see `parts` and `TablesPart`."""
        tables, filters = self._tables()
        on_cpu = self._device is None or self._device.type == "cpu"
        busy = on_cpu and torch.get_num_threads() >= usable_cores()
        self.resting = Resting(SHARE) if background and busy else None
        return TablesPart(
            tables,
            filters,
            shard=share,
            incremental=incremental,
            write_workers=1 if background else 4,
            write_progress=self.resting,
            restoring=self._while_restoring,
        )

    def dense_part(self, *, random: bool = True) -> DensePart:
        """Return what a checkpoint keeps of the dense half.

        Args:
            random: Whether that has the state of this process's random numbers, where it trains.
        """
        optimizers: dict[str, torch.optim.Optimizer] = {}
        if self.sparse is not None:
            optimizers["rows"] = self.sparse
        if self.dense is not None:
            optimizers["dense"] = self.dense
        schedules = {} if self.schedule is None else {"dense": self.schedule}
        return DensePart(self.module, optimizers, schedules, random=random and self.sparse is not None)

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables of this process, by name.

        Raises:
            ConfigError: Rows are elsewhere, or two tables have one name.
        """
        return self._tables()[0]

    def published(self) -> dict[str, Tensor]:
        """Return the weights and buffers of the module, by name, as an export names them. Not copied."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the dense weights that are trained, by name."""
        groups = [] if self.dense is None else self.dense.param_groups
        trained = {id(weight) for group in groups for weight in group["params"]}
        return {name: p for name, p in self.module.named_parameters() if id(p) in trained}

    def buffers(self) -> dict[str, Tensor]:
        """Return the saved tensors of the module that are no weights: running means, counters."""
        saved = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    def stats(self) -> dict[str, TableStats]:
        """Return what each table holds."""
        return {name: stats for store in self.stores for name, stats in store.stats().items()}

    def gather(self, batch: Batch) -> Gathered:
        """Find the ids of a batch, ahead of `prepare` and from any thread.

        Raises:
            FeatureError: The model reads a feature that the first batch does not have.
        """
        self.check_features(batch)
        return [collection.gather(batch) for collection in self.collections]

    def prepare(self, batch: Batch, gathered: Gathered | None = None) -> LookedUp:
        """Look the rows of a batch up, from any thread.

        Args:
            gathered: What `gather` has found.

        Raises:
            FeatureError: The model reads a feature that the first batch does not have.
        """
        self.check_features(batch)
        found = [None] * len(self.collections) if gathered is None else gathered
        return [one.prepare(batch, ids) for one, ids in zip(self.collections, found, strict=True)]

    def prepare_none(self) -> LookedUp:
        """Take part in the lookups of other ranks, in the order of `prepare`, without a batch."""
        for collection in self.collections:
            collection.store.lookup(TableIds.none(len(collection.store.tables)))
        return []

    @property
    def is_local(self) -> bool:
        """Whether all of its rows are in this process, and no other process trains them."""
        return all(isinstance(store, LocalStore) for store in self.stores)

    def outputs(
        self, batch: Batch, rows: LookedUp, *, otherwise: Callable[[], None] | None = None
    ) -> Outputs:
        """Run the model on a batch whose rows were looked up, in host memory.

        Its floats and labels are copied to the accelerator first, if there is one.

        Args:
            otherwise: Called before the model looks rows up itself; see `EmbeddingCollection.hold`.
        """
        if self._device is not None and self._device.type != "cpu":
            # A task that computes its own loss writes `predictions - batch.labels["y"]`, and torch refuses to
            # mix devices. The default outputs check the values of labels first, without waiting for the
            # device, and copy the labels after that.
            batch = batch.on(self._device, labels=type(self.task).outputs is not Task.outputs)
        for collection, prepared in zip(self.collections, rows, strict=True):
            collection.hold(batch, prepared, otherwise)
        try:
            with self._autocast():
                outputs = self.task.outputs(self.module, batch)
            if self._precision != "float32":  # metrics and hooks need not know of it
                said = {head: one.float() for head, one in outputs.predictions.items()}
                outputs = replace(outputs, loss=outputs.loss.float(), predictions=said)
        finally:
            for collection in self.collections:
                collection.hold(batch, None)
        if (
            self._mode is not Mode.PREDICT
            and not batch.labels
            and not isinstance(batch.ids, DeviceIds)  # a step that is captured looks at no value
            and bool(outputs.loss.isnan())
        ):
            raise DataError(
                f"task {self.task.name!r}: the batches to {self._mode.value} on have no labels; name their "
                "column in the BatchSpec's labels, or override outputs() if the loss needs none"
            )
        return outputs

    def _autocast(self) -> AbstractContextManager[object]:
        """Return what the dense half computes in while it trains."""
        if self._precision == "float32" or self._mode is not Mode.TRAIN:
            return nullcontext()
        # Without its cache: a captured step must convert weights in each replay, since they change.
        on_gpu = self._device is not None and self._device.type == "cuda"
        return torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16, cache_enabled=False)

    @property
    def differs_in_eval(self) -> bool:
        """Whether the module has a layer that says something else in eval mode, as far as one can see."""
        return any(map(_differs_in_eval, self.module.modules()))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the module, which trains, be in eval mode for the length of a block."""
        trained = [module for module in self.module.modules() if module.training]
        mode, self._mode = self._mode, Mode.EVALUATE
        self.module.eval()
        try:
            yield
        finally:
            self._mode = mode
            for module in trained:
                module.training = True

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _while_restoring(self) -> AbstractContextManager[object]:
        return self.restoring()

    def check_features(self, batch: Batch) -> None:
        """Check, once, that the batches have the features which the model reads; from any thread.

        Raises:
            FeatureError: The first batch does not have one.
        """
        if self._checked:
            return
        there = batch.ids.names
        for name in (name for collection in self.collections for name in collection.features):
            if name not in there:
                near = difflib.get_close_matches(name, there, n=1)
                raise FeatureError(
                    f"task {self.task.name!r}: the model reads feature {name!r}, which the batches do not "
                    f"have; they have {', '.join(there) or 'none'}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                    + " If only some records have it, list it in both ids and optional of the BatchSpec."
                )
        self._checked = True

    def _tables(self) -> tuple[dict[str, Table], dict[str, AdmissionFilter]]:
        tables: dict[str, Any] = {}
        filters: dict[str, AdmissionFilter] = {}
        for found in self.stores:
            store = found.inner if isinstance(found, AllToAllStore) else found
            if not isinstance(store, LocalStore):
                raise ConfigError(f"a run in one process keeps its rows in a LocalStore, got {store!r}")
            for name in store.tables:
                if name in tables:
                    raise ConfigError(
                        f"two stores of the model have a table {name!r}; let the collections share one "
                        "store, or give their slots different names"
                    )
                tables[name] = store.table(name)
            filters |= store.filters
        return tables, filters


def _differs_in_eval(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "training" in code.co_names  # it looks in which mode it is


class _ScheduledStores:
    """Makes stores whose rows learn by a schedule."""

    def __init__(self, make: MakeStore, rates: ScheduleConfig) -> None:
        self._make = make
        self._rates = rates
        self.made = 0

    def __call__(self, configs: Mapping[str, TableConfig], /, **how: Any) -> Store:
        self.made += 1
        return self._make({name: self._scheduled(config) for name, config in configs.items()}, **how)

    def _scheduled(self, config: TableConfig) -> TableConfig:
        segments = (
            replace(one, learning_rate=ScheduledRate(one.rate, self._rates)) for one in config.segments
        )
        return replace(config, segments=tuple(segments))


def _schedule(
    task: Task, optimizer: torch.optim.Optimizer, rates: ScheduleConfig | None
) -> LRScheduler | None:
    schedule = task.dense_schedule(optimizer)
    if rates is not None:
        if schedule is not None:
            raise ConfigError(
                f"task {task.name!r}: dense_schedule() and the run's train.schedule both move the rates of "
                "dense weights; leave one of them out"
            )
        own = [group["lr"] for group in optimizer.param_groups]
        if any(callable(rate) for rate in own):
            raise ConfigError(
                f"task {task.name!r}: the rate of its dense optimizer is a function of the step already; "
                "give it a number, or leave train.schedule out"
            )
        return RateSchedule(optimizer, [ScheduledRate(ConstantRate(float(rate)), rates) for rate in own])
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            f"task {task.name!r}: dense_schedule() returns a ReduceLROnPlateau, which follows a metric and "
            "not the step. Call it in a hook instead: rates that are moved there act on servers, too."
        )
    return schedule


_State = tuple[Tensor, list[Tensor]]


class OwnRandom:
    """A stream of torch's random numbers that starts at a seed and continues from block to block."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _State | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let the block draw from this stream, and leave torch's generators as they were."""
        callers = _states()
        if self._own is None:
            torch.manual_seed(self._seed)
        else:
            _set(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _set(callers)


def _states() -> _State:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), on_devices


def _set(states: _State) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1]):
        torch.cuda.set_rng_state(state, device)
