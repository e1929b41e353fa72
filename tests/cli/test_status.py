"""`monolith status watch`: where it finds a run, what it prints, and what it says when there is none."""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from services import warm

from monolith.cli.main import main
from monolith.cli.options.jobs import TopOptions
from monolith.cli.status import FolderSource, UrlSource, watch
from monolith.cluster.security import SecurityConfig
from monolith.cluster.status import JobStatus, ProcessStatus, StatusBoard
from monolith.errors import ConfigError, UnavailableError
from monolith.observe import Metrics

TESTS = Path(__file__).parents[1]


def process(role: Any = "worker", index: int = 0, **more: Any) -> ProcessStatus:
    known = {"state": "training", "time": time.time(), "every": 2.0, "started": time.time()}
    return ProcessStatus(role=role, index=index, **(known | more))


# A folder


def test_one_frame_of_a_folder_is_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StatusBoard(str(tmp_path)).write(process(job="clicks", examples_per_s=1234.0))
    assert main(["status", "watch", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 workers" in out
    assert re.search(r"^worker 0 .* training +1,234", out, re.MULTILINE)
    assert "\x1b" not in out


def test_one_json_object_is_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StatusBoard(str(tmp_path)).write(process(rows=5))
    assert main(["status", "watch", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["processes"]
    assert (found["role"], found["index"], found["rows"]) == ("worker", 0, 5)


def test_status_prints_the_job_once_with_failed_saves_and_the_window_without_a_standby(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = StatusBoard(str(tmp_path))
    board.write(process(job="clicks", num_ps=60, step=1200))
    for index in range(60):
        board.write(process("ps", index, num_ps=60, state="serving"))
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 workers, 60 of 60 servers  step 1,200" in shown
    assert "ps 59" in shown, "all of them: a script cannot scroll"
    missing = "shard 3 has no standby for 12 s; its loss would go back to the checkpoint"
    trouble = "saving fails, attempt 2 of 10, 0 bytes free: cannot write a: No space left on device"
    board.write(process(num_ps=60, step=1300, save_trouble=trouble, standbys=missing))
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert trouble in shown
    assert missing in shown
    assert main(["status", str(tmp_path), "--json"]) == 1
    chief = next(one for one in json.loads(capsys.readouterr().out)["processes"] if one["role"] == "worker")
    assert (chief["step"], chief["save_trouble"], chief["standbys"]) == (1300, trouble, missing)
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--once", "--json"])
def test_a_job_with_a_process_in_trouble_is_told_by_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    StatusBoard(str(tmp_path)).write(process(time=time.time() - 600))
    assert main(["status", "watch", str(tmp_path), how]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "what"),
    [("m", "it has ended"), ("nowhere", "there is no such folder"), ("m/x y", "no such folder")],
)
def test_a_folder_without_a_run_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, what: str
) -> None:
    (tmp_path / "m").mkdir()
    assert main(["status", "watch", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert what in err
    assert "Give the --model-dir of a run that is training" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("flag", "value"), [("--every", "0"), ("--rows", "-1")])
def test_what_makes_no_sense_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "watch", "m", flag, value]) == 2
    assert flag in capsys.readouterr().err


# A URL


@pytest.fixture
def url() -> Iterator[str]:
    job = JobStatus(time=time.time(), processes=(process(),))
    with Metrics().serve(0, pages={"/status": job.to_json}) as served:
        yield f"http://127.0.0.1:{served.port}"


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/status"])
def test_a_url_of_a_process_leads_to_its_status(url: str, path: str) -> None:
    assert [one.name for one in UrlSource(url + path, SecurityConfig()).read().processes] == ["worker 0"]


def test_a_port_that_wants_a_token_is_shown_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobStatus(time=time.time(), processes=(process(),))
    token = tmp_path / "token"
    token.write_text("secret")
    guarded = Metrics().serve(
        0, admits=lambda given: given == "Bearer secret", pages={"/status": job.to_json}
    )
    with guarded as served:
        url = f"http://127.0.0.1:{served.port}"
        assert main(["status", "watch", url, "--once"]) == 2
        assert "wants the run's token; give --token-file" in capsys.readouterr().err
        assert main(["status", "watch", url, "--once", "--token-file", str(token)]) == 0


def test_a_port_without_a_server_is_reported_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics().serve(0) as served:
        port = served.port
    assert main(["status", "watch", f"http://127.0.0.1:{port}"]) == 2
    err = capsys.readouterr().err
    assert "cannot be reached" in err
    assert "Start the run with --metrics-port PORT" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://", "http://user:secret@host:1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give http://host:port"):
        UrlSource(url, SecurityConfig())


def test_a_port_of_something_else_is_told() -> None:
    with Metrics().serve(0) as served, pytest.raises(UnavailableError, match="shows no status of a run"):
        UrlSource(served.url, SecurityConfig()).read()


def test_an_error_of_the_port_is_told() -> None:
    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(UnavailableError, match="answered 503"):
            UrlSource(f"http://127.0.0.1:{server.server_port}", SecurityConfig()).read()


# Watching


class Frames:
    """Keeps what is drawn, as text."""

    size = (120, 40)

    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, picture: RenderableType) -> None:
        file = io.StringIO()
        Console(file=file, width=120).print(picture)
        self.texts.append(" ".join(file.getvalue().split()))


def test_a_job_that_goes_away_is_said_to_have_and_looked_for_until_it_is_back(tmp_path: Path) -> None:
    board = StatusBoard(str(tmp_path))
    board.write(process(state="training"))
    frames = Frames()
    changes = [lambda: board.remove("worker", 0), lambda: board.write(process(state="starting"))]

    def sleep(seconds: float) -> None:
        assert seconds == 3.0
        if not changes:
            raise KeyboardInterrupt
        changes.pop(0)()

    watch(FolderSource(str(tmp_path)), TopOptions(run="m", every=3.0), frames, sleep=sleep)
    first, gone, back = frames.texts
    assert "training" in first
    assert "it has ended" in gone
    assert "trying again every 3 s" in gone
    assert "worker 0" in gone  # what was last known
    assert "starting" in back
    assert "trying again" not in back


# Real runs


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def wait_for(look: Any, seconds: float = 120.0) -> Any:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := look():
            return found
        time.sleep(0.1)
    raise TimeoutError


def test_a_run_on_servers_is_seen_by_its_folder_and_by_a_url_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    model_dir = str(tmp_path / "m")
    words = ["-m", "monolith", "train", "train.tasks:Clicks", "--launch", "local", "--num-ps", "2"]
    words += ["--model-dir", model_dir, "--set", "batches=100000", "--no-summaries", "--metrics-port", "0"]
    words += ["--save-steps", "20", "--metrics.status-every", "0.2s"]
    with warm.Popen(words, stderr=warm.PIPE, stdout=warm.DEVNULL, env=environment()) as launcher:
        try:
            urls: list[str] = []

            def listen() -> None:
                for line in launcher.stderr:
                    if found := re.search(r"worker 0.*metrics on (http://\S+)", line):
                        urls.append(found[1])

            threading.Thread(target=listen, daemon=True).start()

            def whole() -> JobStatus | None:
                job = StatusBoard(model_dir).read()
                chief = [one for one in job.processes if one.role == "worker"]
                servers = [one for one in job.processes if one.role == "ps"]
                known = len(servers) == 2 and all(one.rows for one in servers) and chief
                return job if known and chief[0].examples_per_s and chief[0].saved_at else None

            chief, first, second = wait_for(whole).processes
            assert (chief.num_ps, chief.num_workers, chief.restarts) == (2, 1, 0)
            assert chief.step > 0
            assert chief.staleness is not None
            assert {first.state, second.state} <= {"serving", "saving"}
            assert first.address.startswith("127.0.0.1:")
            assert first.bytes > 0
            capsys.readouterr()
            assert main(["status", "watch", model_dir, "--once"]) in {
                0,
                1,
            }  # a busy machine may keep one from speaking
            assert "workers, " in capsys.readouterr().out
            seen = UrlSource(wait_for(lambda: urls)[0], SecurityConfig()).read()
            assert [one.name for one in seen.processes] == ["worker 0", "ps 0", "ps 1"]
            launcher.terminate()
            launcher.wait(60)
        finally:
            launcher.kill()
    assert not Path(StatusBoard(model_dir).folder).exists()
