"""One run, one vocabulary: every field acts, sources share names, `check` refuses what `train` refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.trainings import load_training
from services import warm

import monolith
from monolith.cli.main import main
from monolith.cli.options.train import EvaluateOptions, TrainOptions
from monolith.cli.task_config import load_reading
from monolith.cli.train import SHORT_FLAGS, SWITCHES, run_of
from monolith.config.fields import leaf_paths
from monolith.data import DataConfig, KafkaConfig
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_help import KINDS
from monolith.runtime.config_loading import read_run
from monolith.runtime.launch import MARK
from monolith.train import DailyHours, ExpiryConfig, KeepConfig, SaveConfig, TrainConfig

TASK = "train.tasks:Clicks"
SOURCE = Path(monolith.__file__).parent


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "run.toml") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


def trained(
    file: Path | None = None, *flags: str, environ: dict[str, str] | None = None, **given: Any
) -> TrainConfig:
    options = TrainOptions(**{"task": TASK, "config": file, "run_flags": flags, **given})
    return load_training(options, environ or {}).config


def problems(file: Path | None = None, *flags: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        trained(file, *flags, environ=environ)
    return str(raised.value)


# Every field


READ_BY: Mapping[str, tuple[str, ...]] = {
    "job": ("runtime/*.py",),
    "train": ("train/*.py", "train/*/*.py", "runtime/*.py", "cli/train.py"),
    "train.restore": ("train/*.py", "train/*/*.py", "runtime/*.py", "checkpoint/*.py", "checkpoint/*/*.py"),
    "task": ("runtime/task_setup.py",),
    "data": ("data/config.py", "data/splitting.py", "runtime/config_task.py"),
    **dict.fromkeys(("data.kafka", "data.kafka.assignment"), ("data/kafka/*.py",)),
    "features": ("runtime/config.py",),
    "labels": ("runtime/config.py",),
    "examples": ("feature/spec/*.py", "data/batches.py"),
    "model": ("runtime/config.py",),
    "candidates": ("runtime/config_task.py",),
    "serve": ("serve/*.py", "serve/*/*.py", "cli/serve*.py"),
    "export": ("runtime/export.py", "cli/export.py"),
    "kafka": ("data/kafka/*.py",),
    "data_service": ("data/config.py", "runtime/*.py"),
    "admission": ("store/local.py",),
    "cluster": ("runtime/*.py",),
    "dense": ("store/dense_config.py", "store/dense_cache.py"),
    "ranks": ("runtime/rank_placement.py", "runtime/attempts.py"),
    "discovery": ("runtime/discovery.py", "../monolith_compat/tf_config.py"),
    "security": ("cluster/security.py", "cluster/run_token.py"),
    "limits": ("wire/*.py", "store/*.py", "train/*/*.py", "runtime/*.py"),
    "failover": ("runtime/*.py",),
    "timeouts": ("runtime/*.py",),
    "threads": ("runtime/task_setup.py",),
    "metrics": ("runtime/*.py",),
    "profile": ("runtime/process.py",),
    "publish": ("sync/*.py", "runtime/*.py"),
}
"""Group -> the modules that obey its fields."""

DECLARED = {SOURCE / "train" / "config.py", SOURCE / "runtime" / "cluster_config.py"}
"""Files whose configs name their own fields, in checks and properties."""


def test_every_field_is_read_by_the_code_that_obeys_it() -> None:
    unread = []
    for path in leaf_paths(RunConfig):
        group = next(name for name in (path.rpartition(".")[0], path.partition(".")[0]) if name in READ_BY)
        files = [file for pattern in READ_BY[group] for file in SOURCE.glob(pattern)]
        leaf = path.rpartition(".")[2]
        code = "".join(file.read_text() for file in files if file not in DECLARED)
        if not re.search(rf"\.{leaf}\b", code):
            unread.append(path)
    assert unread == []


def test_every_short_flag_is_a_name_of_a_field() -> None:
    known = set(leaf_paths(RunConfig))
    assert set(SHORT_FLAGS.values()) | {path for path, _ in SWITCHES.values()} <= known


def test_a_run_contains_its_training(write: Any) -> None:
    file = write(
        """
        [train]
        model_dir = "m"
        prefetch = 3
        async_push = false
        summary_every_steps = 9
        [train.save]
        secs = 600
        [train.dense_save]
        steps = 7
        [train.keep]
        max_to_keep = 4
        evict = true
        [train.expiry]
        max_fraction = 0.5
        max_ahead = "2h"
        [train.restore]
        dir = "old"
        checkpoint = "model.ckpt-3"
        alias_map = { "b.weight" = "a.weight" }
        [train.alert]
        action = "stop"
        """
    )
    config = trained(file)
    assert (config.model_dir, config.prefetch, config.async_push) == ("m", 3, False)
    assert config.save == SaveConfig(secs=600, steps=None, asynchronous=True)
    assert config.dense_save == SaveConfig(steps=7)
    assert config.keep == KeepConfig(max_to_keep=4, evict=True)
    assert config.expiry == ExpiryConfig(max_fraction=0.5, max_ahead=timedelta(hours=2))
    assert (config.restore.dir, config.restore.checkpoint) == ("old", "model.ckpt-3")
    assert config.restore.alias_map == {"b.weight": "a.weight"}
    assert config.summary_every_steps == 9
    assert config.alert is not None
    assert config.alert.action == "stop"


def test_unset_settings_are_those_of_a_training() -> None:
    assert trained() == TrainConfig()


def test_a_daily_window_with_an_interval_outside_of_it_does_not_end_the_run() -> None:
    window = ["--train.hours.start-hour", "1", "--train.hours.start-minute", "2"]
    window += ["--tide_end_hour", "3", "--tide_end_minute", "4"]
    assert trained(None, *window).hours == DailyHours(1, 2, 3, 4)
    config = trained(None, *window, "--train.save.secs-outside-hours", "60")
    assert (config.hours, config.save.hours) == (None, DailyHours(1, 2, 3, 4))
    assert config.save.secs_outside_hours == 60


def test_threads_are_left_alone_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    trained()
    assert asked == []
    trained(None, "--threads.intra-op", "3")
    trained(None, "--intra_op_parallelism_threads", "3", threads=2)
    assert asked == [3, 2]


# Sources


def test_short_flags_win_over_flags_over_the_environment_over_the_file(write: Any) -> None:
    file = write("[train.keep]\nmax_to_keep = 2\n")
    environ = {"MONOLITH_TRAIN__KEEP__MAX_TO_KEEP": "3"}
    old = {"MONOLITH_CHECKPOINTS_MAX_TO_KEEP": "4"}
    flags = ["--train.keep.max-to-keep", "5"]
    found = [
        trained(file),
        trained(file, environ=environ),
        trained(file, environ=old),
        trained(file, *flags, environ=environ),
        trained(file, *flags, environ=environ, max_to_keep=6),
    ]
    assert [config.keep.max_to_keep for config in found] == [2, 3, 4, 5, 6]


def test_a_json_file_has_the_same_tables(write: Any) -> None:
    assert trained(write('{"train": {"keep": {"max_to_keep": 3}}}', "run.json")).keep.max_to_keep == 3


def test_tf_config_names_the_role_of_this_process_and_the_discovery() -> None:
    cluster = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1"]}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}})}
    run = read_run(None, environ, code={"train.model_dir": "m"})
    assert run.discovery.kind == "tf_config"
    assert (run.cluster.role, run.cluster.index) == ("ps", 1)
    assert (run.cluster.num_ps, run.cluster.num_workers) == (2, 2)


# The task


def test_settings_of_the_task_come_from_its_table_its_old_name_and_set(write: Any) -> None:
    file = write(f'[job]\ntask = "{TASK}"\n[task]\nbatches = 5\ndim = 3\n')
    options = TrainOptions(config=file, run_flags=('--params_override={"dim": 2}',), set=("batch_size=8",))
    task: Any = load_training(options, {}).task
    assert (task.dim, task.batches, task.batch_size) == (2, 5, 8)


def test_the_task_is_named_by_the_command_or_by_the_job(write: Any) -> None:
    file = write(f'[job]\ntask = "{TASK}"\n')
    assert load_training(TrainOptions(config=file), {}).task.name == "clicks"
    assert load_training(TrainOptions(), {"MONOLITH_TASK": TASK}).task.name == "clicks"
    assert load_training(TrainOptions(run_flags=("--task", TASK)), {}).task.name == "clicks"
    file = write(f'task = "{TASK}"\nnum_ps = 0\n')
    assert load_training(TrainOptions(config=file), {}).task.name == "clicks"
    with pytest.raises(ConfigError, match=r"name the task: .* or job\.task in the config"):
        load_training(TrainOptions(), {})


def test_the_old_flag_of_the_task_is_one_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", TASK, "--steps", "1", "--no-summaries", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_parameters_by_dotted_names_lead_into_nested_settings(tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(
        "from dataclasses import dataclass\nfrom train.tasks import Clicks\n"
        "@dataclass(frozen=True)\nclass Rate:\n    start: float = 1.0\n    end: float = 2.0\n"
        "@dataclass(frozen=True)\nclass Mine(Clicks):\n    rate: Rate = Rate()\n"
    )
    environ = {"MONOLITH_PARAMS_OVERRIDE": '{"rate.start": 3.0, "rate.end": 4.0}'}
    task: Any = load_training(TrainOptions(task=f"{tmp_path}/nested.py:Mine"), environ).task
    assert (task.rate.start, task.rate.end) == (3.0, 4.0)


# What a run says of the task's data


READS = """
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from monolith.data import BatchSpec, DataConfig, DataServiceConfig, KafkaConfig, KafkaSource, Pipeline
from monolith.model import DeepFM, Feature
from monolith.table import AdmissionConfig
from monolith.train import Task


