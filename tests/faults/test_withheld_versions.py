"""Labels go wrong while a run trains, exports and publishes: no server serves a version of the bad steps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.poisoned_clicks import ALLOWED, BAD_FROM, asked
from serve.server.serving import ask_http
from services import warm

from monolith.errors import MonolithError
from monolith.runtime.publish_pause import PauseFile
from monolith.serve import Predictor
from monolith.serve.versions import list_versions, withheld_versions
from monolith.train.hooks import ControlClient

TASK, MODEL = "faults.poisoned_clicks:PoisonedClicks", "poisoned_clicks"
TESTS = Path(__file__).parents[1]
PATIENCE = 60
SAVE_EVERY = 10
FLAGS = (
    *("--train.save.steps", str(SAVE_EVERY), "--export.when-saving", "--export.keep", "4"),
    *("--publish.interval", "20ms", "--publish.dense-interval", "50ms"),
    *(
        "--publish.guard.window",
        "256",
        "--publish.guard.warm-up",
        "1024",
        "--no-summaries",
        "--quiet",
        "--log-level",
        "info",
    ),
)


def until(condition: Any, what: str = "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class PoisonedRun:
    """A trainer process that goes as far as it is allowed to."""

    def __init__(self, folder: Path, *flags: str, root: str = "") -> None:
        self.model_dir, self.log = str(folder / "run"), str(folder / "log")
        self.exports = str(folder / "run" / "exported_models")
        self._root = f"{self.exports}/{root}"
        self._allowed = folder / "allowed"
        self.reached = 0
        self.allow(0)
        self._process = warm.Popen(
            [
                "-m",
                "monolith",
                "train",
                TASK,
                "--model-dir",
                self.model_dir,
                "--publish.to",
                self.log,
                *FLAGS,
                *flags,
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                ALLOWED: str(self._allowed),
            },
        )

    def allow(self, step: int) -> None:
        part = self._allowed.with_suffix(".part")
        part.write_text(str(step))
        part.replace(self._allowed)

    def versions(self) -> list[str]:
        return list_versions(self._root)

    def withheld(self) -> list[str]:
        return list(withheld_versions(self._root, self.versions()))

    def newest(self) -> int:
        return max(map(int, self.versions()), default=0)

    def train_on(self, exports: int) -> str:
        """Train until so many more versions are exported; return the newest."""
        for _ in range(exports):
            before = self.newest()
            self.reached = max(self.reached, before) + SAVE_EVERY
            while self.newest() == before:
                self.allow(self.reached)
                assert self._process.poll() is None, "the run has ended"
                time.sleep(0.3)
                self.reached += 1  # a save that is due waits for the one before it, and for another step
        return str(self.newest())

    def train_until_paused(self) -> None:
        """Train on until publishing is paused."""
        step = max(self.reached, BAD_FROM)
        while PauseFile(self.model_dir).read() is None:
            step += 1
            self.allow(step)
            time.sleep(0.06)
            assert step < 300
        self.reached = step

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class ServeProcess:
    """`monolith serve` of the exports of a run."""

    def __init__(self, stack: ExitStack, run: PoisonedRun, *flags: str) -> None:
        words = ["-m", "monolith", "serve", run.exports, "--port", "0", "--poll", "0.05", *flags]
        self._process = warm.Popen(words, stdout=warm.PIPE)
        stack.callback(self.close)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("http"):
                self._port = int(line.split()[1].rpartition(":")[2])
            elif line.startswith(("ask it", "rows")):
                break

    def index(self) -> dict[str, tuple[str, str]]:
        """Return version -> state and reason."""
        lines = ask_http(self._port, "POST", "/v2/repository/index", {})[1]
        return {line["version"]: (line["state"], line.get("reason", "")) for line in lines}

    @property
    def version(self) -> str:
        """The version that answers a request."""
        status, answer, _ = ask_http(self._port, "POST", f"/v2/models/{MODEL}/infer", asked())
        assert status == 200, answer
        return str(answer["model_version"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


def publish(run: PoisonedRun, action: str, **more: str) -> None:
    with ControlClient(run.model_dir) as job:
        job.publish(action, **more)


@pytest.mark.soak
def test_no_server_serves_a_version_of_the_bad_steps(stack: ExitStack, tmp_path: Path) -> None:
    run = PoisonedRun(tmp_path)
    stack.callback(run.close)
    good = run.train_on(5)
    assert int(good) < BAD_FROM
    follow = ("--follow", run.log)
    servers = [ServeProcess(stack, run, *follow), ServeProcess(stack, run)]
    assert [one.version for one in servers] == [good] * 2

    # The guard pauses publishing; versions from the first bad step on are withheld, old and new.
    run.train_until_paused()
    kept = PauseFile(run.model_dir).read()
    assert kept is not None
    assert kept.by_guard
    assert kept.first_bad_step is not None
    assert kept.first_bad_step <= BAD_FROM, "the guard must not take a bad step for a good one"
    last = run.train_on(5)  # more than are kept
    assert [one for one in run.versions() if int(one) >= BAD_FROM] == run.withheld()
    newest_good = str(max(int(one) for one in run.versions() if one not in run.withheld()))
    assert int(newest_good) < BAD_FROM

    late = [ServeProcess(stack, run, *follow), ServeProcess(stack, run)]
    assert [one.version for one in late] == [newest_good] * 2
    servers += late
    for server in servers:
        until(lambda server=server: server.version == newest_good, "a withheld version is served")
        until(lambda server=server: last in server.index())
        state, reason = server.index()[last]
        assert state == "UNAVAILABLE"
        assert reason.startswith("withheld: ")
    with Predictor(run.exports, show=False) as predictor:
        assert predictor.version == newest_good
    with pytest.raises(MonolithError, match="--serve-withheld"):
        Predictor(f"{run.exports}/{last}", show=False)
    assert ServeProcess(stack, run, "--serve-withheld", last).version == last

    # An operator resumes: what comes from now on is served, what was withheld stays so.
    publish(run, "resume")
    good = run.train_on(1)
    for server in servers:
        until(lambda server=server: server.version == good, "the resumed run is not served")
    assert last in run.withheld()

    # A rollback withholds all later versions, until they are released.
    later = run.train_on(1)
    publish(run, "rollback", version=good)
    assert ServeProcess(stack, run).version == good
    for server in servers:
        until(lambda server=server: server.version == good, "a version later than the rollback is served")
    publish(run, "resume")
    assert later in run.withheld()
    publish(run, "release")
    assert run.withheld() == []
    until(lambda: servers[1].version == later)


@pytest.mark.soak
def test_no_entry_and_no_serving_server_serves_a_version_of_the_bad_steps(
    stack: ExitStack, tmp_path: Path
) -> None:
    run = PoisonedRun(tmp_path, "--export.shards", "2", root="entry")
    stack.callback(run.close)
    good = run.train_on(5)
    found = ("--discovery", f"files://{tmp_path}/registry")

    def start() -> ServeProcess:
        for shard in ("0", "1"):
            ServeProcess(stack, run, "--role", "ps", "--shard", shard, *found)
        return ServeProcess(stack, run, "--role", "entry", *found)

    entry = start()
    until(lambda: entry.version == good)
    run.train_until_paused()
    last = run.train_on(5)
    kept = PauseFile(run.model_dir).read()
    assert kept is not None
    assert kept.first_bad_step is not None
    assert kept.first_bad_step <= BAD_FROM
    assert run.withheld() == [one for one in run.versions() if int(one) >= kept.first_bad_step]
    for shard in ("ps_0", "ps_1"):  # each part of a version is withheld, not the entry's alone
        root = f"{run.exports}/{shard}"
        assert last in withheld_versions(root, list_versions(root))
    newest_good = str(max(int(one) for one in run.versions() if one not in run.withheld()))
    until(lambda: entry.version == newest_good, "a withheld version is served")
    publish(run, "resume")
    good = run.train_on(1)
    until(lambda: entry.version == good, "the resumed run is not served")
