"""Which of many parameter servers are the fastest, as their chief sees it.

    ready      every server has answered, and has a connection that stays
    measured   all at the same time, for so long: steps in small, one after the other
    done       each has a number, or a reason why it has none

Servers on one host share its processors and its link, so they are not ranked by their own numbers alone:
the fastest of a host counts for the whole host, the next for the host without it. So hosts that have much
to give come first, and the servers of one host follow each other only where it gives that much.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from monolith.cluster.security import Guard
from monolith.errors import ConfigError, MonolithError, UnavailableError
from monolith.store.server import SERVICE, sample_gradient
from monolith.wire.flight import Caller, CallStream

READY_WITHIN = timedelta(seconds=30)
"""How long a server may take to answer before it is measured."""
DONE_WITHIN = timedelta(seconds=10)
"""How long the last answer of a server may take after its time is over."""

Say = Callable[[str], None]


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
    """Why there is no number; empty where there is one."""


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
    """Chooses servers: the fastest, or those that somebody named.

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
        say: Say = lambda _: None,
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
        clock: Callable[[], float] = time.monotonic,
        done_within: timedelta = DONE_WITHIN,
    ) -> None:
        self._seconds = seconds.total_seconds()
        self._guard = guard
        self._clock = clock
        self._done_within = done_within.total_seconds()

    def __call__(self, addresses: Sequence[str]) -> list[MeasuredServer]:
        """Return what came of each, in their order. A server that fails has a problem, and keeps nobody."""
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
        self._lock = threading.Lock()  # guards the stream, which two threads end
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
