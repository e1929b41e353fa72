"""What one process of a run does: it serves, or it trains with others; and whom it tells."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from services import warm

import monolith.runtime
from monolith.cli import train as command
from monolith.cli.main import parse_options
from monolith.cluster import FilesConfig, FilesDiscovery, Waiting
from monolith.cluster.security import guard_caller
from monolith.errors import ConfigError, DeadlineExceededError, UnavailableError
from monolith.observe import Metrics
from monolith.runtime import attempts
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.context import Output
from monolith.runtime.parameter_server import ServerEnd
from monolith.runtime.process import StoppedWhileWaitingError, Stopper, reported_outcome, serve_metrics
from monolith.train import Hook

TASK = "train.tasks:Clicks"
TESTS = Path(__file__).parents[1]


def words(tmp_path: Path, *more: str) -> list[str]:
    found = [TASK, "--model-dir", str(tmp_path / "m"), "--num-ps", "1", "--discovery.kind", "files"]
    return [*found, "--discovery.folder", str(tmp_path / "d"), "--no-summaries", *more]


def run(tmp_path: Path, *more: str, environ: dict[str, str] | None = None) -> int:
    return command.run(parse_options("train", words(tmp_path, *more)), environ or {})


# A parameter server


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a server is asked to do, in place of doing it."""
    asked: list[dict[str, Any]] = []

    def serve(task: Any, config: Any, discovery: Any, **given: Any) -> ServerEnd:
        asked.append({"task": task, "config": config, "discovery": discovery, **given})
        return ServerEnd("the run is over", finished=True)

    monkeypatch.setattr(monolith.runtime, "serve_parameters", serve)
    return asked


def test_a_server_is_told_its_share_and_where_to_listen(
    tmp_path: Path, served: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--cluster.role", "ps", "--num-workers", "3", "--cluster.listen", "127.0.0.1"]
    assert run(tmp_path, *more, "--cluster.port", "4321", "--set", "dim=2") == 0
    (asked,) = served
    cluster = asked["config"].cluster
    assert (cluster.index, cluster.num_ps, cluster.num_workers) == (0, 1, 3)
    assert (asked["port"].host, asked["port"].port) == ("127.0.0.1", 4321)
    assert asked["task"].dim == 2
    assert asked["config"].train.model_dir == str(tmp_path / "m")
    assert isinstance(asked["discovery"], FilesDiscovery)
    out, err = capsys.readouterr()
    assert out == ""
    assert "parameter server 0 ended: the run is over" in err


def test_a_server_that_others_can_reach_needs_a_token_or_certificates(
    tmp_path: Path, served: list[dict[str, Any]]
) -> None:
    more = ["--cluster.role", "ps"]
    environ = {"CLOUDNATIVE_INET_ADDR": "10.0.0.7"}
    with pytest.raises(ConfigError, match=r"cannot listen on 10\.0\.0\.7: others can reach it"):
        run(tmp_path, *more, environ=environ)
    assert served == []
    assert run(tmp_path, *more, environ={**environ, "MONOLITH_SECURITY__TOKEN": "t"}) == 0
    assert served[0]["port"].host == "10.0.0.7"
    assert served[0]["port"].guard.header == "Bearer t"


def test_a_server_listens_where_tf_config_says(tmp_path: Path, served: list[dict[str, Any]]) -> None:
    cluster = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2", "127.0.0.1:3"]}
    tf_config = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}})
    options = parse_options("train", [TASK, "--model-dir", str(tmp_path)])
    assert command.run(options, {"TF_CONFIG": tf_config}) == 0
    told = served[0]["config"].cluster
    assert (told.index, told.num_ps, told.num_workers) == (1, 2, 1)
    assert (served[0]["port"].host, served[0]["port"].port) == ("127.0.0.1", 3)


def test_a_signal_ends_a_server_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: Any, stop: threading.Event, **__: Any) -> ServerEnd:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(30)
        return ServerEnd("stopped")

    monkeypatch.setattr(monolith.runtime, "serve_parameters", serve)
    assert run(tmp_path, "--cluster.role", "ps", "--cluster.listen", "127.0.0.1") == 143


def test_a_server_of_a_run_that_is_not_finished_wants_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monolith.runtime, "serve_parameters", lambda *_, **__: ServerEnd("stopped"))
    assert run(tmp_path, "--cluster.role", "ps", "--cluster.listen", "127.0.0.1") == os.EX_TEMPFAIL


def test_how_long_a_server_waits_for_others_is_a_setting(
    tmp_path: Path, served: list[dict[str, Any]]
) -> None:
    more = ["--timeouts.start", "5m", "--timeouts.silence", "6s", "--timeouts.abandoned", "7m"]
    run(tmp_path, *more, "--cluster.role", "ps", "--cluster.listen", "127.0.0.1")
    timeouts = served[0]["config"].timeouts
    assert timeouts.start == timedelta(minutes=5)
    assert timeouts.silence == timedelta(seconds=6)
    assert timeouts.abandoned == timedelta(minutes=7)


