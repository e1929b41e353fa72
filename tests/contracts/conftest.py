"""For contracts: what would be compiled for long is left to `make soak`, and tests whose numbers are those
of float32 rows are not run with others."""

from __future__ import annotations

import pytest
from contracts.tables import is_emulated


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if not (item.get_closest_marker("float32_rows") and _dtypes(item))
        and not (item.get_closest_marker("exact_rows") and "int8" in _dtypes(item))
    ]
    for item in items:
        if item.get_closest_marker("many_layouts") and any(map(is_emulated, item.callspec.params.values())):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.soak)


def _dtypes(item: pytest.Item) -> set[str]:
    """Return the narrow `embedding_dtype` of the test's tables, if they have one."""
    parameters = item.callspec.params.values()  # type: ignore[attr-defined]
    return {one.embedding_dtype for one in parameters if hasattr(one, "embedding_dtype")}
