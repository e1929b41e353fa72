"""Which tests `pytest --gpu` collects."""

from __future__ import annotations

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
