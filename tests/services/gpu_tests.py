"""`pytest --gpu` collects the tests that use a GPU if there is one, and no others.

Such tests name what has a GPU in it: the devices of `services.emulated_cuda`, the tables and stores of the
contracts, or CUDA itself. They are found by these words, so no list has to be kept.

A machine with a GPU may lack packages that other tests need. A test that cannot import one is skipped, with
the name of the package: `pytest --gpu` fails only for what is wrong on the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_GPU = re.compile(r"emulated_cuda|(torch|monolith|table|feature)\.cuda|table_classes|STORES|is_cuda")
_MISSING = re.compile(r"No module named '(?!monolith)(\w+)|pip install 'monolith-recsys\[(\w+)\]'")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="collect only tests that use a GPU if there is one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--gpu") or collection_path.suffix != ".py":
        return None
    return None if uses_gpu(collection_path) else True


def uses_gpu(file: Path) -> bool:
    """Return whether the tests of a file use a GPU if there is one."""
    return _GPU.search(file.read_text("utf-8")) is not None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    report = yield
    return _skipped_without_package(report, collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    failed_import = call.excinfo is not None and call.excinfo.errisinstance(ImportError)
    return _skipped_without_package(report, item) if failed_import else report


def _skipped_without_package(report: Any, node: pytest.Item | pytest.Collector) -> Any:
    """Return a report, changed to a skip if all that is wrong is a package that is not installed."""
    if report.failed and node.config.getoption("--gpu"):
        missing = _MISSING.search(str(report.longrepr))
        if missing is not None:
            report.outcome = "skipped"
            report.longrepr = (str(node.path), 0, f"Skipped: {missing[1] or missing[2]} is not installed")
    return report
