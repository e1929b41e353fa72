"""Mistakes in a task of one's own, as a person meets them: a file of records, a task, a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from services import warm

TASK = """
import os
from monolith.data import BatchSpec, FileSource, Pipeline, format_of
from monolith.model import DeepFM
from monolith.train import Mode, Task
from torch import nn

SPEC = BatchSpec(ids=("user", "item"), event_time=None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = DeepFM(["user", "item"], dim=2, hidden=(2,), threads=1)

    def forward(self, batch):
        if os.environ.get("MISTAKE") == "forward":
            return self.inner(batch) + undefined
        logits = self.inner(batch)
        return logits.sum() if os.environ.get("MISTAKE") == "scalar" else logits


class Clicks(Task):
    def dataset(self, mode):
        path = f"{os.path.dirname(__file__)}/clicks.csv"
        if os.environ.get("MISTAKE") == "dataset" and mode is not Mode.TRAIN:
            path = path + 5
        return Pipeline(FileSource([path], format_of(path), batch_size=10)).to_batches(SPEC)

    def model(self):
        return Model()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TASK)
    rows = [f"{number % 7},{number % 5},{number % 2}\n" for number in range(40)]
    (tmp_path / "clicks.csv").write_text("user,item,label\n" + "".join(rows))
    return tmp_path


def monolith(folder: Path, *words: str, mistake: str = "") -> tuple[int, str]:
    """Run a command in a process of its own; return its status, and what it said on standard error."""
    ran = warm.run(
        ["-m", "monolith", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "MISTAKE": mistake, "HOME": str(folder)},
        timeout=240,
    )
    return ran.returncode, ran.stderr


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "monolith: " in line]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TASK.splitlines(), 1) if text in line)


def test_each_command_names_the_line_of_a_task_that_raises(folder: Path) -> None:
    task = ("mine.py:Clicks", "--model-dir", "m", "--threads", "1")
    status, printed = monolith(folder, "train", *task, "--no-summaries", mistake="forward")
    here = re.escape(f"mine.py:{line_of('undefined')}")
    assert status == 2, printed
    assert re.search(rf"{here}, in forward: NameError: name 'undefined' is not defined", errors(printed)[-1])
    assert "Traceback" not in printed

    status, printed = monolith(folder, "train", *task, "--no-summaries")
    assert status == 0, printed
    for command in (("evaluate",), ("predict", "--to", "p.csv")):
        for mistake, text in (("forward", "undefined"), ("dataset", "path + 5")):
            status, printed = monolith(folder, *command, *task, "--quiet", mistake=mistake)
            assert status == 2, printed
            assert f"mine.py:{line_of(text)}, in {mistake}: " in errors(printed)[-1]
            assert "Traceback" not in printed


def test_a_worker_that_was_launched_names_the_line_too(folder: Path) -> None:
    words = ("train", "mine.py:Clicks", "--launch", "local", "--num-ps", "1", "--num-workers", "1")
    status, printed = monolith(
        folder, *words, "--model-dir", "m", "--no-summaries", "--threads", "1", mistake="scalar"
    )
    assert status == 2, printed
    told = [line for line in printed.splitlines() if "returns a tensor of shape ()" in line]
    assert any(f"mine.py:{line_of('def forward')}" in line for line in told), printed
    assert "Traceback" not in printed
