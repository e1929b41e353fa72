from __future__ import annotations

import io
from typing import Any

import pytest
from services.slowest_files import pytest_terminal_summary, slowest


def report(test: str, seconds: float, when: Any = "call") -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, "passed", None, when, duration=seconds)


def test_seconds_are_added_up_by_file_and_the_longest_comes_first() -> None:
    reports = [
        report("a.py::one", 1.0),
        report("b.py::one", 2.0),
        report("a.py::two[x::y]", 1.0, "setup"),
        report("a.py::two[x::y]", 0.5, "teardown"),
    ]
    assert slowest(reports) == [("a.py", 2.5), ("b.py", 2.0)]


@pytest.mark.parametrize(("files", "shown"), [(12, 10), (9, 0)])
def test_ten_are_shown_where_there_are_as_many(files: int, shown: int, pytestconfig: pytest.Config) -> None:
    screen = io.StringIO()
    terminal = pytest.TerminalReporter(pytestconfig, screen)
    terminal.stats = {
        "passed": [report(f"{number}.py::one", number) for number in range(files)],
        "deselected": [object()],
    }
    pytest_terminal_summary(terminal)
    lines = [line for line in screen.getvalue().splitlines() if ".py" in line]
    assert lines[:1] == ["   11.0 s  11.py"][:shown]
    assert len(lines) == shown
