"""What a user writes or reads to train a model: tasks, metrics, evaluation and hooks."""

from monolith.train.candidates import Candidates
from monolith.train.candidates_config import CandidatesConfig
from monolith.train.config import ExpiryConfig, KeepConfig, RestoreConfig, TrainConfig
from monolith.train.evaluate_config import EvaluateConfig
from monolith.train.evaluation_log import Evaluation
from monolith.train.hook import Hook, StepResult, TrainingRun, drive
from monolith.train.hooks import AlertConfig, DailyHours, SaveConfig
from monolith.train.metrics.metric_set import METRICS, Metric, MetricSet, Windowed, WindowRow
from monolith.train.rate_schedule import ScheduleConfig
from monolith.train.retrieval import RetrievalTask
from monolith.train.task import Mode, Outputs, Task
from monolith.train.task_loading import load_task

__all__ = [
    "METRICS",
    "AlertConfig",
    "Candidates",
    "CandidatesConfig",
    "DailyHours",
    "EvaluateConfig",
    "Evaluation",
    "ExpiryConfig",
    "Hook",
    "KeepConfig",
    "Metric",
    "MetricSet",
    "Mode",
    "Outputs",
    "RestoreConfig",
    "RetrievalTask",
    "SaveConfig",
    "ScheduleConfig",
    "StepResult",
    "Task",
    "TrainConfig",
    "TrainingRun",
    "WindowRow",
    "Windowed",
    "drive",
    "load_task",
]
