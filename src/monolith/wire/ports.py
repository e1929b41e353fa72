"""Ports: binding one, the limits on its callers, and the guard that watches its connections.

gRPC reads a call to its end before a server can ask for a token, keeps silent connections for good, and
Flight has no settings for either: a call of 600 MB without a token is in memory, three times over, when it
is refused, and 1,200 silent connections use up the files of a process. So a `ConnectionGuard` watches the
connections of a port from a thread of its own. Until one of its calls was admitted, a connection is a
stranger. The guard closes it

- when it has sent more bytes than `Limits.stranger_bytes`, as counted by the kernel,
- when it has been a stranger for `Limits.admit_within`,
- when the port has more connections than `Limits.connections`, or one peer more than
  `Limits.peer_connections`: the oldest strangers first, since a real caller is one for milliseconds, then
  the newest of the admitted connections.

The guard finds connections among the open files of the process and inspects them by gRPC's own file numbers,
so that watching one costs no file. Only Linux lists them; on other systems no connection is watched.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache
from urllib.parse import unquote

from monolith import concurrency
from monolith.errors import ConfigError, ListenError

_log = logging.getLogger(__name__)

CHECK_EVERY = 0.02
"""Seconds between two checks: a server buffers at most what a stranger sends in that time."""
_LOG_EVERY = 1.0
"""Seconds between two log lines about closed connections."""
_FORGET_AFTER = 5.0
"""Seconds after which the guard forgets an admitted peer that has no connection."""
_TCP_INFO_BYTES = 136
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in the kernel's struct tcp_info

_Peer = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that one message, one request and one caller may ask of a server of this run.

    Any program that reaches a port can send to it. A server compares each message with these numbers before
    it works on it, so that neither a mistake nor an attack costs more than they allow.
    """

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
    """The longest that a server lets one call wait, even if the caller asks for more."""
    calls: int = 4096
    """The most small calls that a server works on, or lets wait, at a time."""
    saves: int = 4
    """The most callers of a control server that wait for a checkpoint at a time; others retry."""
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


def within_files(connections: int) -> int:
    """Return how many connections a port may have: so many, and a quarter of the files that this process may
    open at most. A process has several ports, a connection may take three files, as one that is passed on to
    gRPC does, and tables, saves and probes need files as well.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if files == resource.RLIM_INFINITY else min(connections, max(files // 4, 1))


def join_address(host: str, port: int) -> str:
    """Return host:port; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_port(whose: str, host: str, port: int) -> None:
    """Bind a port and release it: Flight does not report why it cannot listen.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """
    if not 0 <= port <= 65535:
        raise listen_error(whose, host, port, None)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            with suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server would
            probe.bind(address)
    except OSError as cause:
        raise listen_error(whose, host, port, cause) from cause


def bound_socket(host: str, port: int, share: bool = False, *, whose: str = "serve") -> socket.socket:
    """Return a socket that is bound, and not listening yet.

    Args:
        share: Whether other processes of this user may listen on the same port.
        whose: What an error begins with.

    Raises:
        ListenError: The port is taken, or the address is not of this machine.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
    except OSError as cause:
        raise listen_error(whose, host, port, cause) from cause
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except (OSError, OverflowError) as cause:
        made.close()
        if isinstance(cause, OverflowError):
            raise ListenError(
                f"{whose}: cannot listen on {host}:{port}: a port is from 0 to 65535"
            ) from cause
        raise listen_error(whose, host, port, cause) from cause
    return made


def listen_error(whose: str, host: str, port: int, cause: OSError | None) -> ListenError:
    number = None if cause is None else cause.errno
    why = {
        errno.EADDRINUSE: "the port is in use. Choose another, or 0 for any free one.",
        errno.EACCES: "this user may not listen there. Ports below 1024 need privileges; choose one above.",
        errno.EADDRNOTAVAIL: "that is not an address of this machine.",
    }
    reason = why.get(number or 0, f"{cause}." if cause else "a port is a free number from 0 to 65535.")
    error = ListenError(f"{whose}: cannot listen on {host}:{port}: {reason}")
    error.errno = number
    return error


@dataclass(slots=True)
class _Connection:
    number: int
    """gRPC's file descriptor. gRPC may close it at any moment, and another file may then get the number."""
    inode: int
    """Shows whether the descriptor still belongs to this connection."""
    peer: _Peer
    since: float
    admitted: bool = False


