"""Discovery by Ray: the entries of a job in an actor that any process of the cluster finds by its name.

The first process makes the actor; the actor outlives that process, and ends itself after a while without
calls. A process that registered or watches always has one call waiting at the actor. The call shows that the
process lives, and returns when an entry changed. The entries of a process without one expire after
`expire_after`.

The actor keeps entries in memory only. When it dies, the calls that wait there fail, so all processes know
at once: one makes the next actor, each registers again what it had, and watches say nothing until they have
had the time to.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from monolith.cluster.addresses import Address, Clock, check_port
from monolith.cluster.discovery import (
    Callback,
    Closing,
    Registration,
    Watchers,
    check_registration,
    check_role,
    closed_error,
)
from monolith.errors import (
    ClusterError,
    ConfigError,
    DeadlineExceededError,
    MissingExtraError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

AUTO = "auto"
"""The address of the cluster that RAY_ADDRESS names, or that runs on this machine."""
_PURPOSE = "discovery through Ray"
_TRIES = 5
_GATHER_S = 0.25
"""After a change, how long to wait before asking for more: many may come, while many watch."""
_MOST_CALLS = 100_000
"""That wait in the actor: one per process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayDiscoveryConfig:
    """Which cluster, and how long an entry counts without a sign of life."""

    address: str = AUTO
    """The address of the cluster, as `ray.init` takes it: host:port, or "auto" for the one that RAY_ADDRESS
    names or that runs on this machine. A process that is connected already stays so."""
    namespace: str = "monolith"
    """The Ray namespace: jobs with the same name in different namespaces do not meet."""
    expire_after: timedelta = timedelta(seconds=30)
    heartbeat: timedelta = timedelta(seconds=5)
    """How often a process sends a heart-beat."""
    timeout: timedelta = timedelta(seconds=30)
    """How long to wait for an answer; the first includes starting the actor."""
    settle: timedelta = timedelta(seconds=2)
    """How long other processes may take to register again after the actor died."""
    linger: timedelta = timedelta(minutes=1)
    """How long the actor stays when no process asks it any more."""

    def __post_init__(self) -> None:
        if not timedelta(0) < self.heartbeat < min(self.expire_after, self.linger):
            raise ConfigError(
                f"discovery through Ray: heartbeat ({self.heartbeat}) must be shorter than expire_after "
                f"({self.expire_after}) and linger ({self.linger}), or entries of live processes would expire"
            )


Key = tuple[str, int]
"""Role and index."""

Entry = tuple[str, int, str, float | None]
"""Role, index, address, and Unix seconds of the registration."""

State = tuple[str, int]
"""What has been seen of a job: which actor, and how many of its changes."""

Answer = tuple[State, dict[str, dict[int, str]], list[Key]]
"""To who stays: the state, the addresses of the roles it watches, and which of its entries are gone."""


