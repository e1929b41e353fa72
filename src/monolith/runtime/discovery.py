"""The role, the rank and the registry of this process: from its config, torchrun, or a scheduler.

Flags and files set role and index, unless the system that started the process does: torchrun and mpirun
number ranks, and TF_CONFIG (of Primus and Kubeflow) and MLP name every process. The library knows torchrun;
all others are schedulers that are found through entry points. `open_discovery` then opens the registry in
which the processes of the run find each other.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import metadata
from typing import Literal

from monolith import concurrency
from monolith.cluster.addresses import Address, get_local_host
from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.consul_client import ConsulConfig
from monolith.cluster.discovery import Discovery
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from monolith.cluster.zookeeper import ZooKeeperConfig, ZooKeeperDiscovery
from monolith.errors import ConfigError
from monolith.runtime.cluster_config import DiscoveryConfig
from monolith.runtime.config import RunConfig

ROLES: Mapping[str, Literal["worker", "ps", "dispatcher", "data_worker"]] = {
    "worker": "worker",
    "ps": "ps",
    "dispatcher": "dispatcher",
    "dsworker": "data_worker",
}
"""A scheduler's name of a process -> the value of cluster.role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The role of this process, as a scheduler names it."""

    kind: str
    """worker, ps, or another process that a scheduler starts: dispatcher, dsworker."""
    index: int
    source: str
    """The system that set it: TF_CONFIG or MLP."""
    address: str | None = None
    """The address that this process listens on, if the scheduler sets it."""
    num_ps: int | None = None
    num_workers: int | None = None
    """How many processes of each kind there are, if the scheduler says so."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of one process among all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes on this machine."""
    local_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size:
            raise ConfigError(
                f"invalid ranks: rank {self.rank} of {self.size}, here {self.local_rank} of {self.local_size}"
            )

    @classmethod
    def from_variables(cls, environ: Mapping[str, str], names: RankVariables) -> World | None:
        """Read the four variables that a launcher sets; None if it does not set the first one.

        Raises:
            ConfigError: A variable is no number, or the numbers make no sense.
        """

        def number(name: str, default: int) -> int:
            text = environ.get(name, "").strip()
            try:
                return int(text) if text else default
            except ValueError:
                raise ConfigError(f"the environment's {name} must be a number, got {text!r}") from None

        rank, size, local_rank, local_size = names
        if not environ.get(rank):
            return None
        return cls(number(rank, 0), number(size, 1), number(local_rank, 0), number(local_size, 1))


RankVariables = tuple[str, str, str, str]
"""The variables of a rank, of the number of ranks, and of the two on this machine."""

