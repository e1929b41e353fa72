"""The placement of a fleet: rows and dense weights on parameter servers.

A checkpoint of a fleet has the parts of one of a single process, so either restores the other's. Each server
writes and reads the rows of its shard, at paths that all processes reach. The chief fetches the dense weights
and writes them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from monolith import concurrency
from monolith.checkpoint import Part, RestoreOptions, SavedPart, merge_entries
from monolith.checkpoint.part import Entry, PartSnapshot, RestoreReport
from monolith.errors import ClusterError, ConfigError
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import Item, LastCheckpoint, Staleness
from monolith.runtime.fleet import Fleet
from monolith.runtime.prefetch import Silence
from monolith.runtime.publish_shard import PublishPlan
from monolith.runtime.publishers import Publishers, ServerPublishers
from monolith.runtime.server_calls import TableWork
from monolith.store import MakeStore, ParameterServerStore, ServerGroup
from monolith.store.dense import pack_tensors, unpack_tensors
from monolith.store.dense_cache import DenseCache
from monolith.store.dense_config import DenseConfig
from monolith.sync.guard import PublishGuard
from monolith.train.config import TrainConfig
from monolith.train.hooks.installed import Others
from monolith.train.model import Model

CHIEF = 0


class FleetBuffers:
    """The buffers of one worker's module, and the way to those of others. Used by its training thread.

    Buffers are not trained by gradients, so no server updates them: each worker has its own, and the chief
    saves a mean weighted by examples, or a sum of changes for counters; see `merge_buffers`.

    Args:
        worker: Which one this is.
        buffers: Name -> tensor of the module. If there are none, no call is made.
    """

    def __init__(self, group: ServerGroup, worker: int, buffers: Mapping[str, Tensor]) -> None:
        self._group = group
        self._worker = worker
        self._mine = list(buffers.values())
        self._first: list[Tensor] = []
        """The buffers that all workers started with."""
        self._examples = 0

    def begin(self) -> None:
        """Start with the buffers of the chief, which calls this before the other workers do."""
        if not self._mine:
            return
        if self._worker == CHIEF:
            self._give(0)
        else:
            for _, theirs in self._take(CHIEF):
                copy_into(self._mine, theirs)
        self._first = [buffer.clone() for buffer in self._mine]

    def report(self, examples: int) -> None:
        """Leave this worker's buffers on server 0; the chief keeps its own, and only notes their weight.

        Args:
            examples: Examples this worker has trained on since the run started.
        """
        self._examples = examples
        if self._mine and self._worker != CHIEF:
            self._give(examples)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Have the merged buffers of all workers in the chief's module, while they are saved."""
        others = self._take(None) if self._mine else []
        if not others:
            yield
            return
        own = [buffer.clone() for buffer in self._mine]
        copy_into(self._mine, merge_buffers(self._first, [(self._examples, own), *others]))
        try:
            yield
        finally:
            copy_into(self._mine, own)

    def _give(self, examples: int) -> None:
        body = {"worker": self._worker, "examples": examples}
        self._group.exchange("put_buffers", {0: (body, pack_tensors(self._mine))})

    def _take(self, worker: int | None) -> list[tuple[int, list[Tensor]]]:
        """Return reported buffers and their weights: of one worker, or of all but the chief."""
        answer = self._group.exchange("get_buffers", {0: ({"worker": worker}, b"")})[0]
        about: Sequence[tuple[int, int]] = answer.body["workers"]
        size = len(answer.data) // max(len(about), 1)
        return [
            (examples, unpack_tensors(answer.data[number * size : (number + 1) * size], self._mine))
            for number, (who, examples) in enumerate(about)
            if who == worker or (worker is None and who != CHIEF)
        ]


def merge_buffers(first: Sequence[Tensor], given: Sequence[tuple[int, Sequence[Tensor]]]) -> list[Tensor]:
    """Return one tensor for each buffer.

    Args:
        first: The buffers that all workers started with.
        given: Examples and buffers of each worker, the chief first.
    """
    total = sum(examples for examples, _ in given)
    merged = []
    for number, before in enumerate(first):
        all_of_them = [buffers[number] for _, buffers in given]
        own = all_of_them[0]
        if own.is_floating_point():
            same = all(torch.equal(own, other) for other in all_of_them)
            weighted = [buffers[number].double() * (examples / max(total, 1)) for examples, buffers in given]
            merged.append(own if same or not total else torch.stack(weighted).sum(0).to(own.dtype))
        elif own.dtype is torch.bool or own.is_complex():
            merged.append(own)
        else:
            merged.append(before + sum((one - before for one in all_of_them), torch.zeros_like(before)))
    return merged


