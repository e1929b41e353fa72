"""Data: where batches of examples come from."""

from monolith.data.click_log import ClickLog, ClickLogConfig
from monolith.data.format import BadRecord, Chunk, Format, RecordWriter
from monolith.data.records import BatchSpec, Records, concat, make_batch
from monolith.data.source import Position, Source

__all__ = [
    "BadRecord",
    "BatchSpec",
    "Chunk",
    "ClickLog",
    "ClickLogConfig",
    "Format",
    "Position",
    "RecordWriter",
    "Records",
    "Source",
    "concat",
    "make_batch",
]
