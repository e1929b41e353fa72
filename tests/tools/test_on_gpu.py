"""tools/on_gpu.sh with a stand-in for Python: what it runs, prints and returns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "on_gpu.sh"
PYTHON = """#!/bin/bash
echo "$*" | tail -1 >> {calls}
case "$*" in *"{fails}"*) exit 1;; esac
"""


def run(folder: Path, *arguments: str, fails: str = "nothing") -> tuple[int, str, str]:
    """Return the exit status, the output and the commands that were run."""
    (folder / "wheels").mkdir()
    (folder / "wheels" / "some.whl").touch()
    calls, python = folder / "calls", folder / "python"
    python.write_text(PYTHON.format(calls=calls, fails=fails))
    python.chmod(0o755)
    found = subprocess.run(
        [SCRIPT, *arguments],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": str(python),
            "WHEELS": str(folder / "wheels"),
            "RESULTS": str(folder / "results"),
            "COMMIT": "abc123",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout, calls.read_text() if calls.exists() else ""


def test_everything_is_run_and_summed_up(tmp_path: Path) -> None:
    status, said, calls = run(tmp_path, "all", "-k", "ranks")
    assert status == 0
    assert said.startswith("commit abc123")
    assert [line.split(" (")[0] for line in said.splitlines() if line.startswith("ok")] == [
        "ok      GPU",
        "ok      setup",
        "ok      tests",
        "ok      bench table",
        "ok      bench train",
        "ok      bench attention",
        "ok      bench run",
        "ok      bench stream",
    ]
    assert "some.whl" in calls
    assert "-m not soak -k ranks" in calls
    assert {file.name for file in (tmp_path / "results").iterdir()} == {
        "table.json",
        "train.json",
        "attention.json",
        "run.json",
        "stream.json",
    }
    assert "monolith bench attention --device cuda --json" in calls
    assert "monolith bench stream --scale 1 --device cuda --json" in calls


@pytest.mark.parametrize(
    ("fails", "measures"), [("--gpu", True), ("--no-build-isolation", False), ("cuda.is_available", False)]
)
def test_a_failure_is_in_the_summary_and_the_exit_status(tmp_path: Path, fails: str, measures: bool) -> None:
    status, said, calls = run(tmp_path, fails=fails)
    assert status == 1
    assert said.count("FAILED") == 1
    assert ("bench" in calls) == measures


def test_a_step_alone(tmp_path: Path) -> None:
    _, said, calls = run(tmp_path, "test", "-x")
    assert "setup" not in said
    assert "bench" not in calls


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    status, _, calls = run(tmp_path, "everything")
    assert (status, calls) == (2, "")
