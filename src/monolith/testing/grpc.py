"""gRPC in memory: servers and channels of simulated machines, over the network of the simulation.

On a simulated thread, `monolith.wire.grpc_ports.import_grpc` returns a `SimGrpc`. Its statuses, handlers and
interceptors are those of the package grpc; its servers and channels are here. A call moves a method, its
metadata, its deadline and one message:

    client  ──connect──► ──headers and message──►  interceptors, then the handler on a thread of the executor
            ◄──────── message or status ─────────

- A channel connects when it is first used, and again when its connection is lost. A refused connection makes
  calls fail until the backoff of the channel's options is over.
- A connection that breaks ends all of its calls with UNAVAILABLE, whether their handlers have run or not.
- Between machines that are cut off from each other a connection is half-open: neither side notices that the
  other one is gone, and calls wait for their deadlines. When the cut is healed, messages arrive, or the news
  that the connection is lost.
- A deadline travels as the seconds that are left, so a server's deadline is later than its client's. Both
  watch their own: the client's call ends with DEADLINE_EXCEEDED, the server's context is no longer active.
- `time_remaining` reads the wall clock, as grpc's does.

Calls have one request and one answer. Streams of a client, event loops (`grpc.aio`), TLS, compression,
keepalive and gRPC's own retries are not simulated; calls of one connection may overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from monolith.testing.network import SimNetwork
from monolith.testing.scheduler import SimMachine, SimThread

_PLAIN = """
    StatusCode RpcError FutureCancelledError FutureTimeoutError ServerInterceptor intercept_channel
    UnaryUnaryClientInterceptor UnaryStreamClientInterceptor StreamUnaryClientInterceptor
    StreamStreamClientInterceptor method_handlers_generic_handler unary_unary_rpc_method_handler
    unary_stream_rpc_method_handler stream_unary_rpc_method_handler stream_stream_rpc_method_handler