TORCHRUN_VARIABLES: RankVariables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Scheduler(ABC):
    """A system that starts the processes of a run and tells each its role or its rank.

    A package adds one by an entry point of the group `monolith.schedulers`, whose name is a value of
    `discovery.kind`. `monolith_compat` adds tf_config and mlp, which name all processes, and mpi, which
    numbers ranks. The registries that they open pass `tests/contracts/test_discovery.py`.
    """

    @abstractmethod
    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Whether the environment says that this scheduler started the process."""

    @abstractmethod
    def role(self, config: RunConfig, environ: Mapping[str, str]) -> Role | None:
        """Return the role of this process; None if it only numbers ranks, see `world`.

        Raises:
            ConfigError: The scheduler did not start this process, or contradicts itself.
        """

    @abstractmethod
    def open(self, config: RunConfig, environ: Mapping[str, str]) -> AbstractContextManager[Discovery]:
        """Return the registry with the addresses of all processes."""

    def listen_address(self, config: RunConfig, environ: Mapping[str, str]) -> str | None:
        """Return the address at which the other processes look for this one, if the scheduler sets it."""
        role = self.role(config, environ)
        return None if role is None else role.address

    def dispatcher_address(self, config: RunConfig, environ: Mapping[str, str]) -> str | None:
        """Return the address of the data service's dispatcher; None if the registry may have it.

        Raises:
            ConfigError: The scheduler names all processes, and no dispatcher.
        """
        del config, environ
        return None

    def extra_data_workers(self, environ: Mapping[str, str], count: int) -> tuple[int, list[int]]:
        """Return the first index and the ports of data workers that this worker starts; port 0 is any."""
        del environ
        return 0, [0] * count

    def stop_with_chief(
        self, stop: concurrency.Event, environ: Mapping[str, str], check: CheckPort | None = None
    ) -> None:
        """Set `stop` when the chief ends, if the scheduler itself does not end its helper processes."""
        del stop, environ, check  # by default the scheduler ends them

    def sets_variable(self, name: str) -> bool:
        """Whether a variable identifies a process to this scheduler. Processes that it does not know, which a
        worker starts, must not inherit such a variable."""
        del name
        return False

    # Of a scheduler that numbers ranks. When one rank fails it ends all of them, and restarts all or none.

    def world(self, environ: Mapping[str, str]) -> World | None:
        """Return the rank of this process; None if this scheduler gave it none."""
        del environ
        return None

    def abort_on_exception(self, environ: Mapping[str, str]) -> None:
        """Let an uncaught exception in this process end all its ranks. Every command calls it first."""
        del environ

    def end_ranks(self, environ: Mapping[str, str], status: int) -> None:
        """End all ranks after this one failed with a status that is not 0; return if there are no others."""
        del environ, status


CheckPort = Callable[[str, int, timedelta], bool]
"""Whether a connection to a host and port succeeds in time."""

SCHEDULERS = ("tf_config", "mlp", "mpi")
"""Kinds of discovery that are schedulers. TF_CONFIG counts first, since it names every process; mpi last,
since MLP may start its workers by mpirun."""


@cache
def installed_schedulers() -> Mapping[str, Scheduler]:
    """Return the schedulers that installed packages add, by their kind."""
    return {point.name: point.load()() for point in metadata.entry_points(group="monolith.schedulers")}


def scheduler_of(config: DiscoveryConfig) -> Scheduler | None:
    """Return the scheduler that the config names; None if its kind is a registry.

    Raises:
        ConfigError: No installed package has it.
    """
    if config.kind not in SCHEDULERS:
        return None
    if config.kind not in installed_schedulers():
        raise ConfigError(
            f"discovery.kind = {config.kind!r} needs the package monolith_compat, which is not installed; "
            "install it, or name a registry such as zookeeper"
        )
    return installed_schedulers()[config.kind]


def discovery_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the `defaults` of a config: the scheduler that started this process sets discovery.kind."""
    schedulers = installed_schedulers()
    for kind in SCHEDULERS:
        if kind in schedulers and schedulers[kind].has_started(environ):
            return {"discovery.kind": kind}
    return {}


def scheduled_world(environ: Mapping[str, str]) -> World | None:
    """Return the rank that a scheduler such as mpirun gave this process; None if none did."""
    found = (scheduler.world(environ) for scheduler in installed_schedulers().values())
    return next((world for world in found if world is not None), None)


def world_from_environment(environ: Mapping[str, str]) -> World | None:
    """Return the rank that mpirun or torchrun gave this process; None if neither started it.

    If both have set variables, those of mpirun count: its processes may have inherited torchrun's.

    Raises:
        ConfigError: A variable is no number, or the numbers make no sense.
    """
    return scheduled_world(environ) or World.from_variables(environ, TORCHRUN_VARIABLES)


def keys_are_named(environ: Mapping[str, str]) -> bool:
    """Whether ranks need no registry to find each other: they are numbered, and variables name the address at
    which all of them share keys, as those of torchrun do."""
    named = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return named and world_from_environment(environ) is not None


