"""Calls between processes, the client's side: small calls as JSON, records as Arrow batches, bulk as bytes.

A `Service` describes the calls of one kind of server: its name in messages, and the errors that callers
receive. A `Transport` moves the messages: Arrow Flight, unless the process is simulated.

    with Caller(SERVICE, "host:7000", guard=guard) as caller:
        caller.call("join", worker=0)         # JSON to JSON, retried while the server restarts
        stream = caller.open_stream()         # bulk: request, answer, request, answer

Bulk goes over a `CallStream`: one exchange that stays open for many requests. A request takes half the time
of a separate call, and bytes are copied neither into nor out of messages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from monolith.concurrency import Event, monotonic, sleep
from monolith.errors import ConfigError, MonolithError, OutOfMemoryError, RequestError, RetryableError
from monolith.wire.bulk import Bytes, TrafficMeter
from monolith.wire.flight_transport import import_arrow, transport
from monolith.wire.transport import Connection, NoGuard, PortGuard, Service, StreamEnd, TransportError

Address = str | Callable[[], str]
"""host:port, or a function that returns it whenever a connection is made. It raises a RetryableError if the
address is not known yet."""
Clock = Callable[[], float]
"""A monotonic clock, in seconds."""
POLL = 1.0
"""Seconds that a server lets a polling caller wait before it answers that there is no news."""
ANSWER_WITHIN = timedelta(seconds=60)
_RETRY_AFTER = 0.05
_LARGE = 64 << 10

_log = logging.getLogger(__name__)

T = TypeVar("T")


_MISTRUST = {
    "certificate verify failed": "another authority than ours signed its certificate",
    "is not in peer certificate": "its certificate is of another name",
    "wrong version number": "it speaks no TLS",
}
"""Text in Flight's error when a connection can never be made -> its meaning."""


class StoppedError(Exception):
    """The caller was told to stop while it waited. Services catch it; it never reaches a user."""