# A worker


def test_a_worker_joins_with_what_the_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []

    def join(_: Any, config: RunConfig, **__: Any) -> Any:
        asked.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(attempts, "join_fleet", join)
    more = ["--num-workers", "3", "--cluster.index", "2", "--job.id", "run7", "--timeouts.start", "5m"]
    more += ["--timeouts.lookup", "8s"]
    with pytest.raises(ConfigError, match="enough"):
        run(tmp_path, *more, "--timeouts.finish", "6m", "--timeouts.operation", "7s", "--security.token", "t")
    (given,) = asked
    cluster, timeouts = given.cluster, given.timeouts
    assert (cluster.index, cluster.num_ps, cluster.num_workers, given.job.id) == (2, 1, 3, "run7")
    assert (timeouts.start, timeouts.finish) == (timedelta(minutes=5), timedelta(minutes=6))
    assert (timeouts.operation, timeouts.lookup) == (timedelta(seconds=7), timedelta(seconds=8))
    guard = guard_caller(given.security)
    assert guard is not None
    assert (guard.header, given.train.model_dir) == ("Bearer t", str(tmp_path / "m"))


def test_a_signal_ends_a_worker_that_waits_for_servers(tmp_path: Path) -> None:
    with warm.Popen(
        ["-m", "monolith", "train", *words(tmp_path)],
        stderr=warm.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "waiting for ps: 0 of 1" in line:
                    process.send_signal(signal.SIGTERM)
                    break
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143


def waiting(found: int, seconds: float) -> Waiting:
    return Waiting("ps", found, 3, timedelta(seconds=seconds))


def test_a_wait_for_processes_is_reported_now_and_then() -> None:
    said: list[str] = []
    stopper = Stopper(Output(say=said.append))
    for found, seconds in ((0, 0), (0, 5), (1, 6), (1, 10), (1, 30)):
        stopper.check(waiting(found, seconds))
    assert [line[:22] for line in said] == [
        "waiting for ps: 0 of 3",
        "waiting for ps: 1 of 3",
        "waiting for ps: 1 of 3",
    ]


class Stopped:
    """A trainer of which only `stop` is called."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a_request_to_stop_reaches_the_current_or_the_next_training() -> None:
    stopper = Stopper(Output())
    first, second = Stopped(), Stopped()
    stopper.use(first)  # type: ignore[arg-type]
    assert first.reasons == []
    stopper("SIGINT")
    stopper.use(second)  # type: ignore[arg-type]
    assert (first.reasons, second.reasons) == (["SIGINT"], ["SIGINT"])
    with pytest.raises(StoppedWhileWaitingError, match="SIGINT"):
        stopper.check(waiting(0, 0))


@pytest.mark.soak
def test_one_server_and_one_worker_train_in_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Look(Hook):
        def after_step(self, run: Any, result: Any) -> None:  # noqa: ARG002
            if result.step == 2:
                with FilesDiscovery(FilesConfig(folder=str(tmp_path / "d"))) as discovery:
                    seen.extend(discovery.query("ps").values())

    from train.tasks import Clicks

    monkeypatch.setattr(Clicks, "hooks", lambda _, mode: [Look()])  # noqa: ARG005
    with warm.Popen(
        [
            *("-m", "monolith", "train", *words(tmp_path)),
            *("--cluster.role", "ps", "--cluster.listen", "127.0.0.1"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
    ) as server:
        try:
            assert run(tmp_path, "--json", "--set", "batches=4", "--job.submitted-at", "1") == 0
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert len(seen) == 1
    assert seen[0].startswith("127.0.0.1:")


# Features only


def test_features_are_written_in_place_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [TASK, "--model-dir", str(tmp_path), "--only_feature_engineering", "--set", "batches=3"]
    assert command.run(parse_options("train", flags), {}) == 0
    assert "3 batches of features in" in capsys.readouterr().err
    assert list((tmp_path / "features").iterdir())
    assert not list(tmp_path.glob("*.manifest"))


def test_the_first_step_to_profile_can_be_said(tmp_path: Path) -> None:
    flags = [TASK, "--model-dir", str(tmp_path), "--profile.from-step", "3", "--steps", "15", "--quiet"]
    assert command.run(parse_options("train", [*flags, "--no-summaries"]), {}) == 0
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps_3_13.json"]
    with pytest.raises(ConfigError, match=r"profile\.from_step: a profile is a file in the model_dir"):
        command.run(parse_options("train", [TASK, "--profile.from-step", "3"]), {})


# Metrics


def metrics_config(**values: Any) -> RunConfig:
    return load_run_config(code={"metrics.port": 0, **values})


def test_metrics_are_served_only_on_request() -> None:
    assert serve_metrics(Metrics(), load_run_config()) is None
    metrics = Metrics()
    served = serve_metrics(metrics, metrics_config(**{"train.model_name": "m", "cluster.kind": "tide"}))
    assert served is not None
    with served, urllib.request.urlopen(served.url, timeout=10) as answer:
        text = answer.read().decode()
    assert 'monolith_run_info{cluster_type="tide",model_name="m",role="worker"} 1.0' in text


def test_metrics_on_an_address_of_others_need_a_token_or_certificates() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 0\.0\.0\.0: others can reach it"):
        serve_metrics(Metrics(), metrics_config(**{"metrics.host": "0.0.0.0"}))
    open_to_friends = metrics_config(**{"metrics.host": "0.0.0.0", "security.token": "t"})
    served = serve_metrics(Metrics(), open_to_friends)
    assert served is not None
    url = f"http://127.0.0.1:{served.port}/metrics"
    with served:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=10)
        request = urllib.request.Request(url, headers={"Authorization": "Bearer t"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert b"monolith_run_info" in answer.read()


def test_metrics_are_served_by_tls_where_the_run_has_certificates(certificates: Path) -> None:
    security = {
        f"security.{name}": certificates / file
        for name, file in (("cert", "ca-node.crt"), ("key", "ca-node.key"), ("ca", "ca.crt"))
    }
    served = serve_metrics(Metrics(), metrics_config(**security))
    assert served is not None
    with served:
        assert served.url.startswith("https://")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(served.url.replace("https", "http"), timeout=10)


def test_flags_say_where_metrics_are_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [TASK, "--steps", "1", "--metrics-port", "0", "--metrics-host", "localhost", "--quiet"]
    assert command.run(parse_options("train", flags), {}) == 0
    assert re.search(r"metrics on http://(127\.0\.0\.1|\[::1\]):\d+/metrics", capsys.readouterr().err)
    with pytest.raises(ConfigError, match="others can reach it"):
        command.run(parse_options("train", [*flags, "--metrics-host", "0.0.0.0"]), {})
    assert list(tmp_path.iterdir()) == []


# YARN


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[list[tuple[str, str]], dict[str, str]]]:
    """What an application master is told, over real gRPC, and the variables that lead to it."""
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    from monolith.wire import primus_am_service_pb2 as pb

    told: list[tuple[str, str]] = []

    def handler(name: str, request: Any, response: Any) -> Any:
        def answer(given: Any, _: Any) -> Any:
            told.append((name, getattr(given, "diagnose", "")))
            return response()

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    handlers = {
        "kill": handler("kill", pb.KillRequest, pb.KillResponse),
        "succeed": handler("succeed", pb.SucceedRequest, pb.SucceedResponse),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("primus.AppMasterService", handlers),)
    )
    assert server.add_insecure_port(f"unix:{tmp_path}/am")
    server.start()
    yield told, {"PRIMUS_AM_RPC_HOST": "unix", "PRIMUS_AM_RPC_PORT": f"{tmp_path}/am"}
    server.stop(None).wait()


def test_the_chief_reports_success(master: Any) -> None:
    told, environ = master
    with reported_outcome(RunConfig(), environ):
        pass
    assert told == [("succeed", "")]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError("no servers"), "UnavailableError: no servers"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (SystemExit(143), "SystemExit: 143"),
    ],
)
def test_no_end_but_a_clean_one_is_a_success(master: Any, error: BaseException, reason: str) -> None:
    told, environ = master
    with pytest.raises(type(error)), reported_outcome(RunConfig(), environ):
        raise error
    assert told == [("kill", reason)]


def test_a_chief_that_was_stopped_has_not_succeeded(master: Any) -> None:
    told, environ = master
    with reported_outcome(RunConfig(), environ) as outcome:
        outcome.problem = "stopped"
    assert told == [("kill", "stopped")]


def test_only_the_chief_reports_and_only_where_there_is_a_master(master: Any) -> None:
    told, environ = master
    worker = load_run_config(
        code={"cluster.index": 1, "cluster.num_workers": 2, "train.model_dir": "m", "job.id": "i"}
    )
    with reported_outcome(worker, environ), reported_outcome(RunConfig(), {}):
        pass
    assert told == []


def test_a_chief_that_cannot_join_kills_the_job(
    tmp_path: Path, master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, environ = master

    def join(*_: Any, **__: Any) -> Any:
        raise DeadlineExceededError("servers did not come")

    monkeypatch.setattr(attempts, "join_fleet", join)
    with pytest.raises(DeadlineExceededError):
        run(tmp_path, environ=environ)
    assert told == [("kill", "DeadlineExceededError: servers did not come")]
