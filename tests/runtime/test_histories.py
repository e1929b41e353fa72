"""Histories that a run builds from its data: the same after a kill, and for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime.config_files import write_clicks

from monolith.cli.main import main
from monolith.data import Shard
from monolith.errors import ConfigError
from monolith.runtime import Trainer
from monolith.runtime.config import CONFIG_TASK
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigTask
from monolith.train import Hook, Mode, SaveConfig, StepResult, TrainConfig, TrainingRun, load_task

CONFIG = """
[data]
path = "{folder}/clicks.csv"
split = {{ evaluate_from = 1700000240, time = "time" }}
history_users = 15

[features]
user = {{ kind = "string" }}
item = {{ kind = "int" }}
genre = {{ kind = "string", column = "tags" }}
history = {{ kind = "sequence", of = "item", max = 5, with = ["genre", "time"], by = "user", only = "click" }}

[labels.click]

[examples]
event_time = "time"

[model]
type = "sequence_ranker"
dim = 4
hidden = [8]
layers = 1

[task]
batch_size = 20

[train]
model_dir = "{folder}/run"
summary_every_steps = "none"
"""


def task_of(folder: Path) -> ConfigTask:
    write_clicks(folder / "clicks.csv", 300)
    (folder / "clicks.toml").write_text(CONFIG.format(folder=folder))
    run = read_run(folder / "clicks.toml", {})
    task = load_task(CONFIG_TASK, run.task, inputs=run.inputs)
    assert isinstance(task, ConfigTask)
    return task


class Seen(Hook):
    """Remembers the histories of each step; fails at one as if the process was killed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: dict[int, Any] = {}
        self._fail_at = fail_at

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        names = ("history", "history.genre", "history.time")
        self.steps[result.step] = [result.batch.ids[name].to_list() for name in names]
        if result.step == self._fail_at:
            raise RuntimeError("as if it were killed")


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_run_that_was_killed_has_the_histories_of_one_that_was_not(
    tmp_path: Path, epochs: int | None
) -> None:
    def train(folder: str, hook: Seen) -> Any:
        config = TrainConfig(
            model_dir=str(tmp_path / folder),
            save=SaveConfig(steps=4),
            summary_every_steps=None,
            epochs=epochs,
            shuffle_buffer=50,
        )
        return Trainer(task_of(tmp_path), config, hooks=[hook]).train()

    whole, killed, resumed = Seen(), Seen(fail_at=7), Seen()
    train("whole", whole)
    with pytest.raises(RuntimeError):
        train("killed", killed)
    train("killed", resumed)
    assert {**killed.steps, **resumed.steps} == whole.steps
    assert min(resumed.steps) == 5
    assert len(whole.steps) == 12 * (epochs or 1)
    lengths = [len(row) for history, _, _ in whole.steps.values() for row in history]
    assert max(lengths) == 5


def test_what_is_evaluated_on_has_the_histories_of_the_training_data(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    evaluated = [batch.ids["history"].to_list() for batch in task.dataset(Mode.EVALUATE)]
    assert len([row for rows in evaluated for row in rows]) == 60
    assert sum(map(bool, evaluated[0])) > 10  # most of its 20 users, of which 15 are kept, clicked before


def test_a_config_file_trains_and_evaluates_with_histories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task_of(tmp_path)
    config = str(tmp_path / "clicks.toml")
    for command in ("train", "evaluate"):
        assert main([command, "--config", config, "--quiet", "--json"]) == 0, capsys.readouterr().err


def test_workers_that_would_each_read_some_events_of_a_user_are_refused(tmp_path: Path) -> None:
    data = task_of(tmp_path).dataset(Mode.TRAIN)
    with pytest.raises(ConfigError, match="each of 3 workers would read only some of them"):
        data.read_shard(Shard(1, 3))