class Caller:
    """A client of one address that reconnects when its connection fails. For one thread at a time.

    Args:
        guard: The credentials to present; None for an open port.
        stops: Once one of them is set, a call raises StoppedError in place of its next attempt.
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
        stops: Sequence[Event] = (),
        clock: Clock = monotonic,
        meter: TrafficMeter | None = None,
    ) -> None:
        self._service = service
        self.meter = TrafficMeter() if meter is None else meter
        import_arrow(f"the {service.name}")  # a missing package is reported now, not by the first call
        self._address = address
        self._guard = guard or NoGuard()
        self._patience = patience.total_seconds()
        self._timeout = timeout.total_seconds()
        self._stops = stops
        self._clock = clock
        self._connection: Connection | None = None
        self._where = ""

    def call(self, name: str, /, **body: Any) -> dict[str, Any]:
        """Return the answer to a call, which may have been made more than once.

        Raises:
            MonolithError: The error that the server raised; the service's `failure` for one not in
                `told`.
            ConfigError: The server lacks the token, refused ours, or its certificate is not trusted.
            StoppedError: One of `stops` was set.

            The service's `unreachable` or `late`: the server did not answer within `patience`.
        """
        sent = json.dumps(body).encode()

        def make(connection: Connection) -> bytes:
            if len(sent) > _LARGE:
                connection.knock(self._timeout)  # the next message may only go to a process with the token
            return connection.call(name, sent, self._timeout)

        answer = self._with_retries(make)
        self.meter.count(received=len(answer), sent=len(sent))
        with self._decoding():
            said = json.loads(answer)
        return self._answer(said)

    def fetch(self, ticket: dict[str, Any]) -> Any:
        """Return the record batch of a ticket; otherwise like `call`."""
        wanted = json.dumps(ticket).encode()
        said, batch = self._with_retries(lambda connection: connection.fetch(wanted, self._timeout))
        if said is None:
            return batch
        with self._decoding():
            answer = json.loads(said)
        return self._answer(answer)

    def open_stream(self) -> CallStream:
        """Open a stream over this connection; make no other calls while it is in use.

        Opening does not contact the server and has no timeout: make a `call` first.
        """
        try:
            return CallStream(self, self._connected().open_stream())
        except TransportError as cause:
            raise self._translated(cause) from cause

    def close(self) -> None:
        """Close the connection. Closing again does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn a missing or foreign answer into an error of the service."""
        try:
            yield
        except (StopIteration, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise self._foreign() from cause

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        with self._decoding():
            if "error" not in answer:
                return dict(answer["answer"])
            kind, message = answer["error"], str(answer["message"])
        kinds: tuple[type[MonolithError], ...] = (RequestError, OutOfMemoryError, *self._service.told)
        told = {one.__name__: one for one in kinds}
        raise told.get(kind if isinstance(kind, str) else "", self._service.failure)(message)

    def _with_retries(self, make: Callable[[Connection], T]) -> T:
        give_up: float | None = None
        retried_handshake = False
        while True:
            if any(stop.is_set() for stop in self._stops):
                raise StoppedError
            try:
                return make(self._connected())
            except RetryableError as error:  # its address is not known yet
                failure: MonolithError = self._service.unreachable(str(error))
                cause: Exception = error
            except TransportError as error:
                # Another process answers at the address than the one of our handshake. If it is the server,
                # restarted, a second handshake succeeds; any other program learns nothing from it.
                proved = self._connection is not None and self._connection.has_proof
                if error.kind in ("unproved", "refused_token") and proved and not retried_handshake:
                    retried_handshake = True
                    self.close()
                    continue
                failure, cause = self._translated(error), error
                if error.kind not in ("unreachable", "late") or isinstance(failure, ConfigError):
                    raise failure from cause
            self.close()
            now = self._clock()
            if give_up is None:
                give_up = now + self._patience
                if self._patience > 0:
                    _log.warning("%s: %s; retrying for %g s", self._service.name, failure, self._patience)
            if now >= give_up:
                raise failure from cause
            sleep(_RETRY_AFTER)

    def _foreign(self) -> MonolithError:
        return self._service.failure(
            f"{self._service.name}: {self._where} sent no answer, or one that is not of this service"
        )

    def _translated(self, cause: TransportError) -> MonolithError:
        """Return the error of the service for an error of the transport."""
        service, said, kind = self._service, str(cause), cause.kind
        if kind in ("unproved", "no_proof_asked"):
            why = said if kind == "unproved" else "it asks for none"
            return ConfigError(
                f"{service.name}: the process at {self._where} does not have this run's token: {why}. "
                f"Nothing was sent to it. Give {service.peers} the same token, or see which program has "
                f"the port.{service.token_hint}"
            )
        if kind == "refused_token":
            return ConfigError(
                f"{service.name}: {self._where} refused the shared token. Give {service.peers} the same one."
                f"{service.token_hint}"
            )
        if kind in ("foreign", "closed"):
            return (
                self._foreign()
                if kind == "foreign"
                else service.unreachable(f"no answer from {self._where}: {said}")
            )
        if kind == "other":
            return service.failure(f"{service.name}: {self._where} answered: {said}")
        for words, meaning in _MISTRUST.items():
            if words in said:
                return ConfigError(
                    f"{service.name}: {self._where} is not trusted: {meaning} ({said}). Give "
                    f"{service.peers} certificates of one authority, for the names they are reached by."
                )
        if kind == "late":
            return service.late(f"no answer from {self._where}: {said}")
        # A port with TLS does this to callers without TLS, or with a certificate of another authority.
        hint = ", or it expects other certificates" if "Socket closed" in said else ""
        return service.unreachable(f"no answer from {self._where}{hint}: {said}")

    def _connected(self) -> Connection:
        if self._connection is None:
            self._where = self._address if isinstance(self._address, str) else self._address()
            self._connection = transport().connect(
                self._service.name, self._where, self._guard, self._timeout
            )
        return self._connection


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

    def __init__(self, caller: Caller, end: StreamEnd) -> None:
        self._caller = caller
        self._end = end
        self._cancelled: str | None = None
        self.broken = False

    def send(self, name: str, body: Mapping[str, Any], data: Any = b"") -> None:
        """Send a request; `data` must not change until the answer was received."""
        self.send_message(json.dumps({"name": name, "body": body}).encode(), data)

    def send_message(self, header: bytes, data: Any) -> None:
        """Send a request whose header is not JSON, for the `message` handler of a server."""
        try:
            sent = self._end.write(header, data)
        except TransportError as cause:
            raise self._broken_by(cause) from cause
        self._caller.meter.count(sent=sent)

    def receive(self) -> Answer:
        """Wait for the answer to the last request; errors are those of `Caller.call`."""
        try:
            header, data = self._end.read()
        except TransportError as cause:
            raise self._broken_by(cause) from cause
        self._caller.meter.count(received=len(header) + len(data))
        if header.startswith(b"{"):
            with self._caller._decoding():
                said = json.loads(header)
            return Answer(self._caller._answer(said), data)
        return Answer({}, data, header)

    def cancel(self, why: str) -> None:
        """Make a `receive` that waits raise the service's `late` error. Callable from any thread."""
        self._cancelled = why
        self._end.cancel()

    def close(self) -> None:
        """End the stream without waiting for the server. The caller's connection stays open."""
        self.broken = True
        self._end.close()

    def _broken_by(self, cause: TransportError) -> MonolithError:
        """Note that the stream broke; return the error of the service."""
        self.broken = True
        caller = self._caller
        if self._cancelled is not None and cause.kind != "closed":
            return caller._service.late(f"no answer from {caller._where}: {self._cancelled}")
        return caller._translated(cause)
