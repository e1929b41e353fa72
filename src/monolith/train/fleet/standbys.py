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

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from monolith.errors import ClusterError, ConfigError, RequestError
from monolith.observe import Metrics
from monolith.train.fleet.bodies import OfRun
from monolith.train.fleet.choosing import ServerCalls
from monolith.train.fleet.standby_bodies import CopyOpened, FollowShare, StandbyStanding
from monolith.wire.messages import Nothing, read_message, write_message

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
        clock: Callable[[], float] = time.monotonic,
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
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._run = ""
        self._turn = threading.Lock()  # held by a look
        # Replaced as a whole. Addresses by shard, those with a whole copy first.
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
            self._keeper = threading.Thread(target=self._keep, name="standbys", daemon=True)
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
        """Hear that a standby serves a place; if it is lost as well, other copies of what was lost serve."""
        self._before = {**self._before, place: (*self.before(place), lost)[-8:]}

    def restored(self, place: int) -> None:
        """Hear that a place was restored from a checkpoint: copies of what it held before serve no more."""
        self._before = {one: found for one, found in self._before.items() if one != place}

    def close(self) -> None:
        """Leave them as they are. Closing again does nothing."""
        self._stop.set()

    def look(self) -> None:
        """Look once who keeps which copy, and have those made that nobody keeps."""
        with self._turn:
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

    def _ask_all(self, spares: Sequence[str]) -> dict[str, StandbyStanding]:
        """Return how each that answers stands; all are asked at the same time."""

        def ask(address: str) -> StandbyStanding | None:
            return self._call(address, "standby.standing", Nothing(), StandbyStanding)

        with ThreadPoolExecutor(max(1, min(32, len(spares))), "standbys-asked") as threads:
            found = zip(spares, threads.map(ask, spares), strict=True)
            return {address: one for address, one in found if one is not None}

    def _sorted_out(
        self, standing: Mapping[str, StandbyStanding], used: Sequence[UsedServer]
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
        asked = FollowShare(self._run, place, places, opened.address, opened.incarnation)
        if self._call(standby, "standby.follow", asked, Nothing) is None:
            return False
        _log.info("the server at %s keeps a copy of shard %d from now on", standby, place)
        return True

    def _call(self, address: str, name: str, request: object, kind: type[A]) -> A | None:
        """Return an answer; None where there is none."""
        try:
            return read_message(kind, self._calls(address, name, **write_message(request)))
        except (ClusterError, ConfigError, RequestError) as error:
            _log.debug("passed over %s of %s: %s", name, address, error)
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
