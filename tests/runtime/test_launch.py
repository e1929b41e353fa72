"""`monolith train --launch`: all processes of a run, started, stopped and killed from one command."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services import warm
from services.ray import RayCluster
from train.tasks import Clicks

from monolith.checkpoint import read_checkpoint_state
from monolith.cli.main import main, parse_options
from monolith.cli.train import run_of
from monolith.cluster.launch import LaunchOutcome
from monolith.cluster.run_token import run_security
from monolith.runtime import Trainer, launch
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.context import Launch
from monolith.runtime.discovery import open_discovery
from monolith.runtime.launch import ChiefReport, members_of
from monolith.train import TrainConfig

TESTS = Path(__file__).parents[1]
TASK = "train.tasks:Clicks"
ENDLESS = ("--set", "batches=10000000", "--set", "batch_size=16")
LIMIT = 180.0
AnyPopen = warm.Popen | subprocess.Popen[bytes]


def command(*words: str, each: int = 2, task: str = TASK) -> list[str]:
    """Return a run of so many servers, and as many workers."""
    return ["train", task, "--launch", "local", "--num-ps", str(each), "--num-workers", str(each), *words]


def processes_with(text: str) -> list[int]:
    """Return who has this in the command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(text.encode() in word for word in words):
                found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., AnyPopen]]:
    """Starts a launcher, in a fresh interpreter if asked to; in the end none who knows the model_dir runs."""
    started: list[AnyPopen] = []

    def start(*words: str, fresh: bool = False, each: int = 2, task: str = TASK) -> AnyPopen:
        whole = command("--model-dir", str(tmp_path / "m"), *words, each=each, task=task)
        program = ["-m", "monolith", *whole]
        popen: Any = subprocess.Popen if fresh else warm.Popen
        # Text from many processes: files never fill up as pipes do.
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            process: AnyPopen = popen(
                [sys.executable, *program] if fresh else program,
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(tmp_path),
                },
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for pid in processes_with(str(tmp_path / "m")):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


def said(tmp_path: Path) -> str:
    return (tmp_path / "err").read_text()


# Whole runs


@pytest.mark.parametrize(("each", "fresh"), [(2, False), pytest.param(1, True, marks=pytest.mark.soak)])
def test_all_train_and_one_report_comes_out(start: Any, tmp_path: Path, each: int, fresh: bool) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[task]\nbatches = 24\n[train]\nseed = 3\n")
    flags = ("--json", "--config", str(config), "--set", "batch_size=16", "--no-summaries")
    process = start(*flags, fresh=fresh, each=each)
    assert process.wait(LIMIT) == 0, said(tmp_path)
    report = json.loads((tmp_path / "out").read_text())  # one object, and nothing else
    assert (report["task"], report["step"], report["examples"]) == ("clicks", 24, 24 * 16)
    assert report["checkpoint"] == f"{tmp_path}/m/model.ckpt-24"
    lines = said(tmp_path).splitlines()
    for index in range(each):
        for name in (rf"\[ps {index} pid \d+\]     ", rf"\[worker {index} pid \d+\] "):
            assert any(re.match(name, line) for line in lines), name
    assert any(re.match(r"\[worker 1 pid \d+\] worker 1 ended", line) for line in lines) == (each == 2)
    assert not list(tmp_path.glob("monolith-*"))  # where they met


