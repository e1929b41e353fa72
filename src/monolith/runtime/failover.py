"""How a chief restores a lost server's shard while all other processes keep going.

    attended ──call breaks──► missed ──answers as before──► attended, nothing was lost
                                │
                                ├──its standby has a copy──► taken over ──► published
                                │
                                │ another process serves the place: it came back, or a spare took over
                                ▼
                            restoring ──lost again──► missed
                                │
                                ▼
                            published ──► attended; workers have it as news

A shard is restored from the newest checkpoint: its rows and filters, its dense weights and their optimizer
state. No other server is touched. The restored shard has a new name, its incarnation, which workers learn
only once all of it is restored: until then their calls are refused, and they wait. Server 0 also gets the
coordination service and the step, which never decreases.

If the shard has a standby, that serves its copy at once, and nothing is read from a checkpoint.

A checkpoint that was being written when a server was lost is dropped, unless all of it was written. Which of
the two is settled before a shard is restored, so that the next increment follows on what the server holds:

    saving thread                                  thread that attends to the lost server
    write ──► begin_commit(losses then) ──► rename ──► end_commit
                  │ a server was lost since                │
                  ▼                                        ▼
              UnavailableError: drop it            `_rows_before` waits for this, then `last` is final
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from monolith import concurrency
from monolith.checkpoint import RestoreOptions, SavedPart
from monolith.checkpoint.folder.manifest import read_chain
from monolith.checkpoint.part import changes_to_json
from monolith.errors import (
    ClusterError,
    DeadlineExceededError,
    MonolithError,
    RetryableError,
    UnavailableError,
)
from monolith.observe import Metrics
from monolith.runtime.coordinator import LastCheckpoint, WorkerState
from monolith.runtime.losses import Lost, LostServer, LostWorker
from monolith.runtime.messages import (
    AllLostUpdates,
    AskLostUpdates,
    BeginServer,
    ComeBack,
    DenseRestored,
    Joined,
    LostUpdates,
    PublishServer,
    RestoreDense,
    RestoreTables,
    Returned,
    Served,
    ServerStatus,
    ShardTaken,
    TablesRestored,
    TakeOverShard,
)
from monolith.runtime.push_counts import PushCounts
from monolith.runtime.server_calls import ask, on_each, run_job, tell
from monolith.runtime.standbys import Standbys
from monolith.store import ServerGroup
from monolith.wire.messages import Nothing

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.2
"""Seconds between two looks for a server that is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepGoing:
    """Asks a fleet to keep going, and says how."""

    find: Callable[[int], Sequence[str]]
    """Where a place may be served now: addresses, the likeliest first."""
    connect: Callable[[str], ServerGroup]
    """Makes connections to one address; the caller closes them."""
    spare: Callable[[int, Collection[str]], str | None] | None = None
    """Gives a place to a spare server, as the chief, and returns its address; None if there is none. The
    servers at these addresses were given another place."""
    served: Callable[[int, str], None] | None = None
    """Told the new address of a shard, as the chief, for workers that join later."""
    spare_after: timedelta = timedelta(seconds=5)
    """How long a lost server may take to come back before a spare takes its place."""
    standbys: Standbys | None = None
    """The standbys that keep copies of the shards, as the chief; None if there are none."""
    metrics: Metrics | None = None
    """Where losses are counted."""
    clock: Callable[[], float] = concurrency.monotonic
    sleep: Callable[[float], None] = concurrency.sleep


