"""Already launched: what a scheduler says about this process, in place of flags.

Primus and Kubeflow write TF_CONFIG, MLP has variables of its own, mpirun and torchrun count ranks.
Nothing here waits, writes or exits: a config and an environment go in, a config comes out.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from monolith import filesystem
from monolith.cluster.addresses import Address, concat_ip_and_port, get_local_host
from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.consul_client import ConsulConfig
from monolith.cluster.discovery import Discovery
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.cluster.mlp import MLPDiscovery, MLPEnv
from monolith.cluster.mpi import is_under_mpi, job_of_mpi, world_from_environment, world_or_alone
from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from monolith.cluster.tf_config import TfConfigDiscovery
from monolith.cluster.yarn import application_master_address
from monolith.cluster.zookeeper import ZooKeeperConfig, ZooKeeperDiscovery
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig

ROLES: Mapping[str, Literal["worker", "ps", "dispatcher", "data_worker"]] = {
    "worker": "worker",
    "ps": "ps",
    "dispatcher": "dispatcher",
    "dsworker": "data_worker",
}
"""What schedulers call the processes of a run -> what we do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What this process is."""

    kind: str
    """worker, ps, or what else a scheduler starts: dispatcher, dsworker."""
    index: int
    source: str
    """Who said so: TF_CONFIG, MLP, MPI or torchrun."""
    address: str | None = None
    """Where this process is to listen, if that was said."""
    num_ps: int | None = None
    """How many there are of each, if that was said."""
    num_workers: int | None = None
    on_yarn: bool = False
    """An application master wants to hear how the job ends."""

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that the others wait for."""
        return self.kind == "worker" and self.index == 0


def role_from_environment(environ: Mapping[str, str]) -> Role | None:
    """Return what the scheduler says; None where it says nothing, and flags decide.

    TF_CONFIG counts most, since it names every process; then MLP, then ranks.

    Raises:
        ConfigError: What it says makes no sense.
    """
    if environ.get("TF_CONFIG"):
        return _from_tf_config(environ["TF_CONFIG"], environ)
    if environ.get("MLP_ROLE", "").strip():
        return _from_mlp(environ)
    world = world_from_environment(environ)
    if world is None:
        return None
    return Role(
        kind="worker",
        index=world.rank,
        source="MPI" if is_under_mpi(environ) else "torchrun",
        num_workers=world.size,
        on_yarn=application_master_address(environ) is not None,
    )


def discovery_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the `defaults` of a config: whoever started all processes says how they find each other."""
    if environ.get("TF_CONFIG"):
        return {"discovery.kind": "tf_config"}
    if environ.get("MLP_ROLE", "").strip():
        return {"discovery.kind": "mlp"}
    return {"discovery.kind": "mpi"} if is_under_mpi(environ) else {}


def place(config: RunConfig, environ: Mapping[str, str]) -> RunConfig:
    """Return the config with role and index as whoever launched this process says.

    That is the registry, where it is TF_CONFIG or MLP; of ranks, torchrun or mpirun. Otherwise role and index
    are what flags, environment and file said. Counts that the config leaves at their defaults are taken over,
    too.

    Raises:
        ConfigError: The registry says nothing, or that this process does not train.
    """
    if config.job.local:
        return config
    cluster = config.cluster
    if config.discovery.kind == "tf_config":
        role = _from_tf_config(config.discovery.tf_config or "", environ)
    elif config.discovery.kind == "mlp":
        role = _from_mlp(environ)
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
    placed = replace(
        cluster,
        role=ROLES[role.kind],
        index=role.index,
        num_ps=cluster.num_ps or max(0, (role.num_ps or 0) - cluster.num_spares) // (1 + cluster.standbys),
        num_workers=max(1, role.num_workers or 1) if cluster.num_workers == 1 else cluster.num_workers,
    )
    return replace(config, cluster=placed)


def open_discovery(config: RunConfig, environ: Mapping[str, str]) -> AbstractContextManager[Discovery | None]:
    """Return the registry that the config names, to be used in a `with`; None for a local run.

    Raises:
        ConfigError: It needs something that the config does not say.
        UnavailableError: It does not answer.
    """
    if config.job.local:
        return nullcontext(None)
    discovery = config.discovery
    if discovery.kind == "tf_config":
        return TfConfigDiscovery.from_json(discovery.tf_config or "")
    if discovery.kind == "mlp":
        return MLPDiscovery(MLPEnv(environ))
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

    What the config says counts most. Then where the registry says that others look for this
    process, if it is one that a scheduler wrote; then the machine's own address, or, where mpirun started
    all of them on this machine, one that no other machine reaches.

    Raises:
        ConfigError: The registry says nothing of this process.
        ClusterError: This machine's address cannot be found.
    """
    cluster, kind = config.cluster, config.discovery.kind
    given: str | None = None
    if kind == "tf_config":
        given = _from_tf_config(config.discovery.tf_config or "", environ).address
    elif kind == "mlp":
        given = _mlp_address(environ)
    elif kind == "mpi" and (world := world_or_alone(environ)).size == world.local_size:
        given = "127.0.0.1:0"
    if given is None:
        return cluster.listen or get_local_host(environ), cluster.port
    address = Address.parse(given)
    return cluster.listen or address.host, cluster.port or address.port


def dispatcher_address(config: RunConfig, environ: Mapping[str, str]) -> str | None:
    """Return where the dispatcher of the run's data service is, if the config or a scheduler says so.

    Raises:
        ConfigError: The scheduler is asked, and says nothing of a dispatcher.
    """
    service = config.data_service
    if service is not None and service.dispatcher is not None:
        return service.dispatcher
    if config.discovery.kind == "tf_config":
        found = TfConfigDiscovery.from_json(config.discovery.tf_config or "").query("dispatcher")
        if not found:
            raise ConfigError("data service: TF_CONFIG's cluster has no dispatcher")
        return found[min(found)]
    if config.discovery.kind != "mlp":
        return None
    address = MLPEnv(environ).dispatcher_addr()
    if address is None:
        wanted = ("MLP_DISPATCHER_0_PRIMARY_HOST", "MLP_DISPATCHER_0_PORT")
        missing = next(name for name in wanted if not environ.get(name))
        near = difflib.get_close_matches(missing, [name for name in environ if name.startswith("MLP_")], n=1)
        raise ConfigError(
            f"data service: MLP's environment has no {missing}, so nobody can find the dispatcher"
            + (f"; it has {near[0]}" if near else "")
        )
    return address


def _mlp_address(environ: Mapping[str, str]) -> str | None:
    """Return where MLP wants this process to listen: its own entry, and else MLP_PORT of this host.

    Raises:
        ConfigError: The two contradict each other: others would look for it where it is not.
    """
    env = MLPEnv(environ)
    named = env.get_addr()
    if not env.port:
        return named
    if named is None:
        return concat_ip_and_port(env.host, env.port)
    if Address.parse(named).port != env.port:
        raise ConfigError(
            f"MLP contradicts itself: by MLP_PORT this process, {env.role.lower()} {env.index}, listens on "
            f"port {env.port}, and others are told {named}"
        )
    return named


def _from_tf_config(text: str, environ: Mapping[str, str]) -> Role:
    found = TfConfigDiscovery.from_json(text)
    return Role(
        kind=found.server_type,
        index=found.index,
        source="TF_CONFIG",
        address=found.addr,
        num_ps=len(found.query("ps")),
        num_workers=len(found.query("worker")),
        on_yarn=application_master_address(environ) is not None,
    )


def _from_mlp(environ: Mapping[str, str]) -> Role:
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
        on_yarn=application_master_address(environ) is not None,
    )
