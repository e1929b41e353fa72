"""A server with a small model, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two models, `linear` with versions 1 and 2, and `broken` without any that loads."""

    def broken() -> LinearModel:
        raise OSError("no such device")

    catalog = LinearCatalog(
        {
            "linear": {
                version: lambda version=version: LinearModel(version=version, bias=100 * int(version) - 100)
                for version in ("1", "2")
            },
            "broken": {"1": broken},
        }
    )
    with serving(catalog, policy="all") as server:
        yield server
