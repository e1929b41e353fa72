"""`monolith data dispatcher` and `monolith data worker`, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from monolith.cli.data_service import (
    DataDispatcherOptions,
    DataWorkerOptions,
    dispatcher,
    find_function,
    read_token,
    worker,
)
from monolith.errors import ConfigError

pytest.importorskip("pyarrow")

SOURCE = """
from monolith.data import Records
from monolith.tensors import RaggedTensor

class Lines:
    def __init__(self, path):
        self._numbers = [int(line) for line in open(path)]
        self._next = 0
    def __iter__(self):
        while self._next < len(self._numbers):
            self._next += 1
            yield Records(1, {"id": RaggedTensor.from_list([[self._numbers[self._next - 1]]])})
    def position(self):
        return {"next": self._next}
    def restore(self, position):
        self._next = position["next"]
    def close(self):
        pass
"""


def start(folder: Path, function: str, options: object) -> tuple[subprocess.Popen[str], str]:
    """Run a command in `folder`; return its process and the address it printed."""
    names = "import sys; from pathlib import PosixPath; from monolith.cli.data_service import *; "
    code = f"{names} sys.exit({function}({options!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    role, _, address = process.stdout.readline().strip().partition(" ")
    assert role == function
    return process, address


def test_files_are_read_by_a_worker_and_both_stop_when_told(tmp_path):
    from monolith.data.service import DataServiceSource

    (tmp_path / "lines_source.py").write_text(SOURCE)
    (tmp_path / "token").write_text("secret\n")
    for name, lines in {"a": "1\n2\n", "b": "3\n"}.items():
        (tmp_path / f"{name}.txt").write_text(lines)
    token = tmp_path / "token"
    first, address = start(
        tmp_path,
        "dispatcher",
        DataDispatcherOptions(splits=(str(tmp_path / "*.txt"),), folder="job", port=0, token_file=token),
    )
    second, _ = start(
        tmp_path,
        "worker",
        DataWorkerOptions(dispatcher=address, source="lines_source:Lines", token_file=token),
    )
    try:
        source = DataServiceSource(address, "one", token="secret", patience=timedelta(seconds=20))
        assert sorted(some["id"].flat_values.item() for some in source) == [1, 2, 3]
    finally:
        for process in (second, first):
            process.send_signal(signal.SIGTERM)
    for process in (second, first):
        assert process.wait(20) == 0
        process.stdout.close()


def test_what_cannot_be_run_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="no file matches"):
        dispatcher(DataDispatcherOptions(splits=(str(tmp_path / "*.none"),), folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="must be module:function"):
        worker(DataWorkerOptions(dispatcher="127.0.0.1:1", source="json"))
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        find_function("json:nothing")
    with pytest.raises(ConfigError, match="cannot read the token file"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(tmp_path / "empty")