def is_restarted_by_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a rank that lost another is to end: torchrun and mpirun end all ranks then, and restart all of
    them or none."""
    return scheduled_world(environ) is not None or keys_are_named(environ)


def assign_role(config: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return the config with the role and index that the launcher of this process set.

    TF_CONFIG and MLP set them for any role, torchrun and mpirun for ranks. Otherwise flags, environment and
    file set them. A scheduler also sets counts that the config leaves at their defaults. Of several ranks on
    one machine only the first has the port of the metrics that the config names.

    Raises:
        ConfigError: The scheduler names no role, or one that a run does not have.
    """
    if config.job.local:
        return config
    world = world_from_environment(environ)
    if world is not None and world.local_rank and config.metrics.port:
        # The first rank of a machine has the port of the config, as `--launch local` gives it to the chief.
        config = replace(config, metrics=replace(config.metrics, port=0))
    cluster = config.cluster
    scheduler = scheduler_of(config.discovery)
    role = None if scheduler is None else scheduler.role(config, environ)
    if role is None:
        if cluster.mode == "sync" and world is not None:
            return replace(config, cluster=replace(cluster, index=world.rank, num_workers=world.size))
        return config
    if role.kind not in ROLES:
        near = difflib.get_close_matches(role.kind, ROLES, n=1)
        raise ConfigError(
            f"{role.source} says that this process is a {role.kind}, which a run does not have; "
            + (f"did you mean {near[0]}? " if near else "")
            + f"Its processes are {', '.join(ROLES)}"
        )
    assigned = replace(
        cluster,
        role=ROLES[role.kind],
        index=role.index,
        num_ps=cluster.num_ps or max(0, (role.num_ps or 0) - cluster.num_spares) // (1 + cluster.standbys),
        num_workers=max(1, role.num_workers or 1) if cluster.num_workers == 1 else cluster.num_workers,
    )
    return replace(config, cluster=assigned)


def open_discovery(config: RunConfig, environ: Mapping[str, str]) -> AbstractContextManager[Discovery | None]:
    """Return the registry that the config names, to be used in a `with`; None for a local run.

    Raises:
        ConfigError: It needs something that the config does not say.
        UnavailableError: It does not answer.
    """
    if config.job.local:
        return nullcontext(None)
    discovery = config.discovery
    if (scheduler := scheduler_of(discovery)) is not None:
        return scheduler.open(config, environ)
    if discovery.kind == "files":
        return FilesDiscovery(FilesConfig(folder=discovery.folder or ""))
    if discovery.kind == "ray":
        name = config.job.id or config.job.name
        if not name:
            raise ConfigError(
                "discovery through Ray needs job.id, or job.name: processes of a job meet under it"
            )
        return RayDiscovery(name, RayDiscoveryConfig(address=discovery.ray))
    if discovery.kind == "consul":
        if not config.job.id:
            raise ConfigError("discovery by Consul needs job.id: processes of a job meet under it")
        agent = ConsulConfig.from_environment(environ, api=discovery.consul_api)
        return ConsulDiscovery(config.job.id, agent)
    if not config.job.name:
        raise ConfigError("discovery by ZooKeeper needs job.name: processes of a job meet under it")
    servers = discovery.zookeeper or environ.get("zk_servers") or ""
    auth = (("digest", discovery.zookeeper_auth.reveal()),) if discovery.zookeeper_auth else ()
    return ZooKeeperDiscovery(config.job.name, ZooKeeperConfig(servers=servers, auth=auth))


def listen_address(config: RunConfig, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port that this process is to listen on; port 0 is any free one.

    The config comes first; then the address at which the other processes look for this one, because a
    scheduler or, of a dispatcher, data_service.dispatcher says so; then the machine's own address.

    Raises:
        ConfigError: The scheduler names no address for this process.
        ClusterError: This machine's address cannot be found.
    """
    cluster, scheduler = config.cluster, scheduler_of(config.discovery)
    given = None if scheduler is None else scheduler.listen_address(config, environ)
    if cluster.role == "dispatcher" and config.data_service is not None:
        given = config.data_service.dispatcher or given
    if given is None:
        return cluster.listen or get_local_host(environ), cluster.port
    address = Address.parse(given)
    return cluster.listen or address.host, cluster.port or address.port


def dispatcher_address(config: RunConfig, environ: Mapping[str, str]) -> str | None:
    """Return the address of the run's dispatcher, if the config or a scheduler names it.

    Raises:
        ConfigError: The scheduler names no dispatcher.
    """
    service = config.data_service
    if service is not None and service.dispatcher is not None:
        return service.dispatcher
    scheduler = scheduler_of(config.discovery)
    return None if scheduler is None else scheduler.dispatcher_address(config, environ)
