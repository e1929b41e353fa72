"""Arrow Flight as a transport: the only module that uses pyarrow's Flight.

pyarrow is an optional package, so it is imported when a server or a client is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from monolith.concurrency import machine
from monolith.errors import RequestError, lacks_memory, optional_package
from monolith.wire.bulk import BulkMessages, Bytes
from monolith.wire.endpoint import Endpoint
from monolith.wire.ports import ConnectionGuard, check_port, join_address, listen_error
from monolith.wire.proof import CallerProof, UnprovedError
from monolith.wire.transport import Connection, Failure, Listener, PortGuard, StreamEnd, TransportError

_HEAD = re.compile(
    r"^Flight returned \w+ error, with message: (failed to connect to all addresses; last error: )?"
)
_TAILS = (". Detail:", ". gRPC client debug context:", ". Client context:")
KNOCK = "knock"
"""A call that only proves the token. It precedes a large one, which a `ConnectionGuard` would cut off."""
ANSWER_KEY = b"monolith.answer"
"""Key in the schema's metadata of a fetch that returns no records: the JSON answer in their place."""


class Transport(Protocol):
    """Connects callers with listeners."""

    def connect(self, service: str, address: str, guard: PortGuard, timeout: float) -> Connection:
        """Connect to an address, and prove the token in both directions if the guard has one.

        Raises:
            TransportError: It cannot be reached, or has another token.
        """

    def listen(self, endpoint: Endpoint, host: str, port: int, guard: PortGuard) -> Listener:
        """Open a port and answer its requests with an endpoint, each in a thread of its own.

        Raises:
            ListenError: The port is taken, or the address is not of this machine.
        """


def transport() -> Transport:
    """Return the transport of the calling thread: Flight, unless the thread is simulated."""
    here = machine()
    return FlightTransport() if here is None else here.transport


class FlightTransport:
    """Arrow Flight over gRPC, with TLS and tokens of a `PortGuard`."""

    def connect(self, service: str, address: str, guard: PortGuard, timeout: float) -> Connection:
        return _FlightConnection(service, address, guard, timeout)

    def listen(self, endpoint: Endpoint, host: str, port: int, guard: PortGuard) -> Listener:
        name = endpoint.service.name
        check_port(name, host, port)
        try:
            return _FlightListener(endpoint, join_address(host, port), guard)
        except import_arrow(f"the {name}").ArrowException as cause:
            raise listen_error(name, host, port, None) from cause


def import_arrow(purpose: str) -> Any:
    """Return pyarrow, or say how to get it, and that `purpose` needs it."""
    with optional_package("pyarrow", "arrow", purpose):
        import pyarrow as pa  # type: ignore[import-untyped]
    return pa


def import_flight(purpose: str) -> Any:
    """Return pyarrow.flight, or say how to get it, and that `purpose` needs it."""
    import_arrow(purpose)
    from pyarrow import flight

    return flight


