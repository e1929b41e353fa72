import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from monolith.cluster.run_config import (
    USER_DEFAULTS,
    CheckpointConfig,
    ClusterConfig,
    FailoverConfig,
    JobConfig,
    RunConfig,
    load_run_config,
    read_tables,
    said_fields,
)
from monolith.cluster.security import SecurityConfig
from monolith.config import Secret, to_toml
from monolith.errors import ConfigError


def lines(error: ConfigError) -> list[str]:
    return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]


def test_sources_win_in_the_order_code_flags_environment_file_default(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nkeep = 2")
    environ, args = {"MONOLITH_CHECKPOINT__KEEP": "3"}, ["--checkpoints_max_to_keep", "4"]
    assert load_run_config().checkpoint.keep == 10
    assert load_run_config(file=file).checkpoint.keep == 2
    assert load_run_config(file=file, environ=environ).checkpoint.keep == 3
    assert load_run_config(file=file, environ=environ, args=args).checkpoint.keep == 4
    code = {"checkpoint.keep": 5}
    assert load_run_config(file=file, environ=environ, args=args, code=code).checkpoint.keep == 5


def test_what_code_leaves_at_its_default_does_not_hide_a_flag():
    # test_int1=1 and test_int2=0 in code, flags 2 and 3, defaults 0: 1 and 3.
    code = RunConfig(cluster=ClusterConfig(num_extra_ps=1, num_ps=1), job=JobConfig(model_dir="/m"))
    args = ["--num_extra_ps", "2", "--num_redundant_ps", "3", "--model_dir", "/flag"]
    config = load_run_config(args=args, code=code)
    assert (config.cluster.num_extra_ps, config.cluster.num_redundant_ps) == (1, 3)
    assert config.job.model_dir == "/m"


def test_an_author_has_defaults_of_their_own_which_never_hide_a_flag():
    assert load_run_config(defaults=USER_DEFAULTS).failover.max_retries == 6
    assert load_run_config().failover.max_retries is None
    args = ["--max_retry_times", "2", "--retry_wait_in_secs", "7"]
    kept = load_run_config(args=args, defaults=USER_DEFAULTS).failover
    assert (kept.max_retries, kept.wait.total_seconds(), kept.partial_recovery) == (2, 7, False)


def test_an_author_who_writes_their_own_default_has_said_nothing():
    code = RunConfig(failover=FailoverConfig(max_retries=6, partial_recovery=False))
    args = ["--max_retry_times", "2", "--partial_recovery"]
    failover = load_run_config(args=args, code=code, defaults=USER_DEFAULTS).failover
    assert (failover.max_retries, failover.partial_recovery) == (2, True)
    assert failover.wait == timedelta(seconds=5)
    code = RunConfig(failover=FailoverConfig(max_retries=3))
    assert load_run_config(args=args, code=code, defaults=USER_DEFAULTS).failover.max_retries == 3


def test_all_problems_of_all_sources_come_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "checkpoint.keep = 0\ncluster.num_pss = 3\nsave_checkpoints_secs = 60\nsave_checkpoints_steps = 5\n"
        "[training]\npartially_synchronous = true\n[dense]\nprefetch = true\n[data]\nstart_hour = 99\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            file=file,
            environ={"MONOLITH_METRICS__LOG_EVERY_STEPS": "often", "MONOLITH_NUM_WORKERZ": "2"},
            args=["--modle_dir", "/m", "--timeouts.lookup", "0"],
        )
    assert lines(caught.value) == [
        "unknown environment variable MONOLITH_NUM_WORKERZ; "
        "the nearest known one is MONOLITH_CLUSTER__NUM_WORKERS",
        "unknown flag --modle_dir; the nearest known one is --model-dir",
        f"unknown key cluster.num_pss (from {file}); the nearest known key is cluster.num_ps",
        "timeouts.lookup (from --timeouts.lookup): must be more than 0, got 0:00:00",
        f"checkpoint.every and checkpoint.every_steps (from {file}): only one of them may be set",
        f"checkpoint.keep (from {file}): must be at least 1, got 0",
        f"data.start_hour (from {file}): must be from 0 to 24, got 99",
        "metrics.log_every_steps (from MONOLITH_METRICS__LOG_EVERY_STEPS): expected int, got 'often'",
        f"training.partially_synchronous (from {file}): the tables are on parameter servers then, "
        "but num_ps is 0",
        f"dense.prefetch and training.partially_synchronous (from {file}): only asynchronous training "
        "may use old weights",
    ]


