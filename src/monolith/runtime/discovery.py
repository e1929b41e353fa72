"""The role and the registry of this process: from its config, its launcher, or a scheduler.

Flags and files set role and index, unless a launcher does: torchrun and mpirun count ranks, and a scheduler
(TF_CONFIG of Primus and Kubeflow, MLP) names every process. Schedulers are found through entry points.
`open_discovery` then opens the registry in which the processes of the run find each other.
"""

from __future__ import annotations

import difflib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from monolith import concurrency, filesystem
from monolith.cluster.addresses import Address, get_local_host
from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.consul_client import ConsulConfig
from monolith.cluster.discovery import Discovery
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.cluster.mpi import is_under_mpi, job_of_mpi, world_from_environment, world_or_alone
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


class Scheduler(ABC):
    """A system that starts all processes of a run and tells each its role and the addresses of its peers.

    A package adds one by an entry point of the group `monolith.schedulers`, whose name is a value of
    `discovery.kind`. `monolith_compat` adds tf_config and mlp, and passes `tests/contracts/test_discovery.py`
    with the registries that they open.
    """

    @abstractmethod
    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Whether the environment says that this scheduler started the process."""

    @abstractmethod
    def role(self, config: DiscoveryConfig, environ: Mapping[str, str]) -> Role:
        """Return the role of this process.

        Raises:
            ConfigError: The scheduler did not start this process, or contradicts itself.
        """

    @abstractmethod
    def open(self, config: DiscoveryConfig, environ: Mapping[str, str]) -> AbstractContextManager[Discovery]:
        """Return the registry with the addresses of all processes."""

    def listen_address(self, config: DiscoveryConfig, environ: Mapping[str, str]) -> str | None:
        """Return the address at which the other processes look for this one, if the scheduler sets it."""
        return self.role(config, environ).address

    def dispatcher_address(self, config: DiscoveryConfig, environ: Mapping[str, str]) -> str:
        """Return the address of the data service's dispatcher.

        Raises:
            ConfigError: The scheduler names none.
        """
        del config, environ
        raise ConfigError(f"{type(self).__name__} names no data service; set its address in the config")

    def extra_data_workers(self, environ: Mapping[str, str], count: int) -> tuple[int, list[int]]:
        """Return the first index and the ports of data workers that this worker starts; port 0 is any."""
        del environ
        return 0, [0] * count

    def stop_with_chief(
        self, stop: concurrency.Event, environ: Mapping[str, str], check: CheckPort | None = None
    ) -> None:
        """Set `stop` when the chief ends, if the scheduler itself does not end its helper processes."""
        del stop, environ, check  # by default the scheduler ends them


CheckPort = Callable[[str, int, timedelta], bool]
"""Whether a connection to a host and port succeeds in time."""

SCHEDULERS = ("tf_config", "mlp")
"""Kinds of discovery that are schedulers. TF_CONFIG counts first, since it names every process."""


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
    return {"discovery.kind": "mpi"} if is_under_mpi(environ) else {}


def assign_role(config: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return the config with the role and index that the launcher of this process set.

    A scheduler (TF_CONFIG, MLP) sets them for any role, torchrun and mpirun for ranks. Otherwise flags,
    environment and file set them. The launcher also sets counts that the config leaves at their defaults.

    Raises:
        ConfigError: The scheduler names no role, or one that a run does not have.
    """
    if config.job.local:
        return config
    cluster = config.cluster
    if (scheduler := scheduler_of(config.discovery)) is not None:
        role = scheduler.role(config.discovery, environ)
    elif cluster.mode == "sync" and (world := world_from_environment(environ)) is not None:
        return replace(config, cluster=replace(cluster, index=world.rank, num_workers=world.size))
    else:
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
        return scheduler.open(discovery, environ)
    if discovery.kind == "mpi":
        return _met_in_model_dir(config, environ)
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


@contextmanager
def _met_in_model_dir(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Discovery]:
    """Give the registry of the processes of one mpirun: a folder, which is gone after them.

    Raises:
        ConfigError: mpirun did not start this process, or the model_dir is no path of this machine.
    """
    model_dir = config.train.model_dir
    if not is_under_mpi(environ):
        raise ConfigError("discovery by mpi is for processes that mpirun started, and this one was not")
    if filesystem.is_remote(model_dir):
        raise ConfigError(
            f"the ranks of mpirun meet in a folder of the model_dir, and {model_dir} is remote. Say where "
            "rank 0 is, by `mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=<port>`, or name a registry by "
            "discovery.kind"
        )
    folder = Path(model_dir) / "mpirun" / job_of_mpi(environ)
    try:
        with FilesDiscovery(FilesConfig(folder=str(folder))) as discovery:
            yield discovery
    finally:
        if config.cluster.role == "worker" and config.cluster.index == 0:
            shutil.rmtree(folder, ignore_errors=True)


def listen_address(config: RunConfig, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port that this process is to listen on; port 0 is any free one.

    The config comes first; then the address at which a scheduler tells the other processes to look for this
    one; then the machine's own address, or, if mpirun started all of them on this machine, one that no other
    machine reaches.

    Raises:
        ConfigError: The scheduler names no address for this process.
        ClusterError: This machine's address cannot be found.
    """
    cluster, kind = config.cluster, config.discovery.kind
    given: str | None = None
    if (scheduler := scheduler_of(config.discovery)) is not None:
        given = scheduler.listen_address(config.discovery, environ)
    elif kind == "mpi" and (world := world_or_alone(environ)).size == world.local_size:
        given = "127.0.0.1:0"
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
    return None if scheduler is None else scheduler.dispatcher_address(config.discovery, environ)
