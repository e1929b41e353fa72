"""Addresses of processes: host:port as text, whether a process listens there, and waiting until it does.

A host is a name, an IPv4 address or an IPv6 address. Only an IPv6 address has colons, and it is written in
brackets: `a:b::c:80` is ambiguous and refused. A node is alive if its port accepts a connection;
`NodeAliveChecker` connects to all nodes at the same time, so a lost one costs its timeout once. Clock and
sleep are arguments, so that a test waits for an hour in no time.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self, TypeVar

from monolith import concurrency
from monolith.concurrency import ThreadPoolExecutor
from monolith.errors import AddressError, ClusterError, DeadlineExceededError, NodeAliveCheckerError

Resolve = Callable[..., list[Any]]
"""Has the arguments and the result of `socket.getaddrinfo`."""

_RETRY_EVERY = timedelta(milliseconds=100)

Clock = Callable[[], float]
"""Seconds. Monotonic to measure durations, Unix time to compare processes."""

Sleep = Callable[[float], object]
"""Waits for a number of seconds."""

T = TypeVar("T")


def poll(
    ask: Callable[[], T | None],
    *,
    timeout: timedelta | None,
    every: timedelta,
    clock: Clock = concurrency.monotonic,
    sleep: Sleep = concurrency.sleep,
) -> T | None:
    """Ask until the answer is not None and return it; return None when `timeout` is over.

    Asks at least once, and once more at the very end. A timeout of zero asks once and never sleeps.

    Args:
        timeout: None waits for as long as it takes.
    """
    start = clock()
    while (answer := ask()) is None:
        left = None if timeout is None else timeout.total_seconds() - (clock() - start)
        if left is not None and left <= 0:
            return None
        sleep(every.total_seconds() if left is None else min(every.total_seconds(), left))
    return answer


class AddressFamily(StrEnum):
    """Which kind of address to prefer or to listen on."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host and a port; as text, `host:port` or `[host]:port`."""

    host: str
    """The host, an IPv6 address without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `host:port` or `[v6]:port`.

        Raises:
            AddressError: It is neither; an IPv6 address without brackets cannot be told from its port.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) >= 1 << 16:
            raise AddressError(f"Invalid addr: {text!r}; expected host:port, with a port from 0 to 65535")
        if bracketed != is_ipv6_address(host) or host.strip() != host:
            hint = "an IPv6 address, and nothing else, is put in brackets: [::1]:80"
            raise AddressError(f"Invalid addr: {text!r}; {hint}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return concat_ip_and_port(self.host, self.port)


def is_ipv6_address(ip: str) -> bool:
    """Whether this is a literal IPv6 address; a name, a bracketed address and garbage are not."""
    try:
        return ipaddress.ip_address(ip).version == 6
    except ValueError:
        return False


def concat_ip_and_port(ip: str, port: int) -> str:
    """Return `ip:port`, or `[ip]:port` for a literal IPv6 address."""
    return f"[{ip}]:{port}" if is_ipv6_address(ip) else f"{ip}:{port}"


def get_local_ip(resolve: Resolve = socket.getaddrinfo) -> str:
    """Return the first address that this machine's own name has; where it has none, the first IPv6 one.

    Raises:
        ClusterError: The name of this machine cannot be resolved.
    """
    name = socket.gethostname()
    try:
        try:
            found = resolve(name, None)
        except socket.gaierror:
            found = resolve(name, None, family=socket.AF_INET6)
    except socket.gaierror as cause:
        raise ClusterError(
            f"cannot find an address of this machine: its name {name!r} does not resolve ({cause}). "
            "Add it to /etc/hosts, or set CLOUDNATIVE_INET_ADDR."
        ) from cause
    return str(found[0][4][0])


def get_local_host(environment: Mapping[str, str], resolve: Resolve = socket.getaddrinfo) -> str:
    """Return the host under which other processes reach this one: the scheduler's value, else the local IP.

    A variable that is set counts even when it is empty: a scheduler that names no host is broken,
    and no other process could reach an address found in another way.

    Raises:
        ClusterError: The variable is empty, or the name of this machine cannot be resolved.
    """
    for name in ("CLOUDNATIVE_INET_ADDR", "YARN_INET_ADDR"):
        if name in environment:
            host = environment[name].partition(",")[0].strip()
            if not host:
                raise ClusterError(f"the environment's {name} contains no host; unset it, or set it to one")
            return host
    return get_local_ip(resolve)


def is_ipv4_supported(resolve: Resolve = socket.getaddrinfo) -> bool:
    """Whether the local ip is not an IPv6 one."""
    return not is_ipv6_address(get_local_ip(resolve))


def get_local_server_addr(port: int, resolve: Resolve = socket.getaddrinfo) -> str:
    """Return the local ip joined with a port."""
    return concat_ip_and_port(get_local_ip(resolve), port)


def connect_error(address: Address, timeout: timedelta) -> OSError | None:
    """Connect once and hang up; return what went wrong, if something did.

    Tries every address that the host has, IPv6 too, and gives each of them the whole timeout.
    """
    try:
        socket.create_connection((address.host, address.port), timeout.total_seconds()).close()
    except OSError as error:
        return error
    except UnicodeError as error:  # a name that cannot be asked for: an empty label, or a too long one
        return OSError(f"not a host name: {error}")
    return None


def check_port(
    host: str,
    port: int,
    timeout: timedelta = timedelta(seconds=1),
    *,
    clock: Clock = concurrency.monotonic,
    sleep: Sleep = concurrency.sleep,
) -> bool:
    """Whether a port accepts a connection before `timeout` is over. A refusal is asked again until then.

    Args:
        host: With or without brackets.
    """
    address = Address(host.removeprefix("[").removesuffix("]"), port)

    def ask() -> bool | None:
        error = connect_error(address, timeout)
        return False if isinstance(error, TimeoutError) else True if error is None else None

    return bool(poll(ask, timeout=timeout, every=_RETRY_EVERY, clock=clock, sleep=sleep))


def wait_for_port(
    address: str,
    timeout: timedelta | None,
    *,
    every: timedelta = timedelta(milliseconds=500),
    connect_timeout: timedelta = timedelta(seconds=1),
    clock: Clock = concurrency.monotonic,
    sleep: Sleep = concurrency.sleep,
) -> None:
    """Return once a process listens at `address`.

    Args:
        timeout: None waits for as long as it takes.

    Raises:
        AddressError: `address` is not an address; waiting would not help.
        DeadlineExceededError: No process listened in time. The message has the error of the last attempt.
    """
    parsed = Address.parse(address)
    last: OSError | None = None

    def ask() -> bool | None:
        nonlocal last
        last = connect_error(parsed, connect_timeout)
        return True if last is None else None

    if poll(ask, timeout=timeout, every=every, clock=clock, sleep=sleep) is None:
        assert timeout is not None
        raise DeadlineExceededError(
            f"{address} connect error! No answer within {timeout.total_seconds():g} s "
            f"(last: {last}). Is it running, and is the port open to this machine?"
        ) from last


_log = logging.getLogger(__name__)


class NodeAliveChecker:
    """Connects to every address once, in its constructor.

    An address that is malformed, refuses or does not answer is dead; the constructor raises nothing for it.

    Args:
        addrs: `host:port` or `[v6]:port`. A name may have IPv4 and IPv6 addresses; one that
            answers is enough.
        timeout: For each address that a host has; to find the addresses of a name takes what it takes.
        num_thread: How many are asked at a time.
    """

    def __init__(
        self, addrs: Iterable[str], timeout: timedelta = timedelta(seconds=1), num_thread: int = 10
    ) -> None:
        self._addrs = list(addrs)
        distinct = list(dict.fromkeys(self._addrs))
        with ThreadPoolExecutor(max(1, min(num_thread, len(distinct))), "node-alive") as threads:
            reasons = threads.map(lambda addr: _why_dead(addr, timeout), distinct)
            self._dead = {addr: why for addr, why in zip(distinct, reasons, strict=True) if why is not None}
        for addr, why in self._dead.items():
            _log.warning("cannot connect to %s: %s", addr, why)

    def all_nodes_alive(self) -> bool:
        return not self._dead

    def get_dead_nodes(self) -> list[str]:
        return list(self._dead)

    def get_alive_nodes(self) -> list[str]:
        return [addr for addr in dict.fromkeys(self._addrs) if addr not in self._dead]

    def get_addrs(self) -> list[str]:
        """Return the addresses as they were given."""
        return list(self._addrs)

    def require_all(self) -> None:
        """Do nothing when all are alive.

        Raises:
            NodeAliveCheckerError: Some are not. Names them, with the reasons.
        """
        if self._dead:
            raise NodeAliveCheckerError(dict(self._dead))


def _why_dead(addr: str, timeout: timedelta) -> str | None:
    try:
        error = connect_error(Address.parse(addr), timeout)
    except AddressError as cause:
        return str(cause)
    return None if error is None else str(error) or type(error).__name__
