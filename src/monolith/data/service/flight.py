"""Calls over Arrow Flight: small ones as JSON, records as Arrow batches, behind a shared token.

Only here is pyarrow's Flight spoken. It is an optional package, so it is imported when a
server or a client is made.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from monolith.errors import (
    ConfigError,
    DataError,
    ListenError,
    MissingExtraError,
    MonolithError,
    RestoreError,
)

Address = str | Callable[[], str]
"""host:port, or whom to ask for it, whenever a connection is made."""
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
        token: What callers must present; None lets in everybody who can reach the port.

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
        token: str | None = None,
    ) -> None:
        self.host = host
        _check_port(host, port)
        try:
            self._server = _make_server(calls, fetch, host, port, token)
        except import_arrow().ArrowException as cause:
            raise _listen_error(host, port, None) from cause
        self.port = int(self._server.port)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        """Let the calls in progress finish, then free the port. Closing again does nothing."""
        self._server.shutdown()


def _make_server(
    calls: Mapping[str, Call], fetch: Fetch | None, host: str, port: int, token: str | None
) -> Any:
    arrow, flight = import_arrow(), import_flight()

    class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc, name-defined]
        def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:  # noqa: ARG002
            given = "".join(headers.get("authorization", []))
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise flight.FlightUnauthenticatedError("the shared token is missing or wrong")

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

    middleware = {"token": TokenCheck()} if token is not None else {}
    return Endpoint(f"grpc://{_bracketed(host)}:{port}", middleware=middleware)


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
        stop: Once set, a call that waits to try again raises StoppedError.
        patience: How long to go on trying an address where nobody answers.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str | None = None,
        patience: timedelta = timedelta(),
        stop: threading.Event | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._flight = import_flight()
        self._address = address
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._patience = patience.total_seconds()
        self._stop = threading.Event() if stop is None else stop
        self._clock = clock
        self._client: Any = None
        self._where = ""

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a call, which may have been made more than once.

        Raises:
            MonolithError: What the other side raised.
            ConfigError: It refused the token.
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
        options = flight.FlightCallOptions(timeout=_ANSWER_WITHIN, headers=self._headers)
        # INTERNAL is what a call in progress may get when the other side is killed.
        gone = (
            flight.FlightUnavailableError,
            flight.FlightTimedOutError,
            flight.FlightCancelledError,
            flight.FlightInternalError,
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
                now = self._clock()
                give_up = now + self._patience if give_up is None else give_up
                if now >= give_up:
                    raise UnreachableError(
                        f"nobody answers at {self._where}: {_first_line(cause)}"
                    ) from cause
            except (flight.FlightError, import_arrow().ArrowException, OSError) as cause:
                raise DataError(f"data service: {self._where} answered: {_first_line(cause)}") from cause
            self._stop.wait(_RETRY_AFTER)

    def _connected(self) -> Any:
        if self._client is None:
            self._where = self._address if isinstance(self._address, str) else self._address()
            # A pool of its own, and quick to try again: the other side may be back in a moment.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
            self._client = self._flight.FlightClient(f"grpc://{self._where}", generic_options=options)
        return self._client


def _first_line(cause: Exception) -> str:
    return str(cause).partition("\n")[0].partition(". Detail:")[0]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


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
