"""Every implementation of the discovery seam, and how several processes of a job would share it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from services.consul import Agent

from monolith.cluster import (
    ConsulConfig,
    ConsulDiscovery,
    Discovery,
    FilesConfig,
    FilesDiscovery,
    MemoryDiscovery,
    MemoryRegistry,
    ZooKeeperConfig,
    ZooKeeperDiscovery,
)
from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from monolith_compat.mlp import MLPDiscovery, MLPEnv
from monolith_compat.tf_config import TfConfigDiscovery

Join = Callable[[], Discovery]
"""Makes the discovery of one more process."""

SOON = timedelta(milliseconds=20)
WORKERS = {0: "10.0.0.1:2222", 1: "10.0.0.2:2222"}
"""What every discovery of a fixed cluster says."""


def eventually(check: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Ask until the answer is yes."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come to hold"
        time.sleep(0.01)


@dataclass(frozen=True)
class Case:
    """One kind of discovery."""

    open: Callable[..., Any]
    """A context manager that takes a folder and a server, and gives a `Join`."""
    service: str | None = None
    """The fixture of the server."""


@contextmanager
def _memory(_: Path, __: Any) -> Iterator[Join]:
    registry = MemoryRegistry()
    yield lambda: MemoryDiscovery(registry)


@contextmanager
def _files(folder: Path, _: Any) -> Iterator[Join]:
    config = FilesConfig(folder=str(folder / "discovery"), watch_every=SOON)
    yield lambda: FilesDiscovery(config)


def consul_config(agent: Agent, **options: Any) -> ConsulConfig:
    """How tests ask an agent: as patiently as others, but not as long."""
    quick = {
        "watch_every": SOON,
        "visible_every": SOON,
        "replace_every": SOON,
        "max_backoff": SOON,
        "heartbeat_retry": SOON,
    }
    return ConsulConfig(host=agent.host, port=agent.port or None, **{**quick, **options})


def _consul(unix: bool, vendor: bool) -> Callable[..., Any]:
    @contextmanager
    def open_(folder: Path, _: Any) -> Iterator[Join]:
        agent = Agent(path=folder / "consul.sock" if unix else None, vendor=vendor)
        config = consul_config(agent, api="lookup" if vendor else "stock")
        try:
            yield lambda: ConsulDiscovery("data.monolith.job", config)
        finally:
            agent.stop()

    return open_


_jobs = itertools.count()


def zookeeper_config(server: Any, **options: Any) -> ZooKeeperConfig:
    """Short sessions: what a killed client left is gone in two seconds."""
    quick = {"session_timeout": timedelta(seconds=2), "delay": timedelta(seconds=1)}
    return ZooKeeperConfig(servers=server.address, **{**quick, **options})


@contextmanager
def _zookeeper(_: Path, server: Any) -> Iterator[Join]:
    job = f"contract-{next(_jobs)}"
    yield lambda: ZooKeeperDiscovery(job, zookeeper_config(server))


@contextmanager
def _ray(_: Path, __: Any) -> Iterator[Join]:
    # One job for all tests: an actor takes a second to start, and what is closed leaves nothing behind.
    yield lambda: RayDiscovery("contract", RayDiscoveryConfig(heartbeat=timedelta(seconds=1)))


@contextmanager
def _tf_config(_: Path, __: Any) -> Iterator[Join]:
    chief, worker = WORKERS.values()
    yield lambda: TfConfigDiscovery({"cluster": {"chief": [chief], "worker": [worker]}})


@contextmanager
def _mlp(_: Path, __: Any) -> Iterator[Join]:
    variables = {"MLP_ROLE": "worker", "MLP_PORT": "2222", "MLP_WORKER_NUM": "2"}
    for index, address in WORKERS.items():
        host, port = address.split(":")
        variables |= {f"MLP_WORKER_{index}_PRIMARY_HOST": host, f"MLP_WORKER_{index}_PORT": port}
    yield lambda: MLPDiscovery(MLPEnv(variables, host="10.0.0.1"))


DISCOVERIES = {
    "memory": Case(_memory),
    "files": Case(_files),
    "consul": Case(_consul(unix=False, vendor=False)),
    "consul, unix socket": Case(_consul(unix=True, vendor=False)),
    "consul, vendor": Case(_consul(unix=False, vendor=True)),
    "zookeeper": Case(_zookeeper, "zookeeper"),
    "ray": Case(_ray, "ray_cluster"),
}
"""In which processes register."""

FIXED = {"TF_CONFIG": Case(_tf_config), "MLP": Case(_mlp)}
"""In which somebody else has registered `WORKERS`."""


@contextmanager
def joined(case: Case, folder: Path, service: Any) -> Iterator[Join]:
    """Give a `Join` whose discoveries are closed in the end."""
    with ExitStack() as stack:
        join = stack.enter_context(case.open(folder, service))

        def join_and_close_later() -> Discovery:
            discovery = join()
            stack.callback(discovery.close)
            return discovery

        yield join_and_close_later
