"""The data of a run, read several times: in another order each time, and exactly, over restarts."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from runtime.fleets import TalliedFiles, run_fleet
from services import warm
from train.tasks import Clicks

from monolith.data import FileSource, MemorySource, Pipeline, ShuffleConfig, Stream, Watch
from monolith.data.formats.parquet import ParquetFormat
from monolith.data.records import concat
from monolith.data.synthetic.drift import SPEC
from monolith.errors import ConfigError, RestoreError
from monolith.feature import Batch
from monolith.runtime import Trainer
from monolith.train import Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun

RECORDS = 48


@dataclass(frozen=True)
class Files(Clicks):
    """48 records of the drifting stream, in files of 12 and in batches of 8."""

    folder: str = ""
    stages: str = ""
    source: dict[str, Any] = field(default_factory=dict)

    def write(self) -> list[str]:
        task = TalliedFiles(batches=6, folder=self.folder)
        return task.write()

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        source = FileSource(self.write(), ParquetFormat(), batch_size=5, **self.source)
        pipeline = Pipeline(source)
        if self.stages == "shuffle":
            pipeline = pipeline.shuffle(ShuffleConfig(buffer=20, seed=3))
        return pipeline.rebatch(8).to_batches(SPEC).prefetch(2 if self.stages == "ahead" else 0)


class Read(Hook):
    """Remembers which records were trained on, by their times, which are all different."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.times: list[int] = []
        self._fail_at = fail_at

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        self.times += result.batch.ids["item"].flat_values.tolist()
        if result.step == self._fail_at:
            raise RuntimeError("as if it were killed")


def train(task: Clicks, folder: Path | None, hook: Hook, **config: Any) -> Any:
    settings: dict[str, Any] = {"save": SaveConfig(steps=2), "summary_every_steps": None, **config}
    model_dir = "" if folder is None else str(folder)
    return Trainer(task, TrainConfig(model_dir=model_dir, **settings), hooks=[hook]).train()


def items(task: Clicks, **config: Any) -> list[int]:
    read = Read()
    train(task, None, read, **config)
    return read.times


def cut(numbers: Sequence[int], size: int) -> list[list[int]]:
    return [list(numbers[first : first + size]) for first in range(0, len(numbers), size)]


@pytest.mark.parametrize("stages", ["", "shuffle"])
def test_every_epoch_has_all_records_in_an_order_of_its_own(tmp_path: Path, stages: str) -> None:
    task = Files(folder=str(tmp_path), stages=stages)
    once = items(task)
    read = items(task, epochs=3, shuffle_buffer=20)
    assert len(read) == 3 * len(once)
    if stages:  # a stretch of a stage may have records of two epochs
        assert sorted(read) == sorted(3 * once)
    else:
        assert all(sorted(epoch) == sorted(once) for epoch in cut(read, len(once)))
    orders = cut(read, len(once))
    assert len({tuple(order) for order in orders}) == 3
    assert items(task, epochs=3, shuffle_buffer=20) == read
    assert (items(task, epochs=3, shuffle_buffer=20, seed=1) == read) == bool(stages)


@dataclass(frozen=True)
class InFile(Clicks):
    """6400 records in one Parquet file of small row groups; sorted by label, or in the order of time."""

    batches: int = 100
    folder: str = ""
    by_label: bool = True
    files: bool = True

    def dataset(self, mode: Mode) -> Stream[Batch]:
        if mode is not Mode.TRAIN:
            return super().dataset(mode)
        path, form = f"{self.folder}/{self.by_label}.parquet", ParquetFormat(row_group_rows=64)
        if not Path(path).exists():
            records = concat(list(self.records(mode)))
            order = records["label"].flat_values.argsort(stable=True)
            with form.writer(path) as writer:
                writer.write(records.take(order) if self.by_label else records)
        shuffle = ShuffleConfig(seed=1, buffer=640, files=self.files)
        return Pipeline(FileSource([path], form, batch_size=64, shuffle=shuffle)).to_batches(SPEC)


def test_a_file_that_is_sorted_by_label_trains_as_well_as_a_mixed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the order of records depends on the path of their file
    found = {}
    for name, task in {
        "mixed": InFile(by_label=False, folder="."),
        "sorted": InFile(folder="."),
        "sorted, in stretches": InFile(folder=".", files=False),
    }.items():
        folder = Path(name)
        train(task, folder, Read(), epochs=1, save=SaveConfig())
        found[name] = Trainer(task, TrainConfig(model_dir=str(folder))).evaluate()
    assert found["sorted"]["click/auc"] > found["mixed"]["click/auc"] - 0.015
    # Without it, all that comes last has the label 1, so that everything is predicted to have it.
    assert found["sorted, in stretches"]["loss"] > found["sorted"]["loss"] + 0.05
    assert found["sorted, in stretches"]["click/auc"] < found["sorted"]["click/auc"] - 0.005


def test_without_a_buffer_the_order_stays(tmp_path: Path) -> None:
    task = Files(folder=str(tmp_path))
    assert items(task, epochs=2, shuffle_buffer=0) == 2 * items(task)


def test_records_in_memory_are_read_several_times_too(tmp_path: Path) -> None:
    records = next(iter(FileSource(Files(folder=str(tmp_path)).write(), ParquetFormat(), batch_size=48)))

    @dataclass(frozen=True)
    class Memory(Clicks):
        def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
            return Pipeline(MemorySource(records, batch_size=8)).to_batches(SPEC)

    once, read = items(Memory()), items(Memory(), epochs=2)
    first, second = cut(read, len(once))
    assert sorted(first) == sorted(second) == sorted(once)
    assert first != second


