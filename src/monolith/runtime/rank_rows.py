"""The rows of ranks: sharded across the ranks by hash, or on parameter servers.

rows on ranks     a rank answers for its shard as long as it lives; nothing is started and nothing ends
rows on servers   rank 0 starts a run on all servers, restores it, tells the other ranks its name, keeps
                  a call open at each server so that both notice a loss, and ends it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from monolith import concurrency, filesystem
from monolith.checkpoint import Part, RestoreOptions, SavedPart, TablesPart, merge_entries
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
from monolith.runtime.publish_shard import PublishPlan, ShardPublisher
from monolith.runtime.publishers import Publishers, RankPublishers, ServerPublishers
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
from monolith.sync.guard import PublishGuard
from monolith.table import SlotThresholds, TableConfig
from monolith.train.config import TrainConfig
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
from monolith.train.model import Model
from monolith.wire.bulk import Traffic
from monolith.wire.messages import Json, read_message, write_message

_log = logging.getLogger(__name__)


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

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:
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
            background=config.saves_in_background,
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

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:
        groups = self._groups
        guards = [guard] if groups.rank == 0 else []
        share = ShardPublisher(model.tables, (groups.rank, groups.size), plan, guards=guards)
        model.restoring = share.restoring
        return RankPublishers(groups, share)

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
        self._closed = concurrency.Event()

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

    def publishers(self, model: Model, plan: PublishPlan, guard: PublishGuard) -> Publishers | None:  # noqa: ARG002
        if self._groups.rank:
            return None  # the servers publish their rows, and rank 0 steers them
        every = plan.config.dense_interval.total_seconds()
        return ServerPublishers(self._group, lambda: self._run, every=every)

    def server_health(self, server: int) -> MachineHealth:
        found = ask(self._group, server, "server.health", OfRun(self._run), ServerHealth)
        return MachineHealth(HealthStatus(found.status), found.message)

    def begin(self) -> str:
        run = concurrency.token_hex(8)
        on_each(self.fresh, lambda server: tell(self._group, server, "server.begin", BeginServer(run)))
        self.join(run)
        # Only rank 0 watches the servers; its `abort` reaches the other ranks through the shared keys.
        for server in self.fresh:
            concurrency.Thread(
                target=self._attend, args=(server,), name="attends-server", daemon=True
            ).start()
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
        # Without a lock: rank 0 makes one of these calls at a time, and a call between ranks is not repeated.
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
        cut = _RankCut(self._calls, concurrency.token_hex(8))
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
