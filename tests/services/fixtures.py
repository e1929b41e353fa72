"""One ZooKeeper and one Kafka for all tests of a process; a test that kills one starts it again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from services.kafka import Kafka
from services.zookeeper import ZooKeeper


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
