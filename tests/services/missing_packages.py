"""A test that fails for want of an optional package is skipped, with the package's name; in CI it fails.

The reason is looked for in the whole report: a package may be missing in a fixture, in a simulated machine or
in a process that the test started. It counts only if that package is really not installed here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

_MISSING = re.compile(r"No module named '(?!monolith)(\w+)|needs the package '([\w-]+)")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    report = yield
    return _skipped_without_package(report, collector)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    return _skipped_without_package(report, item)


def _skipped_without_package(report: Any, node: pytest.Item | pytest.Collector) -> Any:
    """Return a report, changed to a skip if its test failed because a package is not installed."""
    if not report.failed or os.environ.get("CI", "").lower() in ("1", "true"):
        return report
    told = "\n".join([str(report.longrepr), *(text for _, text in report.sections)])
    for module, package in _MISSING.findall(told):
        if _is_absent(module, package):
            why = f"Skipped: {module or package} is not installed; make setup installs what tests need"
            report.outcome, report.longrepr = "skipped", (str(node.path), 0, why)
            break
    return report


def _is_absent(module: str, package: str) -> bool:
    if module:
        return importlib.util.find_spec(module) is None
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False