class ConnectionGuard:
    """Watches the connections to one port of this process until it is closed. Thread-safe.

    Args:
        bounds_bytes: Whether strangers may send at most `limits.stranger_bytes`; for ports with a token
            that read messages of any size.
        every: Seconds between two checks. Each lists all open files of the process, once for all guards.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        port: int,
        limits: Limits,
        *,
        bounds_bytes: bool = True,
        every: float = CHECK_EVERY,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        self._port = port
        self._limits = limits
        self._most = within_files(limits.connections)
        self._most_bytes = limits.stranger_bytes if bounds_bytes else None
        self._every = every
        self._clock = clock
        self._lock = concurrency.Lock()  # guards _admitted
        self._admitted: dict[str, tuple[_Peer, float]] = {}
        """Peer in gRPC's spelling -> its address, and when it was admitted."""
        self._connections: dict[int, _Connection] = {}
        """By file descriptor, in order of arrival. Only the watching thread uses it, and `close` after it."""
        self._seen: dict[int, int] = {}
        """File descriptor -> inode of each open socket that was inspected."""
        self._closed: Counter[str] = Counter()
        """Reasons for which connections were closed since the last log line."""
        self._log_at = self._tidy_at = clock()
        self._closing = concurrency.Event()
        self._thread = concurrency.Thread(target=self._watch, name="connection-guard", daemon=True)
        # Opened in advance: the guard must be able to close connections when the process has no file left.
        self._null = self._handle = -1
        if sys.platform == "linux" and concurrency.machine() is None:  # a simulated machine has no sockets
            self._null = os.open(os.devnull, os.O_RDONLY)
            self._handle = os.dup(self._null)
            self._thread.start()

    def admit(self, peer: str) -> None:
        """Mark a peer, in gRPC's spelling, as no stranger: one of its calls was admitted."""
        if peer in self._admitted:  # the common case; every call comes through here
            return
        host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
        if port.isdecimal():
            with self._lock:
                self._admitted[peer] = ((_plain(host), int(port)), self._clock())

    def close(self) -> None:
        """Close the connections of strangers and stop watching. Closing again does nothing.

        Otherwise a server that shuts down would wait for a call that a stranger has half sent.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._null < 0:
            return
        with suppress(OSError):
            self.check()
            for one in [one for one in self._connections.values() if not one.admitted]:
                self._shut_down(one)
        for number in (self._null, self._handle):
            os.close(number)
        self._null = self._handle = -1

    def _watch(self) -> None:
        # Guards wake up together, at multiples of `every`, so that one listing of the files serves them all.
        while not self._closing.wait(self._every - concurrency.monotonic() % self._every):
            with suppress(OSError):  # a file was closed during the check
                self.check(_shared_sockets().listed_in_this(self._every))

    def check(self, sockets: Mapping[int, int] | None = None) -> None:
        """Check all connections once and close those over a limit. The thread calls this.

        Args:
            sockets: File descriptor -> inode of all open sockets; by default they are listed now.
        """
        now = self._clock()
        sockets = _open_sockets() if sockets is None else sockets
        if sockets != self._seen:
            for number in self._seen.keys() - sockets.keys():
                self._forget(number)
            for number, inode in sockets.items():
                if self._seen.get(number) != inode:
                    self._forget(number)
                    self._seen[number] = inode
                    self._add(number, inode, now)
        with self._lock:
            admitted = {peer for peer, _ in self._admitted.values()}
        for one in list(self._connections.values()):
            one.admitted = one.admitted or one.peer in admitted
            if not one.admitted:
                self._check_stranger(one, now)
        self._enforce_limits()
        if now >= self._tidy_at:
            self._tidy_at = now + _LOG_EVERY
            self._tidy(now)
        if self._closed and now >= self._log_at:
            self._log_at = now + _LOG_EVERY
            self._log_closed()

    def _add(self, number: int, inode: int, now: float) -> None:
        """Start to watch a new file if it is a connection to our port."""
        with suppress(OSError, ValueError), _borrowed(number) as line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getsockname()[1] == self._port:
                host, port = line.getpeername()[:2]
                if os.fstat(number).st_ino == inode:
                    self._connections[number] = _Connection(number, inode, (_plain(host), port), now)

    def _check_stranger(self, one: _Connection, now: float) -> None:
        """Close a stranger that has sent too many bytes, or was a stranger for too long."""
        waited = self._limits.admit_within.total_seconds()
        if now - one.since > waited:
            self._shut_down(one, f"without an admitted call in {waited:g} s (limits.admit_within)")
        elif self._most_bytes is not None:
            try:
                with _borrowed(one.number) as line:
                    about = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                (received,) = _RECEIVED.unpack(about)
            except (OSError, struct.error):
                return
            # The descriptor may belong to another file by now, and the count too: `_shut_down` checks again.
            if received > self._most_bytes:
                self._shut_down(
                    one,
                    f"that sent more than {self._most_bytes:,} bytes and no token (limits.stranger_bytes)",
                )

    def _enforce_limits(self) -> None:
        """Close the connections beyond the limits of the port and of each peer."""
        hosts = Counter(one.peer[0] for one in self._connections.values())
        for host, count in hosts.items():
            if count > self._limits.peer_connections:
                here = [one for one in self._connections.values() if one.peer[0] == host]
                for one in _first_to_go(here)[: count - self._limits.peer_connections]:
                    self._shut_down(one, "of a peer with too many (limits.peer_connections)")
        if (over := len(self._connections) - self._most) > 0:
            for one in _first_to_go(self._connections.values())[:over]:
                self._shut_down(one, "beyond what the port may have (limits.connections)")

    def _shut_down(self, one: _Connection, why: str = "") -> None:
        """Shut a connection down; gRPC then closes it."""
        self._connections.pop(one.number, None)
        # gRPC may close the descriptor at any moment and the system may give the number to another file. A
        # duplicate cannot change between the comparison of its inode and the shutdown.
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
        """Forget admitted peers that have disconnected."""
        present = {one.peer for one in self._connections.values()}
        with self._lock:
            self._admitted = {
                name: (peer, at)
                for name, (peer, at) in self._admitted.items()
                if peer in present or now - at < _FORGET_AFTER
            }

    def _log_closed(self) -> None:
        reasons = "; ".join(f"{count:,} {why}" for why, count in self._closed.items())
        self._closed.clear()
        _log.warning("port %d: closed connections: %s", self._port, reasons)

    def _forget(self, number: int) -> None:
        """Forget the file that had this descriptor before."""
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


class _OpenSockets:
    """The open sockets of this process, listed once per interval for the guards of all its ports.

    With 100 open files and four ports, listing them for each port took a tenth of a core.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # guards all below
        self._sockets: Mapping[int, int] = {}
        self._listed_at = -1.0

    def listed_in_this(self, interval: float) -> Mapping[int, int]:
        """Return the sockets as listed since the last multiple of `interval`, perhaps for another guard."""
        begin = (now := concurrency.monotonic()) - now % interval
        # Not for ever: in a child that was forked while a thread of its parent listed files, the lock stays
        # taken. Such a child lists them for each guard.
        if not self._lock.acquire(timeout=interval):
            return _open_sockets()
        try:
            if self._listed_at < begin:
                self._listed_at = now
                self._sockets = _open_sockets()
            return self._sockets
        finally:
            self._lock.release()


@cache
def _shared_sockets() -> _OpenSockets:
    return _OpenSockets()


def _open_sockets() -> dict[int, int]:
    """Return file descriptor -> inode of the open sockets of this process."""
    try:
        numbers: Iterable[int] = map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208  often
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # Listing them takes a file, and none is left: then nearly all descriptors are in use.
        numbers = range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16))
    found = {}
    for number in numbers:
        try:
            about = os.fstat(number)
        except OSError:
            continue
        if stat.S_ISSOCK(about.st_mode):
            found[number] = about.st_ino
    return found


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Use a file descriptor as a socket, and leave it open."""
    line = socket.socket(fileno=number)
    try:
        yield line
    finally:
        line.detach()


def _plain(host: str) -> str:
    """Return an address in one spelling: gRPC and the kernel spell IPv4 inside IPv6 differently."""
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:")
