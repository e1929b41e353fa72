"""Hooks: what else happens while a model trains, besides training.

Saving, stopping at the right moment, waiting for others, control by an operator, alerts and profiles.
`monolith.train.hook` says what a hook is.
"""

from monolith.train.hooks.config import DeepInsightConfig, HooksConfig
from monolith.train.hooks.control.alerting import AlertConfig, AlertHook
from monolith.train.hooks.control.barrier import (
    Barrier,
    BarrierHook,
    BarrierSaveListener,
    LocalBarrier,
    Placement,
    WaitingBarrier,
    WorkerBarrierHook,
    unblocked_indices,
)
from monolith.train.hooks.control.control_server import BlockStatus, ControlClient, ControlServerHook
from monolith.train.hooks.control.controller import ActionFileHook, ControllerHook
from monolith.train.hooks.control.operator_files import ForceDumpHook, OnlineFileHook
from monolith.train.hooks.control.ps_health import HealthStatus, MachineHealth, PsHealthHook, memory_health
from monolith.train.hooks.control.request_time import RequestTimeHook
from monolith.train.hooks.control.slow_start import SlowStartHook, slow_start_target
from monolith.train.hooks.control.tide import TideStoppingHook, TideWindow, before
from monolith.train.hooks.reports.deep_insight import DeepInsightHook
from monolith.train.hooks.reports.feature_dump import FeatureDump, batch_records
from monolith.train.hooks.reports.feature_insight import FeatureInsightHook, feature_insight_data
from monolith.train.hooks.reports.file_metrics import FileMetricHook
from monolith.train.hooks.reports.heartbeat import HeartBeatHook
from monolith.train.hooks.reports.kafka_metrics import KafkaMetricHook
from monolith.train.hooks.reports.live_line import LiveLineHook, Standing
from monolith.train.hooks.reports.metric_sinks import CustomMetricHook, MetricClient
from monolith.train.hooks.reports.model_insight import ModelInsightHook
from monolith.train.hooks.reports.nas import NasDataHook
from monolith.train.hooks.reports.profiling import ProfilerHook
from monolith.train.hooks.reports.summaries import SummaryHook
from monolith.train.hooks.reports.table_info import TableInfoHook
from monolith.train.hooks.reports.throughput import ThroughputHook
from monolith.train.hooks.saving.listeners import AfterSaveListener, BeforeSaveListener, SaveListener
from monolith.train.hooks.saving.memory import SaveMemory
from monolith.train.hooks.saving.save import SaveConfig, SaveHook, Snapshot, Snapshots
from monolith.train.hooks.saving.timer import SaveTimer

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
    "ControlClient",
    "ControlServerHook",
    "ControllerHook",
    "CustomMetricHook",
    "DeepInsightConfig",
    "DeepInsightHook",
    "FeatureDump",
    "FeatureInsightHook",
    "FileMetricHook",
    "ForceDumpHook",
    "HealthStatus",
    "HeartBeatHook",
    "HooksConfig",
    "KafkaMetricHook",
    "LiveLineHook",
    "LocalBarrier",
    "MachineHealth",
    "MetricClient",
    "ModelInsightHook",
    "NasDataHook",
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
    "Snapshot",
    "Snapshots",
    "Standing",
    "SummaryHook",
    "TableInfoHook",
    "ThroughputHook",
    "TideStoppingHook",
    "TideWindow",
    "WaitingBarrier",
    "WorkerBarrierHook",
    "batch_records",
    "before",
    "feature_insight_data",
    "memory_health",
    "slow_start_target",
    "unblocked_indices",
]
