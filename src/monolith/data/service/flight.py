"""Calls over Arrow Flight: small ones as JSON, records as Arrow batches, behind a guard.

Only here is pyarrow's Flight spoken. It is an optional package, so it is imported when a
server or a client is made.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self

from monolith.errors import (
    ConfigError,
    DataError,
    ListenError,
    MissingExtraError,
    MonolithError,
    RestoreError,
    RetryableError,
)

Address = str | Callable[[], str]
"""host:port, or whom to ask for it, whenever a connection is made. Who does not know it now, and may know it
later, raises a RetryableError."""
Clock = Callable[[], float]
"""Seconds that never run backwards."""
Call = Callable[[dict[str, Any]], dict[str, Any]]
Fetch = Callable[[dict[str, Any]], Any]

POLL = 1.0
"""Seconds that a server keeps a caller waiting for news before it says that there is none."""
_ANSWER_WITHIN = 60.0
_RETRY_AFTER = 0.05
_ERRORS: dict[str, type[MonolithError]] = {
    "RestoreError": RestoreError,
    "ConfigError": ConfigError,
    "DataError": DataError,
}
"""What a caller can be told; anything else arrives as a DataError."""

_log = logging.getLogger(__name__)


_MISTRUST = {
    "certificate verify failed": "another authority than ours signed its certificate",
    "is not in peer certificate": "its certificate is of another name",
    "wrong version number": "it speaks no TLS",
}
"""What Flight says when a connection will never be made -> what that means."""


class Guard(Protocol):
    """What a port demands of callers, and a caller presents: certificates, a token, in Flight's own terms.

    `monolith.cluster.security.Guard` is one; made with the same config, it serves both sides.
    """

    def flight_location(self, address: str) -> str:
        """Return host:port as Flight writes it, with or without TLS."""

    def flight_server_options(self) -> dict[str, Any]:
        """Return keyword arguments for a FlightServerBase."""

    def flight_client_options(self) -> dict[str, Any]:
        """Return keyword arguments for a FlightClient."""


class NoGuard:
    """Lets in everybody who can reach the port."""

    def flight_location(self, address: str) -> str:
        return f"grpc+tcp://{address}"

    def flight_server_options(self) -> dict[str, Any]:
        return {}

    def flight_client_options(self) -> dict[str, Any]:
        return {}


class StoppedError(Exception):
    """The caller was told to stop while it waited. Never leaves the service."""


class UnreachableError(DataError):
    """Nobody answers at an address. Never leaves the service as such: callers say what they wanted."""


def import_arrow() -> Any:
    """Return pyarrow, or say how to get it."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as cause:
        raise MissingExtraError("pyarrow", "arrow", "the data service") from cause
    return pa


def import_flight() -> Any:
    """Return pyarrow.flight, or say how to get it."""
    import_arrow()
    from pyarrow import flight

    return flight


