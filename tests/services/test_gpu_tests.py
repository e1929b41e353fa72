"""Which tests `pytest --gpu` collects, and what it does without the packages of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from services.gpu_tests import uses_gpu

TESTS = Path(__file__).parents[1]
ABOUT_GPUS = [path for path in TESTS.rglob("test_*.py") if "cuda" in str(path) or "device_rows" in path.name]


@pytest.mark.parametrize("file", ABOUT_GPUS, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_a_file_about_gpus_is_collected(file: Path) -> None:
    assert uses_gpu(file)


def test_other_files_are_not() -> None:
    assert not uses_gpu(TESTS / "test_import.py")


def test_a_test_that_needs_an_absent_package_is_skipped_and_another_error_is_not(tmp_path: Path) -> None:
    """In a process of its own: whether a module can be imported depends on what is imported already."""
    body = "# torch.cuda\n"
    (tmp_path / "test_module.py").write_text(body + "import absent_package\n")
    (tmp_path / "test_call.py").write_text(body + "def test_it():\n    import absent_package\n")
    (tmp_path / "test_wrong.py").write_text(body + "def test_it():\n    import monolith.absent\n")
    (tmp_path / "test_other.py").write_text("def test_it(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "services.gpu_tests", "--gpu", "-ra", "--rootdir=."]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "absent_package is not installed" in found.stdout
    assert "1 failed, 2 skipped" in found.stdout
