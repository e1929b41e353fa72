"""Which tests share a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from services.scheduling import TOGETHER, goes_with

ROOT = Path(__file__).parents[2]


def test_a_test_goes_with_its_file() -> None:
    assert goes_with("tests/data/test_csv.py::test_it[a::b]") == "tests/data/test_csv.py"


@pytest.mark.parametrize(
    ("server", "user"), [(name, one) for name, users in TOGETHER.items() for one in users]
)
def test_files_and_tests_that_use_one_server_go_together_and_exist(server: str, user: str) -> None:
    path, _, test = user.partition("::")
    assert goes_with(f"{path}::{test or 'test_it'}[a]") == server
    assert f"def {test}(" in (ROOT / path).read_text() if test else (ROOT / path).exists()


def test_the_rest_of_a_file_goes_to_other_workers() -> None:
    path = "tests/runtime/test_launch.py"
    assert goes_with(f"{path}::test_ctrl_c_saves_and_stops_all") == path
