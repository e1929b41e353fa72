"""Joining: how the ranks of a run find each other, again after one of them was lost.

Rank 0 keeps the keys that all share, at an address that the others learn from the registry of the run. Every
attempt to train has keys of its own:

    waiting ──all ranks have signed in──► connecting ──► training
       ▲                                                    │
       └──── a rank is lost: keys and groups are dropped ───┘

A process that restarts may find the keys of an attempt that has failed and does not know it yet. Its place is
taken there; so it says that it was lost, and waits for the next.

Under torchrun the launcher keeps the keys and restarts all ranks, so there is one attempt for each start. So
there is under mpirun, where rank 0 keeps the keys: at the address that variables name, or that it registers.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed as dist

from monolith.cluster import Discovery, Waiting
from monolith.cluster.addresses import Address
from monolith.errors import AddressError, ClusterError, ConfigError, DeadlineExceededError, UnavailableError
from monolith.store import RankGroups
from monolith.store.collective import KeyValues, prefixed
from monolith.store.rank_calls import reached
from monolith.store.rank_groups import FAILED

ROLE = "rank"
ASK_EVERY = 0.2
"""Seconds between two looks for the others."""
REACH_WITHIN = timedelta(seconds=10)
"""How long the keys may take to answer before they count as gone."""

OnWaiting = Callable[[Waiting], object]


class RankMeeting:
    """Where the ranks of one run meet, attempt after attempt. Used by one thread.

    Args:
        rank: Which one this process is.
        size: How many there are.
        discovery: Where rank 0 says how to reach it; None where variables say it, as those of torchrun do.
        environ: Of this process.
        host: The address of this process, by which others reach it.
        start: How long to wait for the others.
        options: Of `RankGroups`.
        on_waiting: Told of the wait; it may raise to end it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        discovery: Discovery | None,
        environ: Mapping[str, str],
        host: str | None,
        start: timedelta,
        options: Mapping[str, Any],
        on_waiting: OnWaiting = lambda _: None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._discovery = discovery
        self._environ = environ
        self._host = host
        self._start = start.total_seconds()
        self._options = options
        self._on_waiting = on_waiting
        self._process = secrets.token_hex(8)
        self._left: set[str] = set()
        """Attempts that are over."""
        self._registered: str | None = None
        self.processes: tuple[str, ...] = ()
        """The processes of all ranks, in the last attempt."""

    def join(self) -> RankGroups:
        """Wait for all ranks, and connect to them.

        Raises:
            DeadlineExceededError: Not all were there in time.
            UnavailableError: One was lost meanwhile; to be tried again.
        """
        began = time.monotonic()
        while True:
            keys = self._find(began)
            attempt = _read(keys, "attempt")
            if attempt in self._left:
                self._wait(began, 0)
                continue
            self._left.add(attempt)
            with reached():
                if keys.add(f"signed/{self._rank}", 1) > 1:
                    self._say_lost(keys)
                    continue
                keys.set(f"process/{self._rank}", self._process)
            self._await_all(keys, began)
            self.processes = tuple(_read(keys, f"process/{rank}") for rank in range(self._size))
            connect = partial(_another, keys)
            return RankGroups(connect, self._rank, self._size, host=self._host, **self._options)

    def close(self) -> None:
        """Be found no more."""
        if self._discovery is not None and self._registered is not None:
            with suppress(ClusterError):
                self._discovery.deregister(ROLE, 0, self._registered)

    def _find(self, began: float) -> KeyValues:
        """Return the keys of the newest attempt; as rank 0, those of a new one."""
        if self._discovery is None:
            while True:
                with suppress(UnavailableError):  # who keeps them may not be there yet
                    return self._keys_of_launcher()
                self._wait(began, 0)
        if self._rank == 0:
            return self._keep_keys(self._discovery)
        while True:
            with suppress(UnavailableError, AddressError):
                found = self._discovery.query(ROLE).get(0)
                if found is not None:
                    return _reach(Address.parse(found))
            self._wait(began, 0)

    def _keep_keys(self, discovery: Discovery) -> KeyValues:
        host = self._host or "127.0.0.1"
        keys = keep_keys(host)
        keys.set("attempt", secrets.token_hex(8))
        self.close()
        self._registered = str(Address(host, keys.port))
        discovery.register(ROLE, 0, self._registered)
        return keys

    def _keys_of_launcher(self) -> KeyValues:
        """Return the keys that torchrun keeps, or has rank 0 keep."""
        try:
            address = Address(self._environ["MASTER_ADDR"], int(self._environ["MASTER_PORT"]))
        except (KeyError, ValueError) as cause:
            raise ConfigError(
                "ranks without a registry are started by torchrun, which sets MASTER_ADDR and MASTER_PORT"
            ) from cause
        kept = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeps = self._rank == 0 and not kept
        keys = _reach(address, keeps=keeps)
        attempt = self._environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        mine = prefixed(keys, f"monolith/{attempt}")
        mine.set("attempt", f"{attempt}/{len(self._left)}")
        return mine

    def _await_all(self, keys: KeyValues, began: float) -> None:
        names = [f"process/{rank}" for rank in range(self._size)]
        with reached():
            while not keys.check(names):
                if keys.check([FAILED]):
                    raise UnavailableError("a rank was lost before all were there")
                self._wait(began, sum(keys.check([name]) for name in names))

    def _wait(self, began: float, found: int) -> None:
        elapsed = time.monotonic() - began
        if elapsed >= self._start:
            raise DeadlineExceededError(
                f"{found} of {self._size} ranks were there after {elapsed:.0f} s; see the logs of the others "
                "or set timeouts.start"
            )
        what = "rank 0" if found == 0 and self._rank else "ranks"
        self._on_waiting(Waiting(what, found, self._size, timedelta(seconds=elapsed)))
        time.sleep(ASK_EVERY)

    def _say_lost(self, keys: KeyValues) -> None:
        with suppress(RuntimeError):
            keys.compare_set(FAILED, "", f'[{self._rank}, "its process was lost, and has restarted"]')


def _reach(address: Address, *, keeps: bool = False) -> KeyValues:
    if not keeps:
        try:  # torch would go on trying, and log every time
            socket.create_connection((address.host, address.port), REACH_WITHIN.total_seconds()).close()
        except OSError as cause:
            raise UnavailableError(f"rank 0 does not answer at {address}: {cause}") from cause
    with reached():
        return _tcp_store(address.host, address.port, keeps=keeps)


def keep_keys(host: str) -> KeyValues:
    """Return new keys, kept by this process at a port of its own, for others to reach."""
    return _tcp_store(host, 0, keeps=True)


def reach_keys(host: str, port: int) -> KeyValues:
    """Return the keys that another process keeps.

    Raises:
        UnavailableError: Nobody does.
    """
    return _reach(Address(host, port))


def _tcp_store(host: str, port: int, *, keeps: bool) -> KeyValues:
    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch's stubs do not have it
    return make(host, port, is_master=keeps, wait_for_workers=False, timeout=REACH_WITHIN)


def _read(keys: KeyValues, key: str) -> str:
    with reached():
        found: str = keys.get(key).decode()
        return found


def _another(keys: KeyValues) -> KeyValues:
    """Return another connection to the same keys."""
    with reached():
        return keys.clone()
