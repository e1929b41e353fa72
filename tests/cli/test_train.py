"""`monolith train | evaluate | predict`: from a shell to a checkpoint and back."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
import urllib.request
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.trainings import load_training
from runtime.fleets import read_model
from services import warm
from train.published import Following
from train.tasks import Clicks

from monolith import observe
from monolith.checkpoint import ModelDirLock, read_checkpoint_state
from monolith.cli import train as command
from monolith.cli.evaluation import one_each, to_records
from monolith.cli.main import main
from monolith.cli.options.train import TrainOptions
from monolith.cli.terminal import warn
from monolith.cli.train import MARK, _describe_lost, print_report
from monolith.data import format_of
from monolith.errors import ConfigError, DataError
from monolith.feature import Batch, FeatureIds
from monolith.runtime import Trainer, process
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.losses import LostServer
from monolith.runtime.publish_pause import PauseFile, when_utc
from monolith.sync import LogPosition, Subscriber
from monolith.sync.channel_url import open_reader
from monolith.sync.messages import run_identity
from monolith.train import Hook, Mode, StepResult, TrainConfig, TrainingRun
from monolith.train.hooks import ControlClient, LiveLineHook
from monolith.train.hooks.live_line import LiveValues, log_status
from monolith.ui.publishing import RunPublishing, orders_of

TASK = "train.tasks:Clicks"
TESTS = Path(__file__).parents[1]


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    return str(tmp_path / "model")


def train(*flags: str, task: str = TASK) -> int:
    return main(["train", task, *flags, "--no-summaries"])


def train_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert train(*flags, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_task_without_embeddings_trains_resumes_and_is_evaluated(
    model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "train.tasks:Numbers"
    flags = ("--model-dir", model_dir, "--set", "batches=40")
    assert train(*flags, "--max-steps", "10", task=task) == 0
    assert train(*flags, "--json", task=task) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["step"], report["restored_from"]) == (40, f"{model_dir}/model.ckpt-10")
    assert main(["evaluate", task, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["click/auc"] == 1.0


def test_a_task_with_nothing_to_learn_counts_its_steps(
    model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model-dir", model_dir, "--max-steps", "2", task="train.tasks:NothingToLearn") == 0
    assert f"{model_dir}/model.ckpt-2" in capsys.readouterr().out


def options(**given: Any) -> TrainOptions:
    return TrainOptions(task=TASK, **given)


# Train


def test_a_task_is_trained_and_the_report_says_what_came_of_it(
    model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model-dir", model_dir, "--max-steps", "12", "--set", "batches=15") == 0
    printed = capsys.readouterr().out
    assert "max_steps of 12 was reached" in printed
    assert "768, " in printed
    assert re.search(r"click auc +0\.\d{4}", printed)
    assert re.search(r"loss +0\.\d{4}, the mean of the last steps", printed)
    assert re.search(r"time +training \d+\.\ds", printed)
    assert f"{model_dir}/model.ckpt-12" in printed
    assert f"monolith evaluate {TASK} --model-dir {model_dir} --set batches=15" in printed


def test_a_run_that_an_error_ends_says_its_last_checkpoint(
    model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run_config(code={"train.model_dir": model_dir})

    def failing(error: Exception, environ: dict[str, str]) -> str:
        with pytest.raises(type(error)), process.last_checkpoint_reported(run, environ, warn):
            raise error
        return capsys.readouterr().err

    assert failing(DataError("torn"), {}) == ""  # there is none
    Trainer(Clicks(), TrainConfig(model_dir=model_dir, steps=2)).train()
    capsys.readouterr()
    said = f"the last checkpoint is {model_dir}/model.ckpt-2; the same command resumes from it\n"
    assert failing(DataError("torn"), {}) == said
    assert failing(ConfigError("no such thing"), {}) == ""
    assert failing(DataError("torn"), {MARK: "its launcher says so"}) == ""


def test_without_a_model_dir_it_says_that_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "2") == 0
    assert "nothing; give --model-dir" in capsys.readouterr().out


def test_the_report_can_be_had_as_json_alone(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = train_json(capsys, "--model-dir", model_dir, "--steps", "3")
    assert (first["step"], first["steps"], first["examples"]) == (3, 3, 192)
    assert first["restored_from"] is None
    assert first["stop_reason"] == "3 steps were taken"
    assert 0 < first["loss"] < 2
    parts = [first[f"{name}_seconds"] for name in ("start", "save", "evaluate")]
    assert min(parts[:2]) > 0 == parts[2]
    assert sum(parts) < first["seconds"]
    assert first["metrics"].keys() == {"click/auc", "click/log_loss", "click/calibration"}
    second = train_json(capsys, "--model-dir", model_dir, "--steps", "2")
    assert (second["step"], second["steps"]) == (5, 2)
    assert second["restored_from"] == first["checkpoint"]


def test_a_report_has_the_part_of_the_batches_that_was_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    report = train_json(capsys, "--steps", "2")
    assert report["replayed_batches"] is None  # on a CPU
    for replayed, shown in ((None, False), (0.447, True), (0.0, True)):
        print_report(report | {"replayed_batches": replayed}, TrainOptions())
        said = " ".join(capsys.readouterr().out.split())
        assert (f"CUDA graphs {replayed or 0:.1%} of the batches were replayed" in said) == shown


def test_a_report_says_what_gpu_kernels_cost(capsys: pytest.CaptureFixture[str]) -> None:
    report = train_json(capsys, "--steps", "2")
    assert report["kernels"] == {"compiled": 0, "cached": 0, "seconds": 0.0}  # on a CPU
    print_report(report, TrainOptions())
    assert "GPU programs" not in capsys.readouterr().out
    print_report(report | {"kernels": {"compiled": 9, "cached": 2, "seconds": 6.25}}, TrainOptions())
    said = " ".join(capsys.readouterr().out.split())
    assert "kernels 9 GPU programs compiled and 2 read from the cache; waited 6.2s for them" in said


def test_what_else_a_run_does_is_set_in_its_config(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[train.hooks]\nheartbeat_every = "1s"\n[train.hooks.deep_insight]\nkafka = true\n')
    flags = ["--config", str(config), "--model-dir", model_dir, "--steps", "2"]
    assert train(*flags) == 2
    assert "needs kafka_brokers and kafka_topic" in capsys.readouterr().err
    monkeypatch.setenv("KAFKA_BROKER_LIST", "127.0.0.1:1")
    monkeypatch.setenv("KAFKA_TOPIC_NAME", "insight")
    assert train_json(capsys, *flags)["step"] == 2


def test_a_task_in_a_file_takes_settings_from_the_config_and_from_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom train.tasks import Clicks\n"
        "@dataclass(frozen=True)\nclass Mine(Clicks):\n    batches: int = 1\n"
    )
    config = tmp_path / "run.toml"
    config.write_text("[train]\nmax_steps = 9\n[task]\nbatches = 4\nbatch_size = 8\n")
    flags = ["train", f"{tmp_path}/mine.py:Mine", "--config", str(config), "--json"]
    assert main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["step"], found["examples"]) == ("mine", 4, 32)
    assert main([*flags, "--set", "batch_size=16", "--set", "batches=20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["examples"]) == (9, 144)


# Going back


def kept(model_dir: str) -> list[int]:
    """The steps of the checkpoints that are on disk."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in Path(model_dir).glob("model.ckpt-*.manifest"))


