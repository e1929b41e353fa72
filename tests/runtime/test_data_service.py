"""The data service of a run: every process of it is started by the same command."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from services import warm
from services.servers import free_port, wait_until
from train.tasks import Clicks

from monolith.cluster.run_token import RUN_TOKEN, TOKEN_FILE, read_token, user_security
from monolith.cluster.security import SecurityConfig, derive_token
from monolith.cluster.status import ProcessStatus, StatusBoard
from monolith.config import Secret
from monolith.data import DataConfig, DataServiceConfig, DriftConfig, DriftingStream, Pipeline
from monolith.data.formats import ParquetFormat
from monolith.data.synthetic.drift import SPEC
from monolith.errors import ConfigError
from monolith.runtime.cluster_config import ClusterConfig, DiscoveryConfig
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.data_service import data_security, dispatch, secured, state_folder, stopped_with_chief
from monolith.runtime.launch import extra_members
from monolith.train import Mode, TrainConfig

pytest.importorskip("pyarrow")
SECONDS = 300.0
FILES, BATCHES, BATCH = 6, 5, 32
NO_FILES = DataConfig()


@dataclass(frozen=True)
class FromFiles(Clicks):
    """Reads files, and knows nothing of a data service."""

    data: DataConfig = NO_FILES
    seconds: float = 0.0
    """How long each batch takes."""

    def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
        return Pipeline(self.data.source(batch_size=BATCH)).map(self._slowly).to_batches(SPEC)

    def _slowly(self, records: Any) -> Any:
        time.sleep(self.seconds)
        return records


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    stream = iter(DriftingStream(DriftConfig(examples=FILES * BATCHES * BATCH, batch_size=BATCHES * BATCH)))
    for number, records in enumerate(stream):
        with ParquetFormat().writer(str(folder / f"{number}.parquet")) as file:
            file.write(records)
    return folder


class MlpJob:
    """The processes that MLP starts, on this machine."""

    def __init__(self, folder: Path, files: Path) -> None:
        self.folder = folder
        self._files = files
        self._names = [("worker", 0), ("dispatcher", 0), ("dsworker", 0)]
        self._ports = {name: free_port() for name in self._names}
        self.running: dict[tuple[str, int], warm.Popen] = {}

    def start(self, role: str, index: int = 0, *flags: str) -> warm.Popen:
        environ = {name: text for name, text in os.environ.items() if not name.startswith("MLP_")}
        environ |= {"MLP_ROLE": role, "MLP_ROLE_INDEX": str(index), "MLP_PORT": str(self._ports[role, index])}
        for name, number in self._names:
            prefix = f"MLP_{name.upper()}"
            count = sum(one == name for one, _ in self._names)
            environ |= {
                f"{prefix}_NUM": str(count),
                f"{prefix}_{number}_PRIMARY_HOST": "127.0.0.1",
                f"{prefix}_{number}_PORT": str(self._ports[name, number]),
            }
        with (self.folder / f"{role}-{index}.log").open("a") as log:
            self.running[role, index] = warm.Popen(
                [
                    *(
                        "-m",
                        "monolith",
                        "train",
                        "runtime.test_data_service:FromFiles",
                        "--dataset_use_dataservice",
                    ),
                    *("--model-dir", str(self.folder / "model"), "--data.path", str(self._files)),
                    *("--data.pattern", "*.parquet", "--json", "--no-summaries", *flags),
                ],
                stdout=log,
                stderr=log,
                env=environ,
            )
        return self.running[role, index]

    def said(self, role: str, index: int = 0) -> str:
        path = self.folder / f"{role}-{index}.log"
        return path.read_text() if path.exists() else ""

    def report(self) -> dict[str, Any]:
        [line] = [line for line in self.said("worker").splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait(SECONDS)


@pytest.fixture
def job(tmp_path: Path, files: Path) -> Iterator[MlpJob]:
    found = MlpJob(tmp_path, files)
    yield found
    found.stop()


def test_every_process_that_mlp_starts_finds_its_place_and_all_records_are_trained_once(job: MlpJob) -> None:
    job.start("dispatcher")
    worker = job.start("worker", 0, "--set", "seconds=0.1", "--num_extra_dsworker_on_gpu_worker=1")

    def ready(role: str, says: str) -> bool:
        return says in job.said(role) or worker.poll() is not None

    wait_until(lambda: ready("worker", "data worker 1 listens on"), "the extra one reads", SECONDS)
    # Another one that reads is killed while the worker trains: the first reads what it had.
    job.start("dsworker")
    wait_until(lambda: ready("dsworker", "listens on 127"), "the data worker reads", SECONDS)
    job.running["dsworker", 0].kill()
    assert job.running["worker", 0].wait(SECONDS) == 0, job.said("worker")
    assert job.report()["examples"] == FILES * BATCHES * BATCH
    assert re.search(r"\[data_worker 1 pid \d+\] data worker 1 ended", job.said("worker"))
    # Who dispatched for it has nothing more to do.
    assert job.running["dispatcher", 0].wait(SECONDS) == 0, job.said("dispatcher")


def test_a_misspelled_role_ends_with_what_it_may_have_meant(job: MlpJob) -> None:
    job._ports["dispacher", 0] = free_port()
    assert job.start("dispacher").wait(SECONDS) == 2
    assert "did you mean dispatcher" in job.said("dispacher")


# The pieces


def status(state: str = "training") -> ProcessStatus:
    now = time.time()
    return ProcessStatus(role="worker", index=0, state=state, time=now, every=2.0, started=now)


def test_a_data_worker_stops_when_the_chief_has_ended_and_not_before_it_has_begun(
    tmp_path: Path,
) -> None:
    stop, board = threading.Event(), StatusBoard(str(tmp_path))
    with stopped_with_chief(stop, str(tmp_path), every=0.01) as watch:
        assert not stop.wait(0.1)
        board.write(status())
        assert not stop.wait(0.1)
        board.remove("worker", 0)
        assert stop.wait(SECONDS)
    watch.join(SECONDS)


def test_a_dispatcher_known_by_its_address_alone_listens_there_and_needs_no_registry(tmp_path: Path) -> None:
    address, said = f"127.0.0.1:{free_port()}", list[str]()
    flags = ("--cluster.role", "dispatcher", "--data_service.dispatcher", address)
    config = load_run_config(args=[*flags, "--model_dir", str(tmp_path)])
    assert config.discovery.kind == "consul"
    run: Any = SimpleNamespace(environ={}, output=SimpleNamespace(say=said.append))
    task_data: Any = SimpleNamespace(config=SimpleNamespace(files=lambda: ["a.csv"]), epochs=1)
    status: Any = SimpleNamespace(watch_reader=lambda *_: None)
    stop = threading.Event()
    stop.set()
    with ExitStack() as open_things:
        dispatch(task_data, config, run, status=status, stop=stop, open_things=open_things)
    assert said[0] == f"dispatcher listens on {address}"


def test_the_dispatcher_keeps_its_state_on_a_disk_of_its_own() -> None:
    def of(model_dir: str, folder: str | None = None) -> RunConfig:
        service = DataServiceConfig(enabled=True, folder=folder)
        return RunConfig(train=TrainConfig(model_dir=model_dir), data_service=service)

    assert state_folder(of("/m")) == "/m/data_service"
    assert state_folder(of("memory://m", "/here")) == "/here"
    with pytest.raises(ConfigError, match="name a local folder"):
        state_folder(of("memory://m"))


def test_a_worker_starts_extra_data_workers_on_the_ports_that_mlp_leaves_for_them() -> None:
    environ = {
        "MLP_ROLE": "worker",
        "MLP_PORT": "2000",
        "MLP_WORKER_NUM": "1",
        "MLP_DSWORKER_NUM": "3",
        "MLP_WORKER_0_PRIMARY_HOST": "10.0.0.7",
        "MLP_WORKER_0_PORT": "2000",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    run = RunConfig(
        cluster=ClusterConfig(index=1, num_workers=2, num_ps=1),
        train=TrainConfig(model_dir="m"),
        discovery=DiscoveryConfig(kind="mlp"),
        data_service=DataServiceConfig(enabled=True, extra_workers=2),
    )
    words = ("train", "tasks:Mine", "--discovery_type", "mlp", "--index=1")
    members = extra_members(run, words, environ, lambda: "d:5")
    # Two ranks have 2000 and 2001, the first's extra data workers 2002 and 2003.
    ports = [member.command[member.command.index("--cluster.port") + 1] for member in members]
    assert ports == ["2004", "2005"]
    assert [member.name for member in members] == ["data_worker 5", "data_worker 6"]
    for member in members:
        assert member.command[3:6] == ("train", "tasks:Mine", "--cluster.role")  # said once
        assert member.command[member.command.index("--data_service.dispatcher") + 1] == "d:5"
        assert member.command[member.command.index("--cluster.role") + 1] == "data_worker"
        assert not any(member.environment[name] for name in environ)  # no rank, and none of MLP's
        assert RUN_TOKEN not in member.environment
    assert extra_members(RunConfig(), words, {}, lambda: "d:5") == []


def test_processes_of_a_named_data_service_share_the_token_of_their_user(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), RUN_TOKEN: "of-the-launcher"}
    named = DataServiceConfig(enabled=True, dispatcher="127.0.0.1:5", extra_workers=1)
    model_dir = str(tmp_path / "m")
    trainer = RunConfig(data_service=named, train=TrainConfig(model_dir=model_dir))
    found = data_security(trainer, environ)
    assert found == user_security(SecurityConfig(), environ)
    [extra] = extra_members(replace(trainer, security=found), ("train", "x"), environ, lambda: "d:5")
    reader = replace(trainer, cluster=ClusterConfig(role="data_worker"))
    assert data_security(reader, {**environ, **extra.environment}) == found
    own = replace(trainer, data_service=DataServiceConfig(enabled=True))
    assert data_security(own, {}).token == read_token(tmp_path / "m" / TOKEN_FILE)


def test_followers_of_a_launched_run_find_a_token_in_its_folder_that_is_not_the_launchers(tmp_path) -> None:
    code = {"publish.to": "grpc://127.0.0.1:0", "train.model_dir": str(tmp_path)}
    environ = {RUN_TOKEN: "of-the-launcher"}
    run = secured(load_run_config(code=code), environ)
    assert run.security.token == Secret("of-the-launcher")
    assert run.security.follow_token == derive_token(read_token(tmp_path / TOKEN_FILE), "follow")
    given = load_run_config(code={**code, "security.token": "given"})
    assert secured(given, environ).security == given.security
