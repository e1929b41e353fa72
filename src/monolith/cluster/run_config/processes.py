"""Who takes part in a run: the job, its processes, how they find and wait for each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from monolith.cluster.run_config.checks import at_least, not_negative
from monolith.config import Checked, Problem, Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig(Checked):
    """What is run, under which names, and where it keeps its files."""

    task: str | None = None
    """The task: module:Class, or a Python file."""
    mode: Literal["train", "eval", "infer", "train_and_eval"] = "train"
    """What to do with the task."""
    model_dir: str = ""
    """Folder of checkpoints and logs, local or remote. A run of several processes needs one."""
    name: str | None = None
    """Name of the job for all its processes: in ZooKeeper, in metrics."""
    model_name: str = ""
    """Name of the model; empty takes the job's name, or else di_name_ and the task's class."""
    id: str = ""
    """Tells one submission of the job from the next: in Consul, and in names of files and folders."""
    business_id: str | None = None
    """Whose model this is, to servers that are updated while it trains."""
    local: bool = False
    """Everything in this process, without discovery."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task to change: dotted name to value."""
    submitted_at: int | None = None
    """When the job was submitted, in Unix seconds; the metric of the start-up time counts from it."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "submitted_at")
        if "/" in self.id:
            yield Problem(("id",), f"becomes part of file names, so it must have no slash, got {self.id!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig(Checked):
    """The processes of a run and the place of this one among them."""

    role: Literal["worker", "ps"] = "worker"
    """What this process is."""
    index: int = 0
    """Its number within the role; worker 0 is the chief."""
    num_ps: int = 0
    """Parameter servers that training uses; with 0 the tables live in the worker."""
    num_workers: int = 1
    """Workers, the chief included."""
    num_extra_ps: int = 0
    """Servers to start beyond `num_ps`, so that a benchmark can leave out the slowest."""
    num_redundant_ps: int = 0
    """Servers to start beyond those, so that training can begin before the last are up."""
    force_ps_shutdown: bool = False
    """Stop the servers at the end of training in real time, too, where they otherwise go on serving."""
    kind: Literal["stable", "tide", "k8s"] = "stable"
    """Whose machines these are; a tag of metrics."""
    listen: str = ""
    """Host that this process listens on, by which others reach it; empty takes the machine's own address."""
    port: int = 0
    """Port that it listens on; 0 takes a free one."""

    @property
    def total_ps(self) -> int:
        """Servers to start."""
        return self.num_ps + self.num_extra_ps + self.num_redundant_ps

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "index", "num_ps", "num_extra_ps", "num_redundant_ps")
        yield from at_least(1, self, "num_workers")
        limit = self.total_ps if self.role == "ps" else self.num_workers
        if self.role == "ps" and not self.num_ps:
            yield Problem(("role", "num_ps"), "this is a parameter server, but num_ps is 0")
        elif self.index >= limit > 0:
            counts = ("num_ps", "num_extra_ps", "num_redundant_ps") if self.role == "ps" else ("num_workers",)
            yield Problem(
                ("index", "role", *counts), f"there are {limit} of this role, so {self.index} is too high"
            )
        for name in ("num_extra_ps", "num_redundant_ps"):
            if getattr(self, name) > 0 and not self.num_ps:
                yield Problem((name, "num_ps"), "there is nothing to add servers to while num_ps is 0")
        if self.listen in ("0.0.0.0", "::", "[::]", "*"):
            yield Problem(
                ("listen",), f"others are told to come here, and {self.listen} is nowhere; name one address"
            )
        if not 0 <= self.port <= 65535:
            yield Problem(("port",), f"must be from 0 to 65535, got {self.port}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveryConfig(Checked):
    """How the processes of a run find each other."""

    kind: Literal["consul", "zookeeper", "tf_config", "mlp", "files", "ray"] = "consul"
    """Which registry they use."""
    zookeeper: str | None = None
    """ZooKeeper's servers, as host:port,host:port."""
    zookeeper_auth: Secret | None = None
    """user:password for ZooKeeper's digest scheme; the variable ZK_AUTH sets it, too."""
    address_family: Literal["ipv4", "ipv6"] = "ipv4"
    """Which addresses of serving replicas to watch for."""
    tf_config: str | None = None
    """JSON with all addresses and the task of this process, as the variable TF_CONFIG has it."""
    folder: str | None = None
    """With files: a folder that all processes share."""
    ray: str = "auto"
    """With Ray: host:port of the cluster's head; auto is the one of RAY_ADDRESS, or of this machine."""

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
    """What happens when a process of the run dies."""

    max_retries: int | None = None
    """How often a worker joins its run again after a server was replaced; a local launcher restarts each
    process as often. None means 6. 0 ends the run with the first process that is lost."""
    wait: timedelta = timedelta(seconds=5)
    """The pause before a worker joins again."""
    partial_recovery: bool | None = None
    """Restore only servers that lost their state, leave the others alone. None means in real time only."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "max_retries", "wait")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig(Checked):
    """How long to wait for others."""

    operation: timedelta | None = None
    """The longest that one call of a server may take, other than a lookup; None means as long as `lookup`."""
    lookup: timedelta = timedelta(seconds=30)
    """The longest that one lookup of rows on a server may take."""
    start: timedelta = timedelta(hours=2)
    """How long a worker waits for the chief to make or restore the state they share."""
    finish: timedelta = timedelta(minutes=30)
    """How long the chief waits for the workers at the end."""
    silence: timedelta = timedelta(seconds=60)
    """How long a worker may be silent, its connection whole, before it counts as lost. A broken connection is
    noticed at once."""
    abandoned: timedelta = timedelta(minutes=30)
    """How long a parameter server whose chief is gone waits for another before it ends with an error."""
    slow_start: timedelta = timedelta(minutes=10)
    """The longest that a worker holds back while the first steps are made."""

    def problems(self) -> Iterator[Problem]:
        yield from not_negative(self, "start", "finish", "silence", "abandoned", "slow_start")
        for name in ("operation", "lookup"):
            given = getattr(self, name)
            if given is not None and given <= timedelta(0):
                yield Problem((name,), f"must be more than 0, got {given}")
