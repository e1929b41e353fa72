"""Data: where batches of examples come from.

Files, streams and generated logs are sources: they yield records by column and know their position.
"""

from monolith.data.config import DataConfig, DataServiceConfig, DataSplit
from monolith.data.files.bad_records import BadRecordPolicy
from monolith.data.files.discovery import Watch
from monolith.data.files.source import FileSource
from monolith.data.format import BadRecord, Chunk, Format, RecordWriter
from monolith.data.formats import FORMATS, MemorySource, format_of
from monolith.data.formats.tables import ArrowSource, IterableSource, PandasSource, PolarsSource
from monolith.data.histories import HistoryConfig
from monolith.data.interactions import SequenceSplit, UserSequences, leave_one_out, split_by_time
from monolith.data.join.joiner import Joiner, JoinerConfig
from monolith.data.join.source import JoinedSource
from monolith.data.kafka import ByWorker, JsonMessages, KafkaConfig, KafkaSink, KafkaSource
from monolith.data.pipeline import Batches, Pipeline
from monolith.data.records import BatchSpec, Records, concat, make_batch
from monolith.data.shuffling import Epochs, ShuffleConfig
from monolith.data.source import Position, Shard, Source, Stage, Stream, WorkQueueSource, as_stream
from monolith.data.synthetic.click_log import ClickLog, ClickLogConfig
from monolith.data.synthetic.drift import DriftConfig, DriftingStream

__all__ = [
    "FORMATS",
    "ArrowSource",
    "BadRecord",
    "BadRecordPolicy",
    "BatchSpec",
    "Batches",
    "ByWorker",
    "Chunk",
    "ClickLog",
    "ClickLogConfig",
    "DataConfig",
    "DataServiceConfig",
    "DataSplit",
    "DriftConfig",
    "DriftingStream",
    "Epochs",
    "FileSource",
    "Format",
    "HistoryConfig",
    "IterableSource",
    "JoinedSource",
    "Joiner",
    "JoinerConfig",
    "JsonMessages",
    "KafkaConfig",
    "KafkaSink",
    "KafkaSource",
    "MemorySource",
    "PandasSource",
    "Pipeline",
    "PolarsSource",
    "Position",
    "RecordWriter",
    "Records",
    "SequenceSplit",
    "Shard",
    "ShuffleConfig",
    "Source",
    "Stage",
    "Stream",
    "UserSequences",
    "Watch",
    "WorkQueueSource",
    "as_stream",
    "concat",
    "format_of",
    "leave_one_out",
    "make_batch",
    "split_by_time",
]
