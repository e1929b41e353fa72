"""A doorkeeper: hangs up on connections that send much and show nothing.

gRPC reads a call to its end before anybody can ask who sent it, and Flight lets nobody tell it how long a
call may be: a stranger's call of 600 MB is in memory, three times over, when its token is found missing.
So connections are watched from the side. One that has sent more than a stranger may, while none of its calls
was let in, is shut down, and gRPC lets go of what it had read. How much that is, the system counts.

Only Linux tells. Elsewhere nobody is watched.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.02
"""Seconds: what the fastest stranger sends in that time is what he can make a server hold."""
_TCP_INFO_BYTES = 136
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in the kernel's struct tcp_info

_Peer = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    peer: _Peer
    line: socket.socket
    """A handle of our own: gRPC's may be closed, and its number be another file, at any moment."""


class Doorkeeper:
    """Watches the connections to one port of this process until it is closed. Thread-safe.

    Args:
        most: Bytes that a connection may send before one of its calls is let in.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port = port
        self._most = most
        self._lock = threading.Lock()  # guards _admitted
        self._admitted: set[_Peer] = set()
        self._strangers: dict[int, _Connection] = {}
        self._guests: dict[int, _Peer] = {}
        """File number -> who was let in."""
        self._handles: set[int] = set()
        """Numbers of our own handles."""
        self._seen: dict[int, int] = {}
        """File number -> inode of what has been looked at."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="doorkeeper", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def admit(self, peer: str) -> None:
        """Let a peer, as gRPC names it, send what it likes: one of its calls has shown the token."""
        host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
        if port.isdecimal():
            with self._lock:
                self._admitted.add((_plain(host), int(port)))

    def close(self) -> None:
        """Watch no more. Closing again does nothing."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for number in list(self._strangers):
            self._let_go(number)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_EVERY):
            with suppress(OSError):  # a file that was closed while we looked
                self._look()

    def _look(self) -> None:
        numbers = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208  often
        for number in self._seen.keys() - numbers:
            self._forget(number)
        for number in numbers:
            if number in self._handles:
                continue
            try:
                about = os.fstat(number)
            except OSError:
                continue
            if self._seen.get(number) != about.st_ino:
                self._forget(number)
                self._seen[number] = about.st_ino
                if stat.S_ISSOCK(about.st_mode):
                    self._meet(number)
        for number, connection in list(self._strangers.items()):
            self._judge(number, connection)

    def _meet(self, number: int) -> None:
        """Note a connection to our port that was not there before."""
        copy = os.dup(number)
        try:
            line = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        with suppress(OSError, ValueError):
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getsockname()[1] == self._port:
                host, port = line.getpeername()[:2]
                self._strangers[number] = _Connection((_plain(host), port), line)
                self._handles.add(line.fileno())
                return
        line.close()

    def _judge(self, number: int, connection: _Connection) -> None:
        with self._lock:
            admitted = connection.peer in self._admitted
        if admitted:
            self._guests[number] = connection.peer
            self._let_go(number)
            return
        try:
            about = connection.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (received,) = _RECEIVED.unpack(about)
        except (OSError, struct.error):
            self._let_go(number)
            return
        if received > self._most:
            host, port = connection.peer
            _log.warning(
                "hung up on %s port %d: it sent %d bytes and no call with the token (limits.stranger_bytes)",
                host,
                port,
                received,
            )
            with suppress(OSError):
                connection.line.shutdown(socket.SHUT_RDWR)
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        connection = self._strangers.pop(number)
        self._handles.discard(connection.line.fileno())
        connection.line.close()

    def _forget(self, number: int) -> None:
        """Forget what had a file number before."""
        self._seen.pop(number, None)
        if number in self._strangers:
            self._let_go(number)
        if number in self._guests:
            with self._lock:
                self._admitted.discard(self._guests.pop(number))


def _plain(host: str) -> str:
    """Return an address in one spelling: gRPC and the system differ on one of IPv4 inside of IPv6."""
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:")