def test_starts_together_keep_as_many_checkpoints_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        flags = ["--model-dir", "runs/1", "--steps", "4", "--save-steps", "2", "--max-to-keep", "2"]
        train_json(capsys, *flags, "--deterministic")
    assert kept("runs/1") == [10, 12]


@pytest.mark.parametrize("name", ["model.ckpt-2", "2", "{model_dir}/model.ckpt-2"])
def test_any_checkpoint_on_disk_can_be_gone_back_to(
    model_dir: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    always = ["--model-dir", model_dir, "--save-steps", "2", "--deterministic"]
    flags = [*always, "--max-to-keep", "2"]
    train_json(capsys, *always, "--steps", "4", "--max-to-keep", "0")
    train_json(capsys, *flags, "--steps", "4")
    assert kept(model_dir) == [2, 6, 8]  # 2 was kept for good by the start that kept all
    back = ["--restore-checkpoint", name.format(model_dir=model_dir)]
    found = train_json(capsys, *flags, "--steps", "1", *back)
    assert found["restored_from"] == f"{model_dir}/model.ckpt-2"
    assert found["step"] == 3
    assert "model.ckpt-6, model.ckpt-8" in caplog.text
    assert kept(model_dir) == [2, 3, 6, 8]
    # It goes back once, whoever starts it again; without the flag it goes on from there, too.
    caplog.clear()
    assert train_json(capsys, *flags, "--steps", "1", *back)["restored_from"] == f"{model_dir}/model.ckpt-3"
    assert f"Remove {model_dir}/restore_ckpt" in caplog.text
    assert train_json(capsys, *flags, "--steps", "1")["restored_from"] == f"{model_dir}/model.ckpt-4"
    state = read_checkpoint_state(model_dir)
    assert state is not None
    assert [path.rpartition("-")[2] for path in state.all_model_checkpoint_paths] == ["4", "5"]
    # And forward again, to what it had gone back from.
    again = train_json(capsys, *flags, "--steps", "1", "--restore-checkpoint", "8")
    assert again["restored_from"] == f"{model_dir}/model.ckpt-8"


@pytest.mark.parametrize("launch", [[], ["--launch", "local", "--num-ps", "1"]])
def test_going_back_to_what_is_not_there_is_an_error_that_says_what_is(
    trained: str, capsys: pytest.CaptureFixture[str], launch: list[str]
) -> None:
    Path(trained, "model.ckpt-4.manifest").write_bytes(b"nonsense\n")
    before = names_in(trained)
    for name, says in (
        ("model.ckpt-5", "no checkpoint model.ckpt-5 in {0}; it has model.ckpt-4 (damaged), model.ckpt-8"),
        ("4", "model.ckpt-4 of {0} is damaged"),
    ):
        assert train("--model-dir", trained, "--steps", "1", "--restore-checkpoint", name, *launch) == 2
        assert says.format(trained) in capsys.readouterr().err
    assert names_in(trained) == before


def names_in(model_dir: str) -> list[str]:
    """Return what is in a model_dir, but for how its processes stand."""
    return sorted(path.name for path in Path(model_dir).iterdir() if path.name != "status")


def test_a_restore_setting_that_is_not_watched_ignores_a_missing_checkpoint(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train.restore]\ncheckpoint = "model.ckpt-5"\n')
    found = train_json(capsys, "--model-dir", trained, "--steps", "1", "--config", str(file))
    assert found["restored_from"] == f"{trained}/model.ckpt-8"
    assert "model.ckpt-5 does not exist" in caplog.text


# Flags and files


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsteps = 5\nseed = 3\nmax_time = "1h"\nsummary_every_steps = "none"\n'
        "[train.save]\nsteps = 7\nretry_secs = 9\n[train.keep]\nmax_to_keep = 2\n"
        '[train.restore]\nclear_nn = true\n[train.alert]\naction = "stop"\n'
    )
    config = load_training(options(config=file)).config
    assert (config.steps, config.seed, config.save.steps, config.keep.max_to_keep) == (5, 3, 7, 2)
    assert config.max_time is not None
    assert config.max_time.total_seconds() == 3600
    assert config.restore.reset_dense
    assert config.alert is not None
    assert config.alert.action == "stop"
    config = load_training(
        options(
            config=file,
            model_dir="m",
            steps=8,
            max_steps=9,
            max_time="90m",
            seed=4,
            save_secs=60,
            max_to_keep=0,
            full_every=3,
            restore_dir="d",
            restore_checkpoint="model.ckpt-3",
            optimizer_state="auto",
            no_strict=True,
            continue_training=True,
            prefetch=0,
            no_async_push=True,
            evict_every_steps=11,
            summaries=True,
        )
    ).config
    assert (config.model_dir, config.steps, config.max_steps, config.seed) == ("m", 8, 9, 4)
    assert config.max_time is not None
    assert config.max_time.total_seconds() == 5400
    assert (config.save.secs, config.save.steps, config.save.retry_secs) == (60, None, 9)
    assert config.save.asynchronous
    assert (config.keep.max_to_keep, config.keep.full_every) == (0, 3)
    assert (config.restore.dir, config.restore.checkpoint) == ("d", "model.ckpt-3")
    assert (config.restore.optimizer_state, config.restore.strict) == ("auto", False)
    assert (config.restore.reset_dense, config.restore.continue_training) == (True, True)
    assert (config.prefetch, config.async_push, config.evict_every_steps) == (0, False, 11)
    assert config.summary_every_steps == 100
    assert type(config) is TrainConfig
    assert load_training(options(deterministic=True, no_summaries=True)).config == TrainConfig(
        deterministic=True, summary_every_steps=None
    )


