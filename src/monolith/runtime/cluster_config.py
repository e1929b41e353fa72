"""Configs of the processes of a run: the job, the cluster, discovery, failover and timeouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from monolith.config import Checked, Problem, Secret
from monolith.config.problems import at_least, not_negative


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(Checked):
    """The task and the command that a run executes, and the names it uses for itself.

    Examples:
        >>> from monolith import JobConfig, RunConfig
        >>> job = JobConfig(task="shop.tasks:Clicks", name="clicks")
        >>> RunConfig(job=job).job.command
        'train'
    """

    task: str | None = None
    """The task: module:Class, or a Python file."""
    command: Literal["train", "eval", "infer", "train_and_eval"] = "train"
    """The command that this config is for: `monolith train`, `evaluate` or `predict`. `train` refuses
    all but the first, and names the command to use instead."""
    name: str | None = None
    """The name of the job, the same for all its processes: in ZooKeeper, in metrics."""
    id: str = ""
    """An id that tells one submission of the job from the next: in Consul, and in names of files and
    folders."""
    local: bool = False
    """Whether everything runs in this process, without discovery."""
    override_end_date: str | None = None
    """The day, as 20240131, that replaces the end date of the task's data: its setting end_date, and the
    end_date of every setting of type DataConfig that has a start_date."""
    cpu_test: bool = False
    """Whether the task is tried on a CPU: one process trains it for real, whatever train.accelerator and the
    cluster say, and its setting batch_size is at most 128."""
    dump_features: bool = False
    """Whether the features are written to the model_dir, and nothing is trained."""

    def problems(self) -> Iterator[Problem]:
        day = self.override_end_date
        if day is not None and (len(day) != 8 or not day.isdigit()):
            yield Problem(("override_end_date",), f"must be a day such as 20240131, got {day!r}")
        if "/" in self.id:
            yield Problem(("id",), f"becomes part of file names, so it must have no slash, got {self.id!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig(Checked):
    """The processes of a run, and the role and index of this one.

    Examples:
        >>> from monolith import ClusterConfig
        >>> servers = ClusterConfig(num_ps=4, num_workers=8)  # asynchronous workers over parameter servers
        >>> ranks = ClusterConfig(num_workers=8, mode="sync")  # each of 8 ranks has a shard of the rows
        >>> servers.mode, ranks.mode
        ('async', 'sync')
    """

    role: Literal["worker", "ps", "dispatcher", "data_worker"] = "worker"
    """The role of this process: worker, parameter server, or the dispatcher or a data worker of the run's
    data service."""
    index: int = 0
    """The number of this process within its role; worker 0 is the chief."""
    num_ps: int = 0
    """Parameter servers that training uses; with 0 the tables live in the worker, or, with mode sync, on all
    ranks."""
    num_workers: int = 1
    """Workers that the run is started with, the chief included."""
    max_workers: int = 0
    """The most workers at a time, if the data is a work queue: workers beyond num_workers may join at any
    time. 0 allows num_workers."""
    mode: Literal["async", "sync"] = "async"
    """How workers train one model: `async`, each at its own pace, with rows and weights on parameter servers;
    or `sync`, all in step as ranks, each of which has all weights, and a shard of the rows unless num_ps
    parameter servers store them."""
    num_redundant_ps: int = 0
    """Parameter servers started in addition to those that are used: the run begins with those that register
    first, and the rest are spares."""
    num_extra_ps: int = 0
    """Parameter servers started in addition and measured: the chief takes the num_ps fastest, once, and the
    rest are spares."""
    standbys: int = 0
    """How many other parameter servers keep a copy of each shard, 0 to 2: of rows and weights with their
    optimizer state. num_ps more servers are started for each. When a server is lost a standby serves its copy
    at once; the updates that the server acknowledged within about the last standby_interval are lost, and
    reported. Until another server has copied the shard it has one standby less: with 1, a second loss in that
    time returns the shard to the last checkpoint; with 2 it does not. Needs failover.recovery to be
    keep_going."""
    standby_interval: timedelta = timedelta(milliseconds=100)
    """How often a standby receives the changes of its shard."""
    measure_ps: timedelta = timedelta(seconds=10)
    """How long the chief measures the servers if num_extra_ps is set."""
    use_ps: tuple[str, ...] = ()
    """Addresses of the parameter servers to use, in order, if num_extra_ps is set: nothing is
    measured."""
    half_rows: bool = False
    """Whether parameter servers send rows as half floats, at half the bytes: each is rounded by at most one
    part in 2,048 in transit. Stored rows and gradients keep full precision."""
    kind: Literal["stable", "tide", "k8s"] = "stable"
    """The kind of machines; a label of the metrics."""
    listen: str = ""
    """The host that this process listens on, at which other processes reach it; empty takes the machine's own
    address."""
    port: int = 0
    """The port that this process listens on; 0 takes a free one."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(
            self,
            *("index", "num_ps", "num_redundant_ps", "num_extra_ps", "standbys", "measure_ps", "max_workers"),
        )
        if self.standbys > 2:
            yield Problem(("standbys",), f"must be from 0 to 2, got {self.standbys}")
        if self.standby_interval < timedelta(milliseconds=10):
            yield Problem(("standby_interval",), f"must be at least 10 ms, got {self.standby_interval}")
        yield from at_least(1, self, "num_workers")
        if self.max_workers and self.max_workers < self.num_workers:
            said = f"is {self.max_workers}, fewer than the {self.num_workers} that the run is started with"
            yield Problem(("max_workers", "num_workers"), said)
        if self.use_ps and len(self.use_ps) < self.num_ps:
            said = f"names {len(self.use_ps)} servers, and num_ps is {self.num_ps}"
            yield Problem(("use_ps", "num_ps"), said)
        if self.use_ps and not self.num_extra_ps:
            yield Problem(("use_ps", "num_extra_ps"), "there is nothing to choose from: num_extra_ps is 0")
        if self.mode == "sync" and self.num_ps and self.num_spares:
            said = (
                "ranks restart with the same servers when one is lost, and take no spare; set "
                "num_redundant_ps, num_extra_ps and standbys to 0, or mode to async"
            )
            yield Problem(("mode", "num_redundant_ps", "num_extra_ps", "standbys"), said)
        if self.mode == "sync" and self.max_workers > self.num_workers:
            said = "ranks take every step together, so none can come later; leave max_workers out"
            yield Problem(("mode", "max_workers"), said)
        if self.role == "ps" and not self.num_ps:
            yield Problem(("role", "num_ps"), "this is a parameter server, but num_ps is 0")
        yield from self._index_problems()
        if self.listen in ("0.0.0.0", "::", "[::]", "*"):
            yield Problem(
                ("listen",),
                f"other processes connect to this address, and cannot to {self.listen}; name one address",
            )
        if not 0 <= self.port <= 65535:
            yield Problem(("port",), f"must be from 0 to 65535, got {self.port}")

    @property
    def num_spares(self) -> int:
        """Parameter servers that start without a shard."""
        return self.num_redundant_ps + self.num_extra_ps + self.num_standbys

    @property
    def num_standbys(self) -> int:
        """Parameter servers that keep the copy of a shard."""
        return self.standbys * self.num_ps

    @property
    def reads_for_others(self) -> bool:
        """Whether this process is part of the data service."""
        return self.role in ("dispatcher", "data_worker")

    def _index_problems(self) -> Iterator[Problem]:
        if self.reads_for_others:  # any number of them may come and go
            return
        names: tuple[str, ...] = ("max_workers",) if self.max_workers else ("num_workers",)
        if self.role == "ps":
            names = ("num_ps", "num_redundant_ps", "num_extra_ps") if self.num_spares else ("num_ps",)
        limit = sum(getattr(self, name) for name in names)
        said = " + ".join(names)
        if self.role == "ps" and self.standbys:
            limit, said, names = (
                limit + self.num_standbys,
                f"{said} + standbys * num_ps",
                (*names, "standbys"),
            )
        if self.index >= limit > 0:
            said = f"{said} is {limit} and indices begin at 0, so {self.index} is too high"
            yield Problem(("index", "role", *names), said)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveryConfig(Checked):
    """How the processes of a run find each other.

    Examples:
        >>> from monolith import DiscoveryConfig
        >>> DiscoveryConfig(kind="zookeeper", zookeeper="zk1:2181,zk2:2181").kind
        'zookeeper'
    """

    kind: Literal["consul", "zookeeper", "tf_config", "mlp", "mpi", "files", "ray"] = "consul"
    """The registry in which the processes find each other. Among the ranks of mpirun it is mpi unless another
    is named: a folder of the model_dir, for as long as they run."""
    consul_api: Literal["stock", "lookup"] = "stock"
    """The HTTP API of the Consul agent: stock is HashiCorp's, on port 8500; lookup is the original system's,
    at /v1/lookup/name on port 2280 or a unix socket. CONSUL_HTTP_HOST and CONSUL_HTTP_PORT say where the
    agent is."""
    zookeeper: str | None = None
    """ZooKeeper's servers, as host:port,host:port."""
    zookeeper_auth: Secret | None = None
    """The user:password for ZooKeeper's digest scheme; the variable ZK_AUTH sets it, too."""
    tf_config: str | None = None
    """JSON with all addresses and the role of this process, as the variable TF_CONFIG has it."""
    folder: str | None = None
    """For discovery by files: a folder that all processes share."""
    ray: str = "auto"
    """For discovery through Ray: host:port of the cluster's head; auto is the one of RAY_ADDRESS, or of this
    machine."""

    def problems(self) -> Iterator[Problem]:
        if self.kind == "tf_config" and not self.tf_config:
            yield Problem(("kind", "tf_config"), "set tf_config, or the variable TF_CONFIG")
        if self.kind == "files" and not self.folder:
            yield Problem(("kind", "folder"), "discovery by files needs a folder")
        if self.tf_config:
            try:
                found = json.loads(self.tf_config)
            except ValueError as cause:
                yield Problem(("tf_config",), f"is not JSON: {cause}")
            else:
                if not isinstance(found, dict) or not isinstance(found.get("cluster"), dict):
                    yield Problem(("tf_config",), 'must be an object with "cluster" in it')


