"""Calls over Arrow Flight: small ones as JSON, records as Arrow batches, bulk as bytes; behind a guard.

Only here is pyarrow's Flight spoken. It is an optional package, so it is imported when a
server or a client is made. Whose calls these are is said by a `Service`: it names itself in
messages, and says which errors a caller hears.

Bulk goes over a `CallStream`: one exchange that stays open, request after request. It takes half
the time of a call of its own for each, and bytes are copied neither into nor out of messages.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from monolith.errors import (
    ConfigError,
    MissingExtraError,
    MonolithError,
    RequestError,
    RetryableError,
)
from monolith.wire.bodies import Call, Gone, Poll, read_body
from monolith.wire.byte_messages import ByteMessages, Bytes
from monolith.wire.doorkeeper import Doorkeeper
from monolith.wire.limits import Limits
from monolith.wire.ports import check_port, join_address, listen_error
from monolith.wire.proof import CallerProof, UnprovedError
from monolith.wire.traffic import Traffic, TrafficMeter

Address = str | Callable[[], str]
"""host:port, or whom to ask for it, whenever a connection is made. Who does not know it now, and may know it
later, raises a RetryableError."""
Clock = Callable[[], float]
"""Seconds that never run backwards."""
Fetch = Callable[[dict[str, Any]], Any]
"""From JSON to an Arrow record batch."""
Exchange = Callable[[dict[str, Any], Bytes], tuple[dict[str, Any], Any]]
"""From JSON and bytes to JSON and anything with the buffer protocol."""
Message = Callable[[bytes, Bytes], tuple[bytes, Any]]
"""The same with a header of one's own, which does not begin with "{", in place of JSON."""

B = TypeVar("B")

POLL = 1.0
"""Seconds that a server keeps a caller waiting for news before it says that there is none."""
ANSWER_WITHIN = timedelta(seconds=60)
_RETRY_AFTER = 0.05
_LINGER = 10.0
"""Seconds that a closing server whose callers may keep streams open waits for what is in progress."""
_FREE_PORT = 0.5
"""Seconds that it then waits for callers to let go of their streams: the port is free before."""
_HEAD = re.compile(
    r"^Flight returned \w+ error, with message: (failed to connect to all addresses; last error: )?"
)
_TAILS = (". Detail:", ". gRPC client debug context:", ". Client context:")
_KNOCK = "knock"
"""A call that shows the token and asks for nothing: before a large one, which a doorkeeper would cut off."""
_LARGE = 64 << 10
_ANSWER = b"monolith.answer"
"""In the schema of an answer without records: what is said in their place."""

_log = logging.getLogger(__name__)


_MISTRUST = {
    "certificate verify failed": "another authority than ours signed its certificate",
    "is not in peer certificate": "its certificate is of another name",
    "wrong version number": "it speaks no TLS",
}
"""What Flight says when a connection will never be made -> what that means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Whose calls these are: how it is named, and what its callers hear."""

    name: str
    """The name of the service, with which every message begins."""
    peers: str
    """The processes that must share token and certificates."""
    failure: type[MonolithError]
    """The error for failures that have none of their own."""
    told: tuple[type[MonolithError], ...]
    """The errors that a caller receives as they were raised; others arrive as a `failure`. Each takes one
    message."""
    unreachable: type[MonolithError]
    """The error when the server does not answer."""
    late: type[MonolithError]
    """The error when an answer is late."""
    token_hint: str = ""
    """Where a caller finds the token, said when it is refused."""


class PortGuard(Protocol):
    """What a port demands of callers, and a caller presents: certificates, a token, in Flight's own terms.

    `monolith.cluster.security.Guard` is one; made with the same config, it serves both sides.
    """

    def flight_location(self, address: str) -> str:
        """Return host:port as Flight writes it, with or without TLS."""

    def flight_server_options(self, service: str) -> dict[str, Any]:
        """Return keyword arguments for a FlightServerBase that answers for a service."""

    def flight_client_options(self) -> dict[str, Any]:
        """Return keyword arguments for a FlightClient, apart from the proof."""

    def flight_proof(self, service: str) -> CallerProof | None:
        """Return what proves to a service, and demands of it, that it has the token; None without one."""