def test_a_config_is_printable_and_reads_back(tmp_path):
    config = load_run_config(args=["--num_ps", "2", "--model_dir", "/m", "--kafka_dump"])
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_run_config(file=file) == config


def test_secrets_are_in_no_text_of_a_config():
    config = load_run_config(
        args=["--security.token", "hunter2", "--kafka.password", "hunter2"], environ={"ZK_AUTH": "u:hunter2"}
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
                "kafka.settings": {"sasl.password": "hunter2"},
                "zookeper_auth": "hunter2",
            }
        )
    assert len(lines(caught.value)) == 3
    assert "hunter2" not in str(caught.value)
    assert "5150" not in str(caught.value)


def test_others_variables_are_understood():
    environ = {"TF_CONFIG": '{"cluster": {}}', "TENSORBOARD_LOG_PATH": "/logs", "MONOLITH_METRIC_PREFIX": "m"}
    config = load_run_config(environ=environ)
    assert config.discovery.tf_config == '{"cluster": {}}'
    assert config.metrics.tensorboard_dir == "/logs"
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
    assert config.restore.folder == str(tmp_path / "none")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_an_error_and_not_the_end_of_the_process(flag, capsys):
    with pytest.raises(ConfigError, match="monolith config explain"):
        load_run_config(args=[flag])
    assert capsys.readouterr().out == ""


def test_parts_check_themselves_too():
    with pytest.raises(ConfigError, match="mutual TLS needs all three; key, ca is missing"):
        SecurityConfig(cert=Path("c"))
    with pytest.raises(ConfigError, match="every and every_steps: only one of them"):
        CheckpointConfig(every_steps=1, every=timedelta(seconds=1))


# Tables for the task and the training


def test_a_table_for_the_task_adds_to_its_parameters_and_wins_over_them(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[job]\nparams = { a = 1, b = 2 }\n[task]\nb = 3\n[train]\nseed = 4\n")
    config = load_run_config(file=file)
    assert type(config) is RunConfig
    assert config.job.params == {"a": 1, "b": 3}
    assert config.train == {"seed": 4}


@pytest.mark.parametrize(
    "source",
    [
        {"environ": {"MONOLITH_TASK": "m:T"}},
        {"args": ["--task", "m:T"]},
        {"args": ["--task=m:T"]},
        {"code": {"task": "m:T"}},
    ],
)
def test_beside_such_a_table_the_old_name_still_names_the_task(tmp_path, source):
    file = tmp_path / "run.toml"
    file.write_text("[task]\nb = 3\n")
    config = load_run_config(file=file, **source)
    assert (config.job.task, config.job.params) == ("m:T", {"b": 3})


def test_a_file_with_a_table_for_the_task_is_read_as_strictly(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[task]\nb = 3\n[clustr]\nnum_ps = 1\n")
    with pytest.raises(
        ConfigError, match=f"unknown key clustr .from {file}.; the nearest known key is cluster"
    ):
        load_run_config(file=file)


def test_what_was_said_is_known_even_where_it_is_the_default(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "num_workers = 1\n[checkpoint]\nkeep = 10\nkep = 3\n[task]\nx = 1\n[restore.renamed]\na = 'b'\n"
    )
    said = said_fields(
        file=file,
        environ={
            "MONOLITH_EMBEDDING__PREFETCH": "0",
            "TF_CONFIG": "{}",
            "MONOLITH_VECTORS": "x",
            "HOME": "/",
        },
        args=["--num_ps=0", "--job.no-local", "--nois_hourly", "--kafka.topics", "a", "--unheard-of", "1"],
    )
    assert said == {
        *("cluster.num_workers", "checkpoint.keep", "job.params", "restore.renamed"),
        *("embedding.prefetch", "discovery.tf_config"),
        *("cluster.num_ps", "job.local", "data.hourly", "kafka.topics"),
    }
    assert said_fields() == frozenset()


def test_tables_of_a_file_that_cannot_be_read_are_none(tmp_path):
    assert read_tables(None) is None
    assert read_tables(tmp_path / "none.toml") is None
    for name, text in (("a.toml", "[["), ("a.json", "[1]"), ("a.yaml", "a: 1")):
        (tmp_path / name).write_text(text)
        assert read_tables(tmp_path / name) is None
    (tmp_path / "b.json").write_text('{"a": 1}')
    assert read_tables(tmp_path / "b.json") == {"a": 1}
