"""Discovery by ZooKeeper: an ephemeral node per entry, which ZooKeeper removes when its process dies.

`/monolith/<job>/<role>.<index>` holds the address. A node lives as long as the session that made
it, so a node of another session is never written into: it is replaced. One thread per discovery
does all the reading. Watches and reconnections only tell it what may have changed; it reads that
again, mends the entries made here, and calls back. What it has read is what `query` returns, also
while ZooKeeper is away.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from monolith import concurrency
from monolith.cluster.addresses import Clock, concat_ip_and_port
from monolith.cluster.discovery import (
    Callback,
    Closing,
    Registration,
    Watchers,
    check_registration,
    check_role,
    closed_error,
)
from monolith.errors import ClusterError, ConfigError, DiscoveryError, UnavailableError, optional_package

if TYPE_CHECKING:
    from kazoo.client import KazooClient

_log = logging.getLogger(__name__)

PORT = 2181
BASE = "/monolith"
MAX_PAUSE_S = 1.0
STALE_AFTER = timedelta(weeks=9)
"""Time without a change after which any other job may remove the nodes that a job left behind."""

Auth = tuple[tuple[str, str], ...]
"""(scheme, credential) pairs."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooKeeperConfig:
    """Which servers to ask, and how patiently."""

    servers: str
    """The addresses of the servers, as `host:2181,host:2181`."""
    auth: Auth = field(default=(), repr=False)
    """The credentials for ZooKeeper; see `get_zk_auth_data`."""
    private: bool = False
    """Whether only holders of the same `auth` may read and change the nodes of the job."""
    tries: int = 3
    delay: timedelta = timedelta(seconds=5)
    """The pause before the connection is tried again."""
    reregister_every: timedelta = timedelta(minutes=30)
    """How often entries of this process are checked even if no watch reports a change."""
    session_timeout: timedelta = timedelta(seconds=10)
    """How long an entry stays after its process has died."""
    connect_timeout: timedelta = timedelta(seconds=15)

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("ZooKeeper: no servers are named; give them as 'host:2181,host:2181'")
        if self.tries < 1:
            raise ConfigError(f"ZooKeeper: tries must be at least 1, got {self.tries}")
        if self.private and not self.auth:
            raise ConfigError("ZooKeeper: nodes cannot be private without auth; set ZK_AUTH to user:password")


def get_zk_auth_data(environment: Mapping[str, str]) -> Auth:
    """Return the digest credential of ZK_AUTH, `user:password`; nothing if it is unset or empty."""
    secret = environment.get("ZK_AUTH")
    return (("digest", secret),) if secret else ()


def is_ipv6_only(
    environment: Mapping[str, str], resolve: Callable[[str], str] = socket.gethostbyname
) -> bool:
    """Whether this machine has no IPv4 address: as the container's variables say, or its own name."""
    if any(name in environment for name in ("MY_HOST_IP", "MY_POD_IP", "MY_HOST_IPV6")):
        return not (environment.get("MY_HOST_IP") or environment.get("MY_POD_IP"))
    try:
        return not resolve(socket.gethostname())
    except OSError:
        return True


