"""Joining streams: a record waits for what belongs to it."""

from monolith.data.join.joiner import Joiner, JoinerConfig
from monolith.data.join.source import JoinedSource
from monolith.data.join.store import JoinStore

__all__ = [
    "JoinStore",
    "JoinedSource",
    "Joiner",
    "JoinerConfig",
]
