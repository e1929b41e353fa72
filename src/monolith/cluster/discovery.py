"""Discovery: the roles of a job's processes, and their addresses.

A process says "I am worker 3, at this address"; others ask who the workers are. A registration
belongs to the discovery that made it: it goes when that is closed, and some time after its
process has died. Who registers last has the place, which is what a restarted process needs.

Roles in use are `ps` and `worker`, where worker 0 is the chief, and `dataservice_dispatcher`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from monolith import concurrency
from monolith.cluster.addresses import Address, Clock
from monolith.errors import ConfigError, DiscoveryError, RetryableError, UnavailableError

_log = logging.getLogger(__name__)

DATA_DISPATCHER = "dataservice_dispatcher"
"""The role of the one process that distributes a job's data."""

Callback = Callable[[dict[int, str]], object]
"""A function that receives all addresses of a role, by index."""


@dataclass(frozen=True, slots=True, order=True)
class Registration:
    """One entry of a role, with what is known of its age."""

    index: int
    address: str
    registered_at: float | None = None
    """The time of the registration in Unix seconds; None if the registry keeps no times."""


class Discovery(Protocol):
    """A registry in which processes find each other. Any thread may call it.

    Examples:
        >>> from monolith import FilesDiscovery
        >>> from monolith.cluster.files_discovery import FilesConfig
        >>> config = FilesConfig(folder="registry")  # a folder that all processes see
        >>> server, worker = FilesDiscovery(config), FilesDiscovery(config)
        >>> server.register("ps", 0, "10.0.0.1:7000")
        >>> worker.query("ps")
        {0: '10.0.0.1:7000'}
        >>> server.close()  # removes its entries
        >>> worker.query("ps")
        {}
        >>> worker.close()
    """

    def register(self, role: str, index: int, address: str) -> None:
        """Register that `role` number `index` listens at `address`; an earlier entry is replaced.

        When it returns, `query` shows it. It is kept alive from then on, and put right when others
        damage it, until `deregister` or `close`.

        Raises:
            AddressError: It is no address.
            DiscoveryError: The registry refuses, or this discovery was closed.
            RetryableError: The registry cannot be reached now.
        """

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        """Take out an entry that was made here, or that a dead process left. None there is no error.

        The entry of a living process comes back: its own discovery looks after it.

        Args:
            address: Take it out only where it has this address: what a process says that may have
                been replaced by another without knowing.
        """

    def query(self, role: str) -> dict[int, str]:
        """Return the addresses of a role by index, as a copy. Empty if no process has the role."""

    def entries(self, role: str) -> list[Registration]:
        """Return the entries that `query` reports, ordered by index and with their registration times."""

    def roles(self) -> list[str]:
        """Return the roles that at least one process has, sorted."""

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        """Call back with what `query` returns: once soon, and again after it changed.

        Changes that follow each other closely may come as one; the last call always has the last
        state. Calls come one at a time, from a thread of the discovery: do little, and do not close
        the discovery there. An exception of the callback is logged and ends nothing.

        Returns:
            A function that ends the watch.
        """

    def close(self) -> None:
        """Remove the entries registered through this object, and end all threads. Then queries find nothing.

        Closing again does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing(ABC):
    """Lets a discovery be used in a `with`."""

    @abstractmethod
    def close(self) -> None:
        """End it; see `Discovery.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_registration(role: str, index: int, address: str) -> None:
    """Refuse what no registry could keep.

    Raises:
        AddressError: The address is no host:port.
        ConfigError: The role or the index cannot be part of a name.
    """
    check_role(role)
    if index < 0:
        raise ConfigError(f"cannot register {role!r} {index}: an index must be 0 or more")
    Address.parse(address)


def check_role(role: str) -> None:
    """Refuse what cannot be the name of a node or a folder."""
    if not role or "/" in role or role.strip() != role or role.startswith("."):
        raise ConfigError(f"{role!r} is not a valid role: a role is one word without slashes, such as 'ps'")


def closed_error(what: str) -> DiscoveryError:
    return DiscoveryError(f"cannot register with {what}: it was closed. Make a new one.")


def locator(discovery: Discovery, role: str, index: int = 0) -> Callable[[], str]:
    """Return a function that returns the current address of an entry, so that clients can reconnect to it.

    The function raises UnavailableError while no process is registered for the entry.
    """

    def locate() -> str:
        found = discovery.query(role)
        if index not in found:
            others = f"; registered are {sorted(found)}" if found else ""
            raise UnavailableError(f"no process is registered as {role} {index}{others}")
        return found[index]

    return locate


class Watchers:
    """Callbacks by role, each called when its role's addresses differ from what it was told last.

    `tell` is called by one thread at a time.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # guards the two below
        self._callbacks: dict[int, tuple[str, Callback]] = {}
        self._told: dict[int, dict[int, str]] = {}
        self._next = 0

    def add(self, role: str, callback: Callback) -> Callable[[], None]:
        with self._lock:
            key = self._next
            self._next += 1
            self._callbacks[key] = (role, callback)

        def cancel() -> None:
            with self._lock:
                self._callbacks.pop(key, None)
                self._told.pop(key, None)

        return cancel

    def roles(self) -> set[str]:
        with self._lock:
            return {role for role, _ in self._callbacks.values()}

    def tell(self, now: Callable[[str], Mapping[int, str]]) -> None:
        """Compare each role's addresses with what its callbacks know, and tell those that lag behind."""
        with self._lock:
            watching = list(self._callbacks.items())
        current = {role: dict(now(role)) for role in {role for _, (role, _) in watching}}
        for key, (role, callback) in watching:
            with self._lock:
                if key not in self._callbacks or self._told.get(key) == current[role]:
                    continue
                self._told[key] = current[role]
            try:
                callback(dict(current[role]))
            except Exception:
                _log.exception("discovery: a callback on changes of %r failed", role)


class PollingWatch:
    """Watches for a registry that cannot call back: a thread, from the first watch on, that asks.

    Args:
        query: Asks the registry; while it is unavailable, watchers keep what they know.
    """

    def __init__(self, query: Callable[[str], Mapping[int, str]], every: timedelta, name: str) -> None:
        self._query = query
        self._every = every
        self._name = name
        self._watchers = Watchers()
        self._lock = concurrency.Lock()  # guards _thread
        self._thread: concurrency.Thread | None = None
        self._wake = concurrency.Event()
        self._stopped = False

    def add(self, role: str, callback: Callback) -> Callable[[], None]:
        cancel = self._watchers.add(role, callback)
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = concurrency.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._wake.set()
        return cancel

    def close(self) -> None:
        """Stop asking; return when the thread has ended."""
        with self._lock:
            self._stopped = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._watchers.tell(self._query)
            except RetryableError as error:
                _log.warning("discovery: cannot poll for changes, retrying: %s", error)
            except Exception:
                _log.exception("discovery: cannot poll for changes, retrying")
            self._wake.wait(self._every.total_seconds())
            self._wake.clear()  # before looking whether to stop: a wish to stop that comes now is seen


class MemoryRegistry:
    """Registrations of the discoveries of one process: what several `MemoryDiscovery` share."""

    def __init__(self) -> None:
        self.lock = concurrency.RLock()  # guards all below, and makes callbacks come one at a time
        self.entries: dict[tuple[str, int], tuple[Registration, object]] = {}
        """(role, index) -> the entry, and whose it is."""
        self.watchers = Watchers()

    def query(self, role: str) -> dict[int, str]:
        with self.lock:
            return {index: entry.address for (of, index), (entry, _) in self.entries.items() if of == role}


class MemoryDiscovery(Closing):
    """A plain dict: the reference for all other implementations, and the fake for tests. Callbacks run in
    the thread that makes the change, before its call returns."""

    def __init__(self, registry: MemoryRegistry | None = None, clock: Clock = concurrency.time) -> None:
        self._registry = MemoryRegistry() if registry is None else registry
        self._clock = clock
        self._closed = False
        self._cancels: list[Callable[[], None]] = []

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        if self._closed:
            raise closed_error("a discovery in memory")
        with self._registry.lock:
            self._registry.entries[role, index] = (Registration(index, address, self._clock()), self)
            self._registry.watchers.tell(self._registry.query)

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        with self._registry.lock:
            held = self._registry.entries.get((role, index))
            if held is not None and address in (None, held[0].address):
                del self._registry.entries[role, index]
                self._registry.watchers.tell(self._registry.query)

    def query(self, role: str) -> dict[int, str]:
        return {entry.index: entry.address for entry in self.entries(role)}

    def entries(self, role: str) -> list[Registration]:
        if self._closed:
            return []
        with self._registry.lock:
            return sorted(entry for (of, _), (entry, _) in self._registry.entries.items() if of == role)

    def roles(self) -> list[str]:
        if self._closed:
            return []
        with self._registry.lock:
            return sorted({role for role, _ in self._registry.entries})

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        if self._closed:
            return lambda: None
        cancel = self._registry.watchers.add(role, callback)
        self._cancels.append(cancel)
        with self._registry.lock:
            self._registry.watchers.tell(self._registry.query)
        return cancel

    def close(self) -> None:
        self._closed = True
        for cancel in self._cancels:
            cancel()
        with self._registry.lock:
            mine = [key for key, (_, owner) in self._registry.entries.items() if owner is self]
            for key in mine:
                del self._registry.entries[key]
            self._registry.watchers.tell(self._registry.query)