def test_a_file_that_saves_by_the_clock_does_not_save_by_the_step(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train.save]\nsecs = 60\n")
    config = load_training(options(config=file)).config
    assert (config.save.secs, config.save.steps, config.save.asynchronous) == (60, None, True)


def test_a_key_that_is_not_known_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nstepz = 5\n[train.save]\nstep = 7\n[task]\nbatchs = 3\n")
    assert train("--config", str(file)) == 2
    said = capsys.readouterr().err
    assert f"unknown key train.stepz (from {file}); the nearest known key is train.steps" in said
    assert "unknown key train.save.step " in said
    assert "the nearest known key is train.save.steps" in said
    file.write_text("[task]\nbatchs = 3\n")
    assert train("--config", str(file)) == 2
    said = capsys.readouterr().err
    assert f"unknown key batchs (from [task] of {file}); the nearest known key is batches" in said


def test_a_setting_of_the_run_that_is_given_as_one_of_the_task_is_shown_as_a_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("--set", "train.save.steps=7") == 2
    said = capsys.readouterr().err
    assert "settings of the run are flags: --train.save.steps 7" in " ".join(said.split())
    assert train("--set", "batchs=7") == 2
    assert "flags" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--stepz", "3"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--steps", "-1"], "steps must be above 0"),
        (["--max-time", "soon"], "--max-time: 'soon' is not a duration"),
        (["--save-steps", "3", "--save-secs", "3"], "--save-steps and --save-secs contradict"),
        (["--deterministic", "--save-secs", "3"], "saves by steps, not by seconds"),
        (["--summaries"], "--summaries and --no-summaries contradict"),
        (["--threads", "0"], "threads.intra_op (from the command line): must be at least 1"),
        (["--set", "dim"], "written key=value"),
        (["--config", "nowhere.toml"], "cannot read config nowhere.toml"),
        (["--profile"], "--profile needs --model-dir"),
        (["--control"], "--control needs --model-dir"),
        (["--metrics-port", "70000"], "cannot serve metrics"),
        (["--optimizer-state", "lose"], "--optimizer-state"),
    ],
)
def test_what_cannot_be_done_is_said_and_exits_with_2(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*flags) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "evaluate", "predict"])
def test_a_task_that_is_not_there_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([name, "train.tasks:Click", "--model-dir", "m", *(["--to", "x.csv"] * (name == "predict"))]) == 2
    )
    assert capsys.readouterr().err == "monolith: train.tasks has no 'Click'; did you mean 'Clicks'?\n"


