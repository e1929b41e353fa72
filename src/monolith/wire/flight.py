"""Calls over Arrow Flight, the client's side: small calls as JSON, records as Arrow batches, bulk as bytes.

Only this module and `flight_server` use pyarrow's Flight. It is an optional package, so it is imported when
a server or a client is made. A `Service` describes the calls of one kind of server: its name in messages,
and the errors that callers receive.

    with Caller(SERVICE, "host:7000", guard=guard) as caller:
        caller.call("join", worker=0)         # JSON to JSON, retried while the server restarts
        stream = caller.open_stream()         # bulk: request, answer, request, answer

Bulk goes over a `CallStream`: one exchange that stays open for many requests. A request takes half the time
of a separate call, and bytes are copied neither into nor out of messages.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from monolith.errors import (
    ConfigError,
    MissingExtraError,
    MonolithError,
    RequestError,
    RetryableError,
)
from monolith.wire.bulk import BulkMessages, Bytes, TrafficMeter
from monolith.wire.proof import CallerProof, UnprovedError

Address = str | Callable[[], str]
"""host:port, or a function that returns it whenever a connection is made. It raises a RetryableError if the
address is not known yet."""
Clock = Callable[[], float]
"""A monotonic clock, in seconds."""
POLL = 1.0
"""Seconds that a server lets a polling caller wait before it answers that there is no news."""
ANSWER_WITHIN = timedelta(seconds=60)
_RETRY_AFTER = 0.05
_HEAD = re.compile(
    r"^Flight returned \w+ error, with message: (failed to connect to all addresses; last error: )?"
)
_TAILS = (". Detail:", ". gRPC client debug context:", ". Client context:")
KNOCK = "knock"
"""A call that only proves the token. It precedes a large one, which a `ConnectionGuard` would cut off."""
_LARGE = 64 << 10
ANSWER_KEY = b"monolith.answer"
"""Key in the schema's metadata of a fetch that returns no records: the JSON answer in their place."""

_log = logging.getLogger(__name__)


_MISTRUST = {
    "certificate verify failed": "another authority than ours signed its certificate",
    "is not in peer certificate": "its certificate is of another name",
    "wrong version number": "it speaks no TLS",
}
"""Text in Flight's error when a connection can never be made -> its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One kind of server: its name in messages, and the errors that its callers receive."""

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
    """A sentence for the refused: where to find the token."""


class PortGuard(Protocol):
    """Credentials of a port, as Flight takes them: what a server demands, and a client presents.

    `monolith.cluster.security.Guard` implements it for certificates and tokens; `NoGuard` is an open port.
    """

    def flight_location(self, address: str) -> str:
        """Return host:port as Flight writes it, with or without TLS."""

    def flight_server_options(self, service: str) -> dict[str, Any]:
        """Return keyword arguments for a FlightServerBase that answers for a service."""

    def flight_client_options(self) -> dict[str, Any]:
        """Return keyword arguments for a FlightClient, apart from the proof."""

    def flight_proof(self, service: str) -> CallerProof | None:
        """Return the proof of the token, to and from a service; None without a token."""


class NoGuard:
    """Admits every process that can reach the port."""

    def flight_location(self, address: str) -> str:
        return f"grpc+tcp://{address}"

    def flight_server_options(self, service: str) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def flight_client_options(self) -> dict[str, Any]:
        return {}

    def flight_proof(self, service: str) -> CallerProof | None:  # noqa: ARG002
        return None


class StoppedError(Exception):
    """The caller was told to stop while it waited. Services catch it; it never reaches a user."""


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


