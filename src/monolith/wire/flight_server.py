"""Calls between processes, the server's side: handlers behind a port with credentials and limits.

    server = Server(SERVICE, Handlers(calls={"join": self._join}), host=host, guard=guard)

`Endpoint` decides what to answer and never raises, the listener of a transport only moves messages, and a
`ConnectionGuard` closes connections whose calls are never admitted. `flight` is the client's side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from monolith.concurrency import Event, Thread
from monolith.wire.bulk import Bytes, Traffic
from monolith.wire.endpoint import Endpoint, Exchange, Handlers
from monolith.wire.flight_transport import transport
from monolith.wire.messages import read_message
from monolith.wire.ports import Limits, join_address
from monolith.wire.transport import NoGuard, PortGuard, Service

B = TypeVar("B")

_LINGER = 10.0
"""Seconds that a closing server with streams waits for the requests in progress."""
_FREE_PORT = 0.5
"""Seconds that it then waits for callers to close their streams. The port is free before that."""


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
        self._closing = Event()
        self._endpoint = Endpoint(service, handlers, self._closing, limits or Limits())
        self._server = transport().listen(self._endpoint, host, port, guard or NoGuard())
        self.port = self._server.port

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
        self._server.close_strangers()
        if not self._endpoint.has_streams:
            self._server.shutdown()
            return
        ending = Thread(target=self._server.shutdown, name="flight-shutdown", daemon=True)
        ending.start()
        self._endpoint.answering.wait_until_none(_LINGER)
        ending.join(_FREE_PORT)
