"""Who keeps a second copy of each share, as the chief sees to it.

Every look, the chief asks the servers that nobody uses which copy they keep. A share that nobody keeps a copy
of, because its standby was lost or took over, goes to one that is idle: it takes all rows, and then follows.

    share without a standby ──an idle server is there──► copied ──whole──► ready to take over
              ▲                                             │                    │
              └──────── the standby is lost, or the share's server was replaced ─┘
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from monolith.errors import ClusterError, ConfigError, RequestError
from monolith.observe import Metrics
from monolith.train.fleet.bodies import OfRun
from monolith.train.fleet.choosing import ServerCalls
from monolith.train.fleet.standby_bodies import CopyOpened, FollowShare, StandbyStanding
from monolith.wire.bodies import Nothing, read_body, write_body

_log = logging.getLogger(__name__)

LOOK_FOR_STANDBYS = 0.5
"""Seconds between two looks at who keeps which copy."""

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class UsedServer:
    """A server that serves a place now."""

    address: str
    incarnation: str | None


class Standbys:
    """Sees to it that every share of a run has a standby, as the chief. Thread-safe.

    Args:
        registered: All servers there are.
        used: Those that serve the places of the run, in order.
        metrics: Are told how many shares have a whole copy.
        say: Told when shares have one.
    """

    def __init__(
        self,
        registered: Callable[[], Sequence[str]],
        used: Callable[[], Sequence[UsedServer]],
        calls: ServerCalls,
        *,
        metrics: Metrics | None = None,
        say: Callable[[str], None] = _log.info,
        every: float = LOOK_FOR_STANDBYS,
    ) -> None:
        self._registered = registered
        self._used = used
        self._calls = calls
        self._say = say
        self._every = every
        self._copied = (Metrics() if metrics is None else metrics).gauge(
            "standbys", "Shares of parameter servers of which a standby has a whole copy."
        )
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._run = ""
        self._turn = threading.Lock()  # held by a look
        # Replaced as a whole.
        self._keeping: dict[int, str] = {}
        self._whole: frozenset[int] = frozenset()
        self._without: frozenset[int] = frozenset()

    def keep(self, run: str) -> None:
        """See to it from now on, until `close`: the shares of this run are made or restored."""
        self._run = run
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="standbys", daemon=True)
            self._keeper.start()

    def of(self, place: int) -> str | None:
        """Return where the standby of a place is; None where it has none. It may be lost, too."""
        return self._keeping.get(place)

    @property
    def whole(self) -> frozenset[int]:
        """The places of which somebody has a whole copy, as of the last look."""
        return self._whole

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
            idle = [
                address
                for address, one in standing.items()
                if not one.in_run and address not in keeping.values()
            ]
            for place, server in enumerate(used):
                if place not in keeping and (address := _elsewhere(idle, server.address)) is not None:
                    idle.remove(address)
                    if self._begin(place, len(used), server, address):
                        keeping[place] = address
            whole = frozenset(
                place
                for place, address in keeping.items()
                if address in standing and standing[address].whole and self._keeping.get(place) == address
            )
            # One that does not answer now may do so a moment later, when it is needed.
            silent = {
                place: address
                for place, address in self._keeping.items()
                if place not in keeping and address in spares and address not in standing
            }
            self._note(silent | keeping, whole, frozenset(range(len(used))) - keeping.keys())

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

    def _sorted_out(self, standing: dict[str, StandbyStanding], used: Sequence[UsedServer]) -> dict[int, str]:
        """Return who keeps a copy of what the servers hold now: of several of a place, one."""
        keeping: dict[int, str] = {}
        for address, one in standing.items():
            follows = one.follows
            if follows is None or follows.run != self._run or follows.index >= len(used):
                continue
            if follows.incarnation == used[follows.index].incarnation:
                keeping.setdefault(follows.index, address)
        return keeping

    def _begin(self, place: int, places: int, server: UsedServer, standby: str) -> bool:
        """Have an idle server keep the copy of a share; return whether it does."""
        opened = self._call(server.address, "standby.open", OfRun(self._run), CopyOpened)
        if opened is None or opened.incarnation != server.incarnation:
            return False  # it is lost, or was replaced a moment ago
        asked = FollowShare(self._run, place, places, opened.address, opened.incarnation)
        if self._call(standby, "standby.follow", asked, Nothing) is None:
            return False
        _log.info("the server at %s keeps a copy of share %d from now on", standby, place)
        return True

    def _call(self, address: str, name: str, request: object, kind: type[A]) -> A | None:
        """Return an answer; None where there is none."""
        try:
            return read_body(kind, self._calls(address, name, **write_body(request)))
        except (ClusterError, ConfigError, RequestError) as error:
            _log.debug("passed over %s of %s: %s", name, address, error)
            return None

    def _note(self, keeping: dict[int, str], whole: frozenset[int], without: frozenset[int]) -> None:
        if new := sorted(whole - self._whole):
            self._say(f"standbys have whole copies of the parameter servers {', '.join(map(str, new))}")
        if gone := sorted(without - self._without):
            _log.warning(
                "shares %s have no standby, and no idle server is there to be one: if their server is lost "
                "now, they are restored from the last checkpoint",
                ", ".join(map(str, gone)),
            )
        self._keeping, self._whole, self._without = keeping, whole, without
        self._copied.set(len(whole))


def _elsewhere(idle: Sequence[str], address: str) -> str | None:
    """Return an idle server, of another machine than an address if there is one."""
    host = address.rpartition(":")[0]
    return min(idle, key=lambda one: one.rpartition(":")[0] == host, default=None)
