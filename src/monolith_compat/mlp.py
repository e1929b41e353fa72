"""MLP: a scheduler that sets the role of every process and the addresses of its peers in its environment.

MLP_ROLE and MLP_ROLE_INDEX name this process, MLP_<ROLE>_NUM how many there are of each role, and
MLP_<ROLE>_<i>_PRIMARY_HOST (or _HOST) and _PORT where each of them listens. Under MPI several
workers share one container: there the rank says who this is, the containers are counted by
rank // local size, and the ports follow from the first one.

Reading the environment does nothing else. `monolith data dispatcher` and `worker` join the chief; workers and
parameter servers of a run end with it by themselves.
"""

from __future__ import annotations

import difflib
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from monolith.cluster.addresses import (
    Address,
    Clock,
    Sleep,
    check_port,
    concat_ip_and_port,
    get_local_host,
    poll,
    wait_for_port,
)
from monolith.cluster.discovery import Callback, Closing, Registration, Watchers
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.discovery import CheckPort, Role, Scheduler

_log = logging.getLogger(__name__)

DEFAULT_PORT = 2222
"""What MLP means where it names no port."""
DEFAULT_DISPATCHER = "localhost:5050"
DEFAULT_PROFILER_PORT = 6666
DEFAULT_TRACE_FOLDER = "/tensorboard_logs/"

RESOURCES = {"CPU", "GPU", "MEM"}
"""Have a MLP_<NAME>_NUM like roles, and are none."""