class Server:
    """Answers calls from threads of its own until it is closed.

    Args:
        calls: Name to function, from JSON to JSON. A MonolithError that one raises reaches the caller.
        fetch: From JSON to an Arrow record batch.
        host: Only this machine by default.
        port: 0 lets the system choose.
        guard: What callers must present; None lets in everybody who can reach the port.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        fetch: Fetch | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: Guard | None = None,
    ) -> None:
        self.host = host
        _check_port(host, port)
        try:
            self._server = _make_server(calls, fetch, join_address(host, port), guard or NoGuard())
        except import_arrow().ArrowException as cause:
            raise _listen_error(host, port, None) from cause
        self.port = int(self._server.port)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def close(self) -> None:
        """Let the calls in progress finish, then free the port. Closing again does nothing."""
        self._server.shutdown()


def _make_server(calls: Mapping[str, Call], fetch: Fetch | None, address: str, guard: Guard) -> Any:
    arrow, flight = import_arrow(), import_flight()

    class Endpoint(flight.FlightServerBase):  # type: ignore[misc, name-defined]
        def do_action(self, context: Any, action: Any) -> Any:  # noqa: ARG002
            answer = _answer(calls, action.type, action.body.to_pybytes())
            return iter([flight.Result(json.dumps(answer).encode())])

        def do_get(self, context: Any, ticket: Any) -> Any:  # noqa: ARG002
            if fetch is None:
                raise flight.FlightServerError("there are no records to be had here")
            try:
                batch = fetch(json.loads(ticket.ticket))
            except Exception as error:  # whatever it is, the caller must hear of it
                _log.warning("could not send records: %s", error)
                raise flight.FlightServerError(f"{type(error).__name__}: {error}") from error
            return flight.RecordBatchStream(arrow.RecordBatchReader.from_batches(batch.schema, [batch]))

    return Endpoint(guard.flight_location(address), **guard.flight_server_options())


def _answer(calls: Mapping[str, Call], name: str, body: bytes) -> dict[str, Any]:
    try:
        if name not in calls:
            raise DataError(f"data service: there is no call {name!r}; there are {', '.join(calls)}")
        return {"answer": calls[name](json.loads(body))}
    except MonolithError as error:
        return {"error": type(error).__name__, "message": str(error)}


class Caller:
    """Makes calls to one address; makes a new connection when the old one fails. For one thread at a time.

    Args:
        guard: What to present; None where nothing is demanded.
        stop: Once set, a call that waits to try again raises StoppedError.
        patience: How long to go on trying an address where nobody answers.
    """

    def __init__(
        self,
        address: Address,
        *,
        guard: Guard | None = None,
        patience: timedelta = timedelta(),
        stop: threading.Event | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._flight = import_flight()
        self._address = address
        self._guard = guard or NoGuard()
        self._patience = patience.total_seconds()
        self._stop = threading.Event() if stop is None else stop
        self._clock = clock
        self._client: Any = None
        self._where = ""

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a call, which may have been made more than once.

        Raises:
            MonolithError: What the other side raised.
            ConfigError: It refused the token, or its certificate is not to be trusted.
            UnreachableError: Nobody answered for as long as there was patience.
            StoppedError: `stop` was set.
        """
        action = self._flight.Action(name, json.dumps(body).encode())
        (result,) = self._persist(lambda client, options: list(client.do_action(action, options)))
        answer = json.loads(result.body.to_pybytes())
        if "error" in answer:
            raise _ERRORS.get(answer["error"], DataError)(answer["message"])
        return dict(answer["answer"])

    def fetch(self, ticket: dict[str, Any]) -> Any:
        """Return the record batch that a ticket stands for; otherwise like `call`."""
        wanted = self._flight.Ticket(json.dumps(ticket).encode())
        return self._persist(lambda client, options: client.do_get(wanted, options).read_chunk().data)

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

    def _persist(self, make: Callable[[Any, Any], Any]) -> Any:
        flight = self._flight
        options = flight.FlightCallOptions(timeout=_ANSWER_WITHIN)
        # INTERNAL is what a call in progress may get when the other side is killed.
        gone = (
            flight.FlightUnavailableError,
            flight.FlightTimedOutError,
            flight.FlightCancelledError,
            flight.FlightInternalError,
            RetryableError,  # nobody knows where it is
        )
        give_up: float | None = None
        while True:
            if self._stop.is_set():
                raise StoppedError
            try:
                return make(self._connected(), options)
            except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as cause:
                raise ConfigError(
                    f"data service: {self._where} refused the shared token. Give dispatcher, data workers "
                    "and trainers the same one."
                ) from cause
            except gone as cause:
                self.close()
                why = self._why(cause)
                now = self._clock()
                if give_up is None:
                    give_up = now + self._patience
                    if self._patience > 0:
                        _log.warning("data service: %s; trying for %g s", why, self._patience)
                if now >= give_up:
                    raise UnreachableError(why) from cause
            except MonolithError:  # of whoever was asked for the address
                raise
            except (flight.FlightError, import_arrow().ArrowException, OSError) as cause:
                raise DataError(f"data service: {self._where} answered: {_first_line(cause)}") from cause
            self._stop.wait(_RETRY_AFTER)

    def _why(self, cause: Exception) -> str:
        """Say why a call did not get through; raise what waiting will not mend."""
        if isinstance(cause, RetryableError):
            return str(cause)
        said = _first_line(cause)
        for words, meaning in _MISTRUST.items():
            if words in said:
                raise ConfigError(
                    f"data service: {self._where} is not to be trusted: {meaning} ({said}). Give dispatcher, "
                    "data workers and trainers certificates of one authority, for the names they are "
                    "reached by."
                ) from cause
        # What a port with TLS does to callers without it, or with a certificate it does not know.
        hint = ", or it wants other certificates" if "Socket closed" in said else ""
        return f"nobody answers at {self._where}{hint}: {said}"

    def _connected(self) -> Any:
        if self._client is None:
            self._where = self._address if isinstance(self._address, str) else self._address()
            # A pool of its own, and quick to try again: the other side may be back in a moment.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
            self._client = self._flight.FlightClient(
                self._guard.flight_location(self._where),
                generic_options=options,
                **self._guard.flight_client_options(),
            )
        return self._client


def _first_line(cause: Exception) -> str:
    return str(cause).partition("\n")[0].partition(". Detail:")[0]


def join_address(host: str, port: int) -> str:
    """Return host:port; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _check_port(host: str, port: int) -> None:
    """Bind and let go again: Flight itself does not say why it cannot listen."""
    if not 0 <= port <= 65535:
        raise _listen_error(host, port, None)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            with suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server would
            probe.bind(address)
    except OSError as cause:
        raise _listen_error(host, port, cause) from cause


def _listen_error(host: str, port: int, cause: OSError | None) -> ListenError:
    number = None if cause is None else cause.errno
    why = {
        errno.EADDRINUSE: "the port is in use. Choose another, or 0 for any free one.",
        errno.EACCES: "this user may not listen there. Ports below 1024 need privileges; choose one above.",
        errno.EADDRNOTAVAIL: "that is not an address of this machine.",
    }
    reason = why.get(number or 0, f"{cause}." if cause else "a port is a free number from 0 to 65535.")
    error = ListenError(f"data service: cannot listen on {host}:{port}: {reason}")
    error.errno = number
    return error
