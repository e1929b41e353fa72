"""What a run changes of its task once it is made, and what the task knows better than the run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monolith.data.config import DataConfig
from monolith.run.config import RunConfig
from monolith.run.processes import JobConfig

if TYPE_CHECKING:
    from monolith.train.task import Task

_log = logging.getLogger(__name__)

CPU_TEST_BATCH = 128
"""The most examples of a batch where a task is tried on a CPU."""

Warn = Callable[[str], None]


def with_job(task: Task, job: JobConfig, warn: Warn = _log.warning) -> Task:
    """Return the task with the end date, and the small batches of a test, that the job asks for.

    Args:
        warn: Told what the job asks for and the task has no setting for.
    """
    if job.override_end_date is not None:
        task = _changed(
            task,
            _end_dates(task, job.override_end_date),
            f"job.override_end_date {job.override_end_date}",
            warn,
        )
    if job.cpu_test:
        batch_size = getattr(task, "batch_size", CPU_TEST_BATCH)
        if isinstance(batch_size, int) and batch_size > CPU_TEST_BATCH:
            task = _changed(task, {"batch_size": CPU_TEST_BATCH}, "the batch size of job.cpu_test", warn)
    return task


def with_task(run: RunConfig, task: Task) -> RunConfig:
    """Return the run, which saves as often as its task says, if the task says so."""
    steps, save = task.save_steps, run.train.save
    if steps is None or (save.steps, save.secs) == (steps, None):
        return run
    _log.info("saving every %d steps, as the task says, which beats train.save", steps)
    return replace(run, train=replace(run.train, save=replace(save, steps=steps, secs=None)))


def _end_dates(task: Task, day: str) -> dict[str, Any]:
    """Return the settings of a task that have an end date, with that one."""
    settings = {field: getattr(task, field) for field in _fields(task)}
    found: dict[str, Any] = {
        name: replace(value, end_date=day)
        for name, value in settings.items()
        if isinstance(value, DataConfig) and value.start_date is not None
    }
    return found | ({"end_date": day} if "end_date" in settings else {})


def _changed(task: Task, settings: dict[str, Any], what: str, warn: Warn) -> Task:
    if not settings or not _fields(task):
        warn(f"{what} changes nothing: task {task.name!r} is no dataclass with a setting for it")
        return task
    changed: Task = dataclasses.replace(task, **settings)  # type: ignore[type-var]
    return changed


def _fields(task: Task) -> list[str]:
    return [field.name for field in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
