"""Hooks: what else happens while a model trains, besides training.

Saving, stopping at the right moment, waiting for others, control by an operator, alerts and profiles.
`monolith.train.hook` says what a hook is.
"""

from monolith.train.hooks.alerts import AlertConfig, AlertHook
from monolith.train.hooks.barrier import (
    Barrier,
    BarrierHook,
    BarrierSaveListener,
    HealthStatus,
    LocalBarrier,
    MachineHealth,
    PlacedBarrier,
    PsHealthHook,
    WorkerBarrierHook,
    memory_health,
    unblocked_indices,
)
from monolith.train.hooks.config import DeepInsightConfig, HooksConfig
from monolith.train.hooks.control_server import BlockStatus, ControlClient, ControlServerHook
from monolith.train.hooks.controller import ActionFileHook, ControllerHook
from monolith.train.hooks.deep_insight import DeepInsightHook, FileMetricHook, KafkaMetricHook
from monolith.train.hooks.feature_dump import FeatureDump, batch_records
from monolith.train.hooks.hours import (
    DailyHours,
    SlowStartHook,
    StopOutsideHoursHook,
    before,
    slow_start_target,
)
from monolith.train.hooks.insight import (
    FeatureInsightHook,
    ModelInsightHook,
    NasDataHook,
    feature_insight_data,
)
from monolith.train.hooks.live_line import LiveLineHook, TrainStatus
from monolith.train.hooks.metric_sinks import CustomMetricHook, HeartBeatHook, MetricClient, ThroughputHook
from monolith.train.hooks.profiling import ProfilerHook
from monolith.train.hooks.save import SaveConfig, SaveHook, Snapshots
from monolith.train.hooks.save_timing import (
    AfterSaveListener,
    BeforeSaveListener,
    ForceDumpHook,
    OnlineFileHook,
    RequestTimeHook,
    SaveListener,
    SaveMemory,
    SaveTimer,
)
from monolith.train.hooks.summaries import SummaryHook, TableInfoHook

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
    "DailyHours",
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
    "PlacedBarrier",
    "ProfilerHook",
    "PsHealthHook",
    "RequestTimeHook",
    "SaveConfig",
    "SaveHook",
    "SaveListener",
    "SaveMemory",
    "SaveTimer",
    "SlowStartHook",
    "Snapshots",
    "StopOutsideHoursHook",
    "SummaryHook",
    "TableInfoHook",
    "ThroughputHook",
    "TrainStatus",
    "WorkerBarrierHook",
    "batch_records",
    "before",
    "feature_insight_data",
    "memory_health",
    "slow_start_target",
    "unblocked_indices",
]
