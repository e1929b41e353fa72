"""Limits: what one message, one request, one caller and one connection may ask of a server.

Any program that reaches a port can send to it. Before a server works on anything it compares what
came with these numbers, so that neither a mistake nor malice costs more than they allow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import timedelta

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one message, one request and one caller may ask of a server of this run."""

    call_bytes: int = 16 << 20
    """The largest JSON call among processes of a run, such as a worker's position in its data. Parsed, JSON
    takes up to 30 times its size."""
    read_call_bytes: int = 1 << 20
    """The largest JSON call to a port that is read from only: the delta port, that of a serving server."""
    calls_bytes: int = 32 << 20
    """The most bytes of JSON calls that a server works on at a time; other callers retry later."""
    message_bytes: int = 2 << 30
    """The largest bulk message that a server works on: ids, gradients or weights."""
    ids: int = 1 << 26
    """The most ids of one request to a parameter server."""
    wait: timedelta = timedelta(seconds=30)
    """The longest that a server keeps one call waiting, whatever the caller asks for."""
    calls: int = 4096
    """The most small calls that a server works on, or keeps waiting, at a time."""
    saves: int = 4
    """The most callers of a control server that wait for a checkpoint at a time; others ask again."""
    streams: int = 1024
    """The most streams of bulk messages that a server keeps open at a time; each takes a thread."""
    peer_streams: int = 256
    """The most streams of one peer address."""
    stranger_bytes: int = 1 << 20
    """The most bytes that a connection may send before one of its calls has proved the token."""
    admit_within: timedelta = timedelta(seconds=10)
    """How long a connection may stay open before one of its calls was admitted."""
    connections: int = 4096
    """The most connections of a port; never more than a quarter of the files that the process may open."""
    peer_connections: int = 1024
    """The most connections of one peer address to a port."""

    def for_readers(self) -> Limits:
        """Return the limits of a port that is read from only, by processes that may not control the run."""
        return replace(self, call_bytes=min(self.call_bytes, self.read_call_bytes))

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value <= (timedelta(0) if isinstance(value, timedelta) else 0):
                raise ConfigError(f"limits.{name} must be more than 0, got {value}")
