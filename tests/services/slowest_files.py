"""Which files of tests take longest, said at the end of a run: so that one sees where minutes come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

SHOWN = 10


def slowest(reports: Iterable[pytest.TestReport]) -> list[tuple[str, float]]:
    """Return files and the seconds their tests take, set up and taken down; the longest first."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    return seconds.most_common(SHOWN)  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for kind in terminalreporter.stats.values()
        for report in kind
        if isinstance(report, pytest.TestReport)
    ]
    found = slowest(reports)
    if len(found) < SHOWN:
        return  # somebody runs a few files, and sees for themselves
    terminalreporter.section(f"slowest {SHOWN} files")
    for path, seconds in found:
        terminalreporter.write_line(f"{seconds:7.1f} s  {path}")
