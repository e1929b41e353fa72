"""For all tests: real servers, started when asked for; logging and random numbers as at first; no hurry."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest_plugins = ("services.fixtures", "services.slowest_files")

SLOW_FILES = (
    "test_guides.py",
    "test_launching.py",
    "test_fleet.py",
    "test_kill_trainer.py",
    "test_kill_fleet.py",
    "test_train_roles.py",
    "test_demo.py",
    "test_data_service.py",
    "test_remote.py",
    "test_learning.py",
    "test_ray.py",
    "test_zookeeper.py",
    "test_kafka.py",
    "test_examples.py",
)
"""Begun first, so that no worker is left with one of them when the others are done."""

settings.register_profile("unhurried", settings.default, deadline=None)  # machines are slow at times
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was: a command under test configures it for its whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """The same random numbers for every test, whichever ran before: what fails once fails again."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