@dataclass(frozen=True, kw_only=True, slots=True)
class FailoverConfig(Checked):
    """What happens when a process of the run dies.

    Examples:
        >>> from datetime import timedelta
        >>> from monolith import FailoverConfig, RunConfig
        >>> failover = FailoverConfig(max_retries=10, wait=timedelta(seconds=1))
        >>> RunConfig(failover=failover).failover.recovery
        'exact'
    """

    max_retries: int = 6
    """How often a worker joins its run again after a server was replaced; a local launcher restarts each
    process as often. 0 ends the run with the first process that is lost."""
    wait: timedelta = timedelta(seconds=5)
    """The pause before a worker joins again."""
    recovery: Literal["exact", "keep_going"] = "exact"
    """What happens when a process is lost. With `exact` all processes roll back to the last checkpoint, and
    nothing is lost or trained twice. With `keep_going` they continue: only the shard of a lost server is
    restored from the last checkpoint, so updates since then are lost; and a lost worker resumes from its
    position there, so its records since then are trained twice. Both are only counted, in the report: save
    often, and do not use it for a model that must see each record once."""
    spare_after: timedelta = timedelta(seconds=5)
    """How long a lost server may take to restart before a spare server replaces it, if
    cluster.num_redundant_ps provides spares."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "max_retries", "wait", "spare_after")


NO_LIMIT = timedelta(days=36500)
"""A timeout that never expires: `operation_timeout_in_ms = -1` asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig(Checked):
    """How long processes of a run wait for each other."""

    operation: timedelta | None = None
    """The longest that one call of a server may take, other than a lookup; None takes timeouts.lookup.
    `--operation_timeout_in_ms -1` sets no limit: a call then waits for as long as a server hangs."""
    lookup: timedelta = timedelta(seconds=30)
    """The longest that one lookup of rows on a server may take."""
    start: timedelta = timedelta(hours=2)
    """How long a worker waits for the chief to create or restore the shared state."""
    finish: timedelta = timedelta(minutes=30)
    """How long the chief waits for the workers at the end."""
    exchange: timedelta = timedelta(minutes=10)
    """The longest that one exchange between ranks may take: as long as the slowest of them takes for a
    step."""
    silence: timedelta = timedelta(seconds=60)
    """How long a worker may be silent before it counts as lost. A connection that breaks is noticed at once;
    this is for a process that hangs, that was stopped, or whose machine is gone."""
    abandoned: timedelta = timedelta(minutes=30)
    """How long a parameter server whose chief is gone waits for another before it ends with an error."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "start", "finish", "abandoned")
        for name in ("operation", "lookup", "exchange", "silence"):
            given = getattr(self, name)
            if given is not None and given <= timedelta(0):
                yield Problem((name,), f"must be more than 0, got {given}")
