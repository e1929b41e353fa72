"""The doorkeeper of a port: bounds its connections, and closes those that never make an admitted call.

gRPC reads a call to its end before a server can ask for a token, keeps silent connections for good, and
Flight has no settings for either: a call of 600 MB without a token is in memory, three times over, when it
is refused, and 1,200 silent connections use up the files of a process. So connections are watched from the
side. Until one of its calls was admitted, a connection is a stranger. It is closed

- when it has sent more bytes than `Limits.stranger_bytes`; the system counts them,
- when it has been one for `Limits.admit_within`,
- when the port has more connections than `Limits.connections`, or its peer more than
  `Limits.peer_connections`: the oldest strangers first, since a caller of ours is one for milliseconds, then
  the newest of all.

Connections are found among the open files of the process and looked at by gRPC's own file numbers, so that
to watch one costs no file. Only Linux tells. Elsewhere no connection is watched.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

from monolith.wire.limits import Limits

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.02
"""Seconds: what the fastest stranger sends in that time is what he can make a server hold."""
_SAY_EVERY = 1.0
"""Seconds between two lines about closed connections."""
_FORGET_AFTER = 5.0
"""Seconds after which a peer that was admitted and has no connection is forgotten."""
_TCP_INFO_BYTES = 136
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in the kernel's struct tcp_info

_Peer = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    number: int
    """gRPC's file number. gRPC may close it at any moment, and another file may then have the number."""
    inode: int
    """Tells whether the number is still of this connection."""
    peer: _Peer
    since: float
    admitted: bool = False


