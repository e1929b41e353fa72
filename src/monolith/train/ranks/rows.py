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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Protocol

from monolith.checkpoint import Part
from monolith.errors import ClusterError, ConfigError, MonolithError, RetryableError, UnavailableError
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
from monolith.sync.guard import RecoveringGuard
from monolith.table import SlotThresholds, TableConfig
from monolith.train.config import TrainConfig
from monolith.train.fleet.bodies import Attend, Attended, BeginServer, EndRun, OfRun, ServerHealth
from monolith.train.fleet.calls import POLL, ask, tell
from monolith.train.fleet.parts import ServedTables
from monolith.train.fleet.table_work import TableWork, on_each
from monolith.train.hooks.barrier import HealthStatus, MachineHealth
from monolith.train.model import Model
from monolith.train.publishing.holders import Holders
from monolith.train.publishing.rank_rows import RowsOfRanks
from monolith.train.publishing.served_rows import RowsOfServers
from monolith.train.publishing.share import PublishPlan, SharePublisher
from monolith.train.ranks.parts import RankShare, RankTables
from monolith.wire.bulk import Traffic

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

    def holding(self, local: MakeStore) -> MakeStore | None:
        """See `Peers.holding`."""

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

    def holders(self, model: Model, plan: PublishPlan, guard: RecoveringGuard) -> Holders | None:
        """See `Peers.holders`."""

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
        self._share: RankShare | None = None

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
        self._share = RankShare(self._groups.calls, part, self._count, config.model_dir)

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

    def holders(self, model: Model, plan: PublishPlan, guard: RecoveringGuard) -> Holders | None:
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

    def holders(self, model: Model, plan: PublishPlan, guard: RecoveringGuard) -> Holders | None:  # noqa: ARG002
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
