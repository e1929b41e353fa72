"""A parameter server: the process that serves a shard of a model's rows and dense weights to workers.

It is started with the same task as the workers, so it knows the tables and optimizers, and it
reads no data. The chief tells it what to restore, when to take a snapshot and where to write it,
and that the run is over.

A server outlives a run. When a process is lost it waits for the chief to restart, and then drops its
shard for the one that the chief restores. It ends well only when the chief says that the run is
finished. Without a chief for too long, it ends with an error.

    spare ──server.assign──► has a shard ──server.begin──► in a run ──begin──► in the next ...
                               │    ▲
                               └────┘ assign, to another shard

A run may have more servers than shards. Servers beyond num_ps start as spares; the chief assigns the
shards before a run starts, or when a spare replaces a lost server. A spare holds nothing and refuses
requests for rows. It ends with the run, used or not. If a run has standbys, a spare keeps the copy of a
shard meanwhile; see `standbys`.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from monolith import concurrency, filesystem
from monolith.checkpoint import CustomRestore, RestoreOptions, SavedPart, TablesPart
from monolith.checkpoint.part import PartSnapshot, changes_from_json
from monolith.cluster import Discovery
from monolith.cluster.security import Guard
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    FeatureError,
    OutOfMemoryError,
    SaveError,
    UnavailableError,
)
from monolith.runtime.cluster_config import ClusterConfig, TimeoutsConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.messages import (
    CALLS,
    STANDBY_CALLS,
    WORK,
    AssignShard,
    Attend,
    Attended,
    BeginServer,
    CloseSnapshot,
    CopiedPushes,
    CopyOpened,
    DenseRestored,
    EndRun,
    FollowShard,
    OfRun,
    OfSnapshot,
    RestoreDense,
    RestoreTables,
    ServerHealth,
    ServerStatus,
    ShardTaken,
    StandbyStatus,
    TablesRestored,
    TablesWritten,
    TakeOverShard,
    WriteTables,
)
from monolith.runtime.publish_shard import PublishPlan, ShardPublisher
from monolith.runtime.server_calls import Jobs
from monolith.runtime.service import LONGEST_WAIT, LOST_AFTER, RETURN_WITHIN, CoordinationService
from monolith.runtime.standbys import CopiedShard, CopyPlan, StandbyCopy
from monolith.store import DenseShard, LocalStore, ParameterServer
from monolith.store.dense import unpack_tensors
from monolith.store.server import NewestPush
from monolith.store.store import add_tiered
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publish_messages import (
    Flushed,
    PublishedWeights,
    PublishOrder,
    PublishProgress,
    PublishStatus,
    ShardPublishStatus,
    UnpublishedShard,
    checked_order,
)
from monolith.table import TableStats
from monolith.train.config import TrainConfig
from monolith.train.hooks.barrier import MachineHealth, memory_health
from monolith.train.model import Model
from monolith.train.task import Mode, Task
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.endpoint import Handlers
from monolith.wire.flight_server import typed_exchange
from monolith.wire.messages import Answer, Gone, Nothing, PollAnswer, typed_calls, typed_polls
from monolith.wire.ports import Limits

_log = logging.getLogger(__name__)


class PublishedShard:
    """Publishes the shard of a server for one run, from the first progress report of the chief on.

    That report is the sign that everything is restored. Reports, weights and orders come on threads of calls.

    Args:
        newest: Returns the newest update of rows on this server.
    """

    def __init__(
        self, model: Model, share: tuple[int, int], plan: PublishPlan, newest: Callable[[], NewestPush]
    ) -> None:
        self._model = model
        self._share = share
        self._plan = plan
        self._newest = newest
        # Each of the three is one reference, written by one kind of call and read by the publisher's thread.
        self._told: PublishProgress | None = None
        self._stale = (0, 0)
        """The steps that were told and pushed last before rows were restored, and say nothing of these."""
        self._weights: Mapping[str, Tensor] | None = None
        # Guards that one publisher is made, and none after `close`. Not held while it publishes.
        self._lock = concurrency.Lock()
        self._publisher: ShardPublisher | None = None
        self._over = False

    def note_progress(self, told: PublishProgress) -> None:
        """Note how far the run is."""
        self._told = told
        with self._lock:
            if self._over:
                return
            publisher = self._publisher
            if publisher is None:
                self._publisher = publisher = ShardPublisher(
                    self._model.tables, self._share, self._plan, learned=self._learned
                )
                self._model.restoring = self._restoring
                if self._weights is not None:
                    publisher.send_weights(self._weights)
            publisher.start()  # again with each report: it may have failed the last time

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the dense weights."""
        # Stored first, then the publisher is looked at; `note_progress` makes the publisher first, then looks
        # here. So one of the two sends them; sending them twice is harmless.
        self._weights = weights
        if (publisher := self._publisher) is not None:
            publisher.send_weights(weights)

    def execute(self, order: PublishOrder) -> tuple[ShardPublishStatus, ...]:
        publisher = self._publisher
        return () if publisher is None else publisher.execute(order)

    def flush(self) -> tuple[UnpublishedShard, ...]:
        publisher = self._publisher
        if publisher is None:
            return (UnpublishedShard(*self._share, reason="publishing could not be started"),)
        return publisher.flush()

    def close(self) -> None:
        """Stop. Closing again does nothing."""
        with self._lock:
            self._over = True
            publisher = self._publisher
        if publisher is not None:
            publisher.close()

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        assert self._publisher is not None
        with self._publisher.restoring():
            yield
            self._stale = (0 if self._told is None else self._told.step, self._newest().step)

    def _learned(self) -> LearnedUpTo:
        newest, told = self._newest(), self._told
        steps = (0 if told is None else told.step, newest.step)
        return LearnedUpTo(
            step=max(0 if step == stale else step for step, stale in zip(steps, self._stale, strict=True)),
            watermark=0 if told is None else told.watermark,
            event_at=float(newest.event_time),
            trained_at=newest.at,
        )


