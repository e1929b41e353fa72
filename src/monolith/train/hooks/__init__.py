"""Hooks: what else happens while a model trains, besides training.

Saving, stopping at the right moment, waiting for others, control by an operator, alerts and profiles.
`monolith.train.hook` says what a hook is.
"""

from monolith.train.hooks.alerting import AlertConfig, AlertHook
from monolith.train.hooks.barrier import (
    Barrier,
    BarrierHook,
    BarrierSaveListener,
    LocalBarrier,
    Placement,
    unblocked_indices,
)
from monolith.train.hooks.control import ActionFileHook, ControllerHook
from monolith.train.hooks.control_server import BlockStatus, ControlClient, ControlServerHook
from monolith.train.hooks.deep_insight import DeepInsightHook
from monolith.train.hooks.feature_dump import FeatureDump, FeatureDumpHook, batch_records
from monolith.train.hooks.feature_insight import FeatureInsightHook, feature_insight_data
from monolith.train.hooks.file_metrics import FileMetricHook
from monolith.train.hooks.heartbeat import HeartBeatHook
from monolith.train.hooks.kafka_metrics import KafkaMetricHook
from monolith.train.hooks.listeners import AfterSaveListener, BeforeSaveListener, SaveListener
from monolith.train.hooks.live_line import LiveLineHook, Standing
from monolith.train.hooks.metric_sinks import CustomMetricHook, MetricClient
from monolith.train.hooks.operator_files import ForceDumpHook, OnlineFileHook
from monolith.train.hooks.profiling import ProfilerHook
from monolith.train.hooks.ps_health import HealthStatus, MachineHealth, PsHealthHook, memory_health
from monolith.train.hooks.request_time import RequestTimeHook
from monolith.train.hooks.saving import Checkpointer, Moment, SaveConfig, SaveHook, SaveMemory
from monolith.train.hooks.slow_start import SlowStartHook, slow_start_target
from monolith.train.hooks.streaming_metrics import MetricsHook
from monolith.train.hooks.summaries import SummaryHook
from monolith.train.hooks.table_info import TableInfoHook
from monolith.train.hooks.throughput import ThroughputHook
from monolith.train.hooks.tide import TideStoppingHook, TideWindow, before
from monolith.train.hooks.timer import SaveTimer

__all__ = [
    "ActionFileHook",
    "AfterSaveListener",
    "AlertConfig",
    "AlertHook",
    "Barrier",
    "BarrierHook",
    "BarrierSaveListener",
    "BeforeSaveListener",
    "BlockStatus",
    "Checkpointer",
    "ControlClient",
    "ControlServerHook",
    "ControllerHook",
    "CustomMetricHook",
    "DeepInsightHook",
    "FeatureDump",
    "FeatureDumpHook",
    "FeatureInsightHook",
    "FileMetricHook",
    "ForceDumpHook",
    "HealthStatus",
    "HeartBeatHook",
    "KafkaMetricHook",
    "LiveLineHook",
    "LocalBarrier",
    "MachineHealth",
    "MetricClient",
    "MetricsHook",
    "Moment",
    "OnlineFileHook",
    "Placement",
    "ProfilerHook",
    "PsHealthHook",
    "RequestTimeHook",
    "SaveConfig",
    "SaveHook",
    "SaveListener",
    "SaveMemory",
    "SaveTimer",
    "SlowStartHook",
    "Standing",
    "SummaryHook",
    "TableInfoHook",
    "ThroughputHook",
    "TideStoppingHook",
    "TideWindow",
    "batch_records",
    "before",
    "feature_insight_data",
    "memory_health",
    "slow_start_target",
    "unblocked_indices",
]
