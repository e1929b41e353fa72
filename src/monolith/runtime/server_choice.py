"""Which parameter servers a run uses, and how its workers connect to them."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from monolith import concurrency
from monolith.cluster import ClusterManager, fetch_ps_cluster, save_ps_cluster
from monolith.cluster.security import Guard
from monolith.concurrency import ThreadPoolExecutor, wait
from monolith.errors import ClusterError, ConfigError, MonolithError, UnavailableError
from monolith.runtime.messages import EndRun, StandbyStatus
from monolith.runtime.server_calls import ServerCalls
from monolith.store.server import SERVICE, sample_gradient
from monolith.wire.flight import Caller, CallStream
from monolith.wire.messages import read_message, write_message

_log = logging.getLogger(__name__)

RESERVE_EVERY = timedelta(seconds=30)
"""How often the chief tells spares that it is there."""


Choose = Callable[[Sequence[str]], Sequence[str]]
"""From the servers that are there, by index, to those that are used, by share."""


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
        clock: Callable[[], float] = concurrency.monotonic,
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
        chosen = self._mended(listed, there) if there else self._chosen(listed)
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

    def _chosen(self, listed: Sequence[str]) -> list[str]:
        """Return servers for a new list, as none of the one before answered."""
        self._manager.query_ps(self._candidates)
        there = self._calls.answering(self._manager.registered_ps())
        if back := [address for address in there if address in listed]:
            # One broken connection does not make a list that of an earlier run. This server may hold its
            # share in a run, and would refuse another one.
            raise UnavailableError(
                f"the parameter server at {back[0]} did not answer a moment ago, and does now"
            )
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
        """Return the list with spares in place of lost servers."""
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

    def take_over(self, share: int, used: Sequence[str], given: Collection[str] = ()) -> str | None:
        """Give a shard to a spare and return its address, as the chief; None if there is none.

        Args:
            used: Where the servers of the run are, the lost one too.
            given: Where spares are that were given another share, and do not serve it yet.
        """
        try:
            return self._taking_over(share, used, given)
        except UnavailableError:
            return None

    def list_server(self, share: int, address: str) -> None:
        """List another server for a share, as the chief: for workers that come later."""
        listed = self._listed()
        if listed and listed[share] != address:
            listed[share] = address
            save_ps_cluster(self._manager.ps_file, listed)

    def _returned(self, share: int, address: str) -> str | None:
        """Return the address of a server that restarted; None if a spare is to replace it.

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
        """Return the shard of which a server keeps a copy; None if it keeps none, or does not answer."""
        with suppress(ClusterError):
            follows = read_message(StandbyStatus, self._calls(address, "standby.standing")).follows
            return None if follows is None else follows.index
        return None

    def _taking_over(self, share: int, used: Sequence[str], given: Collection[str] = ()) -> str:
        """Return an unused server that has taken the shard.

        One that keeps the copy of another share comes last: that share would have no standby then.
        """
        spares = [address for address in self._manager.registered_ps() if address not in {*used, *given}]
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
        self._stop = concurrency.Event()
        self._keeper: concurrency.Thread | None = None

    def addresses(self) -> list[str]:
        """Return the registered spares, by index; some may be lost."""
        used = set(self._used())
        return [address for address in self._registered() if address not in used]

    def keep(self) -> None:
        """Tell the spares from now on, until `close`, that there is a chief: a spare without one gives up."""
        if self._keeper is None:
            self._keeper = concurrency.Thread(target=self._keep, name="spares", daemon=True)
            self._keeper.start()

    def end(self, run: str, *, finished: bool) -> None:
        """Tell all spares at the same time that the run is over; lost ones are skipped."""
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
                _log.info("skipped a spare parameter server: %s", error)

        try:
            spares = self.addresses()
        except ClusterError as error:
            _log.warning("cannot find the spare parameter servers now: %s", error)
            return
        with ThreadPoolExecutor(max(1, min(32, len(spares))), "spares-told") as threads:
            list(threads.map(tell, spares))


READY_WITHIN = timedelta(seconds=30)
"""How long a server may take to answer before it is measured."""


DONE_WITHIN = timedelta(seconds=10)
"""How long the last answer of a server may take after its time is over."""


SayRanking = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """What came of one server."""

    address: str
    throughput: float = 0.0
    """Steps in small, in a second."""
    latency: float = 0.0
    """The seconds that half of them took at most."""
    with_host: float = 0.0
    """Its throughput and that of all slower servers of its host: what it is ranked by."""
    problem: str = ""
    """Why there is no number; empty if there is one."""


Measure = Callable[[Sequence[str]], Sequence[MeasuredServer]]
"""Measures servers, in their order."""


def host_of(address: str) -> str:
    """Return what stands before the port, also of `[v6]:port`; all of an address without one."""
    host, colon, port = address.rpartition(":")
    return host if colon and port.isdigit() else address


def ranked(measured: Sequence[MeasuredServer]) -> list[MeasuredServer]:
    """Return servers with what each is ranked by, best first; of equals, the last is the best.

    Those without a number are left out.
    """
    slower: defaultdict[str, float] = defaultdict(float)
    found: list[tuple[float, int, MeasuredServer]] = []
    numbered = [(index, server) for index, server in enumerate(measured) if not server.problem]
    for index, server in sorted(numbered, key=lambda one: (one[1].throughput, one[0])):
        host = host_of(server.address)
        slower[host] += server.throughput
        found.append((slower[host], index, replace(server, with_host=slower[host])))
    return [server for *_, server in sorted(found, key=lambda one: one[:2], reverse=True)]


