"""Transport: moves the messages of callers and servers, and knows nothing of their meaning.

`Caller`, `CallStream` and `Server` are written on this seam. `FlightTransport` (in `flight_transport`)
implements it over Arrow Flight; `monolith.testing` implements it in memory, with delays, partitions and lost
connections.

A message is a header (JSON, or bytes of the service's own) with bulk bytes after it. A connection carries
three kinds of exchanges: a *call* (one small message each way), a *fetch* (a ticket, then an Arrow record
batch), and a *stream* (request, answer, request, answer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from monolith.errors import MonolithError
from monolith.wire.bulk import Bytes
from monolith.wire.proof import CallerProof


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


Failure = Literal[
    "unreachable", "late", "closed", "unproved", "no_proof_asked", "refused_token", "foreign", "other"
]


class TransportError(Exception):
    """A message was not delivered, or its answer did not arrive; it may have been received nevertheless.

    Args:
        kind: *unreachable*: nothing answers at the address, or the connection broke. *late*: the time is up.
            *closed*: the server closed the stream. *unproved*: the process that answers has not proved that
            it has the token; *no_proof_asked*: it asks callers for none. *refused_token*: it refused ours.
            *foreign*: it sent no answer, or one that is not of this protocol. *other*: it failed, in words of
            the transport.
        said: One line: what the transport reported.
    """

    def __init__(self, kind: Failure, said: str) -> None:
        super().__init__(said)
        self.kind: Failure = kind


class StreamEnd(Protocol):
    """The caller's end of one stream."""

    def write(self, header: bytes, data: Any) -> int:
        """Send a message and return its size in bytes; `data` must not change until the next message is
        read."""

    def read(self) -> tuple[bytes, Bytes]:
        """Wait for the next message."""

    def cancel(self) -> None:
        """End a `read` that waits, with an error. Callable from any thread."""

    def close(self) -> None:
        """End the stream without waiting for the server. Never raises."""


class Connection(Protocol):
    """The caller's end of a connection. For one thread at a time. Every method raises TransportError."""

    has_proof: bool
    """Whether the server must prove that it has the token."""

    def call(self, name: str, body: bytes, timeout: float) -> bytes: ...

    def knock(self, timeout: float) -> None:
        """Prove the token in both directions, before a large message is sent."""

    def fetch(self, ticket: bytes, timeout: float) -> tuple[bytes | None, Any]:
        """Return an answer in place of records, or None and a record batch."""

    def open_stream(self) -> StreamEnd: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """An open port."""

    @property
    def port(self) -> int: ...

    def close_strangers(self) -> None:
        """Close connections that no admitted call has used: a shutdown would wait for a call half sent."""

    def shutdown(self) -> None:
        """Close the port and wait until the calls in progress have ended."""
