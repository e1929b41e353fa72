"""Liveness: whether other processes answer, and waiting until they do.

A node is alive if its port accepts a connection. `NodeAliveChecker` connects to all nodes at the same time,
so a lost one costs its timeout once. The processes of a run start in any order, so each polls for its peers;
clock and sleep are arguments, so that a test waits for an hour in no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from monolith.cluster.addresses import Address, connect_error
from monolith.errors import AddressError, NodeAliveCheckerError

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
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
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
