"""Sync: changed rows as numbered deltas, from publishers to subscribers.

Each process with rows publishes the changes of its shard every fraction of a second; serving servers and
standbys read them from their own position.
"""

from monolith.sync.channel import (
    LOG_BYTES,
    ChannelFaults,
    DeltaLog,
    DeltaReader,
    DeltaWriter,
    MemoryChannel,
    OpenReader,
    ShardLog,
    TakeSnapshot,
    delta_bytes,
)
from monolith.sync.channel_url import open_reader, open_writer
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPosition,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.sync.publish_config import GuardConfig, PublishConfig
from monolith.sync.publisher import Publisher, PublisherConfig, PublishStats
from monolith.sync.subscriber import ShardProgress, Subscriber
from monolith.sync.target import DeltaTarget, TableTarget

__all__ = [
    "BUCKETS",
    "LOG_BYTES",
    "ChannelFaults",
    "Delta",
    "DeltaLog",
    "DeltaReader",
    "DeltaTarget",
    "DeltaWriter",
    "Digests",
    "GuardConfig",
    "LearnedUpTo",
    "LogPosition",
    "MemoryChannel",
    "Message",
    "OpenReader",
    "PublishConfig",
    "PublishState",
    "PublishStats",
    "Publisher",
    "PublisherConfig",
    "ShardLog",
    "ShardProgress",
    "SnapshotBegin",
    "SnapshotEnd",
    "SnapshotRows",
    "Subscriber",
    "TableTarget",
    "TakeSnapshot",
    "delta_bytes",
    "open_reader",
    "open_writer",
]
