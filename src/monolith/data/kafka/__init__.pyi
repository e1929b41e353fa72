"""Kafka: records from topics that never end, and messages to them.

The broker does not decide where reading goes on: the checkpoint does. A source says by
topic and partition which message it has not yielded yet, and goes to exactly that message
when it is restored. Offsets are never stored behind our back; an offset that is gone from
the broker is an error and not a jump.

Partitions are shared out in one of two ways. `ByWorker` gives each of a fixed number of
workers its own, so that a position means the same after every restart: the way to train.
Without it the workers form a consumer group, which comes and goes as it likes; a partition
that changes hands goes on where its last owner stopped yielding.

    source = KafkaSource(KafkaConfig(servers=("kafka:9092",), topics=("clicks",), group="train"), decode)
    for records in source: ...
    source.position()       # saved with the model: {"source": "kafka", "offsets": {"clicks": {"0": 17}}, ...}
"""

from monolith.data.kafka.config import ByWorker, Decode, KafkaConfig, TopicsConfig, read_settings
from monolith.data.kafka.messages import KEY, VALUE, CsvMessages, JsonMessages, plain_strings, string_column
from monolith.data.kafka.positions import merge_positions
from monolith.data.kafka.sink import KafkaSink
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
