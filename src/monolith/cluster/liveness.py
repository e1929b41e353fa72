"""Liveness: who of many nodes answers.

A node is alive when its port accepts a connection. All are asked at the same time, so one that
has vanished costs its timeout once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from monolith.cluster.addresses import Address, connect_error
from monolith.errors import AddressError, NodeAliveCheckerError

_log = logging.getLogger(__name__)


class NodeAliveChecker:
    """Connects to every address once; when it is made, the answers are there.

    An address that cannot be read, refuses or stays silent is dead; nothing is raised for it here.

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
