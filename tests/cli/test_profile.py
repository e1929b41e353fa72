"""`monolith status profile`: where the time of a job goes, asked of real jobs and of control servers."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.config_files import write_project
from serve.served_tasks import exported, trained
from services import warm

from monolith.cli.main import main
from monolith.cluster.status import ProcessStatus, Role, StatusBoard
from monolith.runtime.cluster_config import ClusterConfig, DiscoveryConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.control import control_place, tracer_of
from monolith.runtime.status import OwnStatus
from monolith.train import TrainConfig
from monolith.train.hooks.control_server import ControlServer
from monolith.train.hooks.profiling import Tracer

pytest.importorskip("grpc")


class NoTrace:
    """Records nothing of torch."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A job of two processes that can be asked, and one that cannot."""
    servers = []
    known: list[tuple[Role, int, bool]] = [("worker", 0, True), ("ps", 0, True), ("ps", 1, False)]
    for role, index, asked in known:
        control = ""
        if asked:
            steps = (lambda: time.monotonic_ns()) if role == "worker" else None  # noqa: PLW0108
            tracer = Tracer(str(tmp_path / "profile"), f"{role}_{index}", steps=steps, make=NoTrace)
            servers.append(ControlServer({}, tracer=tracer, grace=0.1))
            servers[-1].start(str(tmp_path))
            control = servers[-1].address or ""
        now = time.time()
        StatusBoard(str(tmp_path)).write(
            ProcessStatus(
                role=role, index=index, state="x", time=now, every=60.0, started=now, control=control
            )
        )
    yield tmp_path
    for server in servers:
        server.close()