class RayDiscovery(Closing):
    """Entries of one job.

    Who of a process connects it to Ray, disconnects it: of several discoveries, close the first one last.

    Raises:
        MissingExtraError: Ray is not installed.
        UnavailableError: There is no cluster at the address.
    """

    def __init__(self, job: str, config: RayDiscoveryConfig | None = None) -> None:
        check_role(job)
        self._config = RayDiscoveryConfig() if config is None else config
        self.job = job
        self._owner = secrets.token_hex(8)
        self._watchers = Watchers()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Answers of the actor to calls that wait there, and None to wake up the waiting thread."""
        self._stop = threading.Event()
        # Held while entries are written: Ray does not promise that calls arrive in their order.
        self._writing = threading.Lock()  # taken before _lock, never after
        self._lock = threading.Lock()  # guards all below
        self._mine: dict[Key, Registration] = {}
        self._actor: Any = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._connection = ExitStack()
        self._ray = self._connection.enter_context(connected(_PURPOSE, self._config.address))

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        with self._writing:
            if self._closed:
                raise closed_error(f"the discovery of {self.job!r} through Ray")
            registered_at = self._call("register", self._owner, self._lease_s, role, index, address)
            with self._lock:
                self._mine[role, index] = Registration(index, address, registered_at)
        self._keep_from_now()

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        check_role(role)
        if self._closed:
            return
        with self._writing:
            with self._lock:
                mine = self._mine.get((role, index))
                if mine is not None and address in (None, mine.address):
                    del self._mine[role, index]
            self._call("deregister", role, index, address)

    def query(self, role: str) -> dict[int, str]:
        return {entry.index: entry.address for entry in self.entries(role)}

    def entries(self, role: str) -> list[Registration]:
        check_role(role)
        return [] if self._closed else self._entries(role)

    def roles(self) -> list[str]:
        found: list[str] = [] if self._closed else self._call("roles")
        return found

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        check_role(role)
        if self._closed:
            return lambda: None
        cancel = self._watchers.add(role, callback)
        self._keep_from_now()
        self._events.put(None)
        return cancel

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread, self._thread = self._thread, None
        self._stop.set()
        self._events.put(None)
        if thread is not None:
            thread.join()
        try:
            with self._writing:
                if self._mine:
                    self._call("leave", self._owner)
        except ClusterError as error:
            _log.warning("discovery through Ray: cannot deregister, entries will expire: %s", error)
        finally:
            self._connection.close()

    @property
    def _lease_s(self) -> float:
        return self._config.expire_after.total_seconds()

    def _entries(self, role: str) -> list[Registration]:
        return sorted(Registration(*entry) for entry in self._call("entries", role))

    def _keep_from_now(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._keep, name=f"ray-{self.job}", daemon=True)
                self._thread.start()

    def _keep(self) -> None:
        """Have one call waiting at the actor, until closed."""
        known: State | None = None
        quiet_until = 0.0
        while not self._closed:
            wait_s = self._config.heartbeat.total_seconds()
            left_s = quiet_until - time.monotonic()
            try:
                answer = self._stay(known, min(wait_s, left_s) if left_s > 0 else wait_s)
                if answer is None:
                    known = known and (known[0], -1)  # a new watcher knows no addresses yet
                    continue
                before, (known, addresses, missing) = known, answer
                self._put_back(missing)
                if before is not None and before[0] != known[0]:
                    # A new actor. It has our entries again; other processes may need more time for theirs.
                    quiet_until = time.monotonic() + self._config.settle.total_seconds()
                if time.monotonic() >= quiet_until:
                    self._tell(addresses)
                if before != known:
                    self._stop.wait(_GATHER_S)
            except ClusterError as error:
                _log.warning("discovery through Ray: retrying: %s", error)
                self._stop.wait(1.0)
            except Exception:
                _log.exception("discovery through Ray: retrying")
                self._stop.wait(1.0)

    def _put_back(self, missing: Sequence[Key]) -> None:
        if not missing:
            return
        with self._writing:
            with self._lock:
                entries = [
                    (role, index, entry.address, entry.registered_at)
                    for role, index in missing
                    if (entry := self._mine.get((role, index))) is not None
                ]
            self._call("put_back", self._owner, self._lease_s, entries)

    def _tell(self, addresses: Mapping[str, Mapping[int, str]]) -> None:
        def now(role: str) -> Mapping[int, str]:
            if role in addresses:
                return addresses[role]
            return {entry.index: entry.address for entry in self._entries(role)}  # watched since we asked

        if not self._closed:
            self._watchers.tell(now)

    def _stay(self, known: State | None, wait_s: float) -> Answer | None:
        """Return the actor's answer; None if another event woke this thread up."""
        end = time.monotonic() + wait_s + self._config.timeout.total_seconds()
        actor, future = self._begin_stay(known, wait_s)
        while True:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise self._too_late() from None
            if event is None:
                return None
            if event is not future:
                continue  # the answer to a call that was given up
            try:
                answer: Answer = future.result()
            except self._ray.exceptions.RayActorError:
                self._forget(actor)
                self._stop.wait(0.1)
                actor, future = self._begin_stay(known, wait_s)
            else:
                return answer

    def _begin_stay(self, known: State | None, wait_s: float) -> tuple[Any, Any]:
        with self._lock:
            mine = list(self._mine)
            roles = sorted(self._watchers.roles())
            actor = self._find()
            call = actor.stay.remote(
                self._owner, self._lease_s, mine, roles=roles, known=known, wait_s=wait_s
            )
        future = call.future()
        future.add_done_callback(self._events.put)
        return actor, future

    def _call(self, method: str, *arguments: object) -> Any:
        """Return the actor's answer."""
        cause: Exception | None = None
        for attempt in range(_TRIES):
            with self._lock:
                actor = self._find()
                call = getattr(actor, method).remote(*arguments)
            try:
                return self._ray.get(call, timeout=self._config.timeout.total_seconds())
            except self._ray.exceptions.GetTimeoutError as error:
                raise self._too_late() from error
            except self._ray.exceptions.RayActorError as error:
                cause = error
                self._forget(actor)
                time.sleep(0.1 * attempt)
        raise UnavailableError(
            f"discovery of {self.job!r} through Ray: its actor died {_TRIES} times in a row: {cause} "
            "`ray list actors --detail` and `ray logs actor` say more."
        ) from cause

    def _find(self) -> Any:
        """Return the job's actor; make it if there is none."""
        if self._actor is not None:
            return self._actor
        if not self._ray.is_initialized():  # a call would start another cluster
            raise UnavailableError(
                f"discovery of {self.job!r} through Ray: this process has been disconnected from Ray"
            )
        self._actor = (
            self._ray.remote(_Registry)
            .options(
                name=f"discovery of {self.job}",
                namespace=self._config.namespace,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,  # there is room for it even where members have taken all
                max_restarts=0,  # another could not know what this one knew, so its death is no secret
                max_concurrency=_MOST_CALLS,
            )
            .remote(self._config.linger.total_seconds())
        )
        return self._actor

    def _forget(self, actor: Any) -> None:
        with self._lock:
            if self._actor is actor:
                self._actor = None

    def _too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"discovery of {self.job!r} through Ray: no answer for {self._config.timeout}; "
            "`ray status` says whether the cluster is well"
        )


