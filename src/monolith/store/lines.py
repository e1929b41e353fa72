"""Lines: connections to servers, each used by one thread at a time, kept for a while for the next.

A line for bulk has a stream on it once somebody has greeted the server. A thread of its own cuts off answers
that are late, and closes lines that nobody uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from monolith.wire.flight import Caller, CallStream

Kind = Literal["bulk", "held", "small"]
"""What goes over a line: streams, calls about what a server holds, other calls."""
Connect = Callable[[int, Kind, bool], Caller]
"""From a server, a kind and whether to hurry to a caller, which connects when it is used."""

_IDLE = 2.0
"""Seconds after which a line that nobody uses is closed: a server that wants to end waits for it."""


@dataclass(slots=True, eq=False)
class ServerLine:
    """A connection, used by one thread at a time."""

    server: int
    kind: Kind
    caller: Caller
    stream: CallStream | None = None
    deadline: float | None = None
    """When an answer is too late; None while none is awaited."""
    limit: float = 0.0
    """Seconds from the request to that moment."""
    idle_since: float = 0.0
    dropped: bool = False
    """Whether it leads to where the server no longer is."""

    @property
    def is_broken(self) -> bool:
        return self.dropped or (self.stream is not None and self.stream.broken)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.caller.close()


@dataclass(slots=True)
class _Held:
    idle: dict[tuple[int, Kind], list[ServerLine]] = field(default_factory=dict)
    busy: set[ServerLine] = field(default_factory=set)
    keeper: threading.Thread | None = None


class ServerLines:
    """All lines of a group. Thread-safe.

    Args:
        connect: Makes a caller for a new line.
        shortest: The shortest limit that `ServerLine.limit` will have, in seconds.
        stop: Set when the lines are closed.
    """

    def __init__(self, connect: Connect, shortest: float, stop: threading.Event) -> None:
        self._connect = connect
        self._look_every = min(shortest, _IDLE) / 4
        self._stop = stop
        self._lock = threading.Lock()  # guards _held, and deadline and dropped of lines
        self._held = _Held()

    def take(self, server: int, kind: Kind, *, hurry: bool = False) -> ServerLine:
        """Return a line that nobody uses, or a new one."""
        with self._lock:
            if self._held.keeper is None:
                self._held.keeper = threading.Thread(target=self._keep, name="server-lines", daemon=True)
                self._held.keeper.start()
            idle = self._held.idle.get((server, kind))
            line = idle.pop() if idle else ServerLine(server, kind, self._connect(server, kind, hurry))
            self._held.busy.add(line)
            return line

    def give_back(self, line: ServerLine) -> None:
        closed: list[ServerLine] = []
        with self._lock:
            self._held.busy.discard(line)
            line.deadline = None
            line.idle_since = time.monotonic()
            idle = self._held.idle.setdefault((line.server, line.kind), [])
            if line.dropped:
                closed = [line]
            elif line.is_broken:
                closed, idle[:] = [line, *idle], []  # the others go the same way, most likely
            elif self._stop.is_set() or (line.kind == "bulk" and line.stream is None):
                closed = [line]
            else:
                idle.append(line)
        for one in closed:
            one.close()

    def await_answer(self, line: ServerLine, limit: float) -> bool:
        """Cut the line off if no answer was received so many seconds from now; False if it was dropped."""
        with self._lock:
            line.limit = limit
            line.deadline = time.monotonic() + limit
            return not line.dropped

    def answered(self, line: ServerLine) -> None:
        line.deadline = None

    def drop(self, server: int | None, why: str) -> None:
        """Close the lines of a server, or of all, and cut off those in use."""
        with self._lock:
            closed = self._take_idle(lambda whose, _: server in (None, whose))
            for line in self._held.busy:
                if server in (None, line.server):
                    line.dropped = True
                    if line.stream is not None:
                        line.stream.cancel(why)
        for line in closed:
            line.close()

    def drop_idle(self, kind: Kind) -> None:
        """Close what nobody uses of a kind."""
        with self._lock:
            closed = self._take_idle(lambda _, found: found == kind)
        for line in closed:
            line.close()

    def _take_idle(self, which: Callable[[int, Kind], bool]) -> list[ServerLine]:
        """Take lines that nobody uses. The lock is held."""
        found = [line for key, lines in self._held.idle.items() if which(*key) for line in lines]
        self._held.idle = {key: lines for key, lines in self._held.idle.items() if not which(*key)}
        return found

    def close(self) -> None:
        """Let go of all; whoever waits hears of it. `stop` is set before. Closing again does nothing."""
        self.drop(None, "the connections were closed")
        with self._lock:
            keeper = self._held.keeper
        if keeper is not None:
            keeper.join()

    def _keep(self) -> None:
        while not self._stop.wait(self._look_every):
            now = time.monotonic()
            with self._lock:
                for line in self._held.busy:
                    if line.deadline is not None and now >= line.deadline and line.stream is not None:
                        line.stream.cancel(f"no answer in {line.limit:g} s")
                        line.deadline = None
                unused = [
                    line
                    for lines in self._held.idle.values()
                    for line in lines
                    if now - line.idle_since >= _IDLE
                ]
                for lines in self._held.idle.values():
                    lines[:] = [line for line in lines if line not in unused]
            for line in unused:
                line.close()
