"""Deciding what a config leaves open, once, into a new config that can be printed."""

from __future__ import annotations

from dataclasses import replace

from monolith.run.config import RunConfig
from monolith.train.config import TrainConfig

CONFIG_TASK = "monolith.runtime.config_task:ConfigTask"
"""The task of a run that has a model in its config, and no task."""

RETRIEVAL_TASK = "monolith.runtime.config_task:ConfigRetrievalTask"
"""The task of such a run whose model retrieves."""


def as_cpu_test(config: RunConfig) -> RunConfig:
    """Return the config of a run on one CPU, where `job.cpu_test` asks for a test of the task."""
    if not config.job.cpu_test:
        return config
    train = replace(config.train, accelerator="cpu", rows_on="host", device_memory_bytes=None)
    return replace(config, job=replace(config.job, local=True), train=train)


def settle(config: RunConfig) -> RunConfig:
    """Return the config with nothing left open."""
    job, timeouts = config.job, config.timeouts
    if config.model and job.task is None:
        job = replace(job, task=RETRIEVAL_TASK if config.retrieves else CONFIG_TASK)
    if not job.model_name:
        job = replace(job, model_name=job.name or f"di_name_{_task_class(job.task)}")
    if timeouts.operation is None:
        timeouts = replace(timeouts, operation=timeouts.lookup)
    return replace(config, job=job, timeouts=timeouts, train=_with_tide(config.train))


def _with_tide(train: TrainConfig) -> TrainConfig:
    """A run that has an interval for saves outside of its daily window goes on there, and does not end."""
    if train.tide is None or train.save.tide is not None or train.save.tide_secs is None:
        return train
    return replace(train, tide=None, save=replace(train.save, tide=train.tide))


def _task_class(task: str | None) -> str:
    return (task or "").rpartition(":")[2].rpartition(".")[2]