class Caller:
    """A client of one address that reconnects when its connection fails. For one thread at a time.

    Args:
        guard: The credentials to present; None for an open port.
        stop: Once set, a call that waits for its next attempt raises StoppedError.
        patience: How long to retry an address that does not answer.
        timeout: How long an answer may take.
        meter: Counts the bytes of the connection; may be shared by several callers.
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
            MonolithError: The error that the server raised; the service's `failure` for one not in
                `told`.
            ConfigError: The server lacks the token, refused ours, or its certificate is not trusted.
            StoppedError: `stop` was set.

            The service's `unreachable` or `late`: the server did not answer within `patience`.
        """
        sent = json.dumps(body).encode()
        action = self._flight.Action(name, sent)

        def make(client: Any, options: Any) -> Any:
            if len(sent) > _LARGE:
                list(client.do_action(self._flight.Action(KNOCK, b""), options))
                self.check_proof()  # the next message may only go to a process with the token
            return list(client.do_action(action, options))

        results = self._with_retries(make)
        with self._decoding():
            (result,) = results
            answer = result.body.to_pybytes()
            self.meter.count(received=len(answer), sent=len(sent))
            said = json.loads(answer)
        return self._answer(said)

    def fetch(self, ticket: dict[str, Any]) -> Any:
        """Return the record batch of a ticket; otherwise like `call`."""
        wanted = self._flight.Ticket(json.dumps(ticket).encode())

        def take(client: Any, options: Any) -> Any:
            reader = client.do_get(wanted, options)
            with self._decoding():
                said = (reader.schema.metadata or {}).get(ANSWER_KEY)
                return reader.read_chunk().data if said is None else json.loads(said)

        found = self._with_retries(take)
        return self._answer(found) if isinstance(found, dict) else found

    def open_stream(self) -> CallStream:
        """Open a stream over this connection; make no other calls while it is in use.

        Opening does not contact the server and has no timeout: make a `call` first.
        """
        try:
            descriptor = self._flight.FlightDescriptor.for_command(b"")
            writer, reader = self._connected().do_exchange(descriptor)
            return CallStream(self, BulkMessages(self._arrow), writer, reader)
        except (UnprovedError, *self._troubles) as cause:
            raise self._translated(cause) from cause

    def close(self) -> None:
        """Close the connection. Closing again does nothing."""
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
        """Whether the server must prove that it has the token."""
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
        """Turn a missing or foreign answer into an error of the service."""
        try:
            yield
        except (StopIteration, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise self._service.failure(
                f"{self._service.name}: {self._where} sent no answer, or one that is not of this service"
            ) from cause

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        with self._decoding():
            if "error" not in answer:
                return dict(answer["answer"])
            kind, message = answer["error"], str(answer["message"])
        kinds: tuple[type[MonolithError], ...] = (RequestError, *self._service.told)
        told = {one.__name__: one for one in kinds}
        raise told.get(kind if isinstance(kind, str) else "", self._service.failure)(message)

    def _with_retries(self, make: Callable[[Any, Any], Any]) -> Any:
        options = self._flight.FlightCallOptions(timeout=self._timeout)
        give_up: float | None = None
        retried_handshake = False
        while True:
            if self._stop.is_set():
                raise StoppedError
            try:
                answer = make(self._connected(), options)
                self.check_proof()
                return answer
            except (UnprovedError, self._flight.FlightUnauthenticatedError) as error:
                # Another process answers at the address than the one of our handshake. If it is the server,
                # restarted, a second handshake succeeds; any other program learns nothing from it.
                if self._client is None or self._proof is None or retried_handshake:
                    raise self._translated(error) from error
                retried_handshake = True
                self.close()
                continue
            except RetryableError as error:  # its address is not known yet
                failure, final = self._service.unreachable(str(error)), False
                cause: Exception = error
            except MonolithError:  # from the function that resolves the address
                raise
            except self._troubles as error:
                failure, final = self._translated(error), not self._is_gone(error)
                cause = error
            if final or isinstance(failure, ConfigError):
                raise failure from cause
            self.close()
            now = self._clock()
            if give_up is None:
                give_up = now + self._patience
                if self._patience > 0:
                    _log.warning("%s: %s; retrying for %g s", self._service.name, failure, self._patience)
            if now >= give_up:
                raise failure from cause
            self._stop.wait(_RETRY_AFTER)

    def _is_gone(self, cause: Exception) -> bool:
        """Whether a retry may help."""
        flight = self._flight
        return isinstance(
            cause,
            (
                flight.FlightUnavailableError,
                flight.FlightTimedOutError,
                flight.FlightCancelledError,
                flight.FlightInternalError,  # a call in progress may get it when the server is killed
            ),
        )

    def _translated(self, cause: Exception) -> MonolithError:
        """Return the error of the service for an error of Flight."""
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
                    f"{service.name}: {self._where} is not trusted: {meaning} ({said}). Give "
                    f"{service.peers} certificates of one authority, for the names they are reached by."
                )
        if isinstance(cause, self._flight.FlightTimedOutError):
            return service.late(f"no answer from {self._where}: {said}")
        # A port with TLS does this to callers without TLS, or with a certificate of another authority.
        hint = ", or it expects other certificates" if "Socket closed" in said else ""
        return service.unreachable(f"no answer from {self._where}{hint}: {said}")

    def _connected(self) -> Any:
        if self._client is None:
            self._where = self._address if isinstance(self._address, str) else self._address()
            # Not gRPC's shared pool, and short backoff: a restarted server must be found within a moment.
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
    """One answer of a stream: JSON with bytes, or a header of the service's own with bytes."""

    body: dict[str, Any]
    data: Bytes
    header: bytes = b""
    """The header of an answer that is not JSON."""


