"""One config tree for every way to run: what each source may say, which wins, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from monolith.cli.main import main
from monolith.cli.options.train import EvaluateOptions, TrainOptions
from monolith.cli.run_fields import NOT_YET, OBEYED, SO_ANYWAY, TRAIN_FIELDS
from monolith.cli.run_settings import read_settings
from monolith.cli.task_config import TrainFile, load_reading, load_training
from monolith.cluster.run_config import RunConfig
from monolith.cluster.run_config.templates import template
from monolith.config import describe_fields
from monolith.config.hints import is_collection, is_mapping, members
from monolith.errors import ConfigError
from monolith.train import ExpiryConfig, KeepConfig, SaveConfig, TideWindow, TrainConfig

TASK = "train.tasks:Clicks"


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
    options = TrainOptions(task=TASK, config=file, run_flags=flags, **given)
    return load_training(options, environ or {}).config


def problems(file: Path | None = None, *flags: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        trained(file, *flags, environ=environ)
    return str(raised.value)


# Every field


def test_every_field_of_a_run_is_in_one_table() -> None:
    grouped = [
        f"{group}.{name}" for table in (OBEYED, SO_ANYWAY) for group, names in table.items() for name in names
    ]
    known = [*TRAIN_FIELDS, *NOT_YET, *grouped, "train"]
    assert sorted(known) == sorted(info.path for info in describe_fields(RunConfig))


def test_every_field_of_a_training_that_a_run_names_exists() -> None:
    known = {info.path for info in describe_fields(TrainConfig)}
    assert set(TRAIN_FIELDS.values()) <= known


def test_fields_go_over_to_the_training(write: Any) -> None:
    file = write(
        """
        [job]
        model_dir = "m"
        [embedding]
        prefetch = 3
        postpush = false
        [checkpoint]
        every = "10m"
        dense_every_steps = 7
        keep = 4
        evict_expired = true
        max_expired_share = 0.5
        max_clock_ahead = "2h"
        [restore]
        folder = "old"
        checkpoint = "model.ckpt-3"
        renamed = { "a.weight" = "b.weight" }
        guess_renamed = false
        [metrics]
        summary_every_steps = 9
        """
    )
    config = trained(file)
    assert (config.model_dir, config.prefetch, config.async_push) == ("m", 3, False)
    assert config.save == SaveConfig(secs=600, steps=None, asynchronous=True)
    assert config.dense_save == SaveConfig(steps=7)
    assert config.keep == KeepConfig(max_to_keep=4, evict=True)
    assert config.expiry == ExpiryConfig(max_share=0.5, max_ahead=timedelta(hours=2))
    assert (config.restore.dir, config.restore.checkpoint) == ("old", "model.ckpt-3")
    assert config.restore.alias_map == {"b.weight": "a.weight"}  # new name -> old
    assert (config.restore.auto_alias, config.summary_every_steps) == (False, 9)


def test_what_nobody_said_is_as_a_training_has_it() -> None:
    assert trained() == TrainConfig()


def test_what_was_said_counts_even_where_it_is_the_runs_default(write: Any) -> None:
    assert TrainConfig().prefetch == 1
    assert trained(write("[embedding]\nprefetch = 0\n")).prefetch == 0


@pytest.mark.parametrize("by", ["steps", "clock"])
def test_saving_by_the_step_and_by_the_clock_replace_each_other(write: Any, by: str) -> None:
    flags = ["--checkpoint.every-steps", "5"] if by == "steps" else ["--checkpoint.every", "5s"]
    other = "[save]\nsecs = 60\n" if by == "steps" else "[save]\nsteps = 60\n"
    save = trained(write(other), *flags).save
    assert (save.secs, save.steps) == ((None, 5) if by == "steps" else (5, None))


def test_a_tide_ends_the_run_unless_it_says_how_to_save_outside() -> None:
    window = ["--tide.start-hour", "1", "--tide.start-minute", "2", "--tide.end-hour", "3"]
    window += ["--tide.end-minute", "4"]
    assert trained(None, *window).tide == TideWindow(1, 2, 3, 4)
    config = trained(None, *window, "--tide.save-every", "1m")
    assert config.tide is None
    assert (config.save.tide, config.save.tide_secs) == (TideWindow(1, 2, 3, 4), 60)
    assert "tide.save_every: it is for the hours outside" in problems(None, "--tide.save-every", "1m")


def test_two_old_names_of_one_weight_are_refused(write: Any) -> None:
    file = write('[restore]\nrenamed = { a = "c", b = "c" }\n')
    assert "two old names become c" in problems(file)


def test_threads_are_left_alone_unless_somebody_said_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    trained()
    assert asked == []
    trained(None, "--training.intra-op-threads", "3")
    trained(None, "--training.intra-op-threads", "3", threads=2)
    assert asked == [3, 2]


# Sources


def test_code_wins_over_flags_over_the_environment_over_the_file(write: Any) -> None:
    file = write("[checkpoint]\nkeep = 2\n")
    environ = {"MONOLITH_CHECKPOINT__KEEP": "3"}
    old = {"MONOLITH_CHECKPOINTS_MAX_TO_KEEP": "4"}
    flags = ["--checkpoints_max_to_keep=5"]
    found = [
        trained(file),
        trained(file, environ=environ),
        trained(file, environ=old),
        trained(file, *flags, environ=environ),
        trained(file, *flags, environ=environ, max_to_keep=6),
    ]
    assert [config.keep.max_to_keep for config in found] == [2, 3, 4, 5, 6]


def test_flags_and_variables_win_over_a_file_with_the_fields_of_a_training(write: Any) -> None:
    file = write('model_dir = "f"\n[keep]\nmax_to_keep = 2\nfull_every = 3\n')
    config = trained(file, "--checkpoint.keep", "4", environ={"MONOLITH_MODEL_DIR": "e"})
    assert (config.model_dir, config.keep.max_to_keep, config.keep.full_every) == ("e", 4, 3)


def test_a_run_of_several_processes_may_have_its_model_dir_in_such_a_file(write: Any) -> None:
    settings = read_settings(write('model_dir = "f"\nsteps = 3\n'), {}, flags=["--cluster.num-ps", "1"])
    assert settings.run.job.model_dir == "f"
    assert settings.distributed


def test_tf_config_says_who_this_is_and_how_others_are_found() -> None:
    cluster = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1"]}
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}})}
    run = read_settings(None, environ, code={"job.model_dir": "m"}).run
    assert run.discovery.kind == "tf_config"
    assert (run.cluster.role, run.cluster.index) == ("ps", 1)
    assert (run.cluster.num_ps, run.cluster.num_workers) == (2, 2)


@pytest.mark.parametrize("kind", ["local", "ps"])
def test_a_written_config_is_one_to_train_with(write: Any, kind: str) -> None:
    config = trained(write(template(kind)))
    assert config.model_dir == "runs/my_model"
    assert config.save.steps == (1000 if kind == "local" else None)


# The task and what else a training has


def test_a_run_has_tables_for_the_task_and_for_the_rest_of_the_training(write: Any) -> None:
    file = write(
        f"""
        [job]
        task = "{TASK}"
        params = {{ dim = 2, batches = 9 }}
        [task]
        batches = 5
        [train]
        seed = 3
        max_steps = 4
        max_time = "1h"
        [train.alert]
        action = "stop"
        """
    )
    training = load_training(TrainOptions(config=file, set=("batch_size=8",)), {})
    task: Any = training.task
    assert (task.dim, task.batches, task.batch_size) == (2, 5, 8)
    config = training.config
    assert (config.seed, config.max_steps, config.max_time) == (3, 4, timedelta(hours=1))
    assert config.alert is not None
    assert config.alert.action == "stop"


def test_the_rest_can_be_said_by_flags_and_variables() -> None:
    config = trained(None, "--train", "seed=5", environ={"MONOLITH_TRAIN__SEED": "4"})
    assert config.seed == 5
    config = trained(environ={"MONOLITH_TRAIN__SEED": "4", "MONOLITH_TRAIN__DETERMINISTIC": "true"})
    assert (config.seed, config.deterministic) == (4, True)


def test_the_task_is_named_by_the_command_or_by_the_job(write: Any) -> None:
    file = write(f'[job]\ntask = "{TASK}"\n')
    assert load_training(TrainOptions(config=file), {}).task.name == "clicks"
    assert load_training(TrainOptions(), {"MONOLITH_TASK": TASK}).task.name == "clicks"
    file = write(f'task = "{TASK}"\nnum_ps = 0\n')
    assert load_training(TrainOptions(config=file), {}).task.name == "clicks"
    with pytest.raises(ConfigError, match=r"say which task: .* or job\.task in the config"):
        load_training(TrainOptions(), {})


def test_the_old_name_of_the_task_is_read_beside_a_table_of_its_settings(write: Any) -> None:
    file = write("[job]\nlocal = true\n[task]\nbatches = 5\n")
    for given in ({"run_flags": (f"--task={TASK}",)}, {}):
        environ = {} if given else {"MONOLITH_TASK": TASK}
        task: Any = load_training(TrainOptions(config=file, **given), environ).task
        assert task.batches == 5


def test_what_a_group_has_is_not_said_in_train(write: Any) -> None:
    said = problems(write("[job]\nlocal = true\n[train.save]\nsteps = 3\nretry_secs = 5\n"))
    assert "train.save.steps: in a run's config it is called checkpoint.every_steps" in said
    assert "one problem" in said


def test_parameters_by_dotted_names_lead_into_nested_settings(write: Any, tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(
        "from dataclasses import dataclass\nfrom train.tasks import Clicks\n"
        "@dataclass(frozen=True)\nclass Rate:\n    start: float = 1.0\n    end: float = 2.0\n"
        "@dataclass(frozen=True)\nclass Mine(Clicks):\n    rate: Rate = Rate()\n"
    )
    file = write('[job]\nparams = { "rate.start" = 3.0, "rate.end" = 4.0 }\n')
    task: Any = load_training(TrainOptions(task=f"{tmp_path}/nested.py:Mine", config=file), {}).task
    assert (task.rate.start, task.rate.end) == (3.0, 4.0)


# The two shapes of a file


def test_a_file_that_mixes_the_two_shapes_is_told_what_belongs_where(write: Any) -> None:
    said = problems(write("steps = 5\n[save]\nsteps = 7\n[cluster]\nnum_ps = 2\n"))
    assert "mixes two shapes" in said
    assert "cluster.num_ps is of a run's config" in said
    assert "save.steps, steps are of TrainConfig" in said
    assert "save.steps is checkpoint.every_steps, steps is train.steps" in said
    assert "num_workers is of a run's config" in problems(write("seed = 1\nnum_workers = 2\n"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[restore]\nfolder = "old"\n', "old"),
        ('[restore]\ndir = "old"\n', "old"),
        ('[restore]\ncheckpoint = "model.ckpt-3"\n', None),
    ],
)
def test_a_group_that_both_shapes_have_is_told_by_its_keys(write: Any, text: str, found: str | None) -> None:
    restore = trained(write(text)).restore
    assert restore.dir == found
    assert (restore.checkpoint is None) == (found is not None)


def test_both_groups_of_one_name_in_one_file_are_a_mixture(write: Any) -> None:
    said = problems(write('[restore]\nfolder = "old"\nstrict = false\n'))
    assert "restore.strict is train.restore.strict" in said
    assert trained(write("[job]\nlocal = true\n[train.restore]\nstrict = false\n")).restore.strict is False


def test_a_json_file_has_the_same_shapes(write: Any) -> None:
    assert trained(write('{"checkpoint": {"keep": 3}}', "run.json")).keep.max_to_keep == 3
    assert trained(write('{"keep": {"max_to_keep": 4}}', "run.json")).keep.max_to_keep == 4


# What is refused


def test_all_problems_are_listed_at_once(write: Any) -> None:
    file = write(
        "[cluster]\nnum_extra_ps = 1\nnum_ps = 1\n[training]\nrealtime = true\n"
        '[data_service]\nenabled = true\n[job]\nmodel_dir = "m"\n[train]\nseeed = 3\nsteps = -1\n'
    )
    said = problems(file)
    assert "cluster.num_extra_ps: each server is told its share" in said
    assert "training.realtime: changed rows are not sent" in said
    assert "data_service.enabled: a task reads its own data" in said
    assert f"unknown key seeed (from [train] of {file}); the nearest known key is seed" in said
    assert "5 problems" in said or "4 problems" in said


def test_problems_of_the_run_and_of_its_training_are_listed_together(write: Any) -> None:
    said = problems(write('[checkpoint]\nkeep = "ten"\n[clustr]\nx = 1\n[train]\nseeed = 3\n'))
    for text in ("checkpoint.keep", "unknown key clustr", "unknown key seeed"):
        assert text in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--training.synchronous"], "training.synchronous: all ranks"),
        (["--enable_gpu_training"], "training.gpu: a module computes where the task has moved it to"),
        (["--data.path", "x"], "data.path: a task reads its own data"),
        (["--data.framing.no-sort-id"], "data.framing.sort_id: a task reads its own data"),
        (["--failover.partial-recovery"], "failover.partial_recovery: a run that lost a server"),
        (["--filter_capacity=5"], "embedding.filter.capacity: a task makes its own tables"),
        (["--metrics.log-every-steps", "3"], "metrics.log_every_steps: lines of the log"),
        (["--mode", "eval"], "job.mode: 'eval' is not training; see `monolith evaluate`"),
        (["--cluster.num-workers", "2", "--model_dir", "m"], "set cluster.num_ps (--num-ps)"),
        (["--cluster.num-workers", "2"], "give one with --model-dir"),
        (["--cluster.num-ps", "1", "--model_dir", "m", "--only_feature_engineering"], "set job.local"),
        (["--cluster.listen", "0.0.0.0"], "0.0.0.0 is nowhere"),
        (["--cluster.port", "70000"], "must be from 0 to 65535"),
    ],
)
def test_what_cannot_be_done_is_never_passed_over(flags: list[str], says: str) -> None:
    assert says in problems(None, *flags)


def test_what_is_asked_not_to_be_done_is_not_refused() -> None:
    flags = ["--training.synchronous", "false", "--failover.no-partial-recovery", "--nouse_dataservice"]
    assert trained(None, *flags) == TrainConfig()


FIELDS = {info.path: info for info in describe_fields(RunConfig)}
NEEDED: dict[str, dict[str, Any]] = {
    "cluster.num_extra_ps": {"cluster.num_ps": 1, "job.model_dir": "m"},
    "cluster.num_redundant_ps": {"cluster.num_ps": 1, "job.model_dir": "m"},
    "training.partially_synchronous": {"cluster.num_ps": 1, "job.model_dir": "m"},
    "kafka.topics": {"kafka.servers": ["x"], "kafka.group": "g"},
    "candidates.enabled": {"candidates.path": "x"},
    **{
        f"training.{name}": {"training.synchronous": True}
        for name in ("defer_sparse_updates", "overlap_forward", "overlap_backward")
    },
}
"""Field -> what must be said beside it, to be refused for its own sake."""


def another(path: str) -> Any:
    """Return a value that a field may have, other than its default, as JSON has it."""
    info = FIELDS[path]
    if path in ("data.start_date", "data.end_date"):
        return "20240131"
    if path == "profile.cuda_steps":
        return [3, 5]
    kinds = members(info.hint)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(choice for choice in get_args(kind) if choice != info.default)
    if bool in kinds:
        return not info.default
    if int in kinds or float in kinds:
        return (info.default or 0) + 1
    if timedelta in kinds:
        return "7s"
    if any(is_collection(kind) for kind in kinds):
        return ["x"]
    return {"x": "y"} if any(is_mapping(kind) for kind in kinds) else "x"


def as_json(values: Mapping[str, Any]) -> str:
    tables: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = path.split(".")
        table = tables
        for key in above:
            table = table.setdefault(key, {})
        table[last] = value
    return json.dumps(tables)


@pytest.mark.parametrize("path", NOT_YET)
def test_each_field_that_is_refused_is_refused_by_train_and_by_config_check(
    write: Any, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = True if path == "dense.partition" else another(path)
    file = write(as_json({**NEEDED.get(path, {}), path: value}), "run.json")
    why = f"{path}: {NOT_YET[path]}"
    assert why in problems(file)
    assert main(["config", "check", str(file)]) == 1
    assert why in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"timeouts.operation": None}, "timeouts.operation: a call without a limit would wait"),
        ({"profile.from_step": 3}, "profile.from_step: profiles are files in the model_dir"),
        (
            {"metrics.port": 0, "metrics.host": "0.0.0.0"},
            "metrics.host: cannot listen on 0.0.0.0: others can reach it",
        ),
        ({"tide.save_every": "1m"}, "tide.save_every: it is for the hours outside"),
        ({"cluster.num_workers": 2, "job.model_dir": "m"}, "set cluster.num_ps"),
        ({"restore.renamed": {"a": "c", "b": "c"}}, "two old names become c"),
        ({"train": {"seeed": 3}}, "unknown key seeed"),
        ({"train": {"max_steps": -1}}, "max_steps must be above 0"),
        ({"train": {"save": {"steps": 3}}}, "in a run's config it is called checkpoint.every_steps"),
    ],
)
def test_what_else_train_refuses_config_check_refuses(
    write: Any, values: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(as_json(values), "run.json")
    assert why in problems(file)
    assert main(["config", "check", str(file)]) == 1
    assert why in capsys.readouterr().out


def test_old_words_for_what_is_not_done_are_refused_too() -> None:
    for flag, why in {
        "--enable_model_dump=true": "serving.dump_model: no model is written",
        "--enable_variable_partition=true": "dense.partition: a weight is not cut",
        "--operation_timeout_in_ms=-1": "timeouts.operation: a call without a limit",
        "--max_slow_start_wait_minute=3": "timeouts.slow_start: workers begin together",
    }.items():
        assert why in problems(None, flag)


def test_a_switch_that_turns_on_what_is_always_on_is_taken() -> None:
    assert trained(None, "--enable_variable_partition=false", "--embedding.dedup") == TrainConfig()


def test_without_a_limit_of_their_own_calls_have_that_of_lookups() -> None:
    timeouts = read_settings(None, {}, flags=["--timeouts.lookup", "7s"]).run.timeouts
    assert (timeouts.lookup, timeouts.operation) == (timedelta(seconds=7), timedelta(seconds=7))


def test_a_platforms_folder_for_summaries_does_not_stop_a_run() -> None:
    assert trained(environ={"TENSORBOARD_LOG_PATH": "/logs"}) == TrainConfig()
    assert "metrics.tensorboard_dir" in problems(None, "--metrics.tensorboard-dir", "/logs")


def test_a_variable_that_means_nothing_is_refused() -> None:
    assert "unknown environment variable MONOLITH_CHEKPOINT__KEEP" in problems(
        environ={"MONOLITH_CHEKPOINT__KEEP": "3"}
    )


# Evaluate and predict


def test_reading_takes_the_same_files(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    file = write(
        f'[job]\ntask = "{TASK}"\nmodel_dir = "m"\n[cluster]\nnum_ps = 2\nnum_workers = 3\n'
        '[discovery]\nkind = "files"\nfolder = "d"\n[task]\nbatches = 5\n[train]\nseed = 3\n'
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
        f'[job]\ntask = "{TASK}"\nmodel_dir = "{tmp_path}/m"\n[task]\nbatches = 4\n[train]\nmax_steps = 3\n'
    )
    assert main(["train", "--config", str(file), "--no-summaries"]) == 0
    assert f"monolith evaluate --model-dir {tmp_path}/m --config {file}" in capsys.readouterr().out
    assert main(["evaluate", "--config", str(file), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


def test_a_file_with_the_fields_of_a_training_may_hold_all_of_them() -> None:
    names = {info.path.partition(".")[0] for info in describe_fields(TrainFile)}
    assert {"model_dir", "save", "keep", "restore", "tide", "task"} <= names
