"""Histories that a run builds from its data: the same after a kill, and for evaluation."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import replace
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.config_files import write_clicks
from runtime.fleets import read_model, run_fleet
from services import warm

from monolith import Predictor
from monolith.cli.main import main
from monolith.data import DataConfig, DataSplit, HistoryConfig, Shard
from monolith.data.kafka.config import TopicsConfig
from monolith.errors import ConfigError, DataError
from monolith.feature import FeatureSpec, HistoryFeature, IdFeature
from monolith.runtime import Trainer
from monolith.runtime.checkpoints import newest_checkpoint
from monolith.runtime.config import CONFIG_TASK
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigTask
from monolith.tensors import RaggedTensor
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


@pytest.mark.parametrize("model", ["deepfm", "din"])
def test_other_models_learn_from_histories_of_the_stream_and_are_served_with_them(
    tmp_path: Path, model: str
) -> None:
    write_clicks(tmp_path / "clicks.csv", 300)
    config = CONFIG.replace("sequence_ranker", model).replace("layers = 1\n", "")
    (tmp_path / "clicks.toml").write_text(config.format(folder=tmp_path) + "[export]\nwhen_saving = true\n")
    assert main(["train", "--config", str(tmp_path / "clicks.toml")]) == 0
    asked = {"user": ["u1"] * 3, "item": [1] * 3, "tags": ["a"] * 3, "time": [1_700_000_400] * 3}
    lists = {"history": [[], [1, 2], [2, 3]], "history.genre": [[], ["a", "b"], ["b", "a"]]}
    times = {"history.time": [[], [1, 2], [1, 2]]}
    with Predictor(str(tmp_path / "run" / "exported_models")) as predictor:
        scores = predictor.predict({**asked, **lists, **times}).outputs["click"].tolist()
    assert len(set(scores)) == 3  # the history counts


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


STREAM = (
    CONFIG.replace(
        'path = "{folder}/clicks.csv"\nsplit = {{ evaluate_from = 1700000240, time = "time" }}',
        'watch = "{folder}/events-*.csv"\nstop_after = "{stop_after}"',
    )
    .replace('item = {{ kind = "int" }}', 'item = {{ kind = "string" }}')
    .replace("[train]", "[train]\ndeterministic = true\nsave = {{ steps = 4 }}")
)
"""A file after the other, as they come; it ends once nothing has come for so long."""


def test_kill_9_of_a_real_process_changes_no_list(tmp_path: Path) -> None:
    """What it left is resumed twice: by a process, for the model, and here, where the lists are seen."""
    config, killed = tmp_path / "stream.toml", tmp_path / "run"

    def say(stop_after: str) -> tuple[ConfigTask, TrainConfig]:
        config.write_text(STREAM.format(folder=tmp_path, stop_after=stop_after))
        run = read_run(config, {})
        task = load_task(CONFIG_TASK, run.task, inputs=run.inputs)
        assert isinstance(task, ConfigTask)
        return task, run.train

    write_clicks(tmp_path / "clicks.csv", 1200)
    header, *rows = (tmp_path / "clicks.csv").read_text().splitlines()
    (tmp_path / "events-1.csv").write_text("\n".join([header, *rows[:900]]) + "\n")
    _, settings = say("1h")
    words = ["-m", "monolith", "train", "--config", str(config), "--quiet"]
    with warm.Popen(words, stdout=warm.PIPE, stderr=warm.STDOUT) as process:
        try:
            end = time.monotonic() + 240
            while newest_checkpoint(settings, "train") is None:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            process.kill()  # as it comes, while it trains or writes a checkpoint
        process.wait()
    assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    (tmp_path / "events-2.csv").write_text("\n".join([header, *rows[900:]]) + "\n")

    task, settings = say("0s")
    whole, resumed = Seen(), Seen()
    shutil.copytree(killed, tmp_path / "again")
    Trainer(task, replace(settings, model_dir=str(tmp_path / "whole")), hooks=[whole]).train()
    Trainer(task, replace(settings, model_dir=str(tmp_path / "again")), hooks=[resumed]).train()
    assert len(whole.steps) == 60
    first = min(resumed.steps)
    assert 5 <= first <= 46
    assert resumed.steps == {step: lists for step, lists in whole.steps.items() if step >= first}
    assert max(len(row) for row in whole.steps[60][0]) == 5

    done = warm.run(words)
    assert done.returncode == 0, done.stderr
    found, wanted = read_model(task, killed), read_model(task, tmp_path / "whole")
    assert found.step == wanted.step == 60
    assert (found.rows, found.weights) == (wanted.rows, wanted.weights)


# A fleet: one worker builds the histories of all, next to any number of servers.


def test_a_fleet_whose_worker_fails_has_the_histories_of_one_process(tmp_path: Path) -> None:
    task, alone = task_of(tmp_path), Seen()
    settings = TrainConfig(model_dir=str(tmp_path / "alone"), summary_every_steps=None)
    Trainer(task, settings, hooks=[alone]).train()
    killed, resumed = Seen(fail_at=7), Seen()
    how: dict[str, Any] = {"num_workers": 1, "save": SaveConfig(steps=4)}
    outcome = run_fleet(task, tmp_path / "fleet", hooks=lambda _: [killed], **how)
    with pytest.raises(RuntimeError, match="as if it were killed"):
        outcome.report(0)
    run_fleet(task, tmp_path / "fleet", hooks=lambda _: [resumed], **how).report(0)
    assert {**killed.steps, **resumed.steps} == alone.steps
    assert min(resumed.steps) == 5


@pytest.mark.parametrize("reads", ["files", "a queue of files"])
def test_workers_of_a_fleet_that_would_each_read_some_events_of_a_user_are_refused(
    tmp_path: Path, reads: str
) -> None:
    task = task_of(tmp_path)
    if reads == "a queue of files":
        (tmp_path / "train.csv").write_text((tmp_path / "clicks.csv").read_text())
        data = DataConfig(train=f"{tmp_path}/train.csv", queue=f"{tmp_path}/queue", history_users=15)
        task = replace(task, data=data)
    seen = Seen()
    outcome = run_fleet(task, tmp_path / "fleet", num_workers=2, hooks=lambda _: [seen])
    assert not seen.steps
    found = [str(one) for one in outcome.workers.values() if isinstance(one, ConfigError)]
    assert found
    for said in found:
        assert "each of 2 workers would read only some of them. Train with one worker" in said


def test_what_is_evaluated_on_has_the_histories_of_the_training_data(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    evaluated = [batch.ids["history"].to_list() for batch in task.dataset(Mode.EVALUATE)]
    assert len([row for rows in evaluated for row in rows]) == 60
    assert sum(map(bool, evaluated[0])) > 10  # most of its 20 users, of which 15 are kept, clicked before


def in_files(folder: Path) -> ConfigTask:
    """The task with the records of each part in a file of its own."""
    task = task_of(folder)
    header, *rows = (folder / "clicks.csv").read_text().splitlines()
    for name, part in (("train", rows[:200]), ("held", rows[200:240]), ("test", rows[240:])):
        (folder / f"{name}.csv").write_text("\n".join([header, *part]) + "\n")
    files = {
        "train": f"{folder}/train.csv",
        "evaluate": f"{folder}/held.csv",
        "predict": f"{folder}/test.csv",
    }
    return replace(task, data=replace(task.data, path=None, split=None, **files))


def histories_of(task: ConfigTask, mode: Mode) -> list[Any]:
    names = ("history", "history.genre", "history.time")
    batches = list(task.dataset(mode))
    lists = ([row for batch in batches for row in batch.ids[name].to_list()] for name in names)
    return list(zip(*lists, strict=True))


def test_files_of_their_own_have_the_histories_of_the_files_before_them(tmp_path: Path) -> None:
    task = in_files(tmp_path)
    whole = replace(task, data=DataConfig(path=f"{tmp_path}/clicks.csv", history_users=15))
    wanted = histories_of(whole, Mode.TRAIN)
    assert histories_of(task, Mode.TRAIN) == wanted[:200]
    assert histories_of(task, Mode.EVALUATE) == wanted[200:240]
    assert histories_of(task, Mode.PREDICT) == wanted[240:]
    for data in (
        replace(task.data, train=None, watch=f"{tmp_path}/tra*.csv", stop_after=timedelta(0)),
        replace(task.data, queue=str(tmp_path / "queue")),
    ):
        for _ in range(2):
            assert histories_of(replace(task, data=data), Mode.EVALUATE) == wanted[200:240]


def test_without_the_files_before_them_histories_begin_empty_or_the_run_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = in_files(tmp_path)
    alone = replace(task, data=DataConfig(path=f"{tmp_path}/held.csv", history_users=15))
    wanted = histories_of(alone, Mode.TRAIN)
    topics = TopicsConfig(servers=("nowhere:9092",), topics=("clicks",), group="g")
    for data in (
        replace(task.data, train=None),
        replace(task.data, train=None, watch=f"{tmp_path}/none-yet-*.csv"),
        replace(task.data, train=None, kafka=topics),
    ):
        caplog.clear()
        assert histories_of(replace(task, data=data), Mode.EVALUATE) == wanted
        assert ("topics cannot be read again" in caplog.text) == (data.kafka is not None)
    gone = replace(task, data=replace(task.data, train=f"{tmp_path}/gone.csv"))
    with pytest.raises(DataError, match=r"trained on, which is not there: no file .* or to none to begin"):
        histories_of(gone, Mode.EVALUATE)


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


# Leave-one-out: the last record of each user is to be predicted, the one before it evaluates.

Event = tuple[str, str, int]
"""User, item and time; each item is in one event, so that it says which."""


def write_shuffled(path: Path) -> list[Event]:
    """Write events of 12 users out of order, some at the same second; return them as the file has them."""
    draw = random.Random(4)
    users = [f"user {draw.randrange(12)}" for _ in range(160)] + ["once", "twice", "twice"]
    events = [
        (user, f"item {number}", 1_700_000_000 + draw.randrange(60) + number // 2)
        for number, user in enumerate(users)
    ]
    draw.shuffle(events)
    path.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in events))
    return events


def before(events: list[Event], number: int, most: int) -> list[str]:
    """Return the items that the user of an event had until then: of the last events that were read before it,
    as many as are kept, those at no later time."""
    user, _, time = events[number]
    earlier = sorted((one for one in events[:number] if one[0] == user), key=itemgetter(2))
    return [item for _, item, then in earlier[-most:] if then <= time]


def held_out(events: list[Event]) -> tuple[set[int], set[int]]:
    """Return the numbers of the last but one, and of the last event of each user with three or more."""
    evaluated, predicted = set(), set()
    for user in {user for user, _, _ in events}:
        numbers = [number for number, one in enumerate(events) if one[0] == user]
        numbers.sort(key=lambda number: events[number][2])
        if len(numbers) >= 3:
            evaluated.add(numbers[-2])
            predicted.add(numbers[-1])
    return evaluated, predicted


def values_of(column: RaggedTensor) -> list[list[Any]]:
    if column.dtype is not torch.uint8:
        return column.to_list()
    return [[bytes(text).decode() for text in row] for row in column.to_list()]


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("part", ["train", "evaluate", "predict"])
def test_leave_one_out_has_the_histories_of_all_events_before_and_never_one_after(
    tmp_path: Path, part: Any, typed: bool
) -> None:
    events = write_shuffled(tmp_path / "events.csv")
    spec = FeatureSpec(
        features={
            "user": IdFeature(kind="string"),
            "item": IdFeature(kind="string"),
            "history": HistoryFeature(of="item", max=4, with_=("time",), by="user"),
        },
        labels={},
        event_time="time",
    )
    data = DataConfig(path=f"{tmp_path}/events.csv", split=DataSplit(last_of="user", time="time"))
    types = spec.source_columns if typed else None
    read = data.pipeline(part, 16, types=types, histories=HistoryConfig.from_spec(spec))
    found = {}
    for records in read:
        columns = [values_of(records[name]) for name in ("item", "history", "history.time")]
        for (item,), history, times in zip(*columns, strict=True):
            found[item] = history, times
    evaluated, predicted = held_out(events)
    assert len(evaluated) == len(predicted) == 12
    chosen = {"evaluate": evaluated, "predict": predicted}
    numbers = chosen.get(part, set(range(len(events))) - evaluated - predicted)
    assert {item: history for item, (history, _) in found.items()} == {
        events[number][1]: before(events, number, 4) for number in numbers
    }
    at = {item: time for _, item, time in events}
    withheld = {events[number][1] for number in evaluated | predicted}
    for item, (history, times) in found.items():
        assert [int(one) for one in times] == [at[one] for one in history]
        assert all(at[one] <= at[item] for one in history)
        if part == "train":
            assert not withheld & set(history)
        if part == "evaluate":
            assert not {events[number][1] for number in predicted} & set(history)


def test_a_run_measures_leave_one_out_with_histories_that_it_builds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = write_shuffled(tmp_path / "events.csv")
    (tmp_path / "items.csv").write_text("item\n" + "".join(f"{item}\n" for _, item, _ in events))
    config = tmp_path / "last.toml"
    config.write_text(LAST.format(folder=tmp_path))
    assert main(["train", "--config", str(config), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == len(events) - 24
    for more in ([], ["--part", "predict"]):
        assert main(["evaluate", "--config", str(config), "--json", *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["examples"] == 12
        assert "last" in told["protocol"]


LAST = """
[data]
path = "{folder}/events.csv"
split = {{ last_of = "user", time = "time" }}

[features]
user = {{ kind = "string" }}
item = {{ kind = "string" }}
history = {{ kind = "sequence", of = "item", max = 4, with = ["time"], by = "user" }}

[examples]
event_time = "time"

[model]
type = "hstu"
dim = 4
layers = 1

[candidates]
path = "{folder}/items.csv"
ks = [10]

[task]
batch_size = 16

[train]
model_dir = "{folder}/run"
summary_every_steps = "none"
"""
