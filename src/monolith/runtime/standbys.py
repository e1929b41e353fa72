"""Which servers keep copies of each shard, as the chief sees to it.

Every look, the chief asks the unused servers which copy they keep. A shard that lacks a copy, because a
standby was lost or took over, goes to a server that is idle: it takes all rows, and then follows.

    shard without a standby ──an idle server is there──► copied ──whole──► ready to take over
              ▲                                             │                    │
              └──────── the standby is lost, or the shard was restored ──────────┘

A shard of which one of two standbys took over keeps the other: its copy is of the lost server and lacks what
the shard learned since, until it follows the new one. It stays ready to take over meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from monolith import concurrency
from monolith.checkpoint.saved_tables import IdShard
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import ClusterError, ConfigError, RequestError, RestoreError
from monolith.observe import Metrics
from monolith.runtime.messages import CopyOpened, FollowShard, OfRun, StandbyStatus
from monolith.runtime.server_calls import ServerCalls
from monolith.store import DenseShard, ParameterServer
from monolith.store.pushes import KnownPushes
from monolith.sync.flight_channel import DeltaPort
from monolith.sync.flight_reader import FlightDeltaReader
from monolith.sync.messages import LearnedUpTo
from monolith.sync.publisher import Publisher, PublisherConfig
from monolith.sync.subscriber import ShardProgress, Subscriber
from monolith.sync.target import TableTarget
from monolith.table import Rows
from monolith.train.model import Model
from monolith.wire.messages import Nothing, read_message, write_message
from monolith.wire.transport import PortGuard

_log = logging.getLogger(__name__)

LOOK_FOR_STANDBYS = 0.5
"""Seconds between two looks at who keeps which copy."""


A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class UsedServer:
    """A server that serves a place now."""

    address: str
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class ShardStandbys:
    """How many copies of a shard there are."""

    shard: int
    present: int
    """Servers that have a whole copy, as of the last look."""
    wanted: int
    lacking_seconds: float
    """Seconds since it has fewer than are wanted; 0 while it has all."""


class Standbys:
    """Sees to it that every shard of a run has its standbys, as the chief. Thread-safe.

    Args:
        registered: All servers there are.
        used: Those that serve the places of the run, in order.
        wanted: Copies of each shard.
        metrics: Are told how many shards have a whole copy, and how many copies each shard has and lacks.
        say: Told when shards have one.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        registered: Callable[[], Sequence[str]],
        used: Callable[[], Sequence[UsedServer]],
        calls: ServerCalls,
        *,
        wanted: int = 1,
        metrics: Metrics | None = None,
        say: Callable[[str], None] = _log.info,
        every: float = LOOK_FOR_STANDBYS,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._registered = registered
        self._used = used
        self._calls = calls
        self._say = say
        self._every = every
        self._wanted = wanted
        self._clock = clock
        metrics = Metrics() if metrics is None else metrics
        self._copied = metrics.gauge("standbys", "Shards of which a standby has a whole copy.")
        self._present = metrics.gauge("shard_standbys", "Standbys with a whole copy of a shard.", ("shard",))
        self._should = metrics.gauge(
            "shard_standbys_wanted", "Standbys that a shard should have.", ("shard",)
        )
        self._lacking = metrics.gauge(
            "shard_standby_missing_seconds",
            "Seconds since a shard has fewer standbys than it should; 0 while it has all.",
            ("shard",),
        )
        self._stop = concurrency.Event()
        self._keeper: concurrency.Thread | None = None
        self._run = ""
        # Held by a look, which makes calls for seconds. The fields below have no lock: a look replaces each
        # as a whole, and the threads that bring back servers read one at a time. Those threads must not wait
        # for a look: it may be waiting for the very server that was lost.
        self._turn = concurrency.Lock()
        # Addresses by shard, those with a whole copy first.
        self._keeping: dict[int, tuple[str, ...]] = {}
        self._whole: dict[int, tuple[str, ...]] = {}
        self._lacks_since: dict[int, float] = {}
        self._without: frozenset[int] = frozenset()
        self._before: dict[int, tuple[str, ...]] = {}
        """By shard: incarnations whose standby took over. Another copy of them still serves."""

    def keep(self, run: str) -> None:
        """See to it from now on, until `close`: the shares of this run are made or restored."""
        self._run = run
        if self._keeper is None:
            self._keeper = concurrency.Thread(target=self._keep, name="standbys", daemon=True)
            self._keeper.start()

    def of(self, place: int) -> tuple[str, ...]:
        """Return where the standbys of a place are, those with a whole copy first. They may be lost, too."""
        return self._keeping.get(place, ())

    @property
    def whole(self) -> frozenset[int]:
        """The places that have all of their copies, as of the last look."""
        return frozenset(place for place, found in self._whole.items() if len(found) >= self._wanted)

    def standing(self) -> tuple[ShardStandbys, ...]:
        """Return how many copies of each shard there are; empty before the first look. From any thread."""
        now, whole, lacks = self._clock(), self._whole, self._lacks_since
        return tuple(
            ShardStandbys(
                shard, len(found), self._wanted, max(0.0, now - lacks[shard]) if shard in lacks else 0.0
            )
            for shard, found in sorted(whole.items())
        )

    def before(self, place: int) -> tuple[str, ...]:
        """Return the incarnations of a place whose standbys took over since it was last restored."""
        return self._before.get(place, ())

    def taken_over(self, place: int, lost: str) -> None:
        """Note that a standby serves a shard; if it is lost as well, other copies can still take over."""
        # The last eight are enough: a standby follows the new incarnation within a look or two.
        self._before = {**self._before, place: (*self.before(place), lost)[-8:]}

    def restored(self, place: int) -> None:
        """Note that a shard was restored from a checkpoint: copies of its earlier state serve no more."""
        self._before = {one: found for one, found in self._before.items() if one != place}

    def close(self) -> None:
        """Leave them as they are. Closing again does nothing."""
        self._stop.set()

    def look(self) -> None:
        """Check once which standby keeps which copy, and have missing copies made."""
        with self._turn:
            # Every look starts from what the servers say, not from what this process did: a chief that
            # restarted finds the copies of its predecessor, and a standby that lost its copy shows it.
            used = self._used()
            serving = {one.address for one in used}
            spares = [address for address in self._registered() if address not in serving]
            standing = self._ask_all(spares)
            keeping = self._sorted_out(standing, used)
            for place, server in enumerate(used):  # copies of a server that another standby replaced
                for address in keeping[place]:
                    follows = standing[address].follows
                    if follows is not None and follows.incarnation != server.incarnation:
                        self._begin(place, len(used), server, address)
            kept = {address for kept_by in keeping.values() for address in kept_by}
            idle = [address for address, one in standing.items() if not one.in_run and address not in kept]
            for copies in range(self._wanted):  # one for each shard before a second for any
                for place, server in enumerate(used):
                    others = [server.address, *keeping[place]]
                    if len(keeping[place]) <= copies and (chosen := _elsewhere(idle, others)) is not None:
                        idle.remove(chosen)
                        if self._begin(place, len(used), server, chosen):
                            keeping[place].append(chosen)
            # Whole only if it was known before this look: the status of a standby that was told just now to
            # follow another shard is of the copy it kept until then.
            whole = {
                place: tuple(
                    address
                    for address in kept_by
                    if address in standing and standing[address].whole and address in self.of(place)
                )
                for place, kept_by in keeping.items()
            }
            found: dict[int, tuple[str, ...]] = {}
            for place, kept_by in keeping.items():
                ready = whole[place]
                # One that does not answer now may do so a moment later, when it is needed.
                silent = [one for one in self.of(place) if one in spares and one not in standing]
                found[place] = (*ready, *(one for one in kept_by if one not in ready), *silent)
            self._note(found, whole)

    # Inside

    def _keep(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except ClusterError as error:
                _log.warning("cannot look for standbys of the parameter servers now: %s", error)

    def _ask_all(self, spares: Sequence[str]) -> dict[str, StandbyStatus]:
        """Return how each that answers stands; all are asked at the same time."""

        def ask(address: str) -> StandbyStatus | None:
            return self._call(address, "standby.standing", Nothing(), StandbyStatus)

        with ThreadPoolExecutor(max(1, min(32, len(spares))), "standbys-asked") as threads:
            found = zip(spares, threads.map(ask, spares), strict=True)
            return {address: one for address, one in found if one is not None}

    def _sorted_out(
        self, standing: Mapping[str, StandbyStatus], used: Sequence[UsedServer]
    ) -> dict[int, list[str]]:
        """Return who keeps a copy of what the servers hold now, at most as many as are wanted of a place."""
        keeping: dict[int, list[str]] = {place: [] for place in range(len(used))}
        # A copy of what is held now before one of what a standby replaced.
        for current in (True, False):
            for address, one in standing.items():
                follows = one.follows
                if follows is None or follows.run != self._run or follows.index >= len(used):
                    continue
                place, is_current = follows.index, follows.incarnation == used[follows.index].incarnation
                if is_current != current or len(keeping[place]) >= self._wanted:
                    continue
                if is_current or follows.incarnation in self.before(place):
                    keeping[place].append(address)
        return keeping

    def _begin(self, place: int, places: int, server: UsedServer, standby: str) -> bool:
        """Have an idle server keep the copy of a share; return whether it does."""
        opened = self._call(server.address, "standby.open", OfRun(self._run), CopyOpened)
        if opened is None or opened.incarnation != server.incarnation:
            return False  # it is lost, or was replaced a moment ago
        asked = FollowShard(self._run, place, places, opened.address, opened.incarnation)
        if self._call(standby, "standby.follow", asked, Nothing) is None:
            return False
        _log.info("the server at %s keeps a copy of shard %d from now on", standby, place)
        return True

    def _call(self, address: str, name: str, request: object, kind: type[A]) -> A | None:
        """Return an answer; None if there is none."""
        try:
            return read_message(kind, self._calls(address, name, **write_message(request)))
        except (ClusterError, ConfigError, RequestError) as error:
            _log.debug("no answer to %s from %s: %s", name, address, error)
            return None

    def _note(self, keeping: dict[int, tuple[str, ...]], whole: dict[int, tuple[str, ...]]) -> None:
        now, complete = self._clock(), self.whole
        lacks = {
            place: self._lacks_since.get(place, now)
            for place, found in whole.items()
            if len(found) < self._wanted
        }
        self._keeping, self._whole, self._lacks_since = keeping, whole, lacks
        if new := sorted(self.whole - complete):
            self._say(f"standbys have whole copies of the parameter servers {', '.join(map(str, new))}")
        without = frozenset(place for place, found in keeping.items() if not found)
        if gone := sorted(without - self._without):
            _log.warning(
                "shards %s have no standby, and no idle server is there to be one: if their server is lost "
                "now, they are restored from the last checkpoint",
                ", ".join(map(str, gone)),
            )
        self._without = without
        self._copied.set(sum(bool(found) for found in whole.values()))
        for one in self.standing():
            self._present.set(one.present, shard=str(one.shard))
            self._should.set(one.wanted, shard=str(one.shard))
            self._lacking.set(one.lacking_seconds, shard=str(one.shard))


def describe_standbys(standing: Sequence[ShardStandbys]) -> str:
    """Return the shards that lack a standby, in words; empty if none does."""
    lacking = [one for one in standing if one.present < one.wanted]
    if not lacking:
        return ""
    each = ", ".join(
        f"{one.shard} ({one.present} of {one.wanted} for {one.lacking_seconds:.0f} s)" for one in lacking
    )
    bare = any(not one.present for one in lacking)
    return f"shards that lack a standby: {each}" + (
        "; if a server without one is lost now, its shard returns to the last checkpoint" if bare else ""
    )


def _elsewhere(idle: Sequence[str], others: Sequence[str]) -> str | None:
    """Return an idle server, on another machine than others if there is one."""
    hosts = [other.rpartition(":")[0] for other in others]
    return min(idle, key=lambda one: hosts.count(one.rpartition(":")[0]), default=None)


H = TypeVar("H")


_DENSE, _ABOUT = "weights", "about"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """How a share tells its standby what changes."""

    interval: float = 0.1
    """Seconds between two looks at what has changed: what a server learns after the last is lost with it."""
    log_bytes: int = 64 << 20
    """The most bytes of changes that are kept for a standby; one that is further behind takes all rows."""


class CopiedShard:
    """Tells the standbys of a shard what changes in it, until it is closed.

    Args:
        dense: The weights of the share.
        incarnation: Names what is held.
        server: Applies pushes to it.
        port: Where standbys read; it is closed with this.
    """

    def __init__(
        self,
        model: Model,
        dense: DenseShard,
        share: IdShard,
        *,
        incarnation: str,
        server: ParameterServer,
        plan: CopyPlan,
        port: DeltaPort,
    ) -> None:
        self._tables = model.tables
        self._dense = dense
        self._server = server
        self._incarnation = incarnation
        # A delta is read inside of `_still`, on one thread; a snapshot on another, without it.
        self._known = threading.local()
        self.port = port
        tables: Mapping[str, Any] = self._tables
        self.publisher = Publisher(
            tables,
            self.port.writer(incarnation, log_bytes=plan.log_bytes),
            PublisherConfig(
                run=incarnation,
                shard=share,
                interval=plan.interval,
                dense_interval=0.0,  # with every delta: weights and rows are of one moment, or nearly so
                with_state=True,
                still=self._still,
            ),
            dense=self._rest,
            learned=lambda: LearnedUpTo(step=self._dense.step),
        )
        self.publisher.start()

    @property
    def opened(self) -> CopyOpened:
        return CopyOpened(self.port.address, self._incarnation)

    def close(self) -> None:
        """Stop telling standbys. Closing again does nothing."""
        self.publisher.close()
        self.port.close()

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Let no push change the shard while a delta is read, which then has exactly the pushes it names."""
        with self._server.still() as self._known.pushes:
            try:
                yield
            finally:
                del self._known.pushes

    def _rest(self) -> Mapping[str, Tensor]:
        """Return the rest of a shard, without its rows, as bytes.

        For a snapshot it is read before the rows, which may have more pushes than it names: the standby waits
        for the next delta (`StandbyCopy.whole`). Had the rows fewer, a push could be lost without a trace.
        """
        known = getattr(self._known, "pushes", None)
        about = {
            "pushes": {
                sender: [one.highest, one.missing]
                for sender, one in (self._server.known_pushes() if known is None else known).items()
            },
            "scales": {name: table.scales for name, table in self._tables.items()},
        }
        return {_DENSE: _as_tensor(self._dense.dump()), _ABOUT: _as_tensor(json.dumps(about).encode())}


class StandbyCopy(Generic[H]):
    """The copy of one share, kept up to date by threads of its own until it is taken or closed.

    Args:
        held: Holds the copy, for the server that takes over.
        model: That of `held`; nothing else writes to its tables.
        guard: What to present to the server that is followed.
        clock: Returns seconds that only grow; nothing it stamps is compared with another process's time.
    """

    def __init__(
        self,
        held: H,
        model: Model,
        follows: FollowShard,
        *,
        guard: PortGuard | None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self.held = held
        self.follows = follows
        self._tables: Mapping[str, Any] = model.tables
        self._clock = clock
        for table in self._tables.values():
            # So that the next increment of a checkpoint has all of the rows: those before it had others.
            table.clear()
        self._target = _CopyTarget(self._tables)
        self._guard = guard
        self._was_whole, self._was_received_at = False, 0.0
        self._subscriber = self._subscribe()

    def _subscribe(self) -> Subscriber:
        follows, guard = self.follows, self._guard

        def open_reader() -> FlightDeltaReader:
            return FlightDeltaReader([follows.address], model=follows.incarnation, guard=guard)

        subscriber = Subscriber(open_reader, self._target, wait=1.0, clock=self._clock)
        subscriber.start()
        return subscriber

    def follow(self, follows: FollowShard) -> None:
        """Follow another incarnation of the same share, whose server was replaced.

        The rows that are there stay until they are replaced, so a copy that was whole can take over while the
        snapshot of the new server arrives: the rows are then of both servers, and the pushes those of the
        older. Between the end of that snapshot and the next delta it cannot, see `whole`.
        """
        if (followed := self.followed) is not None:
            self._was_whole, self._was_received_at = self.whole, followed.received_at
        self._close_soon()
        self.follows = follows
        self._subscriber = self._subscribe()

    @property
    def followed(self) -> ShardProgress | None:
        """How far the copy is; None before the first change arrived."""
        return self._subscriber.progress.get(self.follows.index)

    @property
    def whole(self) -> bool:
        """Whether all of the share has come, and is of one moment.

        Rows of a snapshot are read one after the other while pushes change them. `newest_step` is known again
        with the first delta that was begun after the snapshot: rows and pushes are of one moment then.
        """
        followed = self.followed
        if followed is None or followed.position is None:
            return self._was_whole and self._target.dense is not None
        return followed.newest_step is not None and not self._target.mixed

    @property
    def behind(self) -> float:
        """Seconds since the newest change that it has came."""
        followed = self.followed
        received_at = self._was_received_at if followed is None else followed.received_at
        return 0.0 if not received_at else max(0.0, self._clock() - received_at)

    def standing(self) -> StandbyStatus:
        followed = self.followed
        error = self._subscriber.error if followed is None else followed.error
        return StandbyStatus(in_run=False, follows=self.follows, whole=self.whole, error=error[:4096])

    def take(self, dense: DenseShard) -> Mapping[str, KnownPushes]:
        """Change no more, and put what is not rows in its place; return which pushes the copy has.

        Raises:
            RestoreError: The copy is of other weights.
        """
        # Once `end` returns, no delta changes the tables any more, whatever the subscriber still receives. It
        # is closed in the background: a lost server takes a while to time out, and the shard is to be served.
        self._target.end()
        self._close_soon()
        assert self._target.dense is not None, "taken only when it is whole"
        dense.load(_as_bytes(self._target.dense[_DENSE]))
        about = _read_about(_as_bytes(self._target.dense[_ABOUT]))
        for name, scales in about["scales"].items():
            if name in self._tables:
                self._tables[name].set_scales(scales)
        return {
            sender: KnownPushes(int(highest), tuple(map(int, missing)))
            for sender, (highest, missing) in about["pushes"].items()
        }

    def close(self) -> None:
        """Follow no more, and leave the tables alone. Closing again does nothing."""
        self._target.end()
        self._close_soon()

    def _close_soon(self) -> None:
        # A read of a silent server takes a while to end, and must delay no caller.
        concurrency.Thread(target=self._subscriber.close, name="standby-close", daemon=True).start()


class _CopyTarget(TableTarget):
    """Tables that take changes until they are in use. Thread-safe.

    A delta that is split has its rows in several messages, and the pushes that they contain in the last one.
    All wait for that one, and are applied together: a copy that is taken before has none of them.
    """

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__(tables)
        self._lock = concurrency.Lock()  # held while tables change
        self._over = False
        self._waiting: list[tuple[Mapping[str, Rows], Mapping[str, Tensor]]] = []
        self.mixed = False
        """Whether rows of a snapshot have come that may have more pushes than are known."""

    def end(self) -> None:
        """Change nothing from now on."""
        with self._lock:
            self._over = True
            self._waiting.clear()

    def apply(self, rows: Mapping[str, Rows], removed: Mapping[str, Tensor]) -> None:
        with self._lock:
            if not self._over:
                self._waiting.append((rows, removed))

    def begin_snapshot(self, shard: IdShard, buckets: Tensor | None) -> None:
        with self._lock:
            if not self._over:
                self._apply_waiting()  # the rows of the snapshot are newer
                super().begin_snapshot(shard, buckets)

    def snapshot_rows(self, table: str, rows: Rows) -> None:
        with self._lock:
            if not self._over:
                self.mixed = True
                super().snapshot_rows(table, rows)

    def end_snapshot(self) -> None:
        with self._lock:
            if not self._over:
                super().end_snapshot()

    def digests(self, table: str, shard: IdShard, buckets: Tensor) -> Tensor | None:
        with self._lock:
            if self._over or self._waiting:
                return None
            return super().digests(table, shard, buckets)

    def swap_dense(self, weights: Mapping[str, Tensor]) -> None:
        with self._lock:
            if not self._over:
                self._apply_waiting()
                super().swap_dense(weights)
                self.mixed = False

    def _apply_waiting(self) -> None:
        for rows, removed in self._waiting:
            super().apply(rows, removed)
        self._waiting.clear()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _read_about(data: bytes) -> dict[str, Any]:
    try:
        about = json.loads(data)
        return {"pushes": dict(about["pushes"]), "scales": dict(about["scales"])}
    except (ValueError, KeyError, TypeError) as cause:
        raise RestoreError(
            f"cannot take over the copy of a share: what came with its rows is {cause!r}"
        ) from cause
