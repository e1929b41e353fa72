"""Hooks that start, hold and stop a run: operators, alerts, memory, hours of the day, barriers."""

from monolith.train.hooks.control.alerting import AlertConfig, AlertHook
from monolith.train.hooks.control.barrier import (
    Barrier,
    BarrierHook,
    BarrierSaveListener,
    LocalBarrier,
    Placement,
    unblocked_indices,
)
from monolith.train.hooks.control.control_server import BlockStatus, ControlClient, ControlServerHook
from monolith.train.hooks.control.controller import ActionFileHook, ControllerHook
from monolith.train.hooks.control.operator_files import ForceDumpHook, OnlineFileHook
from monolith.train.hooks.control.ps_health import HealthStatus, MachineHealth, PsHealthHook, memory_health
from monolith.train.hooks.control.request_time import RequestTimeHook
from monolith.train.hooks.control.slow_start import SlowStartHook, slow_start_target
from monolith.train.hooks.control.tide import TideStoppingHook, TideWindow, before

__all__ = [
    "ActionFileHook",
    "AlertConfig",
    "AlertHook",
    "Barrier",
    "BarrierHook",
    "BarrierSaveListener",
    "BlockStatus",
    "ControlClient",
    "ControlServerHook",
    "ControllerHook",
    "ForceDumpHook",
    "HealthStatus",
    "LocalBarrier",
    "MachineHealth",
    "OnlineFileHook",
    "Placement",
    "PsHealthHook",
    "RequestTimeHook",
    "SlowStartHook",
    "TideStoppingHook",
    "TideWindow",
    "before",
    "memory_health",
    "slow_start_target",
    "unblocked_indices",
]