class PsBenchmark:
    """Chooses servers: the fastest, or those named by the config.

    Args:
        needed: How many.
        measure: Measures all of them.
        overridden: Addresses to use instead, in order: nothing is measured.
        say: Told the ranking, as a small table.

    Raises:
        ConfigError: Fewer are named than are needed.
    """

    def __init__(
        self,
        needed: int,
        measure: Measure,
        *,
        overridden: Sequence[str] = (),
        say: SayRanking = lambda _: None,
    ) -> None:
        if overridden and len(overridden) < needed:
            raise ConfigError(
                f"{needed} parameter servers are needed, and cluster.use_ps names {len(overridden)}"
            )
        self._needed = needed
        self._measure = measure
        self._overridden = tuple(overridden)
        self._say = say

    def __call__(self, addresses: Sequence[str]) -> list[str]:
        """Return the servers to use, by share.

        Raises:
            UnavailableError: Too few could be measured.
        """
        if self._overridden:
            chosen = list(self._overridden[: self._needed])
            self._say(f"parameter servers as cluster.use_ps names them: {', '.join(chosen)}")
            return chosen
        measured = self._measure(addresses)
        best = ranked(measured)
        failed = [server for server in measured if server.problem]
        self._say(_table(best, failed, self._needed))
        if len(best) < self._needed:
            raise UnavailableError(
                f"{self._needed} parameter servers are needed, and {len(best)} could be measured; "
                + "; ".join(f"{server.address}: {server.problem}" for server in failed)
            )
        return [server.address for server in best[: self._needed]]


def _table(best: Sequence[MeasuredServer], failed: Sequence[MeasuredServer], needed: int) -> str:
    title = "parameter server"
    width = max(len(title), *(len(server.address) for server in [*best, *failed]))
    lines = [f"share  {title:{width}}  steps/s    latency  with its host"]
    for place, server in enumerate(best):
        share = str(place) if place < needed else "spare"
        numbers = f"{server.throughput:7.1f}  {server.latency * 1000:6.1f} ms  {server.with_host:13.1f}"
        lines.append(f"{share:>5}  {server.address:{width}}  {numbers}")
    lines += [f"{'-':>5}  {server.address:{width}}  {server.problem}" for server in failed]
    return "\n".join(lines)


# Measuring


class StepMeasure:
    """Measures servers over their ports, all at the same time.

    Args:
        seconds: How long; each is measured at least once.
        guard: What servers want to be shown.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        seconds: timedelta,
        guard: Guard | None = None,
        *,
        clock: Callable[[], float] = concurrency.monotonic,
        done_within: timedelta = DONE_WITHIN,
    ) -> None:
        self._seconds = seconds.total_seconds()
        self._guard = guard
        self._clock = clock
        self._done_within = done_within.total_seconds()

    def __call__(self, addresses: Sequence[str]) -> list[MeasuredServer]:
        """Return the measurement of each, in order. A server that fails has a problem and delays none."""
        lines = [_MeasuredLine(address, self._guard) for address in addresses]
        with ThreadPoolExecutor(max(1, len(lines)), "ps-benchmark") as threads:

            def all_of(work: Callable[[_MeasuredLine], None], seconds: float) -> None:
                waiting = {threads.submit(work, line): line for line in lines}
                for late in wait(waiting, seconds).not_done:
                    waiting[late].give_up()
                wait(waiting)

            all_of(_MeasuredLine.get_ready, READY_WITHIN.total_seconds() + self._done_within)
            until = self._clock() + self._seconds
            all_of(lambda line: line.measure(until, self._clock), self._seconds + self._done_within)
        return [line.result() for line in lines]


class _MeasuredLine:
    """A connection to a server that is measured, by one thread."""

    def __init__(self, address: str, guard: Guard | None) -> None:
        self._address = address
        self._caller = Caller(SERVICE, address, guard=guard, timeout=READY_WITHIN)
        self._lock = concurrency.Lock()  # guards the stream, which two threads end
        self._stream: CallStream | None = None
        self._gradient = sample_gradient()
        self._took: list[float] = []
        self._elapsed = 0.0
        self._problem = ""

    def get_ready(self) -> None:
        with self._noting():
            self._caller.call("hello")
            self._stream = self._caller.open_stream()
            self._step()  # the first pays for what later ones find ready

    def measure(self, until: float, clock: Callable[[], float]) -> None:
        began = clock()
        try:
            with self._noting():
                while not self._problem:
                    before = clock()
                    self._step()
                    now = clock()
                    self._took.append(now - before)
                    if now >= until:
                        break
        finally:
            self._elapsed = clock() - began
            self._close()

    def give_up(self) -> None:
        """End a measurement that is under way, from another thread."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel("it did not answer in time")

    def result(self) -> MeasuredServer:
        if self._problem:
            return MeasuredServer(self._address, problem=self._problem)
        throughput = len(self._took) / max(self._elapsed, 1e-9)
        return MeasuredServer(self._address, throughput, statistics.median(self._took))

    def _step(self) -> None:
        assert self._stream is not None
        self._stream.send("sample_step", {}, self._gradient)
        self._stream.receive()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except MonolithError as error:
            self._problem = str(error)

    def _close(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._caller.close()
