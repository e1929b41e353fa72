"""A network in memory between simulated machines: late, cut, half-open, and with servers that die mid-call.

It implements `monolith.wire.transport` with the semantics of TCP: messages of one connection arrive in order
and at most once, or the connection breaks. When it breaks, the caller cannot know whether the server acted on
the last message: that is the case that retries, fences and deduplication exist for. Every delay and fault is
the seed's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from monolith.testing.scheduler import SimMachine, SimThread, Simulation
from monolith.wire.bulk import Bytes
from monolith.wire.endpoint import Endpoint
from monolith.wire.ports import listen_error
from monolith.wire.transport import PortGuard, TransportError

_FIRST_PORT = 20_000


@dataclass
class NetworkFaults:
    """How bad the network is. May be changed while a simulation runs."""

    delay: tuple[float, float] = (0.0001, 0.005)
    """Least and most virtual seconds that a message takes."""
    slow_chance: float = 0.0
    """Chance that a message takes up to a hundred times as long."""
    break_chance: float = 0.0
    """Chance that a connection breaks at a message: half of the time before it is delivered, half after."""


class SimNetwork:
    """The network of a simulation.

    Args:
        faults: Its delays and faults; none but small delays by default.
    """

    def __init__(self, simulation: Simulation, faults: NetworkFaults | None = None) -> None:
        self.simulation = simulation
        self.faults = NetworkFaults() if faults is None else faults
        self._listeners: dict[str, _SimListener] = {}
        self._ports = _FIRST_PORT
        self._cut: set[frozenset[str]] = set()
        self.key_servers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """Of `monolith.testing.groups`, by address; each lives while the rank that serves it holds it."""
        self.grpc_servers: dict[str, Any] = {}
        """Of `monolith.testing.grpc`, by address."""
        self.groups: list[Any] = []
        """All process groups of ranks, by number."""

    def transport(self, machine: SimMachine) -> SimTransport:
        return SimTransport(self, machine)

    def cut(self, one: str, other: str) -> None:
        """Let no message pass between two machines, by name, until `heal`. Connections stay half-open."""
        self.simulation.note(f"network: {one} and {other} are cut off from each other")
        self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """Undo all cuts. Messages on the way arrive then."""
        if self._cut:
            self.simulation.note("network: all cuts are healed")
        self._cut.clear()

    def break_connections(self, server: SimMachine) -> None:
        """Break all connections to a machine. It completes the requests that it is at work on; their callers
        cannot know that, and may send them again meanwhile."""
        for listener in self._listeners.values():
            if listener.machine is server:
                listener._break_all("the connection broke")

    # For connections

    def listener(self, address: str) -> _SimListener | None:
        found = self._listeners.get(address)
        return found if found is not None and found.machine.alive and found.open else None

    def travel(self, sender: SimMachine, receiver: SimMachine, at_most: float | None = None) -> bool:
        """Let the running thread wait as long as a message takes: as long as the two are cut off, too.

        Returns:
            False if the two were still cut off after `at_most` virtual seconds.
        """
        simulation = self.simulation
        simulation.block("message", self.delay())
        while self.is_cut(sender, receiver):
            if at_most is not None and at_most <= 0:
                return False
            simulation.block("cut off", 0.05)
            at_most = None if at_most is None else at_most - 0.05
        return True

    def delay(self) -> float:
        """Return the virtual seconds that the next message takes."""
        draw, faults = self.simulation.random, self.faults
        seconds = draw.uniform(*faults.delay)
        if faults.slow_chance and draw.random() < faults.slow_chance:
            seconds *= 1 + 99 * draw.random()
        return seconds

    def is_cut(self, one: SimMachine, other: SimMachine) -> bool:
        return frozenset((one.name, other.name)) in self._cut

    def new_port(self) -> int:
        self._ports += 1
        return self._ports

    def breaks(self) -> bool:
        chance = self.faults.break_chance
        return bool(chance) and self.simulation.random.random() < chance


class SimTransport:
    """The transport of one machine; see `monolith.wire.flight_transport.Transport`."""

    def __init__(self, network: SimNetwork, machine: SimMachine) -> None:
        self._network, self._machine = network, machine

    def connect(self, service: str, address: str, guard: PortGuard, timeout: float) -> _SimConnection:  # noqa: ARG002
        return _SimConnection(self._network, self._machine, address)

    def listen(self, endpoint: Endpoint, host: str, port: int, guard: PortGuard) -> _SimListener:  # noqa: ARG002
        network = self._network
        if not port:
            port = network.new_port()
        address = f"{host}:{port}"
        if network.listener(address) is not None:
            raise listen_error(endpoint.service.name, host, port, None)
        found = network._listeners[address] = _SimListener(self._machine, endpoint, port)
        return found


class _SimListener:
    def __init__(self, machine: SimMachine, endpoint: Endpoint, port: int) -> None:
        self.machine, self.endpoint, self.port = machine, endpoint, port
        self.open = True
        self.pending: list[_Reply] = []
        """Answers that callers wait for: a killed machine breaks their connections."""
        machine.on_kill.append(self._break_all)

    def close_strangers(self) -> None: ...

    def shutdown(self) -> None:
        self.open = False
        self.endpoint.answering.wait_until_none(10.0)
        self._break_all()

    def _break_all(self, why: str = "the server is gone") -> None:
        for reply in list(self.pending):
            reply.fail(why)


class _Reply:
    """One answer on its way to a caller, or the reason why there will be none."""

    def __init__(self, simulation: Simulation, listener: _SimListener | None, broken: str = "") -> None:
        self._simulation, self._listener = simulation, listener
        self._waiters: list[SimThread] = []
        self._broken = broken
        self._done = False
        self._value: Any = None
        self.gone = False
        """Whether the caller has stopped to wait."""
        if listener is not None:
            listener.pending.append(self)

    def set(self, value: Any) -> None:
        self._value, self._done = value, True
        self._finish()

    def fail(self, why: str) -> None:
        if not self._done:
            self._broken = why
        self._finish()

    def _finish(self) -> None:
        if self._listener is not None and self in self._listener.pending:
            self._listener.pending.remove(self)
        self._simulation.wake_some(self._waiters)

    def wait(self, timeout: float | None) -> Any:
        simulation = self._simulation
        machine = simulation.current.machine
        until = None if timeout is None else machine.monotonic() + timeout
        simulation.maybe_switch()
        while not self._done and not self._broken:
            left = None if until is None else until - machine.monotonic()
            if left is not None and left <= 0:
                self.gone = True
                self._finish()
                raise TransportError("late", "the time is up")
            simulation.block("answer", left, self._waiters)
        if not self._done:
            raise TransportError("unreachable", self._broken)
        return self._value


class _SimConnection:
    has_proof = False

    def __init__(self, network: SimNetwork, machine: SimMachine, address: str) -> None:
        self._network, self._machine, self._address = network, machine, address

    def call(self, name: str, body: bytes, timeout: float) -> bytes:
        reply = self.start(lambda endpoint, gone: endpoint.answer(name, body, gone))
        answer: bytes = reply.wait(timeout)
        return answer

    def knock(self, timeout: float) -> None: ...

    def fetch(self, ticket: bytes, timeout: float) -> tuple[bytes | None, Any]:
        answer, batch = self.start(lambda endpoint, _: endpoint.fetch(ticket)).wait(timeout)
        return (answer, None) if batch is None else (None, batch)

    def open_stream(self) -> _SimStream:
        return _SimStream(self)

    def close(self) -> None: ...

    def start(self, work: Callable[[Endpoint, Callable[[], bool]], Any]) -> _Reply:
        """Send a request, which a thread of the server answers; return where the answer will arrive."""
        network, caller = self._network, self._machine
        network.simulation.check_alive()
        listener = network.listener(self._address)
        if listener is None:
            return _Reply(network.simulation, None, f"nothing listens at {self._address}")
        server = listener
        reply = _Reply(network.simulation, server)
        # Decided now, so that a message that breaks its connection does so whatever happens meanwhile.
        breaks = network.breaks()
        before = breaks and network.simulation.random.random() < 0.5

        def answer() -> None:
            network.travel(caller, server.machine)
            if before or not server.open:
                return reply.fail("the connection broke")  # before the request had an effect
            with server.endpoint.answering:
                found = work(server.endpoint, lambda: reply.gone)
            network.travel(server.machine, caller)
            if breaks:
                return reply.fail("the connection broke")  # after it
            return reply.set(found)

        server.machine.spawn(answer, f"call from {caller.name}")
        return reply


class _SimStream:
    """One stream: a request at a time, as `CallStream` uses it."""

    def __init__(self, connection: _SimConnection) -> None:
        self._connection = connection
        self._reply: _Reply | None = None
        self._broken = False

    def write(self, header: bytes, data: Any) -> int:
        if self._broken:
            raise TransportError("unreachable", "the stream is broken")
        request = _copied(data)

        def work(endpoint: Endpoint, _: Callable[[], bool]) -> tuple[bytes, Bytes]:
            answer, sent = endpoint.exchange(header, request)
            return answer, _copied(sent)

        self._reply = self._connection.start(work)
        return len(header) + len(request)

    def read(self) -> tuple[bytes, Bytes]:
        if self._reply is None or self._broken:
            raise TransportError("unreachable", "the stream is broken")
        try:
            found: tuple[bytes, Bytes] = self._reply.wait(None)
        except TransportError:
            self._broken = True
            raise
        self._reply = None
        return found

    def cancel(self) -> None:
        self.close()

    def close(self) -> None:
        self._broken = True
        if self._reply is not None:
            self._reply.fail("the stream was closed")


def _copied(data: Any) -> Bytes:
    """Return bytes as they arrive: a copy, which the receiver may keep and write to."""
    return np.frombuffer(bytes(memoryview(data).cast("B")), np.uint8).copy()
