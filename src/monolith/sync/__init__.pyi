"""Sync: what training changes, numbered, for whoever follows.

A holder of rows publishes what changed in its share every fraction of a second; servers and standbys read it
from where they are.
"""

from monolith.sync.channel import DeltaReader, DeltaWriter, OpenReader, ShareLog, TakeSnapshot
from monolith.sync.delta_log import LOG_BYTES, DeltaLog, delta_bytes
from monolith.sync.memory_channel import ChannelFaults, MemoryChannel
from monolith.sync.messages import (
    BUCKETS,
    Delta,
    Digests,
    LearnedUpTo,
    LogPlace,
    Message,
    PublishState,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
)
from monolith.sync.publisher import Publisher, PublishGuard, PublishStats
from monolith.sync.subscriber import Followed, Subscriber
from monolith.sync.table_target import TableTarget
from monolith.sync.target import DeltaTarget

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
    "Followed",
    "LearnedUpTo",
    "LogPlace",
    "MemoryChannel",
    "Message",
    "OpenReader",
    "PublishGuard",
    "PublishState",
    "PublishStats",
    "Publisher",
    "ShareLog",
    "SnapshotBegin",
    "SnapshotEnd",
    "SnapshotRows",
    "Subscriber",
    "TableTarget",
    "TakeSnapshot",
    "delta_bytes",
]