def profiled(job: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(["status", "profile", str(job), "--json", *flags])
    return status, {one["process"]: one for one in json.loads(capsys.readouterr().out)["profiles"]}


def test_every_process_that_can_be_asked_writes_a_trace(job: Path, capsys: Any) -> None:
    status, found = profiled(job, capsys, "--seconds", "0.05")
    assert status == 0
    assert found.keys() == {"worker-0", "ps-0"}
    for one in found.values():
        assert json.loads(Path(one["path"]).read_text())["traceEvents"]


def test_steps_are_asked_of_those_that_take_some(job: Path, capsys: Any) -> None:
    status, found = profiled(job, capsys, "--steps", "1")
    assert (status, list(found)) == (0, ["worker-0"])
    assert found["worker-0"]["steps"] >= 1


def test_a_process_that_cannot_be_profiled_says_why_and_the_rest_are_profiled(job: Path, capsys: Any) -> None:
    status, found = profiled(job, capsys, "--process", "worker-0", "ps-0", "ps-1", "--steps", "1")
    assert status == 1
    assert "path" in found["worker-0"]
    assert "takes no steps" in found["ps-0"]["error"]
    assert "without a control server; run `monolith status profile` there" in found["ps-1"]["error"]


def test_a_process_that_is_not_there_is_named_with_those_that_are(job: Path, capsys: Any) -> None:
    assert main(["status", "profile", str(job), "--process", "ps-7"]) == 2
    assert "has no process ps-7; those that run are: worker-0, ps-0, ps-1" in capsys.readouterr().err


def test_a_caller_that_cannot_read_the_token_of_the_run_is_refused(
    job: Path, capsys: Any, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not the token")
    status, found = profiled(job, capsys, "--token-file", str(wrong), "--seconds", "0.05")
    assert status == 1
    assert "token" in found["ps-0"]["error"]


# Jobs of this user, found without a flag

SECONDS = 120.0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder of running jobs of its own, and an empty current folder."""
    folder = tempfile.mkdtemp(prefix="jobs-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.chdir(tmp_path)
    yield
    shutil.rmtree(folder)


class Running:
    """A command of Monolith in a process of its own, ended with the block."""

    def __init__(self, *words: str) -> None:
        self.process = warm.Popen(["-m", "monolith", *words], stderr=warm.DEVNULL, stdout=warm.DEVNULL)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(SECONDS) is not None


def asked(capsys: pytest.CaptureFixture[str], *words: str, processes: int = 1) -> list[dict[str, Any]]:
    """Profile as soon as so many processes of the job can be asked."""
    end = time.monotonic() + SECONDS
    while True:
        status = main(["status", "profile", *words, "--seconds", "0.3", "--json"])
        out, err = capsys.readouterr()
        if status == 0 and len(found := json.loads(out)["profiles"]) == processes:
            return found
        assert time.monotonic() < end, (status, out, err)
        time.sleep(0.2)


@pytest.mark.usefixtures("runtime")
def test_a_training_is_profiled_by_its_model_dir_its_name_and_its_pid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A name of its own: jobs of other tests that run at the moment are found, too.
    config = write_project(tmp_path, more='\n[job]\nname = "profiled"\n')
    with Running("train", "--config", str(config), "--epochs", "100000") as training:
        (one,) = asked(capsys, str(tmp_path / "run"))
        assert one["process"] == "worker-0"
        assert one["pid"] == training.process.pid
        assert Path(one["path"]).parent == tmp_path / "run" / "profile"
        assert json.loads(Path(one["path"]).read_text())["traceEvents"]
        main_thread = next(thread for thread in one["threads"] if thread["name"] == "MainThread")
        assert main_thread["functions"][0]["own"] > 0
        pid = str(training.process.pid)
        (again,) = asked(capsys, pid, "--to", str(tmp_path / "mine"))
        assert Path(again["path"]).parent == tmp_path / "mine"
        assert main(["status", "profile", "profiled", "--seconds", "0.3"]) == 0
        told = capsys.readouterr().out
        assert "MainThread: " in told
        assert "own  total  function" in told
        assert main(["status", "profile", "nonsense"]) == 2
        told = capsys.readouterr().err
        assert "Running now:\n  pid " in told
        listed = [line.split(maxsplit=3) for line in told.splitlines()]
        assert ["pid", pid, "worker-0", f"profiled {tmp_path / 'run'}"] in listed


@pytest.mark.usefixtures("runtime")
def test_all_processes_of_a_fleet_are_profiled_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path)
    words = ["--launch", "local", "--num-ps", "1", "--num-workers", "2", "--epochs", "100000"]
    with Running("train", "--config", str(config), *words):
        found = asked(capsys, str(tmp_path / "run"), processes=3)
        assert {one["process"] for one in found} == {"worker-0", "worker-1", "ps-0"}
        assert all(Path(one["path"]).is_file() for one in found)


@pytest.mark.usefixtures("runtime")
def test_a_server_is_profiled_by_the_folder_that_it_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    exported(trained(tmp_path / "run"), tmp_path / "out", step=3)
    with Running("serve", str(tmp_path / "out"), "--http-port", "0", "--grpc-port", "0"):
        (one,) = asked(capsys)  # the only job that runs
        (one,) = asked(capsys, str(tmp_path / "out"))
    assert one["process"] == "serve-0"
    assert (
        Path(one["path"]).parent == tmp_path / "profile"
    )  # of the current folder: a server has no model_dir
    assert any(thread["name"] == "MainThread" for thread in one["threads"])


@pytest.mark.usefixtures("runtime")
def test_a_job_that_does_not_run_and_a_process_that_is_none_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "profile", "999999999"]) == 2
    assert "there is no process 999999999." in capsys.readouterr().err
    assert main(["status", "profile", "1"]) == 2
    assert "process 1 " in capsys.readouterr().err
    assert main(["status", "profile", "/no/such/folder"]) == 2
    assert "no job of this user here is called '/no/such/folder'" in capsys.readouterr().err


# Where a process is controlled

MLP = {
    "MLP_ROLE": "worker",
    "MLP_PORT": "2000",
    "MLP_WORKER_NUM": "1",
    "MLP_WORKER_0_PRIMARY_HOST": "10.0.0.7",
    "MLP_WORKER_0_PORT": "2000",
}


def place(run: RunConfig, environ: dict[str, str] | None = None, *, asked: bool) -> str | None:
    found = control_place(run, environ or {}, tracer_of(run, OwnStatus(run)), asked=asked)
    return None if found is None else found.address


def test_a_process_is_controlled_on_its_own_machine_if_requested(tmp_path: Path) -> None:
    run = RunConfig(train=TrainConfig(model_dir=str(tmp_path)))
    assert place(run, asked=True) == "127.0.0.1:0"
    assert place(run, asked=False) is None
    assert place(RunConfig(), asked=True) is None


def test_a_worker_that_mlp_started_is_controlled_at_its_mlp_port(tmp_path: Path) -> None:
    train = TrainConfig(model_dir=str(tmp_path))
    run = RunConfig(train=train, discovery=DiscoveryConfig(kind="mlp"))
    assert place(run, MLP, asked=False) == "10.0.0.7:2000"
    found = control_place(run, MLP, tracer_of(run, OwnStatus(run)), asked=False)
    assert found is not None
    assert found.security is not None
    assert found.security.token is not None  # others can reach it


def test_a_token_that_others_can_read_controls_no_process() -> None:
    train = TrainConfig(model_dir="memory://shared/model")
    run = RunConfig(train=train, discovery=DiscoveryConfig(kind="mlp"), cluster=ClusterConfig())
    assert place(run, MLP, asked=False) is None


def test_flags_of_a_profile_are_bounded(job: Path, capsys: Any) -> None:
    status, found = profiled(job, capsys, "--process", "ps-0", "--seconds", "1000")
    assert status == 1
    assert "at most 120" in found["ps-0"]["error"]