class CallStream:
    """One exchange with a server: request, answer, request, answer. For one thread at a time.

    A request is never repeated. When `send` or `receive` fails because the server is gone, or after
    `cancel`, the stream is `broken` and can only be closed. `Caller.open_stream` makes one.
    """

    def __init__(self, caller: Caller, wire: BulkMessages, writer: Any, reader: Any) -> None:
        self._caller = caller
        self._wire = wire
        self._writer = writer
        self._reader = reader
        self._began = False
        self._cancelled: str | None = None
        self.broken = False

    def send(self, name: str, body: Mapping[str, Any], data: Any = b"") -> None:
        """Send a request; `data` must not change until the answer was received."""
        self.send_message(json.dumps({"name": name, "body": body}).encode(), data)

    def send_message(self, header: bytes, data: Any) -> None:
        """Send a request whose header is not JSON, for the `message` handler of a server."""
        with self._translating():
            if not self._began:
                self._writer.begin(self._wire.schema)
                if self._caller.is_proved:
                    _ = self._reader.schema  # waits for the server's first message, which contains the proof
                    self._caller.check_proof()
                self._began = True
            batch = self._wire.batch(data)
            header = self._wire.padded(header, batch.num_rows)
            self._writer.write_with_metadata(batch, header)
        self._caller.meter.count(sent=len(header) + batch.num_rows)

    def receive(self) -> Answer:
        """Wait for the answer to the last request; errors are those of `Caller.call`."""
        with self._translating():
            header, data = self._wire.take(self._reader.read_chunk())
        self._caller.meter.count(received=len(header) + len(data))
        if header.startswith(b"{"):
            with self._caller._decoding():
                said = json.loads(header)
            return Answer(self._caller._answer(said), data)
        return Answer({}, data, header)

    def cancel(self, why: str) -> None:
        """Make a `receive` that waits raise the service's `late` error. Callable from any thread."""
        self._cancelled = why
        self._reader.cancel()

    def close(self) -> None:
        """End the stream without waiting for the server. The caller's connection stays open."""
        self.broken = True
        with suppress(*self._caller._troubles):
            self._reader.cancel()
        with suppress(*self._caller._troubles):
            self._writer.close()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        caller = self._caller
        try:
            yield
        except StopIteration as cause:
            self.broken = True
            raise caller._service.unreachable(
                f"no answer from {caller._where}: it closed the connection"
            ) from cause
        except (UnprovedError, *caller._troubles) as cause:
            self.broken = True
            if self._cancelled is not None:
                raise caller._service.late(f"no answer from {caller._where}: {self._cancelled}") from cause
            raise caller._translated(cause) from cause


def _first_line(cause: Exception) -> str:
    """Return the reason of an error, without the text that Flight and gRPC put around it."""
    line = str(cause).partition("\n")[0]
    for tail in _TAILS:
        line = line.partition(tail)[0]
    return _HEAD.sub("", line)
