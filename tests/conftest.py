"""For all tests: real servers, started when asked for; logging and random numbers as at first; no hurry."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.properties import register_profiles

TESTS = Path(__file__).parent
pytest_plugins = (
    "services.fixtures",
    "services.gpu_tests",
    "services.missing_packages",
    "services.scheduling",
    "services.shared_rewriting",
    "services.slowest_files",
    "services.warm",
)

SLOW_FILES = (
    "simulation/test_worlds.py",
    "cluster/launch/test_ray.py",
    "runtime/test_rank_processes.py",
    "runtime/test_launch.py",
    "contracts/test_discovery.py",
    "cluster/test_ray_discovery.py",
    "cluster/test_ray_connection.py",
    "data/test_kafka.py",
    "contracts/test_source.py",
    "runtime/test_rebalancing.py",
    "faults/test_kill_kafka.py",
    "faults/test_kill_fleet.py",
    "faults/test_kill_trainer.py",
    "runtime/test_elastic_workers.py",
    "runtime/test_fleet.py",
    "runtime/test_failover.py",
    "runtime/test_ranks.py",
    "faults/test_kill_ranks.py",
    "docs/test_guides.py",
    "cli/test_train.py",
    "bench/examples/demo/test_demo.py",
    "model/test_learning.py",
    "runtime/test_expiring.py",
    "cli/test_run_settings.py",
    "cluster/test_consul.py",
    "checkpoint/offline/test_rewriting.py",
    "cluster/test_zookeeper.py",
    "checkpoint/test_tables.py",
    "data/formats/test_csv.py",
    "runtime/test_trainer.py",
    "docs/test_examples.py",
    "faults/test_bad_disks.py",
    "data/join/test_joiner.py",
    "tools/test_check_imports.py",
)
"""Begun first, in this order, so that no worker is left with one of them when the others are done."""

register_profiles()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {ending: turn for turn, ending in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: (turns.get(item.path.relative_to(TESTS).as_posix(), len(turns)), item.path))


def pytest_configure() -> None:
    gc.disable()  # while tests are collected: what they define and import stays


def pytest_collection_finish() -> None:
    gc.freeze()  # so that none of it is looked at whenever garbage is collected
    gc.enable()


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was: a command under test configures it for its whole process."""
    root = logging.getLogger()
    # A command that a fixture of a module ran has left its handler, and with --quiet its level.
    for handler in [one for one in root.handlers if one.get_name() == "monolith"]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """The same random numbers for every test, whichever ran before: what fails once fails again."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds
