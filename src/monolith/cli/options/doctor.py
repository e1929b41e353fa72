"""What `monolith doctor` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """List what is installed, what is missing and how to get it; or which processes of a cluster answer."""

    json: bool = False
    """Print one JSON object instead of tables."""
    cluster: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[URL]")] = None
    """List instead which processes are registered and which of them answer. Takes a registry, as in
    zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job; by default that of
    --config, or of the environment."""
    config: Path | None = None
    """With --cluster: the run's config file, which names the registry."""
    zookeeper: str | None = None
    """The host:port of ZooKeeper to try; by default $MONOLITH_ZOOKEEPER, then localhost:2181."""
    kafka: str | None = None
    """The host:port of Kafka to try; by default $MONOLITH_KAFKA, then localhost:9092."""
    consul: str | None = None
    """The host:port of Consul to try; by default $MONOLITH_CONSUL, then localhost:8500."""
    timeout: float = 1.0
    """Seconds to wait for each service."""
    path: Path = Path()
    """A folder on the disk that will hold checkpoints; by default the current one."""