def default_zk_servers(
    hosts: Sequence[str] = (),
    ipv6_hosts: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    use_ipv6: bool = False,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> str:
    """Return those of the known servers that this machine can reach, as `ZooKeeperConfig` takes them."""
    chosen = ipv6_hosts if use_ipv6 or is_ipv6_only(environment, resolve) else hosts
    return ",".join(concat_ip_and_port(host, PORT) for host in chosen)


@dataclass(frozen=True, slots=True)
class _Node:
    role: str
    index: int
    address: str
    created: float
    """Unix seconds."""


class ZooKeeperDiscovery(Closing):
    """A `Discovery` in ZooKeeper, for the processes of one job.

    Raises:
        UnavailableError: No server answers.
        MissingExtraError: kazoo is not installed.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import ZooKeeperDiscovery
        >>> from monolith.cluster.zookeeper import ZooKeeperConfig
        >>> from monolith.errors import UnavailableError
        >>> config = ZooKeeperConfig(servers="127.0.0.1:1", tries=1, connect_timeout=timedelta(seconds=0.05))
        >>> try:
        ...     with ZooKeeperDiscovery("clicks", config) as discovery:
        ...         discovery.register("ps", 0, "10.0.0.1:7000")
        ... except UnavailableError:  # no server listens there
        ...     print("ZooKeeper does not answer")
        ZooKeeper does not answer
    """

    def __init__(self, job: str, config: ZooKeeperConfig) -> None:
        check_role(job)
        self._config = config
        self._prefix = f"{BASE}/{job}"
        self._watchers = Watchers()
        self._writing = concurrency.Lock()  # held while nodes are written; taken before _changed, never after
        self._changed = concurrency.Condition()  # guards all below; never held during a call to ZooKeeper
        self._nodes: dict[str, _Node] = {}
        self._mine: dict[str, str] = {}
        self._writes: dict[str, int] = {}
        """How often this process wrote each node: a read that started before the last write is stale."""
        self._list_again = True
        self._read_again: set[str] = set()
        self._tell_again = False
        self._repair_at = 0.0
        self._synced = False
        self._failure: ClusterError | None = None
        self._closed = False
        self._client = _connect(config)
        self._thread = concurrency.Thread(target=self._run, name=f"zookeeper-{job}", daemon=True)
        try:
            self._errors = _Errors()
            self._acl = self._make_acl()
            self._client.add_listener(self._on_state)
            self._retried(self._make_prefix)
            self._thread.start()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._synced or self._failure is not None,
                    config.connect_timeout.total_seconds(),
                )
                if not self._synced:
                    raise self._failure or UnavailableError(
                        f"ZooKeeper at {config.servers} did not list {self._prefix} in time"
                    )
        except BaseException:
            self.close()
            raise

    def register(self, role: str, index: int, address: str) -> None:
        check_registration(role, index, address)
        name = f"{role}.{index}"
        with self._writing:
            if self._closed:
                raise closed_error(f"ZooKeeper at {self._config.servers}")
            self._retried(lambda: self._claim(name, address, take=True))
            with self._changed:
                self._mine[name] = address
                self._nodes[name] = _Node(role, index, address, concurrency.time())
                self._wrote(name)
                self._read_again.add(name)
                self._changed.notify_all()

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        check_role(role)
        name = f"{role}.{index}"
        with self._writing:
            with self._changed:
                if address in (None, self._mine.get(name)):
                    self._mine.pop(name, None)
            if self._closed:
                return
            self._retried(lambda: self._remove(name, address))
            with self._changed:
                node = self._nodes.get(name)
                if node is not None and address in (None, node.address):
                    del self._nodes[name]
                self._wrote(name)
                self._list_again = True  # another process may have the node now; read it
                self._changed.notify_all()

    def query(self, role: str) -> dict[int, str]:
        return {} if self._closed else self._known(role)

    def entries(self, role: str) -> list[Registration]:
        with self._changed:
            nodes = [] if self._closed else list(self._nodes.values())
        found = [Registration(node.index, node.address, node.created) for node in nodes if node.role == role]
        return sorted(found)

    def roles(self) -> list[str]:
        with self._changed:
            return [] if self._closed else sorted({node.role for node in self._nodes.values()})

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        cancel = self._watchers.add(role, callback)
        with self._changed:
            self._tell_again = True
            self._changed.notify_all()
        return cancel

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.remove_listener(self._on_state)
        _disconnect(self._client)  # the session ends, and with it the nodes made here

    # What ZooKeeper calls, from threads that must not wait

    def _on_state(self, state: str) -> None:
        """Take note of a connection: what changed before it went unseen, and a new session has no nodes."""
        if state == "CONNECTED":
            with self._changed:
                self._list_again = True
                self._read_again |= self._nodes.keys() | self._mine.keys()
                self._repair_at = 0.0
                self._changed.notify_all()

    def _on_children(self, event: Any) -> None:
        if event.path is not None:  # else it only says that the connection went, as _on_state does
            with self._changed:
                self._list_again = True
                self._changed.notify_all()

    def _on_node(self, event: Any) -> None:
        if event.path is not None:
            with self._changed:
                self._read_again.add(event.path.rpartition("/")[2])
                self._changed.notify_all()

    # The thread that reads

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, max(0.0, self._repair_at - concurrency.monotonic()))
                if self._closed:
                    return
                tell, self._tell_again = self._tell_again, False
            if tell:
                self._watchers.tell(self._known)
            try:
                if self._client.connected:
                    start = concurrency.monotonic()
                    self._read()
                    self._repair()
                    # Many changes at once are read at once: no more than half of the time is spent reading.
                    self._pause(min(MAX_PAUSE_S, concurrency.monotonic() - start))
            except self._errors.passing as error:
                _log.info("ZooKeeper: reading again, after %r", error)
            except Exception as error:
                _log.exception("ZooKeeper: cannot read %s, retrying", self._prefix)
                with self._changed:
                    self._failure = _translated(error, f"read {self._prefix}", self._config)
                    self._changed.notify_all()
                self._pause(self._config.delay.total_seconds())
                continue
            if not self._client.connected:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._client.connected, 1.0)

    def _known(self, role: str) -> dict[int, str]:
        """What a watch is told: others do not go when this discovery is closed."""
        with self._changed:
            nodes = list(self._nodes.values())
        return {node.index: node.address for node in nodes if node.role == role}

    def _has_work(self) -> bool:
        return self._closed or self._list_again or bool(self._read_again) or self._tell_again

    def _read(self) -> None:
        """Read what may have changed, setting the watches anew, and tell the watchers."""
        with self._changed:
            listing, self._list_again = self._list_again, False
            names, self._read_again = self._read_again, set()
            before = dict(self._writes)
        try:
            if listing:
                names |= self._list(before)
            waiting = {name: self._client.get_async(self._path(name), self._on_node) for name in names}
            found: dict[str, _Node | None] = {}
            for name, answer in waiting.items():
                try:
                    data, stat = self._wait_for(answer)
                    role, index = _parse(name) or ("", -1)
                    address = data.decode(errors="replace")
                    found[name] = _Node(role, index, address, stat.ctime / 1000) if data else None
                except self._errors.no_node:
                    found[name] = None
        except BaseException:
            with self._changed:  # nothing was lost, only put off
                self._list_again |= listing
                self._read_again |= names
            raise
        with self._changed:
            for name, node in found.items():
                if self._writes.get(name) != before.get(name):
                    self._read_again.add(name)
                elif node is None:
                    self._nodes.pop(name, None)
                else:
                    self._nodes[name] = node
                if name in self._mine and (node is None or node.address != self._mine[name]):
                    self._repair_at = 0.0
            self._synced = True
            self._changed.notify_all()
        self._watchers.tell(self._known)

    def _list(self, before: Mapping[str, int]) -> set[str]:
        """Return the names that have not been read yet, and forget those that are gone.

        Args:
            before: `_writes` as it was before anything was read.
        """
        try:
            answer = self._client.get_children_async(self._prefix, self._on_children)
            listed = set(self._wait_for(answer))
        except self._errors.no_node:  # an operator or another process cleared the job's path
            self._make_prefix()
            with self._changed:
                self._list_again = True
            listed = set()
        with self._changed:
            gone = {
                name for name in self._nodes.keys() - listed if self._writes.get(name) == before.get(name)
            }
            if not self._mine.keys().isdisjoint(gone):
                self._repair_at = 0.0
            for name in gone:
                del self._nodes[name]
            return {name for name in listed - self._nodes.keys() if _parse(name) is not None}

    def _repair(self) -> None:
        """Put the entries made here right, if it is time to."""
        with self._changed:
            if concurrency.monotonic() < self._repair_at:
                return
            names = list(self._mine)
        for name in names:
            with self._writing:
                address = self._mine.get(name)
                if address is not None and self._claim(name, address, take=False):
                    with self._changed:
                        self._read_again.add(name)
        with self._changed:
            # Not before all went well: what failed is tried again as soon as there is a connection.
            self._repair_at = concurrency.monotonic() + self._config.reregister_every.total_seconds()

    # Nodes

    def _claim(self, name: str, address: str, *, take: bool) -> bool:
        """Make the node say `address`, in this session; return whether it had to change.

        Args:
            take: Also from another session that lives: for who registers. Who only looks after an old
                entry leaves it to the other, which registered later.
        """
        path, data = self._path(name), address.encode()
        while True:
            try:
                self._wait_for(
                    self._client.create_async(path, data, acl=self._acl, ephemeral=True, makepath=True)
                )
                return True
            except self._errors.node_exists:
                pass  # whose it is, is looked at next
            try:
                found, stat = self._wait_for(self._client.get_async(path))
                session = self._client.client_id
                if session is not None and stat.ephemeralOwner == session[0]:
                    if found == data:
                        return False
                    self._wait_for(self._client.set_async(path, data))
                    return True
                if stat.ephemeralOwner and not take:
                    _log.info("ZooKeeper: %s is %r's now, not %s's", path, found, address)
                    return False
                # In another session's node the address would go when that session does.
                if stat.numChildren:
                    self._client.delete(path, recursive=True)
                    continue
                swap = self._client.transaction()
                swap.delete(path, stat.version)
                swap.create(path, data, acl=self._acl, ephemeral=True)
                for result in self._wait_for(swap.commit_async()):
                    if isinstance(result, self._errors.kazoo):
                        raise result
                return True
            except self._errors.outrun as error:
                _log.debug("ZooKeeper: %s changed meanwhile (%r), checking again", path, error)

    def _remove(self, name: str, address: str | None) -> None:
        path = self._path(name)
        with contextlib.suppress(self._errors.no_node):
            if address is not None:
                data, _ = self._wait_for(self._client.get_async(path))
                if data != address.encode():
                    return
            try:
                self._wait_for(self._client.delete_async(path))
            except self._errors.not_empty:
                self._client.delete(path, recursive=True)

    def _wrote(self, name: str) -> None:
        self._writes[name] = self._writes.get(name, 0) + 1

    def _make_prefix(self) -> None:
        self._client.ensure_path(BASE)  # shared by all jobs; the first one makes it
        self._client.ensure_path(self._prefix, acl=self._acl)

    def _make_acl(self) -> list[Any] | None:
        from kazoo.security import CREATOR_ALL_ACL

        return list(CREATOR_ALL_ACL) if self._config.private else None

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _wait_for(self, answer: Any) -> Any:
        """Return what ZooKeeper answers. A call that is made while it is away would wait for ever."""
        return answer.get(timeout=self._config.session_timeout.total_seconds())

    def _retried(self, call: Callable[[], T]) -> T:
        """Call; when the connection goes, wait for it and try again, a few times. Translates errors."""
        last: Exception | None = None
        for number in range(self._config.tries):
            if number or not self._client.connected:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or self._client.connected, self._config.delay.total_seconds()
                    )
            if self._closed or not self._client.connected:
                last = last or ConnectionError("not connected")
                continue
            try:
                return call()
            except self._errors.passing as error:
                last = error
            except self._errors.kazoo as error:
                raise _translated(error, f"write below {self._prefix}", self._config) from error
        raise UnavailableError(
            f"ZooKeeper at {self._config.servers} cannot be reached: {self._config.tries} tries failed, "
            f"the last with {last!r}"
        ) from last

    def _pause(self, seconds: float) -> None:
        """Let time pass, but no more than until `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


def clear_zk_path(
    job: str, config: ZooKeeperConfig, *, force: bool = False, clock: Clock = concurrency.time
) -> None:
    """Make room for a job's nodes, and remove the nodes that old jobs left behind.

    A job counts as gone when nothing below its node has changed for nine weeks and no living process
    has a node there: a job that runs for months without a restart is never cleared.

    Args:
        force: Remove the job's nodes if there are any.

    Raises:
        ConfigError: There are some, and `force` is false.
        DiscoveryError: Processes of the job live and put their nodes back.
        UnavailableError: No server answers.
    """
    check_role(job)
    client, errors = _connect(config), _Errors()
    try:
        client.ensure_path(BASE)
        oldest = clock() - STALE_AFTER.total_seconds()
        for child in client.get_children(BASE):
            path = f"{BASE}/{child}"
            try:
                if _last_sign_of_life(client, path) < oldest:
                    client.delete(path, recursive=True)
            except errors.no_node:
                pass  # gone by itself, or with another's cleaning
            except errors.kazoo as error:
                _log.warning("ZooKeeper: cannot clear %s: %r", path, error)
        path = f"{BASE}/{job}"
        if client.exists(path) is not None:
            if not force:
                children = ",".join(sorted(client.get_children(path)))
                raise ConfigError(
                    f"there are [{children}] in monolith zk path {path}: a job of that name runs or has run. "
                    "Choose another name, or force to clear it."
                )
            client.delete(path, recursive=True)
    except errors.not_empty as error:
        raise DiscoveryError(
            f"cannot clear {BASE}/{job}: a process registers again, so the job is running. Stop it first."
        ) from error
    except errors.kazoo as error:
        raise _translated(error, f"clear {BASE}", config) from error
    finally:
        _disconnect(client)


def _last_sign_of_life(client: KazooClient, path: str) -> float:
    """Return Unix seconds of the last change at or below a node; infinity if a living process has one.

    A node's own time does not move when its children come and go.
    """
    stat = client.exists(path)
    if stat is None:
        return float("-inf")
    if stat.ephemeralOwner:
        return float("inf")
    below = (_last_sign_of_life(client, f"{path}/{child}") for child in client.get_children(path))
    return max(float(stat.mtime) / 1000, *below, float(stat.ctime) / 1000)


def _parse(name: str) -> tuple[str, int] | None:
    """Return role and index; None for a node that is no entry. A role may have dots of its own."""
    role, _, index = name.rpartition(".")
    return (role, int(index)) if role and index.isascii() and index.isdecimal() else None


class _Errors:
    """kazoo's exceptions by what one does about them; kazoo is optional, so they cannot be named above."""

    def __init__(self) -> None:
        from kazoo import exceptions
        from kazoo.handlers.threading import KazooTimeoutError

        self.kazoo = exceptions.KazooException
        self.no_node = exceptions.NoNodeError
        self.node_exists = exceptions.NodeExistsError
        self.not_empty = exceptions.NotEmptyError
        self.outrun = (
            exceptions.NoNodeError,
            exceptions.NodeExistsError,
            exceptions.BadVersionError,
            exceptions.NotEmptyError,
            exceptions.RolledBackError,
        )
        self.passing = (
            exceptions.ConnectionLoss,
            exceptions.SessionExpiredError,
            exceptions.OperationTimeoutError,
            exceptions.ConnectionClosedError,
            exceptions.SessionMovedError,
            KazooTimeoutError,
        )


