"""`monolith doctor --cluster`: who is registered, how long, and who answers."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console
from services import warm
from services.servers import free_port

from monolith.cli import doctor, doctor_cluster, main
from monolith.cli.doctor_cluster import Registered, examine, render
from monolith.cli.options.jobs import DoctorOptions
from monolith.cluster import (
    Discovery,
    FilesConfig,
    FilesDiscovery,
    MemoryDiscovery,
    open_discovery_url,
    save_ps_cluster,
)
from monolith.errors import ConfigError

SECOND = timedelta(seconds=1)


@pytest.fixture
def alive() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else can take it
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def printed(members: list[Registered]) -> str:
    screen = io.StringIO()
    render("somewhere", members, Console(file=screen, width=200))
    return screen.getvalue()


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        ["-m", "monolith", "--log-level", "error", "doctor", "--cluster", *flags],
        env={**os.environ, **environment},
    )


def test_every_process_is_listed_with_its_age_and_whether_it_answers(alive: str, dead: str) -> None:
    now = [1000.0]
    discovery = MemoryDiscovery(clock=lambda: now[0])
    discovery.register("worker", 0, alive)
    discovery.register("ps", 1, dead)
    now[0] += 90
    discovery.register("ps", 0, alive)
    ps0, ps1, worker0 = examine(discovery, SECOND, clock=lambda: now[0])
    assert ps0 == Registered("ps", 0, alive, 0.0, True, "")
    assert worker0 == Registered("worker", 0, alive, 90.0, True, "")
    assert (ps1.role, ps1.index, ps1.age_s, ps1.answers) == ("ps", 1, 90.0, False)
    assert "refused" in ps1.problem
    text = printed([ps0, ps1, worker0])
    assert "1:30 ago" in text
    assert "1 of 3 do not answer" in text


def test_a_registry_without_times_shows_no_ages(alive: str) -> None:
    member = Registered("ps", 0, alive, None, True, "")
    assert "ago" not in printed([member])
    assert "All 1 answer." in printed([member])


def test_in_an_empty_cluster_no_process_is_registered() -> None:
    assert examine(MemoryDiscovery(), SECOND) == []
    assert "No process is registered." in printed([])


# As a command


@pytest.fixture(params=["files", "zookeeper"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "files":
        return f"files://{tmp_path}/registry"
    return f"zookeeper://{request.getfixturevalue('zookeeper').address}/doctor-{tmp_path.name}"


@pytest.fixture
def discovery(registry: str) -> Iterator[Discovery]:
    with open_discovery_url(registry) as discovery:
        yield discovery


def test_the_status_is_1_exactly_when_a_process_does_not_answer(
    registry: str, discovery: Discovery, alive: str, dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DoctorOptions(cluster=(registry,), json=True)
    assert doctor.run(options) == 0
    assert json.loads(capsys.readouterr().out)["members"] == []
    discovery.register("ps", 0, alive)
    assert doctor.run(options) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    discovery.register("dataservice_dispatcher", 0, dead)
    assert doctor.run(options) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["registry"]) == (False, registry)
    dispatcher, ps = report["members"]
    assert (dispatcher["role"], dispatcher["address"], dispatcher["answers"]) == (
        "dataservice_dispatcher",
        dead,
        False,
    )
    assert (ps["role"], ps["address"], ps["answers"], ps["problem"]) == ("ps", alive, True, "")
    assert 0 <= ps["age_s"] < 60


def test_what_a_killed_process_left_is_shown_until_it_expires(tmp_path: Path, dead: str) -> None:
    now = [1000.0]
    config = FilesConfig(folder=str(tmp_path))
    left = FilesDiscovery(config, clock=lambda: now[0], timer=lambda: now[0])
    left.register("ps", 0, dead)  # and is never touched again, as after kill -9
    with FilesDiscovery(config, clock=lambda: now[0], timer=lambda: now[0]) as discovery:
        now[0] += 50
        (member,) = examine(discovery, SECOND, clock=lambda: now[0])
        assert (member.age_s, member.answers) == (50.0, False)
        now[0] += 20
        assert examine(discovery, SECOND, clock=lambda: now[0]) == []
    left.close()


def test_the_command_line_takes_a_url_a_file_or_the_environment(
    tmp_path: Path, alive: str, dead: str
) -> None:
    with open_discovery_url(f"files://{tmp_path}/registry") as discovery:
        discovery.register("worker", 0, alive)
        by_url = run(f"files://{tmp_path}/registry")
        assert by_url.returncode == 0, by_url.stderr
        assert alive in by_url.stdout
        file = tmp_path / "run.toml"
        file.write_text(f'[discovery]\nkind = "files"\nfolder = "{tmp_path}/registry"\n')
        by_file = run("--config", str(file), "--json")
        assert by_file.returncode == 0, by_file.stderr
        assert [member["address"] for member in json.loads(by_file.stdout)["members"]] == [alive]
    tf_config = {"cluster": {"chief": [alive], "ps": [dead]}, "task": {"type": "chief", "index": 0}}
    by_environment = run("--json", TF_CONFIG=json.dumps(tf_config))
    assert by_environment.returncode == 1, by_environment.stderr
    members = json.loads(by_environment.stdout)["members"]
    assert [(one["role"], one["answers"], one["age_s"]) for one in members] == [
        ("ps", False, None),
        ("worker", True, None),
    ]


def test_for_a_run_with_spares_it_lists_the_server_of_each_shard_and_how_many_are_missing(
    tmp_path: Path, alive: str, dead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[job]\nid = "run-1"\n[train]\nmodel_dir = "{tmp_path}/m"\n'
        "[cluster]\nnum_ps = 1\nnum_extra_ps = 1\nnum_redundant_ps = 1\n"
        f'[discovery]\nkind = "files"\nfolder = "{tmp_path}/registry"\n'
    )
    save_ps_cluster(f"{tmp_path}/m/ps_cluster_dir/run-1", [alive])
    with open_discovery_url(f"files://{tmp_path}/registry") as discovery:
        discovery.register("ps", 0, dead)
        discovery.register("ps", 2, alive)
        assert doctor.run(DoctorOptions(cluster=(), config=file)) == 1
        shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
        assert ["ps", "0", "spare"] in shown
        assert ["ps", "2", "0"] in shown
        assert ["2", "of", "3"] in shown  # parameter servers are registered
        doctor.run(DoctorOptions(cluster=(), config=file, json=True))
        members = json.loads(capsys.readouterr().out)["members"]
        assert [member["share"] for member in members] == [None, 0]


def test_the_processes_that_mlp_names_are_asked(alive: str, dead: str) -> None:
    variables = {"MLP_ROLE": "worker", "MLP_WORKER_NUM": "2", "CLOUDNATIVE_INET_ADDR": "127.0.0.1"}
    for index, address in enumerate((alive, dead)):
        host, _, port = address.partition(":")
        variables |= {f"MLP_WORKER_{index}_PRIMARY_HOST": host, f"MLP_WORKER_{index}_PORT": port}
    with doctor_cluster.registry(DoctorOptions(cluster=()), variables) as (name, discovery, _):
        assert "mlp" in name
        assert [member.answers for member in examine(discovery, SECOND)] == [True, False]


def test_a_zookeeper_that_cannot_be_reached_is_an_error_that_names_it(monkeypatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    assert main.main(["--log-level", "error", "doctor", "--cluster", f"zookeeper://{address}/job"]) == 2
    assert f"ZooKeeper at {address} did not answer within 5 s" in said.getvalue()


@pytest.mark.parametrize(
    "options, message",
    [
        (DoctorOptions(cluster=()), "name the registry: --cluster zookeeper://"),
        (DoctorOptions(cluster=("files:///a", "files:///b")), "one registry"),
        (DoctorOptions(cluster=("files:///a",), config=Path("x.toml")), "one registry"),
        (DoctorOptions(cluster=("nowhere",)), "it must be zookeeper://"),
        (DoctorOptions(config=Path("x.toml")), "needs --cluster, too"),
    ],
)
def test_without_one_registry_it_says_how_to_name_one(
    options: DoctorOptions, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TF_CONFIG", "MLP_ROLE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        doctor.run(options)


def test_a_local_run_has_no_cluster_to_check(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[job]\nlocal = true\n")
    with pytest.raises(ConfigError, match="is a local run"):
        doctor.run(DoctorOptions(cluster=(), config=file))