class Doorkeeper:
    """Watches the connections to one port of this process until it is closed. Thread-safe.

    Args:
        bounds_bytes: Whether strangers may send no more than `limits.stranger_bytes`; for ports with a token
            that read messages of any size.
        every: Seconds between two looks. A look costs about a microsecond for each open file.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        port: int,
        limits: Limits,
        *,
        bounds_bytes: bool = True,
        every: float = LOOK_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._limits = limits
        # A quarter of the files at most: a process has several ports, and saving and tables need files.
        self._most = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._most_bytes = limits.stranger_bytes if bounds_bytes else None
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()  # guards _admitted
        self._admitted: dict[str, tuple[_Peer, float]] = {}
        """Peer as gRPC names it -> its address, and when it was admitted."""
        self._connections: dict[int, _Connection] = {}
        """By file number, in the order in which they came."""
        self._seen: dict[int, int] = {}
        """File number -> inode of what has been looked at."""
        self._closed: Counter[str] = Counter()
        """Why connections were closed since the last line about it."""
        self._say_at = self._tidy_at = clock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="doorkeeper", daemon=True)
        # Files of our own from the start: connections are closed when the process has no file left, too.
        self._null = self._handle = -1
        if sys.platform == "linux":
            self._null = os.open(os.devnull, os.O_RDONLY)
            self._handle = os.dup(self._null)
            self._thread.start()

    def admit(self, peer: str) -> None:
        """Let a peer, as gRPC names it, stay and send what it likes: one of its calls was admitted."""
        if peer in self._admitted:  # each call comes here
            return
        host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
        if port.isdecimal():
            with self._lock:
                self._admitted[peer] = ((_plain(host), int(port)), self._clock())

    def close(self) -> None:
        """Close the connections of strangers, and watch no more. Closing again does nothing.

        A server waits for calls in progress when it shuts down, also for one that is half sent.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._null < 0:
            return
        with suppress(OSError):
            self.look()
            for one in [one for one in self._connections.values() if not one.admitted]:
                self._hang_up(one)
        for number in (self._null, self._handle):
            os.close(number)
        self._null = self._handle = -1

    def _watch(self) -> None:
        while not self._closing.wait(self._every):
            with suppress(OSError):  # a file that was closed while we looked
                self.look()

    def look(self) -> None:
        """Look at all connections once, and close those that must be. The thread does this."""
        now = self._clock()
        numbers = _open_files()
        for number in self._seen.keys() - numbers:
            self._forget(number)
        for number in numbers:
            try:
                about = os.fstat(number)
            except OSError:
                continue
            if self._seen.get(number) != about.st_ino:
                self._forget(number)
                self._seen[number] = about.st_ino
                if stat.S_ISSOCK(about.st_mode):
                    self._meet(number, about.st_ino, now)
        with self._lock:
            guests = {peer for peer, _ in self._admitted.values()}
        for one in list(self._connections.values()):
            one.admitted = one.admitted or one.peer in guests
            if not one.admitted:
                self._judge(one, now)
        self._bound()
        if now >= self._tidy_at:
            self._tidy_at = now + _SAY_EVERY
            self._tidy(now)
        if self._closed and now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            self._say()

    def _meet(self, number: int, inode: int, now: float) -> None:
        """Note a connection to our port that was not there before."""
        with suppress(OSError, ValueError), _borrowed(number) as line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getsockname()[1] == self._port:
                host, port = line.getpeername()[:2]
                if os.fstat(number).st_ino == inode:
                    self._connections[number] = _Connection(number, inode, (_plain(host), port), now)

    def _judge(self, one: _Connection, now: float) -> None:
        """Close a stranger that has sent too much, or was one for too long."""
        waited = self._limits.admit_within.total_seconds()
        if now - one.since > waited:
            self._hang_up(one, f"without an admitted call in {waited:g} s (limits.admit_within)")
        elif self._most_bytes is not None:
            try:
                with _borrowed(one.number) as line:
                    about = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                (received,) = _RECEIVED.unpack(about)
            except (OSError, struct.error):
                return
            # If the number is of another file by now, so is the count: `_hang_up` looks again.
            if received > self._most_bytes:
                self._hang_up(
                    one,
                    f"that sent more than {self._most_bytes:,} bytes and no token (limits.stranger_bytes)",
                )

    def _bound(self) -> None:
        """Close what is more than the port, or one peer, may have."""
        hosts = Counter(one.peer[0] for one in self._connections.values())
        for host, count in hosts.items():
            if count > self._limits.peer_connections:
                here = [one for one in self._connections.values() if one.peer[0] == host]
                for one in _first_to_go(here)[: count - self._limits.peer_connections]:
                    self._hang_up(one, "of a peer with too many (limits.peer_connections)")
        if (over := len(self._connections) - self._most) > 0:
            for one in _first_to_go(self._connections.values())[:over]:
                self._hang_up(one, "beyond what the port may have (limits.connections)")

    def _hang_up(self, one: _Connection, why: str = "") -> None:
        """Shut a connection down; gRPC then closes it. By a handle of our own, which cannot become another
        file between the look at its inode and the shutdown."""
        self._connections.pop(one.number, None)
        try:
            os.dup2(one.number, self._handle, inheritable=False)
            if os.fstat(self._handle).st_ino == one.inode:
                with _borrowed(self._handle) as line:
                    line.shutdown(socket.SHUT_RDWR)
                if why:
                    self._closed[why] += 1
        except OSError:  # it was closed by its peer, or by gRPC
            return
        finally:
            os.dup2(self._null, self._handle, inheritable=False)

    def _tidy(self, now: float) -> None:
        """Forget peers that were admitted and are gone."""
        present = {one.peer for one in self._connections.values()}
        with self._lock:
            self._admitted = {
                name: (peer, at)
                for name, (peer, at) in self._admitted.items()
                if peer in present or now - at < _FORGET_AFTER
            }

    def _say(self) -> None:
        reasons = "; ".join(f"{count:,} {why}" for why, count in self._closed.items())
        self._closed.clear()
        _log.warning("port %d: closed connections: %s", self._port, reasons)

    def _forget(self, number: int) -> None:
        """Forget what had a file number before."""
        self._seen.pop(number, None)
        one = self._connections.pop(number, None)
        if one is not None and one.admitted:
            with self._lock:
                self._admitted = {
                    name: found for name, found in self._admitted.items() if found[0] != one.peer
                }


def _first_to_go(connections: Iterable[_Connection]) -> list[_Connection]:
    """Return strangers, oldest first, then those with an admitted call, newest first."""
    found = list(connections)
    strangers = [one for one in found if not one.admitted]
    return strangers + [one for one in reversed(found) if one.admitted]


def _open_files() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208  often
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    # To list them takes a file, and there is none left: nearly all numbers are then in use.
    return set(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)))


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Use a file as a socket, and leave it open."""
    line = socket.socket(fileno=number)
    try:
        yield line
    finally:
        line.detach()


def _plain(host: str) -> str:
    """Return an address in one spelling: gRPC and the system differ on one of IPv4 inside of IPv6."""
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:")