@dataclass(slots=True)
class _Held:
    registration: Registration
    owner: str
    expires: float


class _Registry:
    """The entries of a job: runs in an actor, one call at a time except where it waits."""

    def __init__(self, linger_s: float, clock: Clock = time.monotonic) -> None:
        self._linger_s = linger_s
        self._clock = clock
        self._held: dict[Key, _Held] = {}
        self._state: State = (secrets.token_hex(8), 0)
        self._changed = asyncio.Event()
        """Of the next change; each has its own."""
        self._end: asyncio.TimerHandle | None = None

    async def register(self, owner: str, lease_s: float, role: str, index: int, address: str) -> float:
        self._heard()
        registered_at = time.time()
        self._put(owner, lease_s, role, Registration(index, address, registered_at))
        return registered_at

    async def deregister(self, role: str, index: int, address: str | None) -> None:
        self._heard()
        held = self._held.get((role, index))
        if held is not None and address in (None, held.registration.address):
            self._remove([(role, index)])

    async def leave(self, owner: str) -> None:
        self._heard()
        self._remove([key for key, held in self._held.items() if held.owner == owner])

    async def entries(self, role: str) -> list[tuple[int, str, float | None]]:
        self._heard()
        found = (held.registration for (of, _), held in self._held.items() if of == role)
        return [(entry.index, entry.address, entry.registered_at) for entry in found]

    async def roles(self) -> list[str]:
        self._heard()
        return sorted({role for role, _ in self._held})

    async def put_back(self, owner: str, lease_s: float, entries: Sequence[Entry]) -> None:
        self._heard()
        for role, index, address, registered_at in entries:
            if (role, index) not in self._held:
                self._put(owner, lease_s, role, Registration(index, address, registered_at))

    async def stay(
        self,
        owner: str,
        lease_s: float,
        mine: Sequence[Key],
        *,
        roles: Sequence[str],
        known: State | None,
        wait_s: float,
    ) -> Answer:
        """Keep an owner's entries alive; wait until one is gone or the state is not `known`."""
        self._heard()
        for key in mine:
            held = self._held.get(key)
            if held is not None and held.owner == owner:  # else another process has the place now
                held.expires = self._clock() + lease_s
        missing = [key for key in mine if key not in self._held]
        if missing:
            wait_s = 0.0
        end = self._clock() + wait_s
        while self._state == known and (now := self._clock()) < end:
            next_expiry = min((held.expires for held in self._held.values()), default=end)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, min(end, next_expiry) - now))
            self._expire()
        addresses: dict[str, dict[int, str]] = {role: {} for role in roles}
        for (role, index), held in self._held.items():
            if role in addresses:
                addresses[role][index] = held.registration.address
        return self._state, addresses, missing

    def _heard(self) -> None:
        """Note a call: remove expired entries, and postpone the end of this actor."""
        self._expire()
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(self._linger_s, _end_this_actor)

    def _expire(self) -> None:
        now = self._clock()
        self._remove([key for key, held in self._held.items() if held.expires <= now])

    def _put(self, owner: str, lease_s: float, role: str, registration: Registration) -> None:
        self._held[role, registration.index] = _Held(registration, owner, self._clock() + lease_s)
        self._note_change()

    def _remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._held[key]
        if keys:
            self._note_change()

    def _note_change(self) -> None:
        self._state = (self._state[0], self._state[1] + 1)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _end_this_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


