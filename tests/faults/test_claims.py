"""What answers claim of their rows, compared with the rows themselves: each says which step wrote it last.

A run is trained, published, killed, restarted from its checkpoint and rolled back, while a server follows it
and is asked without a pause. A claim that its rows break is a failure, however short the moment.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults.step_rows import IDS
from serve.server.serving import ask_http
from services import warm

from monolith.errors import MonolithError
from monolith.serve.versions import list_versions, withheld_versions
from monolith.train.hooks import ControlClient

TESTS = Path(__file__).parents[1]
PATIENCE = 120
TASK, MODEL = "faults.step_rows:StepRows", "step_rows"
FLAGS = (
    *("--train.save.steps", "60", "--export.when-saving", "--export.keep", "6"),
    *(
        "--publish.interval",
        "20ms",
        "--publish.dense-interval",
        "100ms",
        "--no-summaries",
        "--quiet",
        "--log-level",
        "info",
    ),
)
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def until(condition: Any, what: str = "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


class StepRun:
    """`monolith train` of the task, which is killed and restarted."""

    def __init__(self, stack: ExitStack, folder: Path, *flags: str) -> None:
        self.model_dir = str(folder / "run")
        self.exports = str(folder / "run" / "exported_models")
        self.url = str(folder / "log")
        where = ("--model-dir", self.model_dir, "--publish.to", self.url)
        self._words = ["-m", "monolith", "train", TASK, *FLAGS, *where, *flags]
        self._process = warm.Popen(self._words, env=ENV)
        stack.callback(self.close)

    def kill(self) -> None:
        """By SIGKILL; and start it again, from its newest checkpoint."""
        self.close()
        self._process = warm.Popen(self._words, env=ENV)

    def versions(self, root: str = "") -> list[str]:
        folder = f"{self.exports}/{root}"
        versions = list_versions(folder)
        withheld = withheld_versions(folder, versions)
        return [version for version in versions if version not in withheld]

    def publish(self, action: str, **more: str) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(MonolithError), ControlClient(self.model_dir) as job:
                if job.publish(action, **more):
                    return
            assert time.monotonic() < end, action
            time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


@dataclass
class Broken:
    """An answer whose rows break its claim."""

    claim: dict[str, Any]
    least: float
    most: float


@dataclass
class Client:
    """Asks one server for all rows, again and again, and compares."""

    port: int
    known: int = 0
    unknown: int = 0
    broken: list[Broken] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._body = json.dumps(
            {
                "inputs": [
                    {"name": "item", "datatype": "INT64", "shape": [IDS], "data": list(range(1, IDS + 1))}
                ]
            }
        ).encode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                status, answer, _ = ask_http(self.port, "POST", f"/v2/models/{MODEL}/infer", self._body)
            except OSError:
                continue
            if status != 200:
                continue
            values = answer["outputs"][0]["data"]
            claim = answer["parameters"]
            if claim.get("freshness") == "unknown":
                assert claim["freshness_reason"]
                self.unknown += 1
                continue
            self.known += 1
            self.steps.add(claim["step"])
            newest = claim.get("newest_step", float("inf"))
            if not claim["step"] <= min(values) or not max(values) <= newest:
                self.broken.append(Broken(claim, min(values), max(values)))

    def reaches(self, step: int) -> bool:
        return bool(self.steps) and max(self.steps) >= step

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)


class ServeProcess:
    """`monolith serve` of the exports of a run, which it follows."""

    def __init__(self, stack: ExitStack, run: StepRun, *flags: str, until_line: str = "ask it") -> None:
        flags = (*flags, "--follow", run.url, "--poll", "0.1")
        words = ["-m", "monolith", "serve", run.exports, "--port", "0", *flags]
        self._process = warm.Popen(words, stdout=warm.PIPE, env=ENV)
        stack.callback(self.close)
        self.port = 0
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("http"):
                self.port = int(line.split()[1].rpartition(":")[2])
            if line.startswith(until_line):
                break

    def close(self) -> None:
        self._process.kill()
        self._process.wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def check(askers: Sequence[Client]) -> None:
    for asker in askers:
        asker.close()
    for asker in askers:
        assert asker.known > 20
        assert asker.broken == [], f"{len(asker.broken)} of {asker.known} claims are broken"


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_no_row_breaks_the_claim_of_its_answer(stack: ExitStack, tmp_path: Path, rounds: int) -> None:
    run = StepRun(stack, tmp_path)
    until(run.versions, "nothing was exported")
    asker = Client(ServeProcess(stack, run).port)
    stack.callback(asker.close)
    for _ in range(rounds):
        newest = int(run.versions()[-1])
        until(lambda newest=newest: asker.reaches(newest + 30), "the server does not follow")
        run.kill()
        time.sleep(0.2)
        reached = max(asker.steps)
        until(lambda reached=reached: asker.reaches(reached + 30), "the server does not follow the restart")
        asked = asker.known
        until(lambda: len(run.versions()) >= 2, "no second version was exported")
        back = run.versions()[-2]
        run.publish("rollback", version=back)
        asker.steps.clear()
        until(lambda asked=asked, back=back: asker.known > asked + 20 and int(back) in asker.steps)
        run.publish("resume")
        asker.steps.clear()
        until(lambda back=back: asker.reaches(int(back) + 60), "the server does not follow the resumed run")
    check([asker])


@pytest.mark.soak
def test_no_row_breaks_the_claim_of_an_entry_that_asks_serving_servers(
    stack: ExitStack, tmp_path: Path
) -> None:
    run = StepRun(stack, tmp_path, "--export.shards", "2")
    until(lambda: run.versions("entry"), "nothing was exported")
    found = ("--discovery", f"files://{tmp_path}/registry")
    for shard in ("0", "1"):
        ServeProcess(stack, run, "--role", "ps", "--shard", shard, *found, until_line="rows")
    asker = Client(ServeProcess(stack, run, "--role", "entry", *found).port)
    stack.callback(asker.close)
    newest = int(run.versions("entry")[-1])
    until(lambda: asker.reaches(newest + 30), "the entry does not follow")
    run.kill()
    time.sleep(0.2)
    reached = max(asker.steps)
    until(lambda: asker.reaches(reached + 30), "the entry does not follow the restart")
    back = run.versions("entry")[-2]
    run.publish("rollback", version=back)
    asker.steps.clear()
    until(lambda: int(back) in asker.steps, "the entry is not rolled back")
    run.publish("resume")
    asker.steps.clear()
    until(lambda: asker.reaches(int(back) + 60), "the entry does not follow the resumed run")
    check([asker])