@pytest.mark.parametrize(("stages", "killed_at"), [("", 5), ("", 12), ("shuffle", 9), ("ahead", 12)])
def test_a_run_that_was_cut_short_resumes_in_the_middle_of_an_epoch(
    tmp_path: Path, stages: str, killed_at: int
) -> None:
    task = Files(folder=str(tmp_path), stages=stages)
    config: dict[str, Any] = {"epochs": 3, "shuffle_buffer": 20}
    whole = items(task, **config)
    cut_short, rest = Read(fail_at=killed_at), Read()
    with pytest.raises(RuntimeError):
        train(task, tmp_path / "model", cut_short, **config)
    report = train(task, tmp_path / "model", rest, **config)
    kept = report.step - report.steps
    assert 0 < kept <= killed_at
    assert cut_short.times[: kept * 8] + rest.times == whole
    assert report.step == 18


def test_another_seed_is_refused_in_the_middle_of_epochs_with_what_to_set_it_to(tmp_path: Path) -> None:
    task, config = Files(folder=str(tmp_path)), {"epochs": 3, "shuffle_buffer": 20}
    train(task, tmp_path / "model", Read(), seed=5, steps=3, **config)
    for change, said in (
        (
            {"seed": 6},
            r"train\.seed 5, .*this run has train\.seed 6\. Set it back to train\.seed 5 to resume",
        ),
        ({"seed": 5, "shuffle_buffer": 10}, r"Set it back to train\.shuffle_buffer 20"),
        ({"seed": 5, "epochs": None}, r"train\.seed 5 and train\.shuffle_buffer 20, .*has no train\.epochs"),
    ):
        with pytest.raises(RestoreError, match=rf"(?s){said}.*restore\.restart_data"):
            train(task, tmp_path / "model", Read(), **{**config, **change})
    assert train(task, tmp_path / "model", Read(), seed=5, **config).step == 18


def test_another_seed_is_no_matter_where_the_source_has_an_order_of_its_own(tmp_path: Path) -> None:
    task = Files(folder=str(tmp_path), source={"shuffle": ShuffleConfig(buffer=20, seed=3)})
    whole, first, second = Read(), Read(), Read()
    train(task, None, whole, epochs=2)
    train(task, tmp_path / "model", first, epochs=2, steps=3)
    train(task, tmp_path / "model", second, epochs=2, seed=9)
    assert first.times + second.times == whole.times


def test_a_run_may_be_given_more_epochs_later(tmp_path: Path) -> None:
    task = Files(folder=str(tmp_path))
    whole = items(task, epochs=3, shuffle_buffer=20)
    first, second = Read(), Read()
    train(task, tmp_path / "model", first, epochs=2, shuffle_buffer=20)
    train(task, tmp_path / "model", second, epochs=3, shuffle_buffer=20)
    assert first.times + second.times == whole


KILLED = """
import os, signal, sys
from pathlib import Path
from runtime.test_epochs import Files, Read, train
class Kill(Read):
    def after_step(self, run, result):
        super().after_step(run, result)
        if result.step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
train(Files(folder=sys.argv[1]), Path(sys.argv[1]) / "model", Kill(), epochs=3, shuffle_buffer=20)
"""


def test_the_position_is_exact_over_kill_9(tmp_path: Path) -> None:
    task = Files(folder=str(tmp_path))
    whole = items(task, epochs=3, shuffle_buffer=20)
    done = warm.run(["-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[1])
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    rest = Read()
    report = train(task, tmp_path / "model", rest, epochs=3, shuffle_buffer=20)
    taken = report.step - report.steps
    assert report.step == 18
    assert 0 < taken <= 11
    assert rest.times == whole[taken * 8 :]


def test_several_workers_read_every_record_once_in_each_epoch(tmp_path: Path) -> None:
    task = TalliedFiles(batches=6, folder=str(tmp_path / "data"))
    Path(task.folder).mkdir()
    report = run_fleet(task, tmp_path / "model", epochs=2).chief
    assert report.examples == 2 * task.records


def test_data_that_cannot_be_read_several_times_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs: .*DriftingStream cannot be read several times"):
        train(Clicks(), None, Read(), epochs=2)

    @dataclass(frozen=True)
    class Odd(Files):
        how: str = ""

        def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
            if self.how == "take":
                paths = self.write()
                source = FileSource(paths, ParquetFormat(), batch_size=5)
                return Pipeline(source).take(10).to_batches(SPEC)
            watch = Watch([f"{self.folder}/*.parquet"])
            return Pipeline(FileSource(watch, ParquetFormat(), batch_size=5)).to_batches(SPEC)

    with pytest.raises(ConfigError, match=r"take\(10\)"):
        train(Odd(folder=str(tmp_path), how="take"), None, Read(), epochs=2)
    with pytest.raises(ConfigError, match="a watch or a queue is read once"):
        train(Odd(folder=str(tmp_path)), None, Read(), epochs=2)
    with pytest.raises(ConfigError, match="leave one of them out"):
        train(Files(folder=str(tmp_path), source={"epochs": 3}), None, Read(), epochs=2)
    with pytest.raises(ConfigError, match="epochs must be at least 1"):
        TrainConfig(epochs=0)