class WorkerReturn:
    """`LostServerPolicy` of a worker.

    Args:
        how: Where to look for server 0.
        patience: How long to look for the run.
    """

    def __init__(
        self,
        group: ServerGroup,
        run: str,
        pushes: PushCounts,
        how: KeepGoing,
        *,
        worker: int,
        member: str,
        patience: timedelta,
    ) -> None:
        self._group = group
        self._run = run
        self._worker = worker
        self._member = member
        self._pushes = pushes
        self._how = how
        self._patience = patience
        self.left: WorkerState | None = None
        """What this worker left the run with, once it has."""
        self._said: dict[int, tuple[str, int]] = {}
        """Shard -> the incarnation that replaced a lost one, and the updates lost with that one."""

    def find_meeting(self, cause: RetryableError) -> None:
        limit = self._how.clock() + self._patience.total_seconds()
        while True:
            # A registry may name the lost server and its successor at the same time. Each is asked: the lost
            # one does not answer, and a server that is not restored yet answers without a run.
            for address in self._how.find(0):
                if (answer := self._come_back(address)) is None:
                    continue
                if answer.failed is not None:
                    raise UnavailableError(answer.failed.why)
                if answer.run == self._run:
                    self.take(answer.servers)
                    return
            if self._how.clock() >= limit:
                raise DeadlineExceededError(
                    f"waited {self._patience} for parameter server 0, which was lost, to be back: {cause}"
                ) from cause
            self._how.sleep(LOOK_EVERY)

    def _come_back(self, address: str) -> Joined | None:
        # All of it again, however often: the service that knew it is gone, and the new one counts each
        # incarnation of a worker once.
        lost = dict(self._said.values())
        asked = ComeBack(self._run, self._worker, self._member, self._group.step, self.left, lost)
        with contextlib.closing(self._how.connect(address)) as server, contextlib.suppress(ClusterError):
            return ask(server, 0, "meeting.back", asked, Joined)
        return None

    def take(self, servers: Mapping[str, Served]) -> None:
        for place, served in ((int(place), served) for place, served in servers.items()):
            if self._group.incarnations[place] == served.incarnation:
                continue  # news repeats every replacement of the run
            updates = self._pushes.replace(place, served)
            self._said[place] = served.incarnation, updates
            with contextlib.suppress(ClusterError):  # a figure of a report is no reason to fail
                said = LostUpdates(self._run, self._worker, served.incarnation, updates)
                tell(self._group, 0, "meeting.lost", said)

    def bring_back(self, server: int, cause: RetryableError) -> None:  # noqa: ARG002
        raise cause  # only the chief attends to servers

    def note_rows(self, server: int, rows: int) -> None:
        """Do nothing: only the chief is told."""

    def note_returned(self, returned: tuple[Returned, ...]) -> None:
        """Do nothing: the chief reports it."""


COUNT_WITHIN = 10.0
"""Seconds that workers have to report the updates they lost."""


COMMIT_WITHIN = 60.0
"""Seconds that a checkpoint which all servers have written may take to be committed."""