"""
"""Names of the package grpc that are used as they are: nothing in them waits, sends or reads a clock."""
_LOOK_AGAIN = 0.05
"""Seconds between two looks at whether a cut is healed."""
_LATER_MESSAGE = 0.1
"""Chance that the message of a call arrives after its headers."""
_LARGEST = 4 << 20
"""Bytes of a message that grpc accepts by default."""
_NO_DEADLINE = float(1 << 63)
"""What `time_remaining` says of a call without a deadline, roughly as grpc does."""

Metadata = tuple[tuple[str, str], ...]
Handle = Callable[[Any], Any]


def _grpc() -> Any:
    import grpc  # type: ignore[import-untyped]

    return grpc


class SimGrpc:
    """What `import grpc` returns, for one machine."""

    def __init__(self, network: SimNetwork, machine: SimMachine) -> None:
        self._network, self._machine = network, machine

    def __getattr__(self, name: str) -> Any:
        if name not in _PLAIN.split():
            raise AttributeError(f"grpc.{name} is not simulated")
        return getattr(_grpc(), name)

    def server(
        self,
        executor: Any,
        *,
        interceptors: Sequence[Any] = (),
        options: Sequence[tuple[str, Any]] = (),
        maximum_concurrent_rpcs: int | None = None,
    ) -> SimGrpcServer:
        return SimGrpcServer(
            self._network, self._machine, executor, interceptors, dict(options), maximum_concurrent_rpcs
        )

    def insecure_channel(self, target: str, options: Sequence[tuple[str, Any]] = ()) -> SimChannel:
        return SimChannel(self._network, self._machine, target, dict(options))


class CallStatus(NamedTuple):
    """The end of a call."""

    code: Any
    details: str
    trailing: Metadata = ()
    message: bytes | None = None
    """The answer, if the code is OK."""


def _status(name: str, details: str) -> CallStatus:
    return CallStatus(getattr(_grpc().StatusCode, name), details)


# The client's side


class SimLink:
    """A TCP connection of a channel to a server."""

    def __init__(self, client: SimMachine, server: SimGrpcServer, network: SimNetwork) -> None:
        self.client, self.server = client, server
        self._network = network
        self.peer = f"ipv4:{client.name}:{network.new_port()}"
        self.calls: list[SimCall] = []
        """Calls that have no status yet."""
        self.broken = False
        """Whether an end of it has closed, or the network has lost it. While its machines are cut off from
        each other, the other end does not know it."""
        server.links.append(self)

    @property
    def is_cut(self) -> bool:
        return self._network.is_cut(self.client, self.server.machine)

    def break_(self) -> None:
        """Lose the connection, and all calls that wait for an answer."""
        self.broken = True
        if self in self.server.links:
            self.server.links.remove(self)
        for call in self.calls:
            self._network.simulation.wake_some(call.waiters)


class SimChannel:
    """As grpc.Channel, for calls with one request and one answer."""

    def __init__(
        self, network: SimNetwork, machine: SimMachine, target: str, options: dict[str, Any]
    ) -> None:
        self.network, self.machine = network, machine
        self.largest = int(options.get("grpc.max_receive_message_length", _LARGEST))
        self._target = target
        self._link: SimLink | None = None
        self._backoff = self._first_backoff = options.get("grpc.initial_reconnect_backoff_ms", 1000) / 1e3
        self._most_backoff = options.get("grpc.max_reconnect_backoff_ms", 120_000) / 1e3
        self._connect_within = options.get("grpc.min_reconnect_backoff_ms", 20_000) / 1e3
        self._retry_at = 0.0
        """Virtual time of the next attempt to connect; until then calls fail."""
        self._closed = False

    def unary_unary(
        self,
        method: str,
        request_serializer: Handle | None = None,
        response_deserializer: Handle | None = None,
        _registered_method: bool | None = False,
    ) -> SimUnaryMethod:
        return SimUnaryMethod(self, method, request_serializer, response_deserializer)

    def close(self) -> None:
        """End all calls, and the connection."""
        self._closed = True
        if (link := self._link) is not None and not self.network.simulation.dead():
            for call in list(link.calls):
                call.end(_status("CANCELLED", "Channel closed!"))
            link.break_()

    def check_open(self) -> None:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")

    def connect(self, call: SimCall) -> SimLink | None:
        """Return the connection, which is made first if there is none; without one, the call has ended."""
        simulation = self.network.simulation
        if (link := self._known_link()) is not None:
            return link
        if simulation.now < self._retry_at:
            call.end(_status("UNAVAILABLE", "failed to connect to all addresses; waiting to try again"))
            return None
        connected = simulation.now + self.network.delay() + self.network.delay()
        give_up = simulation.now + self._connect_within
        while (link := self._known_link()) is None:  # another call may have connected meanwhile
            server = self.network.grpc_servers.get(self._target)
            is_cut = server is not None and self.network.is_cut(self.machine, server.machine)
            if simulation.now >= give_up:
                server = None
                break
            if simulation.now >= connected and not is_cut:
                break
            if call.look() is not None:
                return None
            wait = max(connected - simulation.now, _LOOK_AGAIN if is_cut else 0.0)
            simulation.block("connecting", min(wait * self.machine.rate, call.left), call.waiters)
        if link is not None:
            return link
        if server is None or not server.listens:
            self._retry_at = simulation.now + self._backoff * simulation.random.uniform(0.8, 1.2)
            self._backoff = min(1.6 * self._backoff, self._most_backoff)
            call.end(
                _status("UNAVAILABLE", f"failed to connect to all addresses; {self._target} does not answer")
            )
            return None
        self._backoff = self._first_backoff
        self._link = SimLink(self.machine, server, self.network)
        return self._link

    def _known_link(self) -> SimLink | None:
        """Return the connection as far as the client knows: one that is cut off may be lost."""
        link = self._link
        if link is not None and not link.is_cut and (link.broken or not link.server.listens):
            link = self._link = None
        return link


class SimUnaryMethod:
    """As grpc.UnaryUnaryMultiCallable."""

    def __init__(
        self, channel: SimChannel, method: str, serialize: Handle | None, deserialize: Handle | None
    ) -> None:
        self._channel, self._method = channel, method
        self._serialize, self._deserialize = serialize, deserialize

    def __call__(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        return self.with_call(request, timeout, **options)[0]

    def with_call(self, request: Any, timeout: float | None = None, **options: Any) -> tuple[Any, SimCall]:
        call = self._made(request, timeout, **options)
        call.send()
        return call.result(), call

    def future(self, request: Any, timeout: float | None = None, **options: Any) -> SimCall:
        call = self._made(request, timeout, **options)
        self._channel.machine.spawn(call.send, "grpc-call")
        return call

    def _made(
        self,
        request: Any,
        timeout: float | None,
        *,
        metadata: Sequence[tuple[str, str]] | None = None,
        **_: Any,  # credentials, wait_for_ready, compression
    ) -> SimCall:
        self._channel.check_open()
        data = request if self._serialize is None else self._serialize(request)
        return SimCall(
            self._channel, self._method, bytes(data), timeout, tuple(metadata or ()), self._deserialize
        )


class SimCall:
    """One call of a client: as grpc.Call and grpc.Future.

    Nothing tells it what happened elsewhere: it looks whenever its client does. So an answer or a broken
    connection on the far side of a cut shows when the cut is healed, and costs no thread meanwhile.
    """

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        message: bytes,
        timeout: float | None,
        metadata: Metadata,
        deserialize: Handle | None,
    ) -> None:
        self._channel, self._network = channel, channel.network
        self.method, self.message, self.timeout, self.metadata = method, message, timeout, metadata
        self._deserialize = deserialize
        clock = channel.machine.monotonic
        self._until = None if timeout is None else clock() + max(0.0, timeout)
        self._link: SimLink | None = None
        self._status: CallStatus | None = None
        self._answer: tuple[CallStatus, float] | None = None
        """The status that the server has sent, and the virtual time of its arrival."""
        self.waiters: list[SimThread] = []
        # Decided now, so that a message that breaks its connection does so whatever happens meanwhile.
        self.breaks = channel.network.breaks()
        self.breaks_before = self.breaks and channel.network.simulation.random.random() < 0.5

    def send(self) -> None:
        """Connect if need be, and send the call."""
        link = self._channel.connect(self)
        if link is None or self.look() is not None:
            return
        self._link = link
        link.calls.append(self)
        if not link.broken and link.server.machine.alive:  # else it is lost on the way
            link.server.receive(self, link)

    def answer(self, status: CallStatus) -> None:
        """Let the server's status travel to the client. Called on a thread of the server."""
        link = self._link
        assert link is not None
        if self.breaks:
            return link.break_()
        if not link.broken:
            self._answer = status, self._network.simulation.now + self._network.delay()
            self._network.simulation.wake_some(self.waiters)
        return None

    def end(self, status: CallStatus) -> None:
        """Note the status; the first one counts."""
        if self._status is None:
            self._status = status
            self._network.simulation.wake_some(self.waiters)
        if self._link is not None and self in self._link.calls:
            self._link.calls.remove(self)

    def look(self) -> CallStatus | None:
        """Return the status, if the client can know it by now."""
        link, now = self._link, self._network.simulation.now
        if self._status is None:
            if link is not None and not link.is_cut:
                if self._answer is not None and now >= self._answer[1]:
                    self.end(self._checked(self._answer[0]))
                elif self._answer is None and link.broken:
                    self.end(_status("UNAVAILABLE", "Socket closed"))
            if self._status is None and self.left <= 0:
                self.end(_status("DEADLINE_EXCEEDED", "Deadline Exceeded"))
        return self._status

    def _checked(self, status: CallStatus) -> CallStatus:
        size, most = len(status.message or b""), self._channel.largest
        if 0 <= most < size:
            return _status(
                "RESOURCE_EXHAUSTED", f"CLIENT: Received message larger than max ({size} vs. {most})"
            )
        return status

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return float("inf") if self._until is None else self._until - self._channel.machine.monotonic()

    def _wait(self, timeout: float | None = None) -> CallStatus:
        simulation, machine = self._network.simulation, self._channel.machine
        give_up = float("inf") if timeout is None else machine.monotonic() + timeout
        simulation.maybe_switch()
        while (found := self.look()) is None:
            wait = min(self.left, give_up - machine.monotonic())
            if wait <= 0:
                raise _grpc().FutureTimeoutError
            link = self._link
            if link is not None and link.is_cut and (link.broken or self._answer is not None):
                wait = min(wait, _LOOK_AGAIN)
            elif self._answer is not None:
                wait = min(wait, (self._answer[1] - simulation.now) * machine.rate)
            simulation.block("gRPC answer", None if wait == float("inf") else wait, self.waiters)
        return found

    # As grpc.Future

    def result(self, timeout: float | None = None) -> Any:
        status = self._wait(timeout)
        if self.cancelled():
            raise _grpc().FutureCancelledError
        if status.message is None:
            raise _rpc_error()(status)
        return status.message if self._deserialize is None else self._deserialize(status.message)

    def exception(self, timeout: float | None = None) -> Exception | None:
        status = self._wait(timeout)
        found: Exception | None = _rpc_error()(status) if status.message is None else None
        return found

    def done(self) -> bool:
        return self.look() is not None

    def cancel(self) -> bool:
        """End the call; its handler learns of it once the message of it can arrive."""
        if self.look() is not None:
            return False
        self.end(_status("CANCELLED", _CANCELLED_HERE))
        return True

    def cancelled(self) -> bool:
        return self._status is not None and self._status.details == _CANCELLED_HERE

    # As grpc.Call

    def code(self) -> Any:
        return self._wait().code

    def details(self) -> str:
        return self._wait().details

    def trailing_metadata(self) -> Metadata:
        return self._wait().trailing

    def initial_metadata(self) -> Metadata:
        return ()

    def is_active(self) -> bool:
        return self.look() is None

    @property
    def is_gone(self) -> bool:
        """Whether the client waits no longer: its call has ended, or its machine."""
        return self._status is not None or not self._channel.machine.alive


