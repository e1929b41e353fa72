"""How much this process has taught each server since a checkpoint, and would be lost with it."""

from __future__ import annotations

import threading

from monolith.store import ServerGroup


class PushCounts:
    """Pushes that each place has acknowledged here, counted from halts. Thread-safe."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._lock = threading.Lock()  # guards what follows
        self._marks: dict[int, list[int]] = {0: [0] * len(group)}
        """Halt -> what each place had acknowledged then; 0 for the beginning."""

    def mark(self, halt: int) -> None:
        """Note a halt, when every push is acknowledged."""
        with self._lock:
            self._marks[halt] = list(self._group.acknowledged)

    def forget_before(self, halt: int) -> None:
        """Nobody goes back further than this halt, which was saved."""
        with self._lock:
            if halt in self._marks:
                self._marks = {at: counts for at, counts in self._marks.items() if at >= halt}

    def take_lost(self, server: int, halt: int) -> int:
        """Return the pushes since a halt that were lost with a server; its successor's count from now on."""
        with self._lock:
            now = self._group.acknowledged[server]
            before = max((at for at in self._marks if at <= halt), default=min(self._marks))
            lost = now - self._marks[before][server]
            for counts in self._marks.values():
                counts[server] = now
            return lost