class _Discreet(logging.LoggerAdapter[logging.Logger]):
    """kazoo's log without the credentials: at DEBUG it writes down every request, also the one with them."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        shown = tuple("Auth(...)" if type(arg).__name__ == "Auth" else arg for arg in args)
        super().log(level, msg, *shown, stacklevel=2, **kwargs)


def _connect(config: ZooKeeperConfig) -> KazooClient:
    with optional_package("kazoo", "zookeeper", "discovery through ZooKeeper"):
        from kazoo.client import KazooClient
        from kazoo.handlers.threading import KazooTimeoutError
    client = KazooClient(
        hosts=config.servers,
        timeout=config.session_timeout.total_seconds(),
        auth_data=list(config.auth),
        # Without end, and soon: a server that comes back must not wait a minute for its clients.
        connection_retry={"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 2.0},
        logger=_Discreet(logging.getLogger("kazoo.client"), {}),
    )
    try:
        client.start(config.connect_timeout.total_seconds())
    except KazooTimeoutError as cause:
        _disconnect(client)
        raise UnavailableError(
            f"ZooKeeper at {config.servers} did not answer within "
            f"{config.connect_timeout.total_seconds():g} s. Is it running, and is the port right?"
        ) from cause
    except BaseException:
        _disconnect(client)
        raise
    return client


def _disconnect(client: KazooClient) -> None:
    client.stop()
    client.close()


def _translated(error: Exception, doing: str, config: ZooKeeperConfig) -> ClusterError:
    if isinstance(error, _Errors().passing):
        return UnavailableError(f"cannot {doing}: ZooKeeper at {config.servers} went away ({error!r})")
    return DiscoveryError(f"cannot {doing}: ZooKeeper at {config.servers} refuses ({error!r})")