class _Translating:
    """`with translating:` turns errors of Flight into a TransportError.

    A class, because a generator costs several microseconds, and a request enters it on the way out and back.
    """

    def __init__(self, arrow: Any, flight: Any, *, has_proof: bool) -> None:
        self._arrow, self._flight = arrow, flight
        self._has_proof = has_proof

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, cause: BaseException | None, __: object) -> None:
        if cause is None:
            return
        if isinstance(cause, StopIteration):
            raise TransportError("closed", "it closed the connection") from cause
        if isinstance(cause, UnprovedError):
            raise TransportError("unproved", str(cause)) from cause
        if isinstance(cause, (self._flight.FlightError, self._arrow.ArrowException, OSError)):
            raise TransportError(self._kind(cause), _first_line(cause)) from cause

    def _kind(self, cause: Exception) -> Failure:
        flight = self._flight
        if isinstance(cause, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
            return "refused_token"
        if isinstance(cause, flight.FlightTimedOutError):
            return "late"
        # A call in progress may get an internal error when the server is killed.
        if isinstance(
            cause, flight.FlightUnavailableError | flight.FlightCancelledError | flight.FlightInternalError
        ):
            return "unreachable"
        if "Threadpool Exhausted" in str(cause):  # the server has no memory for a thread
            return "unreachable"
        if self._has_proof and isinstance(cause, self._arrow.ArrowNotImplementedError):
            return "no_proof_asked"
        return "other"


class _FlightConnection:
    """A `Connection` over Flight."""

    def __init__(self, service: str, address: str, guard: PortGuard, timeout: float) -> None:
        self._arrow, self._flight = import_arrow(f"the {service}"), import_flight(f"the {service}")
        self._proof: CallerProof | None = guard.flight_proof(service)
        self.has_proof = self._proof is not None
        # Not gRPC's shared pool, and short backoff: a restarted server must be found within a moment.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
        self.translating = _Translating(self._arrow, self._flight, has_proof=self.has_proof)
        with self.translating:
            self._client = self._flight.FlightClient(
                guard.flight_location(address),
                generic_options=options,
                middleware=[] if self._proof is None else [self._proof.middleware(self._flight)],
                **guard.flight_client_options(),
            )
            if self._proof is not None:
                try:
                    self._client.authenticate(self._proof.handshake(self._flight), self._within(timeout))
                except BaseException:
                    self._client.close()
                    raise

    def call(self, name: str, body: bytes, timeout: float) -> bytes:
        with self.translating:
            results = list(self._client.do_action(self._flight.Action(name, body), self._within(timeout)))
            self.check_proof()
        if len(results) != 1:
            raise TransportError("foreign", f"{len(results)} answers")
        return bytes(results[0].body.to_pybytes())

    def knock(self, timeout: float) -> None:
        with self.translating:
            list(self._client.do_action(self._flight.Action(KNOCK, b""), self._within(timeout)))
            self.check_proof()

    def fetch(self, ticket: bytes, timeout: float) -> tuple[bytes | None, Any]:
        with self.translating:
            reader = self._client.do_get(self._flight.Ticket(ticket), self._within(timeout))
            said = (reader.schema.metadata or {}).get(ANSWER_KEY)
            found = (None, reader.read_chunk().data) if said is None else (said, None)
            self.check_proof()
        return found

    def open_stream(self) -> StreamEnd:
        with self.translating:
            descriptor = self._flight.FlightDescriptor.for_command(b"")
            writer, reader = self._client.do_exchange(descriptor)
        return _FlightStream(self, BulkMessages(self._arrow), writer, reader)

    def close(self) -> None:
        self._client.close()

    def check_proof(self) -> None:
        """Raise UnprovedError unless the process that answered last has proved that it has the token."""
        if self._proof is not None:
            self._proof.check()

    def _within(self, timeout: float) -> Any:
        return self._flight.FlightCallOptions(timeout=timeout)


class _FlightStream:
    """A `StreamEnd` over Flight."""

    def __init__(self, connection: _FlightConnection, wire: BulkMessages, writer: Any, reader: Any) -> None:
        self._connection = connection
        self._wire = wire
        self._writer, self._reader = writer, reader
        self._began = False

    def write(self, header: bytes, data: Any) -> int:
        with self._connection.translating:
            if not self._began:
                self._writer.begin(self._wire.schema)
                if self._connection.has_proof:
                    _ = self._reader.schema  # waits for the server's first message, which contains the proof
                    self._connection.check_proof()
                self._began = True
            batch = self._wire.batch(data)
            header = self._wire.padded(header, batch.num_rows)
            self._writer.write_with_metadata(batch, header)
        return len(header) + int(batch.num_rows)

    def read(self) -> tuple[bytes, Bytes]:
        with self._connection.translating:
            return self._wire.take(self._reader.read_chunk())

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        with suppress(TransportError), self._connection.translating:
            self._reader.cancel()
        with suppress(TransportError), self._connection.translating:
            self._writer.close()


def _first_line(cause: Exception) -> str:
    """Return the reason of an error, without the text that Flight and gRPC put around it."""
    line = str(cause).partition("\n")[0]
    for tail in _TAILS:
        line = line.partition(tail)[0]
    return _HEAD.sub("", line)


class _FlightListener:
    """A port of Flight, and the guard that closes connections whose calls are never admitted."""

    def __init__(self, endpoint: Endpoint, address: str, guard: PortGuard) -> None:
        self._strangers: ConnectionGuard | None = None
        self._server = _make_server(endpoint, address, guard, self._admit)
        has_token = guard.flight_proof(endpoint.service.name) is not None
        self._strangers = ConnectionGuard(self.port, endpoint.limits, bounds_bytes=has_token)

    @property
    def port(self) -> int:
        return int(self._server.port)

    def close_strangers(self) -> None:
        if self._strangers is not None:
            self._strangers.close()

    def shutdown(self) -> None:
        self._server.shutdown()

    def _admit(self, peer: str) -> None:
        if self._strangers is not None:
            self._strangers.admit(peer)


def _make_server(endpoint: Endpoint, address: str, guard: PortGuard, admit: Callable[[str], None]) -> Any:
    purpose = f"the {endpoint.service.name}"
    arrow, flight = import_arrow(purpose), import_flight(purpose)
    wire, troubles = BulkMessages(arrow), (flight.FlightError, arrow.ArrowException, OSError)

    class FlightServer(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_action(self, context: Any, action: Any) -> Any:
            admit(context.peer())
            if action.type == KNOCK:
                return iter([])
            with endpoint.answering:
                answer = endpoint.answer(action.type, action.body, context.is_cancelled)
            return iter([flight.Result(answer)])

        def do_get(self, context: Any, ticket: Any) -> Any:
            admit(context.peer())
            with endpoint.answering:
                answer, batch = endpoint.fetch(ticket.ticket)
            if batch is None:
                nothing = arrow.schema([], metadata={ANSWER_KEY: answer})
                return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(nothing, []))
            return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(batch.schema, [batch]))

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
            admit(context.peer())
            with endpoint.streaming(context.peer()) as forbidden:
                if forbidden is not None:
                    raise flight.FlightUnavailableError(f"{forbidden}; retry later")
                try:
                    self._answer_stream(reader, writer)
                except MemoryError as error:  # for the bytes of an answer
                    said = endpoint.note_no_memory("a request of a stream", error)
                    raise flight.FlightUnavailableError(said) from error

        def _answer_stream(self, reader: Any, writer: Any) -> None:
            writer.begin(wire.schema)
            while True:
                try:
                    chunk = reader.read_chunk()
                except (StopIteration, *troubles) as cause:  # the caller closed it, or died
                    if lacks_memory(cause):
                        endpoint.note_no_memory("a request of a stream", cause)
                    return
                with endpoint.answering:
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

    return FlightServer(guard.flight_location(address), **guard.flight_server_options(endpoint.service.name))
