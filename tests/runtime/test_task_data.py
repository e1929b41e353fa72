"""A task says how it reads by reading; others then read for it, and it does not know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train.tasks import Clicks

from monolith.data import DataConfig, DataServiceConfig, Pipeline
from monolith.data.synthetic.drift import SPEC
from monolith.errors import ConfigError
from monolith.runtime.task_data import TaskData, data_of, read_from_service
from monolith.train import Mode, Task

FILES = DataConfig(path="nowhere", pattern="*.jsonl", columns=("user",))
NO_FILES = DataConfig()


@dataclass(frozen=True)
class FromFiles(Clicks):
    data: DataConfig = FILES
    other: DataConfig = NO_FILES
    epochs: int | None = 2

    def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
        return Pipeline(self.data.source(batch_size=self.batch_size, epochs=self.epochs)).to_batches(SPEC)


@dataclass(frozen=True)
class Twice(FromFiles):
    def dataset(self, mode: Mode) -> Any:
        self.other.source(batch_size=1)
        return super().dataset(mode)


OFF = DataServiceConfig()


@dataclass(frozen=True)
class Knows(FromFiles):
    """Has a setting for a data service."""

    service: DataServiceConfig = OFF

    def dataset(self, mode: Mode) -> Any:
        served = self.service.source("me")
        return super().dataset(mode) if served is None else Pipeline(served).to_batches(SPEC)


class Served:
    """Stands in for a source of the data service."""

    def __iter__(self) -> Any:
        return iter(())

    def close(self) -> None: ...


def test_what_a_task_reads_is_known_before_any_file_is_looked_at() -> None:
    assert data_of(FromFiles(batch_size=8)) == TaskData("data", FILES, 8, {"epochs": 2})
    assert data_of(Knows(service=DataServiceConfig(enabled=True))).setting == "data"
    assert data_of(FromFiles()).epochs == 2


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Clicks(), "makes nothing of settings of type DataConfig"),
        (Twice(), "makes two or more sources"),
        (FromFiles(data=DataConfig(path="x", queue="q")), "data.queue"),
    ],
)
def test_a_task_that_others_cannot_read_for_is_refused(task: Task, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        data_of(task)


def test_a_task_that_reads_for_ever_is_refused() -> None:
    with pytest.raises(ConfigError, match="for ever"):
        _ = data_of(FromFiles(epochs=None)).epochs


def test_a_file_is_read_as_the_task_would(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"user": 1, "item": 2}\n' * 5)
    with_options = TaskData("data", DataConfig(columns=("user",)), 2, {"epochs": 3, "drop_remainder": True})
    source = with_options.open_split(str(path))
    found = list(source)
    source.close()
    assert [records.size for records in found] == [2, 2, 1]  # once, and all of it
    assert list(found[0].columns) == ["user"]


@pytest.mark.parametrize("task", [FromFiles(), Knows()])
def test_a_task_reads_from_the_service_in_place_of_its_files(task: Task) -> None:
    served: list[Served] = []

    def open_source() -> Any:
        served.append(Served())
        return served[-1]

    changed: Any = read_from_service(task, open_source)
    assert list(changed.dataset(Mode.TRAIN)) == []
    assert len(served) == 1
    assert changed.data.path == FILES.path
    assert changed.batch_size == Clicks().batch_size
