"""The manifest of a run holds what a model came from, and no secret."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from train.tasks import Clicks

from monolith.runtime.report import RUN_MANIFEST, read_run_manifest, write_run_manifest
from monolith.train import TrainConfig


def test_no_secret_of_the_command_line_is_written_and_only_the_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "monolith",
        "train",
        "t:T",
        "--security.token",
        "hunter2",
        "--kafka.password=hunter2",
        "--steps",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", words)
    path = tmp_path / RUN_MANIFEST
    path.write_text(json.dumps({"starts": [{"command": words}]}))  # of an older version
    path.chmod(0o644)
    write_run_manifest(str(tmp_path), Clicks(), TrainConfig(model_dir=str(tmp_path)), 0, 0.0)
    assert "hunter2" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    newest, oldest = read_run_manifest(str(tmp_path))
    assert newest["command"] == oldest["command"]
    assert newest["command"][3:] == [
        "--security.token",
        "********",
        "--kafka.password=********",
        "--steps",
        "3",
    ]
