"""Runs whose data is read by a process of its own, as `monolith train` starts it on many cores."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from monolith.data import MemorySource, Pipeline
from monolith.errors import ConfigError
from monolith.runtime import process, task_setup
from monolith.runtime.config import ThreadsConfig, settle
from monolith.runtime.config_loading import load_run_config
from monolith.runtime.process import reads_elsewhere
from monolith.runtime.task_setup import make_task, set_threads
from monolith.train import Task
from monolith.train.task import Mode

RECORDS, BATCH = 6000, 50
CODE: Mapping[str, Any] = {
    "features": {"user": {"kind": "string"}, "item": {"kind": "int"}},
    "labels": {"click": {}},
    "model": {"type": "deepfm", "dim": 4, "hidden": [8]},
    "task": {"batch_size": BATCH},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(5)
    lines = [f"u{draw.randrange(300)},{draw.randrange(90)},{draw.randrange(2)}" for _ in range(RECORDS)]
    found = tmp_path_factory.mktemp("data") / "clicks.csv"
    found.write_text("\n".join(["user,item,click", *lines]) + "\n")
    return found


def command(path: Path, model_dir: Path, *, elsewhere: bool) -> list[str]:
    config = model_dir.with_suffix(".json")
    train = {"model_dir": str(model_dir), "deterministic": True, "epochs": 2, "save": {"steps": 40}}
    config.write_text(json.dumps({**CODE, "data": {"path": str(path), "threads": 2}, "train": train}))
    words = [sys.executable, "-m", "monolith", "train", "--config", str(config), "--json", "--no-summaries"]
    return [*words, "--train.reading-process", str(elsewhere).lower()]


def train(path: Path, model_dir: Path, *, elsewhere: bool) -> dict[str, Any]:
    done = subprocess.run(
        command(path, model_dir, elsewhere=elsewhere),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_same(run: Path, other: Path) -> None:
    """Check that two runs have learned the same rows and weights, to the bit."""
    last = f"model.ckpt-{2 * RECORDS // BATCH}"
    words = [sys.executable, "-m", "monolith", "checkpoint", "diff", str(run / last), str(other / last)]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=300, check=True)
    tables = json.loads(done.stdout)["tables"]
    assert {one["name"]: one["rows_after"] for one in tables} == {"user": 300, "item": 90}
    assert not any(one["added"] or one["removed"] or one["changed"] for one in tables)
    for part in ("dense", "optimizer"):
        one, two = (next(folder.glob(f"{last}.{part}-*")).read_bytes() for folder in (run, other))
        assert one == two


def test_a_run_learns_the_same_whichever_process_reads(path: Path, tmp_path: Path) -> None:
    here = train(path, tmp_path / "here", elsewhere=False)
    there = train(path, tmp_path / "there", elsewhere=True)
    assert there["examples"] == here["examples"] == 2 * RECORDS
    assert_same(tmp_path / "there", tmp_path / "here")


def test_a_killed_run_resumes_and_trains_every_record_once(path: Path, tmp_path: Path) -> None:
    words = command(path, tmp_path / "killed", elsewhere=True)
    for kills in (1, 2):
        run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (tmp_path / f"killed/model.ckpt-{40 * kills}.manifest").exists():
            assert time.monotonic() < deadline
            assert run.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        run.wait()
    report = train(path, tmp_path / "killed", elsewhere=True)
    assert report["step"] == 2 * RECORDS // BATCH
    train(path, tmp_path / "whole", elsewhere=False)
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_mistake_in_the_data_ends_the_run_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("user,itm,click\na,7,1\n")
    words = command(tmp_path / "clicks.csv", tmp_path / "run", elsewhere=True)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode
    assert "no column 'item'" in done.stderr
    assert "Traceback" not in done.stderr


# Which runs have such a process


class ByHand(Task):
    """A task in Python."""

    def dataset(self, mode: Mode) -> Any:  # noqa: ARG002
        return Pipeline(MemorySource({"user": [1]}, batch_size=1))

    def model(self) -> torch.nn.Module:
        raise NotImplementedError


def wanted(changes: Mapping[str, Any] = MappingProxyType({}), task: Task | None = None) -> bool:
    config = settle(load_run_config(code={**CODE, "data.path": "clicks.csv", **changes}))
    return reads_elsewhere(make_task(config) if task is None else task, config)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (process, task_setup):
        monkeypatch.setattr(module, "usable_cores", lambda: 16)
    monkeypatch.setattr(process, "may_fork", lambda: True)


@pytest.mark.usefixtures("many_cores")
def test_a_config_over_files_has_one_where_there_are_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted()
    assert not wanted({"train.reading_process": False})
    assert not wanted({"data.path": None, "data.watch": "logs/*.csv"})
    assert not wanted(task=ByHand())
    assert wanted({"train.reading_process": True}, ByHand())
    history = {"kind": "sequence", "of": "item", "by": "user", "max": 5}
    features = {**CODE["features"], "seen": history}
    assert not wanted({"features": features, "examples.event_time": "time"})
    monkeypatch.setattr(process, "may_fork", lambda: False)
    assert not wanted()
    with pytest.raises(ConfigError, match=r"train\.reading_process: a process that has threads"):
        wanted({"train.reading_process": True})


def test_with_few_cores_threads_read(many_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(process, "usable_cores", lambda: 4)
    assert not wanted()


@pytest.mark.usefixtures("many_cores")
def test_torch_leaves_every_second_of_many_cores_to_what_reads() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(ThreadsConfig(), shares_cores=True)
        assert torch.get_num_threads() == 8
        set_threads(replace(ThreadsConfig(), intra_op=3), shares_cores=True)
        assert torch.get_num_threads() == 3
        set_threads(ThreadsConfig())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