LOCAL = "local"
"""The address of a cluster that does not exist yet: of this machine, for as long as the connection lasts."""

_LISTENING_WITHIN = timedelta(seconds=10)


def import_ray(purpose: str) -> Any:
    """Return the package.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as cause:
        raise MissingExtraError("ray", "ray", purpose) from cause
    return ray


@contextmanager
def connected(
    purpose: str, address: str, *, cpus: int | None = None, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """Give the package, with this process connected; where it was before, all else is left as it is.

    Args:
        purpose: What Ray is needed for, in words.
        address: host:port of a cluster's head, ray://host:port of its client server, AUTO or LOCAL.
        cpus: Of a LOCAL cluster; by default those of this machine.
        runtime_env: What Ray takes to the machines, such as {"working_dir": "."}; see its documentation.

    Raises:
        AddressError: It is no address.
        MissingExtraError: Ray is not installed.
        UnavailableError: There is no such cluster, or it does not answer.
    """
    ray = import_ray(purpose)
    if ray.is_initialized():
        yield ray
        return
    if address not in (AUTO, LOCAL):
        listening = Address.parse(address.removeprefix("ray://"))
        # Ray itself would try for minutes, in a call that no signal interrupts.
        if not check_port(listening.host, listening.port, _LISTENING_WITHIN):
            raise _unavailable(purpose, address, f"nothing listens there after {_LISTENING_WITHIN}.")
    local = {"num_cpus": cpus, "include_dashboard": False}
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(
            address,
            runtime_env=None if runtime_env is None else dict(runtime_env),
            log_to_driver=False,
            **(local if address == LOCAL else {}),
        )
    except (ConnectionError, TimeoutError, RuntimeError) as cause:
        raise _unavailable(purpose, address, str(cause)) from cause
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _unavailable(purpose: str, address: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"{purpose}: cannot connect to Ray at {address!r}: {why} `ray status` on its head says whether "
        "it runs; both sides need the same versions of Ray and Python."
    )