_CANCELLED_HERE = "Locally cancelled by application!"


@cache
def _rpc_error() -> Callable[[CallStatus], Exception]:
    class SimRpcError(_grpc().RpcError):  # type: ignore[misc]
        """The error of a call that has failed."""

        def __init__(self, status: CallStatus) -> None:
            super().__init__(f"{status.code.name}: {status.details}")
            self._status = status

        def code(self) -> Any:
            return self._status.code

        def details(self) -> str:
            return self._status.details

        def trailing_metadata(self) -> Metadata:
            return self._status.trailing

        def initial_metadata(self) -> Metadata:
            return ()

        def result(self) -> None:  # an interceptor of a client asks for it
            raise self

    return SimRpcError


# The server's side


class SimGrpcServer:
    """As grpc.Server."""

    def __init__(
        self,
        network: SimNetwork,
        machine: SimMachine,
        executor: Any,
        interceptors: Sequence[Any],
        options: dict[str, Any],
        most_calls: int | None,
    ) -> None:
        self.network, self.machine = network, machine
        self._executor, self._interceptors = executor, tuple(interceptors)
        self._largest = int(options.get("grpc.max_receive_message_length", _LARGEST))
        self._most_calls = most_calls
        self._handlers: list[Any] = []
        self.links: list[SimLink] = []
        """Connections that are not broken."""
        self.under_way: list[SimContext] = []
        """Calls whose handlers have not returned."""
        self.cut_short = 0
        """Calls that were cancelled because the grace of `stop` was over."""
        self._started = False
        self._stopped: list[Any] = []
        """Events of `stop`; none while it serves."""
        self._waiters: list[SimThread] = []
        machine.on_kill.append(self._break_all)

    @property
    def listens(self) -> bool:
        """Whether it accepts connections and calls."""
        return self._started and not self._stopped and self.machine.alive

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        host, _, text = address.rpartition(":")
        port = int(text) or self.network.new_port()
        address = f"{host}:{port}"
        before = self.network.grpc_servers.get(address)
        if before is not None and before.machine.alive and not before._stopped:
            raise RuntimeError(f"Failed to bind to address {address}")
        self.network.grpc_servers[address] = self
        return port

    def start(self) -> None:
        self._started = True

    def stop(self, grace: float | None) -> Any:
        """Refuse calls from now on; return an event that is set when those under way have ended, at the
        latest after so many seconds."""
        over = self.machine.event()
        first = not self._stopped
        self._stopped.append(over)
        if first:
            self.machine.spawn(lambda: self._stop(grace or 0.0), "grpc-stop")
        return over

    def _stop(self, grace: float) -> None:
        until = self.machine.monotonic() + grace
        while active := [one for one in self.under_way if one.is_active()]:
            left = min(until - self.machine.monotonic(), *(one.left for one in active))
            if left <= 0:
                break
            self.network.simulation.block("calls under way", left, self._waiters)
        for one in active:
            self.cut_short += 1
            one.finish(_status("UNAVAILABLE", "Cancelling all calls"))
        self._break_all()
        for over in self._stopped:
            over.set()

    def _break_all(self) -> None:
        for link in list(self.links):
            link.break_()

    def receive(self, call: SimCall, link: SimLink) -> None:
        """Let a call travel here, and be answered."""
        network = self.network

        def arrive() -> None:
            network.travel(link.client, self.machine)
            if call.breaks_before:
                return link.break_()
            if link.broken:
                return None
            if not self.listens:
                return call.answer(_status("UNAVAILABLE", "the server is shutting down"))
            context = SimContext(self, call, link)
            if not self._begin(context):
                return None
            if network.simulation.random.random() < _LATER_MESSAGE:
                network.travel(link.client, self.machine)
            if not link.broken:
                context.take(call.message, self._largest)
            return None

        self.machine.spawn(arrive, f"call from {link.client.name}")

    def _begin(self, context: SimContext) -> bool:
        """Find the handler of a call, and start it; False if it was refused."""

        def find(details: Any) -> Any:
            found = (one.service(details) for one in self._handlers)
            return next((one for one in found if one is not None), None)

        continuation: Handle = find
        for one in reversed(self._interceptors):
            continuation = _intercepted(one, continuation)
        try:
            handler = continuation(_HandlerDetails(context.call.method, context.call.metadata))
        except Exception as error:
            self.network.simulation.note(f"an interceptor failed: {error!r}")
            context.call.answer(_status("UNKNOWN", "Error in service handler!"))
            return False
        if handler is None:
            context.call.answer(_status("UNIMPLEMENTED", "Method not found!"))
            return False
        if self._most_calls is not None and len(self.under_way) >= self._most_calls:
            context.call.answer(_status("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!"))
            return False
        self.under_way.append(context)
        self._executor.submit(context.run, handler)
        return True

    def ended(self, context: SimContext) -> None:
        self.under_way.remove(context)
        self.network.simulation.wake_some(self._waiters)