LINGER = timedelta(seconds=15)
"""How long a server that is told to stop waits for the chief, who may want to save."""


_THREAD_BYTES = 8 << 20
"""Bytes of address space that a thread of the port takes."""


_LOOKS_WITHOUT_MEMORY = 10
"""Looks in a row, `_CHECK_EVERY` apart, after which a server without memory for a thread ends."""


_CHECK_EVERY = 0.1


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """How a server ended."""

    why: str
    finished: bool = False
    """Whether the run came to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPort:
    """Where a parameter server listens; other processes reach it under the same host."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    guard: Guard | None = None
    """What callers must present."""


OnServing = Callable[["ServedShard", str], None]
"""Called with a served shard and its address, once other processes may connect."""


def serve_parameters(
    task: Task,
    config: RunConfig,
    discovery: Discovery,
    *,
    port: ServerPort | None = None,
    stop: concurrency.Event | None = None,
    linger: timedelta = LINGER,
    on_serving: OnServing | None = None,
    publish: PublishPlan | None = None,
) -> ServerEnd:
    """Serve a shard of a model until the chief says that the run is over; return how it ended.

    Args:
        config: The run, and in `cluster.index` which server this is. The first `num_ps` servers have the
            shard of their number; the spares after them have none until the chief assigns one.
        port: Where to listen.
        stop: Set from outside to end; if a run is under way, the chief has `linger` to save first.
        on_serving: By default the address is logged.
        publish: How changes of this shard are published; None publishes nothing.

    Raises:
        DeadlineExceededError: No chief came in time.
        ListenError: The port is taken.
        ConfigError: The task cannot be served.
    """
    cluster, timeouts = config.cluster, config.timeouts
    index, servers = cluster.index, cluster.num_ps + cluster.num_spares
    if not 0 <= index < servers:
        raise ConfigError(f"there is no parameter server {index} of {servers}")
    shard = ServedShard(
        task,
        config.train,
        cluster,
        lost_after=timeouts.silence,
        publish=publish,
        copies=CopyPlan(interval=cluster.standby_interval.total_seconds()),
    )
    port = port or ServerPort()
    stop = concurrency.Event() if stop is None else stop
    with closing(shard), shard.serve(port.host, port.port, port.guard, config.limits) as server:
        discovery.register("ps", index, server.address)
        try:
            if on_serving is None:
                _log.info("parameter server %d of %d listens on %s", index, servers, server.address)
            else:
                on_serving(shard, server.address)
            return shard.wait(stop, linger=linger, timeouts=timeouts)
        finally:
            discovery.deregister("ps", index, server.address)
            shard.close_publishing()


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """The status of a server, for status pages."""

    state: str
    step: int
    """Pushes counted here; on server 0, the global step."""
    rows: int
    bytes: int
    traffic: Traffic | None = None
    """None before it listens."""
    tiered: TableStats | None = None
    """The sums over its tiered tables; None without any."""


