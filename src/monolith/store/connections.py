"""Connections to parameter servers: each is used by one thread at a time, then reused for a while.

    take ──► busy ──► give_back ──► idle ──► closed after 2 s without use
               └─ late, or the server was replaced ──► stream cancelled ──► closed by give_back

A bulk connection has a stream once the server was greeted. A background thread cancels streams whose answer
is late and closes connections that are idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from monolith import concurrency
from monolith.wire.flight import Caller, CallStream

Kind = Literal["bulk", "stateful", "small"]
"""What a connection carries: streams of rows and weights, calls about a server's state, other calls."""
Connect = Callable[[int, Kind, bool], Caller]
"""From a server, a kind and whether this is a retry to a caller, which connects when it is first used."""

_IDLE = 2.0
"""Seconds after which an idle connection is closed: a server that shuts down waits for its connections."""


@dataclass(slots=True, eq=False)
class ServerConnection:
    """One connection, used by one thread at a time."""

    server: int
    kind: Kind
    caller: Caller
    stream: CallStream | None = None
    deadline: float | None = None
    """When an answer is late; None while none is awaited."""
    limit: float = 0.0
    """Seconds from the request to the deadline."""
    idle_since: float = 0.0
    dropped: bool = False
    """Whether the server was replaced since the connection was made."""

    @property
    def is_broken(self) -> bool:
        return self.dropped or (self.stream is not None and self.stream.broken)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.caller.close()


class ConnectionPool:
    """All connections of a `ServerGroup`. Thread-safe.

    Args:
        connect: Makes the caller of a new connection.
        shortest: The shortest limit that `await_answer` will be given, in seconds.
        stop: Set before the pool is closed.
    """

    def __init__(self, connect: Connect, shortest: float, stop: concurrency.Event) -> None:
        self._connect = connect
        self._check_every = min(shortest, _IDLE) / 4
        self._stop = stop
        # Guards the three fields below, and `deadline` and `dropped` of every connection. Connections are
        # closed after it was released, because closing may wait for the network.
        self._lock = concurrency.Lock()
        self._idle: dict[tuple[int, Kind], list[ServerConnection]] = {}
        self._busy: set[ServerConnection] = set()
        self._thread: concurrency.Thread | None = None

    def take(self, server: int, kind: Kind, *, retry: bool = False) -> ServerConnection:
        """Return an idle connection, or a new one."""
        with self._lock:
            if self._thread is None:
                self._thread = concurrency.Thread(target=self._watch, name="server-connections", daemon=True)
                self._thread.start()
            idle = self._idle.get((server, kind))
            if idle:
                connection = idle.pop()
            else:
                connection = ServerConnection(server, kind, self._connect(server, kind, retry))
            self._busy.add(connection)
            return connection

    def give_back(self, connection: ServerConnection) -> None:
        closed: list[ServerConnection] = []
        with self._lock:
            self._busy.discard(connection)
            connection.deadline = None
            connection.idle_since = concurrency.monotonic()
            idle = self._idle.setdefault((connection.server, connection.kind), [])
            unused = self._stop.is_set() or (connection.kind == "bulk" and connection.stream is None)
            if connection.dropped or (unused and not connection.is_broken):
                closed = [connection]
            elif connection.is_broken:
                # If one connection to a server broke, its idle ones most likely did, too.
                closed, idle[:] = [connection, *idle], []
            else:
                idle.append(connection)
        for one in closed:
            one.close()

    def await_answer(self, connection: ServerConnection, limit: float) -> bool:
        """Cancel the stream unless `answered` is called within `limit` seconds; False if it was dropped."""
        with self._lock:
            connection.limit = limit
            connection.deadline = concurrency.monotonic() + limit
            return not connection.dropped

    def answered(self, connection: ServerConnection) -> None:
        with self._lock:  # `_watch` compares the deadline under it, and cancels the stream
            connection.deadline = None

    def drop(self, server: int | None, why: str) -> None:
        """Close the connections of a server, or of all, and cancel the streams of busy ones."""
        with self._lock:
            closed = self._take_idle(lambda owner, _: server in (None, owner))
            for connection in self._busy:
                if server in (None, connection.server):
                    connection.dropped = True
                    if connection.stream is not None:
                        connection.stream.cancel(why)
        for connection in closed:
            connection.close()

    def drop_idle(self, kind: Kind) -> None:
        """Close the idle connections of a kind."""
        with self._lock:
            closed = self._take_idle(lambda _, found: found == kind)
        for connection in closed:
            connection.close()

    def _take_idle(self, which: Callable[[int, Kind], bool]) -> list[ServerConnection]:
        # The caller holds the lock.
        found = [one for key, idle in self._idle.items() if which(*key) for one in idle]
        self._idle = {key: idle for key, idle in self._idle.items() if not which(*key)}
        return found

    def close(self) -> None:
        """Close all connections; requests that wait fail. Closing again does nothing."""
        self.drop(None, "the connections were closed")
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        """Cancel late streams and close idle connections, until `stop` is set."""
        while not self._stop.wait(self._check_every):
            now = concurrency.monotonic()
            with self._lock:
                for busy in self._busy:
                    if busy.deadline is not None and now >= busy.deadline and busy.stream is not None:
                        busy.stream.cancel(f"no answer in {busy.limit:g} s")
                        busy.deadline = None
                expired = [
                    one for idle in self._idle.values() for one in idle if now - one.idle_since >= _IDLE
                ]
                for idle in self._idle.values():
                    idle[:] = [one for one in idle if one not in expired]
            for connection in expired:
                connection.close()
