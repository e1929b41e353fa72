"""Kafka: records from topics that never end, and messages to them.

The checkpoint decides where reading resumes, not the broker. The position of a source has, by topic and
partition, the first message that was not yielded yet, and a restored source resumes with exactly that
message. Offsets are never stored behind our back; an offset that is gone from the broker is an error and not
a jump.

Partitions are assigned in one of two ways. `ByWorker` gives each of a fixed number of workers its own, so
that a position means the same after every restart: the way to train. Without it the workers form a consumer
group; a partition that moves to another member resumes where its last owner stopped yielding.

    source = KafkaSource(KafkaConfig(servers=("kafka:9092",), topics=("clicks",), group="train"), decode)
    for records in source: ...
    source.position()       # saved with the model: {"source": "kafka", "offsets": {"clicks": {"0": 17}}, ...}
"""

from monolith.data.kafka.config import ByWorker, Decode, KafkaConfig, TopicsConfig, read_settings
from monolith.data.kafka.messages import (
    KEY,
    VALUE,
    CsvMessages,
    JsonMessages,
    KafkaSink,
    plain_strings,
    string_column,
)
from monolith.data.kafka.positions import merge_positions
from monolith.data.kafka.source import KafkaSource, create_plain_kafka_dataset

__all__ = [
    "KEY",
    "VALUE",
    "ByWorker",
    "CsvMessages",
    "Decode",
    "JsonMessages",
    "KafkaConfig",
    "KafkaSink",
    "KafkaSource",
    "TopicsConfig",
    "create_plain_kafka_dataset",
    "merge_positions",
    "plain_strings",
    "read_settings",
    "string_column",
]
