"""The runtime: what runs a task, in one process, on parameter servers or across ranks."""

from monolith.runtime.context import Launch, Output, RunResult
from monolith.runtime.coordinator import Coordinator
from monolith.runtime.fleet import Fleet
from monolith.runtime.fleet_coordinator import FleetCoordinator
from monolith.runtime.fleet_join import join_fleet
from monolith.runtime.following import FollowConfig, Follower
from monolith.runtime.local import LocalCoordinator
from monolith.runtime.parameter_server import serve_parameters
from monolith.runtime.prefetch import PrefetchPipeline
from monolith.runtime.report import TrainReport
from monolith.runtime.run import Run
from monolith.runtime.session import Session
from monolith.runtime.trainer import LocalRun, Trainer

__all__ = [
    "Coordinator",
    "Fleet",
    "FleetCoordinator",
    "FollowConfig",
    "Follower",
    "Launch",
    "LocalCoordinator",
    "LocalRun",
    "Output",
    "PrefetchPipeline",
    "Run",
    "RunResult",
    "Session",
    "TrainReport",
    "Trainer",
    "join_fleet",
    "serve_parameters",
]
