"""Sync: what training changes, numbered, for whoever follows.

A holder of rows publishes what changed in its share every fraction of a second; servers and standbys read it
from where they are.
"""

from monolith.sync.channel import DeltaReader, DeltaWriter, ShareLog, TakeSnapshot
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

__all__ = [
    "BUCKETS",
    "Delta",
    "DeltaReader",
    "DeltaWriter",
    "Digests",
    "LearnedUpTo",
    "LogPlace",
    "Message",
    "PublishState",
    "ShareLog",
    "SnapshotBegin",
    "SnapshotEnd",
    "SnapshotRows",
    "TakeSnapshot",
]
