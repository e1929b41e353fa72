"""The rendezvous of ranks: how the processes of one run find each other, attempt after attempt.

Rank 0 serves a key-value store, or torchrun does. Every rank signs in under its number, and connects once
all have:

    find the keys ──► sign in ──► all signed in ──► connected
         ▲               │ a rank failed, or restarted
         └───────────────┘ the attempt is over; the next one has keys of its own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from monolith import concurrency
from monolith.cluster import Discovery, Waiting
from monolith.cluster.addresses import Address
from monolith.cluster.security import is_loopback
from monolith.config import Secret
from monolith.errors import (
    AddressError,
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    ListenError,
    UnavailableError,
)
from monolith.store import RankGroups
from monolith.store.rank_calls import RankPort
from monolith.store.rank_groups import RankOptions
from monolith.store.rank_keys import REPLACED, RankKeys, begin_attempt, join_attempt, keep_keys, reach_keys
from monolith.store.rank_network import prefixed

ROLE = "rank"


ASK_EVERY = 0.2
"""Seconds between two attempts to find the other ranks."""


OnWaiting = Callable[[Waiting], object]


class RankRendezvous:
    """Connects one rank with the other ranks of its run, attempt after attempt. Used by one thread.

    Args:
        rank: The number of this process.
        size: How many ranks there are.
        discovery: Where rank 0 registers its address; None if variables name it, as those of torchrun do.
        environ: The environment variables of this process.
        port: Where this process listens, and what it requires of callers: at least a token.
        start: How long to wait for the other ranks.
        options: Options of `RankGroups`.
        on_waiting: Called during the wait; it may raise to end it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        discovery: Discovery | None,
        environ: Mapping[str, str],
        port: RankPort,
        start: timedelta,
        options: RankOptions,
        on_waiting: OnWaiting = lambda _: None,
    ) -> None:
        if port.guard.token is None:
            raise ConfigError("ranks sign the keys that they share with a token, and the guard has none")
        self._token: Secret = port.guard.token
        self._rank = rank
        self._size = size
        self._discovery = discovery
        self._environ = environ
        self._port = port
        self._start = start.total_seconds()
        self._options = options
        self._on_waiting = on_waiting
        self._process = concurrency.token_hex(8)
        self._left: set[str] = set()
        """Attempts that are over for this rank."""
        self._registered: str | None = None
        self._trouble = ""
        """Why this rank could not join the last attempt."""
        self.processes: tuple[str, ...] = ()
        """The processes of all ranks, in the last attempt."""

    def join(self) -> RankGroups:
        """Wait for all ranks, and connect to them.

        Raises:
            DeadlineExceededError: Not all ranks signed in in time.
            UnavailableError: A rank was lost meanwhile; join again.
        """
        began = concurrency.monotonic()
        while True:
            keys = self._find(began)
            if keys.attempt in self._left:
                self._wait(began, 0)
                continue
            self._left.add(keys.attempt)
            if keys.compare_set(f"process/{self._rank}", "", self._process).decode() != self._process:
                keys.fail(self._rank, REPLACED)
                continue
            try:
                self.processes = self._await_all(keys, began)
                return RankGroups(keys, self._rank, self._size, port=self._port, options=self._options)
            except BaseException as error:
                # The other ranks may have seen this one sign in, and wait for its connections.
                keys.fail(self._rank, f"it left before all were connected: {type(error).__name__}: {error}")
                raise

    def close(self) -> None:
        """Deregister rank 0."""
        if self._discovery is not None and self._registered is not None:
            with suppress(ClusterError):
                self._discovery.deregister(ROLE, 0, self._registered)

    def _find(self, began: float) -> RankKeys:
        """Return the keys of the newest attempt; as rank 0, those of a new one."""
        if self._rank == 0 and self._discovery is not None:
            return self._keep_keys(self._discovery)
        while True:
            try:
                if self._discovery is None:
                    return self._keys_of_launcher()
                found = self._discovery.query(ROLE).get(0)
                if found is not None:
                    address = Address.parse(found)
                    return join_attempt(reach_keys(address.host, address.port), self._token)
            except (UnavailableError, AddressError) as error:  # rank 0 may not serve the keys yet
                self._trouble = str(error)
            self._wait(began, 0)

    def _keep_keys(self, discovery: Discovery) -> RankKeys:
        keys = keep_keys(self._port.host, self._token)
        self.close()
        self._registered = str(Address(self._port.host, keys.port))
        discovery.register(ROLE, 0, self._registered)
        return keys

    def _keys_of_launcher(self) -> RankKeys:
        """Return the keys that torchrun serves, or that rank 0 serves at the address it named."""
        try:
            address = Address(self._environ["MASTER_ADDR"], int(self._environ["MASTER_PORT"]))
        except (KeyError, ValueError) as cause:
            raise ConfigError(
                "ranks without a registry are started by torchrun, which sets MASTER_ADDR and MASTER_PORT"
            ) from cause
        of_torchrun = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank == 0 and not of_torchrun:
            return self._keep_named(address)
        keys = reach_keys(address.host, address.port)
        if of_torchrun:  # its keys survive a restart of all ranks, so each restart has a prefix of its own
            keys = prefixed(keys, f"monolith/{self._environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        return begin_attempt(keys, self._token) if self._rank == 0 else join_attempt(keys, self._token)

    def _keep_named(self, address: Address) -> RankKeys:
        """Serve the keys at the address that variables name, if it belongs to this machine.

        Some launchers name "localhost" to rank 0 and its host to the other ranks; some name an address
        that is only routed here.
        """
        if not is_loopback(address.host) or is_loopback(self._port.host):
            with suppress(ListenError):
                return keep_keys(address.host, self._token, address.port)
        return keep_keys(self._port.host, self._token, address.port)

    def _await_all(self, keys: RankKeys, began: float) -> tuple[str, ...]:
        """Return the processes of all ranks once all have signed in."""
        while True:
            found = [keys.peek(f"process/{rank}") for rank in range(self._size)]
            there = [process.decode() for process in found if process is not None]
            if len(there) == self._size:
                return tuple(there)
            if (failure := keys.failure()) is not None:
                if failure.replaced is not None:
                    raise failure
                raise UnavailableError(f"a rank was lost before all were there: {failure}")
            self._wait(began, len(there))

    def _wait(self, began: float, found: int) -> None:
        elapsed = concurrency.monotonic() - began
        if elapsed >= self._start:
            trouble = f". The last attempt to join: {self._trouble}" if self._trouble else ""
            raise DeadlineExceededError(
                f"{found} of {self._size} ranks were there after {elapsed:.0f} s; see the logs of the other "
                f"ranks or set timeouts.start{trouble}"
            )
        what = "rank 0" if found == 0 and self._rank else "ranks"
        self._on_waiting(Waiting(what, found, self._size, timedelta(seconds=elapsed)))
        concurrency.sleep(ASK_EVERY)