def test_threads_of_torch_can_be_chosen() -> None:
    before = torch.get_num_threads()
    try:
        assert train("--steps", "1", "--threads", "1") == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# While it runs


def test_a_log_reports_progress_now_and_then_and_quiet_reports_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 5\nreport_every = 0\n")
    assert train("--config", str(file)) == 0
    assert "step 4/5 (80%): speed" in capsys.readouterr().err
    assert train("--config", str(file), "--json-logs") == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["step"] for line in lines if "examples_per_s" in line] == [1, 2, 3, 4, 5]
    assert train("--config", str(file), "--quiet") == 0
    assert "speed" not in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_sees_it_drawn_unless_logs_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    observe.configure_logging("info", stream=stream)
    monkeypatch.setattr(sys, "stderr", stream)
    view = command.live_line(Clicks(), RunConfig())
    with view.opened:
        LiveLineHook(view.show, LiveValues(stats=dict), every=view.every)._tell(3, 1e9)
    assert view.every == command.DRAW_EVERY
    assert "Training clicks" in stream.getvalue()
    observe.configure_logging("info", json=True, stream=stream)
    view = command.live_line(Clicks(), RunConfig())
    assert (view.show, view.every) == (log_status, TrainConfig().report_every)


@pytest.mark.parametrize(
    ("limits", "window"),
    [
        ({}, (500, 510)),
        ({"steps": 100}, (45, 55)),
        ({"max_steps": 4}, (0, 10)),
        ({"steps": 9000}, (500, 510)),
    ],
)
def test_a_short_run_is_profiled_too(limits: dict[str, int], window: tuple[int, int]) -> None:
    assert process.profiled_steps(TrainConfig(**limits)) == window


