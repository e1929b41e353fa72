"""Training: tasks, the loop that runs them, and its hooks."""

from monolith.train.candidates import Candidates
from monolith.train.candidates_config import CandidatesConfig
from monolith.train.config import ExpiryConfig, KeepConfig, RestoreConfig, TrainConfig
from monolith.train.evaluate_config import EvaluateConfig
from monolith.train.evaluation_log import Evaluation
from monolith.train.fleet.fleet import Fleet
from monolith.train.fleet.joining import join_fleet
from monolith.train.fleet.parameter_server import serve_parameters
from monolith.train.fleet.peers import FleetPeers
from monolith.train.following import FollowConfig, Follower
from monolith.train.hook import Hook, StepResult, TrainingRun, drive
from monolith.train.hooks import AlertConfig, DailyHours, SaveConfig
from monolith.train.lane import Lane
from monolith.train.metrics.metric_set import METRICS, Metric, MetricSet, Windowed, WindowRow
from monolith.train.peers import Alone, Peers
from monolith.train.publishing.share import PublishPlan
from monolith.train.rate_schedule import ScheduleConfig
from monolith.train.report import TrainReport
from monolith.train.retrieval import RetrievalTask
from monolith.train.session import Session
from monolith.train.task import Mode, Outputs, Task
from monolith.train.task_loading import load_task
from monolith.train.trainer import LocalRun, Trainer

__all__ = [
    "METRICS",
    "AlertConfig",
    "Alone",
    "Candidates",
    "CandidatesConfig",
    "DailyHours",
    "EvaluateConfig",
    "Evaluation",
    "ExpiryConfig",
    "Fleet",
    "FleetPeers",
    "FollowConfig",
    "Follower",
    "Hook",
    "KeepConfig",
    "Lane",
    "LocalRun",
    "Metric",
    "MetricSet",
    "Mode",
    "Outputs",
    "Peers",
    "PublishPlan",
    "RestoreConfig",
    "RetrievalTask",
    "SaveConfig",
    "ScheduleConfig",
    "Session",
    "StepResult",
    "Task",
    "TrainConfig",
    "TrainReport",
    "Trainer",
    "TrainingRun",
    "WindowRow",
    "Windowed",
    "drive",
    "join_fleet",
    "load_task",
    "serve_parameters",
]
