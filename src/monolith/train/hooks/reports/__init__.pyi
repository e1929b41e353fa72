"""Hooks that report what a run does: lines, summaries, metrics, profiles and dumps."""

from monolith.train.hooks.reports.deep_insight import DeepInsightHook
from monolith.train.hooks.reports.feature_dump import FeatureDump, batch_records
from monolith.train.hooks.reports.feature_insight import FeatureInsightHook, feature_insight_data
from monolith.train.hooks.reports.file_metrics import FileMetricHook
from monolith.train.hooks.reports.heartbeat import HeartBeatHook
from monolith.train.hooks.reports.kafka_metrics import KafkaMetricHook, KafkaProducer
from monolith.train.hooks.reports.live_line import (
    LiveLineHook,
    Standing,
    describe_standing,
    gauge_standing,
    log_standing,
)
from monolith.train.hooks.reports.metric_sinks import (
    CustomMetricHook,
    MessageCounts,
    MessageSink,
    MetricClient,
    MetricName,
)
from monolith.train.hooks.reports.nas import NasDataHook
from monolith.train.hooks.reports.profiling import ProfilerHook
from monolith.train.hooks.reports.summaries import SummaryHook
from monolith.train.hooks.reports.table_info import TableInfoHook
from monolith.train.hooks.reports.throughput import ThroughputHook

__all__ = [
    "CustomMetricHook",
    "DeepInsightHook",
    "FeatureDump",
    "FeatureInsightHook",
    "FileMetricHook",
    "HeartBeatHook",
    "KafkaMetricHook",
    "KafkaProducer",
    "LiveLineHook",
    "MessageCounts",
    "MessageSink",
    "MetricClient",
    "MetricName",
    "NasDataHook",
    "ProfilerHook",
    "Standing",
    "SummaryHook",
    "TableInfoHook",
    "ThroughputHook",
    "batch_records",
    "describe_standing",
    "feature_insight_data",
    "gauge_standing",
    "log_standing",
]
