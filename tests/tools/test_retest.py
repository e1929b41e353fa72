"""Failed tests are run again if they are few, and fail if they fail again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "retest.py"
BARE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
FAILS_ONCE = """
from pathlib import Path

def test_once():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")

def test_never():
    pass
"""


def _pytest(folder: Path) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=folder, env=BARE, check=False
    ).returncode


def _again(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL)], cwd=folder, env=BARE, capture_output=True, text=True, check=False
    )


def test_a_test_that_passes_by_itself_passes(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FAILS_ONCE)
    assert _pytest(tmp_path) == 1
    again = _again(tmp_path)
    assert again.returncode == 0
    assert "test_some.py::test_once" in again.stdout
    assert "1 passed" in again.stdout


def test_a_test_that_fails_again_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_it():\n    assert False\n")
    assert _pytest(tmp_path) == 1
    assert _again(tmp_path).returncode == 1


@pytest.mark.parametrize("tests", [0, 4])
def test_nothing_is_run_if_no_test_failed_or_many_did(tmp_path: Path, tests: int) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_passes():\n    pass\n\n"
        f"@pytest.mark.parametrize('one', range({tests}))\ndef test_it(one):\n    assert False\n"
    )
    _pytest(tmp_path)
    again = _again(tmp_path)
    assert again.returncode == 1
    assert ("no test has failed" if tests == 0 else "4 tests failed") in again.stderr