class ServerRecovery:
    """`LostServerPolicy` of the chief. Each server is brought back by the thread that attends to it.

    Args:
        last: The newest checkpoint of the run; None if there is none.
        halt_of: Returns the pause at which a step was saved; 0 if that was before this run.
        take_over_meeting: Starts the coordination service on a new server 0; given its connection and all
            servers.
        patience: How long to wait for a server.
    """

    def __init__(
        self,
        group: ServerGroup,
        run: str,
        pushes: PushCounts,
        how: KeepGoing,
        *,
        last: Callable[[], LastCheckpoint | None],
        halt_of: Callable[[int], int],
        take_over_meeting: Callable[[ServerGroup, Mapping[int, Served]], None],
        patience: timedelta,
    ) -> None:
        self._group = group
        self._run = run
        self._pushes = pushes
        self._last = last
        self._halt_of = halt_of
        self._take_over_meeting = take_over_meeting
        self._how = how
        self._patience = patience
        metrics = Metrics() if how.metrics is None else how.metrics
        self._count_servers = metrics.counter(
            "servers_lost", "Parameter servers that were lost and replaced."
        )
        self._count_rows = metrics.counter("lost_rows", "Rows that were lost with parameter servers.")
        self._count_updates = metrics.counter(
            "lost_updates", "Updates that were lost with parameter servers."
        )
        self._count_workers = metrics.counter("workers_lost", "Workers that were lost and replaced.")
        self._count_records = metrics.counter(
            "retrained_records", "Records trained again after a worker was lost."
        )
        self._count_seconds = metrics.counter(
            "recovery_seconds", "Seconds that lost servers were waited for."
        )
        # Guards what follows. Several servers may be lost at once, each with a thread that brings it back;
        # the training thread waits for them, and the one that saves compares `_losses`.
        self._changed = concurrency.Condition()
        self._spares_lock = concurrency.Lock()
        """Held while a spare is given a place, which waits for it: longer than `_changed` may be held."""
        self._spares: dict[int, str] = {}
        """Server -> the spare that is to take its place, until it does."""
        self._away: set[int] = set()
        """Servers that are missed, from the broken call until all workers may use the shard again."""
        self._losses = 0
        """Never decreases: a checkpoint whose cut saw another number may contain two states of a shard."""
        self._commits = 0
        """Checkpoints that all servers have written, and that are about to count: 0 or 1."""
        self._served: dict[int, Served] = {}
        """Shard -> its server, if that was replaced; all of them are news for a new coordination service."""
        self._rows: dict[int, int] = {}
        """Server -> its rows, as it last reported."""
        self._lost_servers: list[LostServer] = []
        self._lost_workers: tuple[LostWorker, ...] = ()
        self._returned: tuple[Returned, ...] = ()
        """The workers that were lost and rejoined, as the last news had them."""
        self._counting: list[concurrency.Thread] = []
        """Threads that wait for workers to report lost updates."""
        self._no_standby: dict[int, str] = {}
        """By server: why no standby took over. Each key belongs to the thread that attends to its server."""
        self._closed = False

    # For other threads

    @property
    def lost(self) -> Lost:
        """The losses so far; waits a moment for workers to report theirs."""
        self.wait_until_counted()
        with self._changed:
            return Lost(servers=tuple(self._lost_servers), workers=self._lost_workers)

    @property
    def losses(self) -> int:
        """How often a server was missed."""
        with self._changed:
            return self._losses

    def wait_until_counted(self) -> None:
        """Return when workers have reported the updates they lost so far, or had time to."""
        with self._changed:
            counting = list(self._counting)
        for thread in counting:
            thread.join(COUNT_WITHIN)

    def wait_until_whole(self, timeout: float) -> None:
        """Return when all servers are there.

        Raises:
            UnavailableError: Some still are not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._away or self._closed, timeout):
                raise UnavailableError(f"parameter servers {sorted(self._away)} are lost, and not back yet")

    def begin_commit(self, losses: int) -> None:
        """Note that all servers have written a checkpoint, which is about to be committed.

        Args:
            losses: The number of losses when its snapshot was taken.

        Raises:
            UnavailableError: A server was lost since: it wrote another state than its successor holds.
        """
        with self._changed:
            if losses != self._losses:
                raise UnavailableError("a parameter server was lost while this checkpoint was written")
            self._commits += 1

    def end_commit(self) -> None:
        """Note that the checkpoint is committed, or never will be."""
        with self._changed:
            self._commits -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Replace no more servers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # For the threads that attend to servers and ask for news

    def find_meeting(self, cause: RetryableError) -> None:  # noqa: ARG002
        self.wait_until_back(0)

    def wait_until_back(self, server: int) -> None:
        """Return when a server is back, as far as is known.

        Raises:
            DeadlineExceededError: It is not back in time.
        """
        with self._changed:
            patience = self._patience.total_seconds()
            if not self._changed.wait_for(lambda: server not in self._away or self._closed, patience):
                raise DeadlineExceededError(
                    f"waited {self._patience} for parameter server {server} to be back"
                )

    def take(self, servers: Mapping[str, Served]) -> None:
        """Do nothing: the chief has published them itself."""

    def note_rows(self, server: int, rows: int) -> None:
        with self._changed:
            self._rows[server] = rows

    def note_returned(self, returned: tuple[Returned, ...]) -> None:
        with self._changed:
            # News has all of them every time. The service of a new server 0 starts with a list of its own.
            seen, self._returned = self._returned, returned
            new = returned[len(seen) :] if returned[: len(seen)] == seen else returned
            self._lost_workers += tuple(
                LostWorker(
                    worker=one.worker,
                    records=one.records,
                    seconds=one.seconds,
                    by_others=one.by_others,
                )
                for one in new
            )
        for one in new:
            self._count_workers.inc()
            self._count_records.inc(one.records or 0)

    def bring_back(self, server: int, cause: RetryableError) -> None:
        lost_at = self._how.clock()
        # Counted although it may answer again and have lost nothing: a save that is being written cannot tell
        # the difference, and is dropped.
        with self._changed:
            self._away.add(server)
            self._losses += 1
        _log.warning("parameter server %d was lost; the other processes keep going: %s", server, cause)
        while not self._closed:
            try:
                if self._look(server, lost_at):
                    break
            except RetryableError as error:
                # From the beginning, with another incarnation: no worker has used the half-restored one.
                _log.warning(
                    "parameter server %d was lost again while its shard was restored: %s", server, error
                )
            if self._how.clock() - lost_at >= self._patience.total_seconds():
                raise DeadlineExceededError(
                    f"waited {self._patience} for parameter server {server}, which was lost, to be back"
                ) from cause
            self._how.sleep(LOOK_EVERY)
        with self._spares_lock:
            self._spares.pop(server, None)  # if it was used, the group has it by now
        with self._changed:
            self._away.discard(server)
            self._changed.notify_all()

    def _look(self, server: int, lost_at: float) -> bool:
        """Look for a lost server once; return True if its shard is served again, restored.

        In this order: the same process, with nothing lost; a standby, which costs a moment; the process that
        restarted, from the checkpoint; and after `spare_after` a spare, from the checkpoint.
        """
        for address in self._how.find(server):
            with contextlib.closing(self._how.connect(address)) as place:
                standing = self._standing(place, server)
                if standing is None:
                    continue
                if (standing.run, standing.incarnation) == (self._run, self._group.incarnations[server]):
                    _log.info("parameter server %d answers again, and has lost nothing", server)
                    return True
                if not self._take_standby(server, lost_at):
                    self._replace(server, place, address, lost_at)
                return True
        if self._take_standby(server, lost_at):
            return True
        waited = timedelta(seconds=self._how.clock() - lost_at)
        if self._how.spare is None or waited < self._how.spare_after:
            return False
        with self._spares_lock:  # of two threads that look at once, each finds another spare
            given = {address for place, address in self._spares.items() if place != server}
            spare = self._how.spare(server, given)
            if spare is None:
                return False
            self._spares[server] = spare
        _log.warning("parameter server %d did not come back; the spare at %s takes its place", server, spare)
        with contextlib.closing(self._how.connect(spare)) as place:
            self._replace(server, place, spare, lost_at)
        return True

    def _standing(self, place: ServerGroup, server: int) -> ServerStatus | None:
        """Return the status of a server; None if it does not answer, or has another shard."""
        try:
            if place.call(0, "describe")["shard"] != [server, len(self._group)]:
                return None
            return ask(place, 0, "server.standing", Nothing(), ServerStatus)
        except RetryableError:
            return None

    # One recovery

    def _replace(self, server: int, place: ServerGroup, address: str, lost_at: float) -> None:
        # First wait for a commit under way, then ask for the last checkpoint: that one may be it.
        rows_before = self._rows_before(server)
        last = self._last()
        if self._how.standbys is not None:
            # A run with standbys was told that a loss costs a moment; this one costs all since a checkpoint.
            _log.warning(
                "shard %d returns to %s, because no standby took over: %s",
                server,
                "its first rows, since no checkpoint was saved"
                if last is None
                else f"step {read_chain(last.prefix)[-1].manifest.step}, of checkpoint {last.prefix}",
                self._no_standby.pop(server, "none is known"),
            )
            self._how.standbys.restored(server)
        incarnation = concurrency.token_hex(8)
        rows, halt = self.restore_share(place, incarnation, last)
        updates = self._serve(server, place, Served(address, incarnation, halt))
        found = LostServer(
            server=server,
            rows=max(rows_before - rows, 0),
            updates=updates,
            seconds=self._how.clock() - lost_at,
            restored_from=None if last is None else last.prefix,
        )
        self.count(found, incarnation)

    def _take_standby(self, server: int, lost_at: float) -> bool:
        """Have a standby of a shard serve it, if one can; return whether it does.

        One that does not answer counts as refusing, even if it took over: no worker knows its incarnation.
        """
        standbys, lost = self._how.standbys, self._group.incarnations[server]
        if standbys is None or lost is None:
            return False
        addresses = standbys.of(server)
        if not addresses:
            self._no_standby[server] = "it had no standby: no idle server was there to be one"
            return False
        rows_before = self._rows_before(server)
        missed_for = self._how.clock() - lost_at
        refusals = []
        for address in addresses:
            incarnation = concurrency.token_hex(8)
            with contextlib.closing(self._how.connect(address)) as place:
                try:
                    asked = TakeOverShard(self._run, lost, incarnation, standbys.before(server))
                    taken = ask(place, 0, "standby.take_over", asked, ShardTaken)
                    refused = taken.refused
                except MonolithError as error:
                    refused = str(error)
                if refused:
                    _log.warning(
                        "the standby of parameter server %d at %s cannot take over: %s",
                        server,
                        address,
                        refused,
                    )
                    refusals.append(f"its standby at {address} could not take over: {refused}")
                    continue
                standbys.taken_over(server, lost)
                updates = self._serve(server, place, Served(address, incarnation, copied=taken.copied))
            found = LostServer(
                server=server,
                rows=max(rows_before - taken.rows, 0),
                updates=updates,
                seconds=self._how.clock() - lost_at,
                restored_from=None,
                standby=address,
                behind=max(0.0, taken.behind - missed_for),
            )
            self.count(found, incarnation)
            return True
        self._no_standby[server] = "; ".join(refusals)
        return False

    def _rows_before(self, server: int) -> int:
        """Return how many rows a lost server had, once no checkpoint is about to be committed."""
        with self._changed:
            # After a minute without: a rename that hangs must not keep the shard away for good. If it comes
            # through all the same, the shard is older than the checkpoint, as after any loss.
            self._changed.wait_for(lambda: not self._commits, COMMIT_WITHIN)
            return self._rows.get(server, 0)

    def _serve(self, server: int, place: ServerGroup, served: Served) -> int:
        """Have all workers use the new server of a shard from now on; return the updates of this process that
        were lost with the old one."""
        # The order: first the list that workers which join later read; then, if server 0 was lost, the new
        # service, without which no worker can be told; then this process, whose training thread sends again
        # what was not acknowledged; then all other workers.
        if self._how.served is not None:
            self._how.served(server, served.address)
        with self._changed:
            self._served[server] = served
            all_servers = dict(self._served)
        if server == 0:
            self._take_over_meeting(place, all_servers)
        updates = self._pushes.replace(server, served)
        if server != 0:  # of server 0, the new service learns it when it begins
            self._publish(server, served)
        return updates

    def restore_share(
        self, place: ServerGroup, incarnation: str, last: LastCheckpoint | None
    ) -> tuple[int, int]:
        """Have the one server of `place` restore its shard from a checkpoint; return its rows, and the number
        of the pause at which that checkpoint was taken."""
        tell(place, 0, "server.begin", BeginServer(self._run, incarnation))
        if last is None:
            return 0, 0
        chain, options = read_chain(last.prefix), last.options
        tables = tuple(
            (link.prefix, link.manifest.parts["tables"]) for link in chain if "tables" in link.manifest.parts
        )
        asked = RestoreTables(self._run, tables, options.optimizer_state, options.strict)
        restored = run_job(place, 0, "tables.restore", asked, TablesRestored)
        newest = chain[-1]
        if "dense" in newest.manifest.parts and not last.dense_cleared:
            saved = SavedPart(newest.prefix, newest.manifest.parts["dense"])
            restore_dense(place, [0], self._run, saved, options)
        return sum(restored.rows.values()), self._halt_of(newest.manifest.step)

    def _publish(self, server: int, served: Served) -> None:
        """Tell the coordination service which server has a shard; if server 0 was lost as well, wait for it.

        Repeated until it is told: a worker that never learns it would wait for the lost server.
        """
        while not self._closed:
            try:
                tell(self._group, 0, "meeting.served", PublishServer(self._run, server, served))
                return
            except RetryableError:
                self._how.sleep(LOOK_EVERY)
                self.wait_until_back(0)

    def count(self, found: LostServer, incarnation: str) -> None:
        """Report a loss, with the updates that other workers lost once they have reported theirs.

        On a thread of its own: workers have `COUNT_WITHIN` seconds, and the shard is served meanwhile.
        """

        def count() -> None:
            self._report(found, self._count_others(incarnation))

        thread = concurrency.Thread(target=count, name="count-lost", daemon=True)
        with self._changed:
            self._counting.append(thread)
            thread.start()  # under the lock: `wait_until_counted` joins only threads that were started

    def _count_others(self, incarnation: str) -> AllLostUpdates | str:
        """Return the updates that other workers lost; the reason if the service cannot be asked. If that was
        lost as well, it is asked once it is back."""
        limit = self._how.clock() + COUNT_WITHIN
        while True:
            left = max(0.0, limit - self._how.clock())
            try:
                asked = AskLostUpdates(self._run, incarnation, left)
                return ask(self._group, 0, "meeting.updates", asked, AllLostUpdates)
            except ClusterError as error:
                if left <= 0 or self._closed:
                    _log.warning("cannot count the updates of others that were lost: %s", error)
                    return f"server 0 did not answer within {COUNT_WITHIN:g} s: {error}"
                self._how.sleep(LOOK_EVERY)

    def _report(self, found: LostServer, others: AllLostUpdates | str) -> None:
        """Report a loss: to the log, to metrics, and in `lost`."""
        if isinstance(others, str):
            whole = replace(found, uncounted=None, uncounted_why=others)
        else:
            why = dict.fromkeys(others.missing, f"did not answer within {COUNT_WITHIN:g} s")
            why |= dict.fromkeys(others.lost, "was lost as well")
            whole = replace(
                found,
                updates=found.updates + others.updates,
                uncounted=tuple(sorted(why)),
                uncounted_why=", ".join(f"worker {one} {why[one]}" for one in sorted(why)),
            )
        _log.warning("%s", whole.describe())
        self._count_servers.inc()
        self._count_rows.inc(whole.rows or 0)
        self._count_updates.inc(whole.updates)
        self._count_seconds.inc(whole.seconds)
        with self._changed:
            self._lost_servers.append(whole)


def restore_dense(
    group: ServerGroup, servers: Collection[int], run: str, saved: SavedPart, options: RestoreOptions
) -> None:
    """Have servers restore their shards of the weights."""
    aliases = options.custom.alias_map
    asked = RestoreDense(
        run,
        saved.prefix,
        saved.entry,
        options.optimizer_state,
        options.strict,
        None if aliases is None else dict(aliases),
        options.custom.auto_alias,
        changes_to_json(options.changes),
    )
    on_each(servers, lambda server: run_job(group, server, "dense.restore", asked, DenseRestored))
