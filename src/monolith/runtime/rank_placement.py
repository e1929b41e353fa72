"""Where the rows of ranks are: each rank holds a share of them, or parameter servers hold all.

    held by ranks     a rank answers for its share until it is gone; nothing begins and nothing ends
    held by servers   rank 0 begins a run on all servers, restores it, says its name to the others, keeps a
                      call at each server by which both know that the other is there, and ends it

Everything else is the same for both: who leads, when all stand still, what a checkpoint is.
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
from monolith.runtime.fleet_placement import ServedTables
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
from monolith.store.rank_calls import RankCalls
from monolith.store.rank_groups import Collective
from monolith.sync.guard import PublishGuard
from monolith.table import SlotThresholds, TableConfig
from monolith.train.config import RanksConfig, TrainConfig
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
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
    """Weights whose gradients go together."""

    weights: list[nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    """Places of weights that have no gradient yet, in this step."""
    finish: Callable[[], Tensor] | None = None
    """Waits for the sum, once the bucket was sent."""


class AveragedGradients:
    """Those of one model's dense weights: `Together`, as ranks are. Used by the training thread.

    Args:
        weights: In the same order on every rank.
        collective: Nobody else's.
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
        """What gradients are multiplied by on their way."""
        self._next = len(self._buckets)
        """The bucket to be sent next; outside of a step, none."""
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def begin(self, examples: int) -> None:
        self._examples = examples
        self._weight = float(examples)
        if self._config.half_gradients:  # whose range is small: weighted by the share of all examples
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
        """Hear from backward that a gradient is there."""
        bucket = self._bucket_of[id(weight)]
        bucket.waits_for.discard(id(weight))
        if self._next < len(self._buckets):
            self._send_ready()

    def _send_ready(self, *, all_of_them: bool = False) -> None:
        """Send what is complete, in the order of buckets; at the end, whatever is left."""
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
        """Make every gradient the mean over all examples; None where no rank has one."""
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
    """The tables of this rank, as rank 0 has them cut, written and restored. From any thread.

    Args:
        part: This rank's share of the tables.
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
            raise ClusterError("cannot write tables: this rank holds no such moment")
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
            # A moment that was not saved is of no use, and a rank that is gone holds it no more.
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

    def holding(self, local: MakeStore) -> MakeStore | None:
        """See `Coordinator.holding`."""

    def made(self, store: Store) -> bool:
        """Whether a store is one of these."""

    def attach(self, model: Model, config: TrainConfig) -> None:
        """Take part in the checkpoints of a model that was bound to these rows."""

    def solo_lookups(self, call_in: Callable[[int], None]) -> AbstractContextManager[object]:
        """Have this rank look rows up while the others stand still, for the length of a block.

        Args:
            call_in: Told the store, before each lookup that the others are to `answer`.
        """

    def answer(self, store: int) -> None:
        """Do one's part in a lookup of the rank that looks alone."""

    def tables_part(self) -> Part:
        """Return the tables of all, as the part of a checkpoint that rank 0 makes."""

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
        """See `Coordinator.holders`."""

    def server_health(self, server: int) -> MachineHealth:
        """Ask one server for its health. From any thread."""

    def begin(self) -> str:
        """Make ready for a restore, as rank 0; return what the others `join`."""

    def join(self, run: str) -> None:
        """Work with what rank 0 has begun, and with nothing else."""

    def end(self, *, finished: bool) -> None:
        """Say, as rank 0, that the run is over and saved."""

    def close(self) -> None:
        """Let go; whoever made the groups and connections closes them."""


class RowsOnRanks:
    """Every rank holds those that hash to it."""

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
            local: Makes the store of this rank's share.
        """
        inner = local(configs, thresholds=thresholds, threads=threads)
        assert isinstance(inner, LocalStore)
        self._stores.append(AllToAllStore(inner, configs, self._groups, len(self._stores)))
        return self._stores[-1]

    def holding(self, local: MakeStore) -> MakeStore:
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

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:
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
        """Do nothing: a rank has its share from the start."""

    def end(self, *, finished: bool) -> None:
        """Do nothing: rows go with their ranks."""

    def close(self) -> None:
        """Do nothing: stores are closed with the model."""


class RowsOnServers:
    """Parameter servers hold all of them, and no weights.

    A server that is lost ends the attempt for all ranks, as a rank does that is lost. They connect to the
    servers again, and rank 0 begins another run there, from the last checkpoint. What is still on its way in
    the run before is refused by the servers, so nothing is trained twice.

    Args:
        group: The servers; closed by whoever made it.
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

    def holding(self, local: MakeStore) -> None:  # noqa: ARG002
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

    def holders(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Holders | None:  # noqa: ARG002
        if self._groups.rank:
            return None  # servers hold the rows, and rank 0 tells them
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
        """Keep a call at a server; without it, all begin again."""
        asked = Attend(self._run, POLL)
        while not self._closed.is_set():
            try:
                ask(self._group, server, "server.attend", asked, Attended)
            except MonolithError as error:
                if not self._closed.is_set():
                    self._groups.abort(UnavailableError(f"parameter server {server} is lost: {error}"))
                return

    def note_cut(self, step: int) -> None:
        """Have the servers say, to whoever looks on, how far the run is."""
        self._group.set_step(step)

    def begin_commit(self, losses: int) -> None:
        """Do nothing: with a server the run is lost, and what it wrote with it."""

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
