"""Calls over Arrow Flight, the server's side: handlers behind a port with credentials and limits.

    server = Server(SERVICE, Handlers(calls={"join": self._join}), host=host, guard=guard)

`_Endpoint` decides what to answer and never raises, the Flight listener only moves messages, and a
`ConnectionGuard` closes connections whose calls are never admitted. `flight` is the client's side.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monolith.errors import MonolithError, RequestError
from monolith.wire.bulk import BulkMessages, Bytes, Traffic, TrafficMeter
from monolith.wire.flight import ANSWER_KEY, KNOCK, NoGuard, PortGuard, Service, import_arrow, import_flight
from monolith.wire.messages import Call, Gone, Poll, read_message
from monolith.wire.ports import ConnectionGuard, Limits, check_port, join_address, listen_error

Fetch = Callable[[dict[str, Any]], Any]
"""A handler from JSON to an Arrow record batch."""
Exchange = Callable[[dict[str, Any], Bytes], tuple[dict[str, Any], Any]]
"""A handler from JSON and bytes to JSON and any object with the buffer protocol."""
Message = Callable[[bytes, Bytes], tuple[bytes, Any]]
"""Like an exchange, with a header of the service's own in place of JSON; it must not begin with "{"."""

B = TypeVar("B")

_LINGER = 10.0
"""Seconds that a closing server with streams waits for the requests in progress."""
_FREE_PORT = 0.5
"""Seconds that it then waits for callers to close their streams. The port is free before that."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """The functions that answer the requests of a server. A MonolithError of one is sent to the caller."""

    calls: Mapping[str, Call] = field(default_factory=dict)
    """For `Caller.call`, by name."""
    polls: Mapping[str, Poll] = field(default_factory=dict)
    """For `Caller.call`, by name: functions that wait."""
    fetch: Fetch | None = None
    """For `Caller.fetch`."""
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    """For `CallStream.send`, by name."""
    message: Message | None = None
    """For `CallStream.send_message`."""


def typed_exchange(kind: type[B], answer: Callable[[B, Bytes], tuple[dict[str, Any], Any]]) -> Exchange:
    """Return an exchange that receives its message as a `kind`; see `monolith.wire.messages.typed`."""
    return lambda body, data: answer(read_message(kind, body), data)


class Server:
    """Answers calls until it is closed, each in a thread of its own.

    Args:
        host: The address to listen on; by default only this machine can connect.
        port: 0 lets the system choose.
        guard: The credentials that callers must present; None admits every process that reaches the port.
        limits: The most that one caller may ask for.

    No exception of a handler stops the server. A MonolithError is sent to the caller. Any other exception is
    logged here under a random number, and the caller receives only that number.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        service: Service,
        handlers: Handlers,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.host = host
        check_port(service.name, host, port)
        self._closing = threading.Event()
        self._endpoint = _Endpoint(service, handlers, self._closing, limits or Limits())
        try:
            self._server = _make_server(self._endpoint, join_address(host, port), guard or NoGuard())
        except import_arrow(f"the {service.name}").ArrowException as cause:
            raise listen_error(service.name, host, port, None) from cause
        self.port = int(self._server.port)
        has_token = guard is not None and guard.flight_proof(service.name) is not None
        self._endpoint.connections = ConnectionGuard(self.port, self._endpoint.limits, bounds_bytes=has_token)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def traffic(self) -> Traffic:
        """The bytes received from and sent to all callers."""
        return self._endpoint.meter.total()

    def close(self) -> None:
        """Let the calls in progress finish, then free the port. Closing again does nothing.

        Each stream ends after its current request. An idle stream whose caller keeps it open does not delay
        the port, which is free when this returns.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._endpoint.connections is not None:
            self._endpoint.connections.close()
        if not self._endpoint.has_streams:
            self._server.shutdown()
            return
        ending = threading.Thread(target=self._server.shutdown, name="flight-shutdown", daemon=True)
        ending.start()
        self._endpoint.wait_until_answered(_LINGER)
        ending.join(_FREE_PORT)


class _Endpoint:
    """The server without Flight: dispatches requests and enforces limits. Its methods never raise; an error
    is an answer."""

    def __init__(
        self, service: Service, handlers: Handlers, closing: threading.Event, limits: Limits
    ) -> None:
        self.service = service
        self.handlers = handlers
        self.closing = closing
        self.limits = limits
        self.meter = TrafficMeter()
        self.connections: ConnectionGuard | None = None
        self._free_calls = threading.BoundedSemaphore(limits.calls)
        self._lock = threading.Lock()  # guards _json_bytes and _streams
        self._json_bytes = 0
        """Bytes of all JSON calls in progress."""
        self._streams: Counter[str] = Counter()
        """Peer address -> its open streams."""
        self._answering = 0
        self._answered_one = threading.Condition()  # guards _answering

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a call, or a request of a stream, as in progress: a closing server waits for it."""
        with self._answered_one:
            self._answering += 1
        try:
            yield
        finally:
            with self._answered_one:
                self._answering -= 1
                self._answered_one.notify_all()

    def wait_until_answered(self, seconds: float) -> None:
        """Wait until nothing is in progress."""
        with self._answered_one:
            self._answered_one.wait_for(lambda: not self._answering, seconds)

    @property
    def has_streams(self) -> bool:
        """Whether callers may keep a stream open."""
        return bool(self.handlers.exchanges) or self.handlers.message is not None

    def admit(self, peer: str) -> None:
        """Tell the guard of connections that a call of this peer was admitted."""
        if self.connections is not None:
            self.connections.admit(peer)

    def answer(self, name: str, body: Any, gone: Gone) -> bytes:
        """Answer a small call; `body` is an Arrow buffer."""

        def work() -> dict[str, Any]:
            with self._counted(), self._json(body) as found:
                if name in self.handlers.polls:  # a closing server ends them, and does not wait
                    over = lambda: self.closing.is_set() or gone()  # noqa: E731
                    return {"answer": self.handlers.polls[name](found, over)}
                return {"answer": self._known(self.handlers.calls, name)(found)}

        answer = self._answered(name, work)
        self.meter.count(received=memoryview(body).nbytes, sent=len(answer))
        return answer

    def fetch(self, ticket: bytes) -> tuple[bytes, Any]:
        """Return an answer for a ticket and a record batch, which is None if there are no records."""
        found: Any = None

        def work() -> dict[str, Any]:
            nonlocal found
            if self.handlers.fetch is None:
                raise RequestError("this server serves no records")
            with self._counted(), self._json(ticket) as asked:
                found = self.handlers.fetch(asked)
            return {}

        return self._answered("fetch", work), found

    def exchange(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        """Answer a request of a stream."""
        sent: Any = b""

        def answer_message() -> bytes:
            nonlocal sent
            assert self.handlers.message is not None
            self._check_size(data)
            answer, sent = self.handlers.message(header, data)
            return answer

        def work() -> dict[str, Any]:
            nonlocal sent
            with self._json(header) as request:
                name, body = request.get("name"), request.get("body")
                if not isinstance(name, str) or not isinstance(body, dict):
                    raise RequestError(
                        "a request must be an object with a name, a string, and a body, an object"
                    )
                self._check_size(data)
                answer, sent = self._known(self.handlers.exchanges, name)(body, data)
            return {"answer": answer}

        is_message = self.handlers.message is not None and not header.startswith(b"{")
        return self._answered("a request of a stream", answer_message if is_message else work), sent

    def _check_size(self, data: Bytes) -> None:
        if len(data) > self.limits.message_bytes:
            raise _too_large(len(data), "message_bytes", self.limits.message_bytes)

    def _answered(self, name: str, work: Callable[[], dict[str, Any] | bytes]) -> bytes:
        try:
            answer = work()
            return answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        except RequestError as error:
            return self.refused(name, error)
        except MonolithError as error:
            return _error(type(error).__name__, str(error))
        except Exception:  # a bug in a handler must not stop the server
            number = secrets.token_hex(4)
            _log.exception("%s: %.60s failed (error %s)", self.service.name, name, number)
            return _error("", f"{self.service.name}: {name:.60} failed; see error {number} in its log")

    def refused(self, name: str, error: RequestError) -> bytes:
        return _error(RequestError.__name__, f"{self.service.name}: {name:.60}: {error}")

    @contextmanager
    def _json(self, body: Any) -> Iterator[dict[str, Any]]:
        """Parse the JSON of a message, unless it or all messages in progress together are too large.

        Sizes are compared before parsing: parsed JSON takes up to 30 times its size.
        """
        size = memoryview(body).nbytes
        if size > self.limits.call_bytes:
            raise _too_large(size, "call_bytes", self.limits.call_bytes)
        with self._lock:
            if self._json_bytes and self._json_bytes + size > self.limits.calls_bytes:
                raise RequestError(
                    f"calls of {self._json_bytes:,} bytes are in progress, and limits.calls_bytes allows "
                    f"{self.limits.calls_bytes:,}; retry later"
                )
            self._json_bytes += size
        try:
            try:
                found = json.loads(bytes(body))
            except (ValueError, RecursionError) as cause:
                raise RequestError("its body is not JSON") from cause
            if not isinstance(found, dict):
                raise RequestError("its body must be a JSON object")
            yield found
        finally:
            with self._lock:
                self._json_bytes -= size

    @contextmanager
    def streaming(self, peer: str) -> Iterator[str | None]:
        """Count a stream while it is open; yield the reason to refuse it, or None."""
        host = peer.rpartition(":")[0]
        limits, why = self.limits, None
        with self._lock:
            if self._streams.total() >= limits.streams:
                why = f"it has {limits.streams} streams open, as many as limits.streams allows"
            elif self._streams[host] >= limits.peer_streams:
                why = f"it has {limits.peer_streams} streams of this peer, which limits.peer_streams allows"
            else:
                self._streams[host] += 1
        try:
            yield why
        finally:
            if why is None:
                with self._lock:
                    self._streams[host] -= 1
                    if not self._streams[host]:
                        del self._streams[host]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._free_calls.acquire(blocking=False):
            raise RequestError(
                f"{self.limits.calls} calls are in progress, as many as limits.calls allows; retry later"
            )
        try:
            yield
        finally:
            self._free_calls.release()

    def _known(self, table: Mapping[str, Any], name: str) -> Any:
        if name not in table:
            raise self.service.failure(
                f"{self.service.name}: there is no call {name[:60]!r}; there are {', '.join(table)}"
            )
        return table[name]


def _error(kind: str, message: str) -> bytes:
    return json.dumps({"error": kind, "message": message}).encode()


def _too_large(size: int, limit: str, most: int) -> RequestError:
    return RequestError(f"it has {size:,} bytes, and limits.{limit} allows {most:,}")


def _make_server(endpoint: _Endpoint, address: str, guard: PortGuard) -> Any:
    purpose = f"the {endpoint.service.name}"
    arrow, flight = import_arrow(purpose), import_flight(purpose)
    wire, troubles = BulkMessages(arrow), (flight.FlightError, arrow.ArrowException, OSError)

    class Listener(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_action(self, context: Any, action: Any) -> Any:
            endpoint.admit(context.peer())
            if action.type == KNOCK:
                return iter([])
            with endpoint.answering():
                answer = endpoint.answer(action.type, action.body, context.is_cancelled)
            return iter([flight.Result(answer)])

        def do_get(self, context: Any, ticket: Any) -> Any:
            endpoint.admit(context.peer())
            with endpoint.answering():
                answer, batch = endpoint.fetch(ticket.ticket)
            if batch is None:
                nothing = arrow.schema([], metadata={ANSWER_KEY: answer})
                return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(nothing, []))
            return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(batch.schema, [batch]))

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
            endpoint.admit(context.peer())
            with endpoint.streaming(context.peer()) as forbidden:
                if forbidden is not None:
                    raise flight.FlightUnavailableError(f"{forbidden}; retry later")
                self._answer_stream(reader, writer)

        def _answer_stream(self, reader: Any, writer: Any) -> None:
            writer.begin(wire.schema)
            while True:
                try:
                    chunk = reader.read_chunk()
                except (StopIteration, *troubles):  # the caller closed it, or died
                    return
                with endpoint.answering():
                    if endpoint.closing.is_set():
                        raise flight.FlightUnavailableError("it is closing")
                    try:
                        header, data = wire.take(chunk)
                    except RequestError as error:
                        answer, sent = endpoint.refused("a request of a stream", error), b""
                    else:
                        answer, sent = endpoint.exchange(header, data)
                        endpoint.meter.count(received=len(header) + len(data))
                        del data
                    del chunk
                    batch = wire.batch(sent)
                    answer = wire.padded(answer, batch.num_rows)
                    endpoint.meter.count(sent=len(answer) + batch.num_rows)
                    writer.write_with_metadata(batch, answer)

        # Other methods of Flight. The default answers, and an error of get_schema, would show a traceback.

        def _unknown(self, *_: Any) -> Any:
            raise flight.FlightServerError("there is no such call")

        do_put = get_flight_info = list_actions = list_flights = _unknown

        def get_schema(self, *_: Any) -> Any:
            return flight.SchemaResult(arrow.schema([]))

    return Listener(guard.flight_location(address), **guard.flight_server_options(endpoint.service.name))
