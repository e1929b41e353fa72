"""For all tests: real servers, started when first asked for, logging as each test found it, and no hurry."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = ("services.fixtures",)

settings.register_profile("unhurried", settings.default, deadline=None)  # machines are slow at times
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was: a command under test configures it for its whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
