"""What is checked of data and model before a training starts: as much as a training would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.config_files import write_project

from monolith.data import DataConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigTask
from monolith.runtime.task_data import check_before_training, task_problems
from monolith.runtime.task_setup import make_task
from monolith.train.task import Mode


@pytest.fixture
def made(tmp_path: Path) -> tuple[ConfigTask, RunConfig]:
    file = write_project(tmp_path, records=3000)
    run = read_run(file, {})
    task = make_task(run, file)
    assert isinstance(task, ConfigTask)
    return task, run


def test_a_bounded_number_of_batches_is_read(
    made: tuple[ConfigTask, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.runtime.task_data.SAMPLE", 500)
    task, run = made
    read: list[str] = []

    def counted(what: str, stream: Any) -> Any:
        class Counted:
            def __iter__(self) -> Iterator[Any]:
                for batch in stream:
                    read.append(what)
                    yield batch

            def close(self) -> None:
                stream.close()
                read.append(f"{what} closed")

        return Counted()

    found = ConfigTask.dataset
    monkeypatch.setattr(ConfigTask, "dataset", lambda self, mode: counted("examples", found(self, mode)))
    assert list(task_problems(task, run)) == []
    assert read.count("examples") == 500 // task.batch_size
    assert read[-1] == "examples closed"


def test_the_first_weights_of_a_run_are_the_same_with_and_without_a_check(
    made: tuple[ConfigTask, RunConfig],
) -> None:
    torch.manual_seed(3)
    check_before_training(*made)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


def test_all_problems_of_model_and_data_are_named(made: tuple[ConfigTask, RunConfig]) -> None:
    task, run = made
    spec = replace(
        task.features, features={"user": task.features.features["user"]}, event_time="tags", group=None
    )
    task = replace(task, features=spec, network=replace(task.network, type="din", settings={"hidden": (8,)}))
    first, second = map(str, task_problems(task, run))
    assert "needs a sequence" in first
    assert "which is no time" in second


def test_files_in_a_queue_are_left_to_the_workers(made: tuple[ConfigTask, RunConfig], tmp_path: Path) -> None:
    task, run = made
    task = replace(task, data=replace(task.data, queue=str(tmp_path / "queue")))
    assert list(task_problems(task, run)) == []
    assert not (tmp_path / "queue").exists()


def test_data_that_is_no_files_is_not_read(made: tuple[ConfigTask, RunConfig]) -> None:
    task, run = made
    (problem,) = task_problems(
        replace(
            task,
            data=DataConfig(),
            features=replace(task.features, features={"user": task.features.features["user"]}),
        ),
        run,
    )
    assert "data: path is not set" in str(problem)
    with pytest.raises(type(problem), match="path is not set"):
        replace(task, data=DataConfig()).dataset(Mode.TRAIN)
