"""Traffic: the bytes of messages that came and went, for whoever watches a process."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes of messages, without what Flight and the network add to them."""

    received: int = 0
    sent: int = 0


class TrafficMeter:
    """Counts what all connections of a server, or of a group of callers, have carried. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._received = self._sent = 0

    def count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self._received += received
            self._sent += sent

    def total(self) -> Traffic:
        with self._lock:
            return Traffic(self._received, self._sent)