class _HandlerDetails(NamedTuple):
    """As grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


def _intercepted(interceptor: Any, continuation: Handle) -> Handle:
    return lambda details: interceptor.intercept_service(continuation, details)


class SimContext:
    """One call on the server's side: as grpc.ServicerContext."""

    def __init__(self, server: SimGrpcServer, call: SimCall, link: SimLink) -> None:
        self.call = call
        self._server, self._link = server, link
        self._machine = server.machine
        self._until = None if call.timeout is None else self._machine.monotonic() + max(0.0, call.timeout)
        self._wall_until = None if call.timeout is None else self._machine.time() + max(0.0, call.timeout)
        self._code: Any = None
        self._details = ""
        self._trailing: Metadata = ()
        self._aborted = False
        self._ended = False
        """Whether the call has its status; the handler may still run."""
        self._message: bytes | None = None
        self._waiters: list[SimThread] = []

    def take(self, message: bytes, most: int) -> None:
        """Receive the message of the call."""
        if 0 <= most < len(message):
            size = len(message)
            self.finish(
                _status("RESOURCE_EXHAUSTED", f"SERVER: Received message larger than max ({size} vs. {most})")
            )
        self._message = message
        self._machine.simulation.wake_some(self._waiters)

    def run(self, handler: Any) -> None:
        """Answer the call; on a thread of the executor."""
        answers = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        answer = next(one for one in answers if one is not None)
        messages = self._messages(handler.request_deserializer)
        try:
            found = answer(messages if handler.request_streaming else next(messages), self)
            if handler.response_streaming:
                (found,) = found
        except Exception as error:
            if self._aborted:
                self.finish(CallStatus(self._code, self._details, self._trailing))
            elif not isinstance(error, _grpc().RpcError):
                self._machine.simulation.note(f"a handler of gRPC failed: {error!r:.300}")
                self.finish(_status("UNKNOWN", f"Exception calling application: {error}"))
        else:
            self._reply(found, handler.response_serializer)
        finally:
            if not self._machine.simulation.dead():
                self._ended = True
                self._server.ended(self)

    def _reply(self, found: Any, serialize: Handle | None) -> None:
        code = self._code
        if code not in (None, _grpc().StatusCode.OK):
            return self.finish(CallStatus(code, self._details, self._trailing))
        data = found if serialize is None else serialize(found)
        if not isinstance(data, bytes):
            return self.finish(_status("INTERNAL", "Failed to serialize response!"))
        return self.finish(CallStatus(_grpc().StatusCode.OK, self._details, self._trailing, data))

    def finish(self, status: CallStatus) -> None:
        """Send the status, unless the call has ended."""
        if self.is_active():
            self._ended = True
            self.call.answer(status)
        self._ended = True
        self._machine.simulation.wake_some(self._waiters)

    def _messages(self, deserialize: Handle | None) -> Iterator[Any]:
        """Yield the message of the call, once it has come."""
        while self._message is None or self._ended:
            if not self.is_active():
                raise _grpc().RpcError
            left = None if self._until is None else self.left
            self._machine.simulation.block("message of a call", left, self._waiters)
        yield self._message if deserialize is None else deserialize(self._message)

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return float("inf") if self._until is None else self._until - self._machine.monotonic()

    # As grpc.ServicerContext

    def is_active(self) -> bool:
        """Whether the server knows of no reason to stop."""
        gone = (self._link.broken or self.call.is_gone) and not self._link.is_cut
        return not (self._ended or self.left <= 0 or gone)

    def time_remaining(self) -> float:
        return _NO_DEADLINE if self._wall_until is None else max(0.0, self._wall_until - self._machine.time())

    def cancel(self) -> None:
        self.finish(_status("CANCELLED", "CANCELLED"))

    def peer(self) -> str:
        return self._link.peer

    def invocation_metadata(self) -> Metadata:
        return self.call.metadata

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._trailing = tuple(metadata)

    def abort(self, code: Any, details: str) -> None:
        self._code, self._details, self._aborted = code, details, True
        raise Exception  # as grpc does
