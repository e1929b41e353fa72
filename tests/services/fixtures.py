"""One ZooKeeper, one Kafka and one Ray for all tests of a process; a test that kills one starts it again.

And one set of certificates.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from services.certificates import make_certificates
from services.kafka import Kafka
from services.ray import RayCluster, need_ray
from services.zookeeper import ZooKeeper

from monolith.table import TieredTable
from monolith.train.config import TablesConfig


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, zookeeper: ZooKeeper) -> Iterator[Kafka]:
    server = Kafka(tmp_path_factory.mktemp("kafka"), zookeeper)
    server.start()
    yield server
    server.stop()  # before its ZooKeeper, without which it would not end


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the authorities `ca` and `other`, and what they signed: ca-node.crt, ca-node.key, ..."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """With this process connected to it, as only one Ray can be."""
    need_ray()
    from monolith.cluster.ray_discovery import connected

    cluster = RayCluster()
    cluster.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.environment.items():
                patch.setenv(name, value)
            with connected("testing", cluster.address):
                yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=["memory", "tiered"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TablesConfig:
    """Where the tables of a run keep their rows; tiered ones have room for three hot rows."""
    if request.param == "memory":
        return TablesConfig()
    monkeypatch.setitem(TieredTable.__init__.__kwdefaults__, "most_hot_rows", 3)
    return TablesConfig(storage="tiered", memory_bytes=4 << 20)
