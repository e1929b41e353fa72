"""For all tests: real servers, started when first asked for, and logging as each test found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest_plugins = ("services.fixtures",)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was: a command under test configures it for its whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
