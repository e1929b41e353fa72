"""A job may move the end of its task's data and try it on a CPU; a task may know how often to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from train.tasks import Clicks

from monolith.data import DataConfig
from monolith.runtime.cluster_config import JobConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.task_setup import with_job, with_task
from monolith.train import SaveConfig, TrainConfig

ITEMS = DataConfig(path="items")
DAYS = DataConfig(path="clicks", start_date="20240101", end_date="20240103")


@dataclass(frozen=True)
class ByDay(Clicks):
    data: DataConfig = DAYS
    other: DataConfig = ITEMS
    end_date: str = "20240103"


class Plain(Clicks):
    """Takes no settings of its own, and is none that can be changed."""


def unheard(line: str) -> None:
    raise AssertionError(line)


def test_the_end_date_of_a_job_replaces_those_that_the_task_has() -> None:
    task: Any = with_job(ByDay(), JobConfig(override_end_date="20240109"), unheard)
    assert task.data == DataConfig(path="clicks", start_date="20240101", end_date="20240109")
    assert task.end_date == "20240109"
    assert task.other == ITEMS  # reads no folders by day
    assert ByDay().data == DAYS


def test_an_end_date_that_changes_nothing_is_said() -> None:
    said: list[str] = []
    task = Clicks()
    assert with_job(task, JobConfig(override_end_date="20240109"), said.append) is task
    assert "job.override_end_date 20240109 changes nothing" in said[0]


@pytest.mark.parametrize(("given", "tested"), [(512, 128), (128, 128), (8, 8)])
def test_a_test_on_a_cpu_has_small_batches(given: int, tested: int) -> None:
    task: Any = with_job(Clicks(batch_size=given), JobConfig(cpu_test=True), unheard)
    assert task.batch_size == tested


def test_without_being_asked_a_job_changes_nothing() -> None:
    task = Clicks(batch_size=512)
    assert with_job(task, JobConfig(), unheard) is task


class Saves(Clicks):
    save_steps = 7


@pytest.mark.parametrize("save", [SaveConfig(steps=100), SaveConfig(secs=60.0)])
def test_how_often_a_task_wants_to_be_saved_beats_the_run(save: SaveConfig) -> None:
    run = RunConfig(train=TrainConfig(save=save))
    assert with_task(run, Saves()).train.save == SaveConfig(steps=7)
    assert with_task(run, Clicks()) is run
