"""For contracts: what would be compiled for long is left to `make soak`."""

from __future__ import annotations

import pytest
from contracts.tables import is_emulated


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("many_layouts") and any(map(is_emulated, item.callspec.params.values())):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.soak)