@dataclass(slots=True)
class _ShardInRun:
    """The shard of a server in one run.

        in use ──another run begins──► retired ──its last work ends──► closed

    Work on it, a write or a restore, may still be under way when it is retired.
    """

    model: Model
    stores: list[LocalStore]
    dense: DenseShard
    tables: TablesPart
    cuts: dict[str, PartSnapshot]
    publishing: PublishedShard | None = None
    """None if nothing is published."""
    copied: CopiedShard | None = None
    """None if no standby copies it."""
    works: int = 0
    """Pieces of work that are under way."""
    retired: bool = False


class ServedShard:
    """One server's shard of a model, and the calls that the chief and workers make on it.

    Args:
        cluster: The number of the server, and how many there are. Its shard has the same number, until it is
            assigned another; a server from `num_ps` on has none.
        lost_after: How long a worker may be silent before server 0 takes it for lost.
        copies: How a standby learns of changes in this shard.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        cluster: ClusterConfig,
        *,
        lost_after: timedelta = LOST_AFTER,
        publish: PublishPlan | None = None,
        copies: CopyPlan | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        index, num_ps = cluster.index, cluster.num_ps
        self._holds_weights = cluster.mode == "async"  # otherwise every rank has all of them
        self._copies = CopyPlan() if copies is None else copies
        self._publish = publish
        self._task = task
        self._config = config
        self._index = index
        self._clock = clock
        # The server of shard 0 runs the coordination service, and any server may become that one. The service
        # has a lock of its own, under which it calls `_raise_step`: nothing here calls it with `_lock` held.
        self._meeting = CoordinationService(
            cluster.num_workers,
            max_workers=cluster.max_workers or None,
            lost_after=lost_after,
            raise_step=self._raise_step,
            clock=clock,
        )
        work: dict[str, Answer] = {
            "tables.write": self._write,
            "tables.restore": self._restore,
            "dense.restore": self._restore_dense,
        }
        self._jobs = Jobs(typed_calls(WORK, work))
        self._over = concurrency.Event()
        # Guards the fields below: the shard, its run and its copies. Calls of rows and weights do not take
        # it: `ParameterServer` reads one reference that `replace` swaps. Long work (a write, a restore) runs
        # without it, and is counted in `works` instead, so that a new run can begin meanwhile.
        self._lock = concurrency.Lock()
        self._share = (index, num_ps) if index < num_ps else None
        self._held = None if self._share is None else self._make(self._share)
        self._run: str | None = None
        self._no_memory: BaseException | None = None
        self._without_memory = 0
        """Looks in a row that found no memory for a thread."""
        self._finished = False
        self._chief = _Attendance(clock)
        self._server: ParameterServer | None = None
        self._standby: StandbyCopy[_ShardInRun] | None = None
        self._taken: ShardTaken | None = None
        self._listens: tuple[str, Guard | None, Limits | None] = ("127.0.0.1", None, None)

    def serve(
        self, host: str, port: int, guard: Guard | None, limits: Limits | None = None
    ) -> ParameterServer:
        """Listen; the caller closes the server returned."""
        calls = {**self.calls, **self._jobs.calls, **self._meeting.calls}
        polls = {**self.polls, **self._meeting.polls}
        longest = (limits or Limits()).wait.total_seconds()
        held = self._held
        self._listens = (host, guard, limits)
        self._server = ParameterServer(
            [] if held is None else held.stores,
            None if held is None else held.dense,
            shard=self._share,
            host=host,
            port=port,
            guard=guard,
            extra=Handlers(
                calls=typed_calls(CALLS, calls, longest=longest)
                | typed_calls(STANDBY_CALLS, self.standby_calls),
                polls=typed_polls(CALLS, polls, longest=longest),
                exchanges={"publish.weights": typed_exchange(PublishedWeights, self._take_weights)},
                out_of_memory=self._end_for_memory,
            ),
            limits=limits,
        )
        return self._server

    @property
    def calls(self) -> Mapping[str, Answer]:
        return {
            "server.assign": self._assign,
            "server.reserve": self._reserve,
            "server.begin": self._begin,
            "server.standing": self._standing,
            "server.end": self._end,
            "server.health": self._health,
            "tables.cut": self._cut,
            "tables.close": self._close,
            "publish.obey": self._execute_order,
            "publish.told": self._note_progress,
            "publish.flush": self._flush,
        }

    @property
    def standby_calls(self) -> Mapping[str, Answer]:
        return {
            "standby.open": self._open_copy,
            "standby.follow": self._follow,
            "standby.standing": self._standby_standing,
            "standby.take_over": self._take_over,
        }

    @property
    def polls(self) -> Mapping[str, PollAnswer]:
        return {"server.attend": self._attend}

    def figures(self) -> ShardFigures:
        """Return how this server stands. From any thread."""
        with self._lock:
            held = self._held
            # Under the lock, which keeps it from being closed; at the end of the process it is.
            stats = [] if held is None or held.retired else list(held.model.stats().values())
            state = self._state(held)
        return ShardFigures(
            state=state,
            step=0 if self._server is None else self._server.step,
            rows=sum(table.rows for table in stats),
            bytes=sum(table.bytes_total for table in stats),
            traffic=None if self._server is None else self._server.traffic,
            tiered=add_tiered(stats),
        )

    def _state(self, held: _ShardInRun | None) -> str:
        if self._standby is not None:
            return f"standby of server {self._standby.follows.index}"
        if held is None:
            return "spare"
        if self._run is None:
            return "waiting for the chief"
        if self._chief.absent_for():
            return "without a chief"
        return "saving" if held.cuts else "restoring" if held.works else "serving"

    def wait(
        self,
        stop: concurrency.Event,
        *,
        linger: timedelta = LINGER,
        timeouts: TimeoutsConfig | None = None,
    ) -> ServerEnd:
        """Return when the run is over, or `stop` was set and the chief, if it is there, had time to save.

        Args:
            timeouts: How long to wait for a chief to begin, and for another one if it is gone.

        Raises:
            DeadlineExceededError: There is no chief.
            OutOfMemoryError: There was no memory for a request.
        """
        limit: float | None = None
        timeouts = timeouts or TimeoutsConfig()
        while not self._over.wait(_CHECK_EVERY):
            if not stop.is_set():
                self._check_attended(timeouts.start, timeouts.abandoned)
                self._check_memory()
                continue
            if limit is None:
                if self._run is None:
                    return ServerEnd("stopped before a run began")
                _log.info("told to stop; the chief has %g s to save first", linger.total_seconds())
                limit = self._clock() + linger.total_seconds()
            elif self._clock() >= limit:
                return ServerEnd("stopped during a run")
            elif self._chief.absent_for() > RETURN_WITHIN:  # it will not save any more
                return ServerEnd("stopped during a run whose chief is gone")
        if self._no_memory is not None:
            raise OutOfMemoryError(
                f"parameter server {self._index} has no memory left for its rows: {self._no_memory}. It ends "
                "and may be started again; give its machine more memory, or the run more servers, or rows an "
                "expiry"
            ) from self._no_memory
        if self._finished:
            return ServerEnd("the run is over", finished=True)
        return ServerEnd("the run was stopped before its end; start it again to resume")

    def _check_memory(self) -> None:
        """End if there is no memory for a thread: the port then answers nothing, and no handler sees why."""
        try:
            mmap.mmap(-1, _THREAD_BYTES).close()  # reserved and not touched: it takes microseconds
        except OSError as error:
            self._without_memory += 1
            if self._without_memory >= _LOOKS_WITHOUT_MEMORY:
                self._end_for_memory(error)
        else:
            self._without_memory = 0

    def _end_for_memory(self, error: BaseException) -> None:
        """Have `wait` raise: updates may be half applied, so a run must not continue with this process."""
        self._no_memory = error  # before the event: `wait` reads it after
        self._over.set()

    def _check_attended(self, start_timeout: timedelta, abandoned_after: timedelta) -> None:
        alone = self._chief.absent_for()
        began = self._run is not None
        patience = abandoned_after if began else start_timeout
        if alone > patience.total_seconds():
            raise DeadlineExceededError(
                f"parameter server {self._index} has had no chief for {alone:.0f} s"
                + ("; its updates since the last checkpoint are lost. " if began else ". ")
                + "See the chief's log. How long a server waits for a chief is set by "
                + ("timeouts.abandoned." if began else "timeouts.start.")
            )

    # The chief's calls

    def _assign(self, body: AssignShard) -> None:
        """Take a share; to be given the one it has changes nothing, also in a run."""
        share = (body.index, body.num_ps)
        if body.index >= body.num_ps:
            raise ClusterError(f"there is no share {body.index} of {body.num_ps}")
        with self._lock:
            self._chief.touch()
            if share == self._share:  # also in a run: a chief that restarts assigns all shards again
                return
            if self._run is not None:
                assert self._share is not None
                raise ClusterError(
                    f"parameter server {self._index} holds share {self._share[0]} of {self._share[1]} in a "
                    f"run, and cannot take share {share[0]} of {share[1]}; restart the server to free it"
                )
            assert self._server is not None
            # Made, then served, then the old one is closed: a request that arrives meanwhile finds one of the
            # two whole. A failure of `_make` (no memory) leaves the server as it was.
            held = self._make(share)
            self._server.replace(held.stores, held.dense, shard=share)
            _log.info("parameter server %d has share %d of %d from now on", self._index, *share)
            before, self._held, self._share = self._held, held, share
            self._retire(before)
            self._drop_standby()

    def _reserve(self, _: Nothing) -> None:
        """Note that there is a chief, which may need this server later."""
        self._chief.touch()

    def _begin(self, body: BeginServer) -> None:
        incarnation = body.incarnation or body.run
        with self._lock:
            assert self._server is not None
            if self._run == body.run and self._server.incarnation == incarnation:
                return  # asked again, because an answer was lost
            if self._held is None or self._share is None:
                raise UnavailableError(f"parameter server {self._index} is a spare and has no share yet")
            held = self._held
            # An unused shard is as good as a new one. One of an earlier run is not cleared but replaced:
            # pushes of that run which are still under way keep their own tables, and change nothing here.
            if self._run is not None:
                _log.info("a new run begins; dropping the rows and weights of the previous one")
                held = self._make(self._share)
            self._server.replace(held.stores, held.dense, incarnation=incarnation)
            before, self._held, self._run = self._held, held, body.run
            if before is not held:
                self._retire(before)
            self._drop_standby()

    def _standing(self, _: Nothing) -> ServerStatus:
        with self._lock:
            assert self._server is not None
            return ServerStatus(self._server.process, self._run, self._server.incarnation)

    def _raise_step(self, step: int) -> None:
        """Count from a step that a worker knows of, if that is higher."""
        assert self._server is not None
        self._server.raise_step(step)

    def _attend(self, body: Attend, gone: Gone) -> Attended:
        """Keep the chief's call for a while, by which both sides know that the other is there."""
        self._check_run(body.run)
        # Without the lock: this waits for seconds. `_run` is one reference, and a stale read costs one round.
        with self._chief:
            limit = self._clock() + min(body.wait, LONGEST_WAIT)
            while self._run == body.run and not gone() and self._clock() < limit:
                if self._over.wait(_CHECK_EVERY):
                    break
        with self._working(body.run) as held:
            return Attended(sum(stats.rows for stats in held.model.stats().values()))

    def _end(self, body: EndRun) -> None:
        if self._run is not None:  # a spare that was never used ends, too
            self._check_run(body.run)
        self._finished = body.finished  # before the event: `wait` reads it after
        self._over.set()

    def _health(self, body: OfRun) -> ServerHealth:
        self._check_run(body.run)
        limit = self._config.hooks.memory_limit_bytes
        health = MachineHealth() if limit is None else memory_health(limit)
        return ServerHealth(int(health.status), health.message)

    def _cut(self, body: OfSnapshot) -> None:
        # All workers are paused until every server has answered this call, so it must be short: tables copy
        # rows before they change, and nothing is written yet.
        with self._lock:
            held = self._held_for(body.run)
            if body.cut not in held.cuts:  # otherwise it was asked again, because an answer was lost
                held.cuts[body.cut] = held.tables.snapshot(0)

    def _close(self, body: CloseSnapshot) -> None:
        with self._lock:
            held = self._held_for(body.run)
            names = list(held.cuts) if body.cut is None else [body.cut]
            cuts = [held.cuts.pop(name) for name in names if name in held.cuts]
        for cut in cuts:  # removed from the shard, so no other call closes it
            cut.close(saved=body.saved)

    def _write(self, body: WriteTables) -> TablesWritten:
        with self._working(body.run) as held:
            cut = held.cuts.get(body.cut)
            if cut is None:
                raise ClusterError("cannot write tables: the server restarted after the checkpoint was begun")
            # The path comes over the network: without this, a caller with the token could have any file of
            # this machine overwritten.
            model_dir = self._config.model_dir
            if not model_dir or not filesystem.is_below(body.prefix, model_dir):
                raise SaveError(
                    f"this server writes only below the model_dir of its run, {model_dir!r}. Start all "
                    "processes with the same model_dir."
                )
            return TablesWritten(cut.write(body.prefix, full=body.full))

    def _restore(self, body: RestoreTables) -> TablesRestored:
        with self._working(body.run) as held:
            report = held.tables.restore(
                [SavedPart(prefix, entry) for prefix, entry in body.chain],
                RestoreOptions(
                    optimizer_state=body.optimizer_state,
                    strict=body.strict,
                    changes=changes_from_json(body.changes),
                ),
            )
            rows = {f"table {name}": stats.rows for name, stats in held.model.stats().items()}
            return TablesRestored.of(report, rows)

    def _restore_dense(self, body: RestoreDense) -> DenseRestored:
        """Restore the weights of this share from a checkpoint, which has those of all."""
        with self._working(body.run) as held:
            assert self._server is not None
            options = RestoreOptions(
                optimizer_state=body.optimizer_state,
                strict=body.strict,
                changes=changes_from_json(body.changes),
                custom=CustomRestore(alias_map=body.alias_map, auto_alias=body.auto_alias),
            )
            # Weights of other shards are restored, too: they are never read here.
            held.model.dense_part(random=False).restore([SavedPart(body.prefix, body.entry)], options)
            return DenseRestored(len(held.dense.weights))

    # Publishing

    def close_publishing(self) -> None:
        """Publish no more: this server ends."""
        with self._lock:
            held = self._held
            self._drop_standby()
        if held is not None:
            self._stop_telling(held)
            if held.publishing is not None:
                held.publishing.close()

    def close(self) -> None:
        """Close the tables of this share, once nothing is served: files of cold rows go with them."""
        with self._lock:
            held = self._held
            if held is not None:
                held.retired = True
                self._close_retired(held)

    def _execute_order(self, body: PublishOrder) -> PublishStatus:
        order = checked_order(body)
        with self._publishing() as publishing:
            return PublishStatus(() if publishing is None else publishing.execute(order))

    def _note_progress(self, body: PublishProgress) -> PublishStatus:
        """Note how far the run is; the first time, everything is restored, and publishing starts."""
        self._check_run(body.run)
        with self._publishing() as publishing:
            if publishing is None:
                return PublishStatus(())
            publishing.note_progress(body)
            return PublishStatus(publishing.execute(PublishOrder("status")))

    def _take_weights(self, body: PublishedWeights, data: Bytes) -> tuple[dict[str, Any], Any]:
        """Take all dense weights, of which this server publishes a copy."""
        with self._working(body.run) as held:
            if held.publishing is not None:
                mine = held.model.published()
                if body.weights != len(mine):
                    raise FeatureError(f"this model has {len(mine)} weights, and {body.weights} came")
                came = unpack_tensors(data, list(mine.values()))
                held.publishing.set_weights({name: one.clone() for name, one in zip(mine, came, strict=True)})
        return {}, b""

    def _flush(self, body: OfRun) -> Flushed:
        with self._working(body.run) as held:
            return Flushed() if held.publishing is None else Flushed(held.publishing.flush())

    @contextmanager
    def _publishing(self) -> Iterator[PublishedShard | None]:
        """Have the publisher of the shard in use, which is not closed meanwhile."""
        with self._lock:
            run = self._run
        if run is None:
            yield None
            return
        with self._working(run) as held:
            yield held.publishing

    # Standbys

    def _open_copy(self, body: OfRun) -> CopyOpened:
        """Tell standbys what changes in this shard from now on: all of it is restored."""
        with self._lock:
            held = self._held_for(body.run)
            assert self._server is not None
            assert self._share is not None
            if held.copied is None:
                host, guard, limits = self._listens
                held.copied = CopiedShard(
                    held.model,
                    held.dense,
                    self._share,
                    incarnation=self._server.incarnation,
                    server=self._server,
                    plan=self._copies,
                    port=DeltaPort(host=host, guard=guard, limits=limits),
                )
            return held.copied.opened

    def _follow(self, body: FollowShard) -> None:
        """Keep the copy of a share, instead of any other; to be told the same again changes nothing."""
        if body.index >= body.num_ps:
            raise ClusterError(f"there is no share {body.index} of {body.num_ps}")
        with self._lock:
            self._chief.touch()
            if self._run is not None:
                raise ClusterError(
                    f"parameter server {self._index} holds a share of a run, and keeps no copy"
                )
            if self._standby is not None and self._standby.follows == body:
                return
            if self._standby is not None and self._standby.follows.share == body.share:
                self._standby.follow(body)  # another server has it now; the copy stays usable meanwhile
                return
            self._drop_standby()
            held = self._make((body.index, body.num_ps))
            self._standby = StandbyCopy(held, held.model, body, guard=self._listens[1])
            _log.info(
                "parameter server %d keeps a copy of share %d of %d", self._index, body.index, body.num_ps
            )

    def _standby_standing(self, _: Nothing) -> StandbyStatus:
        with self._lock:
            self._chief.touch()
            if self._standby is not None:
                return self._standby.standing()
            return StandbyStatus(in_run=self._run is not None)

    def _take_over(self, body: TakeOverShard) -> ShardTaken:
        """Serve the shard that this server has a copy of, if that is of the lost server and complete."""
        with self._lock:
            assert self._server is not None
            if self._taken is not None and self._server.incarnation == body.incarnation:
                return self._taken  # asked again, because an answer was lost
            copy = self._standby
            copies = (body.lost, *body.before)
            if copy is None or copy.follows.run != body.run or copy.follows.incarnation not in copies:
                return ShardTaken(refused="it keeps no copy of the lost shard")
            if not copy.whole:
                return ShardTaken(refused="its copy is not whole yet")
            held, behind = copy.held, copy.behind
            # First the copy stops to change, then it is served. `applied` are the pushes that it contains: a
            # worker sends those again that the lost server had not acknowledged, and each counts once.
            applied = copy.take(held.dense)
            share = (copy.follows.index, copy.follows.num_ps)
            self._server.replace(
                held.stores, held.dense, incarnation=body.incarnation, shard=share, applied=applied
            )
            before, self._held, self._share, self._run = self._held, held, share, body.run
            self._standby = None
            self._retire(before)
            _log.warning("parameter server %d serves share %d of %d from its copy", self._index, *share)
            self._taken = ShardTaken(
                rows=sum(stats.rows for stats in held.model.stats().values()),
                behind=behind,
                copied={sender: CopiedPushes(*known) for sender, known in applied.items()},
            )
            return self._taken

    def _drop_standby(self) -> None:
        """Keep no copy any more. The lock is held."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()
            self._retire(standby.held)

    def _stop_telling(self, held: _ShardInRun) -> None:
        copied, held.copied = held.copied, None
        if copied is not None:
            copied.close()

    # Inside

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise UnavailableError(
                f"parameter server {self._index} restarted, or holds another run by now. A chief that "
                "restarts resumes from the last checkpoint."
            )

    def _held_for(self, run: str) -> _ShardInRun:
        """Return the shard, if it is of this run. The lock is held by the caller."""
        self._check_run(run)
        assert self._held is not None, "no run begins without a share"
        return self._held

    @contextmanager
    def _working(self, run: str) -> Iterator[_ShardInRun]:
        """Keep what is held for a run from being closed while the block lasts."""
        with self._lock:
            held = self._held_for(run)
            held.works += 1
        try:
            yield held
        finally:
            with self._lock:
                held.works -= 1
                self._close_retired(held)

    def _retire(self, held: _ShardInRun | None) -> None:
        """Drop the shard of an earlier run. The lock is held by the caller."""
        if held is not None:
            for cut in held.cuts.values():
                cut.close(saved=False)  # a write of it that is under way ends with an error
            held.retired = True
            self._stop_telling(held)
            if held.publishing is not None:
                held.publishing.close()
            self._close_retired(held)

    def _close_retired(self, held: _ShardInRun) -> None:
        """Free the memory of an earlier run, once no work on it is under way. The caller has the lock."""
        if held.retired and not held.works:
            held.model.close()

    def _make(self, share: tuple[int, int]) -> _ShardInRun:
        config = self._config
        model = Model(
            self._task, Mode.TRAIN, seed=config.seed, rates=config.schedule, tables=config.settled_tables
        )
        part = model.tables_part(
            incremental=self._config.keep.full_every > 1,
            background=self._config.saves_in_background,
            share=share,
        )
        stores = [store for store in model.stores if isinstance(store, LocalStore)]
        if self._holds_weights:
            dense = DenseShard(model.weights(), model.dense, share, model.schedule)
        else:
            dense = DenseShard({}, None, share)
        publishing = None
        if self._publish is not None:
            publishing = PublishedShard(model, share, self._publish, self._newest_push)
        return _ShardInRun(model, stores, dense, part, {}, publishing)

    def _newest_push(self) -> NewestPush:
        return NewestPush() if self._server is None else self._server.newest_push


class _Attendance:
    """Whether the chief is there: it has a call open here all the time. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = concurrency.Lock()  # guards both below
        self._calls = 0
        """Open calls; two for a moment, if a chief reconnects before its old call is missed."""
        self._since = clock()
        """When the last one ended."""

    def absent_for(self) -> float:
        """Return the seconds since it was last there; 0 while it is."""
        with self._lock:
            return 0.0 if self._calls else self._clock() - self._since

    def touch(self) -> None:
        """Note that it was there just now."""
        with self._lock:
            self._since = self._clock()

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            self._since = self._clock()