class NoGuard:
    """Lets in everybody who can reach the port."""

    def flight_location(self, address: str) -> str:
        return f"grpc+tcp://{address}"

    def flight_server_options(self, service: str) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def flight_client_options(self) -> dict[str, Any]:
        return {}

    def flight_proof(self, service: str) -> CallerProof | None:  # noqa: ARG002
        return None


def typed_exchange(kind: type[B], answer: Callable[[B, Bytes], tuple[dict[str, Any], Any]]) -> Exchange:
    """Return an exchange that hands its body on as a `kind`; see `monolith.wire.bodies.typed`."""
    return lambda body, data: answer(read_body(kind, body), data)


class StoppedError(Exception):
    """The caller was told to stop while it waited. Never leaves the service."""


def import_arrow(purpose: str) -> Any:
    """Return pyarrow, or say how to get it, and that `purpose` needs it."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as cause:
        raise MissingExtraError("pyarrow", "arrow", purpose) from cause
    return pa


def import_flight(purpose: str) -> Any:
    """Return pyarrow.flight, or say how to get it, and that `purpose` needs it."""
    import_arrow(purpose)
    from pyarrow import flight

    return flight


# Serving


class Server:
    """Answers calls from threads of its own until it is closed. Each caller that waits has its own.

    Args:
        calls: Name to function. A MonolithError that one raises reaches the caller.
        polls: Name to function, like `calls`, for those that wait.
        fetch: For `Caller.fetch`.
        exchanges: Name to function, for `CallStream`.
        message: Answers what comes over a `CallStream` with a header that is not JSON.
        host: Only this machine by default.
        port: 0 lets the system choose.
        guard: What callers must present; None lets in everybody who can reach the port.
        limits: What one of them may ask for.

    Whatever a function raises, the server goes on. A MonolithError is for the caller; of anything else
    the caller learns only under which number it stands in the log of this process.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        service: Service,
        calls: Mapping[str, Call],
        *,
        polls: Mapping[str, Poll] | None = None,
        fetch: Fetch | None = None,
        exchanges: Mapping[str, Exchange] | None = None,
        message: Message | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.host = host
        check_port(service.name, host, port)
        self._closing = threading.Event()
        self._endpoint = _Endpoint(
            service,
            calls=dict(calls),
            polls=dict(polls or {}),
            fetch=fetch,
            exchanges=dict(exchanges or {}),
            message=message,
            closing=self._closing,
            limits=limits or Limits(),
        )
        try:
            self._server = _make_server(self._endpoint, join_address(host, port), guard or NoGuard())
        except import_arrow(f"the {service.name}").ArrowException as cause:
            raise listen_error(service.name, host, port, None) from cause
        self.port = int(self._server.port)
        has_token = guard is not None and guard.flight_proof(service.name) is not None
        self._endpoint.doorkeeper = Doorkeeper(self.port, self._endpoint.limits, bounds_bytes=has_token)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def traffic(self) -> Traffic:
        """What came from all callers, and went to them."""
        return self._endpoint.meter.total()

    def close(self) -> None:
        """Let the calls in progress finish, then free the port. Closing again does nothing.

        Streams end with the request they are at. One whose caller sends none and does not let go is left
        to itself; the port is free all the same.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._endpoint.doorkeeper is not None:
            self._endpoint.doorkeeper.close()
        if not self._endpoint.has_streams:
            self._server.shutdown()
            return
        ending = threading.Thread(target=self._server.shutdown, name="flight-shutdown", daemon=True)
        ending.start()
        self._endpoint.wait_until_answered(_LINGER)
        ending.join(_FREE_PORT)


class _Endpoint:
    """What a server answers, apart from Flight. Raises nothing: whatever happens is an answer."""

    def __init__(
        self,
        service: Service,
        *,
        calls: Mapping[str, Call],
        polls: Mapping[str, Poll],
        fetch: Fetch | None,
        exchanges: Mapping[str, Exchange],
        message: Message | None,
        closing: threading.Event,
        limits: Limits,
    ) -> None:
        self.service = service
        self.calls = calls
        self.polls = polls
        self.exchanges = exchanges
        self.closing = closing
        self.limits = limits
        self.meter = TrafficMeter()
        self.doorkeeper: Doorkeeper | None = None
        self._fetch = fetch
        self._message = message
        self._room = threading.BoundedSemaphore(limits.calls)
        self._lock = threading.Lock()  # guards the two below
        self._json_bytes = 0
        self._streams: Counter[str] = Counter()
        """Peer address -> its open streams."""
        self._answering = 0
        self._answered_one = threading.Condition()  # guards the one above

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While it lasts, a call or a request of a stream is in progress, and a closing server waits."""
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
        return bool(self.exchanges) or self._message is not None

    def meet(self, peer: str) -> None:
        """Note who makes a call that was let in."""
        if self.doorkeeper is not None:
            self.doorkeeper.admit(peer)

    def answer(self, name: str, body: Any, gone: Gone) -> bytes:
        """Answer a small call; `body` is an Arrow buffer."""

        def work() -> dict[str, Any]:
            with self._at_work(), self._json(body) as found:
                if name in self.polls:  # who closes does not wait for those who wait
                    over = lambda: self.closing.is_set() or gone()  # noqa: E731
                    return {"answer": self.polls[name](found, over)}
                return {"answer": self._known(self.calls, name)(found)}

        answer = self._answered(name, work)
        self.meter.count(received=memoryview(body).nbytes, sent=len(answer))
        return answer

    def fetch(self, ticket: bytes) -> tuple[bytes, Any]:
        """Return a record batch for a ticket; None, and what to say, where there is none."""
        found: Any = None

        def work() -> dict[str, Any]:
            nonlocal found
            if self._fetch is None:
                raise RequestError("this server serves no records")
            with self._at_work(), self._json(ticket) as asked:
                found = self._fetch(asked)
            return {}

        return self._answered("fetch", work), found

    def exchange(self, header: bytes, data: Bytes) -> tuple[bytes, Any]:
        """Answer a request of a stream."""
        sent: Any = b""

        def answer_message() -> bytes:
            nonlocal sent
            assert self._message is not None
            self._check_size(data)
            answer, sent = self._message(header, data)
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
                answer, sent = self._known(self.exchanges, name)(body, data)
            return {"answer": answer}

        is_message = self._message is not None and not header.startswith(b"{")
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
        except Exception:  # whatever it is, the server goes on
            number = secrets.token_hex(4)
            _log.exception("%s: %.60s failed (error %s)", self.service.name, name, number)
            return _error("", f"{self.service.name}: {name:.60} failed; its log says more of error {number}")

    def refused(self, name: str, error: RequestError) -> bytes:
        return _error(RequestError.__name__, f"{self.service.name}: {name:.60}: {error}")

    @contextmanager
    def _json(self, body: Any) -> Iterator[dict[str, Any]]:
        """Give the JSON of a message, if neither it nor all that are worked on together are too large.

        The sizes are compared before anything is parsed: what is parsed takes up to 30 times as much.
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
        """Count a stream while it is open; give what forbids it, and None if it may be."""
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
    def _at_work(self) -> Iterator[None]:
        if not self._room.acquire(blocking=False):
            raise RequestError(
                f"{self.limits.calls} calls are in progress, as many as limits.calls allows; retry later"
            )
        try:
            yield
        finally:
            self._room.release()

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
    wire, troubles = ByteMessages(arrow), (flight.FlightError, arrow.ArrowException, OSError)

    class Listener(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_action(self, context: Any, action: Any) -> Any:
            endpoint.meet(context.peer())
            if action.type == _KNOCK:
                return iter([])
            with endpoint.answering():
                answer = endpoint.answer(action.type, action.body, context.is_cancelled)
            return iter([flight.Result(answer)])

        def do_get(self, context: Any, ticket: Any) -> Any:
            endpoint.meet(context.peer())
            with endpoint.answering():
                answer, batch = endpoint.fetch(ticket.ticket)
            if batch is None:
                nothing = arrow.schema([], metadata={_ANSWER: answer})
                return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(nothing, []))
            return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(batch.schema, [batch]))

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
            endpoint.meet(context.peer())
            with endpoint.streaming(context.peer()) as forbidden:
                if forbidden is not None:
                    raise flight.FlightUnavailableError(f"{forbidden}; retry later")
                self._answer_stream(reader, writer)

        def _answer_stream(self, reader: Any, writer: Any) -> None:
            writer.begin(wire.schema)
            while True:
                try:
                    chunk = reader.read_chunk()
                except (StopIteration, *troubles):  # it hung up, or died
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

        # What Flight has beside these. Its own answers, and an error of get_schema, would show a traceback.

        def _unknown(self, *_: Any) -> Any:
            raise flight.FlightServerError("there is no such call")

        do_put = get_flight_info = list_actions = list_flights = _unknown

        def get_schema(self, *_: Any) -> Any:
            return flight.SchemaResult(arrow.schema([]))

    return Listener(guard.flight_location(address), **guard.flight_server_options(endpoint.service.name))


# Calling


class Caller:
    """Makes calls to one address; makes a new connection when the old one fails. For one thread at a time.

    Args:
        guard: What to present; None where nothing is demanded.
        stop: Once set, a call that waits to try again raises StoppedError.
        patience: How long to go on trying an address where nobody answers.
        timeout: How long an answer may take.
        meter: Counts what goes over the connection; shared by whoever's connections count together.
    """

    def __init__(
        self,
        service: Service,
        address: Address,
        *,
        guard: PortGuard | None = None,
        patience: timedelta = timedelta(),
        timeout: timedelta = ANSWER_WITHIN,
        stop: threading.Event | None = None,
        clock: Clock = time.monotonic,
        meter: TrafficMeter | None = None,
    ) -> None:
        self._service = service
        self.meter = TrafficMeter() if meter is None else meter
        self._arrow = import_arrow(f"the {service.name}")
        self._flight = import_flight(f"the {service.name}")
        self._troubles = (self._flight.FlightError, self._arrow.ArrowException, OSError)
        self._address = address
        self._guard = guard or NoGuard()
        self._patience = patience.total_seconds()
        self._timeout = timeout.total_seconds()
        self._stop = threading.Event() if stop is None else stop
        self._clock = clock
        self._client: Any = None
        self._proof: CallerProof | None = None
        self._where = ""

    def call(self, name: str, /, **body: Any) -> dict[str, Any]:
        """Return the answer to a call, which may have been made more than once.

        Raises:
            MonolithError: What the other side raised; the service's `failure` if that cannot be told.
            ConfigError: It does not have the token, refused ours, or its certificate is not to be trusted.
            StoppedError: `stop` was set.

            The service's `unreachable` or `late`, if nobody answered for as long as there was patience.
        """
        sent = json.dumps(body).encode()
        action = self._flight.Action(name, sent)

        def make(client: Any, options: Any) -> Any:
            if len(sent) > _LARGE:
                list(client.do_action(self._flight.Action(_KNOCK, b""), options))
                self.check_proof()  # of what is sent next, only a process with the token may learn
            return list(client.do_action(action, options))

        results = self._persist(make)
        with self._decoding():
            (result,) = results
            answer = result.body.to_pybytes()
            self.meter.count(received=len(answer), sent=len(sent))
            said = json.loads(answer)
        return self._answer(said)

    def fetch(self, ticket: dict[str, Any]) -> Any:
        """Return the record batch that a ticket stands for; otherwise like `call`."""
        wanted = self._flight.Ticket(json.dumps(ticket).encode())

        def take(client: Any, options: Any) -> Any:
            reader = client.do_get(wanted, options)
            with self._decoding():
                said = (reader.schema.metadata or {}).get(_ANSWER)
                return reader.read_chunk().data if said is None else json.loads(said)

        found = self._persist(take)
        return self._answer(found) if isinstance(found, dict) else found

    def open_stream(self) -> CallStream:
        """Open a stream over this connection, and make no other calls while it is in use.

        Nothing tells yet whether anybody is there, nor for how long to wait: `call` something first.
        """
        try:
            descriptor = self._flight.FlightDescriptor.for_command(b"")
            writer, reader = self._connected().do_exchange(descriptor)
            return CallStream(self, ByteMessages(self._arrow), writer, reader)
        except (UnprovedError, *self._troubles) as cause:
            raise self._judged(cause) from cause

    def close(self) -> None:
        """Let go of the connection. Closing again does nothing."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_proved(self) -> bool:
        """Whether the other side must prove that it has the token."""
        return self._proof is not None

    def check_proof(self) -> None:
        """Check that the process that answered last has the token.

        Raises:
            UnprovedError: It has not proved it.
        """
        if self._proof is not None:
            self._proof.check()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn an answer that is none, or of another program, into an error of the service."""
        try:
            yield
        except (StopIteration, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise self._service.failure(
                f"{self._service.name}: {self._where} answered nothing, or something else than an answer"
            ) from cause

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        with self._decoding():
            if "error" not in answer:
                return dict(answer["answer"])
            kind, message = answer["error"], str(answer["message"])
        kinds: tuple[type[MonolithError], ...] = (RequestError, *self._service.told)
        told = {one.__name__: one for one in kinds}
        raise told.get(kind if isinstance(kind, str) else "", self._service.failure)(message)

    def _persist(self, make: Callable[[Any, Any], Any]) -> Any:
        options = self._flight.FlightCallOptions(timeout=self._timeout)
        give_up: float | None = None
        shook_again = False
        while True:
            if self._stop.is_set():
                raise StoppedError
            try:
                answer = make(self._connected(), options)
                self.check_proof()
                return answer
            except (UnprovedError, self._flight.FlightUnauthenticatedError) as error:
                # Another process answers at the address than the one that we shook hands with. If it is the
                # server, started again, it proves so; any other program is shown nothing.
                if self._client is None or self._proof is None or shook_again:
                    raise self._judged(error) from error
                shook_again = True
                self.close()
                continue
            except RetryableError as error:  # nobody knows where it is
                failure, final = self._service.unreachable(str(error)), False
                cause: Exception = error
            except MonolithError:  # of whoever was asked for the address
                raise
            except self._troubles as error:
                failure, final = self._judged(error), not self._is_gone(error)
                cause = error
            if final or isinstance(failure, ConfigError):
                raise failure from cause
            self.close()
            now = self._clock()
            if give_up is None:
                give_up = now + self._patience
                if self._patience > 0:
                    _log.warning("%s: %s; trying for %g s", self._service.name, failure, self._patience)
            if now >= give_up:
                raise failure from cause
            self._stop.wait(_RETRY_AFTER)

    def _is_gone(self, cause: Exception) -> bool:
        """Whether it may help to try again."""
        flight = self._flight
        return isinstance(
            cause,
            (
                flight.FlightUnavailableError,
                flight.FlightTimedOutError,
                flight.FlightCancelledError,
                flight.FlightInternalError,  # a call in progress may get it when the other side is killed
            ),
        )

    def _judged(self, cause: Exception) -> MonolithError:
        """Return what it means that a call did not get through."""
        service, said = self._service, _first_line(cause)
        if isinstance(cause, UnprovedError) or (
            self._guard.flight_proof(service.name) is not None
            and isinstance(cause, self._arrow.ArrowNotImplementedError)
        ):
            why = said if isinstance(cause, UnprovedError) else "it asks for none"
            return ConfigError(
                f"{service.name}: the process at {self._where} does not have this run's token: {why}. "
                f"Nothing was sent to it. Give {service.peers} the same token, or see which program has "
                f"the port.{service.token_hint}"
            )
        if isinstance(cause, (self._flight.FlightUnauthenticatedError, self._flight.FlightUnauthorizedError)):
            return ConfigError(
                f"{service.name}: {self._where} refused the shared token. Give {service.peers} the same one."
                f"{service.token_hint}"
            )
        if not self._is_gone(cause):
            return service.failure(f"{service.name}: {self._where} answered: {said}")
        for words, meaning in _MISTRUST.items():
            if words in said:
                return ConfigError(
                    f"{service.name}: {self._where} is not to be trusted: {meaning} ({said}). Give "
                    f"{service.peers} certificates of one authority, for the names they are reached by."
                )
        if isinstance(cause, self._flight.FlightTimedOutError):
            return service.late(f"nobody answers at {self._where}: {said}")
        # What a port with TLS does to callers without it, or with a certificate it does not know.
        hint = ", or it expects other certificates" if "Socket closed" in said else ""
        return service.unreachable(f"nobody answers at {self._where}{hint}: {said}")

    def _connected(self) -> Any:
        if self._client is None:
            self._where = self._address if isinstance(self._address, str) else self._address()
            # A pool of its own, and quick to try again: the other side may be back in a moment.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
            proof = self._guard.flight_proof(self._service.name)
            client = self._flight.FlightClient(
                self._guard.flight_location(self._where),
                generic_options=options,
                middleware=[] if proof is None else [proof.middleware(self._flight)],
                **self._guard.flight_client_options(),
            )
            if proof is not None:
                try:
                    within = self._flight.FlightCallOptions(timeout=self._timeout)
                    client.authenticate(proof.handshake(self._flight), within)
                except BaseException:
                    client.close()
                    raise
            self._client, self._proof = client, proof
        return self._client


class Answer(NamedTuple):
    body: dict[str, Any]
    data: Bytes
    header: bytes = b""
    """Of an answer to a message with a header of its own."""


class CallStream:
    """One exchange with a server: request, answer, request, answer. For one thread at a time.

    A request is never repeated. After `send` or `receive` raised because the other side is gone, or
    after `cancel`, the stream is `broken` and can only be closed. `Caller.open_stream` makes one.
    """

    def __init__(self, caller: Caller, wire: ByteMessages, writer: Any, reader: Any) -> None:
        self._caller = caller
        self._wire = wire
        self._writer = writer
        self._reader = reader
        self._began = False
        self._cancelled: str | None = None
        self.broken = False

    def send(self, name: str, body: Mapping[str, Any], data: Any = b"") -> None:
        """Send a request; `data` must stay as it is until the answer has been received."""
        self.send_message(json.dumps({"name": name, "body": body}).encode(), data)

    def send_message(self, header: bytes, data: Any) -> None:
        """Send a request with a header of one's own, for the `message` of a server."""
        with self._judging():
            if not self._began:
                self._writer.begin(self._wire.schema)
                if self._caller.is_proved:
                    _ = self._reader.schema  # waits for the server's first message, which has the proof
                    self._caller.check_proof()
                self._began = True
            batch = self._wire.batch(data)
            header = self._wire.padded(header, batch.num_rows)
            self._writer.write_with_metadata(batch, header)
        self._caller.meter.count(sent=len(header) + batch.num_rows)

    def receive(self) -> Answer:
        """Wait for the answer to what was sent; errors as of `Caller.call`."""
        with self._judging():
            header, data = self._wire.take(self._reader.read_chunk())
        self._caller.meter.count(received=len(header) + len(data))
        if header.startswith(b"{"):
            with self._caller._decoding():
                said = json.loads(header)
            return Answer(self._caller._answer(said), data)
        return Answer({}, data, header)

    def cancel(self, why: str) -> None:
        """Make whoever waits for an answer raise the service's `late` error. From any thread."""
        self._cancelled = why
        self._reader.cancel()

    def close(self) -> None:
        """Hang up, whatever the other side does. The connection is its caller's to close."""
        self.broken = True
        with suppress(*self._caller._troubles):
            self._reader.cancel()
        with suppress(*self._caller._troubles):
            self._writer.close()

    @contextmanager
    def _judging(self) -> Iterator[None]:
        caller = self._caller
        try:
            yield
        except StopIteration as cause:
            self.broken = True
            raise caller._service.unreachable(
                f"nobody answers at {caller._where}: it closed the connection"
            ) from cause
        except (UnprovedError, *caller._troubles) as cause:
            self.broken = True
            if self._cancelled is not None:
                raise caller._service.late(f"nobody answers at {caller._where}: {self._cancelled}") from cause
            raise caller._judged(cause) from cause


def _first_line(cause: Exception) -> str:
    """Return what went wrong, without what Flight and gRPC say of themselves around it."""
    line = str(cause).partition("\n")[0]
    for tail in _TAILS:
        line = line.partition(tail)[0]
    return _HEAD.sub("", line)