@pytest.mark.parametrize(
    "flags",
    [("--num-ps", "2", "--operation_timeout_in_ms", "-1"), ("--num-ps", "0", "--mode", "sync")],
)
def test_a_task_without_embeddings_trains_and_resumes_with_servers_and_across_ranks(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    task = "train.tasks:Numbers"
    words = ("--json", "--set", "batch_size=16", "--set", "batches=60", "--no-summaries", *flags)
    reports = []
    for steps in (6, 12):
        process = start(*words, "--max-steps", str(steps), task=task)
        assert process.wait(LIMIT) == 0, said(tmp_path)
        reports.append(json.loads((tmp_path / "out").read_text()))
        assert reports[-1]["checkpoint"] == f"{tmp_path}/m/model.ckpt-{reports[-1]['step']}"
        assert reports[-1]["step"] >= steps
    assert reports[1]["restored_from"] == reports[0]["checkpoint"]
    assert main(["evaluate", task, "--model-dir", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["click/auc"] == 1.0


def test_ctrl_c_saves_and_stops_all(start: Any, tmp_path: Path) -> None:
    process = start("--json", *ENDLESS, "--save-steps", "20", "--no-summaries")
    wait_until(lambda: list(tmp_path.glob("m/model.ckpt-*.manifest")), "nothing was saved")
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130, said(tmp_path)
    assert "stopped by SIGINT" in said(tmp_path)
    report = json.loads((tmp_path / "out").read_text())
    state = read_checkpoint_state(str(tmp_path / "m"))
    assert state is not None
    # Which is how the launcher asks; the chief may hear of it first from the other worker.
    assert report["stop_reason"] in ("SIGTERM", "worker 1: SIGTERM")
    assert state.model_checkpoint_path == report["checkpoint"] == f"{tmp_path}/m/model.ckpt-{report['step']}"
    assert processes_with(str(tmp_path / "m")) == []


def test_kill_9_of_the_launcher_leaves_no_process_behind(start: Any, tmp_path: Path) -> None:
    process = start(*ENDLESS, "--save-steps", "20", "--no-summaries")
    wait_until(lambda: list(tmp_path.glob("m/model.ckpt-*.manifest")), "nothing was saved")
    assert len(processes_with(str(tmp_path / "m"))) > 4
    process.kill()
    wait_until(lambda: not processes_with(str(tmp_path / "m")), "some still run")


@pytest.mark.parametrize("flags", [[], ["--cluster.mode", "sync"], ["--launch", "ray"]])
def test_a_run_that_failed_prints_its_last_checkpoint_and_the_command_that_resumes(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = LaunchOutcome(status=137, text="worker 1 was killed by SIGKILL")
    monkeypatch.setattr(launch, "run_members", lambda *_, **__: outcome)
    monkeypatch.setattr(launch, "run_members_on_ray", lambda *_, **__: outcome)
    words = ["train", "train.tasks:Clicks", "--launch", "local", "--model-dir", str(tmp_path / "m")]
    words += ["--num-ps", "0" if "sync" in flags else "1", "--num-workers", "2", *flags]
    assert main(words) == 137
    assert "there is no checkpoint yet; this restarts it: monolith train" in capsys.readouterr().err
    Trainer(Clicks(), TrainConfig(model_dir=str(tmp_path / "m"), steps=1)).train()
    assert main(words) == 137
    why, what_to_do = capsys.readouterr().err.splitlines()[-2:]
    assert why == "monolith: worker 1 was killed by SIGKILL"
    command = shlex.join(["monolith", *words])
    assert what_to_do == (
        f"monolith: the last checkpoint is {tmp_path}/m/model.ckpt-1; this resumes from it: {command}"
    )


@pytest.mark.soak
def test_a_member_that_fails_ends_the_run_and_is_named(start: Any, tmp_path: Path) -> None:
    process = start("--set", "batchez=3")
    assert process.wait(LIMIT) == 2
    why, what_to_do = said(tmp_path).splitlines()[-2:]
    assert " exited with status 2" in why
    assert what_to_do.startswith("monolith: there is no checkpoint yet; this restarts it: monolith train ")
    assert "unknown key batchez" in said(tmp_path)
    assert (tmp_path / "out").read_text() == ""


RAY_TASK = """
from monolith.data import DriftConfig, DriftingStream, Pipeline
from monolith.data.synthetic.drift import SPEC
from monolith.model import DeepFM
from monolith.train import Task


class Clicks(Task):
    def dataset(self, mode):
        return Pipeline(DriftingStream(DriftConfig(examples=160, batch_size=16))).to_batches(SPEC)

    def model(self):
        return DeepFM(SPEC.ids, dim=2, hidden=(4,), threads=1)
"""


def test_a_run_on_ray_finds_itself_and_is_guarded_by_a_token(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(RAY_TASK)
    words = ["train", f"{tmp_path}/mine.py:Clicks", "--launch", "ray", "--ray-address", ray_cluster.address]
    words += ["--num-ps", "1", "--num-workers", "1", "--model-dir", str(tmp_path / "m"), "--json"]
    status = main([*words, "--no-summaries", "--threads", "1"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert json.loads(out)["step"] == 10
    # It listens on the machine's own address, which needs a token: without one it would have been refused.
    assert "parameter server 0 of 1 listens on" in err


# What members are told


def launch_of(options: Any) -> Launch:
    return Launch(kind=options.launch, command=options.words, flags=options.run_flags)


def given(words: list[str], environ: dict[str, str] | None = None) -> list[Any]:
    options = parse_options("train", words[1:], words)
    run = run_of(options, environ or {}, launch.decided_fields(options.launch))
    with members_of(run, launch_of(options), environ or {}, "mark") as members:
        return list(members)


def test_every_flag_is_handed_on_and_each_has_a_place() -> None:
    words = command("--model-dir", "m", "--set", "batches=3", "--train.keep.max-to-keep", "4", "--json")
    members = given(words)
    assert [member.name for member in members] == ["ps 0", "ps 1", "worker 0", "worker 1"]
    for member in members:
        assert member.command[1:3] == ("-m", "monolith")
        options = parse_options("train", member.command[4:])
        assert (options.task, options.launch, options.set) == (TASK, None, ("batches=3",))
        run = run_of(options, {})
        assert (run.cluster.role, run.cluster.index) == (member.role, member.index)
        assert (run.train.keep.max_to_keep, run.cluster.listen, run.discovery.kind) == (
            4,
            "127.0.0.1",
            "files",
        )
        assert not Path(run.discovery.folder or "").exists()  # it is gone with the run


def test_spare_servers_are_started_too_and_all_know_the_run_by_one_id() -> None:
    spare = ("--cluster.num-redundant-ps", "1", "--num_extra_ps", "2")
    members = given(command("--model-dir", "m", *spare))
    assert [member.name for member in members if member.role == "ps"] == [f"ps {index}" for index in range(5)]
    runs = [run_of(parse_options("train", member.command[4:]), {}) for member in members]
    assert {run.cluster.num_ps for run in runs} == {2}
    assert len({run.job.id for run in runs}) == 1
    assert runs[0].job.id


def test_what_is_said_before_the_command_is_handed_on_too() -> None:
    words = ["--log-level", "debug", *command("--model-dir", "m")]
    options = parse_options("train", words[3:], words)
    run = run_of(options, {}, launch.decided_fields("local"))
    with members_of(run, launch_of(options), {}, "mark") as members:
        assert members[0].command[3:6] == ("--log-level", "debug", "train")


def test_only_the_chief_has_the_port_of_metrics_that_was_asked_for() -> None:
    members = given(command("--model-dir", "m", "--metrics-port", "9100"))
    ports = {member.name: parse_options("train", member.command[4:]).metrics_port for member in members}
    assert ports == {"ps 0": 0, "ps 1": 0, "worker 0": 9100, "worker 1": 0}


def test_members_on_this_machine_get_a_token_of_the_run_and_no_command_line_shows_it() -> None:
    members, again = given(command("--model-dir", "m")), given(command("--model-dir", "m"))
    tokens = {member.environment["MONOLITH_RUN_TOKEN"] for member in [*members, *again]}
    assert len(tokens) == 2  # one for each run
    for member in members:
        assert not any(token in word for token in tokens for word in member.command)
        run = run_of(parse_options("train", member.command[4:]), member.environment)
        assert run.security.token is None  # /metrics of this machine are readable as ever


def ray_words(*more: str) -> list[str]:
    words = [
        "train",
        TASK,
        "--launch=ray",
        "--ray_address",
        "auto",
        "--num-ps",
        "1",
        "--num-workers",
        "1",
        "--model-dir",
        "m",
    ]
    return [*words, *more]


def test_members_on_ray_get_a_token_of_the_run_and_the_variables_of_the_launcher() -> None:
    environ = {"MONOLITH_TRAIN__KEEP__MAX_TO_KEEP": "3", "ZK_AUTH": "u:p", "HOME": "/x", "TF_CONFIG": ""}
    members = given(ray_words(), environ)
    again = given(ray_words(), environ)
    tokens = {member.environment["MONOLITH_RUN_TOKEN"] for member in [*members, *again]}
    assert len(tokens) == 2  # one for each run
    for member in members:
        assert {"MONOLITH_TRAIN__KEEP__MAX_TO_KEEP", "ZK_AUTH"} <= member.environment.keys()
        assert not {"HOME", "TF_CONFIG"} & member.environment.keys()
        assert member.command[:3] == ("monolith", "train", TASK)
        assert "auto" not in member.command[:8]
        assert not any(token in word for token in tokens for word in member.command)
        run = run_of(parse_options("train", member.command[2:]), member.environment)
        assert (run.discovery.kind, run.discovery.ray, run.cluster.listen) == ("ray", "auto", "")
        assert run_security(run.security, member.environment).token is not None
    ids = {run_of(parse_options("train", each.command[2:]), {}).job.id for each in members}
    assert len(ids) == 1
    assert ids != {""}


def test_a_run_with_security_settings_keeps_them(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    members = given(ray_words("--security.token-file", str(token), "--job.id", "mine"))
    for member in members:
        assert "MONOLITH_SECURITY__TOKEN" not in member.environment
        assert "mine" in member.command


def test_the_report_is_taken_from_the_chief_alone() -> None:
    report = ChiefReport()
    assert not report.take("worker 0", "a line")
    assert not report.take("worker 1", f"{report.mark} {{}}")
    assert report.found is None
    assert report.take("worker 0", f'{report.mark} {{"step": 3}}')
    assert report.take("worker 0", f'{report.mark} {{"step": 4}}')  # it began again
    assert report.found == {"step": 4}


# What is refused before anybody is started


@pytest.fixture
def nobody_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody was started")

    monkeypatch.setattr(launch, "run_members", fail)
    monkeypatch.setattr(launch, "run_members_on_ray", fail)


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (command(), "set --model-dir"),
        (["train", "--launch", "local", "--num-ps", "1", "--model-dir", "m"], "job.task: name the task"),
        (["train", TASK, "--launch", "local", "--num-workers", "2", "--model-dir", "m"], "(--num-ps)"),
        (command("--model-dir", "m", "--cluster.role", "ps"), "cluster.role: --launch local decides which"),
        (command("--model-dir", "m", "--index", "1"), "cluster.index: --launch local decides which"),
        (command("--model-dir", "m", "--discovery_type=zk"), "discovery.kind: --launch local decides how"),
        (command("--model-dir", "m", "--job.local"), "job.local: a run in one process"),
        (command("--model-dir", "m", "--ray-address", "auto"), "--ray-address needs --launch ray"),
        (command("--model-dir", "m", "--enable_realtime_training"), "say where to publish, as publish.to"),
        (command("--model-dir", "m", "--train.keep.max-to-keep", "x"), "train.keep.max_to_keep"),
        (command("--model-dir", "m", "--checkpoint.keep", "3"), "is train.keep.max_to_keep"),
        (["train", TASK, "--ray-address", "auto"], "--ray-address needs --launch ray"),
        (["train", TASK, "--launch", "cloud"], "--launch"),
    ],
)
def test_a_run_that_makes_no_sense_starts_no_process(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_registry_in_the_file_is_no_hindrance(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[discovery]\nkind = "zookeeper"\n[cluster]\nrole = "ps"\nindex = 1\n')
    members = given(command("--model-dir", "m", "--config", str(file)))
    run = run_of(parse_options("train", members[-1].command[4:]), {})
    assert (run.discovery.kind, run.cluster.role, run.cluster.index) == ("files", "worker", 1)


def test_discovery_through_ray_needs_a_name_and_meets_under_it(ray_cluster: RayCluster) -> None:
    from monolith.errors import ConfigError

    with pytest.raises(ConfigError, match=r"job\.id, or job\.name"):
        open_discovery(load_run_config(code={"discovery.kind": "ray"}), {})
    code = {"discovery.kind": "ray", "discovery.ray": ray_cluster.address, "job.id": "launching-test"}
    config = load_run_config(code=code)
    with open_discovery(config, {}) as one, open_discovery(config, {}) as other:
        assert one is not None
        assert other is not None
        one.register("ps", 0, "127.0.0.1:1")
        assert other.query("ps") == {0: "127.0.0.1:1"}
