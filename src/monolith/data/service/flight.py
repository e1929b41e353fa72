"""The data service's calls over Arrow Flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from monolith.errors import ConfigError, DataError, RestoreError
from monolith.wire import flight
from monolith.wire.flight import POLL, Address, Clock, PortGuard, Service, StoppedError
from monolith.wire.flight_server import Fetch, Handlers, Server
from monolith.wire.messages import Call
from monolith.wire.ports import Limits, join_address

__all__ = [
    "POLL",
    "Address",
    "Call",
    "Clock",
    "DataCaller",
    "DataServer",
    "PortGuard",
    "StoppedError",
    "UnreachableError",
    "import_arrow",
    "join_address",
]


class UnreachableError(DataError):
    """Nobody answers at an address. Never leaves the service as such: callers say what they wanted."""


SERVICE = Service(
    name="data service",
    peers="dispatcher, data workers and trainers (--token-file, or security.token_file of a run)",
    failure=DataError,
    told=(RestoreError, ConfigError, DataError),
    unreachable=UnreachableError,
    late=UnreachableError,
)


def import_arrow() -> Any:
    """Return pyarrow, or say how to get it."""
    return flight.import_arrow("the data service")


class DataServer(Server):
    """Answers calls of the data service."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        fetch: Fetch | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        guard: PortGuard | None = None,
        limits: Limits | None = None,
    ) -> None:
        handlers = Handlers(calls=calls, fetch=fetch)
        super().__init__(SERVICE, handlers, host=host, port=port, guard=guard, limits=limits)


class DataCaller(flight.Caller):
    """Makes calls to a dispatcher or a data worker."""

    def __init__(
        self,
        address: Address,
        *,
        guard: PortGuard | None = None,
        patience: timedelta = timedelta(),
        stop: threading.Event | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(SERVICE, address, guard=guard, patience=patience, stop=stop, clock=clock)
