import socket
import threading
from pathlib import Path

import pytest

from monolith.cluster.security import SecurityConfig
from monolith.config import Secret, to_toml
from monolith.errors import ConfigError
from monolith.runtime.cluster_config import ClusterConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.train import TrainConfig

KAFKA = ["--kafka.topics", "t", "--kafka.servers", "s", "--kafka.group", "g"]


def lines(error: ConfigError) -> list[str]:
    return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]


def test_sources_win_in_the_order_code_flags_environment_file_default(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train.keep]\nmax_to_keep = 2")
    environ, args = {"MONOLITH_TRAIN__KEEP__MAX_TO_KEEP": "3"}, ["--checkpoints_max_to_keep", "4"]
    assert load_run_config().train.keep.max_to_keep == 10
    assert load_run_config(file=file).train.keep.max_to_keep == 2
    assert load_run_config(file=file, environ=environ).train.keep.max_to_keep == 3
    assert load_run_config(file=file, environ=environ, args=args).train.keep.max_to_keep == 4
    code = {"train.keep.max_to_keep": 5}
    assert load_run_config(file=file, environ=environ, args=args, code=code).train.keep.max_to_keep == 5


def test_what_code_leaves_at_its_default_does_not_hide_a_flag():
    # test_int1=1 and test_int2=0 in code, flags 2 and 3, defaults 0: 1 and 3.
    code = RunConfig(cluster=ClusterConfig(num_ps=1), train=TrainConfig(model_dir="/m"))
    args = ["--num_ps", "2", "--num_workers", "3", "--model_dir", "/flag"]
    config = load_run_config(args=args, code=code)
    assert (config.cluster.num_ps, config.cluster.num_workers) == (1, 3)
    assert config.train.model_dir == "/m"


@pytest.mark.parametrize("path", ["train.save", "train.dense_save"])
def test_saving_by_the_step_and_by_the_clock_replace_each_other(tmp_path, path):
    file = tmp_path / "run.toml"
    file.write_text(f"[{path}]\nsecs = 60\n")
    save = getattr(load_run_config(file=file).train, path.partition(".")[2])
    assert (save.secs, save.steps) == (60, None)
    args = [f"--{path.replace('_', '-')}.steps", "5"]
    save = getattr(load_run_config(file=file, args=args).train, path.partition(".")[2])
    assert (save.secs, save.steps) == (None, 5)
    file.write_text(f"[{path}]\nsecs = 60\nsteps = 5\n")
    with pytest.raises(ConfigError, match="Can not provide both"):
        load_run_config(file=file)


def test_all_problems_of_all_sources_come_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "base_name = 'x'\ncluster.num_pss = 3\nsave_checkpoints_secs = 60\nsave_checkpoints_steps = 5\n"
        "[train]\nsed = 3\n[checkpoint]\nkeep = 3\n"
        "[data]\nhourly = true\nstart_hour = 99\nstart_date = '20240131'\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            file=file,
            environ={"MONOLITH_TRAIN__PREFETCH": "often", "MONOLITH_NUM_WORKERZ": "2"},
            args=["--modle_dir", "/m", "--timeouts.lookup", "0"],
        )
    assert lines(caught.value) == [
        "unknown environment variable MONOLITH_NUM_WORKERZ; "
        "the nearest known one is MONOLITH_CLUSTER__NUM_WORKERS",
        "unknown flag --modle_dir; the nearest known one is --model-dir",
        f"checkpoint.keep is train.keep.max_to_keep (from {file})",
        f"base_name (from {file}): nothing is sent to servers by name: each reads what the run publishes, by "
        "`monolith serve DIR --follow` with the place that publish.to says",
        f"unknown key train.sed (from {file}); the nearest known key is train.seed",
        "train.prefetch (from MONOLITH_TRAIN__PREFETCH): expected int, got 'often'",
        f"train.save (from {file}): Can not provide both save_checkpoints_secs and save_checkpoints_steps.",
        f"data.start_hour (from {file}): must be from 0 to 24, got 99",
        f"unknown key cluster.num_pss (from {file}); the nearest known key is cluster.num_ps",
        "timeouts.lookup (from --timeouts.lookup): must be more than 0, got 0:00:00",
    ]


def test_a_config_is_printable_and_reads_back(tmp_path):
    config = load_run_config(
        args=[
            "--num_ps",
            "2",
            "--model_dir",
            "/m",
            "--kafka_dump",
            "--task",
            "a=1",
            *KAFKA,
            "--train.alert.decay",
            "0.5",
        ]
    )
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_run_config(file=file) == config


