"""What becomes of tests that need packages which are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = {
    "test_module.py": "import absent_package\n",
    "test_call.py": "def test_it():\n    import absent_package\n",
    "test_fixture.py": (
        "import pytest\n@pytest.fixture\ndef one():\n    import absent_package\ndef test_it(one): pass\n"
    ),
    "test_printed.py": (
        "import sys\ndef test_it():\n"
        "    sys.stderr.write(\"serving needs the package 'absent-package', which is not installed\")\n"
        "    assert 2 == 0\n"
    ),
    "test_installed.py": "def test_it(): raise ImportError(\"No module named 'pytest'\")\n",
    "test_own.py": "def test_it():\n    import monolith.absent\n",
    "test_other.py": "def test_it(): assert False\n",
}


@pytest.mark.parametrize(
    ("ci", "counted"), [("", "3 failed, 4 skipped"), ("true", "5 failed, 2 errors")], ids=["here", "in CI"]
)
def test_they_are_skipped_with_its_name_and_fail_in_ci(tmp_path: Path, ci: str, counted: str) -> None:
    """In a process of its own: whether a module can be imported depends on what is imported already."""
    for name, body in FILES.items():
        (tmp_path / name).write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "services.missing_packages", "-ra", "--rootdir=."]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--continue-on-collection-errors", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert counted in found.stdout
    assert ("absent_package is not installed" in found.stdout) == (not ci)
    assert ("absent-package is not installed; make setup" in found.stdout) == (not ci)
