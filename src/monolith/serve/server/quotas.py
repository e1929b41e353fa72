"""Quotas: how much the requests in flight may hold, all together and those of one peer.

A request is admitted when its headers have come. The bytes that it holds are counted as they come, until it
is answered. JSON counts for more than its length: a list of short numbers takes ten times its text in
memory. So a few large requests cannot take all memory, and one peer cannot take all places.

    with quotas.admit("10.0.0.7") as held:
        held.add(len(body))

Quotas are per process: with --processes 4, each has its own.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from monolith.errors import OverloadedError, UnavailableError
from monolith.serve.server.config import ServeLimits

JSON_COST = 16
"""Bytes of memory that a byte of JSON, or of typed gRPC contents, is counted as. Measured: up to 11 for
numbers and keys; brackets would take up to 39, and `JsonReader` bounds how many there are."""


class Quotas:
    """Counts what requests in flight hold. Thread-safe.

    A peer is an address, without the port; "" is a process of this server, which has no quota.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._most_bytes = limits.bytes_in_flight
        self._most_requests = limits.peer_requests
        self._lock = threading.Lock()  # guards the two below
        self._bytes = 0
        self._requests: dict[str, int] = {}

    def admit(self, peer: str) -> Held:
        """Admit a request, until what is returned is closed.

        Raises:
            OverloadedError: Too many requests of the peer are in flight.
        """
        if peer:
            with self._lock:
                count = self._requests.get(peer, 0)
                if count >= self._most_requests:
                    raise OverloadedError(
                        f"{count} requests of {peer} are in flight, which are the most of one peer "
                        "(--max-peer-requests). Retry later."
                    )
                self._requests[peer] = count + 1
        return Held(self, peer)

    def hold(self, count: int) -> None:
        with self._lock:
            if self._bytes + count > self._most_bytes:
                raise UnavailableError(
                    f"requests in flight hold {self._bytes} bytes of {self._most_bytes} "
                    f"(--max-bytes-in-flight), and this one needs {count} more. Retry later."
                )
            self._bytes += count

    def release(self, peer: str, count: int) -> None:
        with self._lock:
            self._bytes -= count
            if peer:
                left = self._requests[peer] - 1
                if left:
                    self._requests[peer] = left
                else:
                    del self._requests[peer]


class Held:
    """What one request holds. Used by one thread at a time."""

    __slots__ = ("_bytes", "_peer", "_quotas")

    def __init__(self, quotas: Quotas, peer: str) -> None:
        self._quotas = quotas
        self._peer = peer
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            UnavailableError: All requests together would hold more than is allowed.
        """
        self._quotas.hold(count)
        self._bytes += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quotas.release(self._peer, self._bytes)
