"""Which tests share a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from services.scheduling import TOGETHER, goes_with

ROOT = Path(__file__).parents[2]


def test_a_test_goes_with_its_file() -> None:
    assert goes_with("tests/data/test_csv.py::test_it[a::b]") == "tests/data/test_csv.py"


@pytest.mark.parametrize(
    ("server", "path"), [(name, one) for name, files in TOGETHER.items() for one in files]
)
def test_files_that_use_one_server_go_together_and_are_there(server: str, path: str) -> None:
    assert goes_with(f"{path}::test_it") == server
    assert (ROOT / path).exists()