@dataclass(frozen=True)
class Files(Task):
    data: DataConfig = DataConfig(path="nowhere.jsonl")
    admission: AdmissionConfig = AdmissionConfig()

    def dataset(self, mode):
        spec = BatchSpec(ids=("item",), labels={"click": ("click", 0)}, event_time=None)
        return Pipeline(self.data.source(batch_size=2)).to_batches(spec)

    def model(self):
        item = Feature(name="item", occurrence_threshold=1, admission=self.admission)
        return DeepFM([item], dim=2, hidden=(2,))


@dataclass(frozen=True)
class Live(Files):
    stream: KafkaConfig | None = None
    service: DataServiceConfig = field(default_factory=DataServiceConfig)

    def source(self):
        return KafkaSource(self.stream, decode=None)
"""

KAFKA = ("--kafka_topics", "a,b", "--kafka_servers", "h:1", "--kafka_group_id", "g")


@pytest.fixture
def reads(tmp_path: Path) -> str:
    (tmp_path / "reads.py").write_text(READS)
    return f"{tmp_path}/reads.py"


def test_old_names_of_kafka_reach_the_source_of_a_task(reads: str) -> None:
    options = TrainOptions(
        task=f"{reads}:Live", run_flags=(*KAFKA, "--use_dataservice", "--data_service_dispatcher=h:2")
    )
    task: Any = load_training(options, {"MONOLITH_KAFKA__POLL_BATCH": "16"}).task
    assert task.stream == KafkaConfig(servers=("h:1",), topics=("a", "b"), group="g", poll_batch=16)
    assert task.source().config is task.stream
    assert task.service.enabled
    assert task.data == DataConfig(path="nowhere.jsonl")  # nobody said anything of it


def test_what_the_table_of_the_task_says_wins(reads: str, write: Any) -> None:
    file = write('[kafka]\ntopics = ["a"]\nservers = ["h:1"]\ngroup = "g"\n[task.stream]\ngroup = "mine"\n')
    options = TrainOptions(task=f"{reads}:Live", config=file, set=("stream.poll_batch=3",))
    task: Any = load_training(options, {}).task
    assert (task.stream.topics, task.stream.group, task.stream.poll_batch) == (("a",), "mine", 3)


def test_old_names_of_files_and_filters_are_what_a_task_trains_on(
    reads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("20240131", "20240201", "20240202"):
        (tmp_path / "logs" / day).mkdir(parents=True)
        lines = [
            json.dumps({"item": [number % 3], "click": [float(number % 2)], "more": [1]})
            for number in range(4)
        ]
        (tmp_path / "logs" / day / "part.jsonl").write_text("\n".join(lines) + "\n")
    words = ["train", f"{reads}:Files", "--json", "--quiet", "--input_path", f"{tmp_path}/logs"]
    words += ["--wildcard", "*.jsonl", "--start_date", "20240131", "--end_date", "20240202"]
    words += ["--feature_list", "item,click", "--filter_type", "probabilistic_filter"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 8  # of the first two days
    task: Any = load_training(TrainOptions(task=words[1], run_flags=tuple(words[4:])), {}).task
    assert task.data.columns == ("item", "click")
    store = task.model().embeddings.store
    assert type(next(iter(store.filters.values()))).__name__ == "ProbabilisticFilter"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (KAFKA, "the run has a group kafka, but the task has no setting of type KafkaConfig; declare one"),
        (["--input_path", "x"], "the run has a group data, but the task has no setting of type DataConfig"),
        (["--filter_capacity", "500"], "such as `admission: AdmissionConfig | None = None`"),
    ],
)
def test_a_group_that_the_task_has_no_setting_for_is_an_error(flags: tuple[str, ...], says: str) -> None:
    assert says in problems(None, *flags)


def test_a_task_that_reads_no_files_cannot_be_read_by_a_data_service(capsys: Any) -> None:
    assert main(["train", TASK, "--use_dataservice", "--data_service_dispatcher=127.0.0.1:1"]) == 2
    assert "cannot be read by a data service: its dataset() makes nothing" in capsys.readouterr().err


def test_evaluating_hands_over_the_same_groups(
    reads: str, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    file = write('[train]\nmodel_dir = "m"\n[data]\npath = "x.jsonl"\n')
    task, _ = load_reading(EvaluateOptions(task=f"{reads}:Files", config=file))
    assert getattr(task, "data", None) == DataConfig(path="x.jsonl")


# What is refused


def test_all_problems_are_listed_at_once(write: Any) -> None:
    file = write(
        "enable_realtime_training = true\nbase_name = 'x'\n[cluster]\nnum_ps = 1\n"
        '[train]\nmodel_dir = "m"\nseeed = 3\n[checkpoint]\nkeep = "ten"\n[clustr]\nx = 1\n'
    )
    said = problems(file)
    assert "5 problems" in said
    for text in (
        "base_name (from ",
        "enable_realtime_training (from ",
        f"unknown key train.seeed (from {file}); the nearest known key is train.seed",
        "checkpoint.keep is train.keep.max_to_keep",
        "unknown key clustr",
    ):
        assert text in said


RANKS = ["--cluster.mode", "sync", "--cluster.num-workers", "2", "--model_dir", "m"]
SERVED_RANKS = ["--cluster.mode", "sync", "--cluster.num-ps", "1", "--model_dir", "m"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([*SERVED_RANKS, "--cluster.num-redundant-ps", "1"], "and take no spare"),
        ([*SERVED_RANKS, "--cluster.max-workers", "3"], "so none can come later"),
        (
            [*SERVED_RANKS, "--failover.recovery", "keep_going"],
            "ranks continue from the same step or not at all",
        ),
        ([*SERVED_RANKS, "--dense.prefetch"], "nothing is fetched or pushed. Leave dense out"),
        ([*RANKS, "--cluster.max-workers", "3"], "so none can come later"),
        ([*RANKS, "--failover.recovery", "keep_going"], "ranks continue from the same step or not at all"),
        ([*RANKS, "--dense.max-staleness", "2"], "nothing is fetched or pushed. Leave dense out"),
        ([*SERVED_RANKS, "--discovery.kind", "mpi"], "name a registry that both reach"),
        (["--base_name", "feed"], "nothing is sent to servers by name"),
        (["--mode", "eval"], "job.command: 'eval' is not training; use `monolith evaluate`"),
        (["--cluster.num-workers", "2", "--model_dir", "m"], "set cluster.num_ps (--num-ps)"),
        (["--cluster.num-workers", "2"], "set --model-dir"),
        (["--cluster.num-ps", "1", "--model_dir", "m", "--only_feature_engineering"], "set job.local"),
        (["--only_feature_engineering"], "job.dump_features: features are written to the model_dir"),
        (["--cluster.listen", "0.0.0.0"], "cannot to 0.0.0.0; name one address"),
        (["--cluster.port", "70000"], "must be from 0 to 65535"),
        (["--profile.from-step", "3"], "profile.from_step: a profile is a file in the model_dir"),
        (["--train.save.secs-outside-hours", "60"], "it applies outside of a daily window"),
        (["--train.restore.continue-training"], "continue_training says what reset_dense does"),
        (["--metrics.port", "0", "--metrics.host", "0.0.0.0"], "metrics.host: cannot listen on 0.0.0.0"),
        (["--train.max-steps", "-1"], "max_steps must be above 0"),
        (["--train.tracking.tensorboard-dir", "t"], "only a run with a model_dir is tracked"),
    ],
)
def test_what_cannot_be_done_is_refused_by_train_and_by_config_check(
    flags: list[str], says: str, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in problems(None, *flags)
    file = write(json.dumps(as_tables(flags)), "run.json")
    assert says in problems(file)
    assert main(["config", "check", str(file)]) == 1
    assert says in capsys.readouterr().out


def as_tables(flags: list[str]) -> dict[str, Any]:
    """Return what flags say as a file has it."""
    tables: dict[str, Any] = {}
    for place, word in enumerate(flags):
        if not word.startswith("--"):
            continue
        value = (
            flags[place + 1] if place + 1 < len(flags) and not flags[place + 1].startswith("--") else "true"
        )
        *above, last = word[2:].replace("-", "_").split(".")
        table = tables
        for key in above:
            table = table.setdefault(key, {})
        table[last] = True if value == "true" else int(value) if re.fullmatch(r"-?\d+", value) else value
    return tables


def test_what_is_asked_not_to_be_done_is_not_refused() -> None:
    flags = ["--enable_sync_training", "false", "--nopartial_recovery", "--num_redundant_ps=0"]
    assert trained(None, *flags) == TrainConfig()


def test_a_launched_process_does_not_repeat_what_its_launcher_has_said_of_flags(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = TrainOptions(run_flags=("--use_estimator",))
    run_of(options, {MARK: "of the launcher"})
    assert caplog.messages == []
    run_of(options, {})
    assert "use_estimator (from --use_estimator) is ignored" in caplog.text


def test_a_platforms_folder_for_summaries_does_not_stop_a_run() -> None:
    assert trained(environ={"TENSORBOARD_LOG_PATH": "/logs"}) == TrainConfig()


def test_a_variable_that_means_nothing_is_refused() -> None:
    assert "unknown environment variable MONOLITH_TRIAN__SEED" in problems(
        environ={"MONOLITH_TRIAN__SEED": "3"}
    )


# Whole commands


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_config_passes_its_check_and_trains(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    assert main(["config", "init", "--kind", kind, "--to", "run.toml"]) == 0
    assert main(["config", "check", "run.toml", "--no-data"]) == 0
    capsys.readouterr()
    words = ["train", TASK, "--config", "run.toml", "--json", "--quiet", "--set", "batches=4"]
    if kind == "ps":
        report = json.loads(warm.run(["-m", "monolith", *words, "--launch", "local"], check=True).stdout)
    else:
        assert main(words) == 0
        report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["model_dir"]) == (4, "runs/my_model")


def test_reading_takes_the_same_files(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    file = write(
        f'[job]\ntask = "{TASK}"\n[cluster]\nnum_ps = 2\nnum_workers = 3\n'
        '[discovery]\nkind = "files"\nfolder = "d"\n[task]\nbatches = 5\n[train]\nmodel_dir = "m"\nseed = 3\n'
    )
    task, config = load_reading(EvaluateOptions(config=file))
    assert getattr(task, "batches", None) == 5
    assert (config.model_dir, config.seed) == ("m", 3)
    _, config = load_reading(EvaluateOptions(config=file, model_dir="other"))
    assert config.model_dir == "other"


def test_a_task_is_trained_and_evaluated_by_one_file_alone(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        f'[job]\ntask = "{TASK}"\n[task]\nbatches = 4\n[train]\nmodel_dir = "{tmp_path}/m"\nmax_steps = 3\n'
    )
    assert main(["train", "--config", str(file), "--no-summaries"]) == 0
    assert f"monolith evaluate --model-dir {tmp_path}/m --config {file}" in capsys.readouterr().out
    assert main(["evaluate", "--config", str(file), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


def test_show_prints_the_whole_run_and_what_it_prints_reads_back(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("[train.save]\nsecs = 60\n[task]\nbatches = 5\n[data]\npath = 'x'\n")
    assert main(["config", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["train"]["save"]["secs"] == 60
    again = write(shown, "again.toml")
    assert read_run(again, {}) == read_run(file, {})


READING = [
    ["train", "--help"],
    ["config", "init", "--kind", "ps"],
    ["config", "explain", "all"],
    ["config", "check", "run.toml"],
    ["config", "show", "run.toml"],
]


def test_commands_that_read_a_run_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nseed = 3\n")
    program = (
        "import sys\nfrom monolith.cli.main import main\n"
        f"for words in {READING!r}:\n"
        "    assert main(words) == 0, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_parent_of_a_launch_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom monolith.cli import train\nfrom monolith.runtime import launch\n"
        "from monolith.cli.options.train import TrainOptions\n"
        "options = TrainOptions(task='t:T', launch='local', num_ps=1, model_dir='m')\n"
        "run = train.run_of(options, {}, {'discovery.kind': 'ray'})\n"
        "launch.check_launch(run, train.Launch(kind='ray'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_the_command_line_is_named_where_a_short_flag_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"threads\.intra_op \(from the command line\): must be at least 1"):
        run_of(TrainOptions(threads=0), {})


# Accelerators, and the modes of the original's runners


def test_modes_that_are_not_training_are_refused_with_what_to_use_instead() -> None:
    assert "use `monolith evaluate` or `monolith predict`" in problems(None, "--job.command", "eval")
    said = problems(None, "--mode=train_and_eval")
    assert "'train_and_eval' is not supported" in said
    assert "train.evaluate.every_steps" in said
    assert "`monolith evaluate --follow`" in said


def test_the_short_flag_for_a_mode_gives_the_same_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.tasks:Clicks", "--mode", "train_and_eval"]) == 2
    assert (
        "'train_and_eval' is not supported: `monolith train` evaluates while it trains"
        in capsys.readouterr().err
    )


def test_xla_is_refused_without_torch_xla_and_among_several_processes() -> None:
    assert "torch_xla is not installed" in problems(None, "--train.accelerator", "xla")
    flags = ["--train.accelerator=xla", "--num_ps=1", "--train.model_dir=m"]
    assert "not supported with parameter servers" in problems(None, *flags)


def test_rows_on_a_device_are_refused_where_parameter_servers_hold_them() -> None:
    flags = ["--train.accelerator=cuda", "--train.embedding_device=device", "--train.model_dir=m"]
    said = "train.embedding_device: 'device' is for runs of one process or of ranks"
    assert said in problems(None, *flags, "--num_ps=1")
    assert said not in problems(None, *flags, "--num_workers=2", "--cluster.mode=sync")
    open_flags = ["--train.accelerator=cuda", "--train.model_dir=m", "--num_ps=1"]
    assert said not in problems(None, *open_flags)
    assert said in problems(None, *open_flags, "--train.device_memory_bytes=1GB")


def test_a_test_on_a_cpu_is_one_process_whatever_else_is_asked_for() -> None:
    flags = ["--cpu_test=true", "--num_ps=2", "--num_workers=3", "--train.accelerator=cuda"]
    flags += ["--train.embedding_device=device"]
    training = load_training(TrainOptions(task=TASK, run_flags=tuple(flags), set=("batch_size=512",)), {})
    assert not training.run.distributed
    assert training.config.accelerator == "cpu"
    task: Any = training.task
    assert task.batch_size == 128
    assert "is not training" in problems(None, "--cpu_test=true", "--job.command=eval")


def test_a_test_on_a_cpu_trains_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-dir", str(tmp_path), "--cpu_test=true", "--set", "batches=4", "--json", "--quiet"]
    assert main(["train", TASK, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["examples"]) == (4, 256)
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("given", "window"), [("5000", 5000), ("1h", timedelta(hours=1)), ("90s", timedelta(seconds=90))]
)
def test_the_window_of_metrics_is_a_number_of_examples_or_a_time(given: str, window: int | timedelta) -> None:
    assert run_of(TrainOptions(task="a:B", metric_window=given), {}).train.metric_window == window


def test_a_window_of_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="--metric-window: neither a number of examples nor a time"):
        run_of(TrainOptions(task="a:B", metric_window="soon"), {})