def test_a_profile_and_summaries_are_left_in_the_model_dir(model_dir: str) -> None:
    assert main(["train", TASK, "--steps", "14", "--model-dir", model_dir, "--profile"]) == 0
    assert [path.name for path in (Path(model_dir) / "profile").iterdir()] == ["steps_2_12.json"]
    assert list((Path(model_dir) / "summaries").iterdir())


class Watch(Hook):
    """Looks at a run from outside, once, in the middle of it."""

    def __init__(self, look: Any) -> None:
        self.look = look
        self.found: Any = None

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if result.step == 5:
            self.found = self.look(run)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(look: Any) -> Watch:
        watch = Watch(look)
        monkeypatch.setattr(Clicks, "hooks", lambda _, mode: [watch])  # noqa: ARG005
        return watch

    return use


def test_metrics_are_served_while_it_trains(
    watch: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GAUGE_EVERY", process.GAUGE_EVERY * 0)

    def look(_: TrainingRun) -> str:
        said = re.search(r"metrics on (http://\S+)", capsys.readouterr().err)
        assert said is not None
        with urllib.request.urlopen(said[1]) as answer:
            return str(answer.read().decode())

    found = watch(look)
    assert train("--metrics-port", "0") == 0
    assert "monolith_train_step 5.0" in found.found


def test_control_says_where_it_listens_and_obeys(
    model_dir: str, watch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(_: TrainingRun) -> tuple[str, int]:
        with ControlClient(model_dir) as job:
            return job.address, job.global_step()

    found = watch(look)
    assert train("--model-dir", model_dir, "--control") == 0
    address, step = found.found
    assert step == 5
    assert f"control on {address}, and by the file {model_dir}/monolith_action" in capsys.readouterr().err


# Signals and locks


def start(*flags: str) -> warm.Popen:
    return warm.Popen(
        ["-m", "monolith", "train", TASK, "--set", "batches=10000000", "--json", *flags],
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )


def wait_for(path: Path, process: warm.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_saved_and_it_resumes_from_there(
    model_dir: str, capsys: pytest.CaptureFixture[str], number: signal.Signals, status: int
) -> None:
    process = start("--model-dir", model_dir, "--save-steps", "20", "--no-summaries")
    try:
        wait_for(Path(model_dir, "model.ckpt-20.manifest"), process)
        assert train("--model-dir", model_dir, "--steps", "1") == 2  # two processes in one model_dir
        said = capsys.readouterr().err
        assert f"process {process.pid} on" in said
        assert "Choose another model_dir" in said
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, err
    assert f"{number.name}: stopping after this step; " in err
    assert "again to abort" in err
    report = json.loads(out)
    state = read_checkpoint_state(model_dir)
    assert state is not None
    assert report["stop_reason"] == number.name
    assert report["checkpoint"] == state.model_checkpoint_path == f"{model_dir}/model.ckpt-{report['step']}"
    again = train_json(capsys, "--model-dir", model_dir, "--set", "batches=10000000", "--steps", "3")
    assert again["restored_from"] == report["checkpoint"]
    assert again["step"] == report["step"] + 3


# Evaluate


@pytest.fixture
def trained(model_dir: str, capsys: pytest.CaptureFixture[str]) -> str:
    flags = ["--model-dir", model_dir, "--steps", "8", "--save-steps", "4", "--quiet"]
    assert train(*flags) == 0
    capsys.readouterr()
    return model_dir


def evaluate_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["evaluate", TASK, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_metrics_of_the_newest_checkpoint_are_a_table(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", TASK, "--model-dir", trained]) == 0
    printed = capsys.readouterr().out
    assert "model.ckpt-8, step 8" in printed
    assert re.search(r"click/auc +0\.\d{6}", printed)
    assert "over 1,000 examples" in printed


def test_metrics_of_any_checkpoint_are_printed_as_json_while_a_training_runs(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ModelDirLock(trained):
        newest = evaluate_json(capsys, "--model-dir", trained)
    assert (newest["task"], newest["step"], newest["examples"]) == ("clicks", 8, 1000)
    assert newest["checkpoint"] == f"{trained}/model.ckpt-8"
    older = evaluate_json(capsys, "--model-dir", trained, "--checkpoint", "model.ckpt-4", "--steps", "2")
    assert (older["step"], older["examples"]) == (4, 128)
    assert older["metrics"]["click/log_loss"] != newest["metrics"]["click/log_loss"]


@pytest.mark.parametrize("name", ["model.ckpt-4", "4", "{trained}/model.ckpt-4"])
def test_a_checkpoint_that_is_not_listed_is_measured_too(
    trained: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    Path(trained, "checkpoint").unlink()
    flags = ["--model-dir", trained, "--steps", "1", "--checkpoint", name.format(trained=trained)]
    assert evaluate_json(capsys, *flags)["checkpoint"] == f"{trained}/model.ckpt-4"


def test_the_checkpoint_a_training_began_with_is_not_what_is_evaluated(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[train]\nmodel_dir = "{trained}"\n[train.restore]\ncheckpoint = "model.ckpt-4"\n')
    assert evaluate_json(capsys, "--config", str(file))["step"] == 8


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "needs --model-dir"),
        (["--model-dir", "{empty}"], "no checkpoint in {empty}; train first"),
        (["--model-dir", "{trained}", "--checkpoint", "model.ckpt-5"], "it has model.ckpt-4, model.ckpt-8"),
        (["--model-dir", "{empty}", "--checkpoint", "model.ckpt-5"], "it has none"),
        (["--model-dir", "{trained}", "--steps", "0"], "--steps must be at least 1"),
    ],
)
def test_without_its_checkpoint_nothing_is_read(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    places = {"empty": str(tmp_path / "empty"), "trained": trained}
    given = [flag.format(**places) for flag in flags]
    for name, more in (("evaluate", []), ("predict", ["--to", str(tmp_path / "p.csv")])):
        assert main([name, TASK, *given, *more]) == 2
        assert says.format(**places) in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()
    assert not (tmp_path / "empty").exists()


# Predict


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv", "jsonl", "tfrecord", "tfrecord.gz"])
def test_predictions_are_written_in_each_format(
    trained: str, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / f"p.{suffix}")
    flags = ["--model-dir", trained, "--to", path, "--columns", "user"]
    assert main(["predict", TASK, *flags]) == 0
    assert (
        f"1,000 predictions of {trained}/model.ckpt-8, step 8 (the latest), in {path}"
        in capsys.readouterr().err
    )
    chunks = list(format_of(path).chunks(path))
    assert {name for chunk in chunks for name in chunk.records.columns} == {
        "prediction.click",
        "label.click",
        "user",
    }
    said = [row for chunk in chunks for row in chunk.records["prediction.click"].to_list()]
    assert len(said) == 1000
    assert all(len(row) == 1 and 0 < row[0] < 1 for row in said)
    labels = {tuple(row) for chunk in chunks for row in chunk.records["label.click"].to_list()}
    assert labels == {(0,), (1,)}


def test_a_few_batches_can_be_predicted_and_told_as_json(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p"
    flags = ["--model-dir", trained, "--steps", "2", "--checkpoint", "model.ckpt-4", "--json"]
    assert main(["predict", TASK, "--to", str(path), "--to-format", "csv", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["examples"], found["file"]) == (4, 128, str(path))
    assert path.read_text().splitlines()[0] == "prediction.click,label.click"
    assert len(path.read_text().splitlines()) == 129


def test_parquet_has_plain_numbers(trained: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "p.parquet")
    assert main(["predict", TASK, "--model-dir", trained, "--to", path, "--quiet"]) == 0
    assert [str(field.type) for field in parquet.read_schema(path)] == ["float", "float"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "needs --to"),
        (["--to", "p.xyz"], "its name does not tell its format"),
        (["--to", "{}/p.csv", "--columns", "usr"], "no column 'usr' to pass through; it has"),
        (["--to", "{}/p.csv", "--columns", "usr"], "Did you mean 'user'?"),
        (["--to", "{}/p.csv", "--columns", "user,prediction.click"], "no column 'prediction.click'"),
    ],
)
def test_predictions_that_cannot_be_written_leave_no_file(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    given = [flag.format(tmp_path) for flag in flags]
    assert main(["predict", TASK, "--model-dir", trained, *given]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()


def test_a_task_without_data_to_predict_is_told(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Clicks.dataset

    class Empty:
        def __init__(self, data: Any) -> None:
            self.close = data.close

        def __iter__(self) -> Any:
            return iter(())

    monkeypatch.setattr(Clicks, "dataset", lambda self, mode: Empty(whole(self, mode)))
    path = tmp_path / "p.csv"
    assert main(["predict", TASK, "--model-dir", trained, "--to", str(path)]) == 2
    assert "dataset(Mode.PREDICT) of task 'clicks' has no examples" in capsys.readouterr().err
    assert not path.exists()


def test_line_ids_are_written_and_labels_that_are_missing_are_not() -> None:
    ids = FeatureIds.pack(
        {
            "line_id.item_id": torch.tensor([[7], [8]]),
            "line_id.uid": torch.tensor([[5]]),
            "item": torch.ones(2, 1).long(),
        },
        shared=["line_id.uid"],
    )
    batch = Batch(ids, labels={"click": torch.tensor([1.0, float("nan")])})
    records = to_records(
        batch, {"click": torch.tensor([0.25, 0.5]), "prediction": torch.tensor([1.0, 2.0])}, ()
    )
    assert {name: records[name].to_list() for name in records.columns} == {
        "prediction.click": [[0.25], [0.5]],
        "prediction": [[1.0], [2.0]],
        "label.click": [[1.0], []],
        "line_id.item_id": [[7], [8]],
        "line_id.uid": [[5], [5]],
    }
    assert one_each(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).to_list() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_config_file_is_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"ends in \.toml"):
        load_training(options(config=file))


# Publishing


def test_what_a_run_publishes_is_read_from_where_its_config_says(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "log")
    flags = ["--model-dir", model_dir, "--publish.to", folder, "--publish.interval", "20ms", "--steps", "6"]
    said = train_json(capsys, *flags)
    following = Following(Clicks())
    with closing(open_reader(folder)) as reader:
        (log,) = reader.logs()
    assert log.run == run_identity(model_dir)
    places = {0: LogPosition(log.newest.epoch, 0)}
    with closing(Subscriber(lambda: open_reader(folder), following.target, positions=places)) as subscriber:
        subscriber.catch_up()
        assert subscriber.progress[0].learned.step == said["step"] == 6
    saved = read_model(Clicks(), Path(model_dir))
    assert following.values == {
        name: {key: tuple(value) for key, (_, value, _) in rows.items()} for name, rows in saved.rows.items()
    }


class HoldAtThree(Hook):
    """Holds publishing from outside, and keeps what the run says."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == 3:
            with ControlClient(run.model_dir) as job:
                (one,) = job.publish("hold", reason="by a test")
            Path(run.model_dir, "held.json").write_text(json.dumps([one.held, one.reason, one.by_guard]))


class HeldClicks(Clicks):
    def hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
        return [HoldAtThree()]


def test_a_run_that_publishes_can_be_paused_without_a_control_port(model_dir: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    flags = ["--model-dir", model_dir, "--publish.to", str(tmp_path / "log"), "--steps", "6"]
    assert train(*flags, task="cli.test_train:HeldClicks") == 0
    assert json.loads(Path(model_dir, "held.json").read_text()) == [True, "by a test", False]


class HeldAndKilled(Hook):
    """Holds publishing from outside, and is killed."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == 3:
            with ControlClient(run.model_dir) as job:
                (one,) = job.publish("hold", reason="a bad upstream")
            Path(run.model_dir, "held.json").write_text(json.dumps(one.since))
            os.kill(os.getpid(), signal.SIGKILL)


class KilledClicks(Clicks):
    def hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
        return [HeldAndKilled()]


class LooksOn(Hook):
    """Keeps what whoever looks on is told of publishing, and lets it go on in the end."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:  # noqa: ARG002
        if run.step == 3:
            assert main(["publish", "status", run.model_dir]) == 0
            page = RunPublishing(orders_of(run.model_dir, None)).figures()
            assert page is not None
            Path(run.model_dir, "page.json").write_text(json.dumps([page.held, page.reason, page.since]))
        if run.step == 5:
            with ControlClient(run.model_dir) as job:
                (before,), (after,) = job.publish("status"), job.publish("resume")
            Path(run.model_dir, "resumed.json").write_text(json.dumps([before.deltas, after.held]))


class WatchedClicks(Clicks):
    def hooks(self, mode: Mode) -> list[Hook]:  # noqa: ARG002
        return [LooksOn()]


def test_a_run_that_was_killed_while_paused_is_paused_from_its_next_start_on(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("grpc")
    log = str(tmp_path / "log")
    flags = ["--model-dir", model_dir, "--publish.to", log, "--publish.interval", "20ms", "--steps", "8"]
    killed = warm.run(
        ["-m", "monolith", "train", "cli.test_train:KilledClicks", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    assert killed.returncode == -signal.SIGKILL
    since = json.loads(Path(model_dir, "held.json").read_text())
    assert since > 0
    assert train(*flags, task="cli.test_train:WatchedClicks") == 0
    said = f"paused since {when_utc(since)}: a bad upstream"
    assert f"publishing of shard 0 of 1 is {said}" in caplog.text
    assert said in capsys.readouterr().out.replace("PAUSED", "paused"), "monolith publish status"
    assert json.loads(Path(model_dir, "page.json").read_text()) == [True, "a bad upstream", since]
    assert json.loads(Path(model_dir, "resumed.json").read_text()) == [0, False], "nothing was let out before"
    with closing(open_reader(log)) as reader:
        assert reader.logs()[0].newest.sequence > 0
    assert PauseFile(model_dir).read() is None, "who resumes means it for the next start as well"


@pytest.mark.parametrize(
    ("uncounted", "why", "said"),
    [
        ((), "", "4 rows and 3 updates gone"),
        (
            (1,),
            "worker 1 was lost as well",
            "4 rows and 3 updates gone, and those of workers 1, which could not be counted: worker 1 was "
            "lost as well",
        ),
    ],
)
def test_a_report_names_the_workers_whose_lost_updates_are_not_counted(
    uncounted: tuple[int, ...], why: str, said: str
) -> None:
    lost = LostServer(
        server=0,
        rows=4,
        updates=3,
        seconds=2.0,
        restored_from="m/model.ckpt-6",
        uncounted=uncounted,
        uncounted_why=why,
    )
    for report in (asdict(lost), json.loads(json.dumps(asdict(lost)))):  # of this process, and of another
        assert _describe_lost("server", report) == f"server 0 for 2.0 s, {said}"
