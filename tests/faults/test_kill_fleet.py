"""Any process of a fleet may be killed at any moment: the next start goes on, every record trained once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from train.fleets import Tallied, read_model

TESTS = Path(__file__).parents[1]
BATCHES = 400
LIMIT = 120.0
MEMBERS = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts two servers and two workers by one command; in the end none of them runs."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        words = [
            *("train.fleets:Tallied", "--set", f"batches={BATCHES}", "--model-dir", str(tmp_path)),
            *("--launch", "local", "--num-ps", "2", "--num-workers", "2"),
            *("--save-steps", "20", "--no-summaries", "--threads", "1", "--quiet"),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "monolith", "train", *words],
            cwd=TESTS,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()  # its guardians end the others
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def member(model_dir: Path, role: str, index: int) -> int | None:
    """Return the process id of a member, not of its guardian."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            place = ["--cluster.role", role, "--cluster.index", str(index)]
            if str(model_dir) in words and place == words[-5:-1] and "guardian" not in " ".join(words):
                return int(folder.name)
    return None


def checkpoints(model_dir: Path) -> set[str]:
    return {path.name for path in model_dir.glob("model.ckpt-*.manifest")}


def wait_for(found: Callable[[], object], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not found():
        assert process.poll() is None, f"ended before {what}: {process.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def kill_one(start: Start, model_dir: Path, role: str, index: int, chance: random.Random) -> None:
    """Start a fleet, kill one of it when something new was saved, and see the others end."""
    before = checkpoints(model_dir)
    process = start()
    wait_for(lambda: checkpoints(model_dir) - before, process, "new checkpoint")
    pid = member(model_dir, role, index)
    assert pid is not None
    time.sleep(chance.uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert f"{role} {index}" in output


def finish(start: Start, model_dir: Path) -> None:
    """Train to the end of the data, and look at what the model was trained on."""
    process = start()
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    model = read_model(Tallied(batches=BATCHES), model_dir)
    assert model.step == BATCHES
    assert model.tally == dict.fromkeys(range(8 * BATCHES), 1.0)


def test_a_server_is_killed_and_every_record_is_trained_once(start: Start, tmp_path: Path) -> None:
    kill_one(start, tmp_path, "ps", 1, random.Random(1))
    finish(start, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_members_are_killed_again_and_again(start: Start, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for role, index in chance.sample(MEMBERS, 4):
        kill_one(start, tmp_path, role, index, chance)
    finish(start, tmp_path)
