"""Which servers a run uses, where more were started than it needs.

The chief chooses once: it assigns each chosen server its share and then lists them in the server file,
place k of the list being share k. Workers wait for the list, so who reads an address there finds a server
that has its share. A chief that restarts finds the list, and keeps it as it is.

    no list, or nobody of it answers ──► choose: of those that are registered and answer
    some of the list do not answer   ──► a spare takes each such place; the others stay where they are
    all answer                       ──► as it is

So the order changes only while no server holds anything. A server enforces that: in a run it takes no
other share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from monolith.cluster import ClusterManager, fetch_ps_cluster, save_ps_cluster
from monolith.cluster.security import Guard
from monolith.errors import ClusterError, ConfigError, DeadlineExceededError, UnavailableError
from monolith.store.server import SERVICE
from monolith.train.fleet.bodies import AssignShare, EndRun
from monolith.train.fleet.standby_bodies import StandbyStanding
from monolith.wire.flight import Caller
from monolith.wire.messages import read_message, write_message

_log = logging.getLogger(__name__)

ANSWER_WITHIN = timedelta(seconds=10)
"""How long one small call of one server may take here."""
RESERVE_EVERY = timedelta(seconds=30)
"""How often the chief tells spares that it is there."""

Choose = Callable[[Sequence[str]], Sequence[str]]
"""From the servers that are there, by index, to those that are used, by share."""


class ServerCalls:
    """Small calls to servers by address, whether they have a share or not. Thread-safe.

    Args:
        guard: What servers want to be shown.
        timeout: How long one may take to answer.
    """

    def __init__(self, guard: Guard | None = None, timeout: timedelta = ANSWER_WITHIN) -> None:
        self._guard = guard
        self._timeout = timeout

    def __call__(self, address: str, name: str, /, **body: Any) -> dict[str, Any]:
        """Return the answer of one server; see `ServerGroup.call`."""
        with Caller(SERVICE, address, guard=self._guard, timeout=self._timeout) as caller:
            try:
                return caller.call(name, **body)
            except (UnavailableError, DeadlineExceededError) as cause:
                raise type(cause)(f"the parameter server at {address}: {cause}") from cause

    def assign(self, address: str, share: int, num_ps: int) -> None:
        """Give a server its share; it may have it already.

        Raises:
            ClusterError: It holds another one in a run.
            UnavailableError: It is gone.
        """
        self(address, "server.assign", **write_message(AssignShare(share, num_ps)))

    def answers(self, address: str) -> bool:
        """Whether somebody is there. One that is only slow is."""
        try:
            self(address, "hello")
        except UnavailableError:
            return False
        except DeadlineExceededError:
            return True
        return True

    def answering(self, addresses: Iterable[str]) -> list[str]:
        """Return those where somebody is, in their order; all are asked at the same time."""
        asked = list(addresses)
        with ThreadPoolExecutor(max(1, min(32, len(asked))), "servers-asked") as threads:
            return [
                address
                for address, there in zip(asked, threads.map(self.answers, asked), strict=True)
                if there
            ]


class ServerChoice:
    """The servers of one run, as the chief chooses and workers find them.

    Args:
        num_ps: Shares.
        candidates: Servers to be there before a choice is made: more than `num_ps` where they are compared.
        choose: Compares them; by default the first are taken.
        spare_after: How long one that is gone may take to come back before a spare takes its place.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        manager: ClusterManager,
        calls: ServerCalls,
        *,
        num_ps: int,
        candidates: int | None = None,
        choose: Choose | None = None,
        spare_after: timedelta = timedelta(0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spare_after = spare_after.total_seconds()
        self._clock = clock
        self._missed_at: dict[str, float] = {}
        """Address -> when it was found to be gone."""
        self._manager = manager
        self._calls = calls
        self._num_ps = num_ps
        self._candidates = num_ps if candidates is None else candidates
        self._choose = choose

    def of_chief(self) -> list[str]:
        """Return the servers by share, each of which has it, after listing them.

        Raises:
            UnavailableError: Too few answer yet; to be asked again.
            DeadlineExceededError: Too few registered in time.
            ClusterError: One that is chosen holds another share in a run.
        """
        listed = self._listed()
        there = set(self._calls.answering(listed))
        chosen = self._mended(listed, there) if there else self._chosen()
        for share, address in enumerate(chosen):
            self._calls.assign(address, share, self._num_ps)
        if chosen != listed:
            save_ps_cluster(self._manager.ps_file, chosen)
        return chosen

    def of_worker(self) -> list[str]:
        """Wait for the chief's list and return it; a server of it may be gone.

        Raises:
            UnavailableError: A server has not the share of its place: the list is of an earlier run, or
                about to change.
            DeadlineExceededError: There is no list in time.
        """
        listed = self._manager.listed_ps()
        for share, address in enumerate(listed):
            found = self._calls(address, "hello")["shard"]
            if found != [share, self._num_ps]:
                raise UnavailableError(
                    f"the parameter server at {address} has not been assigned share {share} of {self._num_ps}"
                )
        return listed

    def _listed(self) -> list[str]:
        """Return the list as it is; one of another length is of another run."""
        listed = fetch_ps_cluster(self._manager.ps_file)
        return listed if len(listed) == self._num_ps else []

    def _chosen(self) -> list[str]:
        self._manager.query_ps(self._candidates)
        there = self._calls.answering(self._manager.registered_ps())
        if len(there) < self._candidates:
            raise UnavailableError(
                f"{self._candidates} parameter servers are needed; {len(there)} of those registered answer"
            )
        candidates = there[: self._candidates]
        chosen = list(candidates if self._choose is None else self._choose(candidates))[: self._num_ps]
        if len(chosen) < self._num_ps:
            raise ConfigError(f"{self._num_ps} parameter servers are needed, and {len(chosen)} were chosen")
        return chosen

    def _mended(self, listed: Sequence[str], there: set[str]) -> list[str]:
        """Return the list with spares in the places of those who are gone."""
        chosen = list(listed)
        for share, address in enumerate(listed):
            if address not in there:
                chosen[share] = self._returned(share, address) or self._taking_over(share, chosen)
                _log.warning(
                    "parameter server %d at %s does not answer; the one at %s takes its place",
                    share,
                    address,
                    chosen[share],
                )
        return chosen

    def places_of(self, share: int) -> list[str]:
        """Return where a share may be served now: as listed, or where its server has restarted."""
        return list(dict.fromkeys([*self._listed()[share : share + 1], *self._manager.registered_at(share)]))

    def take_over(self, share: int, used: Sequence[str]) -> str | None:
        """Give a share to a spare and return where it is, as the chief; None where none is there.

        Args:
            used: Where the servers of the run are, the lost one too.
        """
        try:
            return self._taking_over(share, used)
        except UnavailableError:
            return None

    def list_server(self, share: int, address: str) -> None:
        """List another server for a share, as the chief: for workers that come later."""
        listed = self._listed()
        if listed and listed[share] != address:
            listed[share] = address
            save_ps_cluster(self._manager.ps_file, listed)

    def _returned(self, share: int, address: str) -> str | None:
        """Return where a server that is gone has come back; None where a spare is to take its place.

        Raises:
            UnavailableError: It may still come back; to be asked again.
        """
        for found in self._manager.registered_at(share):
            with suppress(ClusterError):
                if found != address and self._calls(found, "hello")["shard"] == [share, self._num_ps]:
                    return found
        now = self._clock()
        if now - self._missed_at.setdefault(address, now) < self._spare_after:
            raise UnavailableError(
                f"parameter server {share} at {address} does not answer, and may come back"
            )
        return None

    def _copied_by(self, address: str) -> int | None:
        """Return the share of which a server keeps the copy; None where it keeps none, or does not answer."""
        with suppress(ClusterError):
            follows = read_message(StandbyStanding, self._calls(address, "standby.standing")).follows
            return None if follows is None else follows.index
        return None

    def _taking_over(self, share: int, used: Sequence[str]) -> str:
        """Return a server that nobody uses, and that has taken the share.

        One that keeps the copy of another share comes last: that share would have no standby then.
        """
        spares = [address for address in self._manager.registered_ps() if address not in used]
        copied = {address: self._copied_by(address) for address in spares} if len(spares) > 1 else {}
        for address in sorted(spares, key=lambda one: copied.get(one) not in (None, share)):
            with suppress(ClusterError):  # gone, or it still holds an earlier run
                self._calls.assign(address, share, self._num_ps)
                if (other := copied.get(address)) not in (None, share):
                    _log.warning("the copy of share %d at %s is given up for share %d", other, address, share)
                return address
        raise UnavailableError(
            f"parameter server {share} at {used[share]} does not answer, and no spare is there to take over"
        )


class Spares:
    """Servers of a run that have no share, as the chief keeps them. Thread-safe.

    Args:
        registered: All servers there are.
        used: Those that have a share.
        every: How often they are told that there is a chief.
    """

    def __init__(
        self,
        registered: Callable[[], Sequence[str]],
        used: Callable[[], Sequence[str]],
        calls: ServerCalls,
        *,
        every: timedelta = RESERVE_EVERY,
    ) -> None:
        self._registered = registered
        self._used = used
        self._calls = calls
        self._every = every.total_seconds()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    def addresses(self) -> list[str]:
        """Return those that are registered, by index; somebody may be gone."""
        used = set(self._used())
        return [address for address in self._registered() if address not in used]

    def keep(self) -> None:
        """Tell them from now on, until `close`, that there is a chief: one that hears of none gives up."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="spares", daemon=True)
            self._keeper.start()

    def end(self, run: str, *, finished: bool) -> None:
        """Tell them that the run is over, at the same time; who is gone is passed over."""
        self._tell("server.end", **write_message(EndRun(run, finished)))

    def close(self) -> None:
        """Leave them alone. Closing again does nothing."""
        self._stop.set()

    def _keep(self) -> None:
        while not self._stop.is_set():
            self._tell("server.reserve")
            self._stop.wait(self._every)

    def _tell(self, name: str, **body: Any) -> None:
        def tell(address: str) -> None:
            try:
                self._calls(address, name, **body)
            except (ClusterError, ConfigError) as error:
                _log.info("passed over a spare parameter server: %s", error)

        try:
            spares = self.addresses()
        except ClusterError as error:
            _log.warning("cannot find the spare parameter servers now: %s", error)
            return
        with ThreadPoolExecutor(max(1, min(32, len(spares))), "spares-told") as threads:
            list(threads.map(tell, spares))
