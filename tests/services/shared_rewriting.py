"""Test files are rewritten for pytest's assertions once, not once by every worker.

Each worker reads all tests before the first one runs, and in a new clone most of that time goes into
rewriting, of which Python keeps the result on disk. So each begins with another folder: what it comes to
later, somebody else has rewritten by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def rotated(folders: Sequence[str], worker: int, workers: int) -> list[str]:
    """Return all folders, from another one on for each worker."""
    first = len(folders) * worker // workers
    return [*folders[first:], *folders[:first]]


def pytest_configure(config: pytest.Config) -> None:
    about = getattr(config, "workerinput", None)
    if about is None or config.args != config.getini("testpaths"):
        return  # one process, or somebody who wants a few tests
    folders = sorted({str(TESTS / path.relative_to(TESTS).parts[0]) for path in TESTS.rglob("test_*.py")})
    config.args = rotated(folders, int(about["workerid"].removeprefix("gw")), about["workercount"])
