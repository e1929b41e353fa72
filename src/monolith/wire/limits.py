"""Limits: what one message, one request and one caller may ask of a server.

A server is reached by whoever reaches its port. Before it works on anything it compares what
came with these numbers, so that neither a mistake nor malice costs more than they allow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta

from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one message, one request and one caller may ask of a server of this run."""

    call_bytes: int = 64 << 20
    """The largest small call that a server reads: JSON, such as a worker's position in its data."""
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
    stranger_bytes: int = 1 << 20
    """The most bytes that a connection may send before one of its calls has shown the token."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value <= (timedelta(0) if name == "wait" else 0):
                raise ConfigError(f"limits.{name} must be more than 0, got {value}")