def test_secrets_are_in_no_text_of_a_config():
    config = load_run_config(
        args=["--security.token", "hunter2", "--kafka.password", "hunter2", *KAFKA],
        environ={"ZK_AUTH": "u:hunter2"},
    )
    assert config.discovery.zookeeper_auth == Secret("u:hunter2")
    assert config.security.token == Secret("hunter2")
    for text in (repr(config), str(config), to_toml(config)):
        assert "hunter2" not in text


def test_problems_do_not_show_secrets():
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            code={
                "security.token": 5150,
                "kafka.topics": ["t"],
                "kafka.servers": ["s"],
                "kafka.group": "g",
                "kafka.settings": {"sasl.password": "hunter2"},
                "zookeper_auth": "hunter2",
            }
        )
    assert len(lines(caught.value)) == 3
    assert "hunter2" not in str(caught.value)
    assert "5150" not in str(caught.value)


def test_others_variables_are_understood():
    environ = {"TF_CONFIG": '{"cluster": {}}', "ZK_AUTH": "u:p", "MONOLITH_METRIC_PREFIX": "m"}
    config = load_run_config(environ=environ)
    assert config.discovery.tf_config == '{"cluster": {}}'
    assert config.discovery.zookeeper_auth == Secret("u:p")
    assert config.metrics.prefix == "m"


def test_building_a_config_neither_waits_nor_writes_nor_exits(tmp_path, monkeypatch):
    # Upstream's constructor served data for ever, copied checkpoints, waited for files and left the process.
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a config must not do that")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(threading.Thread, "start", forbidden)
    monkeypatch.setattr(Path, "write_text", forbidden)
    before = sorted(tmp_path.iterdir())
    config = load_run_config(
        environ={"MLP_ROLE": "dispatcher", "MLP_DISPATCHER_NUM": "1", "OMPI_COMM_WORLD_RANK": "0"},
        args=[
            *("--restore_dir", str(tmp_path / "none"), "--model_dir", str(tmp_path / "m")),
            *("--server_type", "worker", "--index", "2", "--num_workers", "3"),
        ],
    )
    assert config.train.restore.dir == str(tmp_path / "none")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_an_error_and_not_the_end_of_the_process(flag, capsys):
    with pytest.raises(ConfigError, match="monolith config explain"):
        load_run_config(args=[flag])
    assert capsys.readouterr().out == ""


def test_parts_check_themselves_too():
    with pytest.raises(ConfigError, match="mutual TLS needs all three; key, ca is missing"):
        SecurityConfig(cert=Path("c"))


# The table of the task, and the old name of the job's


def test_a_table_for_the_task_is_laid_over_by_what_comes_later(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[task]\na = 1\nb = 3\n[train]\nseed = 4\n")
    config = load_run_config(file=file, environ={"MONOLITH_PARAMS_OVERRIDE": '{"b": 4, "c": 5}'})
    assert config.task == {"a": 1, "b": 4, "c": 5}
    assert config.train.seed == 4


@pytest.mark.parametrize(
    "source",
    [
        {"environ": {"MONOLITH_TASK": "m:T"}},
        {"args": ["--task", "m:T"]},
        {"args": ["--task=m:T"]},
        {"code": {"task": "m:T"}},
    ],
)
def test_next_to_such_a_table_the_old_name_still_names_the_task(tmp_path, source):
    file = tmp_path / "run.toml"
    file.write_text("[task]\nb = 3\n")
    config = load_run_config(file=file, **source)
    assert (config.job.task, config.task) == ("m:T", {"b": 3})


def test_a_shell_has_one_name_for_the_task_and_its_settings():
    config = load_run_config(environ={"MONOLITH_TASK": "m:T", "MONOLITH_TASK__DIM": "4"})
    assert (config.job.task, config.task) == ("m:T", {"dim": 4})
    config = load_run_config(
        environ={"MONOLITH_TASK": "m:T"}, args=["--task", "rate=0.5", "name=x", "on=true"]
    )
    assert (config.job.task, config.task) == ("m:T", {"rate": 0.5, "name": "x", "on": True})


def test_a_file_with_a_table_for_the_task_is_read_as_strictly(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[task]\nb = 3\n[clustr]\nnum_ps = 1\n")
    with pytest.raises(
        ConfigError, match=f"unknown key clustr .from {file}.; the nearest known key is cluster"
    ):
        load_run_config(file=file)
