"""Discovery by Ray: the entries of a job in an actor that any process of the cluster finds by its name.

Whoever comes first makes the actor; it outlives its maker, and ends itself when nobody has asked it for a
while. A process that registered or watches always has one call waiting there, which says that the process
lives and returns when something changed. An entry whose process was not heard of for `expire_after` goes.

The actor keeps entries in memory only. When it dies, the calls that wait there fail, so all processes know
at once: one makes the next actor, each registers again what it had, and watches say nothing until they have
had the time to.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from monolith.cluster.discovery import (
    Callback,
    Closing,
    Registration,
    Watchers,
    check_registration,
    check_role,
    closed_error,
)
from monolith.cluster.ray_connection import connected
from monolith.cluster.waiting import Clock
from monolith.errors import ClusterError, ConfigError, DeadlineExceededError, UnavailableError

_log = logging.getLogger(__name__)

_PURPOSE = "discovery through Ray"
_TRIES = 5
_MOST_CALLS = 100_000
"""That wait in the actor: one per process."""
_WAKE = None
"""An event that is no answer: there is another watch, or an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayDiscoveryConfig:
    """Which cluster, and how long an entry counts without a sign of life."""

    address: str = "auto"
    """Of the cluster, as `ray.init` takes it: host:port, or "auto" for the one that RAY_ADDRESS names or that
    runs on this machine. A process that is connected already stays so."""
    namespace: str = "monolith"
    """Ray's: jobs of one name in different namespaces do not meet."""
    expire_after: timedelta = timedelta(seconds=30)
    heartbeat: timedelta = timedelta(seconds=5)
    """How often a process says that it lives."""
    timeout: timedelta = timedelta(seconds=30)
    """How long to wait for an answer: the first includes starting the actor."""
    settle: timedelta = timedelta(seconds=2)
    """How long others may take to register again after the actor died."""
    linger: timedelta = timedelta(minutes=1)
    """How long the actor stays when nobody asks it any more."""

    def __post_init__(self) -> None:
        if not timedelta(0) < self.heartbeat < min(self.expire_after, self.linger):
            raise ConfigError(
                f"discovery through Ray: heartbeat ({self.heartbeat}) must be shorter than expire_after "
                f"({self.expire_after}) and linger ({self.linger}), or living entries would expire"
            )


Entry = tuple[str, int, str, float]
"""Role, index, address, and Unix seconds of the registration."""


class RayDiscovery(Closing):
    """Entries of one job.

    Raises:
        MissingExtraError: Ray is not installed.
        UnavailableError: There is no cluster at the address.
    """

    def __init__(self, job: str, config: RayDiscoveryConfig | None = None) -> None:
        check_role(job)
        self._config = RayDiscoveryConfig() if config is None else config
        self._job = job
        self._owner = secrets.token_hex(8)
        self._watchers = Watchers()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all below
        self._mine: dict[tuple[str, int], Registration] = {}
        self._actor: Any = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stop = threading.Event()
        self._connection = ExitStack()
        self._ray = self._connection.enter_context(connected(_PURPOSE, self._config.address))

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        self._check_open()
        lease_s = self._config.expire_after.total_seconds()
        registered_at = self._call("register", self._owner, lease_s, role, index, address)
        with self._lock:
            self._mine[role, index] = Registration(index, address, registered_at)
        self._keep_from_now()

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        check_role(role)
        if self._closed:
            return
        with self._lock:
            mine = self._mine.get((role, index))
            if mine is not None and address in (None, mine.address):
                del self._mine[role, index]
        self._call("deregister", role, index, address)

    def query(self, role: str) -> dict[int, str]:
        return {entry.index: entry.address for entry in self.entries(role)}

    def entries(self, role: str) -> list[Registration]:
        check_role(role)
        if self._closed:
            return []
        return sorted(Registration(*entry) for entry in self._call("entries", role))

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        check_role(role)
        if self._closed:
            return lambda: None
        cancel = self._watchers.add(role, callback)
        self._keep_from_now()
        self._events.put(_WAKE)
        return cancel

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            mine, self._mine = self._mine, {}
            thread, self._thread = self._thread, None
        self._stop.set()
        self._events.put(_WAKE)
        if thread is not None:
            thread.join()
        try:
            if mine:
                self._call("leave", self._owner)
        except ClusterError as error:
            _log.warning("discovery through Ray: entries made here stay until they expire: %s", error)
        finally:
            self._connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(f"the discovery of {self._job} through Ray")

    def _keep_from_now(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._keep, name=f"ray-{self._job}", daemon=True)
                self._thread.start()

    def _keep(self) -> None:
        """Have one call waiting at the actor, until closed."""
        known: str | None = None
        while not self._closed:
            try:
                answer = self._stay(known)
            except ClusterError as error:
                _log.warning("discovery through Ray: will try again: %s", error)
                self._stop.wait(1.0)
                continue
            if answer is None or self._closed:
                known = None if known is None else _actor_of(known)
                continue
            before, (known, addresses) = known, answer
            if before is not None and _actor_of(before) != _actor_of(known):
                # What was registered here is there again; what others had takes them a moment.
                self._stop.wait(self._config.settle.total_seconds())
                known = _actor_of(known)
                continue
            self._watchers.tell(lambda role, now=addresses: now[role] if role in now else self._ask(role))

    def _stay(self, known: str | None) -> tuple[str, dict[str, dict[int, str]]] | None:
        """Return the state after `known`, and the addresses of all watched roles; None if woken before."""
        with self._lock:
            mine = [
                (role, entry.index, entry.address, entry.registered_at)
                for (role, _), entry in self._mine.items()
            ]
        ...
