"""What `monolith doctor` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """Say what is installed, what is missing and how to get it; or who of a cluster is there."""

    json: bool = False
    """Print one JSON object instead of tables."""
    cluster: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[URL]")] = None
    """Say instead who is registered, who answers and who does not. Takes a registry, as in
    zookeeper://host:2181/job, consul://host:8500/job or files:///shared/folder/job; by default that of
    --config, or of the environment."""
    config: Path | None = None
    """With --cluster: the run's config file, which names the registry."""
    zookeeper: str | None = None
    """host:port to try; by default $MONOLITH_ZOOKEEPER, then localhost:2181."""
    kafka: str | None = None
    """host:port to try; by default $MONOLITH_KAFKA, then localhost:9092."""
    consul: str | None = None
    """host:port to try; by default $MONOLITH_CONSUL, then localhost:8500."""
    timeout: float = 1.0
    """Seconds to wait for each service."""
    path: Path = Path()
    """A folder on the disk that will hold checkpoints; by default the current one."""
