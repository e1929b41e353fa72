"""How much this process has taught each server since a checkpoint, and would be lost with it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from monolith.store import ServerGroup
from monolith.train.fleet.bodies import Served


class PushCounts:
    """Pushes that each place has acknowledged here, counted from halts. Thread-safe."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._lock = threading.Lock()  # guards what follows
        self._marks: dict[int, list[int]] = {0: [0] * len(group)}
        """Halt -> what each place had acknowledged then; 0 for the beginning."""
        self._since = [0] * len(group)
        """What each place had acknowledged when it was replaced last."""

    def mark(self, halt: int) -> None:
        """Note a halt, when every push is acknowledged."""
        with self._lock:
            self._marks[halt] = list(self._group.acknowledged)

    def forget_before(self, halt: int) -> None:
        """Nobody goes back further than this halt, which was saved."""
        with self._lock:
            if halt in self._marks:
                self._marks = {at: counts for at, counts in self._marks.items() if at >= halt}

    def take_lost_with(self, server: int, served: Served) -> int:
        """Return the pushes that were lost when somebody else came to serve a place, and count anew."""
        if served.applied is None:
            return self.take_lost(server, served.halt)
        return self.take_behind(server, served.applied)

    def take_lost(self, server: int, halt: int) -> int:
        """Return the pushes since a halt that were lost with a server; its successor's count from now on."""
        with self._lock:
            now = self._group.acknowledged[server]
            before = max((at for at in self._marks if at <= halt), default=min(self._marks))
            lost = now - self._marks[before][server]
            for counts in self._marks.values():
                counts[server] = now
            self._since[server] = now
            return lost

    def take_behind(self, server: int, applied: Mapping[str, int]) -> int:
        """Return the pushes that were lost with a server whose standby took over.

        Args:
            applied: Sender to how many of its pushes the standby has.
        """
        with self._lock:
            now = self._group.acknowledged[server]
            lost = max(0, now - applied.get(self._group.sender, self._since[server]))
            for counts in self._marks.values():  # what is lost with the standby, later, is none of these
                counts[server] += lost
            self._since[server] = now
            return lost