def copy_into(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy the values into tensors of a module."""
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


class TableServers(Protocol):
    """The servers of a run, as far as its checkpoints use them."""

    @property
    def keeps_going(self) -> bool:
        """Whether the run survives the loss of a server."""

    @property
    def losses(self) -> int:
        """How many servers were lost so far."""

    @property
    def fresh(self) -> Sequence[int]:
        """Servers that hold nothing of the run yet, and are to be restored."""

    @property
    def tables(self) -> TableWork:
        """Snapshots and restores of the servers' tables."""

    def note_cut(self, step: int) -> None:
        """Note that a snapshot of this step is about to be taken: all updates are done."""

    def begin_commit(self, losses: int) -> None:
        """Note that all servers have written a checkpoint; see `ServerRecovery`."""

    def end_commit(self) -> None:
        """Note that the checkpoint is committed, or never will be."""


class ServedTables:
    """The tables of all servers, as the part of a checkpoint that the servers write."""

    name = "tables"

    def __init__(self, servers: TableServers) -> None:
        self._servers = servers

    def snapshot(self, step: int) -> PartSnapshot:
        # It notes the number of losses before the servers take their snapshots: a server lost in between is
        # then noticed at the commit.
        cut = _ServedCut(self._servers, concurrency.token_hex(8))
        self._servers.note_cut(step)
        try:
            self._servers.tables.cut(cut.name)
        except BaseException:
            cut.close(saved=False)
            raise
        return cut

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        # If the run continued, only servers that lost their shard: the rest are ahead of the checkpoint.
        answers = self._servers.tables.restore(chain, options, self._servers.fresh)
        if not answers:
            return RestoreReport(skipped={"tables": "all servers still hold them"})
        rows = {name: sum(answer.rows[name] for answer in answers) for name in answers[0].loaded}
        loaded = {name: f"{many:,} rows on {len(answers)} servers" for name, many in rows.items()}
        return replace(RestoreReport().merge(*(answer.report() for answer in answers)), loaded=loaded)


class _ServedCut:
    def __init__(self, servers: TableServers, name: str) -> None:
        self._servers = servers
        self.name = name
        self._losses = servers.losses
        self._commits = False
        self._closed = False

    def write(self, prefix: str, *, full: bool) -> Entry:
        written = self._servers.tables.write(self.name, prefix, full=full)
        # From here to `close`, a lost shard is not restored: the manifest is renamed in between, and whether
        # it was decides which checkpoint the shard is restored from. Once only: a write may be repeated.
        if not self._commits:
            self._servers.begin_commit(self._losses)
            self._commits = True
        return merge_entries([answer.entry for answer in written])

    def close(self, *, saved: bool) -> None:
        if not self._closed:
            self._closed = True
            # A snapshot that was not saved is of no use, and a lost server has none.
            try:
                passing = not saved or self._servers.keeps_going
                with suppress(ClusterError) if passing else nullcontext():
                    self._servers.tables.close_cut(self.name, saved=saved)
            finally:
                if self._commits:
                    self._servers.end_commit()


class ServedDense:
    """The dense weights and buffers: fetched by the chief to be saved, sent to the servers when restored."""

    name = "dense"

    def __init__(self, fleet: Fleet, model: Model, buffers: FleetBuffers) -> None:
        self._fleet = fleet
        self._inner = model.dense_part()
        self._parameters = dict(model.weights())
        self._optimizer = model.dense
        self._schedule = model.schedule
        self._buffers = buffers

    def snapshot(self, step: int) -> PartSnapshot:
        if self._optimizer is not None:
            self._fleet.group.fetch_dense(self._parameters, self._optimizer, schedule=self._schedule)
        with self._buffers.merged():
            return self._inner.snapshot(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        cleared = options.custom.clears(options.model_dir)
        report = self._inner.restore(chain, options)
        if not self._fleet.resumed:
            self.send()
        elif chain and not cleared:  # servers that still hold their weights keep them
            self._fleet.restore_dense(chain[-1], options)
        return report

    def send(self) -> None:
        """Send the dense weights of this process to the servers."""
        if self._optimizer is not None:
            self._fleet.group.send_dense(self._parameters, self._optimizer, schedule=self._schedule)


class ServerPlacement:
    """Parameters on the parameter servers of a fleet: rows by hash, dense weights by the servers' split.

    Args:
        fleet: The place of this worker in the fleet.
        dense: When this worker fetches dense weights and pushes their gradients.
    """

    averaging = None

    def __init__(self, fleet: Fleet, dense: DenseConfig | None = None) -> None:
        self._fleet = fleet
        self._config = dense or DenseConfig()
        self._dense: ServedDense | None = None
        self._buffers: FleetBuffers | None = None
        self._store: ParameterServerStore | None = None

    @property
    def make_store(self) -> MakeStore:
        return self._fleet.make_store

    @property
    def others(self) -> Others | None:
        return self._fleet

    def over(self, local: MakeStore) -> None:  # noqa: ARG002
        return None

    def check(self, config: TrainConfig) -> None:
        if config.alert is not None and config.alert.action == "rollback":
            raise ConfigError(
                "alert: several processes cannot roll back together yet; set alert.action to 'stop'"
            )
        if config.deterministic and self._config.depends_on_time:
            raise ConfigError(
                "train.deterministic: dense weights would depend on how fast servers answer. Set "
                "dense.max_staleness to 1, and dense.prefetch where dense.postpush is set."
            )

    def attach(self, model: Model) -> WeightOptimizer | None:
        if own := [store for store in model.stores if not isinstance(store, ParameterServerStore)]:
            raise ConfigError(
                f"task {model.task.name!r}: its model has a store of its own, {own[0]!r}, so every worker "
                "would train its own copy of the rows. Leave out `store`: the run decides where rows live."
            )
        weights, store = model.weights(), model.stores[0]
        assert isinstance(store, ParameterServerStore)
        if model.dense is not None:
            scheduled = model.schedule is not None
            store.attach_dense(weights, model.dense, config=self._config, scheduled=scheduled)
        self._store = store
        self._buffers = FleetBuffers(self._fleet.group, self._fleet.index, model.buffers())
        self._dense = ServedDense(self._fleet, model, self._buffers)
        return ServedOptimizer(store, model.dense)

    def parts(self, model: Model, *, incremental: bool, background: bool) -> list[Part]:  # noqa: ARG002
        # Incremental or in the background: the servers have the same settings, and decide by them.
        return [ServedTables(self._fleet), self.dense_part(model)]

    def dense_part(self, model: Model) -> ServedDense:  # noqa: ARG002
        assert self._dense is not None, "attach a model first"
        return self._dense

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:  # noqa: ARG002
        if not self._fleet.is_chief:
            return None  # the servers publish their rows, and the chief steers them
        every = plan.config.dense_interval.total_seconds()
        return ServerPublishers(self._fleet.group, lambda: self._fleet.run, every=every)

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        self._fleet.last_checkpoint = last

    def survives(self, error: Exception) -> bool:
        return self._fleet.keeps_going and isinstance(error, ClusterError)

    def align(
        self,
        items: Iterator[Item],
        *,
        empty: Callable[[], Item],  # noqa: ARG002
        every: float,  # noqa: ARG002
        pressed: Callable[[], bool],  # noqa: ARG002
        silences: bool,  # noqa: ARG002
        shares_work: bool,  # noqa: ARG002
    ) -> Iterator[Item | Silence]:
        return items

    def count_step(self, step: int) -> int:  # noqa: ARG002
        # Server 0 counts the steps of all workers, and answers with the count when it takes a gradient.
        cache = self._cache
        return self._fleet.group.step if cache is None else cache.step

    def refresh(self) -> None:
        if (cache := self._cache) is not None:
            cache.refresh()

    def readable(self) -> AbstractContextManager[None]:
        return nullcontext()  # the servers answer every lookup

    # For the coordinator of the same fleet

    @property
    def staleness(self) -> Staleness | None:
        """The age of the dense weights; None before a model is attached. From any thread."""
        if (cache := self._cache) is None:
            return None
        last, most = cache.behind
        return Staleness(last=last, most=most)

    def send_dense(self) -> None:
        """Give the servers the dense weights of this process, as the chief of a new run."""
        assert self._dense is not None, "attach a model first"
        self._dense.send()

    def start_buffers(self) -> None:
        """Start with the buffers of the chief, which calls this before the other workers do."""
        assert self._buffers is not None, "attach a model first"
        self._buffers.begin()

    def pull_dense(self) -> None:
        """Start with the dense weights that the servers have."""
        assert self._store is not None, "attach a model first"
        self._store.pull_dense()

    def settle(self) -> None:
        """Finish every push of dense gradients that still runs behind this worker's steps."""
        if (cache := self._cache) is not None:
            cache.settle()

    def report_buffers(self, examples: int) -> None:
        """Leave the buffers of this worker with server 0, for the chief to merge and save.

        Args:
            examples: Their weight: what this worker has trained on since the run started.
        """
        if self._buffers is not None:
            self._buffers.report(examples)

    @property
    def _cache(self) -> DenseCache | None:
        return None if self._store is None else self._store.dense


class ServedOptimizer:
    """The dense optimizer of a step whose real optimizer runs on the servers."""

    def __init__(self, store: ParameterServerStore, inner: torch.optim.Optimizer | None) -> None:
        self._store = store
        self._inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self._inner is None else self._inner.param_groups

    def step(self) -> None:
        """Push the gradients, and pull the newest weights."""
        self._store.push_dense()
        self._store.pull_dense()

    def zero_grad(self) -> None:
        if self._inner is not None:
            self._inner.zero_grad()
