"""`pytest --gpu` collects the tests that use a GPU if there is one, and no others.

Such tests name what has a GPU in it: the devices of `services.emulated_cuda`, the tables and stores of the
contracts, or CUDA itself. They are found by these words, so no list has to be kept.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_GPU = re.compile(r"emulated_cuda|(torch|monolith|table|feature)\.cuda|table_classes|STORES|is_cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="collect only tests that use a GPU if there is one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--gpu") or collection_path.suffix != ".py":
        return None
    return None if uses_gpu(collection_path) else True


def uses_gpu(file: Path) -> bool:
    """Return whether the tests of a file use a GPU if there is one."""
    return _GPU.search(file.read_text("utf-8")) is not None
