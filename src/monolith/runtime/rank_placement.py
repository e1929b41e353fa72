"""The placement of ranks: dense weights on every rank; rows sharded across ranks, or on parameter servers.

    rows on ranks     a rank answers for its shard as long as it lives; nothing is started and nothing ends
    rows on servers   rank 0 starts a run on all servers, restores it, tells the other ranks its name, keeps
                      a call open at each server so that both notice a loss, and ends it

Everything else is the same for both: the chief, pauses, checkpoints, dense weights.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from monolith import filesystem
from monolith.checkpoint import DensePart, Part, RestoreOptions, SavedPart, TablesPart, merge_entries
from monolith.checkpoint.part import Entry, PartSnapshot, RestoreReport, changes_from_json, changes_to_json
from monolith.errors import (
    ClusterError,
    ConfigError,
    MonolithError,
    RetryableError,
    SaveError,
    UnavailableError,
)
from monolith.model import WeightOptimizer
from monolith.runtime.coordinator import Item, LastCheckpoint
from monolith.runtime.fleet_placement import ServedTables, copy_into, merge_buffers
from monolith.runtime.local import scheduled
from monolith.runtime.lockstep import aligned
from monolith.runtime.messages import (
    Attend,
    Attended,
    BeginServer,
    CloseRankSnapshot,
    EndRun,
    OfRun,
    RestoreRank,
    ServerHealth,
    SnapshotRank,
    TablesRestored,
    WriteRankSnapshot,
)
from monolith.runtime.prefetch import Silence
from monolith.runtime.server_calls import POLL, TableWork, ask, on_each, tell
from monolith.store import (
    AllToAllStore,
    LocalStore,
    MakeStore,
    ParameterServerStore,
    RankGroups,
    ServedRankStore,
    ServerGroup,
    Store,
)
from monolith.store.dense import dump_dense, load_dense_states, pack_tensors, read_dense, unpack_tensors
from monolith.store.rank_calls import RankCalls
from monolith.store.rank_groups import Collective
from monolith.sync.guard import PublishGuard
from monolith.table import SlotThresholds, TableConfig
from monolith.train.config import RanksConfig, TrainConfig
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
from monolith.train.hooks.installed import Others
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.rank_rows import RowsOfRanks
from monolith.train.publishing.served_rows import RowsOfServers
from monolith.train.publishing.share import PublishPlan, SharePublisher
from monolith.wire.bulk import Traffic
from monolith.wire.messages import Json, read_message, write_message

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Bucket:
    """Weights whose gradients are sent together."""

    weights: list[nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    """The `id()` of each weight that has no gradient yet, in this step."""
    finish: Callable[[], Tensor] | None = None
    """Waits for the sum, once the bucket was sent."""


class AveragedGradients:
    """The gradients of one model's dense weights, averaged over ranks. Used by the training thread.

    Weights are grouped into buckets in the order in which backward reaches them, last layer first. A bucket
    is sent as soon as all of its gradients are there, so the sum overlaps with the rest of backward:

        begin(examples) ──► backward: bucket 0 sent, bucket 1 sent, ... ──► finish: wait, take the means

    Every rank sends the same buckets in the same order, whatever order its gradients come in.

    Args:
        weights: In the same order on every rank.
        collective: Used for nothing else.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], collective: Collective, config: RanksConfig | None = None
    ) -> None:
        self._weights = list(weights)
        self._collective = collective
        self._config = config or RanksConfig()
        self._buckets = _in_buckets(self._weights, self._config.bucket_bytes)
        self._bucket_of = {id(w): bucket for bucket in self._buckets for w in bucket.weights}
        self._examples = 0
        self._weight = 1.0
        """Factor of this rank's gradients in the sum."""
        self._next = len(self._buckets)
        """Index of the bucket to be sent next; past the last one outside of a step."""
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin(self, examples: int) -> None:
        self._examples = examples
        self._weight = float(examples)
        if self._config.half_gradients:  # their range is small: weight by the fraction of all examples
            self._weight /= max(float(self._collective.sum(torch.tensor(float(examples)))), 1.0)
        self._next = 0
        for bucket in self._buckets:
            bucket.waits_for = {id(weight) for weight in bucket.weights}
            bucket.finish = None

    @torch.no_grad()
    def finish(self, trouble: str | None) -> str | None:
        used = [float(weight.grad is not None) for weight in self._weights]
        self._send_ready(all_of_them=True)
        word = torch.tensor([float(self._examples), float(trouble is not None), *used], dtype=torch.float64)
        summed = self._collective.sum(word)
        examples, troubled, *users = summed.tolist()
        total = 1.0 if self._config.half_gradients else max(examples, 1.0)
        self._take(total, {id(w): many for w, many in zip(self._weights, users, strict=True)})
        if not troubled:
            return None
        return trouble or "the loss or a gradient of another rank's batch is NaN or infinite"

    def add_up(self, squares: Tensor) -> Tensor:
        return self._collective.sum(squares.clone())

    def _note(self, weight: Tensor) -> None:
        """Note that backward has computed a gradient."""
        bucket = self._bucket_of[id(weight)]
        bucket.waits_for.discard(id(weight))
        if self._next < len(self._buckets):
            self._send_ready()

    def _send_ready(self, *, all_of_them: bool = False) -> None:
        """Send complete buckets, in order; with `all_of_them`, the incomplete ones too."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.waits_for and not all_of_them:
                return
            self._next += 1
            if not self._config.skip_allreduce:
                bucket.finish = self._collective.begin_sum(self._packed(bucket))

    @torch.no_grad()
    def _packed(self, bucket: _Bucket) -> Tensor:
        """Return the gradients of a bucket, weighted."""
        parts = [w.new_zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in bucket.weights]
        flat = torch.cat(parts).mul_(self._weight)
        return flat.half() if self._config.half_gradients else flat

    def _take(self, total: float, users: dict[int, float]) -> None:
        """Make every gradient the mean over all examples; None if no rank has one."""
        for bucket in self._buckets:
            if bucket.finish is None:
                continue
            flat = bucket.finish().to(bucket.weights[0].dtype).div_(total)
            parts = torch.split(flat, [weight.numel() for weight in bucket.weights])
            for weight, part in zip(bucket.weights, parts, strict=True):
                weight.grad = part.view_as(weight) if users[id(weight)] else None


def _in_buckets(weights: Sequence[nn.Parameter], most_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    room = 0
    for weight in reversed(weights):
        size = weight.numel() * weight.element_size()
        like = buckets and (buckets[-1].weights[0].dtype, buckets[-1].weights[0].device)
        if not buckets or size > room or like != (weight.dtype, weight.device):
            buckets.append(_Bucket([]))
            room = most_bytes
        buckets[-1].weights.append(weight)
        room -= size
    return buckets


class RankShard:
    """The tables of this rank, of which rank 0 takes snapshots and restores them. From any thread.

    Args:
        part: This rank's shard of the tables.
        rows: Returns how many rows each table of this rank has.
        model_dir: Below which it writes.
    """

    def __init__(
        self, calls: RankCalls, part: TablesPart, rows: Callable[[], dict[str, int]], model_dir: str
    ) -> None:
        self._part = part
        self._rows = rows
        self._model_dir = model_dir
        self._cuts: dict[str, PartSnapshot] = {}
        calls.offer(
            {
                "tables.cut": lambda body: self._cut(read_message(SnapshotRank, body)),
                "tables.write": lambda body: self._write(read_message(WriteRankSnapshot, body)),
                "tables.close": lambda body: self._close(read_message(CloseRankSnapshot, body)),
                "tables.restore": lambda body: self._restore(read_message(RestoreRank, body)),
            }
        )

    def _cut(self, body: SnapshotRank) -> dict[str, Json]:
        self._cuts[body.cut] = self._part.snapshot(0)
        return {}

    def _write(self, body: WriteRankSnapshot) -> dict[str, Json]:
        cut = self._cuts.get(body.cut)
        if cut is None:
            raise ClusterError("cannot write tables: this rank has no such snapshot")
        if not self._model_dir or not filesystem.is_below(body.prefix, self._model_dir):
            raise SaveError(
                f"this rank writes only below the model_dir of its run, {self._model_dir!r}. Start all ranks "
                "with the same model_dir."
            )
        return cut.write(body.prefix, full=body.full)

    def _close(self, body: CloseRankSnapshot) -> dict[str, Json]:
        cut = self._cuts.pop(body.cut, None)
        if cut is not None:
            cut.close(saved=body.saved)
        return {}

    def _restore(self, body: RestoreRank) -> dict[str, Json]:
        report = self._part.restore(
            [SavedPart(prefix, entry) for prefix, entry in body.chain],
            RestoreOptions(
                optimizer_state=body.optimizer_state,
                strict=body.strict,
                changes=changes_from_json(body.changes),
            ),
        )
        rows = {f"table {name}": many for name, many in self._rows().items()}
        return write_message(TablesRestored.of(report, rows))


class RankTables:
    """The tables of all ranks, as the part of a checkpoint that rank 0 makes."""

    name = "tables"

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    def snapshot(self, step: int) -> PartSnapshot:  # noqa: ARG002
        cut = _RankCut(self._calls, secrets.token_hex(8))
        try:
            self._calls.ask_all("tables.cut", write_message(SnapshotRank(cut=cut.name)))
        except BaseException:
            cut.close(saved=False)
            raise
        return cut

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        saved = tuple((one.prefix, one.entry) for one in chain)
        body = RestoreRank(
            chain=saved,
            optimizer_state=options.optimizer_state,
            strict=options.strict,
            changes=changes_to_json(options.changes),
        )
        found = [
            read_message(TablesRestored, answer)
            for answer in self._calls.ask_all("tables.restore", write_message(body))
        ]
        rows = {name: sum(one.rows[name] for one in found) for name in found[0].loaded}
        loaded = {name: f"{many:,} rows on {len(found)} ranks" for name, many in rows.items()}
        return replace(RestoreReport().merge(*(one.report() for one in found)), loaded=loaded)


class _RankCut:
    def __init__(self, calls: RankCalls, name: str) -> None:
        self._calls = calls
        self.name = name
        self._closed = False

    def write(self, prefix: str, *, full: bool) -> Entry:
        body = WriteRankSnapshot(cut=self.name, prefix=prefix, full=full)
        return merge_entries(self._calls.ask_all("tables.write", write_message(body)))

    def close(self, *, saved: bool) -> None:
        if not self._closed:
            self._closed = True
            # A snapshot that was not saved is of no use, and a lost rank has none.
            with nullcontext() if saved else suppress(ClusterError):
                self._calls.ask_all(
                    "tables.close", write_message(CloseRankSnapshot(cut=self.name, saved=saved))
                )


class RankDense:
    """The weights, which are the same on all ranks, with the buffers of all of them."""

    name = "dense"

    def __init__(self, inner: DensePart, merged: Callable[[], AbstractContextManager[None]]) -> None:
        self._inner = inner
        self._merged = merged

    def snapshot(self, step: int) -> PartSnapshot:
        with self._merged():
            return self._inner.snapshot(step)

    def restore(self, chain: Sequence[SavedPart], options: RestoreOptions) -> RestoreReport:
        return self._inner.restore(chain, options)


class RankPlacement:
    """Parameters of ranks: rows sharded across them or on servers, dense weights as a copy on every rank.

    Gradients of dense weights are averaged, so the copies stay equal. Buffers (the running means of a batch
    norm) are not: each rank has its own, and a checkpoint has them merged; see `merge_buffers`.

    Args:
        groups: The connections of the ranks.
        servers: The parameter servers that hold the rows, if the ranks do not.
        call_in: Makes the other ranks answer a lookup of rank 0 in a store, while all are quiesced.
    """

    def __init__(
        self,
        groups: RankGroups,
        config: RanksConfig | None = None,
        *,
        servers: ServerGroup | None = None,
        call_in: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self.rows: RankRows = RowsOnRanks(groups) if servers is None else RowsOnServers(groups, servers)
        self._config = config or RanksConfig()
        self._call_in = call_in
        self._run = TrainConfig()
        """The settings of the run, once they were checked."""
        self._model: Model | None = None
        self._average: AveragedGradients | None = None
        self._first_buffers: list[Tensor] = []
        """The buffers that all ranks started with."""
        self._merged: list[Tensor] | None = None
        """The buffers of all ranks merged, from a quiesce until they are saved."""
        self._data_stuck = False
        """Whether the source of this rank was blocked in a read when its pipeline was closed."""
        self.step = 0
        """The global step, as far as hooks on other threads ask for it."""

    @property
    def make_store(self) -> MakeStore:
        return self.rows.make_store

    @property
    def averaging(self) -> AveragedGradients | None:
        return self._average

    @property
    def others(self) -> Others | None:
        return OtherRanks(self._groups.rank, lambda: self.step, self.rows)

    @property
    def traffic(self) -> Traffic:
        """Bytes received from and sent to other ranks and servers. From any thread."""
        ranks, servers = self._groups.traffic, self.rows.traffic
        return Traffic(ranks.received + servers.received, ranks.sent + servers.sent)

    def over(self, local: MakeStore) -> MakeStore | None:
        return self.rows.over(local)

    def check(self, config: TrainConfig) -> None:
        self._run = config
        if config.hooks.slow_start_steps:
            raise ConfigError(
                "hooks.slow_start_steps: ranks take every step together, so none can start late"
            )

    def attach(self, model: Model) -> WeightOptimizer | None:
        if own := [store for store in model.stores if not self.rows.made(store)]:
            raise ConfigError(
                f"task {model.task.name!r}: its model has a store of its own, {own[0]!r}, so every rank "
                "would train its own copy of the rows. Leave out `store`: the run decides where rows live."
            )
        self._model = model
        assert model.sparse is not None
        model.sparse.in_step = True
        self.rows.attach(model, self._run)
        self._average = AveragedGradients(list(model.weights().values()), self._groups.dense, self._config)
        return scheduled(model)

    def parts(self, model: Model, *, incremental: bool, beside: bool) -> list[Part]:  # noqa: ARG002
        return [self.rows.tables_part(), self.dense_part(model)]

    def dense_part(self, model: Model) -> Part:
        return RankDense(model.dense_part(), self._saving_buffers)

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        return self.rows.publishers(model, plan, guard)

    def restore_lost_from(self, last: Callable[[], LastCheckpoint | None]) -> None:
        """Do nothing: a run that loses a rank restarts on all ranks."""

    def survives(self, error: Exception) -> bool:  # noqa: ARG002
        return False

    def align(
        self, items: Iterator[Item], *, every: float, pressed: Callable[[], bool], silences: bool
    ) -> Iterator[Item | Silence]:
        return aligned(
            items,
            self._groups.lookups,
            every=every,
            pressed=pressed,
            silences=silences,
            on_stuck=self._note_stuck,
        )

    def _note_stuck(self) -> None:
        self._data_stuck = True

    def check_data_closed(self) -> None:
        """Check that the data of before a rollback is not read any more.

        Raises:
            UnavailableError: It is, and would take an item that is to be trained on again.
        """
        if self._data_stuck:
            raise UnavailableError(
                f"rank {self._groups.rank} cannot roll back: its data is still being read, and gives "
                "nothing. All ranks restart from the last checkpoint"
            )

    def count_step(self, step: int) -> int:
        self.step = step + 1
        return self.step

    def refresh(self) -> None:
        """Do nothing: no rank trains without this one, so its weights are the newest."""

    @contextmanager
    def readable(self) -> Iterator[None]:
        with self.rows.solo_lookups(self._call_in), self._with_buffers(self._merged):
            yield

    # For the coordinator of the same rank

    def take_weights(self) -> None:
        """Start with the weights, optimizer state and buffers of rank 0. A collective call."""
        model, control = self._model, self._groups.control
        assert model is not None, "attach a model first"
        weights = model.weights()
        state = broadcast_bytes(control, dump_dense(weights, model.dense, 0, model.schedule))
        frozen = [p for name, p in model.module.named_parameters() if name not in weights]
        rest = [*frozen, *model.buffers().values()]
        packed = broadcast_bytes(control, pack_tensors(rest).tobytes())
        if self._groups.rank:
            load_dense_states(weights, model.dense, [read_dense(state)], model.schedule)
            copy_into(rest, unpack_tensors(np.frombuffer(packed, np.uint8).copy(), rest))
        self._first_buffers = [buffer.clone() for buffer in model.buffers().values()]

    def gather_buffers(self, examples: int) -> None:
        """Merge the buffers of all ranks, for the checkpoint that follows. A collective call.

        Args:
            examples: The weight of this rank's buffers.
        """
        assert self._model is not None
        mine = list(self._model.buffers().values())
        if not mine or self._groups.size == 1:
            return
        control = self._groups.control
        weights = control.all_gather(torch.tensor([examples])).flatten().tolist()
        packed = control.all_gather(torch.from_numpy(pack_tensors(mine)))
        given = [(many, unpack_tensors(one.numpy(), mine)) for many, one in zip(weights, packed, strict=True)]
        self._merged = merge_buffers(self._first_buffers, given)

    def _saving_buffers(self) -> AbstractContextManager[None]:
        merged, self._merged = self._merged, None
        return self._with_buffers(merged)

    @contextmanager
    def _with_buffers(self, merged: Sequence[Tensor] | None) -> Iterator[None]:
        """Have the merged buffers in the module of this rank, while they are saved or evaluated."""
        if merged is None or self._model is None:
            yield
            return
        mine = list(self._model.buffers().values())
        own = [buffer.clone() for buffer in mine]
        copy_into(mine, merged)
        try:
            yield
        finally:
            copy_into(mine, own)


class OtherRanks:
    """The other ranks, all at the same step, and the servers, as far as hooks ask for them."""

    def __init__(self, rank: int, step: Callable[[], int], rows: RankRows) -> None:
        self.index = rank
        self._step = step
        self._rows = rows

    @property
    def servers(self) -> Sequence[str]:
        return self._rows.servers

    def read_step(self) -> int:
        return self._step()

    def server_health(self, server: int) -> MachineHealth:
        return self._rows.server_health(server)


def broadcast_bytes(collective: Collective, data: bytes) -> bytes:
    """Return the bytes of rank 0 on every rank. A collective call."""
    length = int(collective.broadcast(torch.tensor([len(data)]))[0])
    given = bytearray(data if len(data) == length else bytes(length)) or bytearray(1)
    sent = torch.frombuffer(given, dtype=torch.uint8)
    return collective.broadcast(sent).numpy().tobytes()[:length]


class RankRows(Protocol):
    """The rows of all ranks, as one rank has to do with them."""

    @property
    def servers(self) -> Sequence[str]:
        """Names the processes of the parameter servers."""

    @property
    def traffic(self) -> Traffic:
        """What came from servers, and went there."""

    def make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
    ) -> Store:
        """See `MakeStore`."""

    def over(self, local: MakeStore) -> MakeStore | None:
        """See `Placement.over`."""

    def made(self, store: Store) -> bool:
        """Whether a store is one of these."""

    def attach(self, model: Model, config: TrainConfig) -> None:
        """Take part in the checkpoints of a model that was bound to these rows."""

    def solo_lookups(self, call_in: Callable[[int], None]) -> AbstractContextManager[object]:
        """Have this rank look rows up while the other ranks are quiesced, for the length of a block.

        Args:
            call_in: Called with the store before each lookup that the other ranks must `answer`.
        """

    def answer(self, store: int) -> None:
        """Take part in a lookup of rank 0."""

    def tables_part(self) -> Part:
        """Return the tables of all, as the part of a checkpoint that rank 0 makes."""

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        """See `Placement.publishers`."""

    def server_health(self, server: int) -> MachineHealth:
        """Ask one server for its health. From any thread."""

    def begin(self) -> str:
        """Prepare for a restore, as rank 0; return the run that the other ranks `join`."""

    def join(self, run: str) -> None:
        """Use the run that rank 0 has started, and no other."""

    def end(self, *, finished: bool) -> None:
        """Say, as rank 0, that the run is over and saved."""

    def close(self) -> None:
        """Stop watching the servers; the connections are closed by their maker."""


class RowsOnRanks:
    """Rows are sharded across the ranks, by hash."""

    servers: Sequence[str] = ()

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self.traffic = Traffic()
        self._stores: list[AllToAllStore] = []
        self._share: RankShard | None = None

    def make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,
        threads: int | None,
        local: MakeStore = LocalStore.from_configs,
    ) -> AllToAllStore:
        """See `MakeStore`.

        Args:
            local: Makes the store of this rank's shard.
        """
        inner = local(configs, thresholds=thresholds, threads=threads)
        assert isinstance(inner, LocalStore)
        self._stores.append(AllToAllStore(inner, configs, self._groups, len(self._stores)))
        return self._stores[-1]

    def over(self, local: MakeStore) -> MakeStore:
        return partial(self.make_store, local=local)

    def made(self, store: Store) -> bool:
        return store in self._stores

    def attach(self, model: Model, config: TrainConfig) -> None:
        part = model.tables_part(
            incremental=config.keep.full_every > 1,
            beside=config.saves_beside,
            share=(self._groups.rank, self._groups.size),
        )
        self._share = RankShard(self._groups.calls, part, self._count, config.model_dir)

    def _count(self) -> dict[str, int]:
        return {name: one.rows for store in self._stores for name, one in store.inner.stats().items()}

    @contextmanager
    def solo_lookups(self, call_in: Callable[[int], None]) -> Iterator[None]:
        with ExitStack() as held:
            for store in self._stores:
                held.enter_context(store.solo_lookups(call_in))
            yield

    def answer(self, store: int) -> None:
        self._stores[store].answer_solo_lookup()

    def tables_part(self) -> Part:
        return RankTables(self._groups.calls)

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        groups = self._groups
        guards = [guard] if groups.rank == 0 else []
        share = SharePublisher(model.tables, (groups.rank, groups.size), plan, guards=guards)
        model.restoring = share.restoring
        return RowsOfRanks(groups, share)

    def server_health(self, server: int) -> MachineHealth:
        raise ConfigError(f"there is no parameter server {server}: rows are on ranks")

    def begin(self) -> str:
        return "yes"

    def join(self, run: str) -> None:
        """Do nothing: a rank has its shard from the start."""

    def end(self, *, finished: bool) -> None:
        """Do nothing: rows go with their ranks."""

    def close(self) -> None:
        """Do nothing: stores are closed with the model."""


class RowsOnServers:
    """Rows are on parameter servers, which hold no dense weights here.

    A lost server ends the attempt for all ranks, as a lost rank does. They connect to the servers again, and
    rank 0 starts another run there, from the last checkpoint. Servers refuse updates of the previous run that
    are still in flight, so nothing is trained twice.

    Args:
        group: The servers; closed by its maker.
    """

    keeps_going = False
    losses = 0

    def __init__(self, groups: RankGroups, group: ServerGroup) -> None:
        self._groups = groups
        self._group = group
        self._stores: list[ServedRankStore] = []
        self._run = ""
        self._closed = threading.Event()

    @property
    def servers(self) -> Sequence[str]:
        return self._group.processes

    @property
    def traffic(self) -> Traffic:
        return self._group.traffic

    @property
    def fresh(self) -> Sequence[int]:
        """Servers that restore what they hold: a run begins on all of them."""
        return range(len(self._group))

    @property
    def tables(self) -> TableWork:
        return TableWork(self._group, self._run)

    def make_store(
        self,
        configs: Mapping[str, TableConfig],
        /,
        *,
        thresholds: Mapping[str, SlotThresholds] | None,  # noqa: ARG002  the servers know them
        threads: int | None,  # noqa: ARG002
    ) -> ServedRankStore:
        number = len(self._stores)
        served = ParameterServerStore(self._group, number, configs)
        self._stores.append(ServedRankStore(served, configs, self._groups, number))
        return self._stores[-1]

    def over(self, local: MakeStore) -> None:  # noqa: ARG002
        return None

    def made(self, store: Store) -> bool:
        return store in self._stores

    def attach(self, model: Model, config: TrainConfig) -> None:
        """Do nothing: servers write what they hold."""

    def solo_lookups(self, call_in: Callable[[int], None]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()  # the servers answer

    def answer(self, store: int) -> None:
        raise ClusterError(f"rank 0 asks for rows of store {store}, which are on servers")

    def tables_part(self) -> Part:
        return ServedTables(self)

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:  # noqa: ARG002
        if self._groups.rank:
            return None  # the servers publish their rows, and rank 0 steers them
        every = plan.config.dense_interval.total_seconds()
        return RowsOfServers(self._group, lambda: self._run, every=every)

    def server_health(self, server: int) -> MachineHealth:
        found = ask(self._group, server, "server.health", OfRun(self._run), ServerHealth)
        return MachineHealth(HealthStatus(found.status), found.message)

    def begin(self) -> str:
        run = secrets.token_hex(8)
        on_each(self.fresh, lambda server: tell(self._group, server, "server.begin", BeginServer(run)))
        self.join(run)
        for server in self.fresh:
            threading.Thread(target=self._attend, args=(server,), name="attends-server", daemon=True).start()
        return run

    def join(self, run: str) -> None:
        self._run = run
        self._group.expect(run)

    def _attend(self, server: int) -> None:
        """Keep a call open at a server; if it breaks, all ranks restart."""
        asked = Attend(self._run, POLL)
        while not self._closed.is_set():
            try:
                ask(self._group, server, "server.attend", asked, Attended)
            except MonolithError as error:
                if not self._closed.is_set():
                    self._groups.abort(UnavailableError(f"parameter server {server} is lost: {error}"))
                return

    def note_cut(self, step: int) -> None:
        """Set the step that the servers report in their status."""
        self._group.set_step(step)

    def begin_commit(self, losses: int) -> None:
        """Do nothing: a lost server ends the run, so none can be lost between writing and commit."""

    def end_commit(self) -> None:
        """Do nothing."""

    def end(self, *, finished: bool) -> None:
        self.close()

        def say(server: int) -> None:
            try:
                tell(self._group, server, "server.end", EndRun(self._run, finished))
            except RetryableError as error:
                _log.warning("parameter server %d was not told that the run is over: %s", server, error)

        on_each(self.fresh, say)

    def close(self) -> None:
        self._closed.set()
