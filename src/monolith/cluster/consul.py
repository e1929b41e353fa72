"""Discovery by Consul: services at an agent, with checks that must be passed again and again.

An entry is a service of the job's name whose id is `<name>-<role>-<index>-<address>`. When its process
dies, Consul stops showing the entry and in the end removes it; see `consul_client`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from monolith import concurrency
from monolith.cluster.addresses import Address, Clock, Sleep, concat_ip_and_port, poll
from monolith.cluster.consul_client import (
    LOOKUP_TIMEOUT,
    QUERY_TIMEOUT,
    ConsulClient,
    ConsulConfig,
    ConsulService,
)
from monolith.cluster.discovery import (
    Callback,
    Closing,
    PollingWatch,
    Registration,
    check_registration,
    closed_error,
)
from monolith.errors import ClusterError, DiscoveryError, RetryableError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ConsulDiscovery(Closing):
    """A `Discovery` in Consul: the processes of one job are services of the job's name.

    Args:
        consul_id: The service name: the job's.
        sleep: Sleeps between attempts.
        clock: Unix seconds, for the ages of entries.
        uniform: Draws the pause after a failed attempt, as `random.uniform` does.

    Examples:
        >>> from monolith import ConsulDiscovery
        >>> from monolith.cluster.consul import ConsulConfig
        >>> from monolith.errors import UnavailableError
        >>> config = ConsulConfig(host="127.0.0.1", port=1, tries=1)
        >>> with ConsulDiscovery("clicks", config) as discovery:
        ...     try:
        ...         discovery.query("ps")
        ...     except UnavailableError:  # no agent listens there
        ...         print("Consul does not answer")
        Consul does not answer
    """

    def __init__(
        self,
        consul_id: str,
        config: ConsulConfig,
        *,
        sleep: Sleep = concurrency.sleep,
        clock: Clock = concurrency.time,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._id = consul_id
        self._config = config
        self._sleep, self._clock, self._uniform = sleep, clock, uniform
        self._client = ConsulClient(config)
        self._lock = concurrency.Lock()  # guards the two below
        self._mine: dict[tuple[str, int], str] = {}
        self._closed = False
        self._watch = PollingWatch(self._query_once, config.watch_every, f"consul-watch-{consul_id}")

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        with self._lock:
            if self._closed:
                raise closed_error(f"Consul at {self._config.address}")
            before = self._mine.get((role, index))
        if before not in (None, address):
            self._withdraw(role, index, tries=self._config.tries)
        self._make_room(role, index, address)
        parsed = Address.parse(address)
        registered_at = f"{self._clock():.3f}"
        claim = Registration(index, address, float(registered_at))
        tags = {"index": str(index), "name": role, "ip": parsed.host, "registered_at": registered_at}
        self._retried(
            lambda: self._client.register(
                self._id,
                parsed.port,
                tags=tags,
                host=parsed.host,
                service_id=self._service_id(role, index, address),
                replaced=lambda: self._is_replaced(role, index, claim),
            )
        )
        with self._lock:
            self._mine[role, index] = address
        settled = shown = False
        try:
            shown = self._shows(role, index, address)
            if shown:
                # The process removed above may have registered again before our entry became visible.
                self._make_room(role, index, address)
                settled = True
        finally:
            if not settled:
                self._withdraw(role, index, tries=1)
        if not shown:
            raise DiscoveryError(
                "This machine is blacklisted by consul. "
                f"Consul at {self._config.address} took {role} {index} at {address} as a service of "
                f"{self._id!r} and did not show it in {self._config.visible_tries} queries."
            )

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        with self._lock:
            mine = self._mine.get((role, index))
        if mine is not None and address in (None, mine):
            self._withdraw(role, index, tries=self._config.tries)
        for service in self._listed(role, index):
            if address in (None, _address_of(service)):
                self._remove(service, role, index)

    def query(self, role: str) -> dict[int, str]:
        return self.query_all().get(role, {})

    def query_all(self) -> dict[str, dict[int, str]]:
        """Return the addresses of all roles."""
        found = self._all()
        roles = {role for role, _, _ in found}
        return {role: _by_index(entry for of, entry, _ in found if of == role) for role in roles}

    def entries(self, role: str) -> list[Registration]:
        found = [entry for of, entry, _ in self._all() if of == role]
        return sorted({entry.index: entry for entry in sorted(found, key=_age_key)}.values())

    def roles(self) -> list[str]:
        return sorted({role for role, _, _ in self._all()})

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        return self._watch.add(role, callback)

    def deregister_all(self) -> None:
        """Remove every entry of the job, including the entries of other processes."""
        for role, entry, _ in self._all():
            self.deregister(role, entry.index)

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            mine = list(self._mine)
        for role, index in mine:
            self._withdraw(role, index, tries=1)
        self._client.close()

    def _make_room(self, role: str, index: int, address: str) -> None:
        """Remove the services that hold the place, and wait until queries no longer show them."""
        for _ in range(self._config.replace_tries):
            others = self._in_the_way(role, index, address)
            if not others:
                return
            for service in others:
                self._remove(service, role, index)
            self._sleep(self._config.replace_every.total_seconds())
        others = self._in_the_way(role, index, address)
        if others:
            raise DiscoveryError(
                f"cannot register {role} {index} with Consul: {_address_of(others[0])} has that place and "
                f"came back after each of {self._config.replace_tries} removals. "
                "Stop the process that holds it."
            )

    def _in_the_way(self, role: str, index: int, address: str) -> list[ConsulService]:
        """Return the services that hold the place under another address; one with the same is overwritten."""
        return [one for one in self._listed(role, index) if _address_of(one) != address]

    def _is_replaced(self, role: str, index: int, claim: Registration) -> bool:
        """Return whether another process registered for the same place later."""
        places = [entry for of, entry in self._read_once() if of == role and entry.index == index]
        return any(_age_key(entry) > _age_key(claim) for entry in places if entry.address != claim.address)

    def _shows(self, role: str, index: int, address: str) -> bool:
        tries = iter(range(self._config.visible_tries))

        def ask() -> bool | None:
            if self.query(role).get(index) == address:
                return True
            return False if next(tries, None) is None else None

        every = self._config.visible_every
        return bool(poll(ask, timeout=None, every=every, sleep=self._sleep))

    def _withdraw(self, role: str, index: int, tries: int) -> None:
        """Remove the entry that this process registered, and stop its heartbeats."""
        with self._lock:
            address = self._mine.pop((role, index), None)
        if address is None:
            return
        service_id, port = self._service_id(role, index, address), Address.parse(address).port
        try:
            self._retried(lambda: self._client.deregister(self._id, port, service_id), tries)
        except ClusterError as error:
            # Consul did not get the request, but the entry expires with its time to live.
            _log.warning("Consul: cannot deregister %s %d: %s", role, index, error)

    def _remove(self, service: ConsulService, role: str, index: int) -> None:
        """Remove a service, which may belong to another machine."""
        service_id = service.id or self._service_id(role, index, _address_of(service))

        def remove() -> None:
            here = service.node is None or service.node == self._client.node_name()
            self._client.deregister(self._id, service.port, service_id, None if here else service.node)

        self._retried(remove)

    def _query_once(self, role: str) -> dict[int, str]:
        return _by_index(entry for of, entry in self._read_once() if of == role)

    def _read_once(self) -> list[tuple[str, Registration]]:
        """What threads ask, which have time: they will ask again, and must end soon when told to."""
        found = map(_entry_of, self._client.services(self._id, LOOKUP_TIMEOUT))
        return [(one[0], one[1]) for one in found if one is not None]

    def _listed(self, role: str, index: int) -> list[ConsulService]:
        return [service for of, entry, service in self._all() if of == role and entry.index == index]

    def _all(self) -> list[_Found]:
        if self._closed:
            return []
        services = self._retried(lambda: self._client.services(self._id, QUERY_TIMEOUT))
        return [entry for service in services if (entry := _entry_of(service)) is not None]

    def _service_id(self, role: str, index: int, address: str) -> str:
        return f"{self._id}-{role}-{index}-{address}"

    def _retried(self, call: Callable[[], T], tries: int | None = None) -> T:
        """Call; while the agent cannot be reached, wait and try again, a few times."""
        for _ in range((self._config.tries if tries is None else tries) - 1):
            try:
                return call()
            except RetryableError as error:
                _log.info("Consul: retrying: %s", error)
                self._sleep(self._uniform(0, self._config.max_backoff.total_seconds()))
        return call()


_Found = tuple[str, Registration, ConsulService]
"""A role, an entry of it, and the service that says so."""


def _age_key(entry: Registration) -> tuple[float, str]:
    return entry.registered_at or 0.0, entry.address


def _by_index(entries: Iterable[Registration]) -> dict[int, str]:
    """Return addresses by index. If two claim one place, the one that registered last has it."""
    latest = {entry.index: entry.address for entry in sorted(entries, key=_age_key)}
    return dict(sorted(latest.items()))


def _entry_of(service: ConsulService) -> _Found | None:
    """Return the role and the entry; None for a service of that name that is none of ours."""
    role, index = service.tags.get("name"), service.tags.get("index", "")
    if role is None or not (index.isascii() and index.isdecimal()):
        return None
    try:
        registered_at = float(service.tags["registered_at"])
    except (KeyError, ValueError):
        registered_at = None
    return role, Registration(int(index), _address_of(service), registered_at), service


def _address_of(service: ConsulService) -> str:
    return concat_ip_and_port(service.tags.get("ip") or service.host, service.port)