class MLPEnv:
    """What MLP says about this process and its peers. Role names are taken in any case.

    Args:
        environment: All of the environment; what begins with MLP_ or MPI_ is kept, without blanks and
            quotes around it, and an empty value counts as missing.
        host: Of this process; by default what the scheduler names, else the local ip.

    Raises:
        ConfigError: A port, count or index is no number.
    """

    def __init__(self, environment: Mapping[str, str], host: str | None = None) -> None:
        kept = {name: _unquoted(text) for name, text in environment.items()}
        self._values = {
            name: text for name, text in kept.items() if name.startswith(("MLP_", "MPI_")) and text
        }
        self.framework = self._get("MLP_FRAMEWORK")
        self.ssh_port = self._number("MLP_SSH_PORT")
        self.log_path = self._get("MLP_LOG_PATH")
        self.debug_port = self._number("MLP_DEBUG_PORT")
        self.entrypoint_dir = self._get("MLP_ENTRYPOINT_DIR")
        self.task_cmd = self._get("MLP_TASK_CMD")
        self.role = (self._get("MLP_ROLE") or "").upper()
        self.all_roles = self._count_roles()
        self.cpu = self._number("MLP_CPU") or 0
        self.gpu = self._number("MLP_GPU") or 0
        self.mem = self._number("MLP_MEM") or 0
        self.gpu_type = self._get("MLP_GPU_TYPE") or ""
        self.host = get_local_host(environment) if host is None else host
        self.trace_folder = kept.get("TENSORBOARD_LOG_PATH") or DEFAULT_TRACE_FOLDER
        """Where profiles are written."""

        self.enable_mpi = "OMPI_COMM_WORLD_RANK" in environment and self.role == "WORKER"
        """Whether this is one of several workers that MPI started."""
        rank = _integer("OMPI_COMM_WORLD_RANK", kept.get("OMPI_COMM_WORLD_RANK")) or 0
        self.mpi_size = _integer("OMPI_COMM_WORLD_SIZE", kept.get("OMPI_COMM_WORLD_SIZE")) or 1
        self.mpi_local_size = (
            _integer("OMPI_COMM_WORLD_LOCAL_SIZE", kept.get("OMPI_COMM_WORLD_LOCAL_SIZE")) or 1
        )
        self.index = rank if self.enable_mpi else self._number("MLP_ROLE_INDEX") or 0
        self.port = (self._number("MLP_PORT") or 0) + (rank if self.enable_mpi else 0)
        if self.enable_mpi:
            self.all_roles["WORKER"] = self.mpi_size
        self.available = bool(self._values) and bool(self.all_roles)
        """Whether MLP started this process."""

    @property
    def avaiable(self) -> bool:
        """`available`, as it was spelled once."""
        return self.available

    @property
    def queue_owner(self) -> tuple[str, int] | None:
        """Who holds the shared input queue: the first PS, else the first worker; None means this process."""
        return next(((role.lower(), 0) for role in ("PS", "WORKER") if role in self.all_roles), None)

    def num_replicas(self, role: str | None = None) -> int:
        """Return how many there are of a role, by default of the own one."""
        role = self._role(role)
        return self.mpi_size if self._is_mpi(role) else self._number(f"MLP_{role}_NUM") or 0

    def get_all_host(self, role: str | None = None, is_primary: bool = True) -> list[str]:
        return self._list(role, "HOSTS", is_primary)

    def get_all_addrs(self, role: str | None = None, is_primary: bool = True) -> list[str]:
        return self._list(role, "ADDRS", is_primary)

    def get_host(
        self, role: str | None = None, index: int | None = None, is_primary: bool = True
    ) -> str | None:
        """Return the host of a peer, by default of this process's own entry; None if MLP names none."""
        role = self._role(role)
        number = self._index(role, index) // (self.mpi_local_size if self._is_mpi(role) else 1)
        return self._get(f"MLP_{role}_{number}_{'PRIMARY_' if is_primary else ''}HOST")

    def get_addr(
        self, role: str | None = None, index: int | None = None, is_primary: bool = True
    ) -> str | None:
        """Return host:port of a peer; None if MLP names no host or no port."""
        host, port = self.get_host(role, index, is_primary), self._port(self._role(role), index)
        return None if host is None or port is None else concat_ip_and_port(host, port)

    def get_port(self, role: str | None = None, index: int | None = None) -> int:
        """Return the port of a peer; where MLP names none, count from 2222."""
        port = self._port(self._role(role), index)
        if port is not None:
            return port
        role = self._role(role)
        return DEFAULT_PORT + (self._index(role, index) if self._is_mpi(role) else 0)

    def dispatcher_addr(self, role: str = "dispatcher") -> str | None:
        return self.get_addr(role)

    def dispatcher_target(self, role: str = "dispatcher") -> str:
        return f"grpc://{self.dispatcher_addr(role) or DEFAULT_DISPATCHER}"

    def profiler_port(self, base: int = DEFAULT_PROFILER_PORT) -> int:
        """Return where this process offers its profile: under MPI each rank has a port of its own."""
        return base + (self.index if self.enable_mpi else 0)

    def extra_dsworker_ports(self, count: int) -> list[int]:
        """Return ports for `count` data workers next to this worker, which no rank uses otherwise."""
        first = self.port - self.index + self.mpi_size + self.index * count
        return list(range(first, first + count))

    def wait(
        self,
        role: str | None = None,
        index: int = 0,
        timeout: timedelta | None = None,
        use_ssh: bool = True,
        *,
        every: timedelta = timedelta(seconds=5),
        check: CheckPort = check_port,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> bool:
        """Wait until a peer can be reached; return whether it can.

        Args:
            timeout: None waits for as long as it takes.
            use_ssh: Ask at the container's ssh port, which is open before the peer is; where MLP
                names none, and else, at the peer's own port.
        """
        host = self.get_host(role, index)
        if host is None:
            _log.warning("MLP: cannot wait for %s %d: host is None", self._role(role), index)
            return False
        port = self._probe_port(role, index, use_ssh)
        found = poll(
            lambda: check(host, port, timedelta(seconds=1)) or None,
            timeout=timeout,
            every=every,
            clock=clock,
            sleep=sleep,
        )
        if found is None:
            _log.warning("wait %s timeout!", concat_ip_and_port(host, port))
        return bool(found)

    def join(
        self,
        role: str = "worker",
        index: int = 0,
        use_ssh: bool = True,
        *,
        leave: Callable[[int], object] = sys.exit,
        every: timedelta = timedelta(seconds=10),
        probe_timeout: timedelta = timedelta(seconds=60),
        check: CheckPort = check_port,
        sleep: Sleep = time.sleep,
    ) -> None:
        """Wait until a peer answers and then until it no longer does, and exit with status 0: helpers end so.

        Args:
            leave: Ends the process.

        Raises:
            ConfigError: MLP names no host for the peer, so there is no peer to wait for.
        """
        host = self.get_host(role, index)
        if host is None:
            raise ConfigError(
                f"MLP: cannot join {role} {index}: the environment has no "
                f"MLP_{role.upper()}_{index}_PRIMARY_HOST"
            )
        port = self._probe_port(role, index, use_ssh)
        self.wait(role, index, None, use_ssh, check=check, sleep=sleep)
        while check(host, port, probe_timeout):
            sleep(every.total_seconds())
        _log.info("MLP: %s %d is gone; this process stops, too", role, index)
        leave(0)

    def _probe_port(self, role: str | None, index: int, use_ssh: bool) -> int:
        return self.ssh_port if use_ssh and self.ssh_port is not None else self.get_port(role, index)

    def _get(self, name: str) -> str | None:
        return self._values.get(name)

    def _number(self, name: str) -> int | None:
        return _integer(name, self._values.get(name))

    def _list(self, role: str | None, what: str, is_primary: bool) -> list[str]:
        text = self._get(f"MLP_{self._role(role)}_ALL_{'PRIMARY_' if is_primary else ''}{what}") or ""
        return [part.strip() for part in text.split(",") if part.strip()]

    def _count_roles(self) -> dict[str, int]:
        roles = {}
        for name in self._values:
            parts = name.split("_")
            if len(parts) == 3 and parts[2] == "NUM" and parts[1] not in RESOURCES:
                roles[parts[1]] = self._number(name) or 0
        return roles

    def _role(self, role: str | None) -> str:
        return self.role if role is None else role.upper()

    def _is_mpi(self, role: str) -> bool:
        return self.enable_mpi and role == "WORKER"

    def _index(self, role: str, index: int | None) -> int:
        return index if index is not None else self.index if role == self.role else 0

    def _port(self, role: str, index: int | None) -> int | None:
        number = self._index(role, index)
        if not self._is_mpi(role):
            return self._number(f"MLP_{role}_{number}_PORT")
        first = self._number(f"MLP_{role}_0_PORT")
        return None if first is None else first + number


class MLPDiscovery(Closing):
    """The roles of MLP's environment. To register is to check that this is what MLP says, and to be seen.

    Args:
        ps_timeout: How long `query("ps")` waits for each parameter server's port. Zero or less does
            not ask the ports.
    """

    def __init__(
        self,
        env: MLPEnv,
        *,
        ps_timeout: timedelta = timedelta(hours=1),
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._env = env
        self._ps_timeout = ps_timeout
        self._clock, self._sleep = clock, sleep
        self._lock = threading.RLock()  # guards all below, and makes callbacks come one at a time
        self._hidden: set[tuple[str, int]] = set()
        self._watchers = Watchers()
        self._closed = False

    @property
    def addr(self) -> str:
        """Where this process listens."""
        return concat_ip_and_port(self._env.host, self._env.port)

    @property
    def server_type(self) -> str:
        return self._env.role.lower()

    @property
    def index(self) -> int:
        return self._env.index

    def register(self, role: str, index: int, address: str) -> None:
        """Show an entry again that was hidden.

        Raises:
            ConfigError: MLP knows no such role or index, or another port or host for it.
        """
        self._check(role, index, address)
        self._hide_or_show(lambda: self._hidden.discard((role.lower(), index)))

    def deregister(self, role: str, index: int, address: str | None = None) -> None:
        """Hide an entry from the queries of this process."""
        if address is not None:
            self._check(role, index, address)
        self._hide_or_show(lambda: self._hidden.add((role.lower(), index)))

    def deregister_all(self) -> None:
        """Hide everything."""
        for role, count in self._env.all_roles.items():
            for index in range(count):
                self.deregister(role, index)

    def query(self, role: str, skip_port_check: bool = False) -> dict[int, str]:
        """Return the addresses of a role. Those of `ps` only once each accepts a connection.

        Raises:
            DeadlineExceededError: A parameter server did not open its port in time.
        """
        found = self._visible(role)
        if role.lower() == "ps" and not skip_port_check and self._ps_timeout > timedelta(0):
            for address in found.values():
                wait_for_port(address, self._ps_timeout, clock=self._clock, sleep=self._sleep)
        return found

    def query_all(self) -> dict[str, dict[int, str]]:
        """Return the addresses of all of ps, worker and chief that MLP knows, without asking their ports."""
        roles = [role for role in ("ps", "worker", "chief") if role.upper() in self._env.all_roles]
        return {} if self._closed else {role: self._visible(role) for role in roles}

    def entries(self, role: str) -> list[Registration]:
        return [Registration(index, address) for index, address in self._visible(role).items()]

    def roles(self) -> list[str]:
        return sorted(role.lower() for role in self._env.all_roles if self._visible(role))

    def watch(self, role: str, callback: Callback) -> Callable[[], None]:
        """Call back once, and when this process hides or shows an entry: nothing else changes."""
        cancel = self._watchers.add(role, callback)
        self._hide_or_show(lambda: None)
        return cancel

    def close(self) -> None:
        self._closed = True

    def _visible(self, role: str) -> dict[int, str]:
        if self._closed:
            return {}
        with self._lock:
            shown = [
                index
                for index in range(self._env.num_replicas(role))
                if (role.lower(), index) not in self._hidden
            ]
        addresses = {index: self._env.get_addr(role, index) for index in shown}
        return {index: address for index, address in addresses.items() if address is not None}

    def _hide_or_show(self, change: Callable[[], None]) -> None:
        with self._lock:
            change()
            if not self._closed:
                self._watchers.tell(self._visible)

    def _check(self, role: str, index: int, address: str) -> None:
        env, given = self._env, Address.parse(address)
        doing = f"MLP: {role} {index} cannot be at {address}: "
        if role.upper() not in env.all_roles:
            raise ConfigError(doing + f"MLP knows only the roles {sorted(env.all_roles)}")
        if not 0 <= index < env.num_replicas(role):
            raise ConfigError(doing + f"there are {env.num_replicas(role)} of that role")
        if given.port != env.get_port(role, index):
            raise ConfigError(doing + f"MLP gives it the port {env.get_port(role, index)}")
        hosts = {"local", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::", env.host}
        for is_primary in (True, False):
            hosts |= {env.get_host(role, index, is_primary) or env.host}
        own = env.get_host(is_primary=False)
        if given.host not in hosts | {own}:
            raise ConfigError(doing + f"MLP gives it the host {env.get_host(role, index)}")


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'").strip()


def _integer(name: str, text: str | None) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError as cause:
        raise ConfigError(f"MLP: the environment's {name} must be a whole number, got {text!r}") from cause


class MlpScheduler(Scheduler):
    """MLP, whose variables name the role of each process and the addresses of its peers."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return bool(environ.get("MLP_ROLE", "").strip())

    def role(self, config: RunConfig, environ: Mapping[str, str]) -> Role:  # noqa: ARG002
        env = MLPEnv(environ)
        if not env.available or not env.role:
            raise ConfigError(
                "MLP did not start this process: its environment has no MLP_ROLE or no MLP_<ROLE>_NUM"
            )
        return Role(
            kind=env.role.lower(),
            index=env.index,
            source="MLP",
            address=env.get_addr(),
            num_ps=env.num_replicas("ps"),
            num_workers=env.num_replicas("worker"),
        )

    def open(self, config: RunConfig, environ: Mapping[str, str]) -> MLPDiscovery:  # noqa: ARG002
        return MLPDiscovery(MLPEnv(environ))

    def listen_address(self, config: RunConfig, environ: Mapping[str, str]) -> str | None:  # noqa: ARG002
        """Return the address in MLP's entry for this process; without an entry, MLP_PORT of this host.

        Raises:
            ConfigError: The two differ: the other processes would look for this one at the wrong port.
        """
        env = MLPEnv(environ)
        named = env.get_addr()
        if not env.port:
            return named
        if named is None:
            return concat_ip_and_port(env.host, env.port)
        if Address.parse(named).port != env.port:
            raise ConfigError(
                f"MLP contradicts itself: by MLP_PORT this process, {env.role.lower()} {env.index}, listens "
                f"on port {env.port}, and others are told {named}"
            )
        return named

    def dispatcher_address(self, config: RunConfig, environ: Mapping[str, str]) -> str:  # noqa: ARG002
        address = MLPEnv(environ).dispatcher_addr()
        if address is None:
            wanted = ("MLP_DISPATCHER_0_PRIMARY_HOST", "MLP_DISPATCHER_0_PORT")
            missing = next(name for name in wanted if not environ.get(name))
            known = [name for name in environ if name.startswith("MLP_")]
            near = difflib.get_close_matches(missing, known, n=1)
            raise ConfigError(
                f"data service: MLP's environment has no {missing}, so no process can find the dispatcher"
                + (f"; it has {near[0]}" if near else "")
            )
        return address

    def extra_data_workers(self, environ: Mapping[str, str], count: int) -> tuple[int, list[int]]:
        env = MLPEnv(environ)
        return env.num_replicas("dsworker"), env.extra_dsworker_ports(count)

    def sets_variable(self, name: str) -> bool:
        return name.startswith("MLP_")

    def stop_with_chief(
        self, stop: threading.Event, environ: Mapping[str, str], check: CheckPort | None = None
    ) -> None:
        env = MLPEnv(environ)
        if not env.available or env.role in ("", "WORKER", "PS") or env.get_host("worker", 0) is None:
            return
        options = {"leave": lambda _: stop.set(), "check": check or check_port, "sleep": stop.wait}
        threading.Thread(target=env.join, kwargs=options, name="mlp-join", daemon=True).start()
