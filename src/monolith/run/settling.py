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
    train = replace(config.train, accelerator="cpu", embedding_device="host", device_memory_bytes=None)
    return replace(config, job=replace(config.job, local=True), train=train)


def settle(config: RunConfig) -> RunConfig:
    """Return the config with nothing left open."""
    job, timeouts = config.job, config.timeouts
    if config.model and job.task is None:
        job = replace(job, task=RETRIEVAL_TASK if config.retrieves else CONFIG_TASK)
    if timeouts.operation is None:
        timeouts = replace(timeouts, operation=timeouts.lookup)
    return replace(config, job=job, timeouts=timeouts, train=_with_hours(config.train))


def _with_hours(train: TrainConfig) -> TrainConfig:
    """A run with an interval for saves outside of its daily window continues there, and does not end."""
    if train.hours is None or train.save.hours is not None or train.save.secs_outside_hours is None:
        return train
    return replace(train, hours=None, save=replace(train.save, hours=train.hours))
